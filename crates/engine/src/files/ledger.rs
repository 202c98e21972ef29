//! Which engines of a disk have an fsync of a leg in the kernel. All engines share one open file, and the
//! kernel reports a failed write-back once per open file: of two fsyncs at the same time one may be
//! told of the failure and the other not. So one that went well vouches for nothing before those
//! that were under way with it have ended; if one of them failed, the disk says so by then.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cleave_disk::Disk;

/// Engines of one disk, as many as vrings.
const SEATS: usize = 256;
/// A seat that nobody has.
const EMPTY: u64 = u64::MAX;
/// A seat whose engine has no fsync under way.
const QUIET: u64 = 0;

/// One per leg of a disk that has engines; looked up when an engine is made, never later.
static LEDGERS: Mutex<Vec<(LegId, Weak<Ledger>)>> = Mutex::new(Vec::new());

/// A disk's address and the number of its leg.
type LegId = (usize, u16);

#[derive(Debug)]
struct Ledger {
    /// Number of the last fsync begun.
    begun: AtomicU64,
    /// Of each engine: the number of its fsync under way, or `QUIET`, or `EMPTY`.
    seats: [AtomicU64; SEATS],
}

/// One engine's place in its disk's ledger. `None`: more engines than seats; this one is not looked at
/// by the others.
#[derive(Debug)]
pub(super) struct Seat {
    ledger: Arc<Ledger>,
    number: Option<usize>,
}

/// The fsyncs begun up to some moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moment(u64);

impl Seat {
    /// Takes a seat. The disk is known by its address, which is its own while an engine holds it.
    pub(super) fn take(disk: &Arc<Disk>, leg: u16) -> Seat {
        Seat::in_ledger(ledger_of((Arc::as_ptr(disk).addr(), leg)))
    }

    fn in_ledger(ledger: Arc<Ledger>) -> Seat {
        let take = |seat: &AtomicU64| {
            let taken = seat.compare_exchange(EMPTY, QUIET, Ordering::SeqCst, Ordering::SeqCst);
            taken.is_ok()
        };
        let number = ledger.seats.iter().position(take);
        Seat { ledger, number }
    }

    fn set(&self, value: u64) {
        if let Some(seat) = self.number.and_then(|number| self.ledger.seats.get(number)) {
            seat.store(value, Ordering::SeqCst);
        }
    }

    /// Before an fsync is handed to the kernel. Who looks between the two steps and misses it had his
    /// own fsync end before this one begins, and so was told of any failure himself.
    pub(super) fn begin(&self) {
        let number = self.ledger.begun.fetch_add(1, Ordering::SeqCst) + 1;
        self.set(number);
    }

    /// After an fsync has ended, and after the disk was marked if it failed.
    pub(super) fn end(&self) -> Moment {
        self.set(QUIET);
        Moment(self.ledger.begun.load(Ordering::SeqCst))
    }

    /// Whether every fsync begun up to `moment` has ended.
    pub(super) fn all_ended(&self, moment: Moment) -> bool {
        let ended = |seat: &AtomicU64| {
            let value = seat.load(Ordering::SeqCst);
            value == QUIET || value > moment.0
        };
        self.ledger.seats.iter().all(ended)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.set(EMPTY);
    }
}

fn ledger_of(leg: LegId) -> Arc<Ledger> {
    let mut ledgers = LEDGERS.lock().unwrap_or_else(PoisonError::into_inner);
    ledgers.retain(|(_, ledger)| ledger.strong_count() > 0);
    let known = ledgers.iter().find(|(of, _)| *of == leg);
    if let Some(ledger) = known.and_then(|(_, ledger)| ledger.upgrade()) {
        return ledger;
    }
    let ledger = Arc::new(Ledger {
        begun: AtomicU64::new(0),
        seats: [const { AtomicU64::new(EMPTY) }; SEATS],
    });
    ledgers.push((leg, Arc::downgrade(&ledger)));
    ledger
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_under_way_are_waited_for_and_later_ones_are_not() {
        let ledger = ledger_of((1, 0));
        let (a, b, c) = (
            Seat::in_ledger(Arc::clone(&ledger)),
            Seat::in_ledger(Arc::clone(&ledger)),
            Seat::in_ledger(ledger),
        );
        a.begin();
        b.begin();
        let moment = a.end();
        assert!(!a.all_ended(moment));
        c.begin();
        assert!(!a.all_ended(moment));
        // Neither waits for who waits for him.
        let other = b.end();
        assert!(a.all_ended(moment));
        assert!(!b.all_ended(other));
        drop(c);
        assert!(b.all_ended(other));
        assert!(!Arc::ptr_eq(&a.ledger, &ledger_of((1, 1))));
        assert!(Arc::ptr_eq(&a.ledger, &ledger_of((1, 0))));
    }

    #[test]
    fn an_engine_without_a_seat_works() {
        let ledger = ledger_of((3, 0));
        let seats: Vec<_> = (0..SEATS)
            .map(|_| Seat::in_ledger(Arc::clone(&ledger)))
            .collect();
        let extra = Seat::in_ledger(Arc::clone(&ledger));
        extra.begin();
        assert!(extra.all_ended(extra.end()));
        drop(seats);
        assert!(Seat::in_ledger(ledger).number == Some(0));
    }
}
