//! A power cut at any moment of a run leaves a simulated disk that keeps all promises to the guest.
//!
//! `CLEAVE_STATES_LOG=FILE CLEAVE_SEED=n` keeps the recording of a run, for `replay-log` of xfstests.

use std::time::Instant;

use cleave_states::{Checked, Extent, Layout, Log, Number, Submission, check};

use super::*;

/// Minimum number of disk states over all seeds.
const STATES_MIN: u64 = 10_000;

/// A guest's requests in flight, with the recorded number of each unless it is a read.
type Flying = HashMap<u16, (Option<Number>, u32)>;

struct Recorded {
    bench: Bench,
    flying: Flying,
    write_through: bool,
    /// The operator changes how errors, limits, pieces and calls are treated.
    is_tuned: bool,
}

impl Recorded {
    fn new(bench: Bench, layout: Layout) -> Recorded {
        bench.store.lock().unwrap().log = Some(Log::new(layout));
        Recorded {
            bench,
            flying: HashMap::new(),
            write_through: false,
            is_tuned: false,
        }
    }

    fn tuned(self) -> Recorded {
        Recorded {
            is_tuned: true,
            ..self
        }
    }

    fn log<T>(&self, record: impl FnOnce(&mut Log) -> T) -> T {
        record(self.bench.store.lock().unwrap().log.as_mut().unwrap())
    }

    /// Submits a request, also on sectors that others in flight write.
    fn submit(&mut self, random: &mut Random) {
        let len_max = [4, 64, DATA_MAX / 512][random.below(3) as usize];
        let len = 1 + random.below(len_max);
        // Half of the requests use a small part of the disk, so that they overlap.
        let room = [64, SECTORS][random.below(2) as usize].max(len + 1);
        let sector = random.below(room - len);
        let cut = [512, 1000, 4096, 65536][random.below(4) as usize];
        let indirect = random.below(2) == 0;
        let ask = match random.below(12) {
            0..2 => Ask::read(sector, len as u32 * 512, cut, indirect),
            2..8 => Ask::write(
                sector,
                random_bytes(random, len as usize * 512),
                cut,
                indirect,
            ),
            8..10 => Ask::zero(sector, len as u32, random.below(2) == 0),
            _ => Ask::flush(),
        };
        let Some(head) = self.bench.driver.submit(&ask) else {
            return;
        };
        let asked = match ask.kind {
            request_type::OUT => Some(Submission::Write {
                sector,
                bytes: &ask.out,
            }),
            request_type::WRITE_ZEROES => Some(Submission::Zero {
                sector,
                sectors: len,
            }),
            request_type::DISCARD => Some(Submission::Discard {
                sector,
                sectors: len,
            }),
            request_type::FLUSH => Some(Submission::Flush),
            _ => None,
        };
        let number = asked.map(|asked| self.log(|log| log.submit(asked)));
        assert!(self.flying.insert(head, (number, ask.room)).is_none());
    }

    fn collect(&mut self) {
        let flying = &self.flying;
        for answer in self.bench.driver.collect(|head| flying[&head].1) {
            let (number, _) = self.flying.remove(&answer.head).unwrap();
            if let Some(number) = number {
                self.log(|log| log.complete_request(number, answer.status == status::OK));
            }
        }
    }

    fn lap(&mut self) {
        self.bench.lap();
        self.collect();
    }

    /// The guest switches its write cache. Requests that complete afterwards follow the new mode.
    fn switch(&mut self) {
        self.write_through = !self.write_through;
        let on = self.write_through;
        self.bench.device.writeback.store(!on, Ordering::Relaxed);
        self.log(|log| log.write_through(on));
    }

    /// The operator changes some settings, or has held requests repeated or failed.
    fn order(&mut self, random: &mut Random) {
        match random.below(8) {
            0 => drop(self.bench.device.fail()),
            1..4 => drop(self.bench.device.resume()),
            _ => {
                let on_error = ["hold", "retry:60", "report", "read=hold,write=retry:1:hold"];
                let limits = ["none", "none", "iops-total=2000", "bps-write=8M"];
                let chunk = Split::Fixed(NonZeroU32::new(4096).unwrap());
                self.bench.device.tune(Tuning {
                    on_error: on_error[random.below(4) as usize].parse().unwrap(),
                    limits: limits[random.below(4) as usize].parse().unwrap(),
                    split: [Split::Off, chunk][random.below(2) as usize].clone(),
                    coalesce: Coalesce {
                        us: random.below(2) as u32 * 50,
                        max: 0,
                    },
                    ..Tuning::clone(&self.bench.device.tuning())
                });
            }
        }
    }

