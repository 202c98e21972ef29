//! Drives vhost-user-blk daemons and prints rate, latency, CPU time for each request, and wake-ups on both sides.
//!
//! `drive --socket PATH... [--seconds S] [--warm-up S] [--depth D] [--bs BYTES] [--queues N] [--queue-size N]
//! [--poll | --sleep] [--write | --mix READ_PERCENT] [--sequential] [--indirect] [--no-event-idx] [--inflight]
//! [--rate PER_SECOND [--burst N] [--pulse ON_MS:OFF_MS]] [--seed N] [--span BYTES] [--verify] [--idle S]
//! [--until-eof] [--reconnect MS] [--each] [--phase WORDS]... [--laps N] [--pid DAEMON] [--json]`
//!
//! Each socket is a disk with its own vrings and threads. A rate applies to each vring; latencies then count from the
//! intended start. `--idle` runs a few requests on each disk, then leaves all connected and measures their idle cost.
//! `--until-eof` goes on until its standard input ends, and fails at once if a daemon closes a connection. With `--reconnect` it
//! connects again as a VMM does, so many milliseconds later. `--each` prints the start and the latency of each request.
//! Each `--phase` has words for a load in place of those before; all phases run one after the other on the same connection, `--laps`
//! times, and none of them has more data in flight than `--depth` and `--bs` before them say.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod cost;
mod histogram;

use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cleave_client::{Client, OffsetOrder, Sample, Stop, Workload, WorkloadTotals};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use args::{Args, IS_OVER};
use cost::Cost;
use histogram::Histogram;

/// Time from the last request to the measurement of an idle disk; all spinning ends within it.
const SETTLE: Duration = Duration::from_millis(1500);

/// Longest wait for a daemon to listen, if the driver connects again.
const OPEN_TIME: Duration = Duration::from_secs(60);

/// A disk and the process that serves it.
struct Disk {
    client: Client,
    pid: Option<u32>,
}

/// The latencies of a vring.
struct Latencies {
    spread: Histogram,
    /// When each request started, and its latency.
    each_ns: Option<Vec<[u64; 2]>>,
}

impl Latencies {
    fn new(has_each: bool) -> Latencies {
        Latencies {
            spread: Histogram::new(),
            each_ns: has_each.then(Vec::new),
        }
    }

    fn record(&mut self, sample: &Sample) {
        self.spread.record(sample.latency_ns);
        if let Some(each) = &mut self.each_ns {
            let start_ns = sample.at_ns.saturating_sub(sample.latency_ns);
            each.push([start_ns, sample.latency_ns]);
        }
    }

    fn merge(mut self, other: Latencies) -> Latencies {
        if let (Some(each), Some(others)) = (&mut self.each_ns, other.each_ns) {
            each.extend(others);
        }
        Latencies {
            spread: self.spread.merge(other.spread),
            ..self
        }
    }
}

/// The results of a vring's thread: its latencies, and its own cost.
struct ThreadResults<'a> {
    latencies: Option<&'a mut Latencies>,
    ended: &'a Mutex<Cost>,
}

impl Drop for ThreadResults<'_> {
    fn drop(&mut self) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        *ended = ended.plus(Cost::of_this_thread());
    }
}

/// Results of a measurement.
struct Measured {
    tallies: Vec<WorkloadTotals>,
    latencies: Latencies,
    /// By the system's clock.
    began: Duration,
    wall: Duration,
    driver: Cost,
    daemons: Option<Cost>,
}

fn main() -> ExitCode {
    // Otherwise a sleep until the next request may end 50 us late, which would favour drivers that calls wake in
    // between. Threads inherit the setting; if it fails, only precision is lost.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    match Args::parse().and_then(|args| drive(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("drive: {what}");
            ExitCode::FAILURE
        }
    }
}

/// Connects. One that connects again when its daemon has ended also waits for the first.
fn open(args: &Args, socket: &Path) -> Result<Client, String> {
    let end = Instant::now() + OPEN_TIME;
    loop {
        match (Client::open(socket, &args.options), args.reconnect) {
            (Err(_), Some(pause)) if Instant::now() < end => std::thread::sleep(pause),
            (opened, _) => return opened.map_err(text),
        }
    }
}

fn drive(args: &Args) -> Result<(), String> {
    let mut disks = args
        .sockets
        .iter()
        .map(|socket| {
            let mut client = open(args, socket)?;
            let pid = args.pid.or_else(|| peer(&mut client));
            // The cost of several processes one after the other is not known.
            let pid = pid.filter(|_| args.reconnect.is_none());
            Ok(Disk { client, pid })
        })
        .collect::<Result<Vec<Disk>, String>>()?;
    if args.verify {
        fill(args, &mut disks)?;
    }
    if args.until_eof {
        watch(&mut disks)?;
        println!("driving");
    }
    if let Some(seconds) = args.idle {
        run(args, &mut disks, |work| Workload {
            stop: Stop::Requests(64),
            offered: None,
            ..work
        })?;
        std::thread::sleep(SETTLE);
        let before = (daemons(&disks), Instant::now());
        std::thread::sleep(Duration::from_secs_f64(seconds));
        print_idle(&disks, before.0, before.1.elapsed());
        return Ok(());
    }
    if args.warm_up > 0.0 {
        let stop = Stop::After(Duration::from_secs_f64(args.warm_up));
        run(args, &mut disks, |work| Workload { stop, ..work })?;
    }
    let phases = args.phases()?;
    let laps = std::iter::repeat_n(&phases, args.laps as usize).flatten();
    let whole = phases.is_empty().then_some(args);
    for args in whole.into_iter().chain(laps) {
        let measured = run(args, &mut disks, |work| work)?;
        print(args, &disks, &measured);
    }
    Ok(())
}

