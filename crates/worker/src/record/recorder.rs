//! The writer of a vring's record.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cleave_blk::{Request, Segment, Status, Verb};
use cleave_guest::Memory;

use super::zeroes::{Sampler, is_zero};
use super::{ErrorKind, Kind, Laps, StalledRequests, VringEvent, VringRecord};
use crate::counter::add;
use crate::slots::Ended;

/// What a lap left in a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingState {
    /// Nothing.
    Drained,
    /// Chains that the lap had no room or no time for.
    Left,
}

/// A check of a ring, at the end of its lap's acceptance.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingCheck {
    /// The available index that was read; see [`Vring::seen`](cleave_guest::Vring::seen).
    pub(crate) seen: u16,
    pub(crate) left: u16,
    pub(crate) state: RingState,
    /// True if chains were taken in this lap.
    pub(crate) took: bool,
}

/// Writes the record of one lane's vring.
#[derive(Debug)]
pub(crate) struct Recorder {
    record: Arc<VringRecord>,
    /// `None`: it only counts.
    open: Option<Box<Open>>,
    /// The last check found the ring empty at an unknown time, and `RingChecks` does not know of it yet. This is
    /// nearly every check of a worker that polls a disk with inline completion, so it costs one store, next to
    /// the lane.
    drained: bool,
}

#[derive(Debug)]
struct Open {
    /// When the request of each head was taken; 0: none.
    begun: Arc<[AtomicU64]>,
    /// Requests that were taken in this lap, by kind: all requests that were timed, and those among them that
    /// completed inline.
    taken: Batch,
    spot: Batch,
    checks: RingChecks,
    /// A completed request whose publishing is timed.
    publishing: Option<(Kind, u64)>,
    zeroes: Sampler,
}

/// When the ring was checked. A check finds all chains that are in the ring; they are taken in the same lap or
/// in later ones. So a chain that a check found arrived after the previous check.
#[derive(Debug, Default)]
struct RingChecks {
    /// The available index that the last check read.
    seen: u16,
    /// Time of the last check, if its lap has one.
    last_ns: Option<u64>,
    /// Time of the check before the one that found the chains which are being taken. `None`: not known.
    since_ns: Option<u64>,
    /// How many of those chains are left.
    left: u16,
    more: bool,
}

impl RingChecks {
    /// Notes that the previous check left nothing, at an unknown time. So this check found something if chains were taken.
    fn drained_before(&mut self, check: RingCheck) {
        self.seen = check.seen.wrapping_sub(u16::from(check.took));
        self.last_ns = None;
        (self.left, self.more) = (0, false);
    }

    /// Returns the maximum time that the chains which the lap took had waited, at the end of its acceptance.
    #[inline]
    fn waited_ns(&mut self, check: RingCheck, laps: &Laps) -> Option<u64> {
        let now_ns = laps.known_ns();
        let found = check.seen != self.seen;
        let mut since_ns = self.since_ns;
        if found {
            let before_ns = match laps.was_idle() && !self.more {
                true => now_ns,
                false => self.last_ns,
            };
            // The first chains that this lap took may be left over from the previous check.
            since_ns = match self.left {
                0 => before_ns,
                _ => since_ns.and_then(|since| Some(since.min(before_ns?))),
            };
            self.since_ns = before_ns;
            self.seen = check.seen;
        }
        if found || check.state == RingState::Drained {
            self.last_ns = now_ns;
        }
        (self.left, self.more) = (check.left, check.state == RingState::Left);
        Some(now_ns?.saturating_sub(since_ns?))
    }
}

/// Numbers of requests by kind, and the kinds that occur.
#[derive(Debug, Default)]
struct Batch {
    counts: [u32; Kind::COUNT],
    kinds: u32,
}

impl Batch {
    #[inline]
    fn add(&mut self, kind: Kind) {
        if let Some(count) = self.counts.get_mut(kind.index()) {
            *count += 1;
            self.kinds |= 1 << kind.index();
        }
    }

    /// Empties it and passes on each kind and number.
    #[inline]
    fn drain(&mut self, mut to: impl FnMut(usize, u64)) {
        while self.kinds != 0 {
            let at = self.kinds.trailing_zeros() as usize;
            self.kinds &= self.kinds - 1;
            if let Some(count) = self.counts.get_mut(at) {
                to(at, u64::from(std::mem::take(count)));
            }
        }
    }
}

