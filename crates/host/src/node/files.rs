//! The files of a node: one for each disk that is kept. A file is there whole, or not at all.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use cleave_config::{DiskConfig, DiskLimits, FILE_BYTES_MAX, WrittenSpec, is_id};
use cleave_worker::RateLimits;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::failure::{Failure, may_be_read_later};
use crate::hosted::disk_host::FileFault;

/// The id of a disk, and its file or what is wrong with that.
pub(super) type Found = (String, Result<DiskConfig, FileFault>);

/// The limits in the file of a group, or what is wrong with that.
pub(super) type KeptLimits = Result<RateLimits, String>;

/// The folders of the files: of disks, and of groups.
#[derive(Debug, Clone)]
pub(super) struct StateFiles {
    disks: PathBuf,
    groups: PathBuf,
}

impl StateFiles {
    /// Opens the folder, and makes it where there is none.
    pub(super) fn open(state: &Path) -> Result<StateFiles, Failure> {
        let [disks, groups] = ["disks", "groups"].map(|name| state.join(name));
        for folder in [&disks, &groups] {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
            made.map_err(|error| {
                Failure::start(format!(
                    "cannot make {}: {error}: give another folder with --state",
                    folder.display()
                ))
            })?;
        }
        Ok(StateFiles { disks, groups })
    }

    /// All disks that are kept, with what is wrong with the files that cannot be read.
    pub(super) fn load(&self) -> Result<Vec<Found>, Failure> {
        let found = named(&self.disks)?.into_iter();
        let read = |(id, path): (String, PathBuf)| (id, read_as(&path, DiskConfig::from_toml));
        Ok(found.map(read).collect())
    }

    /// Reads the file of a disk again.
    pub(super) fn read_disk(&self, id: &str) -> Result<DiskConfig, FileFault> {
        read_as(&self.path(id), DiskConfig::from_toml)
    }

    /// The limits of all groups that are kept, with what is wrong with the files that cannot be read.
    pub(super) fn load_groups(&self) -> Result<BTreeMap<String, KeptLimits>, Failure> {
        let found = named(&self.groups)?.into_iter();
        let read = |(name, path): (String, PathBuf)| (name, read_limits(&path));
        Ok(found.map(read).collect())
    }

    /// Reads the limits of a group again. `None`: its file is gone.
    pub(super) fn read_group(&self, name: &str) -> Result<Option<RateLimits>, String> {
        let path = self.group_path(name);
        match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.groups.is_dir() => {
                Ok(None)
            }
            _ => read_limits(&path).map(Some),
        }
    }

    /// Keeps the limits of a group. When this returns, they survive a loss of power. A group without limits needs no file.
    pub(super) fn keep_group(&self, name: &str, limits: RateLimits) -> io::Result<()> {
        let path = self.group_path(name);
        match limits.any() {
            false => remove(&path),
            true => {
                let limits = DiskLimits {
                    group: None,
                    values: limits,
                };
                let text = limits.to_toml().map_err(io::Error::other)?;
                replace(&path, &format!(".{name}.new"), &text)
            }
        }
    }

    /// Writes the file of a disk under another name, durably. [`place`](StateFiles::place) has it take the place of the one before.
    pub(super) fn stage(&self, id: &str, file: &DiskConfig) -> io::Result<()> {
        let text = file.to_toml().map_err(io::Error::other)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            // It would not be read again.
            return Err(io::Error::other("it would be too long"));
        }
        write_beside(&self.staged(id), &text)
    }

    /// Keeps a disk by the file that was staged last. When this returns, it survives a loss of power.
    pub(super) fn place(&self, id: &str) -> io::Result<()> {
        take_place(&self.staged(id), &self.path(id))
    }

    /// Forgets a disk. That there is none is fine.
    pub(super) fn remove(&self, id: &str) -> io::Result<()> {
        remove(&self.note(id))?;
        remove(&self.path(id))
    }

    /// Notes that a disk has been opened, with these files and devices, before a guest can write to it.
    pub(super) fn note_opened(&self, id: &str, disk: &[WrittenSpec]) {
        let noted = replace(&self.note(id), &format!(".{id}.opened~"), &lines(disk));
        if let Err(error) = noted {
            tracing::warn!(
                "{id}: cannot note in the folder of --state that it was opened: {error}; if its guest writes what looks like an image \
                 format, the next node refuses it"
            );
        }
    }

    /// Returns true if [`note_opened`](StateFiles::note_opened) was called for a disk that is there since then.
    pub(super) fn was_opened(&self, id: &str, disk: &[WrittenSpec]) -> bool {
        fs::read(self.note(id)).is_ok_and(|noted| noted == lines(disk).as_bytes())
    }

    // No id begins with a dot, so these are no disk's file.

    fn note(&self, id: &str) -> PathBuf {
        self.disks.join(format!(".{id}.opened"))
    }

    fn staged(&self, id: &str) -> PathBuf {
        self.disks.join(format!(".{id}.new"))
    }

    fn path(&self, id: &str) -> PathBuf {
        self.disks.join(format!("{id}.toml"))
    }

    fn group_path(&self, name: &str) -> PathBuf {
        self.groups.join(format!("{name}.toml"))
    }
}