    fn run(mut self, seed: u64, random: &mut Random) -> Checked {
        for _ in 0..150 {
            if random.below(40) == 0 {
                self.switch();
            }
            if self.is_tuned && random.below(6) == 0 {
                self.order(random);
            }
            for _ in 0..random.below(4) {
                self.submit(random);
            }
            self.lap();
        }
        if self.is_tuned {
            self.bench.device.tune(Tuning {
                on_error: Default::default(),
                limits: Default::default(),
                ..Tuning::clone(&self.bench.device.tuning())
            });
        }
        let began = Instant::now();
        while !self.flying.is_empty() && began.elapsed() < Duration::from_secs(60) {
            if self.is_tuned {
                self.bench.device.resume();
            }
            self.lap();
        }
        assert!(self.flying.is_empty(), "seed {seed}: some never completed");
        self.judge(seed, random)
    }

    fn judge(self, seed: u64, random: &mut Random) -> Checked {
        let log = self.bench.store.lock().unwrap().log.take().unwrap();
        if let Some(path) = std::env::var_os("CLEAVE_STATES_LOG") {
            let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
            log.save(&mut file).unwrap();
        }
        let extent = Extent {
            subsets: 4,
            cached_above: false,
        };
        let checked = check(&log, extent, &mut |n| random.below(n));
        checked.unwrap_or_else(|lost| panic!("CLEAVE_SEED={seed}: {lost}"))
    }
}

fn config(seed: u64, ops: usize, fail_per_mille: u32, random: &mut Random) -> SimConfig {
    SimConfig {
        ops,
        fail_per_mille,
        delay_max: random.below(20) as u32,
        ..quiet(seed)
    }
}

fn striped_layout() -> Layout {
    Layout {
        legs: LEGS as u64,
        leg_sectors: SECTORS / LEGS as u64,
        chunk_sectors: u64::from(CHUNK) / 512,
        sectors: SECTORS,
    }
}

/// One leg, with or without failures.
fn one_leg(seed: u64, fail_per_mille: u32) -> Checked {
    let mut random = Random::new(seed);
    let config = config(seed, 100, fail_per_mille, &mut random);
    let split = match random.below(2) {
        0 => Split::Off,
        _ => Split::Fixed(NonZeroU32::new(4096).unwrap()),
    };
    let bench = Bench::with_split(config, FEATURES, split);
    Recorded::new(bench, Layout::plain(SECTORS)).run(seed, &mut random)
}

fn four_legs(seed: u64, fail_per_mille: u32) -> Checked {
    let mut random = Random::new(seed);
    let config = config(seed, 2048, fail_per_mille, &mut random);
    let bench = Bench::striped(config, FEATURES);
    Recorded::new(bench, striped_layout()).run(seed, &mut random)
}

/// Runs the seeds and checks that enough states of each kind were built.
fn run_all(what: &str, runs: impl Fn(u64) -> Checked) {
    let mut all = Checked::default();
    let seeds = seeds(0..8);
    for seed in &seeds {
        let one = runs(*seed);
        all.states += one.states;
        all.lossy += one.lossy;
        all.torn += one.torn;
        all.epochs += one.epochs;
        all.promises += one.promises;
    }
    println!("{what}: {all:?}");
    if seeds.len() > 1 {
        assert!(all.states >= STATES_MIN, "{all:?}");
        assert!(
            all.lossy > STATES_MIN / 4 && all.torn > STATES_MIN / 10,
            "{all:?}"
        );
        assert!(all.epochs > 50 && all.promises > 100, "{all:?}");
    }
}

#[test]
fn no_crash_loses_durable_data_of_one_leg() {
    run_all("one leg", |seed| one_leg(seed, 0));
}

#[test]
fn no_crash_loses_durable_data_of_a_stripe() {
    run_all("four legs", |seed| four_legs(seed, 0));
}

#[test]
fn no_crash_loses_durable_data_of_a_failing_disk_under_an_operator() {
    run_all("under an operator", |seed| {
        let mut random = Random::new(seed);
        match seed % 2 {
            0 => {
                let config = config(seed, 100, 60, &mut random);
                let bench = Bench::new(config, FEATURES);
                let recorded = Recorded::new(bench, Layout::plain(SECTORS));
                recorded.tuned().run(seed, &mut random)
            }
            _ => {
                let config = config(seed, 2048, 10, &mut random);
                let bench = Bench::striped(config, FEATURES);
                let recorded = Recorded::new(bench, striped_layout());
                recorded.tuned().run(seed, &mut random)
            }
        }
    });
}

#[test]
fn no_crash_loses_durable_data_of_a_failing_disk() {
    run_all("failing", |seed| match seed % 2 {
        0 => one_leg(seed, 60),
        _ => four_legs(seed, 10),
    });
}
