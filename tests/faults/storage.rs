//! Store failures that can be caused for real on a test machine. The worker's simulation makes errors at the n-th
//! operation.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use cleave_blk::spec::feature;
use cleave_client::message::RegionBytes;
use cleave_client::{Client, Error, Notifier, Queue};
use cleave_tests::{
    Case, Daemon, LoopDevice, Messages as _, Mount, Requirement, Scratch, Stopwatch,
    UnresponsiveFs, assert_serves, exercise, ignored, run, run_to_exit, seeded, small, wait_until,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::Signal;

const DISK: u64 = 64 << 20;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        no_space_is_an_error_until_there_is_space: Requirement::Root,
        no_space_on_ext4_is_an_error_until_there_is_space: Requirement::LoopDevices,
        a_file_size_limit_is_an_error_and_no_signal,
        a_truncated_file_fails_requests_beyond_its_end,
        a_leg_cut_while_the_disk_is_busy_does_not_grow_again,
        a_replaced_or_deleted_file_is_still_served,
        a_device_set_read_only_refuses_writes_until_it_is_not: Requirement::LoopDevices,
        a_loop_device_whose_file_is_cut_gives_errors: Requirement::LoopDevices,
        a_hanging_device_does_not_delay_the_exit: Requirement::LoopDevices,
        a_hanging_file_system_delays_the_exit_only_as_long_as_the_kernel_must: Requirement::LoopDevices,
        an_unresponsive_file_system_does_not_delay_the_exit: Requirement::Fuse,
        a_disk_that_recovers_completes_its_requests: Requirement::LoopDevices,
        memory_is_plugged_and_unplugged_while_the_disk_hangs: Requirement::LoopDevices,
        too_few_descriptors_are_refused_at_start,
        descriptors_are_counted_for_all_vrings_and_workers,
        no_locked_memory_is_needed,
        flushed_data_survives_a_killed_program,
    ]
}

fn io_error(result: Result<(), Error>) -> bool {
    matches!(result, Err(Error::Status { status: 1, .. }))
}

/// Writes from the beginning until the store refuses; returns how many bytes it accepted.
fn write_until_refused(queue: &mut Queue) -> u64 {
    let bytes = vec![0xab; 1 << 20];
    for round in 0..DISK >> 20 {
        match queue.write(round << 20, &bytes) {
            Ok(()) => {}
            Err(Error::Status { status: 1, .. }) => return round << 20,
            Err(other) => panic!("{other}"),
        }
    }
    panic!("the store accepted everything");
}

/// A full store fails the requests that do not fit and serves all others; it recovers when there is space.
fn full_then_not(folder: &Path, direct: &str) {
    let image = folder.join("disk");
    File::create(&image).unwrap().set_len(DISK).unwrap();
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap(), "--direct", direct]);
    let filler = folder.join("filler");
    std::fs::write(&filler, vec![1; 4 << 20]).unwrap();
    let mut client = daemon.open(&small(2));
    let queue = client.queue(0);
    let taken = write_until_refused(queue);
    assert!(taken > 0, "no write was accepted");
    let mut back = vec![0; 1 << 20];
    for round in 0..taken >> 20 {
        queue.read(round << 20, &mut back).unwrap();
        assert!(back.iter().all(|byte| *byte == 0xab), "at {round} MiB");
    }
    assert!(io_error(queue.write(taken, &back)), "still full");
    client.queue(1).read(0, &mut back).unwrap();
    std::fs::remove_file(&filler).unwrap();
    // The file system may free the space a little later.
    let recovers = wait_until(|| client.queue(0).write(taken, &back).is_ok());
    assert!(recovers, "freed space was not used");
    client.queue(0).flush().unwrap();
    client.queue(1).read(taken, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 0xab));
    drop(client);
    daemon.finish();
    std::fs::remove_file(&image).unwrap();
}

fn no_space_is_an_error_until_there_is_space() {
    let scratch = Scratch::new();
    let mount = Mount::tmpfs(&scratch, 16 << 20).unwrap();
    full_then_not(mount.path(), "off");
}

fn no_space_on_ext4_is_an_error_until_there_is_space() {
    let scratch = Scratch::new();
    let mount = Mount::ext4(&scratch, 32 << 20).unwrap();
    full_then_not(mount.path(), "auto");
}