impl Recorder {
    /// Makes the recorder of a vring that starts. `vring_size` is `None` if only counts are kept.
    pub(super) fn new(record: Arc<VringRecord>, vring_size: Option<u16>) -> Recorder {
        let open = vring_size.map(|vring_size| {
            Box::new(Open {
                begun: record.begin(vring_size),
                taken: Batch::default(),
                spot: Batch::default(),
                checks: RingChecks::default(),
                publishing: None,
                zeroes: Sampler::new(),
            })
        });
        Recorder {
            record,
            open,
            drained: false,
        }
    }

    // Events of a request, in order.

    /// Notes that a request is about to be pushed to the store. Called in timed laps, of which some time the planning.
    #[cold]
    pub(crate) fn planned(&mut self, request: &Request, laps: &mut Laps) {
        if self.open.is_some()
            && let Some(ns) = laps.plan_ns()
        {
            let kind = Kind::of(request.verb, request.len_bytes);
            if let Some(times) = self.record.plan.get(kind.index()) {
                times.add(ns, 1);
            }
        }
    }

    /// Records that a request was pushed. `data`: the destination of a read's data.
    #[inline]
    pub(crate) fn began(
        &mut self,
        head: u16,
        request: &Request,
        data: &[Segment],
        laps: &mut Laps,
    ) {
        let Some(open) = &mut self.open else { return };
        if let Some(begun) = open.begun.get(usize::from(head)) {
            begun.store(laps.now_ns(), Ordering::Relaxed);
        }
        open.taken.add(Kind::of(request.verb, request.len_bytes));
        if request.verb == Verb::Read {
            open.zeroes.pass(1);
            if open.zeroes.chooses() {
                open.zeroes.keep(head, data);
            }
        }
    }

    /// Records that `n` such requests completed inline successfully, or needed no op.
    #[inline]
    pub(crate) fn at_once(&mut self, verb: Verb, len_bytes: u64, n: u32) {
        let kind = Kind::of(verb, len_bytes);
        self.record.ended(kind, len_bytes, u64::from(n));
        if verb == Verb::Read
            && let Some(open) = &mut self.open
        {
            open.zeroes.pass(n);
        }
    }

