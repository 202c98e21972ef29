//! Watched eventfds: their signals wake the ring.
//!
//! They come from a frontend and may be any kind of file: a pipe, a regular file, closed at the other end. Their
//! flags belong to the frontend. Their counters are neither needed nor read: a multishot poll reports every signal.
//!
//! Unsafe because entries are pushed to a ring; they point to no memory.

use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::squeue::Flags;
use io_uring::types::Fixed;
use io_uring::{cqueue, opcode};

use super::ring::{Ring, tag, while_short_of_memory};

/// Consecutive failures after which a watch is abandoned.
const FAILURES_MAX: u8 = 16;

/// One watched descriptor.
#[derive(Debug, Clone, Copy, Default)]
struct Watch {
    /// Distinguishes completions of this descriptor from those of a previous one in the slot.
    generation: u16,
    state: State,
    failures: u8,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// Nothing is watched, or the watch failed.
    #[default]
    Off,
    /// To be armed as soon as the queue accepts an entry.
    Wanted,
    /// The kernel reports signals.
    Armed,
}

/// The meaning of a poll's completion for its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signal {
    Woken(u16),
    /// From a watch that was removed.
    Stale,
}

/// The watches of a ring; slot n is file `first` + n.
#[derive(Debug)]
pub(crate) struct Watches {
    first: u32,
    slots: Box<[Watch]>,
    /// Watches in `Wanted`.
    wanted: usize,
}

/// User data of a poll: the tag in the top byte, then generation and slot.
fn user_data(generation: u16, slot: u16) -> u64 {
    tag::WATCH | u64::from(generation) << 16 | u64::from(slot)
}

impl Watches {
    pub(crate) fn new(first: u32, count: u16) -> Watches {
        let slots = vec![Watch::default(); usize::from(count)].into_boxed_slice();
        Watches {
            first,
            slots,
            wanted: 0,
        }
    }

    /// Watches `fd` in `slot` from now on. `Err`: the kernel does not accept the descriptor.
    pub(crate) fn set(&mut self, ring: &mut Ring, slot: u16, fd: &OwnedFd) -> Result<(), ()> {
        self.clear(ring, slot);
        let file = self.first + u32::from(slot);
        let Some(watch) = self.slots.get_mut(usize::from(slot)) else {
            return Err(());
        };
        // Short of memory the kernel may refuse the file, and without its kick a guest would never be served.
        let set = || ring.set_file(file, Some(fd.as_raw_fd()));
        while_short_of_memory(set, std::thread::sleep).map_err(drop)?;
        watch.state = State::Wanted;
        watch.failures = 0;
        self.wanted += 1;
        self.arm(ring, slot);
        Ok(())
    }

    /// Removes all watches when the ring is dropped. Linux 6.1 releases the ring's files only when no poll
    /// refers to any of them, and would never end its wait.
    pub(crate) fn clear_all(&mut self, ring: &mut Ring) {
        for slot in 0..self.slots.len() as u16 {
            let watch = self.slots.get(usize::from(slot));
            if watch.is_some_and(|watch| watch.state != State::Off) {
                self.clear(ring, slot);
            }
        }
    }

    /// Removes the watch in `slot`.
    pub(crate) fn clear(&mut self, ring: &mut Ring, slot: u16) {
        let file = self.first + u32::from(slot);
        let Some(watch) = self.slots.get_mut(usize::from(slot)) else {
            return;
        };
        let state = std::mem::take(&mut watch.state);
        let generation = watch.generation;
        watch.generation = generation.wrapping_add(1);
        match state {
            State::Off => return,
            State::Wanted => self.wanted -= 1,
            State::Armed => remove(ring, user_data(generation, slot)),
        }
        let _ = ring.set_file(file, None);
    }

    /// Arms the watches for which the queue had no room earlier.
    #[inline]
    pub(crate) fn arm_wanted(&mut self, ring: &mut Ring) {
        if self.wanted > 0 {
            self.arm_all(ring);
        }
    }

    #[cold]
    fn arm_all(&mut self, ring: &mut Ring) {
        for slot in 0..self.slots.len() {
            self.arm(ring, slot as u16);
        }
    }

    /// Returns true if a watch is still waiting for room in the queue.
    pub(crate) fn is_waiting(&self) -> bool {
        self.wanted > 0
    }

    fn arm(&mut self, ring: &mut Ring, slot: u16) {
        let Some(watch) = self.slots.get_mut(usize::from(slot)) else {
            return;
        };
        if watch.state != State::Wanted {
            return;
        }
        let file = Fixed(self.first + u32::from(slot));
        let poll = opcode::PollAdd::new(file, libc::POLLIN as u32)
            .multi(true)
            .build();
        // SAFETY: a poll points to no memory.
        if unsafe { ring.push(&poll.user_data(user_data(watch.generation, slot))) } {
            watch.state = State::Armed;
            self.wanted -= 1;
        }
    }

    /// Handles a poll's completion. The poll stays armed while the kernel says so. Otherwise it is armed
    /// again, unless its report would recur at once each time (a pipe hung up, a file that cannot be polled):
    /// the watch is then dead, and its owner is woken this once.
    pub(crate) fn completed(&mut self, ring: &mut Ring, entry: &cqueue::Entry) -> Signal {
        let slot = entry.user_data() as u16;
        let generation = (entry.user_data() >> 16) as u16;
        let Some(watch) = self.slots.get_mut(usize::from(slot)) else {
            return Signal::Stale;
        };
        if watch.generation != generation || watch.state != State::Armed {
            return Signal::Stale;
        }
        if cqueue::more(entry.flags()) {
            watch.failures = 0;
            return Signal::Woken(slot);
        }
        watch.state = State::Off;
        watch.failures = watch.failures.saturating_add(1);
        if watch.failures < FAILURES_MAX && is_passing(entry.result()) {
            watch.state = State::Wanted;
            self.wanted += 1;
            self.arm(ring, slot);
        }
        Signal::Woken(slot)
    }
}

/// Returns true if a poll that ended with `result` may be armed again: it reported a signal and was cut short (a full
/// completion queue), or the kernel was out of memory.
fn is_passing(result: i32) -> bool {
    let hung_up = i32::from(libc::POLLHUP | libc::POLLERR | libc::POLLNVAL);
    match result {
        0.. => result & hung_up == 0,
        _ => matches!(
            -result,
            libc::ENOMEM | libc::EAGAIN | libc::EINTR | libc::ECANCELED
        ),
    }
}

/// Ends a poll by cancelling it. A removal would fail (EALREADY) while the poll reports a signal, and leave it armed.
fn remove(ring: &mut Ring, target: u64) {
    // The flag has no meaning for an operation without a file, but the ring accepts no entry without it.
    let entry = opcode::AsyncCancel::new(target)
        .build()
        .flags(Flags::FIXED_FILE | Flags::SKIP_SUCCESS)
        .user_data(tag::IGNORED);
    // SAFETY: a cancellation points to no memory. If the queue is full the poll stays armed, and its reports
    // are stale.
    let _ = unsafe { ring.push(&entry) };
}
