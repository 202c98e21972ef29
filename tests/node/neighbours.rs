//! Disks of different guests on one thread: a guest that copies, marks or writes much or whose memory is in many regions, a file
//! whose server hangs and a device without free tags delay their own disk alone. Each test prints latencies.
//! `CLEAVE_TEST_SCALE=5` takes medians of five and asserts that the neighbour's 99th percentile at most doubles; measure that with a
//! release build on a machine that does nothing else.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleave_blk::spec::request_type;
use cleave_client::message::{RegionBytes, protocol};
use cleave_client::{
    Buffer, Client, DeviceOptions, GuestMemory, Offered, Queue, RegionOptions, Sample, Workload,
    WriteLog,
};
use cleave_tests::nbd::{Export, NbdServer, READ, Reaction, chunk, data_at};
use cleave_tests::{
    Daemon, Lateness, LoopDevice, Mount, Node, Scratch, TIMEOUT, UnresponsiveFs, connect, ensure,
    exercise, flood, flood_with_writes, ignored, is_root, run_on, scale, small, unless_late,
    wait_until,
};
use rustix::fs::{Advice, MemfdFlags, fadvise, ftruncate, memfd_create};
use rustix::thread::sched_getcpu;
use serde_json::{Value, json};

/// Bytes of a small disk.
const SPAN: u64 = 4 << 20;
/// No request of a neighbour may take longer.
const WORST: Duration = Duration::from_millis(50);
/// A failure counts as one of the machine if threads waited longer than this for a core.
const LATE: Duration = Duration::from_millis(20);
/// Reads of the guest that copies much, and the segments of each.
const READS: usize = 60;
const SEGMENTS: u64 = 128;
/// Requests that a disk whose server hangs has in flight.
const HUNG: u64 = 24;

/// A node with a pool of one thread, and two disks on it whose guests behave well.
struct Street {
    node: Node,
    /// In memory.
    quick: Client,
    /// A file in memory: the kernel moves and flushes it on threads of its own.
    file: Client,
}

impl Street {
    fn new() -> Street {
        let node = node_with_one_thread();
        let image = node.daemon.scratch().image("file", SPAN);
        node.add("quick", &pooled(&json!("ram:4M"), "auto"));
        node.add("file", &pooled(&json!(image), "auto"));
        let quick = node.open("quick", &small(1));
        let file = node.open("file", &small(1));
        if is_root() {
            node.daemon.hurry();
        }
        Street { node, quick, file }
    }

    fn move_in(&self, disk: &Path, direct: &str, queue_size: u16) -> Client {
        self.node.add("other", &pooled(&json!(disk), direct));
        let options = DeviceOptions {
            queue_size,
            ..small(1)
        };
        self.node.open("other", &options)
    }

    /// Latencies of the neighbour alone, and then while `attack` runs, which ends when it is told to.
    fn compare(&mut self, name: &str, mut attack: impl FnMut(&AtomicBool) + Send) {
        let rounds = scale(1);
        let (mut alone, mut beside) = (Vec::new(), Vec::new());
        unless_late(name, LATE, |lateness| {
            *lateness = Lateness::start(&[self.node.daemon.pid()]);
            for _ in 0..rounds {
                let (quick, attack) = (&mut self.quick, &mut attack);
                alone.push(measured(quick, |_| ()));
                let found = measured(quick, attack);
                beside.push(found);
                ensure(found.worst < WORST, || {
                    format!("a request beside {name} took {:?}", found.worst)
                })?;
            }
            Ok(())
        })
        .unwrap();
        report(name, &mut alone, &mut beside);
    }

    /// A disk of the same thread goes on in every way.
    fn assert_file_is_served(&mut self) {
        exercise(&mut self.file).unwrap();
        self.file.queue(0).flush().unwrap();
    }
}

/// Starts a node with a pool of one thread, which has a CPU of its own if there are two.
fn node_with_one_thread() -> Node {
    let cpu = if has_two_cpus() { 0 } else { sched_getcpu() };
    let pool = format!("one={cpu}");
    let options = ["--pool", &pool].map(OsStr::new);
    Node::start_with(Scratch::in_memory(), &options)
}

