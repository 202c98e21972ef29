//! The splitter against modelled drives in virtual time: closed loops of large random requests.

use std::collections::HashMap;
use std::num::NonZeroU32;

use cleave_disk::model::{Drive, Timing, Work};

use super::*;

const DISK_BYTES: u64 = 8 << 30;

fn p3700(seed: u64) -> Drive {
    Drive {
        channels: 46,
        page_bytes: 4096,
        read_ns: 80_000,
        write_ns: 200_000,
        command_ns: 5_000,
        window: 19,
        transfer_ns: 0,
        link_ns: 1_280,
        jitter_per_mille: 100,
        write_buffer_bytes: 0,
        seed,
    }
}

fn flat(seed: u64) -> Drive {
    Drive {
        channels: 1,
        read_ns: 2_000,
        write_ns: 2_000,
        // Commands are served whole, in order: no share of the channel is gained by being many.
        window: 65_536,
        command_ns: 1_000,
        ..p3700(seed)
    }
}

/// A closed loop of requests on a drive in virtual time.
struct Loop {
    timing: Timing,
    splitter: Splitter,
    random: u64,
    now: u64,
    /// Ops left, start, length and choice of each request in flight.
    requests: HashMap<u32, (u32, u64, u64, Choice)>,
    next: u32,
    ops: u32,
}

impl Loop {
    fn new(drive: Drive, split: Split) -> Loop {
        let random = drive.seed ^ 0x5eed;
        Loop {
            timing: Timing::new(drive),
            splitter: Splitter::new(split),
            random,
            now: 0,
            requests: HashMap::new(),
            next: 0,
            ops: 0,
        }
    }

    fn random(&mut self) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.random >> 20
    }

    fn begin(&mut self, direction: Direction, len: u64) {
        let load = Load {
            requests: self.requests.len() as u32,
            ops: self.ops,
        };
        let choice = if len < SPLIT_MIN_BYTES {
            self.splitter.note_small(direction);
            Choice::WHOLE
        } else {
            self.splitter.choose(direction, len, load, self.now)
        };
        let offset = self.random() % (DISK_BYTES / len) * len;
        let chunk = choice
            .chunk_bytes
            .map_or(len, |chunk| u64::from(chunk.get()));
        let work = match direction {
            Direction::Read => Work::Read,
            Direction::Write => Work::Write { buffered: false },
        };
        let ops = len.div_ceil(chunk);
        for op in 0..ops {
            let at = op * chunk;
            self.timing
                .submit(self.now, self.next, work, offset + at, chunk.min(len - at));
        }
        self.ops += ops as u32;
        self.requests
            .insert(self.next, (ops as u32, self.now, len, choice));
        self.next += 1;
    }

    /// Waits for one request to end; its length and latency.
    fn end(&mut self) -> (u64, u64) {
        loop {
            while let Some(token) = self.timing.finished() {
                self.ops -= 1;
                let entry = self.requests.get_mut(&token).unwrap();
                entry.0 -= 1;
                if entry.0 == 0 {
                    let (_, start, len, choice) = self.requests.remove(&token).unwrap();
                    self.splitter.ended(choice, len, self.now - start, self.now);
                    return (len, self.now - start);
                }
            }
            self.now = self.timing.next_ns().expect("something is in flight");
            self.timing.advance(self.now);
        }
    }

    /// Bytes a second over so many requests at a depth.
    fn run(&mut self, direction: Direction, len: u64, depth: usize, requests: usize) -> f64 {
        let start = self.now;
        while self.requests.len() < depth {
            self.begin(direction, len);
        }
        for _ in 0..requests {
            self.end();
            self.begin(direction, len);
        }
        requests as f64 * len as f64 / ((self.now - start) as f64 / 1e9)
    }
}

fn prior() -> Prior {
    Prior {
        useful_depth: 128,
        chunk_min_bytes: 4096,
        never: false,
        measured: Vec::new(),
    }
}

fn fixed(log: u32) -> Split {
    NonZeroU32::new(1 << log).map_or(Split::Off, Split::Fixed)
}

/// Rate of the best fixed chunk (or of none), and of none.
fn best_fixed(drive: &Drive, direction: Direction, len: u64, depth: usize) -> (f64, f64) {
    let rate = |split| Loop::new(drive.clone(), split).run(direction, len, depth, 400);
    let whole = rate(Split::Off);
    let chunks = (12..=len.ilog2())
        .filter(|log| len >> log <= 64)
        .map(|log| rate(fixed(log)));
    (chunks.fold(whole, f64::max), whole)
}

