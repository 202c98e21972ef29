//! Drives a vhost-user-blk daemon and prints what it did: rate, latency, CPU per request on both sides.
//!
//! `drive --socket PATH [--seconds S] [--depth D] [--bs BYTES] [--queues N] [--queue-size N] [--poll | --sleep]
//! [--write | --mix READ_PERCENT] [--sequential] [--indirect] [--no-event-idx] [--rate PER_SECOND] [--verify]
//! [--pid DAEMON] [--json]`
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cleave_blk::spec::feature;
use cleave_client::{
    Client, Layout, Offered, Options, Order, Sample, Stop, Tally, Verify, Wait, Workload,
};

struct Args {
    socket: PathBuf,
    seconds: f64,
    depth: u16,
    block_bytes: u32,
    read_percent: u8,
    sequential: bool,
    indirect: bool,
    verify: bool,
    rate: Option<f64>,
    pid: Option<i32>,
    json: bool,
    options: Options,
}

fn main() -> ExitCode {
    match parse().and_then(|args| drive(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("drive: {what}");
            ExitCode::FAILURE
        }
    }
}

fn parse() -> Result<Args, String> {
    let mut args = Args {
        socket: PathBuf::new(),
        seconds: 3.0,
        depth: 32,
        block_bytes: 4096,
        read_percent: 100,
        sequential: false,
        indirect: false,
        verify: false,
        rate: None,
        pid: None,
        json: false,
        options: Options {
            data_bytes: 256 << 20,
            ..Options::default()
        },
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} wants a value"));
        match word.as_str() {
            "--socket" => args.socket = value()?.into(),
            "--seconds" => args.seconds = number(&value()?)?,
            "--depth" => args.depth = number(&value()?)?,
            "--bs" => args.block_bytes = number(&value()?)?,
            "--queues" => args.options.queues = number(&value()?)?,
            "--queue-size" => args.options.queue_size = number(&value()?)?,
            "--poll" => args.options.wait = Wait::Poll,
            "--sleep" => args.options.wait = Wait::Sleep,
            "--write" => args.read_percent = 0,
            "--mix" => args.read_percent = number(&value()?)?,
            "--sequential" => args.sequential = true,
            "--indirect" => args.indirect = true,
            "--no-event-idx" => args.options.features &= !feature::EVENT_IDX,
            "--rate" => args.rate = Some(number(&value()?)?),
            "--verify" => args.verify = true,
            "--pid" => args.pid = Some(number(&value()?)?),
            "--json" => args.json = true,
            other => return Err(format!("unknown option {other}; see the head of drive.rs")),
        }
    }
    if args.socket.as_os_str().is_empty() {
        return Err("--socket PATH is missing".into());
    }
    Ok(args)
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("{text} is no number here"))
}

fn drive(args: &Args) -> Result<(), String> {
    let mut client =
        Client::open(&args.socket, &args.options).map_err(|error| error.to_string())?;
    let pid = args.pid.or_else(|| peer(&client_socket(&mut client)));
    let workload = Workload {
        read_percent: args.read_percent,
        order: if args.sequential {
            Order::Sequential
        } else {
            Order::Random
        },
        layout: if args.indirect {
            Layout::Indirect
        } else {
            Layout::Auto
        },
        verify: if args.verify {
            Verify::Pattern(1)
        } else {
            Verify::Off
        },
        offered: args.rate.map(|per_second| Offered {
            per_second,
            burst: 1,
        }),
        stop: Stop::After(Duration::from_secs_f64(args.seconds)),
        ..Workload::reads(
            args.block_bytes,
            args.depth,
            client.config().capacity_bytes(),
            Duration::ZERO,
        )
    };
    if args.verify {
        let fill = Workload {
            read_percent: 0,
            order: Order::Sequential,
            offered: None,
            ..workload.clone()
        };
        let blocks = workload.span_bytes / u64::from(args.block_bytes);
        let fill = Workload {
            stop: Stop::Requests(blocks),
            ..fill
        };
        client
            .queue(0)
            .run(&fill, |_| ())
            .map_err(|error| error.to_string())?;
    }
    let mut spread: Vec<Spread> = (0..args.options.queues).map(|_| Spread::new()).collect();
    let before = (own_cpu(), pid.map(cpu_of), Instant::now());
    let tallies = {
        let mut left = spread.iter_mut();
        let tallies = client.run(&workload, |_| {
            let mut mine = left.next();
            move |sample: Sample| {
                if let Some(mine) = &mut mine {
                    mine.record(sample.latency_ns);
                }
            }
        });
        tallies.map_err(|error| error.to_string())?
    };
    let wall = before.2.elapsed();
    let own = own_cpu().saturating_sub(before.0);
    let daemon = before
        .1
        .zip(pid.map(cpu_of))
        .map(|(from, to)| to.saturating_sub(from));
    let all = spread
        .into_iter()
        .reduce(Spread::merge)
        .unwrap_or_else(Spread::new);
    print(args, &tallies, &all, wall, own, daemon);
    Ok(())
}

