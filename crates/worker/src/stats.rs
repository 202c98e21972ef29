//! Counters of a worker's loop, written only by that worker and read by any thread, and the sums that readers
//! make of them.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

/// The way a worker waits when it has no work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WaitState {
    /// Sleeping, because it was configured to or because nothing is expected soon.
    #[default]
    Sleeps,
    /// Spinning, because that pays.
    Spins,
    /// Polling, because it was configured to or because a guest never kicks.
    Polls,
}

impl std::fmt::Display for WaitState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            WaitState::Sleeps => "sleeps",
            WaitState::Spins => "spins",
            WaitState::Polls => "polls",
        })
    }
}

/// The result of a trial that compares spinning with sleeping on the live load, each where it settles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrialResult {
    /// The worker spins from then on; otherwise it sleeps.
    pub spins: bool,
    /// Share that spinning saves of the time between two completions, or of the response time of a guest with a clock of its own: of
    /// the medians, and of the quartiles that lie closest and farthest. Negative if spinning takes longer.
    pub gain: [f32; 3],
    /// Additional cores that spinning kept busy.
    pub cores: f32,
    /// When the trial ended, on the device's clock.
    pub at: Duration,
}

fn whole([high, low]: [f32; 2]) -> u64 {
    u64::from(high.to_bits()) << 32 | u64::from(low.to_bits())
}

fn halves(word: u64) -> [f32; 2] {
    [(word >> 32) as u32, word as u32].map(f32::from_bits)
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)+; vrings: $($(#[$vring_doc:meta])* $vring_name:ident,)+) => {
        /// Counters of one worker's loop. Only the worker writes them, with plain loads and stores. Requests
        /// are counted in the [`VringRecord`](crate::record::VringRecord) of their vring, and nowhere else.
        #[derive(Debug, Default)]
        #[repr(align(64))]
        pub(crate) struct Stats {
            $($(#[$doc])* pub(crate) $name: AtomicU64,)+
            mode: AtomicU8,
            /// Number of the quiet in which nothing is in flight any more.
            pub(crate) still: AtomicU64,
            /// The parts of [`TrialResult`]: time and result, gain, quartiles, price. All 0: there was no experiment.
            tried: [AtomicU64; 4],
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

            /// Returns the increase since an earlier moment.
            pub fn since(self, earlier: Totals) -> Totals {
                Totals {
                    $($vring_name: self.$vring_name.saturating_sub(earlier.$vring_name),)+
                    $($name: self.$name.saturating_sub(earlier.$name),)+
                }
            }
        }

        impl Stats {
            /// Returns the way the worker waits when it has no work.
            pub(crate) fn mode(&self) -> WaitState {
                match self.mode.load(Ordering::Relaxed) {
                    1 => WaitState::Spins,
                    2 => WaitState::Polls,
                    _ => WaitState::Sleeps,
                }
            }

            pub(crate) fn set_mode(&self, mode: WaitState) {
                self.mode.store(mode as u8, Ordering::Relaxed);
            }

            /// Returns the latest spinning experiment.
            pub(crate) fn tried(&self) -> Option<TrialResult> {
                // A reader during an update may see parts of two experiments. They are only displayed, so this
                // does no harm.
                let [at, gain, spread, price] = self.tried.each_ref().map(|word| word.load(Ordering::Relaxed));
                let [low, high] = halves(spread);
                (at > 0).then(|| TrialResult {
                    spins: at & 1 == 1,
                    gain: [halves(gain)[0], low, high],
                    cores: halves(price)[0],
                    at: Duration::from_nanos(at),
                })
            }

            pub(crate) fn set_tried(&self, tried: TrialResult) {
                let at = tried.at.as_nanos() as u64 & !1 | u64::from(tried.spins);
                let [gain, low, high] = tried.gain;
                let words = [at, whole([gain, 0.0]), whole([low, high]), whole([tried.cores, 0.0])];
                for (kept, word) in self.tried.iter().zip(words) {
                    kept.store(word, Ordering::Relaxed);
                }
            }
        }
    };
}

counters! {
    /// Reads and writes of the disk, including parts of requests, that completed on the polled ring.
    polled,
    /// Laps that took or completed a request.
    laps,
    /// Times that a worker slept without a time-out.
    sleeps,
    /// Times that it slept with a time-out, to check for what does not wake it or to yield the core.
    dozes,
    /// Times that it woke from either.
    wakeups,
    /// Nanoseconds of spinning that ended with work.
    spin_hit_ns,
    /// Nanoseconds of spinning that ended without work.
    spin_wasted_ns,
    /// Times that a worker started to spin because events arrived fast enough.
    switches_fast,
    /// Times that it stopped spinning because they arrived too slowly.
    switches_slow,
    /// Times that it stopped spinning because the budget was spent.
    switches_budget,
    /// Times that it stopped spinning because an experiment showed that it does not pay.
    switches_vain,
    /// Spinning experiments that came to a verdict.
    experiments,
    /// Times that polling paused because another thread wanted the core.
    switches_crowded,
    /// Times that control changed the tuning.
    switches_tuned,
    /// Nanoseconds of CPU time. A thread of a pool adds how long the laps for the worker took; of a thread that serves one worker, the
    /// registry adds the scheduler's count.
    cpu_ns,
    ;
    vrings:
    /// Reads that succeeded.
    reads,
    /// Writes that succeeded.
    writes,
    /// Flushes, discards, write-zeroes and get-ids that succeeded.
    others,
    /// Bytes read.
    read_bytes,
    /// Bytes written.
    write_bytes,
    /// Requests that the store failed.
    failed,
    /// Requests that were refused without using the store.
    refused,
    /// Chains too broken to carry a status.
    broken,
    /// Calls to the guest.
    calls,
    /// Published batches for which the guest wanted no call or has no call eventfd.
    calls_suppressed,
    /// Published batches whose call was held back and combined with a later one.
    calls_coalesced,
    /// Kicks from guests.
    kicks,
    /// Vrings that were retired for a violation by the guest.
    retired,
    /// Times that a request which the disk failed was held.
    held,
    /// Times that a request which the disk failed was repeated.
    redone,
    /// Requests that waited for the disk's limits.
    throttled,
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
                ", {} disk reads and writes completed by polling",
                self.polled
            )?;
        }
        if self.held + self.redone > 0 {
            write!(f, ", {} held, {} repeated", self.held, self.redone)?;
        }
        if self.throttled > 0 {
            write!(f, ", {} waited for the limits", self.throttled)?;
        }
        write!(f, ", {retired} vrings retired; ")?;
        self.write_pacing(f)
    }
}

impl Totals {
    /// Writes the part about waiting.
    fn write_pacing(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Totals {
            sleeps,
            dozes,
            kicks,
            switches_fast,
            switches_slow,
            switches_vain,
            switches_budget,
            experiments,
            ..
        } = self;
        let spun_ms = (self.spin_hit_ns + self.spin_wasted_ns) / 1_000_000;
        let wasted_ms = self.spin_wasted_ns / 1_000_000;
        write!(
            f,
            "{kicks} kicks, slept {sleeps} times and dozed {dozes}, spun {spun_ms} ms, {wasted_ms} of \
             them without finding work; {experiments} experiments, started to spin {switches_fast} times, and stopped \
             {switches_slow} times for lack of requests, {switches_vain} of gain, {switches_budget} of budget"
        )
    }
}
