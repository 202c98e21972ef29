//! Notices that the disk has grown, without looking at the clock: an idle disk costs no wake-up.
//!
//! A file is watched by inotify, a block device through the kernel's own announcements (uevents).
//! Where neither is to be had, SIGHUP remains.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use cleave_disk::{Disk, FileKind, Store};
use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
use rustix::fs::{major, minor};
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Our own writes change the file too, so a busy disk would wake us with each: after one event the
/// file is not watched for this long.
const PAUSE: Duration = Duration::from_secs(1);

/// The multicast group of the kernel's announcements (group 2 is udev's).
const KERNEL_GROUP: u32 = 1;

/// Longest announcement (the kernel's own buffer has 2 KiB).
const ANNOUNCEMENT_BYTES: usize = 4096;

/// Watches one disk.
#[derive(Debug)]
pub(crate) enum Watch {
    /// A regular file: its path in /proc, which keeps meaning the file that was opened.
    File {
        inotify: AsyncFd<OwnedFd>,
        path: String,
    },
    /// A block device: major and minor as announced.
    Device {
        socket: AsyncFd<OwnedFd>,
        number: Number,
    },
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
        // A stripe does not grow.
        let [leg] = disk.legs() else {
            return Watch::Nothing;
        };
        let made = match leg.store() {
            Store::File {
                file,
                kind: FileKind::Regular,
                ..
            } => watch_file(file.as_raw_fd()),
            Store::File {
                file,
                kind: FileKind::BlockDevice,
                ..
            } => watch_device(file),
            Store::Ram(_) | Store::Null { .. } | Store::Model { .. } => Ok(Watch::Nothing),
        };
        made.unwrap_or_else(|error| {
            tracing::info!(
                "growth of {} is not noticed by itself ({error}): send SIGHUP after growing it",
                disk.name()
            );
            Watch::Nothing
        })
    }

    /// Waits until the disk may have changed. To be called again after looking at it. Nothing is lost
    /// when the future is dropped.
    pub(crate) async fn changed(&self) {
        match self {
            Watch::File { inotify, .. } => written(inotify).await,
            Watch::Device { socket, number } => announced(socket, number).await,
            Watch::Nothing => std::future::pending().await,
        }
    }

    /// How long to wait after an event before watching again; `None`: it watches on by itself.
    pub(crate) fn pause(&self) -> Option<Duration> {
        matches!(self, Watch::File { .. }).then_some(PAUSE)
    }

    /// Watches again after an event and its pause. The disk is to be looked at once more after that,
    /// for what happened meanwhile.
    pub(crate) fn rearm(&self) {
        let Watch::File { inotify, path } = self else {
            return;
        };
        if let Err(error) = arm(inotify.get_ref(), path) {
            tracing::info!("growth is no longer noticed by itself ({error}): send SIGHUP");
        }
    }
}

fn watch_file(number: i32) -> io::Result<Watch> {
    let inotify = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let path = format!("/proc/self/fd/{number}");
    arm(&inotify, &path)?;
    Ok(Watch::File {
        inotify: readable(inotify)?,
        path,
    })
}

/// One event, then silence until armed again. Truncating and allocating count as modifying.
fn arm(inotify: &OwnedFd, path: &str) -> io::Result<()> {
    add_watch(inotify, path, WatchFlags::MODIFY | WatchFlags::ONESHOT)?;
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
    async fn growth_of_a_file_is_noticed_once_per_pause() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let file = File::create(&path).unwrap();
        let watch = watch_file(file.as_raw_fd()).unwrap();
        assert!(!soon(watch.changed()).await, "an idle file wakes nobody");
        file.set_len(4096).unwrap();
        assert!(comes(watch.changed()).await);
        // Renamed and replaced: the opened file is the one that counts.
        std::fs::rename(&path, folder.path().join("other")).unwrap();
        file.set_len(8192).unwrap();
        assert!(!soon(watch.changed()).await, "not watched during the pause");
        watch.rearm();
        file.set_len(16384).unwrap();
        assert!(comes(watch.changed()).await);
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
