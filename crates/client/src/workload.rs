//! What a vring is driven with, and what came of it.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use cleave_blk::spec::SECTOR_BYTES;

use crate::Error;

/// In which order offsets come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// One after the other, from the beginning again at the end.
    Sequential,
    /// Uniform over the span.
    Random,
}

/// When the loop ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// No new requests after this time.
    After(Duration),
    /// No more than so many requests.
    Requests(u64),
}

/// Whether data is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verify {
    /// No.
    Off,
    /// Writes carry, and reads must find, [`pattern_word`] of this seed.
    Pattern(u64),
}

/// Requests started by the clock and not by completions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Offered {
    /// Requests per second.
    pub per_second: f64,
    /// Started together.
    pub burst: u32,
}

/// Offering that comes and goes: so long at its rate, then so long not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pulse {
    /// Requests are offered.
    pub on: Duration,
    /// None is.
    pub off: Duration,
}

impl Pulse {
    /// When a request is due that would be due at `due_ns` if there were no pauses.
    pub(crate) fn stretch(self, due_ns: u64) -> u64 {
        let (on_ns, off_ns) = (self.on.as_nanos() as u64, self.off.as_nanos() as u64);
        let pauses = due_ns / on_ns.max(1);
        due_ns.saturating_add(pauses.saturating_mul(off_ns))
    }
}

/// How chains are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Direct where depth and ring allow it, else indirect.
    Auto,
    /// Three descriptors of the ring.
    Direct,
    /// One descriptor of the ring and a table of three.
    Indirect,
}

/// What to do.
#[derive(Debug, Clone)]
pub struct Workload<'a> {
    /// Share of reads.
    pub read_percent: u8,
    /// Bytes per request; a multiple of 512.
    pub block_bytes: u32,
    /// Requests in flight at most.
    pub depth: u16,
    /// First byte of the disk that is used.
    pub offset_bytes: u64,
    /// Bytes of the disk that are used.
    pub span_bytes: u64,
    /// Order of offsets.
    pub order: Order,
    /// Seed of offsets and mix.
    pub seed: u64,
    /// When to end.
    pub stop: Stop,
    /// Whether data is checked.
    pub verify: Verify,
    /// Requests by the clock; latency then counts from the intended start.
    pub offered: Option<Offered>,
    /// How requests by the clock come and go; `None`: evenly.
    pub pulse: Option<Pulse>,
    /// Layout of chains.
    pub layout: Layout,
    /// Ends the loop early when it becomes true.
    pub abort: Option<&'a AtomicBool>,
}

impl Workload<'_> {
    /// Random reads of the first `span_bytes` for some time.
    pub fn reads(block_bytes: u32, depth: u16, span_bytes: u64, time: Duration) -> Self {
        Workload {
            read_percent: 100,
            block_bytes,
            depth,
            offset_bytes: 0,
            span_bytes,
            order: Order::Random,
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

/// One completed request.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// A write.
    pub write: bool,
    /// Its size.
    pub bytes: u32,
    /// From (intended) start to completion.
    pub latency_ns: u64,
    /// When it completed, since the loop began.
    pub at_ns: u64,
}

/// What was done.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    /// Reads completed.
    pub reads: u64,
    /// Writes completed.
    pub writes: u64,
    /// Bytes of both.
    pub bytes: u64,
    /// Of them, ended with another status than OK.
    pub failed: u64,
    /// Kicks sent.
    pub kicks: u64,
    /// Times that the driver slept and was called.
    pub calls: u64,
    /// From the first request to the last completion.
    pub elapsed: Duration,
}

impl Tally {
    /// Requests completed.
    pub fn requests(&self) -> u64 {
        self.reads + self.writes
    }

    /// Requests per second.
    pub fn iops(&self) -> f64 {
        self.requests() as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Word `index` of the pattern: the eight bytes at `8 * index` of the disk.
#[inline]
pub fn pattern_word(seed: u64, index: u64) -> u64 {
    let mixed = (index ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 32) ^ seed.rotate_left(17)
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
            Order::Random => ((u128::from(random) * u128::from(self.blocks)) >> 64) as u64,
            Order::Sequential => {
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
