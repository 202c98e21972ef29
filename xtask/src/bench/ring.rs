//! `cargo xtask bench ring`: a disk that touches no data, so that what is measured is the ring alone.

use std::path::Path;

use serde_json::json;

use super::Effort;
use super::desk::{DAEMON_CPU, DRIVER_CPU, Desk, Figure, ratio};
use super::spread::Spread;

/// A daemon, and how it waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Subject {
    QemuStorageDaemon,
    CleaveInterrupt,
    CleavePoll,
}

const SUBJECTS: [Subject; 3] = [
    Subject::QemuStorageDaemon,
    Subject::CleaveInterrupt,
    Subject::CleavePoll,
];

const SERVE_INTERRUPT: &str = "serve --disk null:1G --queues 1 --workers 1 --log warn \
     --completion interrupt --socket-path";
const SERVE_POLL: &str = "serve --disk null:1G --queues 1 --workers 1 --log warn \
     --completion poll --socket-path";

/// What is asked of it: 4 KiB random reads on one vring.
struct Point {
    depth: u32,
    /// As the driver's option says.
    wait: &'static str,
}

const POINTS: &[Point] = &[
    Point {
        depth: 1,
        wait: "--sleep",
    },
    Point {
        depth: 1,
        wait: "--poll",
    },
    Point {
        depth: 32,
        wait: "--sleep",
    },
    Point {
        depth: 32,
        wait: "--poll",
    },
    Point {
        depth: 128,
        wait: "--sleep",
    },
    Point {
        depth: 128,
        wait: "--poll",
    },
];

/// Measures, writes `target/bench/ring`, prints the ratios.
pub(super) fn run(root: &Path, effort: &Effort) -> Result<(), String> {
    let mut desk = Desk::set_up(
        root,
        "ring",
        &[
            ("qemu-storage-daemon", "qemu-system-common"),
            ("taskset", "util-linux"),
        ],
    )?;
    println!(
        "pinned: driver to CPU {DRIVER_CPU}, daemon to CPU {DAEMON_CPU}; 4 KiB random reads, one vring, null disk"
    );
    println!(
        "{} rounds of {} s after one of warm-up; every daemon is started afresh for each figure",
        effort.rounds, effort.seconds
    );
    let mut figures: Vec<[Vec<Figure>; 3]> = POINTS.iter().map(|_| Default::default()).collect();
    for round in 0..=effort.rounds {
        for (point, figures) in POINTS.iter().zip(&mut figures) {
            // Forth and back, so that whatever drifts meets each as often early as late.
            let mut order = [0, 1, 2];
            if round % 2 == 1 {
                order.reverse();
            }
            for at in order {
                let figure = measure(&mut desk, SUBJECTS[at], point, round, effort.seconds)?;
                if round > 0 {
                    figures[at].push(figure);
                }
            }
        }
        println!("round {round} of {} done", effort.rounds);
    }
    report(&figures);
    println!("raw data: {}", desk.folder.display());
    Ok(())
}

/// A line in the results.
fn measure(
    desk: &mut Desk,
    subject: Subject,
    point: &Point,
    round: u32,
    seconds: f64,
) -> Result<Figure, String> {
    let daemon = subject.command(&desk.cleave, &desk.socket());
    let load = format!(
        "--seconds {seconds} --depth {} --bs 4096 {}",
        point.depth, point.wait
    );
    let result = desk.measure(&daemon, None, &load)?;
    desk.note(&json!({
        "suite": "ring", "round": round, "is_warm_up": round == 0, "subject": format!("{subject:?}"),
        "depth": point.depth, "wait": point.wait, "daemon": daemon, "driver": load, "result": result,
    }))?;
    Figure::read(&result)
}

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Subject::QemuStorageDaemon => "qemu-storage-daemon null-co",
            Subject::CleaveInterrupt => "cleave interrupt",
            Subject::CleavePoll => "cleave poll",
        }
    }

    fn command(self, cleave: &Path, socket: &Path) -> Vec<String> {
        let socket = socket.to_string_lossy();
        let (program, options, last) = match self {
            Subject::QemuStorageDaemon => (
                Path::new("qemu-storage-daemon"),
                "--blockdev driver=null-co,node-name=disk,size=1073741824,read-zeroes=off --export",
                format!(
                    "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues=1,\
                     addr.type=unix,addr.path={socket}"
                ),
            ),
            Subject::CleaveInterrupt => (cleave, SERVE_INTERRUPT, socket.into_owned()),
            Subject::CleavePoll => (cleave, SERVE_POLL, socket.into_owned()),
        };
        let mut words = vec![program.to_string_lossy().into_owned()];
        words.extend(options.split(' ').map(str::to_owned));
        words.push(last);
        words
    }
}

fn report(figures: &[[Vec<Figure>; 3]]) {
    println!("\nratios to qemu-storage-daemon: median of the rounds (least–most)");
    println!(
        "{:<18} {:<28} {:>9} {:>8} {:>22} {:>10} {:>10} {:>22}",
        "depth, driver",
        "daemon",
        "kIOPS",
        "mean us",
        "IOPS ratio",
        "daemon us",
        "driver us",
        "daemon CPU/IO ratio"
    );
    for (point, subjects) in POINTS.iter().zip(figures) {
        for (subject, own) in SUBJECTS.iter().zip(subjects) {
            let median = |of: fn(&Figure) -> f64| {
                let values: Vec<f64> = own.iter().map(of).collect();
                Spread::of(&values).map_or(f64::NAN, |spread| spread.median)
            };
            println!(
                "{:<18} {:<28} {:>9.1} {:>8.2} {:>22} {:>10.3} {:>10.3} {:>22}",
                format!("{}, {}", point.depth, point.wait.trim_start_matches("--")),
                subject.name(),
                median(|figure| figure.iops) / 1e3,
                median(|figure| figure.mean_us),
                ratio(own, &subjects[0], |figure| figure.iops),
                median(|figure| figure.daemon_cpu_us),
                median(|figure| figure.driver_cpu_us),
                ratio(own, &subjects[0], |figure| figure.daemon_cpu_us),
            );
        }
    }
}