fn pooled(disk: &Value, direct: &str) -> Value {
    let mut body = json!({"disk": [disk], "queues": 1, "pool": "one", "completion": "interrupt",
        "persistent": false});
    if direct != "auto" {
        body["direct"] = json!(direct);
    }
    body
}

#[derive(Debug, Clone, Copy)]
struct Found {
    p99: Duration,
    worst: Duration,
}

/// Latencies of a guest's reads while something else runs that ends when it is told to.
fn measured(client: &mut Client, meanwhile: impl FnOnce(&AtomicBool) + Send) -> Found {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| meanwhile(&done));
        let guest = scope.spawn(|| {
            if is_root() && has_two_cpus() {
                run_on(&[1], true);
            }
            let found = reads(client);
            done.store(true, Ordering::Relaxed);
            found
        });
        guest.join().unwrap()
    })
}

fn has_two_cpus() -> bool {
    std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1)
}

/// Latencies of reads that start at a steady rate, far below what the thread can serve.
fn reads(client: &mut Client) -> Found {
    let steady = Workload {
        offered: Some(Offered {
            per_second: 2000.0,
            burst: 1,
        }),
        ..Workload::reads(4096, 8, SPAN, Duration::from_secs(1))
    };
    let mut times = Vec::new();
    let note = |sample: Sample| times.push(sample.latency_ns);
    assert_eq!(client.queue(0).run(&steady, note).unwrap().failed, 0);
    times.sort_unstable();
    let at = |index: usize| Duration::from_nanos(times[index]);
    Found {
        p99: at(times.len() * 99 / 100),
        worst: at(times.len() - 1),
    }
}

fn report(name: &str, alone: &mut [Found], beside: &mut [Found]) {
    let median = |found: &mut [Found]| {
        found.sort_unstable_by_key(|one| one.p99);
        found[found.len() / 2].p99
    };
    let worst = beside.iter().map(|one| one.worst).max();
    let (alone, beside) = (median(alone), median(beside));
    println!("{name}: 99th percentile {alone:?} alone, {beside:?} beside it, worst {worst:?}");
    if scale(1) > 1 {
        assert!(beside <= alone * 2, "{name}: {alone:?} {beside:?}");
    }
}

/// Makes reads of one offset available at once, each of many segments that are the same guest memory. Returns how many fit.
fn read_much(queue: &mut Queue, segment_bytes: u32) -> usize {
    let (area, _) = queue.data_area();
    let (head, status) = queue.control();
    let table = area + u64::from(segment_bytes);
    queue.write_header(request_type::IN, 0);
    let segment = Buffer::writable(area, segment_bytes);
    let mut chain = vec![segment; SEGMENTS as usize];
    chain.insert(0, Buffer::readable(head, 16));
    chain.push(Buffer::writable(status, 1));
    let pushed = (0..READS).take_while(|_| queue.ring().add_indirect(table, &chain).is_some());
    let pushed = pushed.count();
    queue.ring().publish();
    queue.ring_kick();
    pushed
}

/// Waits until so many requests are answered.
fn wait_all(queue: &mut Queue, count: u64) {
    for _ in 0..count {
        queue.wait_used().unwrap();
    }
}

fn mounts() -> bool {
    let root = is_root();
    if !root {
        ignored("needs root, to mount");
    }
    root
}

#[test]
fn large_reads_from_the_page_cache_do_not_hold_up_others() {
    let segment_bytes: u32 = if scale(1) > 1 { 4 << 20 } else { 1 << 20 };
    let mut street = Street::new();
    let images = Scratch::new();
    let image = images.image("large", SEGMENTS * u64::from(segment_bytes));
    std::io::copy(
        &mut std::fs::File::open(&image).unwrap(),
        &mut std::io::sink(),
    )
    .unwrap();
    street.node.add("other", &pooled(&json!(image), "off"));
    stand_beside_large_reads(&mut street, "large cached reads", segment_bytes);
    street.node.daemon.finish();
}

#[test]
fn large_reads_of_disks_in_memory_do_not_hold_up_others() {
    let mut street = Street::new();
    for kind in ["ram", "null"] {
        let disk = json!(format!("{kind}:{SEGMENTS}M"));
        street.node.add("other", &pooled(&disk, "auto"));
        stand_beside_large_reads(&mut street, kind, 1 << 20);
        street.node.remove("other");
    }
    street.node.daemon.finish();
}