/// Ends the load when the standard input ends, and the process when a daemon closes a connection: what is in flight then is never
/// answered.
fn watch(disks: &mut [Disk]) -> Result<(), String> {
    let copy = |disk: &mut Disk| {
        disk.client
            .frontend()
            .socket()
            .stream()
            .as_fd()
            .try_clone_to_owned()
    };
    let connections: Vec<OwnedFd> = disks
        .iter_mut()
        .map(copy)
        .collect::<Result<_, _>>()
        .map_err(text)?;
    std::thread::spawn(move || {
        let input = std::io::stdin();
        let ends = connections
            .iter()
            .map(|one| PollFd::new(one, PollFlags::RDHUP));
        let mut watched: Vec<_> = ends.chain([PollFd::new(&input, PollFlags::IN)]).collect();
        while poll(&mut watched, None) == Err(Errno::INTR) {}
        if watched
            .pop()
            .is_some_and(|input| !input.revents().is_empty())
        {
            return IS_OVER.store(true, Ordering::Relaxed);
        }
        eprintln!("drive: a daemon closed its connection");
        std::process::exit(1);
    });
    Ok(())
}

/// Writes each disk once from end to end.
fn fill(args: &Args, disks: &mut [Disk]) -> Result<(), String> {
    for disk in disks {
        let work = args.workload(disk.client.config().capacity_bytes(), 0.0);
        let fill = Workload {
            read_percent: 0,
            order: OffsetOrder::Sequential,
            offered: None,
            stop: Stop::Requests(work.span_bytes / u64::from(work.block_bytes)),
            ..work
        };
        disk.client.queue(0).run(&fill, |_| ()).map_err(text)?;
    }
    Ok(())
}

