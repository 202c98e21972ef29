//! What stays in a process that has taken a frontend over: nothing, when that has left.

use std::fs;
use std::os::fd::AsFd as _;
use std::process::Command;
use std::time::Duration;

use cleave_client::{DeviceOptions, Notifier, WriteLog};
use cleave_tests::{
    Case, Killed, Scratch, exercise_queue, moving, prepared, program_path, wait_until,
};
use rustix::event::{EventfdFlags, eventfd};

use super::service::Service;

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        nothing_stays_of_a_frontend_that_was_taken_over,
        as_many_descriptors_as_are_counted_suffice,
    ]
}

/// Entries of a folder of the process.
fn count(daemon: &Killed, folder: &str) -> usize {
    let entries = fs::read_dir(format!("/proc/{}/{folder}", daemon.0.id()));
    entries.unwrap().count()
}

/// Descriptors and threads, when they no longer change.
fn size(daemon: &Killed) -> [usize; 2] {
    let now = || ["fd", "task"].map(|folder| count(daemon, folder));
    let mut last = now();
    wait_until(|| {
        std::thread::sleep(Duration::from_millis(50));
        std::mem::replace(&mut last, now()) == last
    });
    last
}

/// Waits until it has at most so many descriptors and threads: what a session leaves ends when its threads get to run, and threads that
/// the kernel lends to io_uring end after some seconds.
fn settles_at(daemon: &Killed, [descriptors, threads]: [usize; 2]) -> bool {
    wait_until(|| count(daemon, "fd") <= descriptors && count(daemon, "task") <= threads)
}

/// Memory of guests that it has open or mapped.
fn guest_memory(daemon: &Killed) -> Vec<String> {
    let process = format!("/proc/{}", daemon.0.id());
    let fds = fs::read_dir(format!("{process}/fd")).unwrap();
    let links = fds.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    let open = links.map(|link| link.display().to_string());
    let maps = fs::read_to_string(format!("{process}/maps")).unwrap();
    let mapped = maps.lines().map(str::to_owned);
    open.chain(mapped)
        .filter(|name| name.contains("memfd:"))
        .collect()
}

fn nothing_stays_of_a_frontend_that_was_taken_over() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 8 << 20);
    let mut service = Service::serve_in(scratch, image.to_str().unwrap(), &[]);
    let options = DeviceOptions {
        queues: 4,
        ..moving(4)
    };
    // A session leaves what each disk keeps, such as threads that close descriptors.
    let mut client = service.open(&options);
    exercise_queue(&mut client, 0).unwrap();
    // The pair of sockets in which its session is kept counts too.
    assert!(service.manager.keeps_one());
    let served = size(&service.daemon);
    drop(client);
    assert!(wait_until(|| guest_memory(&service.daemon).is_empty()));
    let alone = size(&service.daemon);
    let mut client = service.open(&options);
    let log = WriteLog::new(client.memory()).unwrap();
    client.start_log(&log).unwrap();
    client.end_log().unwrap();
    for _ in 0..3 {
        service.restart();
        exercise_queue(&mut client, 3).unwrap();
    }
    // The log, and our copy of it.
    let most = [served[0] + 2, served[1]];
    assert!(
        settles_at(&service.daemon, most),
        "{:?} after {served:?}",
        size(&service.daemon)
    );
    drop(client);
    let is_gone = || guest_memory(&service.daemon).is_empty();
    assert!(wait_until(is_gone), "{:?}", guest_memory(&service.daemon));
    assert!(
        settles_at(&service.daemon, alone),
        "{:?} after {alone:?}",
        size(&service.daemon)
    );
}

/// For all vrings and workers, with the eventfds that take most, and with a parked frontend that has all that it can have.
fn as_many_descriptors_as_are_counted_suffice() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 8 << 20);
    let image = image.to_str().unwrap();
    let options = ["--queues", "256", "--workers", "64", "--queue-size", "32"];
    let socket = scratch.join("refused");
    let socket = socket.to_str().unwrap();
    let line = ["serve", "--socket-path", socket, "--disk", image];
    let control = ["--control", &format!("{socket}.ctl")];
    let refused = Command::new("sh")
        .args(["-c", "ulimit -n 1024; exec timeout 120 \"$@\"", "sh"])
        .arg(program_path())
        .args(line.iter().chain(&control).chain(&options))
        .output()
        .unwrap();
    let message = String::from_utf8(refused.stderr).unwrap();
    let needed = message.split_once("and ").unwrap().1;
    let needed = needed.split_once(" are needed").unwrap().0;

    let mut service = Service::serve_in(scratch, image, &options);
    service.stop();
    service.manager.prelude = format!("ulimit -n {needed}");
    service.start_again();
    let options = DeviceOptions {
        queue_size: 32,
        data_bytes: 16 << 10,
        call: Notifier::Blocking,
        ..moving(256)
    };
    let mut client = service.open(&options);
    let eventfd = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    for index in 0..256 {
        let set = client
            .frontend()
            .set_vring_err(index, Some(eventfd().as_fd()));
        set.unwrap();
    }
    let mut parked = prepared(&service.socket(), &client, &options);
    parked.send_memory().unwrap();
    for index in 0..256 {
        let frontend = parked.frontend();
        frontend
            .set_vring_call(index, Some(eventfd().as_fd()))
            .unwrap();
        frontend
            .set_vring_err(index, Some(eventfd().as_fd()))
            .unwrap();
        frontend
            .set_vring_kick(index, Some(eventfd().as_fd()))
            .unwrap();
    }
    for _ in 0..2 {
        for queue in client.queues() {
            queue.read(0, &mut [0; 4096]).unwrap();
        }
        assert!(parked.frontend().features().is_ok());
        println!(
            "{needed} descriptors may be open, {} are",
            count(&service.daemon, "fd")
        );
        let log = service.manager.log();
        assert!(!log.contains("cannot notify the guest"), "{log}");
        service.restart();
    }
}
