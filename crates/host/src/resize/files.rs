//! Regular files, watched by one inotify instance: a user may have few of these (`fs.inotify.max_user_instances`).

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::fs::inotify::{
    CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch,
};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::readable::readable;

/// Truncating and allocating count as modifying, as do our own writes. A program that opened the file for that closes
/// it afterwards, which we never do: so that is noticed at once however busy the disk is.
pub(super) const ALL: WatchFlags = WatchFlags::MODIFY.union(WatchFlags::CLOSE_WRITE);

/// Bytes of events that are read at once.
const EVENT_BYTES: usize = 4096;

/// The instance, and the disks whose files it watches.
#[derive(Debug)]
pub(super) struct FileWatches {
    inotify: OwnedFd,
    watched: Mutex<Watched>,
    reading: OnceLock<AbortHandle>,
}

#[derive(Debug, Default)]
struct Watched {
    /// By the number of the watch. Disks that share a file share its watch.
    files: BTreeMap<i32, WatchedFile>,
    next: u64,
}

#[derive(Debug, Default)]
struct WatchedFile {
    watchers: Vec<Watcher>,
    /// Held while the kernel is told which events are wanted. The kernel asks the server of the file for permission, which may
    /// take for ever. So only threads that may wait hold this, and `Watched` is not locked meanwhile.
    arming: Arc<Mutex<()>>,
}

/// A disk that wants to know of a file.
#[derive(Debug)]
struct Watcher {
    disk: u64,
    events: WatchFlags,
    changed: Arc<Notify>,
}

/// A disk's watches. They end with this value.
#[derive(Debug)]
pub(crate) struct FileWatch {
    files: Arc<FileWatches>,
    disk: u64,
    /// The file's path in /proc, which keeps meaning the file that was opened, and the number of its watch.
    paths: Vec<(String, i32)>,
    changed: Arc<Notify>,
}

impl FileWatches {
    pub(super) fn open() -> Result<FileWatches, Errno> {
        Ok(FileWatches {
            inotify: init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
            watched: Mutex::default(),
            reading: OnceLock::new(),
        })
    }

    /// Watches the files of a disk. To be called inside the runtime. It may block for as long as the files do.
    pub(super) fn watch(self: &Arc<FileWatches>, paths: Vec<String>) -> io::Result<FileWatch> {
        self.read()?;
        let mut watched = self.lock();
        let disk = watched.next;
        watched.next += 1;
        drop(watched);
        let mut watch = FileWatch {
            files: self.clone(),
            disk,
            paths: Vec::new(),
            changed: Arc::default(),
        };
        // If a file cannot be watched, the watches made so far end with `watch`.
        for path in paths {
            watch.add(path)?;
        }
        Ok(watch)
    }

