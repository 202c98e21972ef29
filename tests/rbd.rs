//! Images of a Ceph cluster as disks, through the program and a real cluster.
//!
//! `CLEAVE_RBD_KILLS` sets the number of kills (default 5), `CLEAVE_TEST_SEED` the seed.
#![allow(clippy::unwrap_used, clippy::panic)] // a mistake in the test ends the test

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use cleave_blk::spec::{feature, request_type};
use cleave_client::{Base, Buffer, Client, DeviceOptions, Error};
use cleave_tests::ceph::{CEPH, Cluster, cluster, stop};
use cleave_tests::http::{fetch, get};
use cleave_tests::{
    Daemon, Killed, Model, Node, SURVIVOR_DISK_BYTES, Scratch, Survivor, assert_serves, connect,
    exercise, has_listener, header, outliving, pattern, program_path, run_cases, run_to_exit,
    seeded, small, wait_until, writes_all,
};
use serde_json::{Value, json};

/// Shared by the tests that need the cluster, and held alone by the one that takes its OSD away.
static UP: RwLock<()> = RwLock::new(());

fn main() -> ExitCode {
    let code = run_cases(cleave_tests::cases![
        an_image_is_served: CEPH,
        memory_that_a_guest_names_often_does_not_make_the_daemon_grow: CEPH,
        a_large_request_gets_its_turn_among_many_smaller_ones: CEPH,
        writes_to_many_objects_of_a_clone_do_not_make_the_daemon_grow: CEPH,
        discards_of_many_small_objects_do_not_make_the_daemon_grow: CEPH,
        a_node_serves_images: CEPH,
        a_node_that_ends_gives_its_locks_back: CEPH,
        a_stripe_of_images_is_served: CEPH,
        a_leg_that_shrinks_takes_no_write_across_its_end: CEPH,
        a_killed_daemon_of_a_stripe_loses_nothing: CEPH,
        legs_that_do_not_belong_together_are_refused_in_a_line: CEPH,
        a_snapshot_is_served_read_only: CEPH,
        a_guest_sees_a_larger_image: CEPH,
        a_worker_of_an_idle_disk_sleeps: CEPH,
        a_second_daemon_is_refused_and_the_first_goes_on: CEPH,
        a_daemon_that_lost_its_lock_fails_every_request: CEPH,
        a_killed_daemon_loses_nothing: CEPH,
        a_dead_client_is_stopped_whatever_the_configuration_says: CEPH,
        an_osd_that_goes_and_comes_back_costs_a_pause_and_no_error: CEPH,
        a_daemon_whose_cluster_is_gone_still_ends: CEPH,
        a_daemon_that_waits_for_its_cluster_says_so: CEPH,
        a_probe_measures_an_image: CEPH,
        images_that_cannot_be_served_are_refused_in_a_line: CEPH,
        settings_with_which_a_guest_could_lose_writes_are_refused: CEPH,
        a_configuration_that_is_none_is_not_called_missing: CEPH,
        a_cluster_that_is_away_is_worth_another_attempt: CEPH,
        a_host_without_librbd_is_told_what_to_install,
    ]);
    stop();
    code
}

/// Runs a test while the cluster is whole.
fn with_cluster(test: impl FnOnce(&Cluster)) {
    let _up = UP.read().unwrap_or_else(PoisonError::into_inner);
    test(cluster());
}

/// A daemon with a control socket, and the path of that socket.
fn serve(disk: &str, more: &[&str]) -> (Daemon, PathBuf) {
    let scratch = Scratch::in_memory();
    let (socket, control) = (scratch.join("socket"), scratch.join("control"));
    let mut args = vec!["serve", "--socket-path", socket.to_str().unwrap()];
    args.extend(["--disk", disk, "--serial", "disk"]);
    args.extend(["--control", control.to_str().unwrap()]);
    args.extend(more);
    (Daemon::with_args(scratch, socket.clone(), &args), control)
}

fn report(control: &Path) -> Value {
    get(control, "/v1/disks/disk")
}

/// Random operations on two vrings, each byte compared with a model.
fn compare_bytes(daemon: &Daemon, steps: u64) {
    let mut random = seeded("rbd");
    let mut client = daemon.open(&small(2));
    for index in 0..2 {
        let mut model = Model::zeroed(index as u64 * (32 << 20), 8 << 20);
        for _ in 0..steps {
            let queue = client.queue(index);
            model.step(queue, &mut random, 512 << 10).unwrap();
        }
        let queue = client.queue(index);
        queue.discard(model.offset + (16 << 20), 8 << 20).unwrap();
        queue.flush().unwrap();
        model.compare_all(queue).unwrap();
    }
}

fn an_image_is_served() {
    with_cluster(|ceph| {
        let disk = ceph.image("served", 64);
        let variants: [&[&str]; 3] = [
            &["--cache", "writeback", "--workers", "2"],
            &["--cache", "writethrough", "--split", "64K"],
            &["--completion", "poll", "--limit", "iops-total=100000"],
        ];
        for more in variants {
            let (daemon, control) = serve(&disk, more);
            compare_bytes(&daemon, 60);
            let store = &report(&control)["store"];
            assert_eq!(store["kind"], json!("rbd"));
            assert_eq!(store["lock"], json!("held"));
            let metrics = fetch(&control, "GET", "/metrics", "").body;
            assert!(
                metrics.contains("cleave_rbd_lock_lost{disk=\"disk\"} 0"),
                "{metrics}"
            );
            daemon.finish();
            // So that the next one need not wait.
            assert_eq!(ceph.owner("served"), None, "the lock is given back");
            let zero = [
                "bench",
                "--io-type",
                "write",
                "--io-total",
                "1M",
                "rbd/served",
            ];
            ceph.rbd(&zero);
            ceph.rbd(&["resize", "--allow-shrink", "--size", "0", "rbd/served"]);
            ceph.rbd(&["resize", "--size", "64M", "rbd/served"]);
        }
    });
}