fn a_file_size_limit_is_an_error_and_no_signal() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    // `ulimit -f` counts in units of 512 bytes: 16 MiB.
    for direct in ["auto", "off"] {
        let args = ["--disk", image.to_str().unwrap(), "--direct", direct];
        let daemon = Daemon::serve_after("ulimit -f 32768", &args);
        let mut client = daemon.open(&small(2));
        let queue = client.queue(0);
        queue.write(0, &[1; 4096]).unwrap();
        assert!(
            io_error(queue.write(32 << 20, &[1; 4096])),
            "{direct}: EFBIG"
        );
        queue.read(32 << 20, &mut [0; 4096]).unwrap();
        queue.write(8 << 20, &[2; 4096]).unwrap();
        queue.flush().unwrap();
        drop(client);
        daemon.finish();
    }
}

fn a_truncated_file_fails_requests_beyond_its_end() {
    let scratch = Scratch::new();
    for direct in ["auto", "off"] {
        let image = scratch.image("disk", DISK);
        let daemon = Daemon::serve(&["--disk", image.to_str().unwrap(), "--direct", direct]);
        let mut client = daemon.open(&small(2));
        let queue = client.queue(0);
        queue.write(0, &[7; 8192]).unwrap();
        queue.write(40 << 20, &[7; 8192]).unwrap();
        let file = File::options().write(true).open(&image).unwrap();
        file.set_len((32 << 20) + 4096).unwrap();
        let mut back = [1; 8192];
        queue.read(0, &mut back).unwrap();
        assert!(back == [7; 8192], "{direct}: the remaining data changed");
        assert!(
            io_error(queue.read(40 << 20, &mut back)),
            "{direct}: beyond the end"
        );
        assert!(
            io_error(queue.read(32 << 20, &mut back)),
            "{direct}: across the end"
        );
        queue.read(32 << 20, &mut back[..4096]).unwrap();
        let said = "has shrunk to 33558528 bytes";
        assert!(daemon.log_has(said), "{direct}");
        // A write would make the file grow again, with zeroes in the place of the lost data.
        for range in [(60 << 20, 4096), (32 << 20, 8192), ((32 << 20) + 4096, 512)] {
            let (at, len) = range;
            assert!(
                io_error(queue.write(at, &[1; 8192][..len])),
                "{direct}: {range:?}"
            );
            let zeroes = queue.write_zeroes(at, len as u64, false);
            assert!(io_error(zeroes), "{direct}: {range:?}");
        }
        assert_eq!(
            file.metadata().unwrap().len(),
            (32 << 20) + 4096,
            "{direct}"
        );
        assert!(
            io_error(queue.read(40 << 20, &mut back)),
            "{direct}: the lost range must still fail"
        );
        queue.write((32 << 20) + 3584, &[1; 512]).unwrap();
        for _ in 0..3 {
            daemon.signal(Signal::HUP);
            std::thread::sleep(Duration::from_millis(10));
        }
        let missing = (64 << 20) - ((32 << 20) + 4096);
        let unchanged = format!("SIGHUP received: {missing} bytes are still missing at its end");
        assert!(daemon.log_has(&unchanged), "{direct}: {}", daemon.log());
        assert_eq!(daemon.log().matches(said).count(), 1, "{direct}: once");
        file.set_len(DISK).unwrap();
        assert!(
            wait_until(|| queue.read(40 << 20, &mut back).is_ok()),
            "{direct}: grown again"
        );
        assert!(back == [0; 8192], "{direct}: grown again");
        assert!(
            daemon.log_has("is as large as before again"),
            "{direct}: {}",
            daemon.log()
        );
        exercise(&mut client).unwrap();
        drop(client);
        daemon.finish();
    }
}

/// The daemon's own writes change the file too, which must not hide a change by another program.
fn a_leg_cut_while_the_disk_is_busy_does_not_grow_again() {
    for legs in [1, 2] {
        let scratch = Scratch::new();
        let names = ["a", "b"].map(|name| scratch.image(name, DISK));
        let mut args: Vec<&str> = Vec::new();
        for name in &names[..legs] {
            args.extend(["--disk", name.to_str().unwrap()]);
        }
        if legs > 1 {
            args.extend(["--stripe", "64K", "--stripe-raw"]);
        }
        let daemon = Daemon::serve(&args);
        let mut client = daemon.open(&small(1));
        let queue = client.queue(0);
        let last = &names[legs - 1];
        let end = DISK * legs as u64;
        queue.write(0, &[7; 4096]).unwrap();
        run("truncate", &["-s", "32M", last.to_str().unwrap()]).unwrap();
        let noticed = wait_until(|| {
            // Inside the remaining range, so that the disk is busy.
            queue.write(0, &[7; 4096]).unwrap();
            daemon.log().contains("has shrunk to 33554432 bytes")
        });
        assert!(noticed, "{}", daemon.log());
        assert!(io_error(queue.write(end - 4096, &[7; 4096])), "{legs} legs");
        assert_eq!(last.metadata().unwrap().len(), 32 << 20, "{legs} legs");
        run("truncate", &["-s", "64M", last.to_str().unwrap()]).unwrap();
        let grown = wait_until(|| queue.write(end - 4096, &[7; 4096]).is_ok());
        assert!(grown, "{legs} legs: {}", daemon.log());
        drop(client);
        daemon.finish();
    }
}