    /// Reads events from the first disk on.
    fn read(self: &Arc<FileWatches>) -> io::Result<()> {
        if self.reading.get().is_none() {
            let inotify = readable(self.inotify.try_clone()?)?;
            let reading = tokio::spawn(read(inotify, Arc::downgrade(self)));
            let _ = self.reading.set(reading.abort_handle());
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the disks that want to know of it.
    fn tell(&self, watch: i32, events: ReadFlags) {
        let watched = self.lock();
        if events.contains(ReadFlags::QUEUE_OVERFLOW) {
            let all = watched.files.values().flat_map(|file| &file.watchers);
            all.for_each(|watcher| watcher.changed.notify_one());
            return;
        }
        let file = watched.files.get(&watch);
        for watcher in file.into_iter().flat_map(|file| &file.watchers) {
            if events.bits() & watcher.events.bits() != 0 {
                watcher.changed.notify_one();
            }
        }
    }
}

impl Watched {
    /// The events that the disks of a file want.
    fn wanted(&self, watch: i32) -> WatchFlags {
        let file = self.files.get(&watch);
        let each = file.into_iter().flat_map(|file| &file.watchers);
        each.fold(WatchFlags::empty(), |all, watcher| all | watcher.events)
    }

    /// Forgets a disk; whether it was the last one of the file.
    fn leave(&mut self, watch: i32, disk: u64) -> bool {
        let Some(file) = self.files.get_mut(&watch) else {
            return false;
        };
        file.watchers.retain(|watcher| watcher.disk != disk);
        let is_last = file.watchers.is_empty();
        if is_last {
            self.files.remove(&watch);
        }
        is_last
    }
}

impl Drop for FileWatches {
    fn drop(&mut self) {
        if let Some(reading) = self.reading.get() {
            reading.abort();
        }
    }
}

async fn read(inotify: AsyncFd<OwnedFd>, files: std::sync::Weak<FileWatches>) {
    loop {
        let mut buffer = [MaybeUninit::uninit(); EVENT_BYTES];
        let read = inotify.async_io(Interest::READABLE, |fd| {
            let mut events = Vec::new();
            let mut reader = Reader::new(fd, &mut buffer);
            // One read: disks that write all the time must not keep the others from being told.
            while events.is_empty() || !reader.is_buffer_empty() {
                let event = reader.next()?;
                events.push((event.wd(), event.events()));
            }
            Ok(events)
        });
        // A broken watch stays silent.
        let (Ok(events), Some(files)) = (read.await, files.upgrade()) else {
            return;
        };
        events
            .into_iter()
            .for_each(|(watch, events)| files.tell(watch, events));
    }
}

impl FileWatch {
    fn add(&mut self, path: String) -> io::Result<()> {
        // Another disk may watch the file already, for other events.
        let flags = ALL | WatchFlags::MASK_ADD;
        let mut watch = add_watch(&self.files.inotify, path.as_str(), flags)?;
        loop {
            let mut watched = self.files.lock();
            let file = watched.files.entry(watch).or_default();
            file.watchers.push(Watcher {
                disk: self.disk,
                events: ALL,
                changed: self.changed.clone(),
            });
            let arming = file.arming.clone();
            drop(watched);
            // Before it was entered, the last other disk of the file may have taken the watch away, or changed its events.
            let again = {
                let _arming = arming.lock().unwrap_or_else(PoisonError::into_inner);
                add_watch(&self.files.inotify, path.as_str(), flags)
            };
            if again.as_ref() != Ok(&watch) {
                self.files.lock().leave(watch, self.disk);
            }
            match again? {
                same if same == watch => break,
                other => watch = other,
            }
        }
        self.paths.push((path, watch));
        Ok(())
    }

    /// From now on these events, in place of those before. The others still wake the process until [`arm`](FileWatch::arm).
    pub(super) fn want(&self, events: WatchFlags) {
        let mut watched = self.files.lock();
        for (_, watch) in &self.paths {
            let file = watched.files.get_mut(watch);
            for watcher in file.into_iter().flat_map(|file| &mut file.watchers) {
                if watcher.disk == self.disk {
                    watcher.events = events;
                }
            }
        }
    }

    /// Has the kernel watch for what is wanted. It may block for as long as the files do.
    pub(super) fn arm(&self) -> io::Result<()> {
        for (path, watch) in &self.paths {
            let arming = self
                .files
                .lock()
                .files
                .get(watch)
                .map(|file| file.arming.clone());
            let arming = arming.unwrap_or_default();
            let _arming = arming.lock().unwrap_or_else(PoisonError::into_inner);
            let wanted = self.files.lock().wanted(*watch);
            add_watch(&self.files.inotify, path.as_str(), wanted)?;
        }
        Ok(())
    }

    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }
}

impl Drop for FileWatch {
    fn drop(&mut self) {
        let mut watched = self.files.lock();
        for (_, watch) in &self.paths {
            if watched.leave(*watch, self.disk) {
                // It may have gone with its file system.
                let _ = remove_watch(&self.files.inotify, *watch);
            }
        }
    }
}
