//! Kicks and calls of a split vring: how each side announces whether it wants to be notified, and why no
//! notification is lost (virtio 1.3 §2.7.7, §2.7.10).
//!
//! Both directions work alike. The side that adds entries stores the index, then checks whether the other
//! side wants a notification. The side that is about to sleep announces that it wants one, then checks the
//! index. Each has a full fence between the two, so at least one of them sees the other's store.

/// Access to the shared words of a vring. Each is a single access; the indices order the accesses around them.
pub(crate) trait RingWords {
    /// Returns the guest's index. Acquire: everything that the guest wrote before it is visible afterwards.
    fn avail_index(&self) -> u16;
    /// Returns the guest's flags, which say if it wants calls, without EVENT_IDX.
    fn avail_flags(&self) -> u16;
    /// Returns the used entry for which the guest wants a call, with EVENT_IDX.
    fn used_event(&self) -> u16;
    /// Stores our index. Release: everything written before it is visible to a guest that sees it.
    fn set_used_index(&self, index: u16);
    /// Stores our flags, which say if we want kicks, without EVENT_IDX.
    fn set_used_flags(&self, flags: u16);
    /// Stores the available entry for which we want a kick, with EVENT_IDX.
    fn set_avail_event(&self, position: u16);
    /// Makes a full fence: all earlier accesses take effect before all later ones, for every thread.
    fn fence(&self);
}

/// Available ring flag: the guest wants no calls.
const AVAIL_NO_INTERRUPT: u16 = 1;
/// Used ring flag: we want no kicks.
const USED_NO_NOTIFY: u16 = 1;

/// This side's kick announcements and its knowledge about calls.
#[derive(Debug)]
pub(crate) struct VringSignals {
    event_idx: bool,
    /// The guest was told that kicks are not needed (only without EVENT_IDX).
    disarmed: bool,
    /// The entry for which the guest was last asked to kick (EVENT_IDX).
    armed_at: u16,
    /// Nothing has been published yet, so the meaning of `used_event` for earlier entries is unknown.
    fresh: bool,
}

impl VringSignals {
    /// Makes the state of a vring that is armed for the entry at `position`.
    pub(crate) fn new(words: &impl RingWords, event_idx: bool, position: u16) -> VringSignals {
        let mut signals = VringSignals {
            event_idx,
            disarmed: true,
            armed_at: position,
            fresh: true,
        };
        signals.restart(words, position);
        signals
    }

    /// Starts again in memory that may contain NO_NOTIFY or a stale event index of an earlier daemon.
    pub(crate) fn restart(&mut self, words: &impl RingWords, position: u16) {
        (self.disarmed, self.fresh) = (true, true);
        self.ask(words, position);
    }

    /// Publishes used entries from index `old` up to `new`, at least one. Returns whether the guest wants a
    /// call for them (exact with EVENT_IDX, otherwise by its flag).
    #[inline]
    pub(crate) fn publish(&mut self, words: &impl RingWords, old: u16, new: u16) -> bool {
        words.set_used_index(new);
        // The index must be stored before we read whether the guest wants a call; otherwise a call could be lost.
        words.fence();
        if !self.event_idx {
            return words.avail_flags() & AVAIL_NO_INTERRUPT == 0;
        }
        // The first call is always made, because it is unknown whether the guest was called for entries
        // before our start. An extra call costs little; a missing one hangs the guest.
        std::mem::take(&mut self.fresh) || passed(words.used_event(), old, new)
    }

    /// Asks the guest for a kick when it adds the entry at `position`. A fence and [`VringSignals::has_come`] have to
    /// follow: it may have added one before it could see that.
    #[inline]
    pub(crate) fn ask(&mut self, words: &impl RingWords, position: u16) {
        if self.event_idx {
            self.set_avail_event(words, position);
        }
        if self.disarmed {
            words.set_used_flags(0);
            self.disarmed = false;
        }
    }

    /// Returns true if the guest has added the entry at `position`. The request for its kick must have been stored, and a full
    /// fence made, before; otherwise a kick could be lost.
    #[inline]
    pub(crate) fn has_come(words: &impl RingWords, position: u16) -> bool {
        words.avail_index() != position
    }

    /// Tells the guest that kicks are not needed (a hint); the next entry is at `position`. With EVENT_IDX it
    /// is enough that the event index stays behind, which it does once an entry has been taken. If none was
    /// taken since the vring was armed, the event index is moved back, so that the guest does not reach it
    /// before its index has gone all the way round.
    #[inline]
    pub(crate) fn disarm(&mut self, words: &impl RingWords, position: u16) {
        if self.event_idx {
            if self.armed_at == position {
                self.set_avail_event(words, position.wrapping_sub(1));
            }
        } else if !self.disarmed {
            words.set_used_flags(USED_NO_NOTIFY);
            self.disarmed = true;
        }
    }

    fn set_avail_event(&mut self, words: &impl RingWords, position: u16) {
        words.set_avail_event(position);
        self.armed_at = position;
    }
}

