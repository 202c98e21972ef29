//! Everything that an operator and a frontend may do to a vring whose disk fails, in any order. Each request is answered
//! once, the disk has what the answers say, and neither side sleeps while it has to act.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use cleave_guest::Memory;

use crate::driver::Part;
use crate::*;

const SECTORS_USED: u64 = 256;
/// Requests of more sectors are split, if any are.
const LARGE_SECTORS: u64 = 128;
/// Laps in which a worker that has been told of everything has carried it out.
const HEARD_LAPS: u32 = 4;

struct Turmoil {
    bench: Bench,
    region: Option<Inflight>,
    random: Random,
    is_running: bool,
    is_enabled: bool,
    is_quiet: bool,
    has_rings: bool,
    /// True if it is never stopped, and no daemon dies.
    goes_on: bool,
    call: OwnedFd,
    /// True if the guest collects nothing until it is called.
    sleeps: bool,
    is_called: bool,
    /// Laps in which the worker slept without a time limit and with nothing in flight, since the last action of any side.
    idle_laps: u32,
    /// By head.
    flying: HashMap<u16, Flying>,
    /// The possible contents of each sector, of which at most one write is in flight at a time.
    possible: Vec<Vec<u8>>,
    byte: u8,
    log: Vec<String>,
}

/// A request in flight.
struct Flying {
    sectors: std::ops::Range<usize>,
    /// The byte that a write is full of.
    byte: Option<u8>,
    room: u32,
}