/// librbd has a buffer for every byte that is under way, so what a guest may ask for at once has to be bounded.
fn memory_that_a_guest_names_often_does_not_make_the_daemon_grow() {
    const SEGMENT_BYTES: u32 = 2 << 20;
    const SEGMENTS: usize = 16;
    const GROWTH_MAX_KIB: u64 = 384 << 10;
    with_cluster(|ceph| {
        let (daemon, _) = serve(&ceph.image("named", 32), &["--split", "off"]);
        let mut client = daemon.open(&DeviceOptions {
            queue_size: 1024,
            ..small(1)
        });
        let sectors = 0..(SEGMENTS as u64 * u64::from(SEGMENT_BYTES)) / 512;
        let image: Vec<u8> = sectors
            .flat_map(|sector| sector.to_le_bytes().repeat(64))
            .collect();
        client.queue(0).write(0, &image).unwrap();
        let before = daemon.rss_kib();
        let queue = client.queue(0);
        queue.write_header(request_type::IN, 0);
        let ((header, status), (data, _)) = (queue.control(), queue.data_area());
        let mut chain = vec![Buffer::readable(header, 16)];
        chain.extend([Buffer::writable(data, SEGMENT_BYTES); SEGMENTS]);
        chain.push(Buffer::writable(status, 1));
        let (mut most, mut chains) = (before, 0);
        while queue.ring().add(&chain).is_some() {
            chains += 1;
        }
        assert!(chains > 40, "nearly 2 GiB at once");
        queue.ring().publish();
        queue.ring_kick();
        for _ in 0..chains {
            let used = queue.wait_used().unwrap();
            assert_eq!(used.len, SEGMENTS as u32 * SEGMENT_BYTES + 1);
            most = most.max(daemon.rss_kib());
        }
        assert_eq!(queue.memory().bytes(status, 1), [0]);
        // All segments are the same memory: whichever came last there, each sector is in its place.
        let last = queue.memory().bytes(data, SEGMENT_BYTES as usize);
        for (at, bytes) in (0..).zip(last.chunks(512)) {
            let sector = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            assert_eq!(sector % u64::from(SEGMENT_BYTES / 512), at);
            assert_eq!(bytes, sector.to_le_bytes().repeat(64));
        }
        assert!(
            most <= before + GROWTH_MAX_KIB,
            "{before} KiB became {most}"
        );
        drop(client);
        daemon.finish();
    });
}

/// The bytes under way are bounded, and there are always small requests that fit where a large one does not.
fn a_large_request_gets_its_turn_among_many_smaller_ones() {
    const SMALL: usize = 300;
    const SMALL_BYTES: u32 = 256 << 10;
    with_cluster(|ceph| {
        let disk = ceph.image("turns", 64);
        let (daemon, _) = serve(&disk, &["--split", "off", "--queue-size", "1024"]);
        let mut client = daemon.open(&DeviceOptions {
            queue_size: 1024,
            data_bytes: 32 << 20,
            ..small(1)
        });
        // Reads of what was never written would be too fast.
        client.queue(0).write(0, &vec![7; 16 << 20]).unwrap();
        let queue = client.queue(0);
        queue.write_header(request_type::IN, 0);
        let ((header, status), (data, _)) = (queue.control(), queue.data_area());
        let read = |buffers: &[Buffer]| {
            let head = Buffer::readable(header, 16);
            let tail = Buffer::writable(status, 1);
            [&[head], buffers, &[tail]].concat()
        };
        let small = read(&[Buffer::writable(data, SMALL_BYTES)]);
        let large = read(&[Buffer::writable(data + (1 << 20), 2 << 20); 8]);
        for _ in 0..SMALL {
            queue.ring().add(&small).unwrap();
        }
        let large = queue.ring().add(&large).unwrap();
        queue.ring().publish();
        queue.ring_kick();
        let mut before = 0;
        while queue.wait_used().unwrap().head != u32::from(large) {
            before += 1;
            assert!(before < 10 * SMALL, "the large one never gets its turn");
            queue.ring().add(&small).unwrap();
            queue.ring().publish();
            queue.ring_kick();
        }
        for _ in 0..SMALL {
            queue.wait_used().unwrap();
        }
        drop(client);
        daemon.finish();
    });
}