/// Returns true if going from `old` to `new` passes the entry at `event` (virtio 1.3 §2.7.10.1). The distance is at most a
/// vring's size, so the arithmetic modulo 2^16 is exact.
#[inline]
fn passed(event: u16, old: u16, new: u16) -> bool {
    // From 8 to 10, event 9: 10 - 9 - 1 = 0 < 2, so call; event 10: 65535 < 2 is false, so do not.
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Loom tries every order in which the two sides' accesses can take effect, including processors that see
/// each other's stores late. A side that sleeps and is never notified hangs here, like its guest would.
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
        /// Our side omits its fences.
        is_careless: bool,
    }

    impl RingWords for Shared {
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

    /// The guest's side, as drivers implement it.
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

        /// Makes an entry available, and kicks if a kick is wanted.
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

        /// Asks for a call for the used entry at `position`, then checks. `true`: the entry is there.
        fn await_used(&self, event_idx: bool, position: u16) -> bool {
            match event_idx {
                true => self.used_event.store(position, Relaxed),
                false => self.avail_flags.store(0, Relaxed),
            }
            fence(SeqCst);
            self.used_index.load(Acquire) != position
        }
    }

    /// Asks for a kick, then checks.
    fn arm(signals: &mut VringSignals, words: &Shared, position: u16) -> bool {
        signals.ask(words, position);
        words.fence();
        VringSignals::has_come(words, position)
    }

    /// The worker was awake, and falls asleep while the guest adds an entry.
    fn sleeps_beside_an_add(event_idx: bool, is_careless: bool) {
        let _alone = crate::rig::alone();
        loom::model(move || {
            let shared = Arc::new(Shared::new(is_careless));
            let mut signals = VringSignals::new(&*shared, event_idx, 0);
            signals.disarm(&*shared, 0);
            let guest = {
                let shared = shared.clone();
                thread::spawn(move || shared.add(event_idx, 0))
            };
            if !arm(&mut signals, &shared, 0) {
                shared.kick.wait();
            }
            guest.join().unwrap();
        });
    }

    /// The worker completes a request while the guest falls asleep waiting for it.
    fn publishes_beside_a_sleep(event_idx: bool, is_careless: bool) {
        let _alone = crate::rig::alone();
        loom::model(move || {
            let shared = Arc::new(Shared::new(is_careless));
            // So far the guest did not want a call: it is at the second entry.
            shared.avail_flags.store(AVAIL_NO_INTERRUPT, Relaxed);
            let mut signals = VringSignals::new(&*shared, event_idx, 0);
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

    /// Two entries, two sleeps: the announcement before the first sleep does not prevent the second kick.
    fn sleeps_twice(event_idx: bool) {
        let _alone = crate::rig::alone();
        loom::model(move || {
            let shared = Arc::new(Shared::new(false));
            let mut signals = VringSignals::new(&*shared, event_idx, 0);
            let guest = {
                let shared = shared.clone();
                thread::spawn(move || {
                    shared.add(event_idx, 0);
                    shared.add(event_idx, 1);
                })
            };
            for position in 0..2 {
                while !arm(&mut signals, &shared, position) {
                    shared.kick.wait();
                }
                signals.disarm(&*shared, position + 1);
            }
            guest.join().unwrap();
        });
    }

    /// The worker of two vrings was awake, and falls asleep with one fence for both while the guest adds an entry to each.
    fn sleeps_with_two_vrings(event_idx: bool, is_careless: bool) {
        let _alone = crate::rig::alone();
        loom::model(move || {
            let vrings = [0; 2].map(|_| {
                let shared = Arc::new(Shared::new(is_careless));
                let mut signals = VringSignals::new(&*shared, event_idx, 0);
                signals.disarm(&*shared, 0);
                (shared, signals)
            });
            let guest = {
                let rings = vrings.each_ref().map(|(shared, _)| shared.clone());
                let add = move |ring: &Arc<Shared>| ring.add(event_idx, 0);
                thread::spawn(move || rings.iter().for_each(add))
            };
            let [mut one, mut other] = vrings;
            for (shared, signals) in [&mut one, &mut other] {
                signals.ask(&**shared, 0);
            }
            one.0.fence();
            for (shared, _) in [one, other] {
                if !VringSignals::has_come(&*shared, 0) {
                    shared.kick.wait();
                }
            }
            guest.join().unwrap();
        });
    }

    #[test]
    fn no_kick_is_lost() {
        for event_idx in [false, true] {
            sleeps_beside_an_add(event_idx, false);
            sleeps_twice(event_idx);
            sleeps_with_two_vrings(event_idx, false);
        }
    }

    #[test]
    fn no_call_is_lost() {
        for event_idx in [false, true] {
            publishes_beside_a_sleep(event_idx, false);
        }
    }

    /// Shows that the tests above would detect a missing fence.
    #[test]
    fn without_fences_signals_are_lost() {
        for event_idx in [false, true] {
            let kick = || sleeps_beside_an_add(event_idx, true);
            assert!(std::panic::catch_unwind(kick).is_err(), "{event_idx}");
            let kick = || sleeps_with_two_vrings(event_idx, true);
            assert!(std::panic::catch_unwind(kick).is_err(), "{event_idx}");
            let call = || publishes_beside_a_sleep(event_idx, true);
            assert!(std::panic::catch_unwind(call).is_err(), "{event_idx}");
        }
    }
}
