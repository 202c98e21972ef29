//! The suites that are rounds of cases: their points, their subjects and their loads. `report/views.toml` says
//! which figures are drawn of them, and which bars they must reach.

use std::path::PathBuf;

use cleave_rig::daemon::DaemonProcess;
use cleave_rig::{At, PINNED, Result, quietly, words};
use itertools::iproduct;
use serde_json::{Value, json};

use super::bare;
use super::cpus::Cpus;
use super::desk::{DaemonLifetime, Desk};
use super::load::{Case, LoadWait, RandomLoad};
use super::subject::{ADAPTIVE, BARE, INTERRUPT, POLL, QSD, QSD_IO_THREAD, ServedDisk, serve};
use crate::filled;
use crate::offered::two_digits;
use crate::pace::BenchPace;
use crate::run_folder::merged;

/// Depth, and how the driver waits, as points are named.
fn waits(depth: u32, wait: LoadWait) -> String {
    let wait = format!("{wait:?}").to_lowercase();
    format!("depth {depth}, driver {wait}s")
}

/// T1: 4 KiB random reads on one vring of a disk that touches no data, so that the ring alone is measured.
pub(super) fn transport(desk: &mut Desk) -> Result {
    let mut cases = Vec::new();
    for (depth, wait) in iproduct!([1, 32, 128], [LoadWait::Sleep, LoadWait::Poll]) {
        let load = RandomLoad::reads(depth, wait, desk.seconds);
        let subjects = [QSD, QSD_IO_THREAD, INTERRUPT, POLL, ADAPTIVE];
        cases.extend(desk.cases(&waits(depth, wait), &ServedDisk::Null, &load, &subjects)?);
    }
    desk.rounds_anew("transport", &cases)
}

/// T2, study B: the CPU time of a request on a real disk. A second of a disk says little, for its speed drifts more slowly.
pub(super) fn cpu(desk: &mut Desk) -> Result {
    let store = ServedDisk::Disk(desk.disk("cpu")?);
    let depths: &[u32] = desk.pace.pick(&[1, 32, 128], &[32, 128], &[32]);
    let mut cases = Vec::new();
    for depth in depths {
        let mut load = RandomLoad::reads(*depth, LoadWait::Sleep, desk.seconds * 2.0);
        // Adaptive tries spinning in the first second of a load, and the scheduler settles in the next.
        load.warm_up = desk.pace.pick(2.0, 2.0, load.warm_up);
        let subjects = [BARE, QSD, QSD_IO_THREAD, INTERRUPT, POLL, ADAPTIVE];
        cases.extend(desk.cases(&waits(*depth, LoadWait::Sleep), &store, &load, &subjects)?);
    }
    desk.rounds_anew("cpu", &cases)
}

/// T3, study D: random 60/40 from 2 to 20 in flight, and one at a time; then one file against a stripe of 28.
pub(super) fn tax(desk: &mut Desk) -> Result {
    let store = ServedDisk::Disk(desk.disk_to_write("tax")?);
    let seconds = desk.seconds * 1.5;
    let all: &[(u32, &[u32])] = desk.pace.pick(
        &[(4, &[2, 4, 8, 12, 16, 20]), (8, &[2, 4, 8, 12, 16, 20])],
        &[(4, &[2, 8, 20]), (8, &[2, 20])],
        &[(4, &[2])],
    );
    let subjects = [BARE, QSD, QSD_IO_THREAD, ADAPTIVE];
    let mut cases = Vec::new();
    for (kib, threads) in all {
        for threads in *threads {
            let load = mixed(*kib, *threads, LoadWait::Sleep, seconds);
            let point = format!("{kib} KiB, {threads} in flight");
            cases.extend(desk.cases(&point, &store, &load, &subjects)?);
        }
    }
    let waits_at_one = [LoadWait::Sleep, LoadWait::Poll];
    for wait in desk
        .pace
        .pick(&waits_at_one[..], &waits_at_one, &[LoadWait::Poll])
    {
        let load = mixed(4, 1, *wait, seconds);
        let subjects = [&subjects[..], &[POLL]].concat();
        cases.extend(desk.cases(&waits(1, *wait), &store, &load, &subjects)?);
    }
    desk.rounds_anew("tax", &cases)?;
    legs(desk, seconds)
}