/// librbd reads an object of the parent as a whole before the first write to it.
fn writes_to_many_objects_of_a_clone_do_not_make_the_daemon_grow() {
    const OBJECTS: u64 = 192;
    const OBJECT_BYTES: u64 = 4 << 20;
    const GROWTH_MAX_KIB: u64 = 640 << 10;
    with_cluster(|ceph| {
        let megabytes = (OBJECTS * OBJECT_BYTES) >> 20;
        ceph.image("parent", megabytes as u32);
        let size = format!("{megabytes}M");
        let fill = ["bench", "--io-type", "write", "--io-size", "4M"];
        ceph.rbd(&[&fill[..], &["--io-total", &size, "rbd/parent"]].concat());
        ceph.rbd(&["snap", "create", "rbd/parent@now"]);
        ceph.rbd(&["snap", "protect", "rbd/parent@now"]);
        ceph.rbd(&["clone", "rbd/parent@now", "rbd/clone"]);
        let (daemon, _) = serve(&ceph.disk("rbd/clone"), &["--queue-size", "1024"]);
        let mut client = daemon.open(&DeviceOptions {
            queue_size: 1024,
            ..small(1)
        });
        let before = daemon.rss_kib();
        let queue = client.queue(0);
        let memory = queue.memory();
        let ((_, status), (data, _)) = (queue.control(), queue.data_area());
        for object in 0..OBJECTS {
            let head = data + 4096 + object * 16;
            let sector = (object * OBJECT_BYTES + 4096) / 512;
            memory.write(head, &header(request_type::OUT, sector));
            let chain = [
                Buffer::readable(head, 16),
                Buffer::readable(data, 512),
                Buffer::writable(status, 1),
            ];
            queue.ring().add(&chain).unwrap();
        }
        queue.ring().publish();
        queue.ring_kick();
        let mut most = before;
        for _ in 0..OBJECTS {
            queue.wait_used().unwrap();
            most = most.max(daemon.rss_kib());
        }
        assert_eq!(memory.bytes(status, 1), [0]);
        assert!(
            most <= before + GROWTH_MAX_KIB,
            "{before} KiB became {most}"
        );
        drop(client);
        daemon.finish();
        ceph.rbd(&["rm", "rbd/clone"]);
        ceph.rbd(&["snap", "unprotect", "rbd/parent@now"]);
        ceph.rbd(&["snap", "purge", "rbd/parent"]);
        ceph.rbd(&["rm", "rbd/parent"]);
    });
}

/// librbd has memory for each object of a discard, and an image may have objects of 4 KiB.
fn discards_of_many_small_objects_do_not_make_the_daemon_grow() {
    const DISCARDS: usize = 16;
    const DISCARD_BYTES: u32 = 16 << 20;
    const GROWTH_MAX_KIB: u64 = 48 << 10;
    with_cluster(|ceph| {
        let size = ["create", "rbd/crumbs", "--size", "16M"];
        // Without an object map, librbd asks the cluster for each.
        let crumbs = [
            "--object-size",
            "4K",
            "--image-feature",
            "layering,exclusive-lock",
        ];
        ceph.rbd(&[&size[..], &crumbs].concat());
        let (daemon, _) = serve(&ceph.disk("rbd/crumbs"), &[]);
        let mut client = daemon.open(&small(1));
        // In the first object and in the last.
        let edges = [512, (16 << 20) - 4096];
        for at in edges {
            client.queue(0).write(at, &[1; 2048]).unwrap();
        }
        let before = daemon.rss_kib();
        let queue = client.queue(0);
        queue.write_header(request_type::DISCARD, 0);
        let ((header, status), (data, _)) = (queue.control(), queue.data_area());
        let mut range = 0_u64.to_le_bytes().to_vec();
        range.extend((DISCARD_BYTES / 512).to_le_bytes());
        range.extend([0; 4]);
        queue.memory().write(data, &range);
        let chain = [
            Buffer::readable(header, 16),
            Buffer::readable(data, 16),
            Buffer::writable(status, 1),
        ];
        for _ in 0..DISCARDS {
            assert!(queue.ring().add(&chain).is_some());
        }
        queue.ring().publish();
        queue.ring_kick();
        let mut most = before;
        for _ in 0..DISCARDS {
            queue.wait_used().unwrap();
            most = most.max(daemon.rss_kib());
        }
        assert_eq!(queue.memory().bytes(status, 1), [0]);
        for at in edges {
            let mut back = [1; 2048];
            queue.read(at, &mut back).unwrap();
            assert_eq!(back, [0; 2048]);
        }
        assert!(
            most <= before + GROWTH_MAX_KIB,
            "{before} KiB became {most}"
        );
        drop(client);
        daemon.finish();
    });
}

/// In a confined node, with limits, on threads of its own and on those of a pool.
fn a_node_serves_images() {
    with_cluster(|ceph| {
        let node = Node::start_with(
            Scratch::in_memory(),
            &["--ceph", "--pool", "fast=0"].map(OsStr::new),
        );
        let limits = json!({"iops-total": 100_000});
        for (id, pool) in [("own", json!(null)), ("pooled", json!("fast"))] {
            let (first, more) = stripe(ceph, &format!("striped-{id}"), 2, 16);
            for (id, disk, chunk, image) in [
                (id, json!([ceph.image(id, 16)]), json!(null), id.to_owned()),
                (
                    &*format!("{id}-legs"),
                    json!([first, more[3]]),
                    json!("64K"),
                    format!("striped-{id}-1"),
                ),
            ] {
                node.add(
                    id,
                    &json!({"disk": disk, "stripe": chunk, "pool": pool, "limits": limits}),
                );
                let to = json!({"to": "/nowhere/copy"}).to_string();
                let refused = node.ask("POST", &format!("/v1/disks/{id}/snapshot"), &to);
                assert!(
                    refused.error().contains("rbd snap create"),
                    "{}",
                    refused.body
                );
                exercise(&mut node.open(id, &small(1))).unwrap();
                assert_eq!(node.disk(id)["store"]["lock"], json!("held"));
                assert!(ceph.owner(&image).is_some());
                node.remove(id);
                assert_eq!(ceph.owner(&image), None, "the lock is given back");
            }
        }
        node.daemon.finish();
    });
}

