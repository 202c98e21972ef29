//! The lock file beside a socket: keeps other daemons from its path, and tells the next one how the last one ended.

use std::fs;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cleave_config::Storage;
use cleave_disk::{Disk, DiskSpec};
use cleave_worker::CacheNote;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock, fstat, open};

use crate::failure::Failure;
use crate::socket::cache_line::{CacheLine, CacheWord, write_word};
use crate::socket::knock::{Knocking, refuse_running, refuse_served};

/// Pause between two attempts to lock a path, and the number of attempts before the wait is logged.
const LOCK_PAUSE: Duration = Duration::from_millis(5);
const LOCK_TRIES_QUIET: u32 = 200;
/// Pause between two attempts to get the lock of a daemon that has given its disk away. A guest waits.
const INHERIT_PAUSE: Duration = Duration::from_micros(200);

/// Begins the line of a lock file, and the most that is read of one.
const SERVED: &str = "served ";
/// The last line of a lock file, if changes may be lost and the guest may not know: a sync failed, or a server may lack them.
const LOST: &str = "changes are lost\n";
const LOCK_BYTES_MAX: u64 = 1 << 20;

/// A locked file beside a socket. Nobody else can open it, and so nobody else can hold its lock.
///
/// The lock keeps other daemons from the path. The daemon's rings hold the file as well, so after a `kill -9` it stays locked until
/// the I/O in flight has ended. Only then may another daemon serve the same frontend.
///
/// A daemon that ends in order removes the file (`remove`). A file that is found tells that a predecessor died, and names
/// the disk that it served, if it had opened one. Such a file outlives a daemon that fails before it serves, because
/// what it tells is then still true.
#[derive(Debug)]
pub(crate) struct PathLock {
    path: PathBuf,
    file: fs::File,
    predecessor: Predecessor,
}

/// Why nothing beside a socket tells the next daemon which disk is served there, and what to do about it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unrecorded {
    pub(crate) why: String,
    pub(crate) remedy: &'static str,
}

impl Unrecorded {
    /// Describes a socket whose path is not locked.
    pub(crate) fn without_lock(socket: &Path) -> Unrecorded {
        Unrecorded {
            why: format!("{} cannot be made or locked", lock_path(socket).display()),
            remedy: "make room there, remove that file, or use a folder that this user may write to and whose file system has locks",
        }
    }
}

/// What a daemon that ends tells the next one at its socket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left {
    is_loss_untold: bool,
    is_settled: bool,
}

impl Left {
    /// Looks at a disk that no session uses any more. What its guest does not know is recorded, however the daemon ends.
    pub(crate) fn of(disk: &Disk, lock: Option<&PathLock>) -> Left {
        let is_loss_untold = disk.is_loss_untold();
        if let Some(lock) = lock {
            lock.record_loss(is_loss_untold);
            if is_loss_untold {
                tracing::error!(
                    "{}: what the guest wrote since it last flushed may be lost, and it was not told: every flush of the next cleave at this \
                     socket fails until the disk is reopened",
                    disk.name()
                );
            }
        }
        Left {
            is_loss_untold,
            is_settled: disk.settled_at().is_none_or(|at| Instant::now() >= at),
        }
    }
}

/// How the last daemon at a socket ended, according to the lock file.
#[derive(Debug, PartialEq, Eq)]
enum Predecessor {
    /// There was none, or it ended in order.
    None,
    /// The daemon died, or left a message for its successor: the text of the file.
    Died(String),
    /// The daemon ended in order, and its guest had switched the write cache off.
    Ended,
    /// The file was not made for this; it stays as it is.
    Foreign,
    /// There is one that has the lock until this one has taken its disk.
    Running,
}

impl PathLock {
    /// Waits while a daemon that has ended has I/O in flight, however long. `None` where the file cannot be made or locked, and that
    /// lasts; `bind` then says why, or the file system has no locks.
    pub(crate) fn take(socket: &Path) -> Result<Option<PathLock>, Failure> {
        PathLock::take_after(socket, || refuse_served(socket, Knocking::AsItIs))
    }

