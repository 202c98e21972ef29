//! Finds a file that two disks of a node have in common.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use cleave_config::Storage;
use cleave_disk::DiskSpec;

/// The files and devices of a disk, by what tells each from all others. They are looked at when the disk is opened, because a look at
/// the file of another disk may wait for a server that is silent.
#[derive(Debug, Default, Clone)]
pub(crate) struct OpenFiles(Vec<(PathBuf, (u64, u64))>);

impl OpenFiles {
    pub(crate) fn of(disk: &Storage) -> OpenFiles {
        let paths = disk.specs().iter().filter_map(DiskSpec::path);
        let identity = |path: &Path| {
            let found = fs::metadata(path).ok()?;
            Some(match found.file_type().is_block_device() {
                true => (0, found.rdev()),
                false => (found.dev(), found.ino()),
            })
        };
        let files = paths.filter_map(|path| Some((path.to_owned(), identity(path)?)));
        OpenFiles(files.collect())
    }

    /// Returns the path of a file that both have.
    pub(crate) fn shared_with(&self, other: &OpenFiles) -> Option<&Path> {
        let is_theirs = |identity| other.0.iter().any(|(_, theirs)| theirs == identity);
        let shared = self.0.iter().find(|(_, identity)| is_theirs(identity));
        shared.map(|(path, _)| path.as_path())
    }
}