/// Past the page cache, where the kernel itself fills what is not there.
#[test]
fn large_reads_of_holes_do_not_hold_up_others() {
    if !mounts() {
        return;
    }
    let mut street = Street::new();
    let images = Scratch::new();
    let mount = Mount::ext4(&images, 256 << 20).unwrap();
    let image = mount.path().join("large");
    let file = std::fs::File::create(&image).unwrap();
    file.set_len(SEGMENTS << 20).unwrap();
    street.node.add("other", &pooled(&json!(image), "auto"));
    stand_beside_large_reads(&mut street, "holes of a file", 1 << 20);
    street.node.remove("other");
    street.node.daemon.finish();
}

/// The server answers a read of 32 MiB by 32 bytes.
#[test]
fn large_reads_of_holes_of_a_server_do_not_hold_up_others() {
    let mut street = Street::new();
    let folder = Scratch::in_memory();
    let export = Export {
        blocks: Some([1, 4096, 32 << 20]),
        ..Export::able(SEGMENTS << 20)
    };
    let server = NbdServer::start(&folder.join("nbd"), export);
    server.react(|asked| match asked.kind {
        READ => {
            let hole = data_at(asked.offset, &asked.len.to_be_bytes());
            Reaction::Send(chunk(asked.cookie, 1, 2, &hole))
        }
        _ => Reaction::Honest,
    });
    let disk = json!(server.uri(""));
    street.node.add("other", &pooled(&disk, "auto"));
    stand_beside_large_reads(&mut street, "holes of a server", 1 << 20);
    street.node.daemon.finish();
}

/// All that the thread does is on one device, so it submits the writes itself, and the file system has it wait for a free tag. The
/// neighbour asks for what needs no device.
#[test]
fn large_writes_to_a_file_do_not_hold_up_others_on_its_file_system() {
    // One extent, which the file system overwrites without a lock that it would have to wait for.
    const BYTES: usize = 16 << 20;
    if !mounts() {
        return;
    }
    let node = node_with_one_thread();
    let folder = Scratch::in_memory();
    let mount = Mount::ext4(&folder, 1 << 30).unwrap();
    for name in ["quiet", "other"] {
        let image = mount.path().join(name);
        std::fs::write(&image, vec![7; BYTES]).unwrap();
        let file = std::fs::File::open(&image).unwrap();
        file.sync_all().unwrap();
        // A write past the page cache goes to a thread of the kernel while there are pages to drop.
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        node.add(name, &pooled(&json!(image), "auto"));
    }
    let mut quiet = node.open("quiet", &small(1));
    let mut other = node.open("other", &small(1));
    other.queue(0).set_timeout(TIMEOUT);
    unless_late("large writes", LATE, |lateness| {
        *lateness = Lateness::start(&[node.daemon.pid()]);
        let done = AtomicBool::new(false);
        let worst = std::thread::scope(|scope| {
            scope.spawn(|| {
                let pushed = write_much(other.queue(0), BYTES as u64);
                wait_all(other.queue(0), pushed);
                done.store(true, Ordering::Relaxed);
            });
            let mut worst = Duration::ZERO;
            while !done.load(Ordering::Relaxed) {
                let began = Instant::now();
                read_beyond_the_end(quiet.queue(0));
                worst = worst.max(began.elapsed());
            }
            worst
        });
        println!("beside large writes: worst {worst:?}");
        ensure(worst < WORST, || {
            format!("a request beside large writes took {worst:?}")
        })
    })
    .unwrap();
    drop((quiet, other));
    for name in ["quiet", "other"] {
        node.remove(name);
    }
    node.daemon.finish();
}

/// Makes writes of so many bytes available at once, all from the same guest memory. Returns how many.
fn write_much(queue: &mut Queue, bytes: u64) -> u64 {
    const WRITES: u64 = 60;
    let (area, _) = queue.data_area();
    let (head, status) = queue.control();
    queue.write_header(request_type::OUT, 0);
    let mut chain = vec![Buffer::readable(area, 1 << 20); (bytes >> 20) as usize];
    chain.insert(0, Buffer::readable(head, 16));
    chain.push(Buffer::writable(status, 1));
    for _ in 0..WRITES {
        queue.ring().add_indirect(area + (1 << 20), &chain).unwrap();
    }
    queue.ring().publish();
    queue.ring_kick();
    WRITES
}