fn a_node_that_ends_gives_its_locks_back() {
    with_cluster(|ceph| {
        let disk = ceph.image("ends", 16);
        for pool in [json!(null), json!("fast")] {
            let options = ["--ceph", "--pool", "fast=0"].map(OsStr::new);
            let node = Node::start_with(Scratch::in_memory(), &options);
            node.add("ends", &json!({"disk": [disk], "pool": pool}));
            assert!(ceph.owner("ends").is_some());
            node.daemon.finish();
            assert_eq!(ceph.owner("ends"), None);
        }
    });
}

/// Makes images and a stripe of them with chunks of 64 KiB; the arguments that serve it, but for the first `--disk`, and the
/// word for that.
fn stripe(ceph: &Cluster, name: &str, legs: usize, megabytes: u32) -> (String, Vec<String>) {
    let leg = |number| ceph.image(&format!("{name}-{number}"), megabytes);
    let images: Vec<String> = (0..legs).map(leg).collect();
    let mut create = vec!["stripe", "create", "--chunk", "64K"];
    create.extend(images.iter().map(String::as_str));
    let created = run_to_exit(&create);
    assert_eq!(created.code, Some(0), "{}", created.stderr);
    let mut more = vec!["--stripe".to_owned(), "64K".to_owned()];
    for image in &images[1..] {
        more.extend(["--disk".to_owned(), image.clone()]);
    }
    (images[0].clone(), more)
}

fn a_stripe_of_images_is_served() {
    with_cluster(|ceph| {
        let (first, more) = stripe(ceph, "leg", 3, 32);
        let mut more: Vec<&str> = more.iter().map(String::as_str).collect();
        more.extend(["--workers", "2", "--split", "16K"]);
        more.extend(["--limit", "iops-total=100000"]);
        let (daemon, control) = serve(&first, &more);
        // Each vring's part of the disk crosses many chunks, on all legs.
        compare_bytes(&daemon, 60);
        let report = report(&control);
        assert_eq!(report["store"]["kind"], json!("stripe"));
        assert_eq!(report["store"]["lock"], json!("held"));
        let legs = report["legs"].as_array().unwrap();
        assert_eq!(legs.len(), 3);
        for leg in legs {
            assert!(leg["writes"].as_u64().unwrap() > 0, "{leg}");
        }
        let show = ["stripe", "show", &first, more[3], more[5]];
        let shown = run_to_exit(&show);
        assert_eq!(shown.code, Some(0), "{}", shown.stderr);
        for number in 0..3 {
            let name = format!("rbd/leg-{number}");
            assert!(shown.stdout.contains(&name), "{}", shown.stdout);
            assert!(ceph.owner(&format!("leg-{number}")).is_some());
        }
        // One of the images is lost to another client: the disk says so, and fails what needs that image.
        let owner = ceph.owner("leg-1").unwrap();
        ceph.ceph(&["osd", "blocklist", "add", &owner]);
        let mut client = daemon.open(&small(1));
        let fails = || client.queue(0).write(64 << 10, &[1; 4096]).is_err();
        assert!(wait_until(fails), "{}", daemon.log());
        assert!(client.queue(0).flush().is_err());
        drop(client);
        assert_eq!(self::report(&control)["store"]["lock"], json!("lost"));
        daemon.finish();
    });
}

/// librbd writes as much as there is room for, and calls the write done.
fn a_leg_that_shrinks_takes_no_write_across_its_end() {
    const CHUNK: usize = 64 << 10;
    with_cluster(|ceph| {
        let (first, more) = stripe(ceph, "shrinks", 3, 16);
        let mut more: Vec<&str> = more.iter().map(String::as_str).collect();
        more.extend(["--split", "off"]);
        let (daemon, _) = serve(&first, &more);
        let mut client = daemon.open(&small(1));
        // On the second leg from 8 MiB on.
        let at = 128 * 3 * CHUNK as u64 + CHUNK as u64;
        client.queue(0).write(at, &[1; CHUNK]).unwrap();
        let end = (8 << 20) + CHUNK / 2;
        let size = format!("{end}B");
        let image = ["rbd/shrinks-1", "--allow-shrink", "--size"];
        ceph.rbd(&[&["resize"], &image[..], &[&size]].concat());
        let fails = || client.queue(0).write(at, &[2; CHUNK]).is_err();
        assert!(wait_until(fails), "{}", daemon.log());
        assert!(daemon.log_has("has shrunk"), "{}", daemon.log());
        client.queue(0).write(at, &[3; CHUNK / 2]).unwrap();
        ceph.rbd(&[&["resize"], &image[..], &["16M"]].concat());
        let works = || client.queue(0).write(at, &[4; CHUNK]).is_ok();
        assert!(wait_until(works), "{}", daemon.log());
        drop(client);
        daemon.finish();
    });
}