fn a_replaced_or_deleted_file_is_still_served() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    let mut client = daemon.open(&small(2));
    client.queue(0).write(0, &[5; 4096]).unwrap();
    let other = scratch.image("other", 1 << 20);
    std::fs::rename(&other, &image).unwrap();
    let mut back = [0; 4096];
    client.queue(0).read(0, &mut back).unwrap();
    assert!(back == [5; 4096]);
    client.queue(0).write(4096, &[6; 4096]).unwrap();
    client.queue(0).flush().unwrap();
    std::fs::remove_file(&image).unwrap();
    client.queue(0).read(4096, &mut back).unwrap();
    assert!(back == [6; 4096]);
    assert_eq!(client.refresh_config().unwrap().capacity_bytes(), DISK);
    exercise(&mut client).unwrap();
    drop(client);
    assert_serves(&daemon).unwrap();
    daemon.finish();
}

fn a_device_set_read_only_refuses_writes_until_it_is_not() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let device = LoopDevice::attach(&image).unwrap();
    let path = device.path.to_str().unwrap();
    let daemon = Daemon::serve(&["--disk", path]);
    let mut client = daemon.open(&small(2));
    exercise(&mut client).unwrap();
    run("blockdev", &["--setro", path]).unwrap();
    let refused = client.queue(0).write(0, &[1; 4096]);
    client.queue(1).read(0, &mut [0; 4096]).unwrap();
    run("blockdev", &["--setrw", path]).unwrap();
    assert!(io_error(refused));
    exercise(&mut client).unwrap();
    drop(client);
    daemon.finish();
    run("blockdev", &["--setro", path]).unwrap();
    let socket = scratch.join("socket");
    let ended = run_to_exit(&[
        "serve",
        "--socket-path",
        socket.to_str().unwrap(),
        "--disk",
        path,
    ]);
    assert_eq!(
        (ended.code, ended.stderr.lines().count()),
        (Some(2), 1),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.contains("--read-only"), "{}", ended.stderr);
    let daemon = Daemon::serve(&["--disk", path, "--read-only"]);
    let mut client = daemon.open(&small(1));
    assert!(client.offered() & feature::RO != 0);
    client.queue(0).read(0, &mut [0; 4096]).unwrap();
    drop(client);
    daemon.finish();
}

fn a_loop_device_whose_file_is_cut_gives_errors() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let device = LoopDevice::attach_with(&image, &["--direct-io=on"]).unwrap();
    let daemon = Daemon::serve(&["--disk", device.path.to_str().unwrap()]);
    let mut client = daemon.open(&small(2));
    client.queue(0).write(0, &[3; 4096]).unwrap();
    client.queue(0).flush().unwrap();
    File::options()
        .write(true)
        .open(&image)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let mut back = [0; 4096];
    client.queue(0).read(0, &mut back).unwrap();
    assert!(back == [3; 4096]);
    // The kernel fails or zero-fills a read beyond the end of a loop device's file; neither may hang or kill the
    // daemon.
    let _ = client.queue(0).read(32 << 20, &mut back);
    client.queue(1).read(0, &mut back).unwrap();
    // Detached while it is open: the kernel removes it when we close it.
    // After that its number may be another test's.
    drop(device);
    client.queue(1).read(0, &mut back).unwrap();
    drop(client);
    daemon.finish();
}

/// A separate file system with an image on it, to be frozen.
fn freezable(scratch: &Scratch) -> (Mount, std::path::PathBuf) {
    let mount = Mount::ext4(scratch, 128 << 20).unwrap();
    let image = mount.path().join("disk");
    File::create(&image).unwrap().set_len(DISK).unwrap();
    (mount, image)
}

/// Time limit for the daemon's exit: its deadline of two seconds, and a moment to log it.
const END_MAX: Duration = Duration::from_millis(2500);

/// Starts a write that never completes, checks that everything else still works, and sends SIGTERM.
fn hang_and_end(daemon: &mut Daemon, at: &Path) -> (Freeze, Client, Stopwatch) {
    let mut client = daemon.open(&small(2));
    exercise(&mut client).unwrap();
    client.queue(0).flush().unwrap();
    let freeze = Freeze::new(at);
    client.queue(0).set_timeout(Duration::from_millis(500));
    let stuck = client.queue(0).write(1 << 20, &[1; 4096]);
    assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
    client.refresh_config().unwrap();
    daemon.signal(Signal::TERM);
    (freeze, client, Stopwatch::start())
}

