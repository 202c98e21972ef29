//! A node with hundreds of disks: what one costs at rest, that disks come and go without a trace, and that the fault of one is
//! not felt by the others. The figures are printed.
//!
//! `CLEAVE_TEST_SCALE=50` repeats what is repeated so many times more often.

use std::ffi::OsStr;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleave_client::{Buffer, Client, Offered, Sample, Workload};
use cleave_tests::{
    Daemon, Lateness, Node, Scratch, TIMEOUT, UnresponsiveFs, ensure, exercise, flood, is_root,
    program_path, scale, small, unless_late, wait_until,
};
use serde_json::{Value, json};

/// Disks of the first test.
const MANY: u32 = 128;
/// Own memory of a disk at rest.
const DISK_KIB_MAX: u64 = 1024;
/// From exec until all sockets can be connected to. A second is promised; this is a debug build.
const START_MAX: Duration = Duration::from_secs(4);
/// Starts, of which the fastest counts. On a busy machine the kernel takes seconds to end the rings of a killed daemon, and the
/// next one waits for that.
const STARTS: u32 = 3;

fn id(at: u32) -> String {
    format!("d{at:03}")
}

/// A disk that is kept: half of them files, half of them memory.
fn kept(images: &Scratch, at: u32) -> Value {
    let disk = match at % 2 {
        0 => images.image(&id(at), 1 << 20).to_str().unwrap().to_owned(),
        _ => "ram:1M".to_owned(),
    };
    json!({"disk": [disk], "queues": 1, "workers": 1, "serial": id(at)})
}

/// Kills the node and starts it again; returns how long it took to serve all disks.
fn start_again(node: &mut Node) -> Duration {
    node.daemon.die().unwrap();
    let start = Instant::now();
    let next = node.daemon.start_again().unwrap();
    node.daemon.abandon();
    node.daemon = next;
    let sockets: Vec<_> = (0..MANY).map(|at| node.socket(&id(at))).collect();
    let can_connect = |socket: &PathBuf| wait_until(|| UnixStream::connect(socket).is_ok());
    assert!(
        sockets.iter().all(can_connect),
        "{}",
        node.daemon.log_tail()
    );
    start.elapsed()
}

#[test]
fn hundreds_of_disks_start_at_once_and_cost_nothing_at_rest() {
    let images = Scratch::in_memory();
    let mut node = Node::start();
    let empty_kib = node.daemon.rss_kib();
    for at in 0..MANY {
        node.add(&id(at), &kept(&images, at));
    }
    let took = (0..STARTS).map(|_| start_again(&mut node)).min().unwrap();
    assert!(took < START_MAX, "{took:?}");
    let log = node.daemon.log();
    assert!(!log.contains("not noticed by itself"), "{log}");
    node.daemon.stays_at_rest().unwrap();
    let each = node.daemon.rss_kib().saturating_sub(empty_kib) / u64::from(MANY);
    println!("{MANY} disks: all sockets {took:?} after exec; {each} KiB each; none wakes in 2 s");
    assert!(each < DISK_KIB_MAX, "{each} KiB each");
    let threads = node.daemon.threads();
    assert!(threads < 8, "{threads} threads for disks that nobody uses");
    // Each file is watched, although a user may have fewer inotify instances than there are disks.
    for at in [0, MANY - 2] {
        let image = std::fs::File::options()
            .write(true)
            .open(images.join(&id(at)));
        image.unwrap().set_len(2 << 20).unwrap();
        let size = || node.disk(&id(at))["size_bytes"].clone();
        assert!(wait_until(|| size() == json!(2 << 20)), "{}", size());
    }
    for at in [0, 1, MANY - 1] {
        exercise(&mut node.open(&id(at), &small(1))).unwrap();
    }
    node.daemon.finish();
}

/// Asks for the metrics, and reads nothing yet.
fn asked(socket: &Path) -> UnixStream {
    let mut client = UnixStream::connect(socket).unwrap();
    client.set_read_timeout(Some(TIMEOUT)).unwrap();
    let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    client.write_all(request).unwrap();
    client
}