fn legs_that_do_not_belong_together_are_refused_in_a_line() {
    with_cluster(|ceph| {
        let (first, more) = stripe(ceph, "apart", 2, 16);
        let second = more[3].clone();
        let folder = Scratch::in_memory();
        let file = folder.join("file");
        std::fs::write(&file, vec![0; 16 << 20]).unwrap();
        let file = file.to_str().unwrap();
        let other = ceph.image("apart-other", 16);
        let rows: [(&str, Vec<&str>, &str); 6] = [
            (&first, vec![], "leg 1 of 2 of a stripe"),
            (
                &first,
                vec!["--stripe", "64K", "--disk", file],
                "cannot be legs of one stripe; name only images",
            ),
            (
                &first,
                vec!["--stripe", "64K", "--disk", &first],
                "name each leg once",
            ),
            (
                &first,
                vec!["--stripe", "64K", "--disk", "null:16M"],
                "null:16M cannot be a leg of a stripe",
            ),
            (
                &first,
                vec!["--stripe", "64K", "--disk", &other],
                "apart-other",
            ),
            (&second, vec!["--stripe", "64K", "--disk", &first], "order"),
        ];
        for (disk, more, wanted) in rows {
            let why = refusal(disk, &more);
            assert!(why.contains(wanted), "{wanted}: {why}");
        }
        for (disk, more) in [
            (first.clone(), "--read-only"),
            (format!("{first},raw=on"), "--log=info"),
        ] {
            let (daemon, _) = serve(&disk, &[more]);
            assert_serves_reads(&daemon);
            daemon.finish();
        }
    });
}

fn assert_serves_reads(daemon: &Daemon) {
    let mut client = daemon.open(&small(1));
    client.queue(0).read(0, &mut [0; 4096]).unwrap();
}

fn a_snapshot_is_served_read_only() {
    with_cluster(|ceph| {
        let disk = ceph.image("past", 16);
        let (daemon, _) = serve(&disk, &[]);
        let mut client = daemon.open(&small(1));
        client.queue(0).write(4096, &[1; 4096]).unwrap();
        client.queue(0).flush().unwrap();
        ceph.rbd(&["snap", "create", "rbd/past@monday"]);
        client.queue(0).write(4096, &[2; 4096]).unwrap();
        client.queue(0).flush().unwrap();
        let (past, control) = serve(&ceph.disk("rbd/past@monday"), &["--read-only"]);
        let mut reader = past.open(&small(1));
        assert!(reader.offered() & feature::RO != 0);
        let mut bytes = [0; 4096];
        reader.queue(0).read(4096, &mut bytes).unwrap();
        assert_eq!(bytes, [1; 4096], "the past");
        assert!(reader.queue(0).write(0, &bytes).is_err());
        assert_eq!(report(&control)["store"]["lock"], json!("none"));
        client.queue(0).read(4096, &mut bytes).unwrap();
        assert_eq!(bytes, [2; 4096], "the present");
        drop((client, reader));
        past.finish();
        daemon.finish();
    });
}

fn a_guest_sees_a_larger_image() {
    with_cluster(|ceph| {
        let disk = ceph.image("grows", 16);
        let (daemon, _) = serve(&disk, &[]);
        let mut client = daemon.open(&small(1));
        assert_eq!(client.config().capacity_bytes(), 16 << 20);
        ceph.rbd(&["resize", "--size", "32M", "rbd/grows"]);
        let grows = || client.refresh_config().unwrap().capacity_bytes() == 32 << 20;
        assert!(wait_until(grows), "{}", daemon.log());
        client.queue(0).write(24 << 20, &[1; 512]).unwrap();
        drop(client);
        daemon.finish();
    });
}

fn a_worker_of_an_idle_disk_sleeps() {
    with_cluster(|ceph| {
        let (daemon, control) = serve(&ceph.image("idle", 16), &[]);
        assert_serves(&daemon).unwrap();
        assert!(!daemon.log().contains("confined less"), "{}", daemon.log());
        // librbd's own threads have timers.
        daemon.does_not_spin().unwrap();
        let laps = || report(&control)["totals"]["laps"].as_u64().unwrap();
        assert!(wait_until(|| {
            let before = laps();
            std::thread::sleep(Duration::from_millis(300));
            laps() == before
        }));
        daemon.finish();
    });
}

/// The refusal of a disk.
fn refusal(disk: &str, more: &[&str]) -> String {
    let scratch = Scratch::in_memory();
    let socket = scratch.join("socket");
    let mut args = vec!["serve", "--socket-path", socket.to_str().unwrap()];
    args.extend(["--disk", disk]);
    args.extend(more);
    let exited = run_to_exit(&args);
    assert_ne!(exited.code, Some(0));
    assert_eq!(exited.stderr.trim().lines().count(), 1, "{}", exited.stderr);
    exited.stderr
}

fn a_second_daemon_is_refused_and_the_first_goes_on() {
    with_cluster(|ceph| {
        let disk = ceph.image("fought", 16);
        let (daemon, _) = serve(&disk, &[]);
        let mut client = daemon.open(&small(1));
        let owner = ceph.owner("fought").unwrap();
        for round in 0..5 {
            client.queue(0).write(0, &[round; 4096]).unwrap();
            let why = refusal(&disk, &[]);
            assert!(
                why.contains("in use by another client") && why.contains(&owner),
                "{why}"
            );
            let mut back = [0; 4096];
            client.queue(0).read(0, &mut back).unwrap();
            assert_eq!(back, [round; 4096]);
        }
        assert_eq!(ceph.owner("fought"), Some(owner), "it never let go");
        drop(client);
        daemon.finish();
    });
}