fn a_hanging_device_does_not_delay_the_exit() {
    let scratch = Scratch::new();
    let (mount, image) = freezable(&scratch);
    // The file of a loop device on a frozen file system: the device never answers, like a storage path that is lost.
    let device = LoopDevice::attach(&image).unwrap();
    let mut daemon = Daemon::serve(&["--disk", device.path.to_str().unwrap()]);
    let (freeze, client, _) = hang_and_end(&mut daemon, mount.path());
    let ended = daemon.wait();
    let log = daemon.log();
    drop(freeze);
    match ended {
        Some((Some(1), took)) if took < END_MAX => {}
        other => panic!("{other:?}\n{log}"),
    }
    let said = format!("{}: 1 request is lost", device.path.display());
    assert!(log.contains(&said), "{said:?} is not in:\n{log}");
    drop((client, device));
}

fn a_hanging_file_system_delays_the_exit_only_as_long_as_the_kernel_must() {
    let scratch = Scratch::new();
    let (mount, image) = freezable(&scratch);
    let mut daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    let (freeze, client, asked) = hang_and_end(&mut daemon, mount.path());
    // A thread in uninterruptible sleep inside the file system cannot be killed. Soon after two seconds the program
    // must have done everything that it can: logged the loss, closed its socket, and started to exit.
    assert!(daemon.log_has("1 request is lost"), "{}", daemon.log());
    assert!(asked.elapsed() < END_MAX && !daemon.socket().exists());
    drop(freeze);
    let ended = daemon.wait();
    assert!(
        matches!(ended, Some((Some(1), _))),
        "{ended:?}\n{}",
        daemon.log()
    );
    drop(client);
}

/// A lost server does not answer a size query either, and the daemon queries the size whenever the file may have
/// grown.
fn an_unresponsive_file_system_does_not_delay_the_exit() {
    if std::env::var("ASAN_OPTIONS").is_ok_and(|options| options.contains("detect_leaks=1")) {
        return ignored("the leak checker waits for the thread that is blocked in the kernel");
    }
    let scratch = Scratch::new();
    let mute = UnresponsiveFs::mount(&scratch, DISK).unwrap();
    let disk = mute.file();
    let mut daemon = Daemon::serve(&["--disk", disk.to_str().unwrap(), "--read-only"]);
    let mut client = daemon.open(&small(1));
    client.queue(0).read(0, &mut [1; 4096]).unwrap();
    drop(client);
    mute.stop_answering();
    for _ in 0..3 {
        daemon.signal(Signal::HUP);
        std::thread::sleep(Duration::from_millis(50));
    }
    // Frontends can still connect and disconnect.
    drop(daemon.open(&small(1)));
    daemon.signal(Signal::TERM);
    match daemon.wait() {
        Some((Some(0), took)) if took < Duration::from_secs(2) => {}
        other => {
            // Nothing can end it before that.
            drop(mute);
            panic!("{other:?}\n{}", daemon.log());
        }
    }
}

/// A frozen file system, thawed when dropped.
struct Freeze {
    at: std::path::PathBuf,
}

impl Freeze {
    fn new(at: &Path) -> Freeze {
        run("fsfreeze", &["-f", at.to_str().unwrap()]).unwrap();
        Freeze { at: at.to_owned() }
    }
}

impl Drop for Freeze {
    fn drop(&mut self) {
        let _ = run("fsfreeze", &["-u", self.at.to_str().unwrap()]);
    }
}

fn a_disk_that_recovers_completes_its_requests() {
    let scratch = Scratch::new();
    let (mount, image) = freezable(&scratch);
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    let mut client = daemon.open(&small(2));
    exercise(&mut client).unwrap();
    let freeze = Freeze::new(mount.path());
    let thaw = std::thread::scope(|scope| {
        let write = scope.spawn(|| client.queue(0).write(0, &[9; 8192]));
        std::thread::sleep(Duration::from_millis(300));
        drop(freeze);
        write.join().unwrap()
    });
    thaw.unwrap();
    let mut back = [0; 8192];
    client.queue(1).read(0, &mut back).unwrap();
    assert!(back == [9; 8192]);
    drop(client);
    daemon.finish();
}

