//! What cannot be served is refused in a line that names the remedy.

use std::process::Command;

use cleave_tests::ceph::CEPH;
use cleave_tests::{Case, Daemon, Scratch, assert_serves, program_path, run_to_exit, small};

use crate::daemons::{refusal, serve, stripe, with_cluster};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        legs_that_do_not_belong_together_are_refused_in_a_line: CEPH,
        images_that_cannot_be_served_are_refused_in_a_line: CEPH,
        settings_with_which_a_guest_could_lose_writes_are_refused: CEPH,
        a_configuration_that_is_none_is_not_called_missing: CEPH,
        a_cluster_that_is_away_is_worth_another_attempt: CEPH,
        a_host_without_librbd_is_told_what_to_install,
    ]
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