fn a_daemon_that_lost_its_lock_fails_every_request() {
    with_cluster(|ceph| {
        let disk = ceph.image("fenced", 16);
        let (daemon, control) = serve(&disk, &["--on-error", "hold"]);
        let mut client = daemon.open(&small(1));
        client.queue(0).write(0, &[1; 4096]).unwrap();
        client.queue(0).flush().unwrap();
        let owner = ceph.owner("fenced").unwrap();
        ceph.ceph(&["osd", "blocklist", "add", &owner]);
        // Reported although the policy is to hold: there is nothing to wait for.
        let refused =
            |result: Result<(), Error>| matches!(result, Err(Error::Status { status: 1, .. }));
        assert!(
            wait_until(|| refused(client.queue(0).write(0, &[2; 4096]))),
            "{}",
            daemon.log()
        );
        let mut back = [0; 4096];
        assert!(refused(client.queue(0).read(0, &mut back)));
        assert!(refused(client.queue(0).flush()));
        assert_eq!(report(&control)["store"]["lock"], json!("lost"));
        assert_eq!(report(&control)["totals"]["held"], json!(0));
        let metrics = fetch(&control, "GET", "/metrics", "").body;
        assert!(
            metrics.contains("cleave_rbd_lock_lost{disk=\"disk\"} 1"),
            "{metrics}"
        );
        assert!(daemon.log_has("has taken the exclusive lock"));
        drop(client);
        // The next one takes the dead lock over.
        let (next, _) = serve(&disk, &[]);
        let mut client = next.open(&small(1));
        client.queue(0).read(0, &mut back).unwrap();
        assert_eq!(back, [1; 4096], "no write of the fenced daemon arrived");
        drop(client);
        next.finish();
        daemon.finish();
    });
}

fn a_killed_daemon_loses_nothing() {
    with_cluster(|ceph| {
        let kills = std::env::var("CLEAVE_RBD_KILLS").ok();
        let kills = kills.map_or(5, |text| text.parse().unwrap());
        let disk = ceph.image("killed", (SURVIVOR_DISK_BYTES >> 20) as u32);
        kill(ceph, kills, &["--disk", &disk], &["killed"]);
    });
}

/// Otherwise its last writes could come after those that its successor repeats.
fn a_dead_client_is_stopped_whatever_the_configuration_says() {
    with_cluster(|ceph| {
        ceph.image("stopped", 16);
        let folder = Scratch::in_memory();
        let socket = folder.join("socket");
        let settings = [
            "rbd_blocklist_on_break_lock = false",
            "rbd_blocklist_expire_seconds = 30",
        ];
        let disk = configured(ceph, &folder, "stopped", &settings);
        let start = || {
            let mut command = Command::new(program_path());
            command.arg("serve").arg("--socket-path").arg(&socket);
            command.args(["--disk", &disk]);
            Killed::start(&mut command)
        };
        let mut daemon = start();
        connect(|| Client::open(&socket, &small(1)));
        let dead = ceph.owner("stopped").unwrap();
        daemon.kill();
        let _next = start();
        connect(|| Client::open(&socket, &small(1)));
        assert_ne!(ceph.owner("stopped").as_ref(), Some(&dead));
        let until = ceph.blocklisted_until(&dead).unwrap();
        // An hour is the cluster's default.
        let date = Command::new("date")
            .args(["-d", "+30 min", "+%FT%T"])
            .output();
        let earliest = String::from_utf8(date.unwrap().stdout).unwrap();
        assert!(
            until.as_str() > earliest.trim(),
            "{until} is before {earliest}"
        );
    });
}

/// The image as a disk whose configuration has more settings, in a file in `folder`.
fn configured(ceph: &Cluster, folder: &Scratch, image: &str, settings: &[&str]) -> String {
    let conf = folder.join("conf");
    let text = std::fs::read_to_string(ceph.conf()).unwrap();
    std::fs::write(&conf, text + &settings.join("\n") + "\n").unwrap();
    format!("rbd:rbd/{image},conf={}", conf.display())
}

/// Each leg has a lock of its own, which the next daemon has to take over.
fn a_killed_daemon_of_a_stripe_loses_nothing() {
    with_cluster(|ceph| {
        // A little larger than half of the disk, because of the superblocks.
        let megabytes = (SURVIVOR_DISK_BYTES >> 20) as u32 / 2 + 1;
        let (first, more) = stripe(ceph, "killed-leg", 2, megabytes);
        let mut disk = vec!["--disk", &first];
        disk.extend(more.iter().map(String::as_str));
        kill(ceph, 3, &disk, &["killed-leg-0", "killed-leg-1"]);
    });
}

