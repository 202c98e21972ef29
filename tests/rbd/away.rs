//! The cluster, or a part of it, goes away and comes back.

use std::process::Command;
use std::sync::PoisonError;
use std::time::Duration;

use cleave_client::Client;
use cleave_tests::ceph::{CEPH, cluster};
use cleave_tests::{
    Case, Daemon, Killed, Scratch, connect, has_listener, pattern, program_path, run_to_exit,
    small, wait_until, writes_all,
};
use serde_json::json;

use crate::daemons::{UP, configured, report, serve};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        an_osd_that_goes_and_comes_back_costs_a_pause_and_no_error: CEPH,
        a_daemon_whose_cluster_is_gone_still_ends: CEPH,
        a_daemon_that_waits_for_its_cluster_says_so: CEPH,
    ]
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
