//! Files that another process has open and has given to this one. They hold the locks and claims of a disk, so no other program
//! can get those while the disk changes hands.
//!
//! A process that still runs goes on with the disk if it cannot be served here. So nothing is done to these files, not even to lock
//! them ([`Locking::Given`]). Those of a process that has ended are locked, which changes nothing while they hold the locks. The
//! disk is examined through other descriptions of them, because that sets flags.

use std::fs::File;
use std::path::Path;
use std::vec::IntoIter;

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::detect::set_direct;
use crate::open::{file_kind, lock_given, open_error, open_path, reopen};
use crate::{DiskSpec, FileKind, Leg, Locking, OpenError};

/// The given files of a disk, in the order of its legs. Without any, the disk is opened by its paths.
#[derive(Debug, Default)]
pub(crate) struct GivenFiles {
    waiting: IntoIter<File>,
    /// Those of the legs that were opened, locked if that was due.
    taken: Vec<File>,
}

impl GivenFiles {
    /// Checks that there are as many as the disk has files, or none.
    pub(crate) fn new(files: Vec<File>, specs: &[DiskSpec]) -> Result<GivenFiles, OpenError> {
        let wanted = specs.iter().filter(|spec| spec.path().is_some()).count();
        if !files.is_empty() && files.len() != wanted {
            let name = specs.first().map(DiskSpec::name).unwrap_or_default();
            let why = "the running daemon has more or fewer files open for it";
            return Err(OpenError::TakeOver(name, why));
        }
        Ok(GivenFiles {
            waiting: files.into_iter(),
            taken: Vec::new(),
        })
    }

    /// Opens the file of the next leg, like [`open_path`]. If it was given, that is locked, and another description of it is returned
    /// for the checks. That one is without O_DIRECT, with which a read needs aligned memory.
    pub(crate) fn open(
        &mut self,
        path: &Path,
        read_only: bool,
        locking: Locking,
    ) -> Result<(File, FileKind), OpenError> {
        let Some(given) = self.waiting.next() else {
            return open_path(path, read_only, locking);
        };
        let kind = refuse_other(&given, path, read_only)?;
        if locking == Locking::AtOpen {
            lock_given(&given, &path.display().to_string(), read_only)?;
        }
        let examined = reopen(&given).map_err(|error| OpenError::io(path, error))?;
        set_direct(&examined, false).map_err(|errno| OpenError::io(path, errno))?;
        self.taken.push(given);
        Ok((examined, kind))
    }

    /// Puts the given files into the legs, which were examined and can be served.
    pub(crate) fn put_into(self, mut legs: Vec<Leg>) -> Result<Vec<Leg>, OpenError> {
        for (leg, given) in legs.iter_mut().zip(self.taken) {
            leg.replace_file(given)?;
        }
        Ok(legs)
    }
}

/// Refuses a given file that is not the one at the path, or cannot be used as the disk is to be, and returns its kind.
fn refuse_other(given: &File, path: &Path, read_only: bool) -> Result<FileKind, OpenError> {
    let failed = |errno: Errno| open_error(path, read_only, errno);
    let refused = |why| Err(OpenError::TakeOver(path.display().to_string(), why));
    let there = rustix::fs::stat(path).map_err(failed)?;
    let kind = file_kind(path, there.st_mode)?;
    let found = rustix::fs::fstat(given).map_err(failed)?;
    // A device is its node as well: another device may have its number by now, and has a new node.
    let identity = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino, stat.st_rdev);
    if identity(found) != identity(there) {
        return refused("the running daemon serves another file, which was at this path before");
    }
    let access = rustix::fs::fcntl_getfl(given).map_err(failed)? & OFlags::ACCMODE;
    match read_only {
        true if access != OFlags::RDONLY => refused("the running daemon may write to it"),
        false if access != OFlags::RDWR => refused("the running daemon serves it read-only"),
        _ => Ok(kind),
    }
}

#[cfg(test)]
mod tests;