/// The daemon refuses such a request as soon as it takes it.
fn read_beyond_the_end(queue: &mut Queue) {
    let (area, _) = queue.data_area();
    let (head, status) = queue.control();
    queue.write_header(request_type::IN, 1 << 40);
    let chain = [
        Buffer::readable(head, 16),
        Buffer::writable(area, 512),
        Buffer::writable(status, 1),
    ];
    queue.chain(&chain).unwrap();
}

/// Each segment of a request lies across all regions, so that a request has half a million ranges and fails.
#[test]
fn requests_over_many_regions_do_not_hold_up_others() {
    let mut street = Street::new();
    let images = Scratch::in_memory();
    let image = images.image("large", 4 << 30);
    for disk in [json!("null:4G"), json!(image)] {
        street.node.add("other", &pooled(&disk, "auto"));
        let options = DeviceOptions {
            queue_size: 256,
            ..small(1)
        };
        let mut other = street.node.open("other", &options);
        plug_pages(&mut other);
        street.compare(&format!("many regions of {disk}"), |done| {
            let queue = other.queue(0);
            queue.set_timeout(TIMEOUT);
            while !done.load(Ordering::Relaxed) {
                let pushed = read_across_pages(queue);
                wait_all(queue, pushed);
            }
        });
        drop(other);
        street.node.remove("other");
    }
    street.assert_file_is_served();
    street.node.daemon.finish();
}

/// Regions of a page, adjacent in the guest.
const PAGES: u64 = 500;
const PAGES_AT: u64 = 1 << 40;
const PAGE: u64 = 4096;

/// The frontend adds those regions. They are all in one file.
fn plug_pages(client: &mut Client) {
    let file = memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, PAGES * PAGE).unwrap();
    for at in (0..PAGES).map(|page| page * PAGE) {
        let region = RegionBytes {
            guest_addr: PAGES_AT + at,
            len_bytes: PAGE,
            user_addr: 0x6000_0000_0000 + at,
            file_offset: at,
        };
        let added = client.frontend().add_mem_reg(region, file.as_fd());
        added.unwrap_or_else(|error| panic!("ADD_MEM_REG {at:#x}: {error}"));
    }
}

/// Makes reads available whose segments are all those pages, each time anew. Returns how many.
fn read_across_pages(queue: &mut Queue) -> u64 {
    const SEGMENTS_MAX: usize = 1024;
    let (table, _) = queue.data_area();
    let (head, status) = queue.control();
    queue.write_header(request_type::IN, 0);
    let mut chain = vec![Buffer::writable(PAGES_AT, (PAGES * PAGE) as u32); SEGMENTS_MAX];
    chain.insert(0, Buffer::readable(head, 16));
    chain.push(Buffer::writable(status, 1));
    for _ in 0..READS {
        queue.ring().add_indirect(table, &chain).unwrap();
    }
    queue.ring().publish();
    queue.ring_kick();
    READS as u64
}

/// Has the guest of the disk `other` read all of it many times at once, over and over.
fn stand_beside_large_reads(street: &mut Street, name: &str, segment_bytes: u32) {
    let options = DeviceOptions {
        data_bytes: 8 << 20,
        ..small(1)
    };
    let mut other = street.node.open("other", &options);
    street.compare(name, |done| {
        let queue = other.queue(0);
        queue.set_timeout(TIMEOUT);
        while !done.load(Ordering::Relaxed) {
            let pushed = read_much(queue, segment_bytes);
            assert!(pushed > 8, "{pushed}");
            wait_all(queue, pushed as u64);
        }
    });
    drop(other);
    street.assert_file_is_served();
}

#[test]
fn a_file_whose_server_hangs_delays_its_disk_alone() {
    if !mounts() {
        return;
    }
    let mut street = Street::new();
    let folder = Scratch::in_memory();
    let server = UnresponsiveFs::mount(&folder, SPAN).unwrap();
    let mut other = street.move_in(&server.file(), "auto", 256);
    street.compare("a server that hangs", |done| {
        server.hold(true);
        flood(other.queue(0), HUNG, 4096);
        assert!(wait_until(
            || server.held() > 0 && done.load(Ordering::Relaxed)
        ));
        server.release();
        wait_all(other.queue(0), HUNG);
    });
    server.hold(true);
    flood(other.queue(0), HUNG, 4096);
    assert!(wait_until(|| server.held() > 0));
    street.assert_file_is_served();
    plug_memory(&mut other);
    server.release();
    wait_all(other.queue(0), HUNG);
    drop(other);
    street.node.daemon.finish();
}

