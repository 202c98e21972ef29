//! `cleave node --pool`: many disks on few threads, and one does not feel another.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleave_client::message::RegionBytes;
use cleave_client::{
    Client, DeviceOptions, Layout, Offered, OffsetOrder, Sample, Stop, Verify, Workload,
};
use cleave_tests::http::{Response, fetch, get};
use cleave_tests::{
    Daemon, Scratch, exercise, exercise_queue, go_first, ignored, is_root, run_on, run_to_exit,
    scale, small, wait_until,
};
use rustix::process::Pid;
use rustix::thread::{gettid, sched_getcpu};
use serde_json::{Value, json};

const SPAN: u64 = 4 << 20;

struct Node(Daemon);

impl Node {
    /// A node whose pool `one` has a thread on a CPU that is at hand.
    fn start(scratch: Scratch) -> Node {
        Node::start_with(scratch, &format!("one={}", sched_getcpu()))
    }

    fn start_with(scratch: Scratch, pool: &str) -> Node {
        let run = scratch.join("run");
        let state = scratch.join("state");
        let control = run.join("control.sock");
        let line = [
            Path::new("node"),
            Path::new("--pool"),
            Path::new(pool),
            Path::new("--state"),
            &state,
            Path::new("--run"),
            &run,
        ];
        Node(Daemon::with_args(scratch, control, &line))
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> Response {
        fetch(self.0.socket(), method, path, body)
    }

    fn put(&self, id: &str, body: &Value) -> Response {
        self.ask("PUT", &format!("/v1/disks/{id}"), &body.to_string())
    }

    fn add(&self, id: &str, body: &Value) {
        let answer = self.put(id, body);
        assert_eq!(answer.status, 201, "{id}: {}", answer.body);
    }

    fn remove(&self, id: &str) {
        let answer = self.ask("DELETE", &format!("/v1/disks/{id}?mode=hard"), "");
        assert_eq!(answer.status, 200, "{id}: {}", answer.body);
    }

    fn socket(&self, id: &str) -> PathBuf {
        self.0.scratch().join("run").join(id).join("disk.sock")
    }

    fn open(&self, id: &str, options: &DeviceOptions) -> Client {
        let mut client = None;
        wait_until(|| {
            client = Client::open(&self.socket(id), options).ok();
            client.is_some()
        });
        client.unwrap_or_else(|| panic!("{id}: no client\n{}", self.0.log_tail()))
    }

    /// Adds disks in memory and in files, in the pool, each with the next of these ways of waiting.
    fn add_disks(&self, count: usize, ways: &[&str]) -> Vec<String> {
        let add = |(number, way): (usize, &&str)| {
            let id = format!("d{number}");
            let disk = match number % 2 {
                0 => json!("ram:4M"),
                _ => json!(self.0.scratch().image(&id, SPAN)),
            };
            self.add(&id, &pooled(&disk, way));
            id
        };
        (0..count).zip(ways.iter().cycle()).map(add).collect()
    }
}

fn pooled(disk: &Value, way: &str) -> Value {
    json!({"disk": [disk], "queues": 2, "pool": "one", "completion": way, "persistent": false})
}

/// Reads and writes that are checked.
fn mix(seed: u64, stop: Stop) -> Workload<'static> {
    Workload {
        read_percent: 50,
        block_bytes: 4096,
        depth: 8,
        offset_bytes: 0,
        span_bytes: SPAN / 2,
        order: OffsetOrder::Random,
        seed,
        stop,
        verify: Verify::Pattern(seed),
        offered: None,
        pulse: None,
        layout: Layout::Auto,
        abort: None,
    }
}

/// Fills the part of the disk that `mix` uses, and then runs checked requests; how many there were.
fn check(client: &mut Client, seed: u64, stop: Stop, abort: Option<&AtomicBool>) -> u64 {
    let fill = Workload {
        read_percent: 0,
        order: OffsetOrder::Sequential,
        ..mix(seed, Stop::Requests(SPAN / 2 / 4096))
    };
    let checked = Workload {
        abort,
        ..mix(seed, stop)
    };
    let run = |client: &mut Client, workload: &Workload<'_>| {
        let tally = client.queue(0).run(workload, |_| ()).unwrap();
        assert_eq!(tally.failed, 0, "{tally:?}");
        tally.requests()
    };
    run(client, &fill);
    run(client, &checked)
}