/// Kills daemons of a disk with requests in flight.
fn kill(ceph: &Cluster, kills: usize, disk: &[&str], images: &[&str]) {
    let scratch = Scratch::in_memory();
    let socket = scratch.join("socket");
    let start = || {
        let mut command = Command::new(program_path());
        command.arg("serve").arg("--socket-path").arg(&socket);
        command.args(disk).args(["--log", "warn", "--queues", "4"]);
        Killed::start(&mut command)
    };
    let options = outliving();
    let mut random = seeded("rbd kill");
    let (mut out, begun) = (0, Instant::now());
    let mut daemon = start();
    let mut client = connect(|| Client::open(&socket, &options));
    let mut guest = Survivor::new(&mut client);
    for kill in 0..kills {
        let life = Duration::from_micros(random.below(200_000));
        guest.work(&mut client, &mut random, life);
        let dead = images.iter().map(|image| ceph.owner(image).unwrap());
        let dead: Vec<String> = dead.collect();
        // Its requests are in flight when it dies.
        guest.submit(&mut client, &mut random);
        daemon.kill();
        out += guest.out();
        daemon = start();
        let base = [Base::Used, Base::Avail][kill % 2];
        connect(|| client.reconnect(&socket, &options, base));
        // Nothing was repeated before nothing could come from the dead one any more.
        for client in &dead {
            assert!(ceph.has_blocklisted(client), "{client}");
        }
        guest.await_all(&mut client, kill % 2 == 0);
        guest.verify(&mut client, kill % 5 == 4);
    }
    guest.verify(&mut client, true);
    println!(
        "{kills} kills in {} s: {} requests, {out} of them out at a kill and answered after it, 0 lost, 0 twice, {} MiB read back, \
         0 wrong",
        begun.elapsed().as_secs(),
        guest.answered,
        guest.read_bytes >> 20,
    );
}

fn an_osd_that_goes_and_comes_back_costs_a_pause_and_no_error() {
    let _alone = UP.write().unwrap_or_else(PoisonError::into_inner);
    let ceph = cluster();
    ceph.image("bereft", 64);
    // The OSD is away for longer than that.
    let folder = Scratch::in_memory();
    let disk = configured(ceph, &folder, "bereft", &["rados_osd_op_timeout = 1"]);
    let (daemon, control) = serve(&disk, &["--on-error", "report"]);
    let load = pattern(16 << 10, 16, 32 << 20, 3000);
    writes_all(&mut daemon.open(&small(2)), &load, || {
        std::thread::sleep(Duration::from_millis(60));
        ceph.stop_osd();
        std::thread::sleep(Duration::from_secs(3));
        ceph.start_osd();
    });
    assert_eq!(report(&control)["totals"]["failed"], json!(0));
    assert_eq!(report(&control)["store"]["lock"], json!("held"));
    daemon.finish();
}

fn a_daemon_whose_cluster_is_gone_still_ends() {
    let _alone = UP.write().unwrap_or_else(PoisonError::into_inner);
    let ceph = cluster();
    let disk = ceph.image("gone", 16);
    for (is_busy, code) in [(false, 0), (true, 1)] {
        let scratch = Scratch::in_memory();
        let socket = scratch.join("socket");
        let mut command = Command::new(program_path());
        command.args(["serve", "--socket-path", socket.to_str().unwrap()]);
        command.args(["--disk", &disk, "--stop-deadline", "1"]);
        let mut daemon = Killed::start(&mut command);
        let mut client = connect(|| Client::open(&socket, &small(1)));
        client.queue(0).write(0, &[1; 4096]).unwrap();
        ceph.stop_osd();
        std::thread::scope(|scope| {
            let write = is_busy.then(|| scope.spawn(|| client.queue(0).write(0, &[2; 4096])));
            if is_busy {
                std::thread::sleep(Duration::from_millis(200));
            }
            let pid = rustix::process::Pid::from_child(&daemon.0);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
            let mut ended = None;
            assert!(wait_until(|| {
                ended = daemon.0.try_wait().unwrap();
                ended.is_some()
            }));
            assert_eq!(ended.unwrap().code(), Some(code), "{ended:?}");
            let written = write.map(|write| write.join().unwrap());
            assert!(!matches!(written, Some(Ok(_))));
        });
        ceph.start_osd();
    }
}

fn a_daemon_that_waits_for_its_cluster_says_so() {
    let _alone = UP.write().unwrap_or_else(PoisonError::into_inner);
    let ceph = cluster();
    let disk = ceph.image("paused", 64);
    ceph.ceph(&["osd", "set", "pause"]);
    let scratch = Scratch::in_memory();
    let socket = scratch.join("socket");
    let args = ["serve", "--disk", &disk, "--socket-path"];
    let daemon = Daemon::without_socket(&[&args[..], &[socket.to_str().unwrap()]].concat());
    let is_said = wait_until(|| {
        let log = daemon.log();
        log.contains(&format!("still waiting for {disk} to open"))
    });
    let asked = run_to_exit(&["doctor", "--disk", &disk]);
    ceph.ceph(&["osd", "unset", "pause"]);
    assert!(is_said, "{}", daemon.log());
    assert_eq!(asked.code, Some(1), "{}", asked.stderr);
    let why = format!("{disk} did not open within 20 s");
    assert!(asked.stdout.contains(&why), "{}", asked.stdout);
    assert!(
        wait_until(|| has_listener(&socket)),
        "{}",
        daemon.log_tail()
    );
    daemon.finish();
}

fn a_probe_measures_an_image() {
    with_cluster(|ceph| {
        let disk = ceph.image("probed", 64);
        let scratch = Scratch::in_memory();
        let json = scratch.join("report.json");
        let args = [
            "probe",
            &disk,
            "--seconds",
            "5",
            "--json",
            json.to_str().unwrap(),
        ];
        let exited = run_to_exit(&args);
        assert_eq!(exited.code, Some(0), "{}", exited.stderr);
        assert!(std::fs::read_to_string(&json).unwrap().contains("\"rbd\""));
    });
}

