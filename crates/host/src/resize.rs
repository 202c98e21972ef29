//! Notices that disks have grown or shrunk, without polling: an idle disk causes no wake-up.
//!
//! A file is watched by inotify, a block device through the kernel's own announcements (uevents); all disks of the process
//! share one of each. If neither is available, the operator sends SIGHUP.

mod devices;
mod files;
mod readable;

use std::future::poll_fn;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use cleave_disk::{Backing, Disk, FileKind};
use rustix::fs::inotify::WatchFlags;
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

use devices::{DeviceWatch, Devices};
use files::{ALL, FileWatch, FileWatches};
use readable::readable;

/// Our own writes change the file too, so a busy disk would wake us with each: after one event writes are ignored
/// for this long.
const PAUSE: Duration = Duration::from_secs(1);

/// The watches of the process. One that no disk needs is not opened.
#[derive(Debug, Default)]
pub(crate) struct SizeWatches {
    files: OnceLock<Result<Arc<FileWatches>, Errno>>,
    devices: OnceLock<Result<Arc<Devices>, Errno>>,
}

impl SizeWatches {
    /// Opens all that any disk may need: a confined process could not later.
    pub(crate) fn open_all(&self) {
        // An error is for the disk to tell that needs it.
        let _ = (self.files(), self.devices());
    }

    fn files(&self) -> io::Result<Arc<FileWatches>> {
        let files = self.files.get_or_init(|| FileWatches::open().map(Arc::new));
        Ok(files.clone()?)
    }

    fn devices(&self) -> io::Result<Arc<Devices>> {
        let devices = self.devices.get_or_init(|| Devices::open().map(Arc::new));
        Ok(devices.clone()?)
    }

    /// Starts watching a disk, inside the runtime. It may block for as long as the disk's files do.
    pub(crate) fn watch(&self, disk: &Disk) -> Watch {
        let mut files = Vec::new();
        let mut device = None;
        let mut servers = Vec::new();
        for leg in disk.legs() {
            match leg.backing() {
                Backing::File {
                    file,
                    kind: FileKind::Regular,
                    ..
                } => files.push(format!("/proc/self/fd/{}", file.as_raw_fd())),
                Backing::File {
                    file,
                    kind: FileKind::BlockDevice,
                    ..
                } => device = Some(file),
                Backing::Nbd(nbd) => servers.push(nbd.size_changed()),
                // The images of a stripe are watched too. If one shrinks, librbd fails a request behind its end. But of a write
                // across that end it drops the rest, and reports success.
                Backing::Rbd(image) => servers.push(image.changed()),
                Backing::Ram(_) | Backing::Null { .. } | Backing::Model { .. } => {}
            }
        }
        let made = match device {
            _ if !files.is_empty() => self
                .files()
                .and_then(|all| all.watch(files))
                .map(|files| Watch::Files(Arc::new(files))),
            // A stripe does not grow, and behind the end of a device the kernel itself fails writes.
            Some(file) if disk.stripe().is_none() => self
                .devices()
                .and_then(|all| all.watch(file))
                .map(Watch::Device),
            _ if servers.is_empty() => Ok(Watch::Nothing),
            _ => watch_servers(&servers),
        };
        made.unwrap_or_else(|error| Watch::none(disk, &error))
    }
}

/// Watches one disk.
#[derive(Debug)]
pub(crate) enum Watch {
    /// Regular files.
    Files(Arc<FileWatch>),
    /// A block device.
    Device(DeviceWatch),
    /// The eventfds by which the threads that connect to a server tell of another size, one for each leg.
    Servers(Vec<AsyncFd<OwnedFd>>),
    /// Nothing that grows by itself, or nothing to watch it with.
    Nothing,
}

impl Watch {
    /// Checks whether it still works now that the process is confined: another user may lack permission to read the file, which
    /// the kernel asks for whenever the watch changes.
    pub(crate) fn confined(self, disk: &Disk) -> Watch {
        let Watch::Files(files) = &self else {
            return self;
        };
        match files.arm() {
            Ok(()) => self,
            Err(error) => Watch::none(disk, &error),
        }
    }

    fn none(disk: &Disk, error: &io::Error) -> Watch {
        tracing::info!(
            "a new size of {} is not noticed by itself ({error}): send SIGHUP after changing it",
            disk.name()
        );
        Watch::Nothing
    }

    /// Waits until the disk may have changed. To be called again after looking at it. Nothing is lost
    /// when the future is dropped.
    pub(crate) async fn changed(&self) {
        match self {
            Watch::Files(files) => files.changed().await,
            Watch::Device(device) => device.changed().await,
            Watch::Servers(bells) => told(bells).await,
            Watch::Nothing => std::future::pending().await,
        }
    }

    /// After an event: for how long writes are to be ignored; `None`: no write wakes this watch. In force with the next
    /// [`arm`](Watch::arm).
    pub(crate) fn ignore_writes(&self) -> Option<Duration> {
        let Watch::Files(files) = self else {
            return None;
        };
        files.want(WatchFlags::CLOSE_WRITE);
        Some(PAUSE)
    }

    /// After that time, and in force in the same way. The disk is to be looked at once more then, for what happened meanwhile.
    pub(crate) fn watch_writes(&self) {
        if let Watch::Files(files) = self {
            files.want(ALL);
        }
    }