    /// Waits as `take` does, also if the socket was given to this user, and gives up when `is_wanted` returns false.
    pub(crate) fn take_while(
        socket: &Path,
        given_to: Option<u32>,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Option<PathLock>, Failure> {
        PathLock::take_after(socket, || {
            refuse_unwanted(is_wanted)?;
            refuse_running(socket, given_to)
        })
    }

    /// Fails where another process has the path locked.
    pub(crate) fn take_at_once(socket: &Path) -> Result<Option<PathLock>, Failure> {
        PathLock::take_after(socket, || Err(Failure::run("its path is locked")))
    }

    /// As `take_while`, for a path whose listening socket was passed to this process: there, connecting succeeds even if no daemon
    /// runs.
    pub(crate) fn take_passed(
        socket: &Path,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Option<PathLock>, Failure> {
        PathLock::take_after(socket, || refuse_unwanted(is_wanted))
    }

    /// Opens the file of a daemon that runs, without its lock. `None`: there is none that could be locked.
    pub(crate) fn of_running(socket: &Path) -> Option<PathLock> {
        let path = lock_path(socket);
        let (file, is_new) = open_lock(&path).ok()?;
        let file = fs::File::from(file);
        let predecessor = match Predecessor::of(&file) {
            _ if is_new => Predecessor::None,
            Predecessor::Foreign => Predecessor::Foreign,
            _ => Predecessor::Running,
        };
        let lock = PathLock {
            path,
            file,
            predecessor,
        };
        // Dropped, it removes a file that it has made.
        (!is_new).then_some(lock)
    }

    /// Waits for the lock of a daemon that was running, at most for so long. Returns true if this process has it, and the file is still
    /// in its place: the other has not ended in order.
    pub(crate) fn inherit(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        loop {
            match flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return is_at(&self.file, &self.path),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR)
                    if Instant::now() < until =>
                {
                    thread::sleep(INHERIT_PAUSE);
                }
                Err(_) => return false,
            }
        }
    }

    /// Waits as long as `refuse` returns no error.
    fn take_after(
        socket: &Path,
        refuse: impl Fn() -> Result<(), Failure>,
    ) -> Result<Option<PathLock>, Failure> {
        PathLock::take_opened(socket, open_lock, refuse)
    }

