//! The files of a node: one for each disk that is kept. A file is there whole, or not at all.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use cleave_config::{DiskConfig, FILE_BYTES_MAX, WrittenSpec, is_id};

use crate::failure::Failure;

/// The id of a disk, and its file or what is wrong with that.
pub(super) type Found = (String, Result<DiskConfig, String>);

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
            if let (true, Some(id)) = (is_ours, id.filter(|id| is_id(id))) {
                found.push((id.to_owned(), read(&path)));
            }
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    /// Keeps a disk. When this returns, it survives a loss of power.
    pub(super) fn write(&self, id: &str, file: &DiskConfig) -> io::Result<()> {
        let text = file.to_toml().map_err(io::Error::other)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            // It would not be read again.
            return Err(io::Error::other("it would be too long"));
        }
        self.replace(&self.path(id), &format!(".{id}.new"), &text)
    }

    /// Forgets a disk. That there is none is fine.
    pub(super) fn remove(&self, id: &str) -> io::Result<()> {
        for path in [self.note(id), self.path(id)] {
            match fs::remove_file(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
                Ok(()) => self.sync()?,
            }
        }
        Ok(())
    }

    /// Notes that a disk has been opened, with these files and devices, before a guest can write to it.
    pub(super) fn note_opened(&self, id: &str, disk: &[WrittenSpec]) {
        let noted = self.replace(&self.note(id), &format!(".{id}.opened~"), &lines(disk));
        if let Err(error) = noted {
            tracing::warn!(
                "{id}: cannot note in the folder of --state that it was opened: {error}; if its guest writes what looks like an image \
                 format, the next node refuses it"
            );
        }
    }

    /// Returns true if [`note_opened`](Files::note_opened) was called for a disk that is there since then.
    pub(super) fn was_opened(&self, id: &str, disk: &[WrittenSpec]) -> bool {
        fs::read(self.note(id)).is_ok_and(|noted| noted == lines(disk).as_bytes())
    }

    /// Makes or replaces a file of a disk. `beside`: the name that it has until it is whole.
    fn replace(&self, path: &Path, beside: &str, text: &str) -> io::Result<()> {
        let beside = self.0.join(beside);
        let mut created = File::options();
        created.write(true).create(true).truncate(true).mode(0o600);
        let mut out = created.open(&beside)?;
        out.write_all(text.as_bytes())?;
        out.sync_all()?;
        fs::rename(beside, path)?;
        self.sync()
    }

    // No id begins with a dot, so these are no disk's file.

    fn note(&self, id: &str) -> PathBuf {
        self.0.join(format!(".{id}.opened"))
    }

    fn path(&self, id: &str) -> PathBuf {
        self.0.join(format!("{id}.toml"))
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.0)?.sync_all()
    }
}

/// The specs of a disk, a line each.
fn lines(disk: &[WrittenSpec]) -> String {
    let lines: Vec<String> = disk.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

fn read(path: &Path) -> Result<DiskConfig, String> {
    let named = |why: String| format!("{}: {why}: correct or remove it", path.display());
    let text = fs::metadata(path).and_then(|found| match found.len() {
        // A pipe would have its reader wait for ever, and a device may have no end.
        _ if !found.is_file() => Err(io::Error::other("it is no file")),
        0..=FILE_BYTES_MAX => fs::read_to_string(path),
        _ => Err(io::Error::other("it is too long")),
    });
    let text = text.map_err(|error| named(error.to_string()))?;
    DiskConfig::from_toml(&text).map_err(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_only_if_it_can_be_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::open(folder.path()).unwrap();
        let of = |disk: String| DiskConfig {
            disk: vec![disk.parse().unwrap()],
            ..DiskConfig::default()
        };
        // Longer in the file than in the body of a request.
        let [short, long] = [1, 12_000].map(|count| of("\u{7f}".repeat(count)));
        files.write("d1", &short).unwrap();
        assert!(files.write("d1", &long).is_err());
        assert_eq!(files.load().unwrap(), [("d1".to_owned(), Ok(short))]);
    }
}