    /// Returns true if details of an inline request are needed, also outside timed laps.
    #[inline]
    pub(crate) fn watches(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.zeroes.wants())
    }

    /// Details of a request that completed inline, in a timed lap or if [`Recorder::watches`].
    #[cold]
    pub(crate) fn watch(
        &mut self,
        request: &Request,
        data: &[Segment],
        memory: &Memory,
        laps: &mut Laps,
    ) {
        let Some(open) = &mut self.open else { return };
        if laps.is_timed() {
            let kind = Kind::of(request.verb, request.len_bytes);
            laps.note_spot();
            open.spot.add(kind);
            open.taken.add(kind);
            if laps.wants_publish() {
                open.publishing = Some((kind, laps.read()));
            }
        }
        if request.verb == Verb::Read
            && open.zeroes.chooses()
            && let Some(is_zero) = is_zero(memory, data)
        {
            self.record.found(is_zero);
        }
    }

    /// Records that the last op of a request has completed.
    #[inline]
    pub(crate) fn ended(
        &mut self,
        head: u16,
        ended: &Ended,
        exact_ns: Option<u64>,
        memory: &Memory,
        laps: &mut Laps,
    ) {
        let kind = Kind::of(ended.verb, ended.len_bytes);
        match ended.errno {
            Some(errno) => count(&self.record.failed, ErrorKind::of_errno(errno)),
            None => self.record.ended(kind, ended.len_bytes, 1),
        }
        let Some(open) = &mut self.open else { return };
        let begun_ns = match open.begun.get(usize::from(head)) {
            Some(begun) => {
                let at = begun.load(Ordering::Relaxed);
                begun.store(0, Ordering::Relaxed);
                at
            }
            None => return,
        };
        let data = open.zeroes.take(head).map(|data| {
            let found = ended.errno.is_none().then(|| is_zero(memory, data));
            found.flatten()
        });
        if let Some(Some(is_zero)) = data {
            self.record.found(is_zero);
        }
        if ended.errno.is_some() {
            return;
        }
        let ns = laps.now_ns().saturating_sub(begun_ns);
        let ns = exact_ns.unwrap_or(ns);
        let split = kind.split_index().filter(|_| ended.is_split());
        match split.and_then(|at| self.record.split.get(at)) {
            Some(times) => times.add(ns, 1),
            None => {
                if let Some(times) = self.record.device.get(kind.index()) {
                    times.add(ns, 1);
                }
            }
        }
        if laps.is_timed() && laps.wants_publish() {
            open.publishing = Some((kind, laps.now_ns()));
        }
    }

    /// Records that a request failed and is about to be repeated. The events that follow are those of a new request.
    #[cold]
    pub(crate) fn redone(&mut self, head: u16) {
        self.record.count(VringEvent::Redone);
        let Some(open) = &mut self.open else { return };
        if let Some(begun) = open.begun.get(usize::from(head)) {
            begun.store(0, Ordering::Relaxed);
        }
        open.zeroes.take(head);
    }

    /// Forgets the requests that began since the last check: they since the last check of the ring did not come from the ring.
    #[cold]
    pub(crate) fn forget_taken(&mut self) {
        if let Some(open) = &mut self.open {
            open.taken.drain(|_, _| ());
        }
    }

    /// Shows the stalled requests.
    #[cold]
    pub(crate) fn show_stalled(&mut self, stalled: Option<StalledRequests>) {
        self.record.show_stalled(stalled);
    }

    /// Records that a request was refused before it reached the store.
    #[cold]
    pub(crate) fn refused(&mut self, status: Status) {
        count(&self.record.refused, ErrorKind::of_status(status));
    }

    /// Records that the chain held no request.
    #[cold]
    pub(crate) fn broken(&mut self) {
        count(&self.record.refused, ErrorKind::Broken);
    }

    /// Records that completed requests were published, and the guest was called if it wants that.
    #[cold]
    pub(crate) fn published(&mut self, laps: &Laps) {
        let Some(open) = &mut self.open else { return };
        if let Some((kind, ended_ns)) = open.publishing.take()
            && let Some(times) = self.record.publish.get(kind.index())
        {
            times.add(laps.read().saturating_sub(ended_ns), 1);
        }
    }

    // Signals.

    /// Records that the guest was called. The call was held back for `held_ns`.
    #[inline]
    pub(crate) fn called(&mut self, held_ns: u64) {
        self.record.count(VringEvent::Call);
        if self.open.is_some() {
            self.record.call.add(held_ns, 1);
        }
    }

    /// Records that a request waited in the ring for the disk's limits.
    pub(crate) fn throttled(&mut self, ns: u64) {
        self.record.count(VringEvent::Throttled);
        if self.open.is_some() {
            self.record.throttle.add(ns, 1);
        }
    }

    /// Counts any other event.
    #[inline]
    pub(crate) fn count(&mut self, event: VringEvent) {
        self.record.count(event);
    }

    // Laps.

    /// Notes that a lap without a clock reading has left the ring empty.
    #[inline]
    pub(crate) fn drained(&mut self) {
        self.drained = true;
    }

    /// Records how long the chains that it took had waited in the ring, at most.
    #[inline]
    pub(crate) fn ring_checked(&mut self, check: RingCheck, laps: &Laps) {
        let drained = std::mem::take(&mut self.drained);
        let Some(open) = &mut self.open else { return };
        if drained {
            open.checks.drained_before(check);
        }
        let waited_ns = open.checks.waited_ns(check, laps);
        if open.taken.kinds != 0 {
            let ring = &self.record.ring;
            open.taken.drain(|at, n| {
                if let (Some(times), Some(ns)) = (ring.get(at), waited_ns) {
                    times.add(ns, n);
                }
            });
        }
    }

    /// Records that a timed lap has ended. Its length is recorded for all requests that completed inline in it.
    pub(crate) fn lap_ended(&mut self, ns: u64) {
        let Some(open) = &mut self.open else { return };
        let device = &self.record.device;
        open.spot.drain(|at, n| {
            if let Some(times) = device.get(at) {
                times.add(ns, n);
            }
        });
    }
}