#[test]
fn finds_95_percent_of_the_best_chunk_within_2000_requests() {
    for seed in 0..3 {
        for (len, depth) in [
            (128 << 10, 1),
            (512 << 10, 1),
            (1 << 20, 1),
            (512 << 10, 2),
            (4 << 20, 1),
        ] {
            let (best, whole) = best_fixed(&p3700(seed), Direction::Read, len, depth);
            let mut run = Loop::new(p3700(seed), Split::Auto(prior()));
            run.run(Direction::Read, len, depth, 2000);
            let after = run.run(Direction::Read, len, depth, 2000);
            println!(
                "seed {seed} {}K depth {depth}: whole {:.0} best {:.0} auto {:.0} MB/s, {}",
                len >> 10,
                whole / 1e6,
                best / 1e6,
                after / 1e6,
                run.splitter.states().last().unwrap()
            );
            assert!(
                after >= 0.95 * best,
                "seed {seed} {len} at {depth}: {after} of {best}"
            );
        }
    }
}

#[test]
fn split_at_depth_1_is_nearly_twice_as_fast_on_a_parallel_drive() {
    let (best, whole) = best_fixed(&p3700(1), Direction::Read, 512 << 10, 1);
    assert!(best / whole >= 1.9, "{best} / {whole}");
}

#[test]
fn costs_nothing_where_there_is_no_parallelism() {
    for seed in 0..5 {
        for depth in [1, 4, 64] {
            let whole =
                Loop::new(flat(seed), Split::Off).run(Direction::Read, 512 << 10, depth, 2000);
            let mut run = Loop::new(flat(seed), Split::Auto(prior()));
            let learning = run.run(Direction::Read, 512 << 10, depth, 2000);
            let after = run.run(Direction::Read, 512 << 10, depth, 2000);
            println!(
                "seed {seed} depth {depth}: learning {:.4} after {:.4}",
                learning / whole,
                after / whole
            );
            assert!(
                learning / whole >= 0.98 && after / whole >= 0.98,
                "depth {depth}"
            );
            for state in run.splitter.states() {
                let rests = state.chunk_bytes == 0 || state.reason == Reason::Trial;
                assert!(rests, "seed {seed} depth {depth}: {state}");
            }
        }
    }
}

#[test]
fn explores_at_most_one_request_in_fifty() {
    let mut run = Loop::new(p3700(3), Split::Auto(prior()));
    for requests in [10, 40, 100, 1000, 5000] {
        run.run(Direction::Read, 512 << 10, 1, requests);
        for state in run.splitter.states() {
            assert!(state.explored <= 0.02, "{state}");
        }
    }
}

#[test]
fn does_nothing_beyond_the_useful_depth() {
    let mut splitter = Splitter::new(Split::Auto(prior()));
    for n in 0..10_000 {
        let load = Load {
            requests: 130,
            ops: 127 + n % 3,
        };
        assert_eq!(
            splitter
                .choose(Direction::Read, 512 << 10, load, n.into())
                .chunk_bytes,
            None
        );
    }
}

/// Pieces that fail at once look faster than any request that is served.
#[test]
fn a_failed_request_teaches_nothing() {
    let mut splitter = Splitter::new(Split::Auto(prior()));
    let load = Load {
        requests: 0,
        ops: 0,
    };
    let (len_bytes, mut now_ns) = (512 << 10, 0);
    for _ in 0..20_000 {
        let choice = splitter.choose(Direction::Read, len_bytes, load, now_ns);
        match choice.chunk_bytes {
            None => {
                now_ns += 300_000;
                splitter.ended(choice, len_bytes, 300_000, now_ns);
            }
            Some(_) => {
                now_ns += 1_000;
                splitter.failed(choice, len_bytes, now_ns);
            }
        }
    }
    let states = splitter.states();
    let [state] = &states[..] else {
        panic!("{states:?}");
    };
    assert_eq!((state.chunk_bytes, state.gain), (0, 1.0), "{state}");
    assert!(state.explored > 0.0, "{state}");
}

/// Ops that some workers make of a request each, one after the other, all of them in flight.
fn spread(splitters: &mut [Splitter]) -> (u32, Vec<Choice>) {
    let whole = Load {
        requests: 0,
        ops: 0,
    };
    let choices = splitters.iter_mut().map(|splitter| {
        let choice = splitter.choose(Direction::Read, 512 << 10, whole, 0);
        (choice.ops(512 << 10), choice)
    });
    let (ops, choices): (Vec<_>, Vec<_>) = choices.unzip();
    (ops.iter().sum(), choices)
}