/// The guest of the server's disk wrote and did not flush, so its worker has the server flush at its end.
#[test]
fn a_server_that_is_slow_to_flush_delays_its_disk_alone() {
    let mut street = Street::new();
    let folder = Scratch::in_memory();
    let server = NbdServer::start(&folder.join("nbd"), Export::able(SPAN));
    let is_held = Arc::new(AtomicBool::new(false));
    server.hold_flushes(&is_held);
    let disk = json!(server.uri(""));
    street.node.add("other", &pooled(&disk, "auto"));
    let (other, file) = (street.node.socket("other"), street.node.socket("file"));
    street.compare("a server that is slow to flush", |done| {
        let mut client = connect(|| Client::open(&other, &small(1)));
        client.queue(0).write(0, &[1; 4096]).unwrap();
        let before = server.flushes();
        is_held.store(true, Ordering::SeqCst);
        drop(client);
        assert!(wait_until(|| server.flushes() > before));
        assert!(wait_until(|| done.load(Ordering::Relaxed)));
        is_held.store(false, Ordering::SeqCst);
    });
    let mut client = street.node.open("other", &small(1));
    client.queue(0).write(0, &[2; 4096]).unwrap();
    let before = server.flushes();
    is_held.store(true, Ordering::SeqCst);
    drop(client);
    assert!(wait_until(|| server.flushes() > before));
    // Workers begin and end on the thread meanwhile.
    street.assert_file_is_served();
    let Street {
        node,
        quick,
        file: old,
    } = street;
    drop(old);
    exercise(&mut connect(|| Client::open(&file, &small(1)))).unwrap();
    is_held.store(false, Ordering::SeqCst);
    exercise(&mut node.open("other", &small(1))).unwrap();
    drop(quick);
    node.daemon.finish();
}

/// The frontend adds memory, and the daemon acknowledges it.
fn plug_memory(client: &mut Client) {
    let memory = GuestMemory::new(&[RegionOptions::new(1 << 40, 1 << 20)]).unwrap();
    let frontend = client.frontend();
    let added = frontend.add_mem_reg(memory.region(0), memory.fd(0));
    added.unwrap_or_else(|error| panic!("ADD_MEM_REG: {error}"));
}

#[test]
fn memory_is_plugged_while_the_server_of_the_only_disk_hangs() {
    if !mounts() {
        return;
    }
    let folder = Scratch::in_memory();
    for mount in [UnresponsiveFs::mount, UnresponsiveFs::mount_blocking] {
        let server = mount(&folder, SPAN).unwrap();
        let daemon = Daemon::serve(&["--disk", &server.file().to_string_lossy()]);
        let options = DeviceOptions {
            queue_size: 256,
            ..small(1)
        };
        let mut client = daemon.open(&options);
        server.hold(true);
        flood(client.queue(0), HUNG, 4096);
        assert!(wait_until(|| server.held() > 0));
        plug_memory(&mut client);
        server.release();
        wait_all(client.queue(0), HUNG);
        exercise(&mut client).unwrap();
        drop(client);
        daemon.finish();
    }
}

#[test]
fn a_file_with_a_server_is_read_at_the_guests_depth() {
    if !mounts() {
        return;
    }
    const DEPTH: u64 = 64;
    let folder = Scratch::in_memory();
    let server = UnresponsiveFs::mount_blocking(&folder, SPAN).unwrap();
    let daemon = Daemon::serve(&["--disk", &server.file().to_string_lossy()]);
    let options = DeviceOptions {
        queue_size: 256,
        ..small(1)
    };
    let mut client = daemon.open(&options);
    server.hold(true);
    flood(client.queue(0), DEPTH, 4096);
    let mut most = 0;
    let is_deep = wait_until(|| {
        most = server.held();
        most as u64 == DEPTH
    });
    server.release();
    assert!(is_deep, "the server had {most} reads at once");
    wait_all(client.queue(0), DEPTH);
    drop(client);
    daemon.finish();
}

