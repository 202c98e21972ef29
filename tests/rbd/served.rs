//! Images, snapshots and stripes of images are served, by a daemon and by a node.

use std::ffi::OsStr;
use std::time::Duration;

use cleave_blk::spec::feature;
use cleave_tests::ceph::CEPH;
use cleave_tests::http::fetch;
use cleave_tests::{
    Case, Node, Scratch, assert_face_v1, assert_serves, compare_bytes, exercise, run_to_exit,
    small, wait_until,
};
use serde_json::json;

use crate::daemons::{report, serve, stripe, with_cluster};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        an_image_is_served: CEPH,
        a_node_serves_images: CEPH,
        a_node_that_ends_gives_its_locks_back: CEPH,
        a_stripe_of_images_is_served: CEPH,
        a_leg_that_shrinks_takes_no_write_across_its_end: CEPH,
        a_snapshot_is_served_read_only: CEPH,
        a_guest_sees_a_larger_image: CEPH,
        a_worker_of_an_idle_disk_sleeps: CEPH,
        a_probe_measures_an_image: CEPH,
    ]
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
            if !more.contains(&"writethrough") {
                assert_face_v1(&daemon, "image");
            }
            compare_bytes(&daemon, "rbd", 60);
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

fn a_stripe_of_images_is_served() {
    with_cluster(|ceph| {
        let (first, more) = stripe(ceph, "leg", 3, 32);
        let mut more: Vec<&str> = more.iter().map(String::as_str).collect();
        more.extend(["--workers", "2", "--split", "16K"]);
        more.extend(["--limit", "iops-total=100000"]);
        let (daemon, control) = serve(&first, &more);
        assert_face_v1(&daemon, "stripe of images");
        // Each vring's part of the disk crosses many chunks, on all legs.
        compare_bytes(&daemon, "rbd", 60);
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