    /// Returns a function that tells the kernel which events are wanted. Call it on a thread that may wait for the disk: the
    /// kernel asks the server of a file for permission.
    pub(crate) fn arm(&self) -> impl FnOnce() + Send + use<> {
        let files = match self {
            Watch::Files(files) => Some(files.clone()),
            Watch::Device(_) | Watch::Servers(_) | Watch::Nothing => None,
        };
        move || {
            if let Some(files) = files {
                log_lost_watch(files.arm());
            }
        }
    }
}

fn log_lost_watch(armed: io::Result<()>) {
    if let Err(error) = armed {
        tracing::info!("a new size is no longer noticed by itself ({error}): send SIGHUP");
    }
}

fn watch_servers(bells: &[BorrowedFd<'_>]) -> io::Result<Watch> {
    let watched = bells
        .iter()
        .map(|bell| readable(bell.try_clone_to_owned()?))
        .collect::<io::Result<_>>()?;
    Ok(Watch::Servers(watched))
}

/// Waits until one of them rings, and silences it.
async fn told(bells: &[AsyncFd<OwnedFd>]) {
    poll_fn(|context| {
        let rings = bells.iter().any(|bell| is_told(bell, context));
        if rings {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}

/// Returns true if the bell has rung, and silences it. Otherwise the task is woken when it rings.
fn is_told(bell: &AsyncFd<OwnedFd>, context: &mut Context<'_>) -> bool {
    let mut count = [0; 8];
    loop {
        // A broken watch stays silent.
        let Poll::Ready(Ok(mut ready)) = bell.poll_read_ready(context) else {
            return false;
        };
        // `Err`: it was not readable after all.
        if let Ok(read) = ready.try_io(|fd| Ok(rustix::io::read(fd, &mut count)?)) {
            return read.is_ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    async fn comes(future: impl Future<Output = ()>) -> bool {
        tokio::time::timeout(Duration::from_secs(60), future)
            .await
            .is_ok()
    }

    async fn soon(future: impl Future<Output = ()>) -> bool {
        tokio::time::timeout(Duration::from_millis(200), future)
            .await
            .is_ok()
    }

    fn watch_files(watches: &SizeWatches, files: &[File]) -> Watch {
        let paths = files
            .iter()
            .map(|file| format!("/proc/self/fd/{}", file.as_raw_fd()));
        let files = watches.files().unwrap().watch(paths.collect());
        Watch::Files(Arc::new(files.unwrap()))
    }

    /// One instance for all, whatever the limit of instances.
    #[tokio::test]
    async fn disks_that_share_a_watch_are_told_of_their_own_files_only() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| File::create(folder.path().join(name)).unwrap();
        let watches = SizeWatches::default();
        let files: Vec<File> = (0..300).map(|at| file(&at.to_string())).collect();
        let each = files.iter().map(std::slice::from_ref);
        let mut all: Vec<Watch> = each.map(|file| watch_files(&watches, file)).collect();
        files[299].set_len(5).unwrap();
        assert!(comes(all[299].changed()).await);
        assert!(!soon(all[0].changed()).await);
        // Two disks of one file, of which one ignores writes, and then the other leaves.
        let twin = watch_files(&watches, std::slice::from_ref(&files[0]));
        all[0].ignore_writes().unwrap();
        all[0].arm()();
        files[0].set_len(5).unwrap();
        assert!(comes(twin.changed()).await);
        assert!(!soon(all[0].changed()).await);
        drop(twin);
        all[0].watch_writes();
        all[0].arm()();
        files[0].set_len(6).unwrap();
        assert!(comes(all[0].changed()).await);
        // A disk that left is forgotten, and its place is watched anew.
        drop(all.remove(0));
        let again = watch_files(&watches, std::slice::from_ref(&files[0]));
        files[0].set_len(7).unwrap();
        assert!(comes(again.changed()).await);
    }

    #[tokio::test]
    async fn a_file_that_changes_is_noticed_but_not_with_every_write() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let file = File::create(&path).unwrap();
        let other = folder.path().join("other");
        let watched = [File::create(&other).unwrap(), file.try_clone().unwrap()];
        let watches = SizeWatches::default();
        let watch = watch_files(&watches, &watched);
        assert!(!soon(watch.changed()).await, "an idle file wakes nobody");
        file.set_len(4096).unwrap();
        assert!(comes(watch.changed()).await);
        watch.ignore_writes().unwrap();
        watch.arm()();
        // Renamed and replaced: the opened file is the one that counts.
        std::fs::rename(&path, folder.path().join("moved")).unwrap();
        file.set_len(8192).unwrap();
        assert!(!soon(watch.changed()).await, "writes are ignored");
        let again = File::options()
            .write(true)
            .open(folder.path().join("moved"));
        again.unwrap().set_len(4096).unwrap();
        assert!(
            comes(watch.changed()).await,
            "another program that changes it is not"
        );
        watch.watch_writes();
        watch.arm()();
        file.set_len(16384).unwrap();
        assert!(comes(watch.changed()).await);
        std::fs::write(&other, "x").unwrap();
        assert!(comes(watch.changed()).await, "every leg is watched");
    }

    #[tokio::test]
    async fn announcements_can_be_listened_to() {
        let device = File::open("/dev/null").unwrap();
        let watches = SizeWatches::default();
        let watch = watches.devices().unwrap().watch(&device).unwrap();
        assert!(!soon(watch.changed()).await);
    }
}