/// Checks all disks at once.
fn check_all(clients: &mut [Client], stop: Stop) {
    std::thread::scope(|scope| {
        for (seed, client) in (1..).zip(clients) {
            scope.spawn(move || {
                check(client, seed, stop, None);
                exercise(client).unwrap();
            });
        }
    });
}

/// The threads of the daemon, each with its name.
fn threads(daemon: &Daemon) -> Vec<(Pid, String)> {
    let thread = |(task, name): (PathBuf, String)| {
        let id = Pid::from_raw(task.file_name()?.to_str()?.parse().ok()?)?;
        Some((id, name))
    };
    let threads = daemon.named_threads().into_iter();
    threads.filter_map(thread).collect()
}

fn thread_names(daemon: &Daemon) -> Vec<String> {
    let threads = threads(daemon).into_iter();
    threads.map(|(_, name)| name).collect()
}

/// Has the pool's threads run before all else on their CPUs, which takes root.
fn put_pool_first(daemon: &Daemon) {
    let mut threads = threads(daemon);
    threads.retain(|(_, name)| name == "p0-one");
    assert_eq!(threads.len(), 1);
    threads.iter().for_each(|(thread, _)| go_first(*thread));
}

#[test]
fn every_disk_of_a_pool_keeps_its_own_data_however_it_waits() {
    let node = Node::start(Scratch::new());
    let ids = node.add_disks(
        16,
        &[
            "adaptive",
            "adaptive",
            "interrupt",
            "interrupt",
            "poll",
            "poll",
        ],
    );
    let mut clients: Vec<Client> = ids.iter().map(|id| node.open(id, &small(2))).collect();
    check_all(&mut clients, Stop::Requests(scale(1000) as u64));
    let names = thread_names(&node.0);
    let count = |start: &str| names.iter().filter(|name| name.starts_with(start)).count();
    assert_eq!((count("cleave-w"), count("p0-one")), (0, 1), "{names:?}");
    drop(clients);
    node.0.finish();
}

#[test]
fn idle_disks_of_a_pool_wake_nobody() {
    let node = Node::start(Scratch::new());
    // In memory: the kernel's own threads for writes to files end 5 s after their last one.
    let ids: Vec<_> = (0..16).map(|number| format!("d{number}")).collect();
    for (number, id) in ids.iter().enumerate() {
        let way = ["adaptive", "interrupt"][number % 2];
        node.add(id, &pooled(&json!("ram:4M"), way));
    }
    let mut clients: Vec<Client> = ids.iter().map(|id| node.open(id, &small(2))).collect();
    check_all(&mut clients, Stop::Requests(200));
    let rests = || {
        let rested = node.0.stays_at_rest();
        rested.unwrap_or_else(|why| panic!("{why}: {:?}", thread_names(&node.0)));
    };
    rests();
    check_all(&mut clients, Stop::Requests(200));
    rests();
    drop(clients);
    node.0.finish();
}

#[test]
fn disks_come_and_go_while_others_are_served() {
    let node = Node::start(Scratch::new());
    let ids = node.add_disks(3, &["adaptive", "interrupt"]);
    let mut clients: Vec<Client> = ids.iter().map(|id| node.open(id, &small(1))).collect();
    let image = node.0.scratch().image("image", SPAN);
    let come_and_go = |rounds: usize| {
        for round in 0..rounds {
            let disk = [json!("ram:4M"), json!(image)][round % 2].clone();
            node.add("guest", &pooled(&disk, "adaptive"));
            let mut client = node.open("guest", &small(2));
            exercise(&mut client).unwrap();
            drop(client);
            node.remove("guest");
        }
    };
    come_and_go(4);
    let descriptors = node.0.fds_at_rest();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (seed, client) in (1..).zip(&mut clients) {
            let done = &done;
            scope.spawn(move || {
                let forever = Stop::Requests(u64::MAX);
                assert!(check(client, seed, forever, Some(done)) > 0);
            });
        }
        come_and_go(scale(40));
        done.store(true, Ordering::Relaxed);
    });
    node.0.fds_settle_at(descriptors).unwrap();
    drop(clients);
    node.0.finish();
}

