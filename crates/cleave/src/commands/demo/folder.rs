//! A folder that goes away with everything in it.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use cleave_host::Failure;
use rustix::fs::statvfs;

/// Space that a file system needs beside the image.
const SLACK_BYTES: u64 = 16 << 20;

/// Removed when dropped.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Makes one that only this user may enter, where there is room for an image.
    pub(super) fn new(parent: &Path, image_bytes: u64) -> Result<Folder, Failure> {
        let shown = parent.display();
        let free = statvfs(parent)
            .map(|found| found.f_bavail.saturating_mul(found.f_frsize))
            .map_err(|error| {
                Failure::input(format!(
                    "cannot use folder {shown}: {error}: name another with --dir"
                ))
            })?;
        if free < image_bytes.saturating_add(SLACK_BYTES) {
            return Err(Failure::input(format!(
                "{shown} has {} MiB free and the image takes {}: name another folder with --dir, or a \
                 smaller image with --size",
                free >> 20,
                image_bytes >> 20
            )));
        }
        Folder::make(parent).map_err(|error| {
            Failure::input(format!(
                "cannot make a folder in {shown}: {error}: name another with --dir"
            ))
        })
    }

    /// Its path.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    fn make(parent: &Path) -> io::Result<Folder> {
        let parent = std::path::absolute(parent)?;
        let id = std::process::id();
        let mut attempt = 0;
        loop {
            // Short: the path of the socket inside must fit into 107 bytes.
            let path = parent.join(format!("cleave-demo-{id}-{attempt}"));
            match DirBuilder::new().mode(0o700).create(&path) {
                // Left behind by an earlier process of that number, or laid there by somebody.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < 100 => {
                    attempt += 1
                }
                Err(error) => return Err(error),
                Ok(()) => return Ok(Folder(path)),
            }
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            crate::progress::note(&format!("cannot remove {}: {error}", self.0.display()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn is_private_and_goes_away_with_what_is_in_it() {
        let parent = tempfile::tempdir().unwrap();
        let folder = Folder::new(parent.path(), 1 << 20).unwrap();
        let second = Folder::new(parent.path(), 1 << 20).unwrap();
        assert_ne!(folder.path(), second.path());
        let mode = fs::metadata(folder.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        fs::write(folder.path().join("file"), "x").unwrap();
        drop((folder, second));
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn no_room_and_no_folder_are_told_with_a_remedy() {
        let parent = tempfile::tempdir().unwrap();
        let told = |path: &Path, bytes| Folder::new(path, bytes).unwrap_err().to_string();
        assert!(told(parent.path(), 1 << 60).contains("--size"));
        assert!(told(&parent.path().join("none"), 1).contains("--dir"));
    }
}
