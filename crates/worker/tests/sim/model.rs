//! Random requests against a model of the disk, which must agree with the disk after a power cut.

use cleave_worker::RateLimits;

use super::*;

/// Contents of a sector: these bytes, or anything (after a failed write).
type Known = Option<[u8; 512]>;

struct Model {
    sectors: Vec<Known>,
    /// Values that a sector may have after a power cut: the value at the last acknowledged flush, and all later
    /// ones.
    maybe: Vec<Vec<Known>>,
    /// Number of values that a sector had before the first of `maybe`.
    ruled_out: Vec<usize>,
    /// Completed requests, as the counters should show them.
    answered: Totals,
}

/// A request in flight, and its effect on the model.
struct Pending {
    ask: Ask,
    sectors: std::ops::Range<usize>,
    /// For a flush: how many values each sector had when it was submitted.
    covered: Option<Vec<usize>>,
}

pub(crate) fn run(seed: u64, fail_per_mille: u32, split: Split) {
    let mut random = Random::new(seed);
    let config = SimConfig {
        ops: 100,
        fail_per_mille,
        delay_max: random.below(20) as u32,
        ..quiet(seed)
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
    let holds = bench.device.tuning().on_error.write == ErrorAction::Hold;
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
    // The laps that are left come faster than any limit lets requests go.
    bench.device.tune(Tuning {
        limits: RateLimits::default(),
        ..Tuning::clone(&bench.device.tuning())
    });
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
    assert!(
        pending.is_empty(),
        "{} requests never completed",
        pending.len()
    );
    assert_recorded(&bench, &model.answered);
    // After a power cut every sector holds a value that no acknowledged flush has ruled out.
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

/// Control changes the tuning under load.
fn retune(device: &Device, random: &mut Random) {
    let completion = [
        CompletionPolicy::Poll,
        CompletionPolicy::Adaptive,
        CompletionPolicy::Interrupt,
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

/// The counters of the vring match the requests that the guest saw.
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
    let sum = |ways: &[Category], of: &dyn Fn(Kind) -> u64| -> u64 {
        Kind::all()
            .filter(|kind| ways.contains(&kind.way()))
            .map(of)
            .sum()
    };
    // No request completes inline here, so each is timed.
    let timed = |kind| record.times(Stage::Device, kind).count();
    let moved = [Category::Read, Category::Write];
    assert_eq!(sum(&moved, &timed), totals.reads + totals.writes);
    let waited = |kind| record.times(Stage::Ring, kind).count();
    // After a lap in which only a part of a request completed, the time is unknown.
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

/// Counts a request as the guest saw it complete.
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

/// The values from the submission of the flush are durable now, so older ones are ruled out.
fn flush(model: &mut Model, covered: &[usize]) {
    for (sector, &had) in covered.iter().enumerate() {
        // The last value before the flush stays possible, as do later ones.
        let older = (had - 1).saturating_sub(model.ruled_out[sector]);
        model.maybe[sector].drain(..older);
        model.ruled_out[sector] += older;
    }
}

#[test]
fn random_requests_match_the_model_and_survive_a_power_cut() {
    for seed in seeds(0..30) {
        println!("CLEAVE_SEED={seed}");
        run(seed, 0, Split::Off);
    }
}

/// A guest whose disk fails from time to time notices only failed flushes.
#[test]
fn held_requests_match_the_model_and_survive_a_power_cut() {
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
        // After a power cut a sector has either value, never half of each.
        bench.store.lock().unwrap().whole_sectors = true;
        let device = bench.device.clone();
        run_on(bench, random, 20);
        let totals = device.totals();
        assert!(totals.held > 0 && totals.redone >= totals.held);
    }
}

/// Requests that wait in the ring for the disk's limits are done like all others, in their order.
#[test]
fn limited_requests_match_the_model_and_survive_a_power_cut() {
    let mut throttled = 0;
    for seed in seeds(5000..5006) {
        println!("CLEAVE_SEED={seed}");
        let config = SimConfig {
            ops: 100,
            delay_max: 10,
            ..quiet(seed)
        };
        let bench = Bench::with_split(config, FEATURES, Split::Off);
        bench.device.tune(Tuning {
            limits: "iops-read=300,iops-write=300".parse().unwrap(),
            ..Tuning::clone(&bench.device.tuning())
        });
        let device = bench.device.clone();
        run_on(bench, Random::new(seed), 0);
        throttled += device.totals().throttled;
    }
    assert!(throttled > 0);
}

/// A flush covers all legs: all writes that it acknowledges survive on each of them.
#[test]
fn a_stripe_matches_the_model_and_survives_a_power_cut() {
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
fn failing_ops_fail_their_request_and_no_other() {
    for seed in seeds(1000..1020) {
        println!("CLEAVE_SEED={seed}");
        run(seed, 50, Split::Off);
    }
}