/// The 99th percentile of reads that start at a steady rate, far below what a thread can serve.
fn p99(client: &mut Client) -> Duration {
    let steady = Workload {
        offered: Some(Offered {
            per_second: 2000.0,
            burst: 1,
        }),
        ..Workload::reads(4096, 8, SPAN, Duration::from_millis(600))
    };
    let mut times = Vec::new();
    let note = |sample: Sample| times.push(sample.latency_ns);
    assert_eq!(client.queue(0).run(&steady, note).unwrap().failed, 0);
    times.sort_unstable();
    Duration::from_nanos(times[times.len() * 99 / 100])
}

/// Adds, uses and removes a disk until it is told to end, ten times a second; how often.
fn churn(node: &Node, disk: &Value, done: &AtomicBool) -> u32 {
    let mut rounds = 0;
    while !done.load(Ordering::Relaxed) {
        let begun = Instant::now();
        node.add("guest", disk);
        let mut client = node.open("guest", &small(2));
        exercise(&mut client).unwrap();
        drop(client);
        node.remove("guest");
        rounds += 1;
        std::thread::sleep(Duration::from_millis(100).saturating_sub(begun.elapsed()));
    }
    rounds
}

/// The pool has a CPU of its own, where it goes first. All else shares the other one, on which the guest of the disk that
/// stays goes first.
#[test]
fn neighbours_do_not_feel_disks_that_come_and_go() {
    let has_two = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1);
    if !is_root() || !has_two {
        return;
    }
    run_on(&[0, 1], false);
    let node = Node::start_with(Scratch::in_memory(), "one=0");
    run_on(&[1], false);
    let disk = pooled(&json!("ram:4M"), "interrupt");
    node.add("kept", &disk);
    put_pool_first(&node.0);
    let (mut quiet, mut beside) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            run_on(&[1], true);
            let mut client = node.open("kept", &small(1));
            p99(&mut client);
            for _ in 0..scale(5) {
                quiet.push(p99(&mut client));
                let done = AtomicBool::new(false);
                std::thread::scope(|scope| {
                    // Not with the guest's priority.
                    let (node, disk, done) = (&node, &disk, &done);
                    let begin = std::thread::Builder::new();
                    let churn = begin.spawn_scoped(scope, move || {
                        let thread = gettid().as_raw_nonzero().to_string();
                        let words = ["--other", "--pid", "0", &thread];
                        assert!(Command::new("chrt").args(words).status().unwrap().success());
                        churn(node, disk, done)
                    });
                    beside.push(p99(&mut client));
                    done.store(true, Ordering::Relaxed);
                    assert!(churn.unwrap().join().unwrap() > 0);
                });
            }
        });
        guest.join().unwrap();
    });
    // What else the machine does lengthens rounds and shortens none, so the best tell. Churn is in each of them.
    let best = |times: &[Duration]| *times.iter().min().unwrap();
    let (alone, churned) = (best(&quiet), best(&beside));
    println!("99th percentile: {alone:?} alone {quiet:?}, {churned:?} beside churn {beside:?}");
    // A thread that is held up for a millisecond each time, ten times a second, holds up a hundredth of the reads.
    assert!(
        churned < alone.mul_f64(1.5) + Duration::from_millis(2),
        "{alone:?} {churned:?}"
    );
    node.remove("kept");
    node.0.finish();
}

#[test]
fn a_hostile_ring_costs_its_disk_and_no_other() {
    let node = Node::start(Scratch::new());
    let ids = node.add_disks(4, &["adaptive", "adaptive", "interrupt", "interrupt"]);
    let mut clients: Vec<Client> = ids.iter().map(|id| node.open(id, &small(2))).collect();
    let (hostile, others) = clients.split_at_mut(1);
    std::thread::scope(|scope| {
        for (seed, client) in (1..).zip(others) {
            scope.spawn(move || check(client, seed, Stop::Requests(5000), None));
        }
        let queue = hostile[0].queue(0);
        queue.ring().push(64);
        queue.ring().publish();
        queue.ring_kick();
        assert!(queue.err_signalled(cleave_tests::TIMEOUT), "not retired");
        // Its other vring goes on, and kicks for the retired one do nothing.
        for _ in 0..1000 {
            hostile[0].queue(0).ring_kick();
        }
        exercise_queue(&mut hostile[0], 1).unwrap();
    });
    drop(clients);
    exercise(&mut node.open("d0", &small(2))).unwrap();
    node.0.finish();
}