/// 60 % reads.
fn mixed(kib: u32, depth: u32, wait: LoadWait, seconds: f64) -> RandomLoad {
    RandomLoad {
        block_bytes: kib << 10,
        read_percent: 60,
        ..RandomLoad::reads(depth, wait, seconds)
    }
}

/// Files of ours: a stripe is made of files that belong to it alone.
fn legs(desk: &mut Desk, seconds: f64) -> Result {
    const COUNT: u64 = 28;
    let leg_bytes: u64 = desk.pace.pick(64 << 20, 16 << 20, 1 << 20);
    let (folder, mib) = (desk.equipment.folder().join("bench/legs"), leg_bytes >> 20);
    let file = |name: String, bytes| filled::random_file(&folder.join(name), bytes);
    let one = [file(format!("one-{mib}.img"), leg_bytes * COUNT)?];
    let many = (0..COUNT).map(|leg| file(format!("leg-{mib}-{leg}.img"), leg_bytes));
    let many = many.collect::<Result<Vec<PathBuf>>>()?;
    let mut cases = Vec::new();
    let depths: &[u32] = desk.pace.pick(&[20, 64], &[20, 64], &[20]);
    for depth in depths {
        for (subject, options, disks) in [
            ("1 leg", "--queues 1", &one[..]),
            ("28 legs", "--queues 1 --stripe 64K --stripe-raw", &many),
        ] {
            let daemons = vec![serve(&desk.cleave, options, disks)];
            let point = format!("{depth} in flight");
            let load = mixed(4, *depth, LoadWait::Sleep, seconds);
            cases.push(Case::new(point, subject.to_owned(), daemons, load));
        }
    }
    desk.rounds_anew("legs", &cases)
}

/// Returns a disk to be split: a modelled drive, not this machine's, or the real one.
fn drive_name(spec: &str) -> String {
    match spec.strip_prefix("model:") {
        Some(model) => format!("{model} (modelled)"),
        None => "the real disk".to_owned(),
    }
}

/// T4, T5: the gain of splitting where a drive has inner parallelism, and that it costs nothing where it has none; study A.
pub(super) fn split(desk: &mut Desk) -> Result {
    let real = desk.disk("split")?;
    let real_spec = real.to_string_lossy().into_owned();
    let fixed = desk.pace.pick(
        "off auto 4K 8K 16K 32K 64K 128K 256K",
        "off auto 8K 16K 32K 64K 128K",
        "off auto 64K",
    );
    for (spec, depth, ways) in [
        ("model:p3700", 1, fixed),
        ("model:p320h", 1, fixed),
        ("model:p3700", 64, "off auto"),
        ("model:flat", 1, "off auto"),
        ("model:flat", 64, "off auto"),
        (&*real_spec, 1, "off auto"),
        (&*real_spec, 64, "off auto"),
    ] {
        let load = RandomLoad {
            block_bytes: 512 << 10,
            ..RandomLoad::reads(depth, LoadWait::Poll, desk.seconds)
        };
        let case = |subject: &str, daemons| Case {
            facts: json!({ "is_modelled": spec != real_spec, "request_bytes": 512 << 10 }),
            ..Case::new(
                format!("{}, 512 KiB, depth {depth}", drive_name(spec)),
                subject.to_owned(),
                daemons,
                load.clone(),
            )
        };
        let mut cases: Vec<Case> = Vec::new();
        for way in ways.split(' ') {
            cases.push(Case {
                // Long enough to see 2 000 large requests on the slowest of the disks but a real one.
                learns: match way {
                    "auto" => desk.pace.pick(4.0, 4.0, 0.0),
                    _ => desk.seconds / 2.0,
                },
                ..case(&format!("split {way}"), vec![split_so(desk, way, spec)])
            });
        }
        if spec == real_spec && desk.has(BARE) {
            let fio = bare::line(&real, &load, &desk.cpus.driver);
            cases.push(case(BARE, vec![fio]));
        }
        desk.rounds("split", 1..=desk.rounds, &cases, DaemonLifetime::Throughout)?;
    }
    study_a(desk, "model:p3700")?;
    study_a(desk, &real_spec)
}

fn split_so(desk: &Desk, way: &str, disk: &str) -> Vec<String> {
    let options = format!("--queues 1 --read-only --split {way}");
    serve(&desk.cleave, &options, &[disk])
}