    /// Does that with `open`, which creates or opens the file.
    fn take_opened(
        socket: &Path,
        open: impl Fn(&Path) -> rustix::io::Result<(OwnedFd, bool)>,
        refuse: impl Fn() -> Result<(), Failure>,
    ) -> Result<Option<PathLock>, Failure> {
        let path = lock_path(socket);
        for tries in 1.. {
            let (file, is_new) = match open(&path) {
                Ok(opened) => opened,
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) if is_lasting(errno) => break,
                Err(errno) => return Err(not_opened(&path, errno)),
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // Its holder may have removed it since it was opened; then a newer one counts.
                Ok(()) if is_at(&file, &path) => {
                    let file = fs::File::from(file);
                    let predecessor = match is_new {
                        true => Predecessor::None,
                        false => Predecessor::of(&file),
                    };
                    return Ok(Some(PathLock {
                        path,
                        file,
                        predecessor,
                    }));
                }
                Ok(()) | Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    refuse()?;
                    wait_for(socket, tries);
                }
                Err(errno) if is_lasting(errno) => break,
                Err(errno) => return Err(not_opened(&path, errno)),
            }
        }
        Ok(None)
    }

    /// Returns true if a daemon died here that was serving this disk.
    pub(crate) fn was_serving(&self, disk: &Storage) -> bool {
        matches!(&self.predecessor, Predecessor::Died(text) if text.starts_with(&served(disk)))
    }

    /// Returns true if a daemon died here, or left a message for the next one.
    pub(crate) fn was_left(&self) -> bool {
        matches!(self.predecessor, Predecessor::Died(_))
    }

    /// Returns true if a daemon died here that was serving the export of an NBD server. The lock says nothing of what that server
    /// still does.
    pub(crate) fn left_a_server(&self) -> bool {
        matches!(self.disk_left(), Some(DiskSpec::Nbd(_)))
    }

    /// Returns true if a daemon ended here that served the same disk, which lacks changes, or may lack them, of which the guest may
    /// not know. Another disk lacks nothing.
    pub(crate) fn left_lost_changes(&self, disk: &Storage) -> bool {
        let Predecessor::Died(text) = &self.predecessor else {
            return false;
        };
        let is_same = match (self.disk_left(), disk) {
            (Some(DiskSpec::Nbd(left)), Storage::One(DiskSpec::Nbd(now))) => {
                left.address == now.address && left.export == now.export
            }
            // It could not record which disk.
            _ if text == LOST => true,
            _ => self.was_serving(disk),
        };
        is_same && ends_with_loss(text)
    }

    /// Returns true if the daemon that had this file noted such a loss, whether or not it runs.
    pub(crate) fn tells_of_loss(&self) -> bool {
        self.text().is_some_and(|text| ends_with_loss(&text))
    }

    /// Returns true if the daemon that had this file has opened this disk, whether or not it runs.
    pub(crate) fn tells_of(&self, disk: &Storage) -> bool {
        self.text()
            .is_some_and(|text| text.starts_with(&served(disk)))
    }

    fn text(&self) -> Option<String> {
        // The position of the file is where its next line begins, and stays there.
        let length = self.file.metadata().map_or(0, |found| found.len());
        let mut bytes = vec![0; length.min(LOCK_BYTES_MAX) as usize];
        self.file.read_exact_at(&mut bytes, 0).ok()?;
        Some(without_zeroes(str::from_utf8(&bytes).ok()?))
    }

    /// Has failed syncs of this disk noted in the file, by whatever thread sees them, so that they are known after a kill too.
    pub(crate) fn note_failures_of(&self, disk: &mut Disk) {
        // A description of its own, because a line is written at the position of `file`, and threads of the disk can only write.
        match self.open_again(OFlags::WRONLY | OFlags::APPEND) {
            Some(file) => disk.note_sync_failure(file, LOST),
            None => tracing::warn!(
                "{}: cannot be written to: the next daemon will not know of a failed sync after a kill, nor of a guest that has \
                 switched its write cache off",
                self.path.display()
            ),
        }
    }

    /// Returns the note about the write cache of the guest, once the file tells of this disk. `None`: it has no place for one.
    pub(crate) fn cache_note(&self, disk: &Storage) -> Option<Arc<dyn CacheNote>> {
        let at = served(disk).len();
        CacheWord::first_of(self.text()?.get(at..)?)?;
        let file = self.open_again(OFlags::RDWR)?;
        let shown = self.path.display().to_string();
        Some(Arc::new(CacheLine::new(file, at as u64, shown)))
    }

    fn open_again(&self, flags: OFlags) -> Option<fs::File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = fs::File::from(open(&self.path, flags, Mode::empty()).ok()?);
        let is_ours = self.predecessor != Predecessor::Foreign && is_same(&file, &self.file);
        is_ours.then_some(file)
    }

    /// Returns true if the guest of the daemon that had this file had switched its write cache off, whether or not that daemon runs.
    pub(crate) fn tells_of_cache_off(&self) -> bool {
        let text = self
            .text()
            .filter(|_| self.predecessor != Predecessor::Foreign);
        text.is_some_and(|text| CacheWord::within(&text).is_some_and(CacheWord::is_off))
    }

    /// The disk that the daemon which ended here was serving, unless that was a stripe.
    fn disk_left(&self) -> Option<DiskSpec> {
        let Predecessor::Died(text) = &self.predecessor else {
            return None;
        };
        let line = text.lines().next()?;
        line.strip_prefix(SERVED)?.parse().ok()
    }

    /// Records that this disk is open, and whether its guest does not know of a loss, for a successor. After an error, as on a full file
    /// system, the file tells nothing. A death in between leaves the end of an older line after this one.
    pub(crate) fn record(&self, disk: &Storage, is_loss_untold: bool) -> Result<(), Unrecorded> {
        let line = served(disk);
        let shown = self.path.display();
        let recorded = match self.predecessor {
            Predecessor::Foreign => {
                return Err(Unrecorded {
                    why: format!("{shown} is there and was not made by cleave"),
                    remedy: "remove that file",
                });
            }
            Predecessor::Running => self.find_place(&line),
            _ => {
                let cache = match self.tells_of_cache_off() {
                    true => CacheWord::IsOff,
                    false => CacheWord::AsSet,
                };
                self.write(&line, cache, is_loss_untold)
            }
        };
        recorded.map_err(|error| Unrecorded {
            why: format!("{shown} cannot be written: {error}"),
            remedy: "make room there",
        })
    }

    /// Writes all that the file tells, and finds the place for a line about a loss, after that about the cache.
    fn write(&self, disk: &str, cache: CacheWord, is_loss_untold: bool) -> io::Result<()> {
        let text = [disk, cache.line(), lost_line(is_loss_untold)].concat();
        let ends = disk.len() + CacheWord::BYTES;
        let mut file = &self.file;
        let written = file.rewind().and_then(|()| file.write_all(text.as_bytes()));
        // A full tmpfs takes any length, of zeroes.
        let (length, place) = match written {
            Ok(()) => (text.len(), ends),
            Err(_) => (0, 0),
        };
        file.set_len(length as u64)?;
        file.seek(io::SeekFrom::Start(place as u64))?;
        written
    }

    /// Finds the place for a line about a loss, after the line of the disk, which is the same for a daemon that runs, and that about the
    /// cache. What that daemon may note is not for this one to change, unless it could not record its disk.
    fn find_place(&self, disk: &str) -> io::Result<()> {
        let text = self.text().unwrap_or_default();
        if text.is_empty() || text == LOST {
            return self.write(disk, CacheWord::AsSet, !text.is_empty());
        }
        let mut file = &self.file;
        file.rewind()?;
        file.write_all(disk.as_bytes())?;
        let text = self.text().unwrap_or_default();
        let cache = text.get(disk.len()..).and_then(CacheWord::first_of);
        let ends = disk.len() + cache.map_or(0, |_| CacheWord::BYTES);
        file.seek(io::SeekFrom::Start(ends as u64))?;
        Ok(())
    }

    /// Ends the file after the line about the cache, where the file's position is and stays, or after the line that tells of a loss. No
    /// order of these steps loses that line while the loss is owed. If the disk is not recorded, that line is alone.
    fn record_loss(&self, is_loss_untold: bool) {
        if self.predecessor == Predecessor::Foreign {
            return;
        }
        let mut file = &self.file;
        let Ok(end) = file.stream_position() else {
            return;
        };
        let lost = lost_line(is_loss_untold);
        let written = file.write_all(lost.as_bytes());
        let length = written.as_ref().map_or(0, |()| lost.len() as u64);
        let _ = file.set_len(end + length);
        let _ = file.seek(io::SeekFrom::Start(end));
        if let Err(error) = written {
            tracing::error!(
                "{}: cannot be written: the next daemon will not know that changes may be lost: {error}",
                self.path.display()
            );
        }
    }

    /// Removes the file: the daemon ends in order.
    pub(crate) fn remove(mut self) {
        if self.predecessor != Predecessor::Foreign {
            self.predecessor = Predecessor::None;
        }
    }

    /// Removes the file, because the daemon ends in order, unless it tells the successor of something.
    pub(crate) fn end(self, left: Left) {
        let tells = left.is_loss_untold || !left.is_settled && self.left_a_server();
        match tells || self.tells_of_cache_off() {
            true => {
                if !tells {
                    self.note_end();
                }
                self.leave_to_rings();
            }
            false => self.remove(),
        }
    }

    /// Notes that the daemon ends in order, where the file stays for the sake of a guest that has switched its write cache off.
    fn note_end(&self) {
        let ends = (&self.file).stream_position().unwrap_or_default();
        if let Some(at) = ends.checked_sub(CacheWord::BYTES as u64) {
            let _ = write_word(&self.file, at, CacheWord::WasOff);
        }
    }

    /// Leaves the file where it is: something may be in flight still.
    pub(crate) fn leave(self) {
        std::mem::forget(self);
    }

    /// Leaves the lock to the rings that hold it, and the file with it: whoever takes the path next waits for them.
    pub(crate) fn leave_to_rings(self) {
        drop(self.staying());
    }

    /// Returns the lock, which leaves the file where it is when it is dropped.
    pub(crate) fn staying(mut self) -> PathLock {
        self.path = PathBuf::new();
        self
    }

    /// Returns a copy of the lock, for the rings to hold, and for the server of the disk to release.
    pub(crate) fn copy(lock: Option<&PathLock>) -> Result<Option<fs::File>, Failure> {
        let copy = lock.map(|lock| lock.file.try_clone()).transpose();
        copy.map_err(|error| Failure::run(format!("cannot copy a lock: {error}")))
    }
}