#[test]
fn a_device_without_free_tags_delays_its_disk_alone() {
    if !mounts() {
        return;
    }
    const OUT: u64 = 220;
    let mut street = Street::new();
    let folder = Scratch::in_memory();
    let server = UnresponsiveFs::mount(&folder, SPAN).unwrap();
    // Past the page cache, which has what is read.
    let device = LoopDevice::attach_with(&server.file(), &["--direct-io=on"]).unwrap();
    let mut other = street.move_in(&device.path, "auto", 1024);
    let threads = || {
        let tasks = format!("/proc/{}/task", street.node.daemon.pid());
        let tasks = std::fs::read_dir(tasks).unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.starts_with("iou-wrk")).count()
    };
    server.hold(true);
    flood(other.queue(0), OUT, 4096);
    // The kernel's own limit of such threads, if nobody raises it.
    let cpus = std::thread::available_parallelism().unwrap().get();
    let many = (4 * cpus).min(32);
    let waits = || tags_in_use(&device) && threads() >= many;
    assert!(wait_until(waits), "{} threads", threads());
    street.assert_file_is_served();
    street.compare("a device without tags", |done| {
        assert!(wait_until(|| done.load(Ordering::Relaxed)));
    });
    server.release();
    wait_all(other.queue(0), OUT);
    drop(other);
    street.node.remove("other");
    drop(device);
    street.node.daemon.finish();
}

/// A file system waits for a tag where a device would refuse.
#[test]
fn a_file_on_a_device_without_free_tags_delays_its_disk_alone() {
    if !mounts() {
        return;
    }
    let mut street = Street::new();
    let folder = Scratch::in_memory();
    let server = UnresponsiveFs::mount(&folder, 4 * SPAN).unwrap();
    let device = LoopDevice::attach_with(&server.file(), &["--direct-io=on"]).unwrap();
    let name = device.path.file_name().unwrap();
    let tags = Path::new("/sys/block").join(name).join("queue/nr_requests");
    std::fs::write(tags, (HUNG / 2).to_string()).unwrap();
    let mount = Mount::ext4_on(&folder, &device).unwrap();
    let image = mount.path().join("disk");
    std::fs::write(&image, vec![7; SPAN as usize]).unwrap();
    std::fs::File::open(&image).unwrap().sync_all().unwrap();
    let mut other = street.move_in(&image, "auto", 256);
    for name in ["reads", "writes"] {
        server.hold(true);
        match name {
            "reads" => flood(other.queue(0), HUNG, 4096),
            _ => flood_with_writes(other.queue(0), HUNG, 4096),
        }
        assert!(wait_until(|| tags_in_use(&device)));
        street.assert_file_is_served();
        let name = format!("{name} of a file on a device without tags");
        street.compare(&name, |done| {
            assert!(wait_until(|| done.load(Ordering::Relaxed)));
        });
        server.release();
        wait_all(other.queue(0), HUNG);
    }
    drop(other);
    street.node.remove("other");
    drop(mount);
    drop(device);
    street.node.daemon.finish();
}

/// Returns true if the device has as many requests in flight as it has tags.
fn tags_in_use(device: &LoopDevice) -> bool {
    let name = device.path.file_name().unwrap().to_string_lossy();
    let read = |what: &str| std::fs::read_to_string(format!("/sys/block/{name}/{what}")).unwrap();
    // Reads and writes are counted by themselves.
    let sum = |text: String| -> u32 {
        let numbers = text.split_whitespace();
        numbers.map(|number| number.parse::<u32>().unwrap()).sum()
    };
    sum(read("inflight")) >= sum(read("queue/nr_requests"))
}

/// Bytes that each refused request names: all pages of them are marked.
const NAMED: u32 = 0xffff_0000;