/// Adds many disks, as small as they can be.
fn add_many(node: &Node) {
    for at in 0..MANY {
        let body = json!({"disk": ["ram:1M"], "queues": 1, "workers": 1, "persistent": false});
        node.add(&id(at), &body);
    }
}

/// Everybody may be allowed to read the metrics, and need not take the answer.
#[test]
fn clients_that_do_not_read_the_metrics_cost_no_memory() {
    const CLIENTS: u64 = 200;
    let node = Node::start();
    add_many(&node);
    let text_kib = node.ask("GET", "/metrics", "").body.len() as u64 >> 10;
    let before_kib = node.daemon.rss_kib();
    let ask = |_| asked(node.daemon.socket());
    let mut clients: Vec<_> = (0..CLIENTS).map(ask).collect();
    assert_eq!(node.ask("GET", "/healthz", "").status, 200);
    // Each has an answer by then; the last of them when the first that took nothing have been let go.
    for client in &mut clients {
        client.read_exact(&mut [0; 12]).unwrap();
    }
    let now_kib = node.daemon.rss_kib();
    println!("{CLIENTS} answers of {text_kib} KiB: {before_kib} KiB became {now_kib}");
    let bound_kib = CLIENTS * text_kib / 4;
    node.daemon.stays_small(before_kib, bound_kib).unwrap();
    drop(clients);
    node.daemon.finish();
}

/// The control socket has texts of its own.
#[test]
fn clients_that_do_not_read_the_metrics_hold_up_no_reader_of_the_control_socket() {
    // The most texts for a socket.
    const TEXTS: usize = 3;
    let scratch = Scratch::in_memory();
    let metrics = scratch.join("metrics.sock");
    let option = [OsStr::new("--metrics"), metrics.as_os_str()];
    let node = Node::start_with(scratch, &option);
    add_many(&node);
    // A client that takes nothing for five seconds is let go.
    let least = Duration::from_millis(500);
    let unfelt = unless_late("metrics-sockets", least, |lateness| {
        *lateness = Lateness::start(&[node.daemon.pid()]);
        // One after the other, so that each has a text of its own.
        let first = |_| {
            let mut client = asked(&metrics);
            client.read_exact(&mut [0; 12]).unwrap();
            client
        };
        let slow: Vec<_> = (0..TEXTS).map(first).collect();
        let mut waits = asked(&metrics);
        // When it is answered, the one before has been heard.
        for _ in 0..2 {
            assert_eq!(node.ask("GET", "/healthz", "").status, 200);
        }
        let text = node.ask("GET", "/metrics", "").body;
        assert!(text.contains("cleave_disk_state"), "{text}");
        waits.set_nonblocking(true).unwrap();
        let told = waits.read(&mut [0]);
        drop(slow);
        let is_untold = told.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        ensure(is_untold, || {
            "the answer came after that of the other socket".to_owned()
        })
    });
    unfelt.unwrap();
    node.daemon.finish();
}

/// Requests that start at a steady rate.
fn steady(per_second: f64, time: Duration) -> Workload<'static> {
    Workload {
        offered: Some(Offered {
            per_second,
            burst: 1,
        }),
        ..Workload::reads(4096, 8, 1 << 20, time)
    }
}

fn ram() -> Value {
    json!({"disk": ["ram:1M"], "queues": 2, "workers": 1, "persistent": false})
}

/// Runs `work` while these disks have a steady load; what is wrong with the load fails the test.
fn beside_load(node: &Node, ids: &[String], work: impl FnOnce()) {
    let done = AtomicBool::new(false);
    let mut clients: Vec<Client> = ids.iter().map(|id| node.open(id, &small(1))).collect();
    std::thread::scope(|scope| {
        for client in &mut clients {
            let done = &done;
            scope.spawn(move || {
                let load = Workload {
                    abort: Some(done),
                    ..steady(300.0, Duration::from_secs(3600))
                };
                let tally = client.queue(0).run(&load, |_| {}).unwrap();
                assert_eq!(tally.failed, 0);
                assert!(tally.requests() > 0);
            });
        }
        // Also where `work` panics.
        struct Done<'a>(&'a AtomicBool);
        impl Drop for Done<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _done = Done(&done);
        work();
    });
}

