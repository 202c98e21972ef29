//! An image has one writer: its lock is taken over from a dead daemon, and a daemon that lost it writes nothing more.

use std::process::Command;
use std::time::{Duration, Instant};

use cleave_client::{Base, Client, Error};
use cleave_tests::ceph::{CEPH, Cluster};
use cleave_tests::http::fetch;
use cleave_tests::{
    Case, Killed, SURVIVOR_DISK_BYTES, Scratch, Survivor, connect, outliving, program_path, seeded,
    small, wait_until,
};
use serde_json::json;

use crate::daemons::{configured, refusal, report, serve, stripe, with_cluster};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_killed_daemon_of_a_stripe_loses_nothing: CEPH,
        a_second_daemon_is_refused_and_the_first_goes_on: CEPH,
        a_daemon_that_lost_its_lock_fails_every_request: CEPH,
        a_killed_daemon_loses_nothing: CEPH,
        a_dead_client_is_stopped_whatever_the_configuration_says: CEPH,
    ]
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
