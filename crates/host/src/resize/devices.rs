//! Block devices, whose changes the kernel announces to one socket (uevents).

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rustix::fs::{major, minor};
use rustix::io::Errno;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::readable::readable;

/// The multicast group of the kernel's announcements (group 2 is udev's).
const KERNEL_GROUP: u32 = 1;

/// Longest announcement (the kernel's own buffer has 2 KiB).
const ANNOUNCEMENT_BYTES: usize = 4096;

/// The socket, and the disks that listen to it.
#[derive(Debug)]
pub(super) struct Devices {
    socket: OwnedFd,
    watched: Mutex<Vec<(DeviceNumber, Arc<Notify>)>>,
    reading: OnceLock<AbortHandle>,
}

/// A device number as uevents write it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeviceNumber {
    major: String,
    minor: String,
}

/// A disk's place among those that listen. It ends with this value.
#[derive(Debug)]
pub(crate) struct DeviceWatch {
    devices: Arc<Devices>,
    changed: Arc<Notify>,
}

impl Devices {
    pub(super) fn open() -> Result<Devices, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            flags,
            Some(KOBJECT_UEVENT),
        )?;
        bind(&socket, &SocketAddrNetlink::new(0, KERNEL_GROUP))?;
        Ok(Devices {
            socket,
            watched: Mutex::default(),
            reading: OnceLock::new(),
        })
    }

    /// Watches a block device. To be called inside the runtime.
    pub(super) fn watch(self: &Arc<Devices>, device: &File) -> io::Result<DeviceWatch> {
        let number = device.metadata()?.rdev();
        let number = DeviceNumber {
            major: major(number).to_string(),
            minor: minor(number).to_string(),
        };
        // Nothing is read, and nothing wakes, before there is a disk to tell.
        if self.reading.get().is_none() {
            let socket = readable(self.socket.try_clone()?)?;
            let reading = tokio::spawn(read(socket, Arc::downgrade(self)));
            let _ = self.reading.set(reading.abort_handle());
        }
        let changed = Arc::new(Notify::new());
        self.lock().push((number, changed.clone()));
        Ok(DeviceWatch {
            devices: self.clone(),
            changed,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(DeviceNumber, Arc<Notify>)>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the disks that an announcement concerns; all of them, if announcements were lost.
    fn tell(&self, announcement: Option<&[u8]>) {
        for (number, changed) in self.lock().iter() {
            if announcement.is_none_or(|text| concerns(text, number)) {
                changed.notify_one();
            }
        }
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        if let Some(reading) = self.reading.get() {
            reading.abort();
        }
    }
}

async fn read(socket: AsyncFd<OwnedFd>, devices: Weak<Devices>) {
    loop {
        let mut buffer = [0; ANNOUNCEMENT_BYTES];
        let received = socket.async_io(Interest::READABLE, |fd| {
            match recv(fd, &mut buffer, RecvFlags::DONTWAIT) {
                Err(Errno::NOBUFS) => Ok(None),
                other => Ok(Some(other?.0)),
            }
        });
        // A broken watch stays silent.
        let (Ok(length), Some(devices)) = (received.await, devices.upgrade()) else {
            return;
        };
        devices.tell(length.map(|length| buffer.get(..length).unwrap_or_default()));
    }
}

impl DeviceWatch {
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }
}

impl Drop for DeviceWatch {
    fn drop(&mut self) {
        let is_other = |changed: &Arc<Notify>| !Arc::ptr_eq(changed, &self.changed);
        self.devices.lock().retain(|(_, changed)| is_other(changed));
    }
}

/// Returns true if an announcement (`change@/devices/…`, then `KEY=value`, each ended by a zero byte) tells of a change of this
/// block device.
fn concerns(announcement: &[u8], number: &DeviceNumber) -> bool {
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

    #[test]
    fn only_a_change_of_our_device_concerns_us() {
        let ours = DeviceNumber {
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
