//! Counters of a worker's loop, written by that worker alone and read by anyone; and the sums that readers make.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// What a worker does now when it finds nothing to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// It sleeps: as told, or because nothing is expected soon.
    #[default]
    Sleeps,
    /// It spins because it pays.
    Spins,
    /// It polls, as told, or because a guest never kicks.
    Polls,
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Mode::Sleeps => "sleeps",
            Mode::Spins => "spins",
            Mode::Polls => "polls",
        })
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)+; vrings: $($(#[$vring_doc:meta])* $vring_name:ident,)+) => {
        /// Counters of one worker's loop. Only the worker writes, with plain loads and stores. Requests are counted
        /// in the [`VringRecord`](crate::record::VringRecord) of their vring, and nowhere else.
        #[derive(Debug, Default)]
        #[repr(align(64))]
        pub(crate) struct Stats {
            $($(#[$doc])* pub(crate) $name: AtomicU64,)+
            mode: AtomicU8,
        }

        /// Sums over workers and vrings at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Totals {
            $($(#[$vring_doc])* pub $vring_name: u64,)+
            $($(#[$doc])* pub $name: u64,)+
        }

        impl Totals {
            pub(crate) fn add(&mut self, stats: &Stats) {
                $(self.$name += stats.$name.load(Ordering::Relaxed);)+
            }

            /// The increase since an earlier moment.
            pub fn since(self, earlier: Totals) -> Totals {
                Totals {
                    $($vring_name: self.$vring_name.saturating_sub(earlier.$vring_name),)+
                    $($name: self.$name.saturating_sub(earlier.$name),)+
                }
            }
        }

        impl Stats {
            /// What the worker does now when it finds nothing to do.
            pub(crate) fn mode(&self) -> Mode {
                match self.mode.load(Ordering::Relaxed) {
                    1 => Mode::Spins,
                    2 => Mode::Polls,
                    _ => Mode::Sleeps,
                }
            }

            pub(crate) fn set_mode(&self, mode: Mode) {
                self.mode.store(mode as u8, Ordering::Relaxed);
            }
        }
    };
}

counters! {
    /// Of the disk's reads and writes, parts of requests too, those that were polled for and went well.
    polled,
    /// Turns of the loop that took or ended a request.
    laps,
    /// Times that a worker slept with no end in sight.
    sleeps,
    /// Times that it slept until shortly before something was expected.
    dozes,
    /// Times that it came back from either.
    wakeups,
    /// Nanoseconds spun that ended with something to do.
    spin_hit_ns,
    /// Nanoseconds spun in vain.
    spin_wasted_ns,
    /// Times that a worker took to spinning because events came fast enough.
    switches_fast,
    /// Times that it left spinning because they came too slowly.
    switches_slow,
    /// Times that it left spinning because the budget was spent.
    switches_budget,
    /// Times that it left spinning because somebody else wanted its core.
    switches_crowded,
    /// Times that control changed how it waits.
    switches_tuned,
    ;
    vrings:
    /// Reads ended well.
    reads,
    /// Writes ended well.
    writes,
    /// Flushes, discards, write-zeroes and get-ids ended well.
    others,
    /// Bytes read.
    read_bytes,
    /// Bytes written.
    write_bytes,
    /// Requests that the store failed.
    failed,
    /// Requests refused without touching the store.
    refused,
    /// Chains too broken to carry a status.
    broken,
    /// Calls to the guest.
    calls,
    /// Published batches for which the guest wanted no call, or has no way to be called.
    calls_suppressed,
    /// Published batches whose call was held back and became one with a later one.
    calls_coalesced,
    /// Kicks from guests.
    kicks,
    /// Vrings retired for a fault of the guest.
    retired,
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Totals {
            reads,
            writes,
            others,
            failed,
            refused,
            broken,
            laps,
            calls,
            retired,
            ..
        } = self;
        let (read_mib, write_mib) = (self.read_bytes >> 20, self.write_bytes >> 20);
        write!(
            f,
            "{reads} reads ({read_mib} MiB), {writes} writes ({write_mib} MiB), {others} others"
        )?;
        write!(
            f,
            " in {laps} laps with {calls} calls; {failed} failed, {refused} refused, {broken} broken"
        )?;
        if self.polled > 0 {
            write!(
                f,
                ", {} reads and writes of the disk polled for",
                self.polled
            )?;
        }
        write!(f, ", {retired} vrings retired; ")?;
        self.write_pacing(f)
    }
}

impl Totals {
    /// How it was waited.
    fn write_pacing(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Totals {
            sleeps,
            dozes,
            kicks,
            switches_fast,
            switches_slow,
            switches_budget,
            switches_crowded,
            ..
        } = self;
        let spun_ms = (self.spin_hit_ns + self.spin_wasted_ns) / 1_000_000;
        let wasted_ms = self.spin_wasted_ns / 1_000_000;
        write!(
            f,
            "{kicks} kicks, slept {sleeps} times and dozed {dozes}, spun {spun_ms} ms, {wasted_ms} of \
             them in vain; took to spinning {switches_fast} times, and left it {switches_slow} times for \
             lack of requests, {switches_budget} of budget, {switches_crowded} of a core of its own"
        )
    }
}

/// Adds to a counter that only this thread writes: no locked instruction.
#[inline]
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(n),
        Ordering::Relaxed,
    );
}