impl Turmoil {
    fn new(seed: u64, kept: bool) -> Turmoil {
        let config = SimConfig {
            delay_max: 12,
            ops: [200, 64][seed as usize / 2 % 2],
            ..quiet(seed)
        };
        let region = kept.then(inflight_region);
        let mut turmoil = Turmoil {
            bench: Bench::new(config, FEATURES),
            region,
            random: Random::new(seed),
            is_running: true,
            is_enabled: true,
            is_quiet: false,
            has_rings: true,
            goes_on: seed.is_multiple_of(2),
            call: event(),
            sleeps: false,
            is_called: false,
            idle_laps: 0,
            flying: HashMap::new(),
            possible: vec![vec![0]; SECTORS_USED as usize],
            byte: 0,
            log: Vec::new(),
        };
        turmoil.bench.store.lock().unwrap().whole_sectors = true;
        let stopped = turmoil.bench.control.stop(0);
        turmoil.wait(stopped);
        turmoil.is_running = false;
        turmoil.bind(true);
        turmoil.start(0);
        turmoil
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.random.draw() as usize % all.len()]
    }

    fn lap(&mut self) {
        let sleeps = |bench: &Bench| bench.store.lock().unwrap().idle_waits;
        let before = sleeps(&self.bench);
        if catch_unwind(AssertUnwindSafe(|| self.bench.lap())).is_err() {
            self.log.push("panic".to_owned());
            return self.die();
        }
        self.is_called |= is_rung(&self.call);
        match sleeps(&self.bench) > before {
            true => self.idle_laps += 1,
            false => self.idle_laps = 0,
        }
        if self.idle_laps >= HEARD_LAPS {
            self.assert_nothing_to_do();
        }
    }

    /// Asserts that the worker may sleep until something is announced.
    fn assert_nothing_to_do(&self) {
        let is_answered = self.bench.driver.used_index() == self.bench.driver.seen();
        assert!(
            is_answered || !self.sleeps || self.is_called,
            "the guest waits for a call: {:#?}",
            self.log
        );
        if !self.is_running || !self.has_rings || self.is_quiet {
            return;
        }
        let stalled = self.bench.device.records.stalled();
        let (_, held) = match stalled.first() {
            Some((_, stalled)) => (stalled.retrying, stalled.held),
            None => (0, 0),
        };
        let waits =
            |stalled: &(u16, cleave_worker::record::StalledRequests)| stalled.1.retrying > 0;
        assert!(!stalled.iter().any(waits), "{stalled:?}: {:#?}", self.log);
        let left = self.flying.len() - self.answered();
        assert!(
            left == 0 || held > 0 || !self.is_enabled,
            "asleep on {left} requests: {:#?}",
            self.log
        );
    }

    /// How many answers the guest has not collected.
    fn answered(&self) -> usize {
        let driver = &self.bench.driver;
        usize::from(driver.used_index().wrapping_sub(driver.seen()))
    }

    fn wait<T>(&mut self, mut pending: Commanded<T>) -> T {
        self.idle_laps = 0;
        for _ in 0..5000 {
            self.bench.lap();
            self.is_called |= is_rung(&self.call);
            match pending.wait_for(Duration::ZERO) {
                Ok(answer) => return answer.unwrap(),
                Err(again) => pending = again,
            }
        }
        panic!("no effect: {:#?}", self.log);
    }

    fn start(&mut self, base: u16) {
        self.is_enabled = !self.random.draw().is_multiple_of(4);
        let started = self.bench.control.start(VringStart {
            base,
            journal: self.region.as_ref().and_then(|region| region.journal(0)),
            enabled: self.is_enabled,
            call: Some(self.call.try_clone().unwrap()),
            ..vring(0)
        });
        self.wait(started).unwrap();
        self.is_running = true;
    }

    fn bind(&mut self, rings: bool) {
        let parts: &[Part] = if rings {
            &[Part::Rings, Part::Requests]
        } else {
            &[Part::Requests]
        };
        let regions = parts.iter().map(|part| self.bench.driver.region(*part));
        let memory = Memory::new(regions.collect()).unwrap();
        let bound = self.bench.control.bind(memory);
        self.wait(bound);
        self.has_rings = rings;
    }

    fn enable(&mut self, enabled: bool) {
        let done = self.bench.control.enable(0, enabled);
        self.wait(done);
        self.is_enabled = enabled;
    }

    fn submit(&mut self) {
        let len = match self.random.draw() % 4 {
            0 => 1 + self.random.draw() % LARGE_SECTORS,
            _ => 1 + self.random.draw() % 4,
        };
        let sector = self.random.draw() % (SECTORS_USED - len);
        let range = sector as usize..(sector + len) as usize;
        let cut = self.one_of(&[512, 1000, 65536]);
        let indirect = self.random.draw().is_multiple_of(2);
        self.byte = self.byte % 250 + 1;
        let (ask, byte) = match self.random.draw() % 8 {
            0 => (Ask::flush(), None),
            1 | 2 => (Ask::read(sector, len as u32 * 512, cut, indirect), None),
            3 => (Ask::zero(sector, len as u32, indirect), Some(0)),
            _ => {
                let bytes = vec![self.byte; len as usize * 512];
                (Ask::write(sector, bytes, cut, indirect), Some(self.byte))
            }
        };
        let sectors = match ask.kind {
            request_type::FLUSH => 0..0,
            _ => range,
        };
        let overlaps =
            |other: &Flying| other.sectors.start < sectors.end && sectors.start < other.sectors.end;
        if self.flying.values().any(overlaps) {
            return;
        }
        // A worker that sees the request anyway needs no kick.
        let has_to_be_kicked = self.idle_laps >= HEARD_LAPS
            && self.is_running
            && self.is_enabled
            && self.has_rings
            && !self.is_quiet
            && self.bench.device.records.stalled().is_empty();
        let Some(head) = self.bench.driver.submit(&ask) else {
            return;
        };
        assert!(
            !has_to_be_kicked || self.bench.driver.wants_kick(true),
            "asleep without a kick: {:#?}",
            self.log
        );
        self.idle_laps = 0;
        if let Some(byte) = byte {
            let sectors = self.possible[sectors.clone()].iter_mut();
            sectors.for_each(|possible| possible.push(byte));
        }
        let room = ask.room;
        let flying = Flying {
            sectors,
            byte,
            room,
        };
        self.flying.insert(head, flying);
    }

    fn collect(&mut self) {
        if !self.sleeps || std::mem::take(&mut self.is_called) {
            self.sleeps = false;
            self.take_answers();
            if self.random.draw().is_multiple_of(4) {
                self.bench.driver.want_call();
                self.is_called = false;
                // Answers that came before the guest asked for a call have none.
                self.take_answers();
                self.sleeps = true;
            }
        }
        let store = self.bench.store.lock().unwrap();
        for (sector, possible) in self.possible.iter().enumerate() {
            let now = store.now[sector * 512];
            assert!(
                possible.contains(&now),
                "{sector}: {now} of {possible:?}: {:#?}",
                self.log
            );
        }
    }

    fn take_answers(&mut self) {
        let flying = &self.flying;
        for answer in self.bench.driver.collect(|head| flying[&head].room) {
            let Flying { sectors, byte, .. } = self.flying.remove(&answer.head).unwrap();
            let is_ok = match answer.status {
                status::OK => true,
                status::IOERR => false,
                other => panic!("status {other:#x}: {:#?}", self.log),
            };
            let possible = &mut self.possible[sectors];
            match byte {
                Some(byte) if is_ok => possible.fill(vec![byte]),
                None if is_ok => {
                    for (possible, read) in possible.iter().zip(answer.data.chunks(512)) {
                        assert!(
                            possible.contains(&read[0]) && read.iter().all(|one| *one == read[0]),
                            "{read:?} of {possible:?}: {:#?}",
                            self.log
                        );
                    }
                }
                _ => {}
            }
        }
    }

    /// The daemon is killed, and the next one serves the vring.
    fn die(&mut self) {
        let config = SimConfig {
            delay_max: 12,
            ops: self.one_of(&[200, 64]),
            ..quiet(self.random.draw())
        };
        let (control, commands) = Control::channel().unwrap();
        let worker = Worker::new(
            reactor(&self.bench.device.disk, 64).unwrap(),
            Sim::new(config, self.bench.store.clone()),
            self.bench.device.clone(),
            self.bench.driver.memory(),
            commands,
            self.bench.alarm.clone(),
        )
        .unwrap();
        drop(std::mem::replace(&mut self.bench.worker, worker));
        self.bench.control = control;
        self.bind(true);
        self.start(4711);
    }

    fn tune(&mut self, change: impl FnOnce(&mut Tuning)) {
        let mut tuning = Tuning::clone(&self.bench.device.tuning());
        change(&mut tuning);
        self.bench.device.tune(tuning);
    }

    /// The operator changes one of the settings.
    fn retune(&mut self) {
        let on_error = self.one_of(&[
            "hold",
            "retry:1",
            "retry:60",
            "retry:1:hold",
            "read=hold,write=retry:60,enospc=hold",
        ]);
        let limits = self.one_of(&[
            "none",
            "none",
            "iops-total=300",
            "bps-write=1M,iops-read=200",
            "bps-total=100K",
            "iops-total=1000,iops-total-max=5000,iops-total-max-length=2,iops-size=4K",
        ]);
        let chunk = Split::Fixed(NonZeroU32::new(4096).unwrap());
        let auto = Split::Auto(Prior::from_limits(self.bench.device.disk.limits()));
        let split = [Split::Off, chunk, auto][self.random.draw() as usize % 3].clone();
        let completion = self.one_of(&[
            CompletionPolicy::Interrupt,
            CompletionPolicy::Poll,
            CompletionPolicy::Adaptive,
        ]);
        let coalesce = Coalesce {
            us: self.one_of(&[0, 30, 5000]),
            max: self.one_of(&[0, 1, 4]),
        };
        match self.random.draw() % 6 {
            0 | 1 => self.tune(|tuning| tuning.on_error = on_error.parse().unwrap()),
            2 => self.tune(|tuning| tuning.limits = limits.parse().unwrap()),
            3 => self.tune(|tuning| tuning.split = split),
            4 => self.tune(|tuning| tuning.completion = completion),
            _ => self.tune(|tuning| tuning.coalesce = coalesce),
        }
    }

    fn step(&mut self) {
        let mut choice = self.random.draw() % 44;
        if self.goes_on && matches!(choice, 33 | 34 | 39) {
            choice = self.one_of(&[27, 31, 20]);
        }
        self.log.push(format!("{choice}"));
        match choice {
            0..12 => (0..self.random.draw() % 4).for_each(|_| self.submit()),
            12..20 => {
                // In the middle of a lap, at most.
                let dies = self.region.is_some() && !self.goes_on;
                let dies = dies && self.random.draw().is_multiple_of(16);
                let ops = (self.random.draw() % 12) as u32;
                self.bench.store.lock().unwrap().panic_in = dies.then_some(ops);
                (0..self.random.draw() % 20).for_each(|_| self.lap());
                self.bench.store.lock().unwrap().panic_in = None;
            }
            20 | 21 => {
                let start = (self.random.draw() % SECTORS_USED) as usize * 512;
                let errno = self.one_of(&[5, 28]);
                self.bench.store.lock().unwrap().failing = Some((start..start + 4096, errno));
            }
            22 | 23 => self.bench.store.lock().unwrap().failing = None,
            24 | 40 | 41 | 42 => self.retune(),
            25 | 26 => drop(self.bench.device.resume()),
            27 => drop(self.bench.device.fail()),
            28 => {
                self.bench.device.quiesce();
                self.is_quiet = true;
            }
            29 | 30 => {
                self.bench.device.go_on();
                self.is_quiet = false;
            }
            31 => self.bind(!self.has_rings),
            32 => self.bind(true),
            33 | 34 if self.is_running => {
                // Without a region, what is stalled on a ring that is away is lost with the ring.
                if self.region.is_none() && !self.has_rings {
                    return;
                }
                let stopped = self.bench.control.stop(0);
                let stopped = self.wait(stopped);
                self.log.push(format!("{stopped:?}"));
                self.is_running = false;
                if !self.has_rings {
                    self.bind(true);
                }
                let base = match stopped {
                    Stopped::At(base) => base,
                    _ => 4711,
                };
                self.start(base);
            }
            35 => self.enable(false),
            36..=38 => self.enable(true),
            43 => {
                let on = self.random.draw().is_multiple_of(2);
                self.bench.device.writeback.store(on, Ordering::Relaxed);
            }
            _ if self.region.is_some() => self.die(),
            _ => self.lap(),
        }
        if !(0..20).contains(&choice) {
            self.idle_laps = 0;
        }
        self.collect();
    }

    fn end(mut self) {
        self.log.push("end".to_owned());
        self.bench.store.lock().unwrap().failing = None;
        self.bench.device.go_on();
        self.is_quiet = false;
        self.tune(|tuning| tuning.limits = "none".parse().unwrap());
        self.bind(true);
        self.enable(true);
        let began = Instant::now();
        while !self.flying.is_empty() {
            self.bench.device.resume();
            self.idle_laps = 0;
            self.lap();
            self.collect();
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "{} {:?} {:#?}",
                self.flying.len(),
                self.bench.device.records.stalled(),
                self.log
            );
        }
        assert_eq!(self.bench.totals().retired, 0, "{:#?}", self.log);
        let stopped = self.bench.control.stop(0);
        assert!(
            matches!(self.wait(stopped), Stopped::At(_)),
            "{:#?}",
            self.log
        );
    }
}

#[test]
fn any_order_of_orders_answers_each_request_once() {
    for seed in seeds(0..16) {
        println!("seed {seed}");
        let mut turmoil = Turmoil::new(seed, seed % 5 > 0);
        for _ in 0..300 {
            turmoil.step();
        }
        turmoil.end();
    }
}
