//! Kicks and calls of a split vring: how each side says whether it wants to be signalled, and why neither misses
//! the other (virtio 1.3 §2.7.7, §2.7.10).
//!
//! Both directions work alike. The side that adds entries stores the index, then checks whether the other wants a
//! signal. The side that is about to sleep announces that it wants one, then checks the index. Each has a full
//! fence between the two, so at least one of them sees what the other wrote.

/// The words of a vring that this takes: single accesses, of which the indices order what stands around them.
pub(crate) trait Words {
    /// The guest's index; all that it wrote before is seen after.
    fn avail_index(&self) -> u16;
    /// The guest's wish for calls, without EVENT_IDX.
    fn avail_flags(&self) -> u16;
    /// And with it: the used entry that it wants to be called for.
    fn used_event(&self) -> u16;
    /// Our index; who sees it sees all that was written before.
    fn set_used_index(&self, index: u16);
    /// Our wish for kicks, without EVENT_IDX.
    fn set_used_flags(&self, flags: u16);
    /// And with it: the available entry that we want to be kicked for.
    fn set_avail_event(&self, position: u16);
    /// All accesses before it come before all after it, for everybody.
    fn fence(&self);
}

/// Available ring flag: the guest wants no calls.
const AVAIL_NO_INTERRUPT: u16 = 1;
/// Used ring flag: we want no kicks.
const USED_NO_NOTIFY: u16 = 1;

/// This side's announcements about kicks and knowledge about calls.
#[derive(Debug)]
pub(crate) struct Signals {
    event_idx: bool,
    /// The guest was told that kicks are not needed (only without EVENT_IDX).
    disarmed: bool,
    /// Entry whose arrival the guest was last asked to kick for (EVENT_IDX).
    armed_at: u16,
    /// Nothing was published yet: what `used_event` means for the entries before is unknown.
    fresh: bool,
}

impl Signals {
    /// Armed for the entry at `position`.
    pub(crate) fn new(words: &impl Words, event_idx: bool, position: u16) -> Signals {
        let mut signals = Signals {
            event_idx,
            disarmed: true,
            armed_at: position,
            fresh: true,
        };
        signals.restart(words, position);
        signals
    }

    /// Begins anew in memory that may hold NO_NOTIFY or a stale event index, as an earlier daemon left it.
    pub(crate) fn restart(&mut self, words: &impl Words, position: u16) {
        (self.disarmed, self.fresh) = (true, true);
        self.want_kicks(words, position);
    }

    /// Shows the guest used entries, from index `old` up to `new`, of which there is one at least; whether it
    /// wants a call for them (EVENT_IDX exact, else by its flag).
    #[inline]
    pub(crate) fn publish(&mut self, words: &impl Words, old: u16, new: u16) -> bool {
        words.set_used_index(new);
        // The index must be out before we look whether the guest wants a call (a lost call otherwise).
        words.fence();
        if !self.event_idx {
            return words.avail_flags() & AVAIL_NO_INTERRUPT == 0;
        }
        // The first call is made in any case: whether the guest was called for entries before our
        // start is unknown. One call too many costs little, one too few is a guest that hangs.
        std::mem::take(&mut self.fresh) || passed(words.used_event(), old, new)
    }

    /// Asks the guest for a kick when it adds the entry at `position`, and looks; `true`: it has done so meanwhile.
    #[inline]
    pub(crate) fn arm(&mut self, words: &impl Words, position: u16) -> bool {
        self.want_kicks(words, position);
        // The wish must be out before we look at the index (a lost kick otherwise).
        words.fence();
        words.avail_index() != position
    }

    fn want_kicks(&mut self, words: &impl Words, position: u16) {
        if self.event_idx {
            self.set_avail_event(words, position);
        }
        if self.disarmed {
            words.set_used_flags(0);
            self.disarmed = false;
        }
    }

    /// Tells the guest that kicks are not needed (a hint); the next entry is at `position`. With EVENT_IDX it is
    /// enough that the event index stays behind, which it does once an entry was taken; only where none was since
    /// the vring was armed it is put behind, where it is not met before the index has gone all the way round.
    #[inline]
    pub(crate) fn disarm(&mut self, words: &impl Words, position: u16) {
        if self.event_idx {
            if self.armed_at == position {
                self.set_avail_event(words, position.wrapping_sub(1));
            }
        } else if !self.disarmed {
            words.set_used_flags(USED_NO_NOTIFY);
            self.disarmed = true;
        }
    }

    fn set_avail_event(&mut self, words: &impl Words, position: u16) {
        words.set_avail_event(position);
        self.armed_at = position;
    }
}