fn print(
    args: &Args,
    tallies: &[Tally],
    spread: &Spread,
    wall: Duration,
    own: Duration,
    daemon: Option<Duration>,
) {
    let sum = |of: fn(&Tally) -> u64| tallies.iter().map(of).sum::<u64>();
    let requests = sum(Tally::requests);
    let iops: f64 = tallies.iter().map(Tally::iops).sum();
    let per = |time: Duration| time.as_secs_f64() * 1e6 / requests.max(1) as f64;
    let mib = iops * f64::from(args.block_bytes) / f64::from(1 << 20);
    let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|share| spread.quantile(share) as f64 / 1e3);
    let daemon_us = daemon.map_or(f64::NAN, per);
    let (calls, kicks, failed) = (sum(|t| t.calls), sum(|t| t.kicks), sum(|t| t.failed));
    if args.json {
        let daemon_us = daemon.map_or("null".into(), |time| format!("{:.4}", per(time)));
        println!(
            "{{\"iops\":{iops:.0},\"mib_s\":{mib:.1},\"requests\":{requests},\"failed\":{failed},\
             \"p50_us\":{p50:.2},\"p99_us\":{p99:.2},\"p999_us\":{p999:.2},\"mean_us\":{:.3},\
             \"driver_cpu_us\":{:.4},\"daemon_cpu_us\":{daemon_us},\"kicks\":{kicks},\"calls\":{calls},\
             \"seconds\":{:.3}}}",
            spread.mean_ns() / 1e3,
            per(own),
            wall.as_secs_f64()
        );
    } else {
        println!(
            "{iops:.0} IOPS  {mib:.1} MiB/s  p50 {p50:.1} us  p99 {p99:.1} us  p99.9 {p999:.1} us  \
             CPU per request: driver {:.3} us, daemon {daemon_us:.3} us  kicks {kicks}  calls {calls}  failed {failed}",
            per(own)
        );
    }
}

fn client_socket(client: &mut Client) -> std::os::fd::OwnedFd {
    use std::os::fd::AsFd;
    let stream = client.frontend().socket().stream();
    #[allow(clippy::expect_used)] // an example program without descriptors has nothing left to do
    stream
        .as_fd()
        .try_clone_to_owned()
        .expect("a descriptor for the socket")
}

fn peer(socket: &std::os::fd::OwnedFd) -> Option<i32> {
    let credentials = rustix::net::sockopt::socket_peercred(socket).ok()?;
    Some(credentials.pid.as_raw_nonzero().get())
}

fn own_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// CPU time of all threads of a process, in the scheduler's own nanoseconds.
fn cpu_of(pid: i32) -> Duration {
    let tasks = std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("task"));
    let times = tasks.into_iter().flatten().flatten().filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(times.sum())
}

/// A log-linear histogram: 64 steps per doubling.
struct Spread {
    counts: Vec<u64>,
    sum_ns: u128,
    count: u64,
}

impl Spread {
    fn new() -> Spread {
        Spread {
            counts: vec![0; 64 * 64],
            sum_ns: 0,
            count: 0,
        }
    }

    fn record(&mut self, ns: u64) {
        let shift = (63 - (ns | 63).leading_zeros()) - 5;
        let at = (shift as usize) * 64 + (ns >> shift) as usize;
        self.counts[at.min(64 * 64 - 1)] += 1;
        self.sum_ns += u128::from(ns);
        self.count += 1;
    }

    fn merge(mut self, other: Spread) -> Spread {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts) {
            *mine += theirs;
        }
        self.sum_ns += other.sum_ns;
        self.count += other.count;
        self
    }

    fn mean_ns(&self) -> f64 {
        self.sum_ns as f64 / self.count.max(1) as f64
    }

    fn quantile(&self, share: f64) -> u64 {
        let wanted = (self.count as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (at, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted.max(1) {
                return ((at % 64) as u64) << (at / 64);
            }
        }
        0
    }
}
