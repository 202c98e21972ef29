//! A worker turned by hand over a simulated engine, against a model of the disk. Every run is
//! replayed by its seed: `CLEAVE_SEED=n cargo test -p cleave-worker --test sim`.

// A test's own mistake ends the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod batch;
mod control;
mod crash;
mod driver;
mod stall;
mod table;
mod wake;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cleave_blk::spec::{feature, request_type, status};
use cleave_disk::{Direct, Disk, DiskSpec, OpenOptions, StripeKind};
use cleave_sim::{Random, Sim, SimConfig, SimStore};
use cleave_worker::record::{ErrorKind, Kind, Recording, Stage, Way};
use cleave_worker::{
    Action, Coalesce, Completion, Control, Device, Direction, Lap, Pending as Commanded, Prior,
    Split, Totals, Tuning, VringStart, Worker, WorkerConfig, reactor,
};
use driver::{Answer, Ask, DATA_MAX, Driver};
use rustix::event::{EventfdFlags, eventfd};

const DISK_BYTES: usize = 1 << 20;
/// Legs and chunk where the disk is a stripe.
const LEGS: usize = 4;
const CHUNK: u32 = 4096;
const SECTORS: u64 = DISK_BYTES as u64 / 512;
const FEATURES: u64 = feature::VERSION_1
    | feature::EVENT_IDX
    | feature::INDIRECT_DESC
    | feature::FLUSH
    | feature::CONFIG_WCE
    | feature::DISCARD
    | feature::WRITE_ZEROES;

fn random_bytes(random: &mut Random, n: usize) -> Vec<u8> {
    (0..n.div_ceil(8))
        .flat_map(|_| random.draw().to_le_bytes())
        .take(n)
        .collect()
}

struct Bench {
    worker: Worker<Sim>,
    control: Control,
    driver: Driver,
    store: Arc<Mutex<SimStore>>,
    device: Arc<Device>,
    alarm: Arc<OwnedFd>,
    err: OwnedFd,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn is_rung(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0; 8]).is_ok()
}

fn device(split: Split) -> Arc<Device> {
    let options = OpenOptions::default();
    device_of(
        Disk::open(&DiskSpec::Ram(DISK_BYTES as u64), &options).unwrap(),
        split,
    )
}