#[test]
fn workers_share_the_useful_depth() {
    let measured = vec![(Direction::Read, 512 << 10, 8 << 10)];
    let split = Split::Auto(Prior {
        measured,
        ..prior()
    });
    let learnt = crate::Learnt::default();
    let mut splitters: Vec<_> = (0..8).map(|_| learnt.splitter(&split)).collect();
    let (ops, choices) = spread(&mut splitters);
    // Two take all there is, and six go whole.
    assert_eq!(ops, 64 + 64 + 6);
    // Ends and failures make room again, and so does a worker that goes.
    splitters[0].ended(choices[0], 512 << 10, 1000, 1000);
    assert_eq!(spread(&mut splitters[2..3]).0, 32);
    splitters[1].failed(choices[1], 512 << 10, 1000);
    learnt.keep(splitters.remove(3));
    drop(splitters.drain(3..));
    assert_eq!(spread(&mut splitters[..1]).0, 64);
    splitters.clear();
    assert_eq!(
        spread(&mut [learnt.splitter(&split), learnt.splitter(&split)]).0,
        128
    );
}

#[test]
fn chunk_grows_until_the_ops_fit_under_the_useful_depth() {
    let measured = vec![(Direction::Read, 512 << 10, 8 << 10)];
    let mut splitter = Splitter::new(Split::Auto(Prior {
        measured,
        ..prior()
    }));
    for (ops, chunk) in [
        (0, 8),
        (64, 8),
        (65, 16),
        (96, 16),
        (97, 32),
        (120, 64),
        (124, 128),
        (126, 256),
    ] {
        let choice = splitter.choose(Direction::Read, 512 << 10, Load { requests: 0, ops }, 0);
        assert_eq!(
            choice.chunk_bytes.map(NonZeroU32::get),
            Some(chunk << 10),
            "{ops} in flight"
        );
    }
}

#[test]
fn notices_within_5000_requests_that_the_device_has_changed() {
    for seed in 0..5 {
        let mut run = Loop::new(flat(seed), Split::Auto(prior()));
        run.timing = Timing::new(p3700(seed));
        run.run(Direction::Read, 512 << 10, 1, 3000);
        assert!(
            run.splitter
                .states()
                .iter()
                .any(|state| state.chunk_bytes > 0)
        );
        // The drive loses its parallelism: every command now goes page by page, in a deep window.
        let slow = Drive {
            window: 1_000,
            read_ns: 8_000,
            command_ns: 60_000,
            ..p3700(seed)
        };
        run.timing.change(slow.clone());
        run.run(Direction::Read, 512 << 10, 1, 5000);
        let after = run.run(Direction::Read, 512 << 10, 1, 1000);
        let mut reference = Loop::new(p3700(seed), Split::Off);
        reference.timing.change(slow);
        let whole = reference.run(Direction::Read, 512 << 10, 1, 1000);
        println!(
            "seed {seed}: {:.3}, {}",
            after / whole,
            run.splitter.states().last().unwrap()
        );
        assert!(after / whole >= 0.95);
    }
}

#[test]
fn notices_a_gain_that_appears_later() {
    for seed in 0..5 {
        let even = Drive {
            window: 1_000,
            ..p3700(seed)
        };
        let mut run = Loop::new(even, Split::Auto(prior()));
        run.run(Direction::Read, 512 << 10, 1, 3000);
        run.timing.change(p3700(seed));
        run.run(Direction::Read, 512 << 10, 1, 5000);
        let after = run.run(Direction::Read, 512 << 10, 1, 1000);
        let (best, _) = best_fixed(&p3700(seed), Direction::Read, 512 << 10, 1);
        println!("seed {seed}: {:.3}", after / best);
        assert!(after >= 0.95 * best);
    }
}

#[test]
fn write_flood_beside_small_reads_is_left_whole() {
    let p99 = |split: Split| {
        let mut run = Loop::new(p3700(9), split);
        let mut small = Vec::new();
        for burst in 0..400 {
            if burst % 4 == 0 {
                for _ in 0..8 {
                    run.begin(Direction::Write, 1 << 20);
                }
            }
            for _ in 0..8 {
                run.begin(Direction::Read, 4096);
            }
            while run.requests.len() > 4 {
                let (len, latency) = run.end();
                if len == 4096 {
                    small.push(latency);
                }
            }
        }
        small.sort_unstable();
        small[small.len() * 99 / 100]
    };
    let (off, auto) = (p99(Split::Off), p99(Split::Auto(prior())));
    println!("p99 of small reads: off {off} auto {auto}");
    assert!(auto <= off);
}

#[test]
fn off_fixed_and_never_do_as_they_say() {
    let load = Load {
        requests: 0,
        ops: 0,
    };
    let never = Prior {
        never: true,
        ..prior()
    };
    for (split, chunk) in [
        (Split::Off, None),
        (fixed(15), Some(32 << 10)),
        (Split::Auto(never), None),
    ] {
        let mut splitter = Splitter::new(split);
        for _ in 0..1000 {
            let choice = splitter.choose(Direction::Read, 1 << 20, load, 0);
            assert_eq!(choice.chunk_bytes.map(NonZeroU32::get), chunk);
            assert!(!choice.is_timed());
        }
        assert!(splitter.states().is_empty());
    }
}