#[test]
fn a_disk_that_comes_and_goes_among_many_leaves_nothing() {
    let node = Node::start();
    let ids: Vec<String> = (0..63).map(id).collect();
    ids.iter().for_each(|id| node.add(id, &ram()));
    let rounds = scale(20);
    beside_load(&node, &ids[..8], || {
        let round = || {
            node.add("again", &ram());
            exercise(&mut node.open("again", &small(2))).unwrap();
            node.remove("again");
        };
        (0..5).for_each(|_| round());
        let daemon = &node.daemon;
        let at_rest = || (daemon.fds_at_rest(), daemon.threads(), daemon.rss_kib());
        let (fds, threads, rss) = at_rest();
        let start = Instant::now();
        (0..rounds).for_each(|_| round());
        let each = start.elapsed() / rounds as u32;
        daemon.fds_settle_at(fds).unwrap();
        daemon.threads_settle_at(threads).unwrap();
        daemon.settles_small(rss, 2048).unwrap();
        println!(
            "added and removed {rounds} times among 63, {each:?} each: (files, threads, KiB) {:?} became {:?}",
            (fds, threads, rss),
            at_rest()
        );
    });
    node.daemon.finish();
}

/// The 99th percentile of these disks under a steady load, over all of them.
fn p99(clients: &mut [Client], time: Duration) -> Duration {
    let load = steady(400.0, time);
    let mut all: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = clients
            .iter_mut()
            .map(|client| {
                let load = &load;
                scope.spawn(move || {
                    let mut times = Vec::new();
                    let note = |sample: Sample| times.push(sample.latency_ns);
                    assert_eq!(client.queue(0).run(load, note).unwrap().failed, 0);
                    times
                })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join().unwrap());
        joined.flatten().collect()
    });
    all.sort_unstable();
    Duration::from_nanos(all[all.len() * 99 / 100])
}

