//! Notices that the disk has grown or shrunk, without polling: an idle disk causes no wake-up.
//!
//! A file is watched by inotify, a block device through the kernel's own announcements (uevents).
//! If neither is available, the operator sends SIGHUP.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use cleave_disk::{Backing, Disk, FileKind};
use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
use rustix::fs::{major, minor};
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Our own writes change the file too, so a busy disk would wake us with each: after one event writes are ignored
/// for this long.
const PAUSE: Duration = Duration::from_secs(1);

/// The multicast group of the kernel's announcements (group 2 is udev's).
const KERNEL_GROUP: u32 = 1;

/// Longest announcement (the kernel's own buffer has 2 KiB).
const ANNOUNCEMENT_BYTES: usize = 4096;

/// Watches one disk.
#[derive(Debug)]
pub(crate) enum Watch {
    /// Regular files: their paths in /proc, which keep meaning the files that were opened.
    Files {
        inotify: AsyncFd<OwnedFd>,
        paths: Vec<String>,
    },
    /// A block device: major and minor as announced.
    Device {
        socket: AsyncFd<OwnedFd>,
        number: Number,
    },
    /// The eventfd by which a thread that hears from the server tells of another size.
    Server(AsyncFd<OwnedFd>),
    /// Nothing that grows by itself, or nothing to watch it with.
    Nothing,
}

/// A device number as uevents write it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Number {
    major: String,
    minor: String,
}

impl Watch {
    /// Starts watching, inside the runtime.
    pub(crate) fn new(disk: &Disk) -> Watch {
        let mut files = Vec::new();
        let (mut device, mut server) = (None, None);
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
                Backing::Nbd(nbd) => server = Some(nbd.size_changed()),
                Backing::Rbd(image) => server = Some(image.changed()),
                Backing::Ram(_) | Backing::Null { .. } | Backing::Model { .. } => {}
            }
        }
        let made = match device {
            _ if !files.is_empty() => watch_files(files),
            // A stripe does not grow, and behind the end of a device the kernel itself fails writes.
            Some(file) if disk.stripe().is_none() => watch_device(file),
            _ => match server {
                Some(bell) => watch_server(bell),
                None => Ok(Watch::Nothing),
            },
        };
        made.unwrap_or_else(|error| Watch::none(disk, &error))
    }

    /// Checks whether it still works now that the process is confined: another user may lack permission to read the file, which
    /// the kernel asks for whenever the watch changes.
    pub(crate) fn confined(self, disk: &Disk) -> Watch {
        let Watch::Files { inotify, paths } = &self else {
            return self;
        };
        match arm(inotify.get_ref(), paths, ALL) {
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
            Watch::Files { inotify, .. } => written(inotify).await,
            Watch::Device { socket, number } => announced(socket, number).await,
            Watch::Server(bell) => told(bell).await,
            Watch::Nothing => std::future::pending().await,
        }
    }

    /// After an event: for how long writes are to be ignored; `None`: no write wakes this watch.
    pub(crate) fn ignore_writes(&self) -> Option<Duration> {
        let Watch::Files { inotify, paths } = self else {
            return None;
        };
        log_lost_watch(arm(inotify.get_ref(), paths, WatchFlags::CLOSE_WRITE));
        Some(PAUSE)
    }

    /// After that time. The disk is to be looked at once more then, for what happened meanwhile.
    pub(crate) fn watch_writes(&self) {
        if let Watch::Files { inotify, paths } = self {
            log_lost_watch(arm(inotify.get_ref(), paths, ALL));
        }
    }
}

fn log_lost_watch(armed: io::Result<()>) {
    if let Err(error) = armed {
        tracing::info!("a new size is no longer noticed by itself ({error}): send SIGHUP");
    }
}

/// Truncating and allocating count as modifying, as do our own writes. A program that opened the file for that closes
/// it afterwards, which we never do: so that is noticed at once however busy the disk is.
const ALL: WatchFlags = WatchFlags::MODIFY.union(WatchFlags::CLOSE_WRITE);

fn watch_files(paths: Vec<String>) -> io::Result<Watch> {
    let inotify = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    arm(&inotify, &paths, ALL)?;
    Ok(Watch::Files {
        inotify: readable(inotify)?,
        paths,
    })
}

fn watch_server(bell: BorrowedFd<'_>) -> io::Result<Watch> {
    Ok(Watch::Server(readable(bell.try_clone_to_owned()?)?))
}

async fn told(bell: &AsyncFd<OwnedFd>) {
    let mut count = [0; 8];
    let read = bell.async_io(Interest::READABLE, |fd| {
        Ok(rustix::io::read(fd, &mut count)?)
    });
    if read.await.is_err() {
        std::future::pending::<()>().await; // a broken watch stays silent
    }
}