/// Measures equally many bytes outstanding, in one request or in ever more and smaller ones: the bare disk by the probe, then `off` and
/// `auto` in turn.
fn study_a(desk: &mut Desk, spec: &str) -> Result {
    let pace = desk.pace;
    let all: Vec<u32> = (12..=22).map(|power| 1 << power).collect();
    let outstanding = pace.pick(&all[..], &[64 << 10, 512 << 10, 4 << 20], &[512 << 10]);
    let depths: &[u32] = &[1, 2, 4, 8, 16, 32, 64, 128];
    let cells = cells(outstanding, pace.pick(depths, depths, &[1, 64]));
    let (profile, found) = probe(desk, spec, pace.pick(60, 12, 1))?;
    let measured = found["sides"][0]["measured"].as_array();
    for measured in measured.into_iter().flatten() {
        let number = |name: &str| measured[name].as_f64();
        let is_it = |cell: &&(u32, u32)| {
            [number("outstanding_bytes"), number("depth")]
                == [Some(cell.0.into()), Some(cell.1.into())]
        };
        let rate = number("requests").zip(number("elapsed_ns"));
        if let (Some(cell), Some((requests, ns))) = (cells.iter().find(is_it), rate) {
            let mb_s = requests * f64::from(cell.0 / cell.1) / ns * 1e3;
            let line = json!({ "round": 1, "subject": "bare", "result": { "mb_s": mb_s } });
            let line = merged(line, &cell_facts(spec, *cell));
            desk.run.note("study-a", &line)?;
        }
    }
    let seconds = pace.pick(0.3, 0.12, 0.02);
    let mut cases = Vec::new();
    for ((bytes, depth), way) in iproduct!(cells, ["off", "auto"]) {
        let load = RandomLoad {
            block_bytes: bytes / depth,
            ..RandomLoad::reads(depth, LoadWait::Poll, seconds)
        };
        let facts = cell_facts(spec, (bytes, depth));
        let point = facts["point"].as_str().unwrap_or_default().to_owned();
        let daemons = vec![split_so(desk, way, spec)];
        let case = Case::new(point, format!("split {way}"), daemons, load);
        let mut case = Case { facts, ..case };
        if way == "auto" {
            case.extend(&["--profile", &profile]);
        }
        cases.push(case);
    }
    let rounds = 1..=pace.pick(3, 1, 1);
    desk.rounds("study-a", rounds, &cases, DaemonLifetime::Throughout)
}

/// Outstanding bytes, and the number of requests that they are divided into; below 4 KiB is a question for the probe.
fn cells(outstanding: &[u32], depths: &[u32]) -> Vec<(u32, u32)> {
    let all = iproduct!(outstanding.iter().copied(), depths.iter().copied());
    all.filter(|(bytes, depth)| bytes / depth >= 4096).collect()
}

fn cell_facts(spec: &str, (outstanding_bytes, depth): (u32, u32)) -> Value {
    let disk = drive_name(spec);
    json!({
        "point": format!("{disk}/{outstanding_bytes}/{depth}"), "disk": disk, "outstanding_bytes": outstanding_bytes,
        "depth": depth, "is_modelled": spec.starts_with("model:"),
    })
}

/// Measures the bare disk; the profile that `auto` starts from, and the probe's report.
fn probe(desk: &Desk, spec: &str, seconds: u32) -> Result<(String, Value)> {
    let profile = desk.run.folder().join("profile.toml");
    // One of an earlier run would be kept where the probe finds no reason to write.
    let _ = std::fs::remove_file(&profile);
    let profile = profile.display().to_string();
    // Whether a thin disk is welcome was decided before.
    let thin = match spec.starts_with("model:") {
        true => "",
        false => " --allow-thin",
    };
    let (cpu, cleave) = (&desk.cpus.daemon, desk.cleave.display());
    let line = format!(
        "taskset --cpu-list {cpu} {{}} probe {{}} --seconds {seconds} --json - --profile {{}}{thin}"
    );
    let said = quietly(desk.run.folder(), &line, &[&cleave, &spec, &profile])?;
    let report = serde_json::from_str(&said).at(format!("cleave probe said {said}"))?;
    Ok((profile, report))
}