/// Makes bad chains until it is told to end: their buffers lie nowhere.
fn misbehave(client: &mut Client, done: &AtomicBool) {
    while !done.load(Ordering::Relaxed) {
        let ring = client.queue(0).ring();
        let nowhere = 0xdead_0000_0000;
        let chain = [Buffer::readable(nowhere, 16), Buffer::writable(nowhere, 1)];
        let _ = ring.add(&chain);
        ring.publish();
        client.queue(0).ring_kick();
        while client.queue(0).ring().reap().is_some() {}
        // The processor time that it takes is its own thread's; this one is the tester's.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// One disk hangs with a full ring, and the guest of another misbehaves.
#[test]
fn the_faults_of_two_disks_are_not_felt_by_the_others() {
    if !is_root() {
        return cleave_tests::ignored("needs root, to mount");
    }
    let mount = Scratch::in_memory();
    let silent = UnresponsiveFs::mount(&mount, 4 << 20).unwrap();
    let node = Node::start();
    let ids: Vec<String> = (0..62).map(id).collect();
    ids.iter().for_each(|id| node.add(id, &ram()));
    node.add("hostile", &ram());
    node.add(
        "hung",
        &json!({"disk": [silent.file()], "queues": 1, "stop_deadline": 0, "direct": "off", "persistent": false}),
    );
    let mut observed: Vec<Client> = ids[..4].iter().map(|id| node.open(id, &small(1))).collect();
    let time = Duration::from_millis(700);
    let _warm = p99(&mut observed, time);
    // Other work of the machine is in both; the best of some rounds has the least of it.
    let rounds = scale(3).min(30);
    let best = |observed: &mut [Client]| (0..rounds).map(|_| p99(observed, time)).min().unwrap();
    let alone = best(&mut observed);
    let mut hung = node.open("hung", &small(1));
    silent.stop_answering();
    flood(hung.queue(0), 64, 4096);
    assert!(wait_until(
        || node.disk("hung")["in_flight"]["requests"] != json!(0)
    ));
    let mut hostile = node.open("hostile", &small(1));
    let done = AtomicBool::new(false);
    // For other work of the machine, which need not be the same in both: some timeslices of the scheduler. A thread that waited for
    // the hung disk, or served the hostile one alone, would be late by much more.
    let slack = Duration::from_millis(10);
    let unfelt = std::thread::scope(|scope| {
        scope.spawn(|| misbehave(&mut hostile, &done));
        let unfelt = unless_late("faults-of-two", Duration::from_millis(20), |lateness| {
            *lateness = Lateness::start(&[node.daemon.pid()]);
            let beside = best(&mut observed);
            println!(
                "99th percentile of 4 of 64 disks: {alone:?} alone, {beside:?} beside a hung and a hostile one"
            );
            ensure(beside < alone * 2 + slack, || {
                format!("{alone:?} became {beside:?}")
            })
        });
        done.store(true, Ordering::Relaxed);
        unfelt
    });
    let faults = node.disk("hostile")["totals"].clone();
    assert_ne!(faults["broken"], json!(0), "{faults}");
    assert_ne!(node.disk("hung")["in_flight"]["requests"], json!(0));
    unfelt.unwrap();
    drop((observed, hung, hostile, silent));
    let mut daemon = node.daemon;
    daemon.abandon();
}

/// The cost of many disks while nobody uses them. The figures are printed.
#[test]
fn many_idle_disks_wake_nobody() {
    let node = Node::start();
    let before = node.daemon.rss_kib();
    let start = Instant::now();
    // As many as the limit of open files of a small machine allows.
    let count: u32 = 22;
    for at in 0..count {
        let body = json!({"disk": ["ram:1M"], "queues": 1, "workers": 1, "persistent": false});
        node.add(&format!("d{at}"), &body);
    }
    let took = start.elapsed();
    let each = node.daemon.rss_kib().saturating_sub(before) / u64::from(count);
    println!("{count} disks in {took:?}, {each} KiB each");
    assert!(each < 1024, "{each} KiB each");
    let metrics = node.ask("GET", "/metrics", "").body;
    let declared = metrics.matches("# TYPE cleave_connected ").count();
    assert_eq!(declared, 1);
    assert_eq!(
        metrics.matches("\ncleave_connected{").count(),
        count as usize
    );
    let control = node.daemon.socket().display().to_string();
    let mut stats = Command::new(program_path());
    let stats = stats.args(["stats", "--json", &control]).output().unwrap();
    let stats: Value = serde_json::from_slice(&stats.stdout).unwrap();
    assert_eq!(stats.as_array().unwrap().len(), count as usize);
    // Connections of the interface end, and timers with them.
    node.daemon.stays_at_rest().unwrap();
    node.daemon.finish();
}

/// Guests that are served now count for more than those that may need many files.
#[test]
fn a_node_whose_disks_may_come_to_need_too_many_files_serves_them_and_says_so() {
    let folder = Scratch::in_memory();
    std::fs::create_dir_all(folder.join("state/disks")).unwrap();
    for at in 0..20 {
        let file = folder.join(&format!("state/disks/d{at}.toml"));
        std::fs::write(file, "disk = [\"ram:1M\"]\n").unwrap();
    }
    let (program, at) = (program_path().display(), folder.path().display());
    let line = format!(
        "sh -c 'ulimit -n 1024; exec {program} node --state {at}/state --run {at}/run --control {{socket}}'"
    );
    let daemon = Daemon::by_command(&line, 1 << 20, 1).unwrap();
    assert!(daemon.log_has("LimitNOFILE="), "{}", daemon.log());
    let node = Node { daemon };
    let is_served = |at: u32| node.state(&format!("d{at}")) == "serving";
    assert!(wait_until(|| (0..20).all(is_served)));
    node.daemon.finish();
}