fn images_that_cannot_be_served_are_refused_in_a_line() {
    with_cluster(|ceph| {
        let good = ceph.image("good", 16);
        ceph.rbd(&["snap", "create", "rbd/good@now"]);
        ceph.rbd(&[
            "create",
            "rbd/unlocked",
            "--size",
            "16M",
            "--image-feature",
            "layering",
        ]);
        ceph.rbd(&["create", "rbd/empty", "--size", "0"]);
        ceph.image("cached", 16);
        ceph.rbd(&["config", "image", "set", "rbd/cached", "rbd_cache", "true"]);
        let rows: [(&str, &[&str], &str); 10] = [
            (
                &ceph.disk("rbd/cached"),
                &[],
                "rbd config image set rbd/cached rbd_cache false",
            ),
            (
                &ceph.disk("rbd/none"),
                &[],
                "cannot open image rbd/none: No such file",
            ),
            (&ceph.disk("nopool/good"), &[], "cannot open pool nopool"),
            (
                &ceph.disk("rbd/nospace/good"),
                &[],
                "rbd/nospace/good: No such file",
            ),
            (
                &ceph.disk("rbd/good@never"),
                &["--read-only"],
                "rbd/good@never: No such file",
            ),
            (
                &ceph.disk("rbd/good@now"),
                &[],
                "snapshot; serve it with --read-only",
            ),
            (
                &ceph.disk("rbd/unlocked"),
                &[],
                "rbd feature enable rbd/unlocked exclusive-lock",
            ),
            (&ceph.disk("rbd/empty"), &[], "rbd resize"),
            (&good, &["--direct", "on"], "no page cache"),
            ("rbd:rbd/good,conf=/nowhere", &[], "there is no /nowhere"),
        ];
        for (disk, more, part) in rows {
            let why = refusal(disk, more);
            assert!(why.contains(part), "{disk}: {why}");
        }
        let (daemon, _) = serve(&ceph.disk("rbd/unlocked"), &["--read-only"]);
        assert_serves(&daemon).unwrap();
        daemon.finish();
    });
    for (disk, part) in [
        ("rbd:good", "the pool or the image is missing"),
        ("rbd:rbd/good,size=1", "`size` is not id, conf or raw"),
        ("rbd:rbd/good@", "snapshot"),
    ] {
        let exited = run_to_exit(&["serve", "--socket-path", "/nowhere/s", "--disk", disk]);
        assert_ne!(exited.code, Some(0));
        assert!(exited.stderr.contains(part), "{disk}: {}", exited.stderr);
    }
}

/// Its own settings override ours.
fn settings_with_which_a_guest_could_lose_writes_are_refused() {
    with_cluster(|ceph| {
        for (setting, value) in [
            ("rbd_cache", "1"),
            ("rbd_persistent_cache_mode", "ssd"),
            ("rbd_blocklist_on_break_lock", "false"),
            ("rbd_blocklist_expire_seconds", "30"),
        ] {
            let image = format!("rbd/{setting}");
            ceph.image(setting, 16);
            ceph.rbd(&["config", "image", "set", &image, setting, value]);
            let why = refusal(&ceph.disk(&image), &[]);
            let remedy = format!("rbd config image set {image} {setting} ");
            assert!(why.contains(&remedy), "{why}");
        }
    });
}

fn a_configuration_that_is_none_is_not_called_missing() {
    let folder = Scratch::in_memory();
    let conf = folder.join("conf");
    std::fs::write(&conf, "[global\n").unwrap();
    let conf = format!("rbd:rbd/good,conf={}", conf.display());
    let why = refusal(&conf, &[]);
    assert!(why.contains("cannot read /"), "{why}");
}

/// A service manager starts the daemon again for code 1 only.
fn a_cluster_that_is_away_is_worth_another_attempt() {
    let scratch = Scratch::in_memory();
    let conf = scratch.join("conf");
    let disk = format!("rbd:rbd/good,conf={}", conf.display());
    // No monitor there, and no such name: the name server may be away too.
    for monitor in ["v2:127.0.0.1:1", "cluster.invalid"] {
        let away = format!(
            "[global]\nmon_host = {monitor}\nauth_client_required = none\nclient_mount_timeout = 1\n"
        );
        std::fs::write(&conf, away).unwrap();
        let exited = run_to_exit(&["serve", "--socket-path", "/nowhere/s", "--disk", &disk]);
        assert_eq!(exited.code, Some(1), "{}", exited.stderr);
    }
}

fn a_host_without_librbd_is_told_what_to_install() {
    // An empty file stands for it in the loader's path, whether or not this host has one.
    let scratch = Scratch::in_memory();
    std::fs::write(scratch.join("librados.so.2"), "").unwrap();
    let socket = scratch.join("socket");
    let mut command = Command::new(program_path());
    command.args(["serve", "--socket-path", socket.to_str().unwrap()]);
    command.args(["--disk", "rbd:rbd/image"]);
    command.env("LD_LIBRARY_PATH", scratch.path());
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert_eq!(stderr.trim().lines().count(), 1, "{stderr}");
    assert!(
        stderr.contains("cannot load librados.so.2")
            && stderr.contains("install Ceph's client library"),
        "{stderr}"
    );
}