fn count(errors: &[AtomicU64; ErrorKind::ALL.len()], kind: ErrorKind) {
    add(&errors[kind as usize], 1);
}

impl Drop for Recorder {
    /// Counts the requests of the last lap.
    fn drop(&mut self) {
        self.record.show_stalled(None);
    }
}

impl Drop for Open {
    /// Forgets what was in flight: nothing is on a vring that has stopped or whose worker failed.
    fn drop(&mut self) {
        for begun in &*self.begun {
            begun.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;

    use super::*;
    use crate::record::Stage;

    /// A lap as its ring sees it.
    #[derive(Debug, Clone, Copy)]
    struct Lap {
        /// Chains that the guest has added, and how many there is room for.
        added: u16,
        take_max: u16,
        /// The clock was read in this lap.
        has_time: bool,
        /// Another ring kept the worker busy.
        is_busy: bool,
    }

    fn lap() -> impl Strategy<Value = Lap> {
        (0u16..3, 0u16..4, any::<bool>(), any::<bool>()).prop_map(
            |(added, take_max, has_time, is_busy)| Lap {
                added,
                take_max,
                has_time,
                is_busy,
            },
        )
    }

    /// Returns a recorder, and the record that it writes.
    fn recorder() -> (Recorder, Arc<VringRecord>) {
        let record = Arc::new(VringRecord::new(0));
        (Recorder::new(record.clone(), Some(8)), record)
    }

    fn kind() -> Kind {
        Kind::of(Verb::Read, 4096)
    }

    proptest! {
        #[test]
        fn checks_with_nothing_to_report_can_be_skipped(plan in prop::collection::vec(lap(), 1..60)) {
            let (mut full, all) = recorder();
            let (mut brief, most) = recorder();
            let mut laps = Laps::new(Instant::now(), true);
            let (mut seen, mut left, mut unseen) = (0u16, 0u16, 0u16);
            for lap in plan {
                // Leftover chains are taken first; the ring is checked only when none are left.
                let before = left.min(lap.take_max);
                left -= before;
                let mut took = before;
                unseen += lap.added;
                if took < lap.take_max {
                    seen = seen.wrapping_add(unseen);
                    let found = unseen.min(lap.take_max - took);
                    (left, took, unseen) = (unseen - found, took + found, 0);
                }
                let state = match took == lap.take_max {
                    true => RingState::Left,
                    false => RingState::Drained,
                };
                if lap.has_time {
                    laps.now_ns();
                    for recorder in [&mut full, &mut brief] {
                        let open = recorder.open.as_mut().unwrap();
                        (0..took).for_each(|_| open.taken.add(kind()));
                    }
                }
                let check = RingCheck { seen, left, state, took: took > 0 };
                full.ring_checked(check, &laps);
                match state == RingState::Drained && !lap.has_time {
                    true => brief.drained(),
                    false => brief.ring_checked(check, &laps),
                }
                prop_assert_eq!(all.times(Stage::Ring, kind()), most.times(Stage::Ring, kind()));
                match took > 0 || lap.is_busy {
                    true => laps.worked(),
                    false => laps.idled(),
                }
                // At least one unit of the histograms, so that no two checks have the same time.
                let now_ns = laps.read();
                while laps.read() < now_ns + 64 {}
            }
        }
    }

    #[test]
    fn a_chain_waits_at_most_since_the_previous_check() {
        let (mut recorder, record) = recorder();
        let mut laps = Laps::new(Instant::now(), true);
        for seen in 1..=3 {
            laps.now_ns();
            recorder.open.as_mut().unwrap().taken.add(kind());
            let check = RingCheck {
                seen,
                left: 0,
                state: RingState::Drained,
                took: true,
            };
            recorder.ring_checked(check, &laps);
            laps.worked();
        }
        // After a check without a time it is unknown how long the chains of the next check had waited.
        assert_eq!(record.times(Stage::Ring, kind()).count(), 3);
        recorder.drained();
        laps.worked();
        laps.now_ns();
        recorder.open.as_mut().unwrap().taken.add(kind());
        let check = RingCheck {
            seen: 4,
            left: 0,
            state: RingState::Drained,
            took: true,
        };
        recorder.ring_checked(check, &laps);
        assert_eq!(record.times(Stage::Ring, kind()).count(), 3);
    }
}
