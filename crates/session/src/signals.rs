//! What other threads tell a session, whether it serves its frontend or waits for the disk.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cleave_worker::ALARM_RETIRED;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};

/// Flags of a session that other threads set, and the eventfds that wake it.
#[derive(Debug)]
pub(crate) struct SessionSignals {
    /// Wakes the session to check the flags, or for the answer of a worker.
    pub(crate) wake: Arc<OwnedFd>,
    /// Written by workers that cannot continue, or that have retired a vring.
    pub(crate) alarm: Arc<OwnedFd>,
    hang_up: AtomicBool,
    hand_over: AtomicBool,
    hurry: AtomicBool,
    config_changed: AtomicBool,
    owns: AtomicBool,
    awaits_stalled: AtomicBool,
}

/// Why a session must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Summons {
    /// The session was asked to hang up, or its frontend has left.
    HangUp,
    /// The session was asked to hand itself over to another process.
    HandOver,
    /// A worker cannot continue.
    Alarm,
}

impl SessionSignals {
    pub(crate) fn new() -> io::Result<SessionSignals> {
        let bell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(SessionSignals {
            wake: Arc::new(bell()?),
            alarm: Arc::new(bell()?),
            hang_up: AtomicBool::new(false),
            hand_over: AtomicBool::new(false),
            hurry: AtomicBool::new(false),
            config_changed: AtomicBool::new(false),
            owns: AtomicBool::new(false),
            awaits_stalled: AtomicBool::new(false),
        })
    }

    /// Wakes the session. A write fails only if the eventfd is full, which wakes just as well.
    pub(crate) fn ring(&self) {
        let _ = write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Asks the session to end.
    pub(crate) fn hang_up(&self) {
        self.hang_up.store(true, Ordering::Release);
        self.ring();
    }

    /// Asks the session to end in such a way that another process can go on with it.
    pub(crate) fn hand_over(&self) {
        self.hand_over.store(true, Ordering::Release);
        self.ring();
    }

    /// Takes that back. The session may have begun to hand itself over.
    pub(crate) fn stay(&self) {
        self.hand_over.store(false, Ordering::Release);
    }

    /// Asks the session to end rather than wait for its frontend.
    pub(crate) fn hurry(&self) {
        self.hurry.store(true, Ordering::Release);
        self.ring();
    }

    /// Returns true if the frontend is not waited for.
    pub(crate) fn is_hurried(&self) -> bool {
        self.hurry.load(Ordering::Acquire) || self.is_hung_up()
    }

    pub(crate) fn is_hung_up(&self) -> bool {
        self.hang_up.load(Ordering::Acquire)
    }

    /// Notes that the guest is to be told of a new configuration.
    pub(crate) fn set_config_changed(&self) {
        self.config_changed.store(true, Ordering::Release);
    }

    /// Returns true once for all changes of the configuration since the last call.
    pub(crate) fn take_config_changed(&self) -> bool {
        self.config_changed.swap(false, Ordering::AcqRel)
    }

    /// Notes whether the session owns the disk.
    pub(crate) fn set_owns(&self, owns: bool) {
        self.owns.store(owns, Ordering::Release);
    }

    pub(crate) fn owns(&self) -> bool {
        self.owns.load(Ordering::Acquire)
    }

    /// Notes whether the guest's move waits for requests that the disk failed.
    pub(crate) fn set_awaits_stalled(&self, waits: bool) {
        self.awaits_stalled.store(waits, Ordering::Release);
    }

    pub(crate) fn awaits_stalled(&self) -> bool {
        self.awaits_stalled.load(Ordering::Acquire)
    }

    /// Clears the eventfds. Returns why the session must end, if it must.
    pub(crate) fn check(&self) -> Option<Summons> {
        // Read before the flags: a flag that is set later comes with another write.
        let _ = read(&self.wake, &mut [0u8; 8]);
        if self.is_hung_up() {
            return Some(Summons::HangUp);
        }
        if self.hand_over.load(Ordering::Acquire) {
            return Some(Summons::HandOver);
        }
        let mut alarms = [0; 8];
        read(&self.alarm, &mut alarms).ok()?;
        // The device status, which a retired vring changes, counts as configuration.
        self.set_config_changed();
        (u64::from_ne_bytes(alarms) % ALARM_RETIRED != 0).then_some(Summons::Alarm)
    }
}