/// Returns the files of a folder that have the name of an id, and these, in order.
fn named(folder: &Path) -> Result<Vec<(String, PathBuf)>, Failure> {
    let unread =
        |error: io::Error| Failure::start(format!("cannot read {}: {error}", folder.display()));
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(unread)? {
        let path = entry.map_err(unread)?.path();
        let is_ours = path.extension().is_some_and(|end| end == "toml");
        let id = path.file_stem().and_then(|stem| stem.to_str());
        if let (true, Some(id)) = (is_ours, id.filter(|id| is_id(id))) {
            found.push((id.to_owned(), path));
        }
    }
    found.sort();
    Ok(found)
}

/// Makes or replaces a file, durably. `beside`: the name that it has until it is whole.
fn replace(path: &Path, beside: &str, text: &str) -> io::Result<()> {
    let beside = path.with_file_name(beside);
    write_beside(&beside, text)?;
    take_place(&beside, path)
}

/// Writes a file that is to take the place of another.
fn write_beside(beside: &Path, text: &str) -> io::Result<()> {
    let mut created = File::options();
    created.write(true).create(true).truncate(true).mode(0o600);
    let mut out = created.open(beside)?;
    out.write_all(text.as_bytes())?;
    out.sync_all()
}

/// Puts a file that is whole in the place of another, durably. If that fails, the other one is there as before.
fn take_place(beside: &Path, path: &Path) -> io::Result<()> {
    // Opened first: without a descriptor for it, nothing is changed.
    let folder = folder_of(path)?;
    exchange(beside, path, swap, || folder.sync_all())
}

/// Has two files change places.
fn swap(beside: &Path, path: &Path) -> io::Result<()> {
    Ok(renameat_with(
        CWD,
        beside,
        CWD,
        path,
        RenameFlags::EXCHANGE,
    )?)
}

/// Does that with `swap`, and with `sync`, which makes the names of the folder durable.
fn exchange(
    beside: &Path,
    path: &Path,
    swap: impl Fn(&Path, &Path) -> io::Result<()>,
    sync: impl Fn() -> io::Result<()>,
) -> io::Result<()> {
    let found = fs::symlink_metadata(path).ok();
    // Some network file systems cannot.
    let is_swapped =
        found.as_ref().is_some_and(|found| !found.is_dir()) && swap(beside, path).is_ok();
    let second = second_name(beside);
    if !is_swapped {
        // One may be left of a process that was killed. Without one, nothing can be put back.
        let _ = fs::remove_file(&second);
        let has_second = found.is_some() && fs::hard_link(path, &second).is_ok();
        let renamed = fs::rename(beside, path);
        if renamed.is_err() && has_second {
            let _ = fs::remove_file(&second);
        }
        renamed?;
    }
    let synced = sync();
    let put_back = match (&synced, is_swapped) {
        (Ok(()), true) => fs::remove_file(beside),
        (Err(_), true) => swap(beside, path).and_then(|()| sync()),
        (Ok(()), false) => forget_second(&second),
        (Err(_), false) if found.is_none() => fs::rename(path, beside).and_then(|()| sync()),
        (Err(_), false) => fs::rename(&second, path).and_then(|()| sync()),
    };
    if let (Err(_), Err(error)) = (&synced, put_back) {
        tracing::error!(
            "{}: the file before it may not be there again: {error}",
            path.display()
        );
    }
    synced
}

/// Returns the second name that a file has while another takes its place. No id begins with a dot.
fn second_name(beside: &Path) -> PathBuf {
    let mut name = beside.as_os_str().to_owned();
    name.push(".before");
    name.into()
}

