//! Settings of each vring, and whether it runs.

use std::os::fd::OwnedFd;

use cleave_guest::{Memory, VringLayout};
use cleave_worker::Stopped;

use crate::MessageRefusal;

/// Maximum number of vrings of a device: messages with a descriptor name them in eight bits.
pub(crate) const VRINGS_MAX: u16 = 256;

/// Addresses in the frontend's own address space (SET_VRING_ADDR).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UserAddrs {
    pub(crate) desc: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
    /// Where the dirty log has the used ring, as a guest address. `None`: writes to it are not marked.
    pub(crate) used_log: Option<u64>,
}

impl UserAddrs {
    /// Translates them to guest addresses. `Vring::new` checks that each part lies in memory entirely.
    pub(crate) fn layout(self, size: u16, memory: &Memory) -> Result<VringLayout, String> {
        let find = |part, addr| {
            memory
                .guest_addr(addr)
                .ok_or_else(|| format!("its {part} at {addr:#x} is in no memory region"))
        };
        Ok(VringLayout {
            size,
            desc_addr: find("descriptor table", self.desc)?,
            avail_addr: find("available ring", self.avail)?,
            used_addr: find("used ring", self.used)?,
        })
    }
}

/// A descriptor of a vring that can change while the vring runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SignalFd {
    Call,
    Err,
}

/// How the guest notifies us of available requests.
#[derive(Debug, Default)]
pub(crate) enum Kick {
    /// Not known yet: the vring must not start.
    #[default]
    Unset,
    /// Never: the vring is polled.
    Polled,
    /// Through an eventfd.
    Fd(OwnedFd),
}

impl Kick {
    pub(crate) fn new(fd: Option<OwnedFd>) -> Kick {
        fd.map_or(Kick::Polled, Kick::Fd)
    }

    pub(crate) fn try_clone(&self) -> std::io::Result<Kick> {
        Ok(match self {
            Kick::Unset => Kick::Unset,
            Kick::Polled => Kick::Polled,
            Kick::Fd(fd) => Kick::Fd(fd.try_clone()?),
        })
    }

    /// Returns the descriptor for a worker.
    pub(crate) fn into_fd(self) -> Option<OwnedFd> {
        match self {
            Kick::Fd(fd) => Some(fd),
            Kick::Unset | Kick::Polled => None,
        }
    }
}

/// The settings of a vring. They survive a stop.
#[derive(Debug, Default)]
pub(crate) struct VringSettings {
    pub(crate) size: Option<u16>,
    pub(crate) addrs: Option<UserAddrs>,
    /// Available index to start at.
    pub(crate) base: u16,
    /// The answer to GET_VRING_BASE: where the vring starts or stopped. Separate from `base`, because a reset
    /// keeps it.
    pub(crate) position: u16,
    /// True if it stopped and left requests in flight, so there is no such position.
    pub(crate) has_left: bool,
    /// Moved to the worker at the start, so that a stopped vring waits for a new one.
    pub(crate) kick: Kick,
    /// Also kept for the next start: not every frontend sends it again.
    pub(crate) call: Option<OwnedFd>,
    pub(crate) err: Option<OwnedFd>,
    pub(crate) enabled: bool,
}

impl VringSettings {
    /// Returns the size and addresses, if all settings for a start are there: size, addresses, and the kick that triggers it.
    pub(crate) fn complete(&self) -> Option<(u16, UserAddrs)> {
        match (&self.kick, self.size, self.addrs) {
            (Kick::Unset, _, _) => None,
            (_, Some(size), Some(addrs)) => Some((size, addrs)),
            _ => None,
        }
    }

    /// Sets the position to start at, or the one at which it stopped.
    pub(crate) fn set_base(&mut self, base: u16) {
        self.base = base;
        self.position = base;
        self.has_left = false;
    }

    /// Returns the position that is still to be answered although the vring was reset and starts elsewhere.
    pub(crate) fn reset_position(&self) -> Option<u16> {
        (self.position != self.base).then_some(self.position)
    }

    /// Notes how its worker gave it back.
    pub(crate) fn stopped(&mut self, stopped: Stopped) {
        match stopped {
            Stopped::At(position) => self.set_base(position),
            Stopped::Left => self.has_left = true,
            Stopped::Unknown => {}
        }
    }