/// From now on these events, in place of those before.
fn arm(inotify: &OwnedFd, paths: &[String], events: WatchFlags) -> io::Result<()> {
    for path in paths {
        add_watch(inotify, path.as_str(), events)?;
    }
    Ok(())
}

fn watch_device(file: &std::fs::File) -> io::Result<Watch> {
    let number = file.metadata()?.rdev();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        flags,
        Some(KOBJECT_UEVENT),
    )?;
    bind(&socket, &SocketAddrNetlink::new(0, KERNEL_GROUP))?;
    Ok(Watch::Device {
        socket: readable(socket)?,
        number: Number {
            major: major(number).to_string(),
            minor: minor(number).to_string(),
        },
    })
}

#[expect(
    deprecated,
    reason = "its successor is an unsafe fn, for descriptors that may be closed under it; an OwnedFd cannot"
)]
fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}

async fn written(inotify: &AsyncFd<OwnedFd>) {
    let mut buffer = [0; 1024];
    let read = inotify.async_io(Interest::READABLE, |fd| {
        Ok(rustix::io::read(fd, &mut buffer)?)
    });
    if read.await.is_err() {
        std::future::pending::<()>().await; // a broken watch stays silent
    }
}

async fn announced(socket: &AsyncFd<OwnedFd>, number: &Number) {
    let mut buffer = [0; ANNOUNCEMENT_BYTES];
    loop {
        let received = socket.async_io(Interest::READABLE, |fd| {
            match recv(fd, &mut buffer, RecvFlags::DONTWAIT) {
                // Announcements were lost: ours may be among them.
                Err(rustix::io::Errno::NOBUFS) => Ok(None),
                other => Ok(Some(other?.0)),
            }
        });
        match received.await {
            Ok(None) => return,
            Ok(Some(length)) if concerns(buffer.get(..length).unwrap_or_default(), number) => {
                return;
            }
            Ok(Some(_)) => {}
            Err(_) => std::future::pending().await,
        }
    }
}

/// Whether an announcement (`change@/devices/…`, then `KEY=value`, each ended by a zero byte) tells of
/// a change of this block device.
fn concerns(announcement: &[u8], number: &Number) -> bool {
    let has = |key: &str, value: &str| {
        announcement.split(|byte| *byte == 0).any(|field| {
            field
                .strip_prefix(key.as_bytes())
                .and_then(|rest| rest.strip_prefix(b"="))
                == Some(value.as_bytes())
        })
    };
    has("ACTION", "change")
        && has("SUBSYSTEM", "block")
        && has("MAJOR", &number.major)
        && has("MINOR", &number.minor)
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

    #[tokio::test]
    async fn a_file_that_changes_is_noticed_but_not_with_every_write() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let file = File::create(&path).unwrap();
        let other = folder.path().join("other");
        let watched = [File::create(&other).unwrap(), file.try_clone().unwrap()];
        let paths = watched.map(|file| (format!("/proc/self/fd/{}", file.as_raw_fd()), file));
        let watch = watch_files(paths.iter().map(|(path, _)| path.clone()).collect()).unwrap();
        assert!(!soon(watch.changed()).await, "an idle file wakes nobody");
        file.set_len(4096).unwrap();
        assert!(comes(watch.changed()).await);
        watch.ignore_writes().unwrap();
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
        file.set_len(16384).unwrap();
        assert!(comes(watch.changed()).await);
        std::fs::write(&other, "x").unwrap();
        assert!(comes(watch.changed()).await, "every leg is watched");
    }

    #[tokio::test]
    async fn announcements_can_be_listened_to() {
        let device = File::open("/dev/null").unwrap();
        let watch = watch_device(&device).unwrap();
        assert!(matches!(&watch, Watch::Device { number, .. } if number.minor == "3"));
        assert!(!soon(watch.changed()).await);
    }

    #[test]
    fn only_a_change_of_our_device_concerns_us() {
        let ours = Number {
            major: "7".to_owned(),
            minor: "1".to_owned(),
        };
        let told = |text: &str| concerns(text.replace(' ', "\0").as_bytes(), &ours);
        let full = "change@/devices/virtual/block/loop1 ACTION=change DEVPATH=/devices/virtual/block/loop1 \
                    SUBSYSTEM=block MAJOR=7 MINOR=1 RESIZE=1 SEQNUM=5";
        let full = full.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(told(&full));
        for (from, to) in [
            ("ACTION=change", "ACTION=add"),
            ("SUBSYSTEM=block", "SUBSYSTEM=tty"),
            ("MAJOR=7", "MAJOR=77"),
            ("MINOR=1", "MINOR=11"),
        ] {
            assert!(!told(&full.replace(from, to)), "{to}");
        }
        assert!(!told(""));
    }
}