/// Removes a second name, if the file has one: not each file system has links.
fn forget_second(second: &Path) -> io::Result<()> {
    match fs::remove_file(second) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Removes a file, durably. That there is none is fine.
fn remove(path: &Path) -> io::Result<()> {
    // Opened first: without a descriptor for it, nothing is changed.
    match folder_of(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        folder => folder.and_then(|folder| erase(path, || folder.sync_all())),
    }
}

/// Does that with `sync`, which makes the names of the folder durable.
fn erase(path: &Path, sync: impl Fn() -> io::Result<()>) -> io::Result<()> {
    match fs::remove_file(path) {
        // An earlier attempt may have removed it, and have failed before that was durable.
        Err(error) if error.kind() == io::ErrorKind::NotFound => sync(),
        removed => removed.and_then(|()| sync()),
    }
}

fn folder_of(path: &Path) -> io::Result<File> {
    File::open(path.parent().unwrap_or(path))
}

fn read_limits(path: &Path) -> KeptLimits {
    let limits = read_as(path, DiskLimits::from_toml);
    let values = limits.map(|limits| limits.values);
    values.map_err(|fault| fault.line().to_owned())
}

/// The specs of a disk, a line each.
fn lines(disk: &[WrittenSpec]) -> String {
    let lines: Vec<String> = disk.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

/// Reads a file, and then its text.
fn read_as<T>(path: &Path, parse: impl Fn(&str) -> Result<T, String>) -> Result<T, FileFault> {
    let shown = path.display();
    let wrong = |why| FileFault::Lasting(format!("{shown}: {why}: correct or remove it"));
    match read(path) {
        Ok(text) => parse(&text).map_err(wrong),
        Err(error) if may_be_read_later(&error) => Err(FileFault::Passing(format!(
            "{shown} cannot be read: {error}"
        ))),
        Err(error) => Err(wrong(error.to_string())),
    }
}

fn read(path: &Path) -> io::Result<String> {
    let found = fs::metadata(path)?;
    match found.len() {
        // A pipe would have its reader wait for a writer, and a device may have no end.
        _ if !found.is_file() => Err(io::Error::other("it is not a file")),
        0..=FILE_BYTES_MAX => fs::read_to_string(path),
        _ => Err(io::Error::other("it is too long")),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_file_is_written_only_if_it_can_be_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let files = StateFiles::open(folder.path()).unwrap();
        let of = |disk: String| DiskConfig {
            disk: vec![disk.parse().unwrap()],
            ..DiskConfig::default()
        };
        // Longer in the file than in the body of a request.
        let [short, long] = [1, 12_000].map(|count| of("\u{7f}".repeat(count)));
        files.stage("d1", &short).unwrap();
        assert!(files.load().unwrap().is_empty(), "it is not in place yet");
        files.place("d1").unwrap();
        assert!(files.stage("d1", &long).is_err());
        assert_eq!(files.load().unwrap(), [("d1".to_owned(), Ok(short))]);
    }

    #[test]
    fn a_file_that_may_be_read_later_is_told_from_one_that_says_no_disk() {
        let folder = tempfile::tempdir().unwrap();
        let files = StateFiles::open(folder.path()).unwrap();
        let path = files.path("d1");
        std::os::unix::fs::symlink(folder.path().join("away"), &path).unwrap();
        let passes = |file| matches!(file, Err(FileFault::Passing(why)) if why.contains("d1.toml"));
        assert!(passes(files.read_disk("d1")));
        let mut found = files.load().unwrap();
        assert!(passes(found.remove(0).1));
        fs::remove_file(&path).unwrap();
        let lasts = || matches!(files.read_disk("d1"), Err(FileFault::Lasting(why)) if why.contains("correct or remove it"));
        fs::write(&path, "disk = 7").unwrap();
        assert!(lasts());
        fs::write(&path, [0xff]).unwrap();
        assert!(lasts());
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(lasts());
    }

    /// A client that was told so must not find another disk after the next start.
    #[test]
    fn a_file_whose_folder_cannot_be_synced_does_not_take_the_place_of_another() {
        let folder = tempfile::tempdir().unwrap();
        let [beside, path] = [".new", "file"].map(|name| folder.path().join(name));
        let write = |text: &str| write_beside(&beside, text).unwrap();
        let fails = || Err(io::Error::other("I/O error"));
        // A network file system may have no exchange.
        let no_swap =
            |_: &Path, _: &Path| -> io::Result<()> { Err(io::ErrorKind::InvalidInput.into()) };
        let swaps: [fn(&Path, &Path) -> io::Result<()>; 2] = [swap, no_swap];
        for swap in swaps {
            write("first");
            assert!(exchange(&beside, &path, swap, fails).is_err());
            assert!(!path.exists());
            // Of a process that was killed.
            fs::write(second_name(&beside), "older").unwrap();
            write("second");
            exchange(&beside, &path, swap, || Ok(())).unwrap();
            write("third");
            assert!(exchange(&beside, &path, swap, fails).is_err());
            assert_eq!(fs::read_to_string(&path).unwrap(), "second");
            write("fourth");
            exchange(&beside, &path, swap, || Ok(())).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "fourth");
            assert!(!beside.exists() && !second_name(&beside).exists());
            fs::remove_file(&path).unwrap();
        }
    }

    /// A disk that was deleted must not be served again after a loss of power.
    #[test]
    fn a_removal_whose_folder_could_not_be_synced_is_synced_by_the_next_attempt() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "").unwrap();
        let fails = || Err(io::Error::other("I/O error"));
        for _ in 0..2 {
            assert!(erase(&path, fails).is_err());
            assert!(!path.exists());
        }
        let synced = Cell::new(false);
        let sync = || {
            synced.set(true);
            Ok(())
        };
        erase(&path, sync).unwrap();
        assert!(synced.get());
        // A file in a folder that is gone counts as removed.
        remove(&folder.path().join("none").join("file")).unwrap();
    }
}
