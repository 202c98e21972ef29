//! Workloads for a vring, and their results.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use cleave_blk::spec::SECTOR_BYTES;

use crate::Error;

/// The order of offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OffsetOrder {
    /// Sequential, wrapping at the end of the span.
    Sequential,
    /// Uniformly random in the span.
    Random,
}

/// When the loop ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// No new requests after this time.
    After(Duration),
    /// At most so many requests.
    Requests(u64),
}

/// How data is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verify {
    /// Data is not checked.
    Off,
    /// Writes carry [`pattern_word`] of this seed, and reads must return it.
    Pattern(u64),
}

/// Requests that start at a fixed rate, not when others complete.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Offered {
    /// Requests per second.
    pub per_second: f64,
    /// Requests that start together.
    pub burst: u32,
}

/// On and off phases of an offered rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pulse {
    /// Length of a phase with requests.
    pub on: Duration,
    /// Length of a phase without requests.
    pub off: Duration,
}

impl Pulse {
    /// Returns the start time of a request that would start at `due_ns` without off phases.
    pub(crate) fn stretch(self, due_ns: u64) -> u64 {
        let (on_ns, off_ns) = (self.on.as_nanos() as u64, self.off.as_nanos() as u64);
        let pauses = due_ns / on_ns.max(1);
        due_ns.saturating_add(pauses.saturating_mul(off_ns))
    }
}

/// Layout of chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Direct if depth and ring size allow it, otherwise indirect.
    Auto,
    /// Three descriptors of the ring.
    Direct,
    /// One descriptor of the ring and a table of three.
    Indirect,
}

/// A workload.
#[derive(Debug, Clone)]
pub struct Workload<'a> {
    /// Share of reads.
    pub read_percent: u8,
    /// Bytes per request; a multiple of 512.
    pub block_bytes: u32,
    /// Requests in flight at most.
    pub depth: u16,
    /// First byte of the disk in use.
    pub offset_bytes: u64,
    /// Number of bytes of the disk in use.
    pub span_bytes: u64,
    /// Order of offsets.
    pub order: OffsetOrder,
    /// Seed of the offsets and of the mix of reads and writes.
    pub seed: u64,
    /// When the loop ends.
    pub stop: Stop,
    /// How data is checked.
    pub verify: Verify,
    /// Start requests at a rate; latency then counts from the intended start.
    pub offered: Option<Offered>,
    /// On and off phases of that rate; `None`: always on.
    pub pulse: Option<Pulse>,
    /// Layout of chains.
    pub layout: Layout,
    /// Stops the loop early once it is true.
    pub abort: Option<&'a AtomicBool>,
}

impl Workload<'_> {
    /// Makes a workload of random reads of the first `span_bytes` for some time.
    pub fn reads(block_bytes: u32, depth: u16, span_bytes: u64, time: Duration) -> Self {
        Workload {
            read_percent: 100,
            block_bytes,
            depth,
            offset_bytes: 0,
            span_bytes,
            order: OffsetOrder::Random,
            seed: 1,
            stop: Stop::After(time),
            verify: Verify::Off,
            offered: None,
            pulse: None,
            layout: Layout::Auto,
            abort: None,
        }
    }
}

/// A completed request.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// True if it was a write.
    pub write: bool,
    /// Size.
    pub bytes: u32,
    /// Time from the (intended) start to the completion.
    pub latency_ns: u64,
    /// Completion time, since the loop started.
    pub at_ns: u64,
}

/// Totals of a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct WorkloadTotals {
    /// Completed reads.
    pub reads: u64,
    /// Completed writes.
    pub writes: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Completed requests with a status other than OK.
    pub failed: u64,
    /// Kicks sent.
    pub kicks: u64,
    /// How often the driver slept and was woken by a call.
    pub calls: u64,
    /// From the first request to the last completion.
    pub elapsed: Duration,
}

impl WorkloadTotals {
    /// Returns the number of completed requests.
    pub fn requests(&self) -> u64 {
        self.reads + self.writes
    }

    /// Returns the requests per second.
    pub fn iops(&self) -> f64 {
        self.requests() as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Returns word `index` of the pattern: the eight bytes at `8 * index` of the disk.
#[inline]
pub fn pattern_word(seed: u64, index: u64) -> u64 {
    let mixed = (index ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 32) ^ seed.rotate_left(17)
}

/// Returns true if each byte has this value. Not generic: so it is optimised with this crate, even for tests that are not.
pub fn all_are(bytes: &[u8], value: u8) -> bool {
    first_other(bytes, value).is_none()
}

/// Returns the place of the first byte that has another value.
pub fn first_other(bytes: &[u8], value: u8) -> Option<usize> {
    bytes.iter().position(|byte| *byte != value)
}

/// Chooses offsets and directions.
#[derive(Debug)]
pub(crate) struct Picker {
    state: u64,
    blocks: u64,
    next: u64,
}

impl Picker {
    pub(crate) fn new(workload: &Workload<'_>) -> Result<Picker, Error> {
        let block = u64::from(workload.block_bytes);
        if block == 0 || block % SECTOR_BYTES != 0 || workload.span_bytes < block {
            let what = format!("blocks of {block} bytes in {}", workload.span_bytes);
            return Err(Error::Memory(what));
        }
        let state = pattern_word(workload.seed, 1) | 1;
        Ok(Picker {
            state,
            blocks: workload.span_bytes / block,
            next: 0,
        })
    }

    #[inline]
    pub(crate) fn next(&mut self, workload: &Workload<'_>) -> (u64, bool) {
        // xorshift64*
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        let random = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d);
        let block = match workload.order {
            OffsetOrder::Random => ((u128::from(random) * u128::from(self.blocks)) >> 64) as u64,
            OffsetOrder::Sequential => {
                let block = self.next;
                self.next = if block + 1 == self.blocks {
                    0
                } else {
                    block + 1
                };
                block
            }
        };
        let write = (random & 0xffff) % 100 >= workload.read_percent.into();
        (
            workload.offset_bytes + block * u64::from(workload.block_bytes),
            write,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pulse_pauses_between_bursts_and_not_within() {
        let pulse = Pulse {
            on: Duration::from_millis(1),
            off: Duration::from_millis(9),
        };
        for (due_us, stretched_us) in [(0, 0), (999, 999), (1000, 10_000), (2500, 20_500)] {
            assert_eq!(pulse.stretch(due_us * 1000), stretched_us * 1000);
        }
    }
}