/// Placements of driver and daemon. A hog is a process that never sleeps, on the CPUs that they share.
const UNPINNED: &str = "unpinned";
const APART: &str = "pinned apart";
const TOGETHER: &str = "pinned together";
const HOG: &str = "beside a hog";
/// The most in flight at an offered rate.
const OPEN_DEPTH: u32 = 128;

/// H1 to H3: interrupt, poll and adaptive beside each other, with a fixed number in flight and at offered rates, in each
/// placement.
pub(super) fn pacing(desk: &mut Desk) -> Result {
    let disk = ServedDisk::Disk(desk.disk("pacing")?);
    let stores = [("null", ServedDisk::Null), ("disk", disk)];
    let apart = desk.cpus.clone();
    let together = Cpus {
        daemon: apart.driver.clone(),
        ..apart.clone()
    };
    let all = [
        (UNPINNED, apart.shared()),
        (APART, apart.clone()),
        (TOGETHER, together),
        (HOG, apart.shared()),
    ];
    let placements = desk.pace.pick(&all[..], &all[..2], &all[3..]);
    let mut done = Ok(());
    for ((name, store), (placement, cpus)) in iproduct!(&stores, placements) {
        desk.cpus = cpus.clone();
        done = done.and_then(|()| placed(desk, name, store, placement));
    }
    desk.cpus = apart;
    done
}

/// Measures all loads in one placement.
fn placed(desk: &mut Desk, name: &str, store: &ServedDisk, placement: &str) -> Result {
    let _hog = match placement {
        HOG => Some(start_hog(desk)?),
        _ => None,
    };
    for (load_name, load, facts) in paced_loads(desk, name, store, placement)? {
        let point = format!("{name}, {placement}, {load_name}");
        let cases = [INTERRUPT, POLL, ADAPTIVE].map(|subject| {
            let mut load = load.clone();
            if subject == ADAPTIVE {
                // A driver that connects finds workers that know no load: a verdict takes a second, and the scheduler another.
                load.warm_up = desk.pace.pick(3.0, 2.5, 0.0);
            }
            let mut case = desk.case(&point, store, &load, subject)?;
            // Readers may share a disk.
            case.extend(&["--read-only"]);
            case.facts = merged(json!({ "disk": name, "placement": placement }), &facts);
            Ok(case)
        });
        let cases = cases.into_iter().collect::<Result<Vec<Case>>>()?;
        desk.rounds(
            "pacing",
            1..=desk.rounds,
            &cases,
            DaemonLifetime::Throughout,
        )?;
    }
    Ok(())
}

/// Starts a process that uses all the CPU time it can get, where driver and daemon run.
fn start_hog(desk: &Desk) -> Result<DaemonProcess> {
    let (cpus, endless) = (&desk.cpus.driver, "while :; do :; done");
    let line = words(&format!("{PINNED} sh -c {{}}"), &[cpus, &endless]);
    DaemonProcess::start_until(&line, desk.run.folder().join("hog"), || true)
}

/// Returns the loads in one placement, with their names and facts.
fn paced_loads(
    desk: &Desk,
    name: &str,
    store: &ServedDisk,
    placement: &str,
) -> Result<Vec<(String, RandomLoad, Value)>> {
    let mut loads = Vec::new();
    let depths: &[u32] = desk.pace.pick(&[1, 8, 32, 128], &[1, 32], &[1]);
    for depth in depths {
        let facts = json!({ "load": "closed" });
        loads.push((format!("depth {depth}"), paced(desk, *depth), facts));
    }
    for rate in rates(desk, store)? {
        let load = RandomLoad {
            more: format!(" --rate {rate}"),
            ..paced(desk, OPEN_DEPTH)
        };
        let facts = json!({ "load": "open", "rate": rate });
        loads.push((format!("{rate}/s"), load, facts));
    }
    if (name, placement) == ("null", APART) {
        // A millisecond at a hundred thousand a second, nine of silence. The driver polls: one that sleeps would be late
        // by more than all that is to be seen.
        let load = RandomLoad {
            wait: LoadWait::Poll,
            more: " --rate 100000 --pulse 1:9".to_owned(),
            ..paced(desk, OPEN_DEPTH)
        };
        loads.push(("bursts".to_owned(), load, json!({ "load": "bursts" })));
    }
    Ok(loads)
}

