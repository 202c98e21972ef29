//! `cargo xtask bench split`: what splitting gains where a drive has inner parallelism, and that it costs
//! nothing where it has none.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde_json::json;

use super::Effort;
use super::desk::{DAEMON_CPU, DRIVER_CPU, Desk, Figure, ratio};
use super::spread::Spread;

/// A disk, how large requests are and how many are in flight, and what the ratio must reach.
struct Point {
    disk: Disk,
    request_bytes: u32,
    depth: u32,
    least: f64,
}

/// What is served.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Disk {
    /// A modelled drive: not this machine's.
    Model(&'static str),
    /// A file of random bytes below `target`.
    File,
}

const POINTS: &[Point] = &[
    point(Disk::Model("model:p3700"), 512, 1, 1.9),
    point(Disk::Model("model:p320h"), 512, 1, 1.9),
    point(Disk::Model("model:p3700"), 512, 64, 0.98),
    point(Disk::Model("model:flat"), 512, 1, 0.98),
    point(Disk::Model("model:flat"), 512, 64, 0.98),
    point(Disk::File, 512, 1, 0.98),
    point(Disk::File, 512, 64, 0.98),
];

const fn point(disk: Disk, request_kib: u32, depth: u32, least: f64) -> Point {
    Point {
        disk,
        request_bytes: request_kib << 10,
        depth,
        least,
    }
}

const FILE_BYTES: u64 = 2 << 30;
/// Long enough to see 2 000 large requests on the slowest of the disks but the file.
const LEARN_SECONDS: u32 = 4;
const SPLITS: [&str; 2] = ["off", "auto"];

/// Measures, writes `target/bench/split`, prints the ratios; an error when one is below its bar.
pub(super) fn run(root: &Path, effort: &Effort) -> Result<(), String> {
    let mut desk = Desk::set_up(root, "split", &[("taskset", "util-linux")])?;
    let file = random_file(&root.join("target/bench"))?;
    println!(
        "pinned: driver to CPU {DRIVER_CPU}, daemon to CPU {DAEMON_CPU}; random reads, one vring, a polling driver"
    );
    println!(
        "{} rounds of {} s; every daemon is started afresh and driven {LEARN_SECONDS} s before it is measured",
        effort.rounds, effort.seconds
    );
    let mut figures: Vec<[Vec<Figure>; 2]> = POINTS.iter().map(|_| Default::default()).collect();
    for round in 0..effort.rounds {
        for (point, figures) in POINTS.iter().zip(&mut figures) {
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for at in order {
                figures[at].push(measure(
                    &mut desk,
                    point,
                    SPLITS[at],
                    &file,
                    round,
                    effort.seconds,
                )?);
            }
        }
        println!("round {} of {} done", round + 1, effort.rounds);
    }
    let missed = report(&figures);
    println!("raw data: {}", desk.folder.display());
    match missed {
        0 => Ok(()),
        missed => Err(format!(
            "{missed} of {} ratios are below their bar",
            POINTS.len() * 2
        )),
    }
}

fn measure(
    desk: &mut Desk,
    point: &Point,
    split: &str,
    file: &Path,
    round: u32,
    seconds: f64,
) -> Result<Figure, String> {
    let disk = point.disk.spec(file);
    let mut daemon = vec![desk.cleave.to_string_lossy().into_owned()];
    let options = "serve --queues 1 --workers 1 --read-only --log warn --split";
    daemon.extend(options.split(' ').map(str::to_owned));
    daemon.extend([
        split.to_owned(),
        "--disk".to_owned(),
        disk.clone(),
        "--socket-path".to_owned(),
    ]);
    daemon.push(desk.socket().to_string_lossy().into_owned());
    let load = |seconds: f64| {
        format!(
            "--poll --seconds {seconds} --depth {} --bs {}",
            point.depth, point.request_bytes
        )
    };
    let result = desk.measure(&daemon, Some(&load(LEARN_SECONDS.into())), &load(seconds))?;
    desk.note(&json!({
        "suite": "split", "round": round, "disk": disk, "is_modelled": point.disk != Disk::File,
        "split": split, "depth": point.depth, "request_bytes": point.request_bytes,
        "daemon": daemon, "driver": load(seconds), "result": result,
    }))?;
    Figure::read(&result)
}

impl Disk {
    fn spec(self, file: &Path) -> String {
        match self {
            Disk::Model(spec) => spec.to_owned(),
            Disk::File => file.to_string_lossy().into_owned(),
        }
    }

    fn name(self) -> String {
        match self {
            Disk::Model(spec) => format!("{spec} (modelled)"),
            Disk::File => "a file on this disk".to_owned(),
        }
    }
}

/// A file of bytes that no store below can compress or leave out.
fn random_file(folder: &Path) -> Result<PathBuf, String> {
    let path = folder.join("random.img");
    let told = |error: std::io::Error| format!("{}: {error}", path.display());
    if std::fs::metadata(&path).is_ok_and(|found| found.len() == FILE_BYTES) {
        return Ok(path);
    }
    let mut source = File::open("/dev/urandom").map_err(told)?.take(FILE_BYTES);
    let mut file = File::create(&path).map_err(told)?;
    std::io::copy(&mut source, &mut file).map_err(told)?;
    file.flush().and_then(|()| file.sync_all()).map_err(told)?;
    Ok(path)
}

/// Prints the table; how many ratios are below their bar.
fn report(figures: &[[Vec<Figure>; 2]]) -> usize {
    println!("\nauto to off: median of the rounds (least–most)");
    println!(
        "{:<26} {:>8} {:>6} {:>10} {:>10} {:>20} {:>20} {:>6}",
        "disk", "request", "depth", "off MB/s", "auto MB/s", "throughput", "mean latency", "bar"
    );
    let mut missed = 0;
    for (point, [off, auto]) in POINTS.iter().zip(figures) {
        let rate = |own: &[Figure]| {
            let rates: Vec<f64> = own.iter().map(|figure| figure.iops).collect();
            let median = Spread::of(&rates).map_or(f64::NAN, |spread| spread.median);
            median * f64::from(point.request_bytes) / 1e6
        };
        // Of latencies the inverse ratio, so that larger is better in both columns.
        let faster = ratio(auto, off, |figure| figure.iops);
        let sooner = ratio(off, auto, |figure| figure.mean_us);
        println!(
            "{:<26} {:>7}K {:>6} {:>10.0} {:>10.0} {:>20} {:>20} {:>6}",
            point.disk.name(),
            point.request_bytes >> 10,
            point.depth,
            rate(off),
            rate(auto),
            faster,
            sooner,
            point.least
        );
        missed += [
            ratios(auto, off, |figure| figure.iops),
            ratios(off, auto, |figure| figure.mean_us),
        ]
        .iter()
        .filter(|spread| spread.is_none_or(|spread| spread.median < point.least))
        .count();
    }
    missed
}

fn ratios(own: &[Figure], base: &[Figure], of: fn(&Figure) -> f64) -> Option<Spread> {
    let ratios: Vec<f64> = own
        .iter()
        .zip(base)
        .map(|(own, base)| of(own) / of(base))
        .collect();
    Spread::of(&ratios)
}
