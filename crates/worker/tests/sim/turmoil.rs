//! Everything that an operator and a frontend may do to a vring whose disk fails, in any order. Each request is answered
//! once, and the disk has what the answers say.

use std::time::{Duration, Instant};

use cleave_guest::{Inflight, InflightLayout, Memory};
use cleave_worker::Stopped;

use crate::driver::{Part, SIZE};
use crate::*;

const SECTORS_USED: u64 = 24;
/// In the place of a write's sector.
const FLUSH: u64 = u64::MAX;

struct Turmoil {
    bench: Bench,
    region: Option<Inflight>,
    random: Random,
    is_running: bool,
    has_rings: bool,
    /// It is never stopped, and no daemon dies.
    goes_on: bool,
    /// By head: the sector and the byte of a write, or `FLUSH`.
    flying: HashMap<u16, (u64, u8)>,
    /// The possible contents of each sector, of which at most one write is in flight at a time.
    possible: Vec<Vec<u8>>,
    byte: u8,
    log: Vec<String>,
}

impl Turmoil {
    fn new(seed: u64, kept: bool) -> Turmoil {
        let config = SimConfig {
            delay_max: 12,
            ops: [64, 8][seed as usize / 2 % 2],
            ..quiet(seed)
        };
        let layout = InflightLayout::new(1, SIZE);
        let region =
            kept.then(|| Inflight::map(Inflight::create(layout).unwrap(), layout).unwrap());
        let mut turmoil = Turmoil {
            bench: Bench::new(config, FEATURES),
            region,
            random: Random::new(seed),
            is_running: true,
            has_rings: true,
            goes_on: seed.is_multiple_of(2),
            flying: HashMap::new(),
            possible: vec![vec![0]; SECTORS_USED as usize],
            byte: 0,
            log: Vec::new(),
        };
        let stopped = turmoil.bench.control.stop(0);
        turmoil.wait(stopped);
        turmoil.is_running = false;
        turmoil.bind(true);
        turmoil.start(0);
        turmoil
    }

    fn wait<T>(&mut self, mut pending: Commanded<T>) -> T {
        for _ in 0..5000 {
            self.bench.lap();
            match pending.wait_for(Duration::ZERO) {
                Ok(answer) => return answer.unwrap(),
                Err(again) => pending = again,
            }
        }
        panic!("no effect: {:#?}", self.log);
    }

    fn start(&mut self, base: u16) {
        let enabled = !self.random.draw().is_multiple_of(4);
        let started = self.bench.control.start(VringStart {
            base,
            journal: self.region.as_ref().and_then(|region| region.journal(0)),
            enabled,
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

    fn submit(&mut self) {
        let busy: Vec<u64> = self.flying.values().map(|(sector, _)| *sector).collect();
        let sector = self.random.draw() % SECTORS_USED;
        if self.random.draw().is_multiple_of(8) {
            if let Some(head) = self.bench.driver.submit(&Ask::flush()) {
                self.flying.insert(head, (FLUSH, 0));
            }
            return;
        }
        if busy.contains(&sector) {
            return;
        }
        self.byte = self.byte % 250 + 1;
        let ask = Ask::write(
            sector,
            vec![self.byte; 512],
            512,
            self.random.draw().is_multiple_of(2),
        );
        if let Some(head) = self.bench.driver.submit(&ask) {
            self.flying.insert(head, (sector, self.byte));
            self.possible[sector as usize].push(self.byte);
        }
    }

    fn collect(&mut self) {
        for answer in self.bench.driver.collect(|_| 0) {
            let Some((sector, byte)) = self.flying.remove(&answer.head) else {
                panic!("an answer to nothing: {:#?}", self.log);
            };
            if sector == FLUSH {
                continue;
            }
            let now = self.bench.store.lock().unwrap().now[sector as usize * 512];
            let possible = &mut self.possible[sector as usize];
            match answer.status {
                status::OK => *possible = vec![byte],
                status::IOERR => {}
                other => panic!("status {other:#x}: {:#?}", self.log),
            }
            assert!(
                possible.contains(&now),
                "{now} of {possible:?}: {:#?}",
                self.log
            );
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

    /// The daemon is killed, and the next one serves the vring.
    fn die(&mut self) {
        let config = SimConfig {
            delay_max: 12,
            ops: [64, 8][self.random.draw() as usize % 2],
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

    fn policy(&mut self, on_error: &str) {
        self.bench.device.tune(Tuning {
            on_error: on_error.parse().unwrap(),
            ..Tuning::clone(&self.bench.device.tuning())
        });
    }

    fn step(&mut self) {
        let mut choice = self.random.draw() % 40;
        if self.goes_on && matches!(choice, 33 | 34 | 39) {
            choice = [27, 31, 20][self.random.draw() as usize % 3];
        }
        self.log.push(format!("{choice}"));
        match choice {
            0..12 => (0..self.random.draw() % 4).for_each(|_| self.submit()),
            12..20 => (0..self.random.draw() % 20).for_each(|_| {
                self.bench.lap();
            }),
            20 | 21 => {
                let start = (self.random.draw() % SECTORS_USED) as usize * 512;
                let errno = [5, 28][self.random.draw() as usize % 2];
                self.bench.store.lock().unwrap().failing = Some((start..start + 4096, errno));
            }
            22 | 23 => self.bench.store.lock().unwrap().failing = None,
            24 => {
                let all = [
                    "hold",
                    "retry:1",
                    "retry:60",
                    "retry:1:hold",
                    "read=hold,write=retry:60,enospc=hold",
                ];
                let policy = all[self.random.draw() as usize % all.len()];
                self.policy(policy);
            }
            25 | 26 => drop(self.bench.device.resume()),
            27 => drop(self.bench.device.fail()),
            28 => self.bench.device.quiesce(),
            29 | 30 => self.bench.device.go_on(),
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
            35 => {
                let enabled = self.bench.control.enable(0, false);
                self.wait(enabled);
            }
            36..39 => {
                let enabled = self.bench.control.enable(0, true);
                self.wait(enabled);
            }
            _ if self.region.is_some() => self.die(),
            _ => {
                self.bench.lap();
            }
        }
        self.collect();
    }

    fn end(mut self) {
        self.log.push("end".to_owned());
        self.bench.store.lock().unwrap().failing = None;
        self.bench.device.go_on();
        self.bind(true);
        let enabled = self.bench.control.enable(0, true);
        self.wait(enabled);
        let began = Instant::now();
        while !self.flying.is_empty() {
            self.bench.device.resume();
            self.bench.lap();
            self.collect();
            assert!(
                began.elapsed() < Duration::from_secs(10),
                "{:?} {:?} {:#?}",
                self.flying,
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