/// A write that hangs keeps the memory that it was submitted in mapped, and no other.
fn memory_is_plugged_and_unplugged_while_the_disk_hangs() {
    let scratch = Scratch::new();
    let (mount, image) = freezable(&scratch);
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    let mut client = daemon.open(&small(2));
    exercise(&mut client).unwrap();
    let freeze = Freeze::new(mount.path());
    client.queue(0).set_timeout(Duration::from_millis(500));
    let stuck = client.queue(0).write(1 << 20, &[1; 4096]);
    assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
    let plugged: File = memfd_create("plugged", MemfdFlags::CLOEXEC).unwrap().into();
    plugged.set_len(1 << 20).unwrap();
    let region = RegionBytes {
        guest_addr: 1 << 40,
        len_bytes: 1 << 20,
        user_addr: 1 << 44,
        file_offset: 0,
    };
    let frontend = client.frontend();
    for _ in 0..3 {
        frontend.add_mem_reg(region, plugged.as_fd()).unwrap();
        frontend.rem_mem_reg(region, None).unwrap();
    }
    drop(freeze);
    drop(client);
    daemon.finish();
}

fn too_few_descriptors_are_refused_at_start() {
    for limit in [8, 64, 500, 1023] {
        let scratch = Scratch::new();
        let socket = scratch.join("socket");
        let line = format!("ulimit -n {limit}; exec \"$@\"");
        let output = std::process::Command::new("sh")
            .args(["-c", &line, "sh"])
            .arg(cleave_tests::program_path())
            .args(["serve", "--disk", "ram:64M", "--socket-path"])
            .arg(&socket)
            .output()
            .unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "limit {limit}: {message}");
        assert_eq!(message.lines().count(), 1, "limit {limit}: {message}");
        assert!(
            message.contains(&format!("at most {limit} files")),
            "{message}"
        );
        assert!(!message.contains("--queues"), "would not help: {message}");
        assert!(!socket.exists(), "limit {limit}: a socket file remains");
    }
    // On a machine of many CPUs too. Connections of sockets that were not asked for do not count.
    let many = ["--disk", "ram:64M", "--queues", "64", "--workers", "64"];
    let daemon = Daemon::serve_after("ulimit -n 1024", &many);
    exercise(&mut daemon.open(&small(2))).unwrap();
    daemon.finish();
}

/// The reported number of descriptors is exactly enough for every vring and worker.
fn descriptors_are_counted_for_all_vrings_and_workers() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let args = [
        "--disk",
        image.to_str().unwrap(),
        "--queues",
        "256",
        "--workers",
        "64",
    ];
    let socket = scratch.join("socket");
    let start = ["serve", "--socket-path", socket.to_str().unwrap()];
    let output = std::process::Command::new("sh")
        .args(["-c", "ulimit -n 1024; exec timeout 120 \"$@\"", "sh"])
        .arg(cleave_tests::program_path())
        .args(start.iter().chain(&args))
        .output()
        .unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    let needed = message
        .split_once("and ")
        .and_then(|(_, rest)| rest.split_once(" are needed"))
        .unwrap_or_else(|| panic!("{message}"))
        .0;
    let daemon = Daemon::serve_after(&format!("ulimit -n {needed}"), &args);
    // Eventfds that block take the most.
    let mut client = daemon.open(&cleave_client::DeviceOptions {
        data_bytes: 16 << 10,
        call: Notifier::Blocking,
        ..small(256)
    });
    for index in 0..256 {
        let err = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let set = client.frontend().set_vring_err(index, Some(err.as_fd()));
        set.unwrap();
    }
    println!("{needed} reported as needed, {} open", daemon.fds());
    assert!(
        !daemon.log().contains("cannot notify the guest"),
        "{}",
        daemon.log_tail()
    );
    for queue in client.queues() {
        queue.read(0, &mut [0; 4096]).unwrap();
    }
    drop(client);
    daemon.finish();
}

fn no_locked_memory_is_needed() {
    let daemon = Daemon::serve_after("ulimit -l 0", &["--disk", "ram:64M"]);
    exercise(&mut daemon.open(&small(4))).unwrap();
    daemon.finish();
}

fn flushed_data_survives_a_killed_program() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let mut random = seeded("killed program");
    let bytes = random.bytes(1 << 20);
    let mut daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    for round in 0..5u64 {
        if round > 0 {
            // At the same socket, so that it waits for what the one before has in flight.
            daemon = daemon.start_again().unwrap();
        }
        let mut client = daemon.open(&small(2));
        let mut back = vec![0; 1 << 20];
        for before in 0..round {
            client.queue(0).read(before << 20, &mut back).unwrap();
            assert!(
                back == bytes,
                "round {round}: the write of round {before} is lost"
            );
        }
        client.queue(0).write(round << 20, &bytes).unwrap();
        client.queue(0).flush().unwrap();
        daemon.abandon();
    }
}
