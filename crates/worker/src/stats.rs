//! Counters of one worker: written by it alone, read by anyone.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Counters of one worker. Only the worker writes, with plain loads and stores.
        #[derive(Debug, Default)]
        #[repr(align(64))]
        pub struct Stats { $($(#[$doc])* pub(crate) $name: AtomicU64),+ }

        /// The values of [`Stats`] at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Totals { $($(#[$doc])* pub $name: u64),+ }

        impl Stats {
            /// Reads all counters.
            pub fn totals(&self) -> Totals {
                Totals { $($name: self.$name.load(Ordering::Relaxed)),+ }
            }
        }

        impl std::ops::AddAssign for Totals {
            fn add_assign(&mut self, other: Totals) {
                $(self.$name += other.$name;)+
            }
        }
    };
}

counters! {
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
    /// Turns of the loop that took or ended a request.
    laps,
    /// Calls to the guest.
    calls,
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
        write!(f, ", {retired} vrings retired")
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
