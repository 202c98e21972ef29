//! What stays in a process that has taken a frontend over: nothing, when that has left.

use std::fs;
use std::time::Duration;

use cleave_client::{DeviceOptions, WriteLog};
use cleave_tests::{Case, Killed, Scratch, exercise_queue, moving, wait_until};

use super::service::Service;

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![nothing_stays_of_a_frontend_that_was_taken_over]
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
    let [descriptors, threads] = size(&service.daemon);
    // The log, and our copy of it.
    assert!(
        descriptors <= served[0] + 2 && threads <= served[1],
        "{descriptors}, {threads} after {served:?}"
    );
    drop(client);
    let is_gone = || guest_memory(&service.daemon).is_empty();
    assert!(wait_until(is_gone), "{:?}", guest_memory(&service.daemon));
    let left = size(&service.daemon);
    assert!(
        left[0] <= alone[0] && left[1] <= alone[1],
        "{left:?} after {alone:?}"
    );
}