/// A stripe of `LEGS`, of which only the layout is used: the data is in the store, leg behind leg.
fn striped_device() -> Arc<Device> {
    let options = OpenOptions {
        direct: Direct::Off,
        ..OpenOptions::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let leg = |number: usize| {
        let path = folder.path().join(number.to_string());
        let file = std::fs::File::create(&path).unwrap();
        file.set_len((DISK_BYTES / LEGS) as u64).unwrap();
        DiskSpec::Path(path)
    };
    let legs: Vec<_> = (0..LEGS).map(leg).collect();
    let disk = Disk::open_stripe(&legs, CHUNK, StripeKind::Raw, &options).unwrap();
    assert_eq!(disk.capacity_bytes(), DISK_BYTES as u64);
    device_of(disk, Split::Off)
}

fn device_of(disk: Disk, split: Split) -> Arc<Device> {
    let config = WorkerConfig {
        cpus: Vec::new(),
        ops: 64,
    };
    let tuning = Tuning {
        completion: Completion::Poll,
        ..Tuning::new(split)
    };
    let serial = *b"simulated\0\0\0\0\0\0\0\0\0\0\0";
    Arc::new(Device::new(Arc::new(disk), serial, true, config, tuning))
}

impl Bench {
    fn new(config: SimConfig, features: u64) -> Bench {
        Bench::with_split(config, features, Split::Off)
    }

    fn with_split(config: SimConfig, features: u64, split: Split) -> Bench {
        Bench::over(device(split), config, features)
    }

    fn striped(config: SimConfig, features: u64) -> Bench {
        let bench = Bench::over(striped_device(), config, features);
        bench.store.lock().unwrap().leg_bytes = DISK_BYTES / LEGS;
        bench
    }

    fn over(device: Arc<Device>, config: SimConfig, features: u64) -> Bench {
        let store = SimStore {
            now: vec![0; DISK_BYTES],
            durable: vec![0; DISK_BYTES],
            ..Default::default()
        };
        let store = Arc::new(Mutex::new(store));
        let driver = Driver::new();
        let memory = driver.memory();
        let alarm = Arc::new(event());
        let (control, commands) = Control::channel().unwrap();
        let mut worker = Worker::new(
            reactor(&device.disk, 64).unwrap(),
            Sim::new(config, store.clone()),
            device.clone(),
            memory,
            commands,
            alarm.clone(),
        )
        .unwrap();
        let err = event();
        let started = control.start(VringStart {
            index: 0,
            layout: Driver::layout(),
            base: 0,
            journal: None,
            features,
            kick: Some(event()),
            call: Some(event()),
            err: Some(err.try_clone().unwrap()),
            enabled: true,
        });
        worker.lap().unwrap();
        started.wait_for(Duration::ZERO).unwrap().unwrap().unwrap();
        Bench {
            worker,
            control,
            driver,
            store,
            device,
            alarm,
            err,
        }
    }

    fn lap(&mut self) -> Lap {
        self.worker.lap().unwrap()
    }

    fn totals(&self) -> Totals {
        self.device.totals()
    }

    /// Turns until a command is carried out, which takes a few laps at most: one to hear of it.
    fn carry_out<T>(&mut self, mut pending: Commanded<T>) -> T {
        for _ in 0..4 {
            self.lap();
            match pending.wait_for(Duration::ZERO) {
                Ok(answer) => return answer.unwrap(),
                Err(again) => pending = again,
            }
        }
        panic!("not carried out");
    }

    /// Submits and turns until it is answered.
    fn ask(&mut self, ask: &Ask) -> Answer {
        let head = self.driver.submit(ask).unwrap();
        for _ in 0..10_000 {
            self.lap();
            if let Some(answer) = self.driver.collect(|_| ask.room).pop() {
                assert_eq!(answer.head, head);
                return answer;
            }
        }
        panic!("no answer to {ask:?}");
    }
}

fn quiet(seed: u64) -> SimConfig {
    SimConfig {
        seed,
        ops: 64,
        fail_per_mille: 0,
        fail_at: None,
        delay_max: 5,
    }
}

/// What a sector may hold: exactly this, or anything (a write to it failed half-way).
type Known = Option<[u8; 512]>;

struct Model {
    sectors: Vec<Known>,
    /// Values that a sector may have after a power cut: all since the last acknowledged flush that
    /// followed their completion, and that flush's.
    maybe: Vec<Vec<Known>>,
    /// How many values a sector had before the first of `maybe`.
    ruled_out: Vec<usize>,
    /// Requests answered, as a reader of the counters should see them.
    answered: Totals,
}

/// A request in flight and what it does to the model.
struct Pending {
    ask: Ask,
    sectors: std::ops::Range<usize>,
    /// For a flush: how many values each sector had had when it was submitted.
    covered: Option<Vec<usize>>,
}

fn run(seed: u64, fail_per_mille: u32, split: Split) {
    let mut random = Random::new(seed);
    let config = SimConfig {
        seed,
        ops: 100,
        fail_per_mille,
        fail_at: None,
        delay_max: random.below(20) as u32,
    };
    run_on(
        Bench::with_split(config, FEATURES, split),
        random,
        fail_per_mille,
    );
}

fn run_striped(seed: u64, fail_per_mille: u32) {
    let mut random = Random::new(seed);
    let config = SimConfig {
        // Room for the longest request and others beside it.
        ops: 2048,
        fail_per_mille,
        delay_max: random.below(20) as u32,
        ..quiet(seed)
    };
    run_on(Bench::striped(config, FEATURES), random, fail_per_mille);
}

fn run_on(mut bench: Bench, mut random: Random, fail_per_mille: u32) {
    let zero: Known = Some([0; 512]);
    let mut model = Model {
        sectors: vec![zero; SECTORS as usize],
        maybe: vec![vec![zero]; SECTORS as usize],
        ruled_out: vec![0; SECTORS as usize],
        answered: Totals::default(),
    };
    let mut pending: HashMap<u16, Pending> = HashMap::new();
    let holds = bench.device.tuning().on_error.write == Action::Hold;
    let may_fail = |ask: &Ask| fail_per_mille > 0 && (!holds || ask.kind == request_type::FLUSH);
    for _ in 0..600 {
        if random.below(50) == 0 {
            retune(&bench.device, &mut random);
        }
        for _ in 0..random.below(4) {
            submit(&mut bench, &mut random, &model, &mut pending);
        }
        bench.lap();
        if holds && random.below(10) == 0 {
            bench.device.resume();
        }
        take_answers(&mut bench, &mut model, &mut pending, may_fail);
    }
    for _ in 0..10_000 {
        bench.lap();
        if holds {
            bench.device.resume();
        }
        take_answers(&mut bench, &mut model, &mut pending, may_fail);
        if pending.is_empty() {
            break;
        }
    }
    assert!(pending.is_empty(), "{} requests never ended", pending.len());
    assert_recorded(&bench, &model.answered);
    // A power cut now: every sector holds a value that no acknowledged flush has ruled out.
    let store = bench.store.lock().unwrap();
    for (sector, maybe) in model.maybe.iter().enumerate() {
        let at = match bench.device.disk.stripe() {
            None => sector * 512,
            Some(stripe) => {
                let (leg, at) = stripe.place(sector as u64 * 512);
                usize::from(leg) * store.leg_bytes + at as usize
            }
        };
        let bytes = &store.durable[at..at + 512];
        let fits = maybe
            .iter()
            .any(|known| known.is_none_or(|known| known == bytes));
        assert!(fits, "sector {sector} would lose a flushed write");
    }
}

/// Control changes its mind under load.
fn retune(device: &Device, random: &mut Random) {
    let completion = [
        Completion::Poll,
        Completion::Adaptive,
        Completion::Interrupt,
    ];
    let tuning = device.tuning();
    device.tune(Tuning {
        completion: completion[random.below(3) as usize],
        spin_cpu_max: random.below(3) as u32 * 50,
        coalesce: Coalesce {
            us: random.below(2) as u32 * 30,
            max: random.below(4) as u32,
        },
        ..(*tuning).clone()
    });
}

/// The counters shown for the vring match the requests that the guest saw.
fn assert_recorded(bench: &Bench, seen: &Totals) {
    let totals = bench.totals();
    let counted = |totals: &Totals| {
        let requests = [totals.reads, totals.writes, totals.others, totals.failed];
        (requests, [totals.read_bytes, totals.write_bytes])
    };
    assert_eq!(counted(&totals), counted(seen));
    assert_eq!((totals.refused, totals.broken), (0, 0));
    let records = bench.device.records.all();
    let [record] = &records[..] else {
        panic!("{} records", records.len());
    };
    let sum = |ways: &[Way], of: &dyn Fn(Kind) -> u64| -> u64 {
        Kind::all()
            .filter(|kind| ways.contains(&kind.way()))
            .map(of)
            .sum()
    };
    // Nothing ends on the spot here, so each is timed.
    let timed = |kind| record.times(Stage::Device, kind).count();
    let moved = [Way::Read, Way::Write];
    assert_eq!(sum(&moved, &timed), totals.reads + totals.writes);
    let waited = |kind| record.times(Stage::Ring, kind).count();
    // After a lap that only saw a part of a request end, it is not known.
    let (waited, most) = (
        sum(&moved, &waited),
        totals.reads + totals.writes + totals.failed,
    );
    assert!(waited > most / 2 && waited <= most, "{waited} of {most}");
    let errors = ErrorKind::ALL.map(|kind| record.errors(kind));
    assert_eq!(errors.iter().sum::<u64>(), seen.failed);
    assert_eq!(record.in_flight(), (0, None));
    let (sampled, zero) = record.zero_reads();
    assert!(zero <= sampled && sampled <= totals.reads);
}

fn submit(
    bench: &mut Bench,
    random: &mut Random,
    model: &Model,
    pending: &mut HashMap<u16, Pending>,
) {
    // Some are large enough to be split.
    let len_max = [8, 64, DATA_MAX / 512][random.below(3) as usize];
    let len = 1 + random.below(len_max);
    let sector = random.below(SECTORS - len);
    let range = sector as usize..(sector + len) as usize;
    let cut = [512, 1000, 4096, 65536, 333][random.below(5) as usize];
    let indirect = random.below(2) == 0;
    let ask = match random.below(10) {
        0..4 => Ask::read(sector, len as u32 * 512, cut, indirect),
        4..8 => Ask::write(
            sector,
            random_bytes(random, len as usize * 512),
            cut,
            indirect,
        ),
        8 => Ask::zero(sector, len as u32, random.below(2) == 0),
        _ => Ask::flush(),
    };
    let is_flush = ask.kind == request_type::FLUSH;
    let clash = pending.values().any(|other| {
        other.sectors.start < range.end && range.start < other.sectors.end && !is_flush
    });
    if clash {
        return;
    }
    let Some(head) = bench.driver.submit(&ask) else {
        return;
    };
    let had = |(maybe, ruled_out): (&Vec<Known>, &usize)| ruled_out + maybe.len();
    let covered = is_flush.then(|| model.maybe.iter().zip(&model.ruled_out).map(had).collect());
    let sectors = if is_flush { 0..0 } else { range };
    assert!(
        pending
            .insert(
                head,
                Pending {
                    ask,
                    sectors,
                    covered
                }
            )
            .is_none()
    );
}

fn take_answers(
    bench: &mut Bench,
    model: &mut Model,
    pending: &mut HashMap<u16, Pending>,
    may_fail: impl Fn(&Ask) -> bool,
) {
    let answers = bench.driver.collect(|head| pending[&head].ask.room);
    for answer in answers {
        let Pending {
            ask,
            sectors,
            covered,
        } = pending.remove(&answer.head).unwrap();
        let ok = answer.status == status::OK;
        assert!(
            ok || (may_fail(&ask) && answer.status == status::IOERR),
            "{ask:?}: {answer:?}"
        );
        let written = if ok { ask.room + 1 } else { 1 };
        assert_eq!(answer.used_bytes, written, "used length of {:?}", ask.kind);
        count(&mut model.answered, &ask, ok);
        match ask.kind {
            request_type::IN if ok => {
                for (sector, bytes) in sectors.zip(answer.data.chunks(512)) {
                    let known = model.sectors[sector];
                    assert!(
                        known.is_none_or(|known| known == bytes),
                        "sector {sector} read wrong"
                    );
                }
            }
            request_type::IN => {}
            request_type::FLUSH if ok => flush(model, &covered.unwrap()),
            request_type::FLUSH => {}
            kind => {
                for (n, sector) in sectors.enumerate() {
                    let value = match kind {
                        request_type::OUT => ask.out[n * 512..][..512].try_into().ok(),
                        _ => Some([0; 512]),
                    };
                    let value = value.filter(|_| ok);
                    model.sectors[sector] = value;
                    model.maybe[sector].push(value);
                }
            }
        }
    }
}

/// Counts a request as its guest saw it end.
fn count(answered: &mut Totals, ask: &Ask, ok: bool) {
    match ask.kind {
        _ if !ok => answered.failed += 1,
        request_type::IN => {
            answered.reads += 1;
            answered.read_bytes += u64::from(ask.room);
        }
        request_type::OUT => {
            answered.writes += 1;
            answered.write_bytes += ask.out.len() as u64;
        }
        _ => answered.others += 1,
    }
}

/// What was there when the flush was submitted is durable now: older values are ruled out.
fn flush(model: &mut Model, covered: &[usize]) {
    for (sector, &had) in covered.iter().enumerate() {
        // The last value that the flush saw stays possible, as do those after it.
        let older = (had - 1).saturating_sub(model.ruled_out[sector]);
        model.maybe[sector].drain(..older);
        model.ruled_out[sector] += older;
    }
}

fn seeds(default: std::ops::Range<u64>) -> Vec<u64> {
    match std::env::var("CLEAVE_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
    {
        Some(seed) => vec![seed],
        None => default.collect(),
    }
}

#[test]
fn random_requests_keep_the_model_and_survive_a_power_cut() {
    for seed in seeds(0..30) {
        println!("CLEAVE_SEED={seed}");
        run(seed, 0, Split::Off);
    }
}

/// A guest whose disk fails now and then sees nothing of it, but for failed flushes.
#[test]
fn failing_ops_that_are_held_keep_the_model_and_survive_a_power_cut() {
    for seed in seeds(4000..4020) {
        println!("CLEAVE_SEED={seed}");
        let mut random = Random::new(seed);
        let config = SimConfig {
            ops: 100,
            fail_per_mille: 20,
            delay_max: random.below(20) as u32,
            ..quiet(seed)
        };
        let split = [Split::Off, Split::Fixed(NonZeroU32::new(4096).unwrap())];
        let split = split[random.below(2) as usize].clone();
        let bench = Bench::with_split(config, FEATURES, split);
        bench.device.tune(Tuning {
            on_error: "hold".parse().unwrap(),
            ..Tuning::clone(&bench.device.tuning())
        });
        // Of a sector, either value is there after a power cut, never half of it.
        bench.store.lock().unwrap().whole_sectors = true;
        let device = bench.device.clone();
        run_on(bench, random, 20);
        let totals = device.totals();
        assert!(totals.held > 0 && totals.redone >= totals.held);
    }
}

/// A flush is about all legs: what it acknowledged survives on each of them.
#[test]
fn a_stripe_keeps_the_model_and_survives_a_power_cut() {
    for seed in seeds(2000..2020) {
        println!("CLEAVE_SEED={seed}");
        run_striped(seed, 0);
    }
}

#[test]
fn failing_ops_of_a_stripe_fail_their_request_and_no_other() {
    for seed in seeds(3000..3010) {
        println!("CLEAVE_SEED={seed}");
        run_striped(seed, 20);
    }
}

#[test]
fn a_leg_that_fails_fails_what_touches_it_and_nothing_else() {
    let bench = || {
        let bench = Bench::striped(
            SimConfig {
                ops: 2048,
                ..quiet(1)
            },
            FEATURES,
        );
        bench.store.lock().unwrap().failing_leg = Some(2);
        bench
    };
    // A row of the stripe has 32 sectors, 8 a leg; leg 2 has those from 16 on.
    for (sector, sectors, expected) in [
        (0, 16, status::OK),
        (0, 17, status::IOERR),
        (16, 8, status::IOERR),
        (24, 8, status::OK),
        (24, 24, status::OK),
        (24, 25, status::IOERR),
    ] {
        let mut bench = bench();
        let data = vec![7; sectors as usize * 512];
        for ask in [
            Ask::write(sector, data, 4096, false),
            Ask::read(sector, sectors * 512, 1000, true),
            Ask::zero(sector, sectors, true),
        ] {
            let answer = bench.ask(&ask);
            assert_eq!(answer.status, expected, "{} {sectors} {sector}", ask.kind);
        }
        assert_eq!(bench.ask(&Ask::flush()).status, status::IOERR);
    }
}

#[test]
fn a_slow_leg_holds_up_only_what_touches_it() {
    let mut bench = Bench::striped(
        SimConfig {
            ops: 2048,
            ..quiet(1)
        },
        FEATURES,
    );
    bench.store.lock().unwrap().slow_leg = Some((2, 1000));
    let slow = bench
        .driver
        .submit(&Ask::read(16, 4096, 4096, true))
        .unwrap();
    for n in 0..100 {
        let sector = [0, 8, 24][n % 3];
        let head = bench
            .driver
            .submit(&Ask::read(sector, 4096, 4096, true))
            .unwrap();
        let mut laps = 0;
        while bench
            .driver
            .collect(|_| 4096)
            .pop()
            .map(|answer| answer.head)
            != Some(head)
        {
            bench.lap();
            laps += 1;
            assert!(laps < 50, "held up behind {slow}");
        }
    }
}

#[test]
fn split_requests_keep_the_model_survive_a_power_cut_and_fail_as_one() {
    let chunk = |bytes| Split::Fixed(NonZeroU32::new(bytes).unwrap());
    let auto = || {
        Split::Auto(Prior {
            useful_depth: 64,
            chunk_min_bytes: 4096,
            never: false,
            measured: vec![
                (Direction::Read, 64 << 10, 4 << 10),
                (Direction::Write, 32 << 10, 8 << 10),
            ],
        })
    };
    for seed in seeds(2000..2010) {
        println!("CLEAVE_SEED={seed}");
        for fail_per_mille in [0, 20] {
            run(seed, fail_per_mille, chunk(4 << 10));
            run(seed, fail_per_mille, chunk(32 << 10));
            run(seed, fail_per_mille, auto());
        }
    }
}

#[test]
fn split_request_is_several_ops_and_one_answer() {
    let split = Split::Fixed(NonZeroU32::new(8 << 10).unwrap());
    let mut bench = Bench::with_split(quiet(1), FEATURES, split);
    assert_eq!(
        bench.ask(&Ask::read(16, 128 << 10, 65536, true)).status,
        status::OK
    );
    // The simulated store is asked 16 times; the twelfth failing fails the whole, once.
    let mut failing = Bench::with_split(
        SimConfig {
            fail_at: Some(11),
            ..quiet(1)
        },
        FEATURES,
        Split::Fixed(NonZeroU32::new(8 << 10).unwrap()),
    );
    let answer = failing.ask(&Ask::read(16, 128 << 10, 65536, true));
    assert_eq!((answer.status, answer.used_bytes), (status::IOERR, 1));
    let again = failing.ask(&Ask::read(16, 128 << 10, 65536, true));
    assert_eq!(
        (again.status, again.used_bytes),
        (status::OK, (128 << 10) + 1)
    );
    assert_eq!(failing.totals().failed, 1);
}

/// Recording adds times; what is counted is the same without.
#[test]
fn requests_are_counted_with_recording_off() {
    for (recording, records) in [(Recording::On, 1), (Recording::Off, 0)] {
        let device = Arc::into_inner(device(Split::Off)).unwrap();
        let config = SimConfig {
            fail_at: Some(3),
            ..quiet(1)
        };
        let mut bench = Bench::over(Arc::new(device.recording(recording)), config, FEATURES);
        for ask in [
            Ask::read(8, 8192, 4096, true),
            Ask::write(8, vec![7; 4096], 4096, false),
            Ask::flush(),
            Ask::read(8, 512, 512, false),
            Ask::read(SECTORS, 512, 512, false),
        ] {
            bench.ask(&ask);
        }
        let totals = bench.totals();
        let ended = [totals.reads, totals.writes, totals.others];
        assert_eq!(ended, [1, 1, 1], "{recording:?}");
        let moved = (totals.read_bytes, totals.write_bytes);
        assert_eq!(moved, (8192, 4096), "{recording:?}");
        let errors = [totals.failed, totals.refused, totals.broken];
        assert_eq!(errors, [1, 1, 0], "{recording:?}");
        assert!(totals.calls + totals.calls_suppressed > 0, "{recording:?}");
        assert_eq!(bench.device.records.all().len(), records);
    }
}

#[test]
fn the_splitter_learns_nothing_from_requests_that_fail() {
    for (fail_per_mille, cells) in [(0, 1), (1000, 0)] {
        let split = Split::Auto(Prior {
            useful_depth: 64,
            chunk_min_bytes: 4096,
            never: false,
            measured: Vec::new(),
        });
        let config = SimConfig {
            fail_per_mille,
            ..quiet(1)
        };
        let mut bench = Bench::with_split(config, FEATURES, split);
        for _ in 0..5 {
            bench.ask(&Ask::read(0, 64 << 10, 65536, true));
        }
        assert_eq!(bench.device.split_states().len(), cells);
    }
}

/// What another splitter had learnt is forgotten, also where both changes come before the worker looks.
#[test]
fn splitting_changed_and_changed_back_is_learnt_anew_and_told() {
    let auto = Split::Auto(Prior {
        useful_depth: 64,
        chunk_min_bytes: 4096,
        never: false,
        measured: Vec::new(),
    });
    let mut bench = Bench::with_split(quiet(1), FEATURES, auto);
    let large = Ask::read(0, 64 << 10, 65536, true);
    for _ in 0..5 {
        bench.ask(&large);
    }
    let tuning = Tuning::clone(&bench.device.tuning());
    bench.device.tune(Tuning {
        split: Split::Off,
        ..tuning.clone()
    });
    bench.device.tune(tuning);
    // To hear of it.
    for _ in 0..4 {
        bench.lap();
    }
    for asked in 1..4 {
        bench.ask(&large);
        assert_eq!(bench.device.split_states()[0].requests, asked);
    }
}

#[test]
fn failing_ops_fail_their_request_and_no_other() {
    for seed in seeds(1000..1020) {
        println!("CLEAVE_SEED={seed}");
        run(seed, 50, Split::Off);
    }
}

#[test]
fn the_nth_failure_is_told_to_exactly_the_nth_request() {
    for nth in 0..20 {
        let mut bench = Bench::new(
            SimConfig {
                fail_at: Some(nth),
                ..quiet(nth)
            },
            FEATURES,
        );
        for n in 0..20 {
            let ask = match n % 4 {
                0 => Ask::write(8, vec![7; 4096], 4096, false),
                1 => Ask::read(8, 4096, 4096, true),
                2 => Ask::flush(),
                _ => Ask::zero(8, 8, false),
            };
            let answer = bench.ask(&ask);
            let expected = if n == nth { status::IOERR } else { status::OK };
            assert_eq!(answer.status, expected, "request {n} with failure at {nth}");
        }
        assert_eq!(bench.totals().failed, 1);
    }
}

#[test]
fn duplicate_head_in_flight_retires_the_vring_and_lets_the_first_end() {
    let mut bench = Bench::new(
        SimConfig {
            delay_max: 10,
            ..quiet(1)
        },
        FEATURES,
    );
    let head = bench
        .driver
        .submit(&Ask::read(0, 4096, 4096, true))
        .unwrap();
    bench.driver.submit_raw(head);
    for _ in 0..50 {
        bench.lap();
    }
    assert_eq!(bench.driver.collect(|_| 4096).len(), 1);
    assert_eq!(bench.totals().retired, 1);
    assert!(is_rung(&bench.err), "the err descriptor tells the frontend");
    bench
        .driver
        .submit(&Ask::read(0, 4096, 4096, true))
        .unwrap();
    for _ in 0..50 {
        bench.lap();
    }
    assert_eq!(
        bench.driver.collect(|_| 4096).len(),
        0,
        "a retired vring is not served"
    );
    let mut alarms = [0; 8];
    rustix::io::read(&bench.alarm, &mut alarms).unwrap();
    assert_eq!(
        u64::from_ne_bytes(alarms),
        cleave_worker::ALARM_RETIRED,
        "one vring's fault is not the session's"
    );
}

#[test]
fn write_through_makes_every_completed_write_durable() {
    let cases = [
        ("cache off", FEATURES, false),
        ("flush not taken", FEATURES & !feature::FLUSH, true),
    ];
    for (name, features, writeback) in cases {
        let mut bench = Bench::new(quiet(3), features);
        bench.device.writeback.store(writeback, Ordering::Relaxed);
        assert_eq!(
            bench.ask(&Ask::write(16, vec![9; 1024], 512, false)).status,
            status::OK
        );
        let store = bench.store.lock().unwrap();
        assert_eq!(store.durable[16 * 512..][..1024], [9; 1024], "{name}");
    }
}

#[test]
fn cache_switched_off_mid_load_makes_what_completes_afterwards_durable() {
    let config = |seed, ops| SimConfig {
        ops,
        delay_max: 30,
        ..quiet(seed)
    };
    for seed in 0..50 {
        switch_off_mid_load(seed, Bench::new(config(seed, 64), FEATURES), |n| n * 4096);
        // Chunks of a page: one leg after the other.
        switch_off_mid_load(seed, Bench::striped(config(seed, 2048), FEATURES), |n| {
            n % LEGS * (DISK_BYTES / LEGS) + n / LEGS * 4096
        });
    }
}

/// `place`: where in the store page `n` of the disk is.
fn switch_off_mid_load(seed: u64, mut bench: Bench, place: impl Fn(usize) -> usize) {
    for n in 0..8 {
        let ask = Ask::write(n * 8, vec![n as u8 + 1; 4096], 4096, true);
        bench.driver.submit(&ask).unwrap();
    }
    bench.lap();
    let before = bench.driver.collect(|_| 0).len();
    bench.device.writeback.store(false, Ordering::Relaxed);
    let mut answers = 0;
    for _ in 0..600 {
        bench.lap();
        answers += bench.driver.collect(|_| 0).len();
        // At once: later the simulated disk may have written back by itself.
        let store = bench.store.lock().unwrap();
        let durable = (0..8)
            .filter(|n| store.durable[place(*n)] == *n as u8 + 1)
            .count();
        assert!(durable >= answers, "seed {seed}: {durable} of {answers}");
        if before + answers == 8 {
            return;
        }
    }
    panic!("seed {seed}: {answers} answers after {before}");
}

#[test]
fn write_back_write_is_not_durable_before_its_flush() {
    // Shows that the durable copy of the simulation can tell the difference at all.
    let mut found = false;
    for seed in 0..20 {
        let mut bench = Bench::new(quiet(seed), FEATURES);
        bench.ask(&Ask::write(16, vec![9; 1024], 512, false));
        found |= bench.store.lock().unwrap().durable[16 * 512] != 9;
        bench.ask(&Ask::flush());
        assert_eq!(bench.store.lock().unwrap().durable[16 * 512], 9);
    }
    assert!(found);
}