#[test]
fn disks_of_a_pool_come_back_after_a_kill() {
    let mut node = Node::start(Scratch::new());
    let images = Scratch::new();
    let ids = ["a", "b", "c"];
    for id in ids {
        let image = images.image(id, SPAN);
        node.add(id, &json!({"disk": [image], "queues": 2, "pool": "one"}));
    }
    let data = |id: &str| vec![id.as_bytes()[0]; 4096];
    for id in ids {
        node.open(id, &small(1))
            .queue(0)
            .write(8192, &data(id))
            .unwrap();
    }
    let next = Node(node.0.succeed().unwrap());
    node.0.abandon();
    node = next;
    for id in ids {
        let mut back = vec![0; 4096];
        node.open(id, &small(1))
            .queue(0)
            .read(8192, &mut back)
            .unwrap();
        assert_eq!(back, data(id));
        let shown = get(node.0.socket(), &format!("/v1/disks/{id}"));
        assert_eq!(shown["spec"]["pool"], "one", "{shown}");
    }
    node.0.finish();
}

#[test]
fn what_cannot_be_in_a_pool_is_refused_with_the_field_named() {
    // The CPUs of pools are at hand for nobody else.
    let node = Node::start_with(Scratch::in_memory(), "one=0");
    let last = std::thread::available_parallelism().unwrap().get() - 1;
    for (field, value, part) in [
        ("pool", json!("slow"), "the pools are one"),
        ("pool", json!(5), "pool: "),
        ("workers", json!(2), "leave workers out"),
        ("cpus", json!(last.to_string()), "leave cpus out"),
        ("disk", json!(["model:p3700"]), "leave pool out"),
    ] {
        let mut body = json!({"disk": ["ram:1M"], "pool": "one"});
        body[field] = value;
        let answer = node.put("d1", &body);
        assert_eq!(answer.status, 400, "{body}: {}", answer.body);
        assert!(answer.error().contains(part), "{body}: {}", answer.body);
    }
    node.0.finish();
    let lists = ["one=", "one=x", "one", "=0", "one=1023"];
    let lists = lists.map(|list| vec![list]).into_iter();
    for list in lists.chain([vec!["one=0", "--pool", "one=0"]]) {
        let line = [&["node", "--pool"], &list[..]].concat();
        let refused = run_to_exit(&line);
        assert_eq!(refused.code, Some(2), "{list:?}: {}", refused.stderr);
        assert!(refused.stderr.contains("--pool"), "{}", refused.stderr);
    }
}

/// A page of a file on a disk has to be read, and the thread that serves the other disks would wait for it.
#[test]
fn memory_on_a_disk_is_refused_in_a_pool() {
    let node = Node::start(Scratch::new());
    node.add("alone", &json!({"disk": ["ram:1M"]}));
    node.add("pooled", &json!({"disk": ["ram:1M"], "pool": "one"}));
    let mut on_disk = node.open("alone", &small(1));
    let (disk, memory) = (Scratch::new(), Scratch::in_memory());
    let region = RegionBytes {
        guest_addr: 0x10_0000_0000,
        len_bytes: 1 << 20,
        user_addr: 0x7000_0000_0000,
        file_offset: 0,
    };
    let [file, shared] = [&disk, &memory].map(|scratch| {
        let path = scratch.image("memory", region.len_bytes);
        File::options().read(true).write(true).open(path).unwrap()
    });
    let accepted = on_disk.frontend().add_mem_reg(region, file.as_fd());
    if accepted.is_err() {
        return ignored("the temporary folder is neither on tmpfs nor on a local disk");
    }
    let is_on_disk = rustix::fs::fcntl_get_seals(&file).is_err();
    let mut client = node.open("pooled", &small(1));
    let refused = client.frontend().add_mem_reg(region, file.as_fd());
    assert_eq!(refused.is_err(), is_on_disk, "{refused:?}");
    let log = "must be a memfd or a file on tmpfs or hugetlbfs";
    assert!(!is_on_disk || node.0.log_has(log), "{}", node.0.log());
    if is_on_disk {
        let accepted = client.frontend().add_mem_reg(region, shared.as_fd());
        accepted.unwrap();
    }
    exercise(&mut client).unwrap();
    drop((client, on_disk));
    node.remove("alone");
    node.remove("pooled");
    node.0.finish();
}