/// Whether going from `old` to `new` passed the entry at `event` (virtio 1.3 §2.7.10.1). The steps are at
/// most a vring's size, so that the arithmetic modulo 2^16 is exact.
#[inline]
fn passed(event: u16, old: u16, new: u16) -> bool {
    // Worked: event 9, from 8 to 10: 10 - 9 - 1 = 0 < 2, call. event 10: 65535 < 2 is false: wait.
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Every order in which the two sides' accesses can take effect, tried by loom: memory of processors that see
/// each other's stores late included. A side that sleeps and is never signalled hangs here, as its guest would.
#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use loom::sync::Notify;
    use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
    use loom::sync::atomic::{AtomicU16, fence};
    use loom::thread;

    use super::*;

    /// The shared words, and the two eventfds.
    struct Shared {
        avail_index: AtomicU16,
        avail_flags: AtomicU16,
        used_event: AtomicU16,
        used_index: AtomicU16,
        used_flags: AtomicU16,
        avail_event: AtomicU16,
        kick: Notify,
        call: Notify,
        /// Our side forgets its fences.
        is_careless: bool,
    }

    impl Words for Shared {
        fn avail_index(&self) -> u16 {
            self.avail_index.load(Acquire)
        }
        fn avail_flags(&self) -> u16 {
            self.avail_flags.load(Relaxed)
        }
        fn used_event(&self) -> u16 {
            self.used_event.load(Relaxed)
        }
        fn set_used_index(&self, index: u16) {
            self.used_index.store(index, Release);
        }
        fn set_used_flags(&self, flags: u16) {
            self.used_flags.store(flags, Relaxed);
        }
        fn set_avail_event(&self, position: u16) {
            self.avail_event.store(position, Relaxed);
        }
        fn fence(&self) {
            if !self.is_careless {
                fence(SeqCst);
            }
        }
    }

    /// The guest's part, as its drivers do it.
    impl Shared {
        fn new(is_careless: bool) -> Shared {
            Shared {
                avail_index: AtomicU16::new(0),
                avail_flags: AtomicU16::new(0),
                used_event: AtomicU16::new(0),
                used_index: AtomicU16::new(0),
                used_flags: AtomicU16::new(0),
                avail_event: AtomicU16::new(0),
                kick: Notify::new(),
                call: Notify::new(),
                is_careless,
            }
        }

        /// Makes an entry available, and kicks if that is wanted.
        fn add(&self, event_idx: bool, old: u16) {
            self.avail_index.store(old.wrapping_add(1), Release);
            fence(SeqCst);
            let is_wanted = match event_idx {
                true => passed(self.avail_event.load(Relaxed), old, old.wrapping_add(1)),
                false => self.used_flags.load(Relaxed) & USED_NO_NOTIFY == 0,
            };
            if is_wanted {
                self.kick.notify();
            }
        }

        /// Asks for a call for the used entry at `position`, and looks; `true`: it is there.
        fn await_used(&self, event_idx: bool, position: u16) -> bool {
            match event_idx {
                true => self.used_event.store(position, Relaxed),
                false => self.avail_flags.store(0, Relaxed),
            }
            fence(SeqCst);
            self.used_index.load(Acquire) != position
        }
    }

    /// The worker has been awake, and falls asleep while the guest adds an entry.
    fn sleeps_beside_an_add(event_idx: bool, is_careless: bool) {
        let _alone = crate::rig::alone();
        loom::model(move || {
            let shared = Arc::new(Shared::new(is_careless));
            let mut signals = Signals::new(&*shared, event_idx, 0);
            signals.disarm(&*shared, 0);
            let guest = {
                let shared = shared.clone();
                thread::spawn(move || shared.add(event_idx, 0))
            };
            if !signals.arm(&*shared, 0) {
                shared.kick.wait();
            }
            guest.join().unwrap();
        });
    }

    /// The worker ends a request while the guest falls asleep on it.
    fn publishes_beside_a_sleep(event_idx: bool, is_careless: bool) {
        let _alone = crate::rig::alone();
        loom::model(move || {
            let shared = Arc::new(Shared::new(is_careless));
            // So far the guest did not want to be called: it is at the second entry.
            shared.avail_flags.store(AVAIL_NO_INTERRUPT, Relaxed);
            let mut signals = Signals::new(&*shared, event_idx, 0);
            signals.publish(&*shared, 0, 1);
            let guest = {
                let shared = shared.clone();
                thread::spawn(move || {
                    if !shared.await_used(event_idx, 1) {
                        shared.call.wait();
                    }
                })
            };
            if signals.publish(&*shared, 1, 2) {
                shared.call.notify();
            }
            guest.join().unwrap();
        });
    }

    /// Two entries, two sleeps: what the worker said before it slept the first time does not stand in the way of the
    /// second.
    fn sleeps_twice(event_idx: bool) {
        let _alone = crate::rig::alone();
        loom::model(move || {
            let shared = Arc::new(Shared::new(false));
            let mut signals = Signals::new(&*shared, event_idx, 0);
            let guest = {
                let shared = shared.clone();
                thread::spawn(move || {
                    shared.add(event_idx, 0);
                    shared.add(event_idx, 1);
                })
            };
            for position in 0..2 {
                while !signals.arm(&*shared, position) {
                    shared.kick.wait();
                }
                signals.disarm(&*shared, position + 1);
            }
            guest.join().unwrap();
        });
    }

    #[test]
    fn no_kick_is_lost() {
        for event_idx in [false, true] {
            sleeps_beside_an_add(event_idx, false);
            sleeps_twice(event_idx);
        }
    }

    #[test]
    fn no_call_is_lost() {
        for event_idx in [false, true] {
            publishes_beside_a_sleep(event_idx, false);
        }
    }

    /// What the tests above would see, were the fences not there.
    #[test]
    fn without_fences_signals_are_lost() {
        for event_idx in [false, true] {
            let kick = || sleeps_beside_an_add(event_idx, true);
            assert!(std::panic::catch_unwind(kick).is_err(), "{event_idx}");
            let call = || publishes_beside_a_sleep(event_idx, true);
            assert!(std::panic::catch_unwind(call).is_err(), "{event_idx}");
        }
    }
}