/// Returns 4 KiB reads with time for the scheduler: it takes up to a second to bring a worker that sleeps and its driver together.
fn paced(desk: &Desk, depth: u32) -> RandomLoad {
    RandomLoad {
        warm_up: desk.pace.pick(1.0, 0.2, 0.0),
        ..RandomLoad::reads(depth, LoadWait::Sleep, desk.seconds / 1.5)
    }
}

/// Returns rates from two hundred a second, in even steps of the logarithm, to four fifths of the most that interrupts reach.
fn rates(desk: &Desk, store: &ServedDisk) -> Result<Vec<f64>> {
    const FIRST: f64 = 200.0;
    let case = desk.case("", store, &paced(desk, 32), INTERRUPT)?;
    let most = desk.once(&case)?["iops"].as_f64().unwrap_or(0.0) * 0.8;
    let count = desk.pace.pick(5, 2, 1);
    let step = (most / FIRST).powf(1.0 / f64::from(count - 1));
    let rates = (0..count).map(|number| two_digits(FIRST * step.powi(number)));
    Ok(rates.collect())
}

/// T9: one disk and many, one vring and many; 4 KiB reads of null disks, so much in flight that no daemon waits for the
/// driver. A daemon for each disk.
pub(super) fn scale(desk: &mut Desk) -> Result {
    let disks: &[u32] = desk.pace.pick(&[1, 4, 16, 64], &[1, 4, 16, 64], &[1, 2]);
    let vrings: &[u32] = desk.pace.pick(&[2, 4, 8, 16], &[4, 16], &[2]);
    let points = disks.iter().map(|disks| (*disks, 1));
    let points = points.chain(vrings.iter().map(|vrings| (1, *vrings)));
    let many = |count: u32, what: &str| match count {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    };
    let mut cases = Vec::new();
    for (disks, vrings) in points {
        let point = format!("{}, {}", many(disks, "disk"), many(vrings, "vring"));
        let load = RandomLoad {
            queues: vrings,
            ..RandomLoad::reads(32, LoadWait::Sleep, desk.seconds)
        };
        let subjects = [QSD, QSD_IO_THREAD, INTERRUPT, ADAPTIVE].into_iter();
        for subject in subjects.filter(|subject| desk.has(subject)) {
            let mut case = desk.case(&point, &ServedDisk::Null, &load, subject)?;
            case.daemons = vec![case.daemons.concat(); disks as usize];
            case.facts = json!({ "disks": disks, "vrings": vrings });
            cases.push(case);
        }
    }
    desk.rounds_anew("scale", &cases)
}

/// T12: the cost of counting and timing a disk's requests, where a request costs least. Two per cent are to be seen, less
/// than a machine's speed drifts within a second, so each round is cut into pieces in which the two take turns.
pub(super) fn recording(desk: &mut Desk) -> Result {
    let pieces = desk.pace.pick(8, 5, 1);
    let seconds = desk.seconds / f64::from(pieces);
    let mut cases = Vec::new();
    let ways = [
        (LoadWait::Poll, POLL, "driver and daemon"),
        (LoadWait::Sleep, ADAPTIVE, "driver"),
    ];
    for (depth, (wait, subject, both)) in iproduct!([1, 32], ways) {
        // A piece's tenth may be too short for a worker to start.
        let load = RandomLoad {
            warm_up: f64::min(0.05, seconds),
            ..RandomLoad::reads(depth, wait, seconds)
        };
        let point = waits(depth, wait).replace("driver", both);
        for stats in ["on", "off"] {
            let mut case = desk.case(&point, &ServedDisk::Null, &load, subject)?;
            case.subject = format!("--stats {stats}");
            case.extend(&["--stats", stats]);
            cases.push(case);
        }
    }
    let rounds = match desk.pace {
        BenchPace::Smoke => 1..=1,
        _ => 0..=desk.rounds * pieces,
    };
    desk.rounds("recording", rounds, &cases, DaemonLifetime::Anew)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_holds_the_same_bytes_down_to_4_kib() {
        let cells = cells(&[16 << 10, 4 << 20], &[1, 4, 64]);
        let sizes: Vec<u32> = cells
            .iter()
            .map(|(bytes, depth)| (bytes / depth) >> 10)
            .collect();
        assert_eq!(sizes, [16, 4, 4096, 1024, 64]);
    }
}
