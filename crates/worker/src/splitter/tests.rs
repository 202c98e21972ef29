//! The splitter on modelled drives in virtual time, in closed loops of large random requests.

use std::collections::HashMap;
use std::num::NonZeroU32;

use cleave_disk::model::{Drive, DriveWork, Timing};

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
        // Commands are served whole and in order, so more of them gain no larger share of the channel.
        window: 65_536,
        command_ns: 1_000,
        ..p3700(seed)
    }
}

/// A request in flight.
struct Request {
    direction: DataDirection,
    len: u64,
    ops_left: u32,
    start: u64,
}

/// A closed loop of requests on a modelled drive in virtual time.
struct Loop {
    timing: Timing,
    splitter: Splitter,
    random: u64,
    now: u64,
    requests: HashMap<u32, Request>,
    next: u32,
    /// Time that the worker takes to submit an op.
    op_ns: u64,
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
            op_ns: 0,
        }
    }

    fn random(&mut self) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.random >> 20
    }

    fn begin(&mut self, direction: DataDirection, len: u64) {
        let chunk = if len < SPLIT_MIN_BYTES {
            self.splitter.note_small(direction);
            None
        } else {
            let small = |request: &&Request| request.len < SPLIT_MIN_BYTES;
            let beside = self.requests.values().filter(small).count() as u32;
            self.splitter.choose(direction, len, beside, self.now)
        };
        let offset = self.random() % (DISK_BYTES / len) * len;
        let chunk = chunk.map_or(len, |chunk| u64::from(chunk.get()));
        let work = match direction {
            DataDirection::Read => DriveWork::Read,
            DataDirection::Write => DriveWork::Write { buffered: false },
        };
        let ops = len.div_ceil(chunk);
        let start = self.now;
        for op in 0..ops {
            let at = op * chunk;
            self.now += self.op_ns;
            self.timing
                .submit(self.now, self.next, work, offset + at, chunk.min(len - at));
        }
        let request = Request {
            direction,
            len,
            ops_left: ops as u32,
            start,
        };
        self.requests.insert(self.next, request);
        self.next += 1;
    }

    /// Waits for one completion. Returns the request's length and latency.
    fn end(&mut self) -> (u64, u64) {
        loop {
            while let Some(token) = self.timing.finished() {
                let request = self.requests.get_mut(&token).unwrap();
                request.ops_left -= 1;
                if request.ops_left == 0 {
                    let request = self.requests.remove(&token).unwrap();
                    if self.splitter.learns() && request.len >= SPLIT_MIN_BYTES {
                        let Request { direction, len, .. } = request;
                        self.splitter.ended(direction, len, self.now, || 0);
                    }
                    return (request.len, self.now - request.start);
                }
            }
            self.now = self.timing.next_ns().expect("something is in flight");
            self.timing.advance(self.now);
        }
    }

    /// Returns the bytes per second over `requests` requests at this depth.
    fn run(&mut self, direction: DataDirection, len: u64, depth: usize, requests: usize) -> f64 {
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

    /// Returns the chunk in force for reads of this length.
    fn chunk(&self, len: u64) -> u32 {
        let states = self.splitter.states().into_iter();
        let mut of_class = states.filter(|state| state.class_bytes == class_bytes(class_of(len)));
        of_class.next().map_or(0, |state| state.chunk_bytes)
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

/// Returns the rate with the best fixed chunk (or whole requests), and rate with whole requests.
fn best_fixed(drive: &Drive, direction: DataDirection, len: u64, depth: usize) -> (f64, f64) {
    let rate = |split| Loop::new(drive.clone(), split).run(direction, len, depth, 400);
    let whole = rate(Split::Off);
    let chunks = (12..=len.ilog2())
        .filter(|log| len >> log <= 64)
        .map(|log| rate(fixed(log)));
    (chunks.fold(whole, f64::max), whole)
}

#[test]
fn the_best_chunk_is_found_within_200_requests() {
    for seed in 0..2 {
        for (len, depth) in [
            (128 << 10, 1),
            (512 << 10, 1),
            (1 << 20, 1),
            (512 << 10, 2),
            (4 << 20, 1),
        ] {
            let (best, whole) = best_fixed(&p3700(seed), DataDirection::Read, len, depth);
            let mut run = Loop::new(p3700(seed), Split::Auto(prior()));
            run.run(DataDirection::Read, len, depth, 200);
            let after = run.run(DataDirection::Read, len, depth, 1000);
            println!(
                "seed {seed} {}K depth {depth}: whole {:.0} best {:.0} auto {:.0} MB/s, {}",
                len >> 10,
                whole / 1e6,
                best / 1e6,
                after / 1e6,
                run.splitter.states().last().unwrap()
            );
            assert!(
                after >= 0.97 * best,
                "seed {seed} {len} at {depth}: {:.3}",
                after / best
            );
        }
    }
}

#[test]
fn split_at_depth_1_is_nearly_twice_as_fast_on_a_parallel_drive() {
    let (best, whole) = best_fixed(&p3700(1), DataDirection::Read, 512 << 10, 1);
    assert!(best / whole >= 1.9, "{best} / {whole}");
}

#[test]
fn splitting_costs_nothing_without_parallelism() {
    for seed in 0..3 {
        for depth in [1, 4, 64] {
            let whole =
                Loop::new(flat(seed), Split::Off).run(DataDirection::Read, 512 << 10, depth, 2000);
            let mut run = Loop::new(flat(seed), Split::Auto(prior()));
            let learning = run.run(DataDirection::Read, 512 << 10, depth, 2000);
            let after = run.run(DataDirection::Read, 512 << 10, depth, 2000);
            println!(
                "seed {seed} depth {depth}: learning {:.4} after {:.4}",
                learning / whole,
                after / whole
            );
            assert!(learning / whole >= 0.97 && after / whole >= 0.99, "{depth}");
            assert_eq!(run.chunk(512 << 10), 0, "seed {seed} depth {depth}");
        }
    }
}

#[test]
fn a_disk_that_is_slower_with_pieces_is_soon_left_alone() {
    for seed in 0..3 {
        for depth in [1, 8] {
            let rates = [Split::Off, fixed(13), Split::Auto(prior())].map(|split| {
                let mut run = Loop::new(flat(seed), split);
                run.op_ns = 10_000;
                let first = run.run(DataDirection::Read, 512 << 10, depth, 400);
                (first, run.run(DataDirection::Read, 512 << 10, depth, 4000))
            });
            let [(_, whole), (_, pieces), (learning, after)] = rates.map(|(first, after)| {
                let share = |rate| rate / rates[0].1;
                (share(first), share(after))
            });
            println!("seed {seed} depth {depth}: {pieces:.3} {learning:.3} {after:.4}");
            assert!(whole == 1.0 && pieces < 0.7, "{seed} {depth}: {pieces:.4}");
            assert!(
                learning >= 0.85 && after >= 0.98,
                "{seed} {depth}: {learning:.4} {after:.4}"
            );
        }
    }
}

#[test]
fn nothing_is_split_beyond_half_the_useful_depth() {
    let splitter = Splitter::new(known(8 << 10));
    for (beside, chunk) in [(0, 8 << 10), (64, 8 << 10), (126, 256 << 10), (127, 0)] {
        let found = splitter.choose(DataDirection::Read, 512 << 10, beside, 0);
        assert_eq!(found.map_or(0, NonZeroU32::get), chunk, "beside {beside}");
        splitter.failed(0);
    }
    for large in 0..200 {
        let found = splitter.choose(DataDirection::Read, 512 << 10, 0, 0);
        assert_eq!(found.is_some(), large < 64, "{large}");
    }
}

/// Splits requests of 512 KiB into this chunk from the start.
fn known(chunk_bytes: u32) -> Split {
    let measured = vec![(DataDirection::Read, 512 << 10, chunk_bytes)];
    Split::Auto(Prior {
        measured,
        ..prior()
    })
}

#[test]
fn the_useful_depth_is_shared_equally_by_all_workers() {
    let splitter = Splitter::new(known(8 << 10));
    for chunk in [8, 8, 16, 16, 32, 32, 32, 32, 64] {
        let found = splitter.choose(DataDirection::Read, 512 << 10, 0, 0);
        assert_eq!(found.map(NonZeroU32::get), Some(chunk << 10));
    }
    // The requests of a worker that ends make room again.
    splitter.forget(9);
    let found = splitter.choose(DataDirection::Read, 512 << 10, 0, 0);
    assert_eq!(found.map(NonZeroU32::get), Some(8 << 10));
}

/// Pieces that fail at once look faster than any served request.
#[test]
fn a_failed_request_is_no_observation() {
    let splitter = Splitter::new(Split::Auto(prior()));
    let (len_bytes, mut now_ns) = (512 << 10, 0);
    let mut split = 0;
    for _ in 0..20_000 {
        match splitter.choose(DataDirection::Read, len_bytes, 0, now_ns) {
            None => {
                now_ns += 300_000;
                splitter.ended(DataDirection::Read, len_bytes, now_ns, || 0);
            }
            Some(_) => {
                split += 1;
                now_ns += 1_000;
                splitter.failed(now_ns);
            }
        }
    }
    let states = splitter.states();
    let [state] = &states[..] else {
        panic!("{states:?}");
    };
    assert!(state.chunk_bytes == 0 && state.tried.is_none(), "{state}");
    assert!(split > 0);
}

#[test]
fn a_device_that_changes_is_noticed_within_2000_requests() {
    for seed in 0..3 {
        let mut run = Loop::new(p3700(seed), Split::Auto(prior()));
        run.run(DataDirection::Read, 512 << 10, 1, 3000);
        assert!(run.chunk(512 << 10) > 0);
        // The drive loses its parallelism: every command now takes its pages one by one, in a deep window.
        let slow = Drive {
            window: 1_000,
            read_ns: 8_000,
            command_ns: 60_000,
            ..p3700(seed)
        };
        run.timing.change(slow.clone());
        run.run(DataDirection::Read, 512 << 10, 1, 2000);
        let after = run.run(DataDirection::Read, 512 << 10, 1, 1000);
        let mut reference = Loop::new(p3700(seed), Split::Off);
        reference.timing.change(slow);
        let whole = reference.run(DataDirection::Read, 512 << 10, 1, 1000);
        println!("seed {seed}: {:.3}", after / whole);
        assert!(after / whole >= 0.97, "seed {seed}: {:.3}", after / whole);
        run.timing.change(p3700(seed));
        run.run(DataDirection::Read, 512 << 10, 1, 2000);
        let after = run.run(DataDirection::Read, 512 << 10, 1, 1000);
        let (best, _) = best_fixed(&p3700(seed), DataDirection::Read, 512 << 10, 1);
        println!("seed {seed}: back {:.3}", after / best);
        assert!(after >= 0.97 * best, "seed {seed}: {:.3}", after / best);
    }
}

#[test]
fn a_write_flood_beside_small_reads_is_left_whole() {
    let p99 = |split: Split| {
        let mut run = Loop::new(p3700(9), split);
        let mut small = Vec::new();
        for burst in 0..400 {
            if burst % 4 == 0 {
                for _ in 0..8 {
                    run.begin(DataDirection::Write, 1 << 20);
                }
            }
            for _ in 0..8 {
                run.begin(DataDirection::Read, 4096);
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
fn writes_are_split_again_after_several_workers_left_them_whole() {
    let splitter = Splitter::new(Split::Auto(Prior {
        measured: vec![(DataDirection::Write, 512 << 10, 8 << 10)],
        ..prior()
    }));
    let write = || {
        let chunk = splitter.choose(DataDirection::Write, 512 << 10, 0, 0);
        splitter.failed(0);
        chunk
    };
    for round in 0..2000 {
        splitter.note_small(DataDirection::Read);
        assert_eq!(write(), None);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..MIXED_WRITES).for_each(|_| _ = write()));
            }
        });
        assert!(write().is_some(), "round {round}");
    }
}

#[test]
fn off_fixed_and_never_do_as_they_say() {
    let never = Prior {
        never: true,
        ..prior()
    };
    for (split, chunk) in [
        (Split::Off, None),
        (fixed(15), Some(32 << 10)),
        (Split::Auto(never), None),
    ] {
        let splitter = Splitter::new(split);
        for _ in 0..1000 {
            let found = splitter.choose(DataDirection::Read, 1 << 20, 0, 0);
            assert_eq!(found.map(NonZeroU32::get), chunk);
        }
        assert!(!splitter.learns());
        assert!(splitter.states().is_empty());
    }
}