/// A guest that moves: what its requests may have written is marked, and some name almost 4 GiB.
#[test]
fn a_guest_that_moves_does_not_hold_up_others() {
    const QUEUES: u16 = 8;
    let mut street = Street::new();
    let folder = Scratch::in_memory();
    let server = NbdServer::start(&folder.join("nbd"), Export::able(SPAN));
    let is_held = Arc::new(AtomicBool::new(true));
    server.hold_flushes(&is_held);
    let mut disk = pooled(&json!(server.uri("")), "auto");
    disk["queues"] = json!(QUEUES);
    street.node.add("other", &disk);
    let plain = small(QUEUES);
    let options = DeviceOptions {
        queue_size: 256,
        protocol_features: plain.protocol_features | protocol::LOG_SHMFD,
        ..plain
    };
    let mut other = street.node.open("other", &options);
    let log = WriteLog::new(other.memory()).unwrap();
    other.start_log(&log).unwrap();
    // A worker that has something in flight takes more requests in a lap.
    let flush = other.queue(0);
    flush.write_header(request_type::FLUSH, 0);
    let (head, status) = flush.control();
    let chain = [Buffer::readable(head, 16), Buffer::writable(status, 1)];
    flush.ring().add(&chain).unwrap();
    flush.ring().publish();
    flush.ring_kick();
    assert!(wait_until(|| server.flushes() > 0));
    street.compare("a guest that moves", |done| {
        let mut queues = [0; QUEUES as usize];
        while !done.load(Ordering::Relaxed) {
            for (number, pushed) in queues.iter_mut().enumerate() {
                *pushed = name_much(other.queue(number));
            }
            for (number, pushed) in queues.iter().enumerate() {
                wait_all(other.queue(number), *pushed);
            }
        }
    });
    is_held.store(false, Ordering::SeqCst);
    wait_all(other.queue(0), 1);
    drop(other);
    street.node.daemon.finish();
}

/// Makes reads beyond the end of the disk available. Returns how many.
fn name_much(queue: &mut Queue) -> u64 {
    const REQUESTS: u64 = 200;
    let (table, _) = queue.data_area();
    let (head, status) = queue.control();
    queue.write_header(request_type::IN, 1 << 40);
    let chain = [
        Buffer::readable(head, 16),
        Buffer::writable(0, NAMED),
        Buffer::writable(status, 1),
    ];
    for _ in 0..REQUESTS {
        queue.ring().add_indirect(table, &chain).unwrap();
    }
    queue.ring().publish();
    queue.ring_kick();
    REQUESTS
}

/// The lengths of the segments of a request, of which the third ends inside of a page.
const PIECES: [u32; 5] = [512, 700 << 10, 1536, 2 << 20, 4096];

/// A request of several segments that lie apart in guest memory; their addresses and lengths.
fn scattered(queue: &mut Queue, kind: u32) -> Vec<(u64, u32)> {
    let (mut at, _) = queue.data_area();
    let data = PIECES.map(|len| {
        let segment = (at, len);
        at += u64::from(len) + 4096;
        segment
    });
    let (head, status) = queue.control();
    queue.write_header(kind, 0);
    let mut chain = vec![Buffer::readable(head, 16)];
    chain.extend(data.iter().map(|(addr, len)| match kind {
        request_type::IN => Buffer::writable(*addr, *len),
        _ => Buffer::readable(*addr, *len),
    }));
    chain.push(Buffer::writable(status, 1));
    queue.chain(&chain).unwrap();
    assert_eq!(queue.memory().bytes(status, 1), [0]);
    data.to_vec()
}

#[test]
fn large_requests_that_the_kernel_gets_in_portions_keep_their_data() {
    let street = Street::new();
    let images = Scratch::new();
    let image = images.image("image", SPAN);
    let mut other = street.move_in(&image, "off", 64);
    let queue = other.queue(0);
    let bytes: u32 = PIECES.iter().sum();
    let pattern: Vec<u8> = (0..bytes)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    queue.write(0, &pattern).unwrap();
    let read = scattered(queue, request_type::IN);
    let memory = queue.memory();
    let found: Vec<u8> = read
        .iter()
        .flat_map(|(addr, len)| memory.bytes(*addr, *len as usize))
        .collect();
    assert!(found == pattern, "read in segments");
    for (number, (addr, len)) in (1..).zip(&read) {
        memory.fill(*addr, *len as usize, number);
    }
    let written = scattered(queue, request_type::OUT);
    let mut back = vec![0; bytes as usize];
    queue.read(0, &mut back).unwrap();
    let mut rest = &back[..];
    for (number, (_, len)) in (1..).zip(&written) {
        let (part, more) = rest.split_at(*len as usize);
        assert!(part.iter().all(|byte| *byte == number), "segment {number}");
        rest = more;
    }
    drop(other);
    street.node.daemon.finish();
}