fn refuse_unwanted(is_wanted: &dyn Fn() -> bool) -> Result<(), Failure> {
    match is_wanted() {
        true => Ok(()),
        false => Err(Failure::run("the disk was removed while it waited")),
    }
}

/// Returns true for what another attempt does not get past, in a folder or a file system that is not for locks. Nothing tells there how
/// a daemon before this one ended.
fn is_lasting(errno: rustix::io::Errno) -> bool {
    use rustix::io::Errno as E;
    let of_the_folder = matches!(
        errno,
        E::NOENT | E::NOTDIR | E::ACCESS | E::PERM | E::ROFS | E::NOSPC | E::DQUOT
    );
    let of_the_file = matches!(errno, E::ISDIR | E::LOOP | E::NXIO | E::NAMETOOLONG);
    // A file system without locks.
    let of_its_locks = matches!(errno, E::NOLCK | E::OPNOTSUPP | E::NOSYS | E::INVAL);
    of_the_folder || of_the_file || of_its_locks
}

/// The host lacks memory or descriptors, say. Without the lock, this daemon would not know that one has died before it.
fn not_opened(path: &Path, errno: rustix::io::Errno) -> Failure {
    let (shown, error) = (path.display(), io::Error::from(errno));
    Failure::start(format!(
        "{shown} cannot be locked: {error}: nothing is served there until it can"
    ))
}