/// Runs the workload on all disks in parallel, after `change` has modified it.
fn run(
    args: &Args,
    disks: &mut [Disk],
    change: impl Fn(Workload<'static>) -> Workload<'static> + Sync,
) -> Result<Measured, String> {
    let queues = usize::from(args.options.queues);
    let mut latencies: Vec<Latencies> = Vec::new();
    latencies.resize_with(disks.len() * queues, || Latencies::new(args.each));
    let began = clock_gettime(ClockId::Monotonic);
    let ended = Mutex::new(Cost::default());
    let before = (Cost::own(Cost::default()), daemons(disks), Instant::now());
    let tallies = std::thread::scope(|scope| {
        let parts = disks.iter_mut().zip(latencies.chunks_mut(queues.max(1)));
        let threads: Vec<_> = parts
            .enumerate()
            .map(|(number, (disk, mine))| {
                let mut work =
                    change(args.workload(disk.client.config().capacity_bytes(), args.seconds));
                // Different offsets on each disk, so that they do not run in step.
                work.seed = work.seed.wrapping_add(number as u64);
                let ended = &ended;
                scope.spawn(move || run_disk(args, number, disk, &work, mine, ended))
            })
            .collect();
        let joined = threads.into_iter().map(|thread| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        joined.collect::<Result<Vec<Vec<WorkloadTotals>>, String>>()
    })?;
    let wall = before.2.elapsed();
    let ended = ended.into_inner().unwrap_or_else(PoisonError::into_inner);
    let all = latencies.into_iter().reduce(Latencies::merge);
    Ok(Measured {
        tallies: tallies.into_iter().flatten().collect(),
        latencies: all.unwrap_or_else(|| Latencies::new(args.each)),
        began: Duration::new(began.tv_sec as u64, began.tv_nsec as u32),
        wall,
        driver: Cost::own(ended).since(before.0),
        daemons: daemons(disks)
            .zip(before.1)
            .map(|(after, before)| after.since(before)),
    })
}

fn run_disk(
    args: &Args,
    number: usize,
    disk: &mut Disk,
    work: &Workload<'static>,
    latencies: &mut [Latencies],
    ended: &Mutex<Cost>,
) -> Result<Vec<WorkloadTotals>, String> {
    let mut left = latencies.iter_mut();
    let sampler = |_| {
        let mut keeper = ThreadResults {
            latencies: left.next(),
            ended,
        };
        // The whole value moves into the closure, and is dropped on the thread that runs it.
        move |sample: Sample| {
            let keeper = &mut keeper;
            if let Some(latencies) = &mut keeper.latencies {
                latencies.record(&sample);
            }
        }
    };
    let tallies = match args.reconnect {
        Some(pause) => {
            let daemons = (&*args.sockets[number], &args.options);
            disk.client.run_over(work, sampler, daemons, pause)
        }
        None => disk.client.run(work, sampler),
    };
    tallies.map_err(text)
}

/// Returns the cost of all daemons so far; `None` if the process of one of them is unknown.
fn daemons(disks: &[Disk]) -> Option<Cost> {
    let costs = pids(disks)?.into_iter().map(Cost::of);
    Some(costs.fold(Cost::default(), Cost::plus))
}

/// Returns the processes of the daemons. A daemon that serves several disks counts once.
fn pids(disks: &[Disk]) -> Option<Vec<u32>> {
    let mut pids: Vec<u32> = disks.iter().map(|disk| disk.pid).collect::<Option<_>>()?;
    pids.sort_unstable();
    pids.dedup();
    Some(pids)
}

/// Returns the process at the other end of the socket.
fn peer(client: &mut Client) -> Option<u32> {
    let stream = client.frontend().socket().stream();
    let credentials = rustix::net::sockopt::socket_peercred(stream).ok()?;
    credentials.pid.as_raw_nonzero().get().try_into().ok()
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn print_idle(disks: &[Disk], before: Option<Cost>, wall: Duration) {
    let cost = daemons(disks)
        .zip(before)
        .map(|(after, before)| after.since(before));
    let cost = cost.unwrap_or_default();
    println!(
        "{{\"disks\":{},\"seconds\":{:.3},\"daemon_wakes\":{},\"daemon_preempted\":{},\"daemon_ticks\":{},\
         \"daemon_cpu_ns\":{}}}",
        disks.len(),
        wall.as_secs_f64(),
        cost.wakes,
        cost.preempted,
        cost.ticks(),
        cost.cpu.as_nanos()
    );
}

fn print(args: &Args, disks: &[Disk], measured: &Measured) {
    let sum = |of: fn(&WorkloadTotals) -> u64| measured.tallies.iter().map(of).sum::<u64>();
    let requests = sum(WorkloadTotals::requests);
    let iops: f64 = measured.tallies.iter().map(WorkloadTotals::iops).sum();
    let mib = iops * f64::from(args.block_bytes) / f64::from(1 << 20);
    let spread = &measured.latencies.spread;
    let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|share| spread.quantile_us(share));
    let (calls, kicks, failed) = (sum(|t| t.calls), sum(|t| t.kicks), sum(|t| t.failed));
    let per = |cost: &Cost| cost.cpu.as_secs_f64() * 1e6 / requests.max(1) as f64;
    let seconds = measured.wall.as_secs_f64();
    let each = measured.latencies.each_ns.as_ref();
    let each = each.map_or(String::new(), |each| {
        let began_ns = measured.began.as_nanos();
        format!(",\"began_ns\":{began_ns},\"each_ns\":{each:?}")
    });
    if args.json {
        let own_kib: u64 = pids(disks).into_iter().flatten().map(cost::own_kib).sum();
        println!(
            "{{\"iops\":{iops:.1},\"mib_s\":{mib:.2},\"requests\":{requests},\"failed\":{failed},\
             \"mean_us\":{:.3},\"p50_us\":{p50:.3},\"p99_us\":{p99:.3},\"p999_us\":{p999:.3},\"max_us\":{:.3},\
             {},{},\"kicks\":{kicks},\"calls\":{calls},\"disks\":{},\"daemon_own_kib\":{own_kib},\"seconds\":{seconds:.3}{each}}}",
            spread.mean_us(),
            spread.max_us(),
            side("driver", Some(&measured.driver), requests, seconds),
            side("daemon", measured.daemons.as_ref(), requests, seconds),
            disks.len(),
        );
    } else {
        let daemon_us = measured.daemons.as_ref().map_or(f64::NAN, per);
        println!(
            "{iops:.0} IOPS  {mib:.1} MiB/s  p50 {p50:.1} us  p99 {p99:.1} us  p99.9 {p999:.1} us  \
             CPU per request: driver {:.3} us, daemon {daemon_us:.3} us  kicks {kicks}  calls {calls}  failed {failed}",
            per(&measured.driver)
        );
    }
}

/// Returns one side's cost as members of a JSON object: CPU time for each request, its user share, wake-ups a second.
fn side(name: &str, cost: Option<&Cost>, requests: u64, seconds: f64) -> String {
    let said = |value: Option<f64>| value.map_or("null".to_owned(), |value| format!("{value:.4}"));
    let per = cost.map(|cost| cost.cpu.as_secs_f64() * 1e6 / requests.max(1) as f64);
    let busy = cost.map(|cost| cost.cpu.as_secs_f64() / seconds.max(1e-9));
    let rate = |count: fn(&Cost) -> u64| cost.map(|cost| count(cost) as f64 / seconds.max(1e-9));
    format!(
        "\"{name}_cpu_us\":{},\"{name}_user_share\":{},\"{name}_busy\":{},\"{name}_wakes_s\":{},\"{name}_preempted_s\":{}",
        said(per),
        said(cost.and_then(Cost::user_share)),
        said(busy),
        said(rate(|cost| cost.wakes)),
        said(rate(|cost| cost.preempted)),
    )
}
