//! The files of a node: one for each disk that is kept. A file is there whole, or not at all.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::spec::{DiskFile, FILE_BYTES_MAX};
use crate::failure::Failure;

/// The id of a disk, and its file or what is wrong with that.
pub(super) type Found = (String, Result<DiskFile, String>);

/// The folder of the files.
#[derive(Debug, Clone)]
pub(super) struct Files(PathBuf);

impl Files {
    /// Opens the folder, and makes it where there is none.
    pub(super) fn open(state: &Path) -> Result<Files, Failure> {
        let folder = state.join("disks");
        match DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
        {
            Ok(()) => Ok(Files(folder)),
            Err(error) => Err(Failure::input(format!(
                "cannot make {}: {error}: give another folder with --state",
                folder.display()
            ))),
        }
    }

    /// All disks that are kept, with what is wrong with the files that cannot be read.
    pub(super) fn load(&self) -> Result<Vec<Found>, Failure> {
        let unread =
            |error: io::Error| Failure::input(format!("cannot read {}: {error}", self.0.display()));
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.0).map_err(unread)? {
            let path = entry.map_err(unread)?.path();
            let is_ours = path.extension().is_some_and(|end| end == "toml");
            let id = path.file_stem().and_then(|stem| stem.to_str());
            if let (true, Some(id)) = (is_ours, id.filter(|id| super::is_id(id))) {
                found.push((id.to_owned(), read(&path)));
            }
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    /// Keeps a disk. When this returns, it survives a loss of power.
    pub(super) fn write(&self, id: &str, file: &DiskFile) -> io::Result<()> {
        let text = file.to_toml().map_err(io::Error::other)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            // It would not be read again.
            return Err(io::Error::other("it would be too long"));
        }
        // No id begins with a dot, so this is no disk's file.
        let beside = self.0.join(format!(".{id}.new"));
        let mut created = File::options();
        created.write(true).create(true).truncate(true).mode(0o600);
        let mut out = created.open(&beside)?;
        out.write_all(text.as_bytes())?;
        out.sync_all()?;
        fs::rename(&beside, self.path(id))?;
        self.sync()
    }

    /// Forgets a disk. That there is none is fine.
    pub(super) fn remove(&self, id: &str) -> io::Result<()> {
        match fs::remove_file(self.path(id)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(()) => self.sync(),
        }
    }

    fn path(&self, id: &str) -> PathBuf {
        self.0.join(format!("{id}.toml"))
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.0)?.sync_all()
    }
}

fn read(path: &Path) -> Result<DiskFile, String> {
    let named = |why: String| format!("{}: {why}: correct or remove it", path.display());
    let text = fs::metadata(path).and_then(|found| match found.len() {
        // A pipe would have its reader wait for ever, and a device may have no end.
        _ if !found.is_file() => Err(io::Error::other("it is no file")),
        0..=FILE_BYTES_MAX => fs::read_to_string(path),
        _ => Err(io::Error::other("it is too long")),
    });
    let text = text.map_err(|error| named(error.to_string()))?;
    DiskFile::from_toml(&text).map_err(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_only_if_it_can_be_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::open(folder.path()).unwrap();
        let of = |disk: String| DiskFile {
            disk: vec![disk],
            ..DiskFile::default()
        };
        // Longer in the file than in the body of a request.
        let [short, long] = [1, 12_000].map(|count| of("\u{7f}".repeat(count)));
        files.write("d1", &short).unwrap();
        assert!(files.write("d1", &long).is_err());
        assert_eq!(files.load().unwrap(), [("d1".to_owned(), Ok(short))]);
    }
}