/// Another daemon has the path locked: one that runs, or one that has ended and has I/O in flight.
fn wait_for(socket: &Path, tries: u32) {
    if tries == LOCK_TRIES_QUIET {
        tracing::warn!(
            "waiting for the daemon that served {} before: it ends, or has ended and its disk has not answered yet",
            socket.display()
        );
    }
    thread::sleep(LOCK_PAUSE);
}

impl Drop for PathLock {
    fn drop(&mut self) {
        // Before the lock is released.
        if self.predecessor == Predecessor::None {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The lock file of a socket.
fn lock_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    PathBuf::from(path)
}

/// The lock file of a daemon that has opened its disk.
#[derive(Debug)]
pub struct LockRecord {
    /// The daemon has the lock file open.
    pub lock: fs::Metadata,
    /// The specs of the disk.
    pub disk: String,
}

/// Reads the lock file beside `socket`, if a daemon has recorded its disk there.
pub fn lock_record(socket: &Path) -> Option<LockRecord> {
    let path = lock_path(socket);
    let lock = fs::symlink_metadata(&path).ok()?;
    let text = match lock.is_file() && lock.len() <= LOCK_BYTES_MAX {
        true => fs::read_to_string(path).ok()?,
        false => return None,
    };
    let disk = text.lines().next()?.strip_prefix(SERVED)?.to_owned();
    Some(LockRecord { lock, disk })
}

/// What a lock file ends with.
fn lost_line(is_loss_untold: bool) -> &'static str {
    if is_loss_untold { LOST } else { "" }
}

/// The line of a lock file.
fn served(disk: &Storage) -> String {
    format!("{SERVED}{}\n", disk.line())
}

/// Creates a lock file, or opens the one that is there. Returns true with it if it was created. One that another user made is refused:
/// it could tell anything, and its maker could keep it locked. Opening it without O_CREAT evades `fs.protected_regular`, which
/// would refuse it too.
fn open_lock(path: &Path) -> rustix::io::Result<(OwnedFd, bool)> {
    // The open of a FIFO does not wait for its other end, nor does a read.
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let mode = Mode::RUSR | Mode::WUSR;
    match open(path, flags | OFlags::CREATE | OFlags::EXCL, mode) {
        Err(rustix::io::Errno::EXIST) => match open(path, flags, mode) {
            // Removed in between: to be tried again.
            Err(rustix::io::Errno::NOENT) => Err(rustix::io::Errno::INTR),
            found => {
                let found = found?;
                match is_ours(&found)? {
                    true => Ok((found, false)),
                    false => Err(rustix::io::Errno::PERM),
                }
            }
        },
        created => Ok((created?, true)),
    }
}

/// Returns true for a regular file of this user or of root.
fn is_ours(file: &OwnedFd) -> rustix::io::Result<bool> {
    let found = fstat(file)?;
    let owners = [0, rustix::process::geteuid().as_raw()];
    Ok(
        FileType::from_raw_mode(found.st_mode) == FileType::RegularFile
            && owners.contains(&found.st_uid),
    )
}

impl Predecessor {
    /// Reads a lock file that another daemon made.
    fn of(file: &fs::File) -> Predecessor {
        let mut text = String::new();
        let read = file.take(LOCK_BYTES_MAX).read_to_string(&mut text);
        let text = without_zeroes(&text);
        match read {
            // Its daemon never had the disk open, or could not record it, or has only just created the file.
            Ok(_) if text.is_empty() => Predecessor::None,
            Ok(_) if !text.starts_with(SERVED) && text != LOST => Predecessor::Foreign,
            Ok(_) if CacheWord::within(&text) == Some(CacheWord::WasOff) => Predecessor::Ended,
            Ok(_) => Predecessor::Died(text),
            _ => Predecessor::Foreign,
        }
    }
}

/// Returns true if the text of a lock file tells of a loss.
fn ends_with_loss(text: &str) -> bool {
    text.strip_suffix(LOST)
        .is_some_and(|rest| rest.is_empty() || rest.ends_with('\n'))
}

/// Returns what a lock file tells. Version 0.4.0 leaves zeroes in the place of a text for which its file system has no room.
fn without_zeroes(text: &str) -> String {
    text.trim_start_matches('\0').to_owned()
}

/// Returns true if both are descriptions of one file.
fn is_same(one: &fs::File, other: &fs::File) -> bool {
    let identity = |file| fstat(file).map(|found| (found.st_dev, found.st_ino));
    matches!((identity(one), identity(other)), (Ok(one), Ok(other)) if one == other)
}

fn is_at(file: impl AsFd, path: &Path) -> bool {
    let (Ok(opened), Ok(found)) = (fstat(file), fs::symlink_metadata(path)) else {
        return false;
    };
    (opened.st_dev, opened.st_ino) == (found.dev(), found.ino())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::ExitCode;

    use cleave_disk::OpenOptions;
    use rustix::io::Errno;

    use super::*;

    /// With the error for a lack of memory or descriptors, a daemon would be served beside the I/O of one that was killed.
    #[test]
    fn a_lock_that_cannot_be_opened_for_a_moment_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let take = |errno| PathLock::take_opened(&path, |_| Err(errno), || Ok(()));
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::IO] {
            let failure = take(errno).unwrap_err();
            assert_eq!(failure.exit_code(), ExitCode::from(1), "{errno}");
            assert!(failure.to_string().contains("s.lock cannot be locked"));
        }
        for errno in [Errno::NOENT, Errno::ROFS, Errno::NOSPC, Errno::PERM] {
            assert!(take(errno).unwrap().is_none(), "{errno}");
        }
    }

    /// While one that starts has it locked others wait, and what is not ours stays.
    #[test]
    fn the_lock_is_for_its_user_alone_and_goes_away() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let beside = folder.path().join("s.lock");
        let lock = PathLock::take(&path).unwrap().unwrap();
        assert_eq!(fs::metadata(&beside).unwrap().mode() & 0o777, 0o600);
        thread::scope(|scope| {
            let second = scope.spawn(|| PathLock::take(&path).map(drop));
            thread::sleep(20 * LOCK_PAUSE);
            assert!(!second.is_finished());
            drop(lock);
            second.join().unwrap().unwrap();
        });
        assert!(!beside.exists());
        fs::write(&beside, "kept").unwrap();
        drop(PathLock::take(&path).unwrap());
        assert_eq!(fs::read_to_string(&beside).unwrap(), "kept");
    }

    /// In a folder where others may write, a file that one of them made there first tells nothing, and nobody waits for it.
    #[test]
    fn what_another_user_made_is_no_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let beside = folder.path().join("s.lock");
        rustix::fs::mknodat(rustix::fs::CWD, &beside, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert!(PathLock::take(&path).unwrap().is_none());
        fs::remove_file(&beside).unwrap();
        let text = format!("{SERVED}ram:64M\n{LOST}");
        fs::write(&beside, &text).unwrap();
        assert!(PathLock::take(&path).unwrap().is_some());
        // Only root can give a file away.
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&beside, Some(65_534), None).unwrap();
            let theirs = fs::File::open(&beside).unwrap();
            flock(&theirs, FlockOperation::LockExclusive).unwrap();
            assert!(PathLock::take(&path).unwrap().is_none());
            assert_eq!(fs::read_to_string(&beside).unwrap(), text);
        }
    }

    /// Whatever becomes of the one that takes over, the file is the other's until it is locked.
    #[test]
    fn the_lock_of_a_running_daemon_is_had_when_that_releases_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let beside = folder.path().join("s.lock");
        assert!(PathLock::of_running(&path).is_none() && !beside.exists());
        let running = PathLock::take(&path).unwrap().unwrap();
        drop(PathLock::of_running(&path).unwrap());
        let next = PathLock::of_running(&path).unwrap();
        assert!(beside.exists() && !next.inherit(Duration::ZERO));
        let copy = PathLock::copy(Some(&running)).unwrap().unwrap();
        flock(&copy, FlockOperation::Unlock).unwrap();
        assert!(next.inherit(Duration::from_secs(60)));
        // The one that has given it away removes nothing any more.
        running.leave();
        next.remove();
        assert!(!beside.exists());
    }

    /// However a daemon ends, and whoever has opened the file meanwhile.
    #[test]
    fn a_failed_sync_is_in_the_file_before_the_daemon_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let spec = || DiskSpec::Null(1 << 20);
        let storage = Storage::One(spec());
        let open = || Disk::open(&spec(), &OpenOptions::default()).unwrap();
        let running = PathLock::take(&path).unwrap().unwrap();
        let mut disk = open();
        running.note_failures_of(&mut disk);
        running.record(&storage, false).unwrap();
        let next = PathLock::of_running(&path).unwrap();
        assert!(!next.tells_of_loss());
        disk.mark_sync_failed();
        disk.mark_sync_failed();
        next.record(&storage, false).unwrap();
        assert!(next.tells_of_loss());
        drop(next);
        // It dies.
        running.leave_to_rings();
        let next = PathLock::take(&path).unwrap().unwrap();
        assert!(next.left_lost_changes(&storage));
        assert!(!next.left_lost_changes(&Storage::One(DiskSpec::Null(2 << 20))));
        let mut disk = open();
        disk.mark_changes_lost();
        next.note_failures_of(&mut disk);
        next.record(&storage, disk.is_loss_untold()).unwrap();
        let left = Left::of(&disk, Some(&next));
        next.end(left);
        let next = PathLock::take(&path).unwrap().unwrap();
        assert!(next.left_lost_changes(&storage), "nobody was told");
        disk.mark_loss_told();
        let left = Left::of(&disk, Some(&next));
        next.end(left);
        let last = PathLock::take(&path).unwrap().unwrap();
        assert!(!last.left_lost_changes(&storage));
    }

    /// Its file system was full when it opened the disk. Version 0.4.0 left zeroes there, and its failed sync after them.
    #[test]
    fn a_daemon_that_could_not_record_its_disk_is_none_unless_it_tells_of_a_loss() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let beside = folder.path().join("s.lock");
        let storage = Storage::One(DiskSpec::Null(1 << 20));
        let text = format!("{}{}", served(&storage), CacheWord::AsSet.line());
        let take = || PathLock::take(&path).unwrap().unwrap();
        for zeroes in [0, 1, 40] {
            let left = "\0".repeat(zeroes);
            fs::write(&beside, &left).unwrap();
            let lock = take();
            assert!(!lock.was_serving(&storage) && !lock.left_lost_changes(&storage));
            lock.record(&storage, false).unwrap();
            lock.leave_to_rings();
            assert_eq!(fs::read_to_string(&beside).unwrap(), text, "{zeroes}");
            assert!(take().was_serving(&storage), "{zeroes}");
            let lost = [left.as_str(), LOST].concat();
            fs::write(&beside, &lost).unwrap();
            let lock = take();
            assert!(lock.left_lost_changes(&storage) && !lock.was_serving(&storage));
            drop(lock);
            assert_eq!(
                fs::read_to_string(&beside).unwrap(),
                lost,
                "it is still owed"
            );
            // One that takes over has room again.
            for (left, is_lost) in [(&left, false), (&lost, true)] {
                fs::write(&beside, left).unwrap();
                let Some(next) = PathLock::of_running(&path) else {
                    panic!("{zeroes}: no file");
                };
                assert_eq!(next.tells_of_loss(), is_lost, "{zeroes}");
                next.record(&storage, false).unwrap();
                assert!(next.cache_note(&storage).is_some(), "{zeroes}");
                let told = [text.as_str(), lost_line(is_lost)].concat();
                assert_eq!(fs::read_to_string(&beside).unwrap(), told, "{zeroes}");
            }
            fs::remove_file(&beside).unwrap();
        }
        // A sync fails, and nobody is told, when nothing is recorded.
        let mut disk = Disk::open(&DiskSpec::Null(1 << 20), &OpenOptions::default()).unwrap();
        let lock = take();
        lock.note_failures_of(&mut disk);
        disk.mark_sync_failed();
        assert_eq!(fs::read_to_string(&beside).unwrap(), LOST);
        let left = Left::of(&disk, Some(&lock));
        lock.end(left);
        assert_eq!(fs::read_to_string(&beside).unwrap(), LOST);
        assert!(take().left_lost_changes(&storage));
    }

    /// A guest is the same whichever disk its next daemon has.
    #[test]
    fn a_cache_that_is_off_is_in_the_file_until_it_is_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let beside = folder.path().join("s.lock");
        let [storage, other] = [20, 1].map(|bytes| Storage::One(DiskSpec::Null(1 << bytes)));
        let take = || PathLock::take(&path).unwrap().unwrap();
        let lock = take();
        assert!(lock.cache_note(&storage).is_none(), "there is no line yet");
        lock.record(&storage, false).unwrap();
        let note = lock.cache_note(&storage).unwrap();
        assert!(!note.is_off() && !lock.tells_of_cache_off());
        note.set_off(true);
        note.set_off(true);
        // One that takes over finds it, and leaves it as it is.
        let next = PathLock::of_running(&path).unwrap();
        next.record(&storage, true).unwrap();
        let its_note = next.cache_note(&storage).unwrap();
        assert!(its_note.is_off() && next.tells_of_cache_off());
        its_note.set_off(false);
        assert!(!note.is_off());
        note.set_off(true);
        drop(next);
        // The first one dies, and the next has a failed sync too.
        lock.leave_to_rings();
        let lock = take();
        assert!(lock.was_serving(&storage) && lock.tells_of_cache_off());
        lock.record(&other, true).unwrap();
        assert!(lock.tells_of_cache_off() && lock.tells_of_loss());
        assert!(lock.cache_note(&storage).is_none());
        let left = |is_loss_untold| Left {
            is_loss_untold,
            is_settled: true,
        };
        lock.end(left(true));
        let lock = take();
        assert!(lock.left_lost_changes(&other) && lock.tells_of_cache_off());
        lock.record(&storage, false).unwrap();
        lock.end(left(false));
        // That one has ended in order.
        let lock = take();
        assert!(lock.tells_of_cache_off() && !lock.was_serving(&storage));
        drop(lock);
        let lock = take();
        lock.record(&storage, false).unwrap();
        let note = lock.cache_note(&storage).unwrap();
        assert!(note.is_off());
        note.set_off(false);
        lock.end(left(false));
        assert!(!beside.exists());
    }

    /// The daemon has removed the file, and another one may have made a new file.
    #[test]
    fn the_lock_of_a_daemon_that_has_ended_in_order_is_of_no_use() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let running = PathLock::take(&path).unwrap().unwrap();
        let next = PathLock::of_running(&path).unwrap();
        running.remove();
        assert!(!next.inherit(Duration::from_secs(60)));
        let other = PathLock::take(&path).unwrap().unwrap();
        drop(next);
        assert!(folder.path().join("s.lock").exists());
        other.remove();
    }

    #[test]
    fn a_path_that_is_locked_and_served_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _lock = PathLock::take(&path).unwrap().unwrap();
        let _listener = UnixListener::bind(&path).unwrap();
        let refused = PathLock::take(&path).unwrap_err().to_string();
        assert!(refused.contains("in use by a running program"), "{refused}");
    }
}