    /// Resets the settings. The descriptors are kept: they belong to the frontend, not to the device state, and
    /// QEMU does not promise to send them again. The position stays available: to pause a guest, QEMU before
    /// 8.1 first sets status 0 and then asks for the position. An answer of 0 would repeat all requests since
    /// the guest's boot.
    pub(crate) fn reset(&mut self) {
        *self = VringSettings {
            position: self.position,
            has_left: self.has_left,
            call: self.call.take(),
            err: self.err.take(),
            ..VringSettings::default()
        };
    }
}

/// A vring.
#[derive(Debug, Default)]
pub(crate) struct VringEntry {
    pub(crate) settings: VringSettings,
    /// Its addresses while a worker serves it.
    pub(crate) running: Option<VringLayout>,
    /// A copy of the kick that its worker has, for a process that takes the session over.
    pub(crate) kick: Kick,
    /// True if its requests in flight are recorded while it runs.
    pub(crate) is_recorded: bool,
}

impl VringEntry {
    /// Refuses a message that only a stopped vring accepts.
    pub(crate) fn must_be_stopped(&self, index: u16, what: &str) -> Result<(), MessageRefusal> {
        match self.running {
            None => Ok(()),
            Some(_) => Err(MessageRefusal::message(format!(
                "{what} while vring {index} runs"
            ))),
        }
    }
}

/// All vrings of a device.
#[derive(Debug)]
pub(crate) struct Vrings(Vec<VringEntry>);

impl Vrings {
    pub(crate) fn new(vrings_max: u16) -> Vrings {
        let count = vrings_max.clamp(1, VRINGS_MAX);
        Vrings((0..count).map(|_| VringEntry::default()).collect())
    }

    /// Returns the number of vrings.
    pub(crate) fn count(&self) -> u16 {
        u16::try_from(self.0.len()).unwrap_or(VRINGS_MAX)
    }

    /// Returns the entry for an index as it arrived in a message, with all of its bits.
    pub(crate) fn get(&mut self, index: u64) -> Result<(u16, &mut VringEntry), MessageRefusal> {
        let count = self.0.len();
        u16::try_from(index)
            .ok()
            .and_then(|index| Some((index, self.0.get_mut(usize::from(index))?)))
            .ok_or_else(|| MessageRefusal::message(format!("vring {index} of {count}")))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut VringEntry)> {
        (0..).zip(&mut self.0)
    }

    pub(crate) fn any_running(&self) -> bool {
        self.0.iter().any(|entry| entry.running.is_some())
    }

    /// Returns true if the rings of all vrings that run are in this memory.
    pub(crate) fn are_within(&self, memory: &Memory) -> bool {
        let mut running = self.0.iter().filter_map(|entry| entry.running);
        running.all(|layout| layout.check(memory).is_ok())
    }

    /// Returns true if a vring stopped and left requests in flight.
    pub(crate) fn have_left(&self) -> bool {
        self.0.iter().any(|entry| entry.settings.has_left)
    }

    /// Returns true if the guest may be notified. With all vrings stopped or disabled the device is suspended and must be silent
    /// (vhost-user "Suspended device state").
    pub(crate) fn any_served(&self, all_enabled: bool) -> bool {
        self.0
            .iter()
            .any(|entry| entry.running.is_some() && (entry.settings.enabled || all_enabled))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_not_truncated() {
        let mut vrings = Vrings::new(4);
        for index in [0, 3] {
            assert_eq!(u64::from(vrings.get(index).unwrap().0), index);
        }
        let beyond = [4, 255, 256, 65536, 65537, u64::from(u32::MAX), u64::MAX];
        for index in beyond {
            assert!(vrings.get(index).is_err(), "{index}");
        }
    }

    #[test]
    fn there_are_as_many_vrings_as_eight_bits_can_name() {
        let rows = [
            (0, 1),
            (1, 1),
            (64, 64),
            (256, 256),
            (257, 256),
            (u16::MAX, 256),
        ];
        for (asked, got) in rows {
            assert_eq!(Vrings::new(asked).count(), got);
        }
    }

    #[test]
    fn a_start_needs_size_addresses_and_kick() {
        let addrs = UserAddrs {
            desc: 0,
            avail: 0,
            used: 0,
            used_log: None,
        };
        for bits in 0..8 {
            let settings = VringSettings {
                size: (bits & 1 != 0).then_some(8),
                addrs: (bits & 2 != 0).then_some(addrs),
                kick: if bits & 4 != 0 {
                    Kick::Polled
                } else {
                    Kick::Unset
                },
                ..VringSettings::default()
            };
            assert_eq!(settings.complete().is_some(), bits == 7, "{bits:#b}");
        }
    }
}
