//! What the device says of itself and the guest may change: its configuration, its cache, its size.

use std::time::Duration;

use cleave_blk::spec::feature;
use cleave_client::{DeviceOptions, Error, all_are};
use cleave_tests::{
    Case, Daemon, Lateness, Messages as _, Random, Scratch, TIMEOUT, ensure, exercise, small,
    unless_late, wait_until,
};

const DISK: u64 = 64 << 20;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        discard_frees_space_on_the_host,
        the_configuration_matches_the_options,
        a_read_only_disk_reads_and_refuses_every_change,
        write_back_is_turned_off_and_on_by_the_guest,
        the_guest_is_notified_of_a_grown_image,
        sighup_checks_the_size_at_once,
    ]
}

fn discard_frees_space_on_the_host() {
    use std::os::unix::fs::MetadataExt;
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    let mut client = daemon.open(&small(1));
    client.queue(0).write(0, &vec![7; 8 << 20]).unwrap();
    client.queue(0).flush().unwrap();
    let before = std::fs::metadata(&image).unwrap().blocks();
    client.queue(0).discard(0, 8 << 20).unwrap();
    client.queue(0).flush().unwrap();
    let after = std::fs::metadata(&image).unwrap().blocks();
    assert!(
        after + (7 << 20) / 512 <= before,
        "{before} blocks, then {after}"
    );
    drop(client);
    daemon.finish();
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap(), "--discard", "off"]);
    let mut client = daemon.open(&small(1));
    // The guest sees the same device, and its discards succeed without an effect.
    client.queue(0).write(0, &vec![7; 8 << 20]).unwrap();
    client.queue(0).flush().unwrap();
    let before = std::fs::metadata(&image).unwrap().blocks();
    client.queue(0).discard(0, 8 << 20).unwrap();
    client.queue(0).flush().unwrap();
    assert_eq!(std::fs::metadata(&image).unwrap().blocks(), before);
    let mut back = vec![0; 8 << 20];
    client.queue(0).read(0, &mut back).unwrap();
    assert!(all_are(&back, 7));
    drop(client);
    daemon.finish();
}

fn the_configuration_matches_the_options() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let path = image.to_str().unwrap();
    let args = [
        "--disk",
        path,
        "--queues",
        "7",
        "--block-size",
        "4096",
        "--serial",
        "cleave-0815",
    ];
    let daemon = Daemon::serve(&args);
    let mut client = daemon.open(&small(1));
    let config = client.config().clone();
    assert_eq!(config.capacity_bytes(), DISK);
    assert_eq!(
        (config.blk_size, config.num_queues, config.writeback),
        (4096, 7, 1)
    );
    assert_eq!(
        config.seg_max, 126,
        "with header and status it fits a vring of 128 without indirect descriptors"
    );
    let needed = feature::VERSION_1
        | feature::EVENT_IDX
        | feature::INDIRECT_DESC
        | feature::MQ
        | feature::SEG_MAX
        | feature::BLK_SIZE
        | feature::TOPOLOGY
        | feature::FLUSH
        | feature::CONFIG_WCE
        | feature::DISCARD
        | feature::WRITE_ZEROES
        | feature::VHOST_USER_PROTOCOL;
    assert_eq!(client.offered() & needed, needed);
    assert_eq!(client.offered() & feature::RO, 0);
    assert_eq!(client.frontend().queue_num().unwrap(), 7);
    assert!(client.frontend().max_mem_slots().unwrap() >= 509);
    assert_eq!(client.queue(0).get_id().unwrap(), b"cleave-0815");
    drop(client);
    daemon.finish();
    let daemon = Daemon::serve(&[
        "--disk",
        path,
        "--serial",
        "twenty-characters-xx",
        "--cache",
        "writethrough",
    ]);
    let mut client = daemon.open(&small(1));
    assert_eq!(client.queue(0).get_id().unwrap(), b"twenty-characters-xx");
    assert_eq!(client.config().writeback, 0);
    drop(client);
    daemon.finish();
}

fn a_read_only_disk_reads_and_refuses_every_change() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let bytes = Random::new(4).bytes(1 << 20);
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(&image).unwrap(),
        &bytes,
        0,
    )
    .unwrap();
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap(), "--read-only"]);
    // Also from a guest that did not take the feature.
    for features in [!0, !feature::RO] {
        let mut client = daemon.open(&DeviceOptions {
            features,
            ..small(1)
        });
        assert!(client.offered() & feature::RO != 0);
        let queue = client.queue(0);
        let mut back = vec![0; 1 << 20];
        queue.read(0, &mut back).unwrap();
        assert!(back == bytes);
        for refused in [
            queue.write(0, &[1; 4096]),
            queue.discard(0, 4096),
            queue.write_zeroes(0, 4096, true),
        ] {
            assert!(
                matches!(refused, Err(Error::Status { status: 1, .. })),
                "{refused:?}"
            );
        }
        queue.flush().unwrap();
        queue.read(0, &mut back).unwrap();
        assert!(back == bytes);
    }
    assert!(std::fs::read(&image).unwrap()[..1 << 20] == bytes);
    daemon.finish();
}

fn write_back_is_turned_off_and_on_by_the_guest() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    let mut client = daemon.open(&small(2));
    for wanted in [0, 1, 0] {
        client.frontend().set_config(32, &[wanted]).unwrap();
        assert_eq!(client.refresh_config().unwrap().writeback, wanted);
        exercise(&mut client).unwrap();
    }
    drop(client);
    daemon.finish();
}

fn the_guest_is_notified_of_a_grown_image() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    let mut client = daemon.open(&small(1));
    let channel = client.frontend().open_backend_channel().unwrap();
    for bytes in [2 * DISK, 3 * DISK] {
        std::fs::File::options()
            .write(true)
            .open(&image)
            .unwrap()
            .set_len(bytes)
            .unwrap();
        assert!(
            channel.config_change(TIMEOUT).unwrap(),
            "the frontend was not notified"
        );
        assert_eq!(client.refresh_config().unwrap().capacity_bytes(), bytes);
        exercise(&mut client).unwrap();
    }
    drop(client);
    let client = daemon.open(&small(1));
    assert_eq!(client.config().capacity_bytes(), 3 * DISK);
    drop(client);
    daemon.finish();
}

/// Returns true if a line of an inotify descriptor's fdinfo describes a watch for writes (IN_MODIFY), not only for files that
/// other programs close.
fn tells_writes(line: &str) -> bool {
    let mask = line
        .split_once(" mask:")
        .map(|(_, rest)| rest.split(' ').next());
    let mask = mask
        .flatten()
        .and_then(|mask| u32::from_str_radix(mask, 16).ok());
    line.starts_with("inotify wd:") && mask.is_some_and(|mask| mask & 2 != 0)
}

/// Returns true if the daemon's inotify watches for writes now.
fn is_watching(daemon: &Daemon) -> bool {
    let process = std::path::PathBuf::from(format!("/proc/{}", daemon.pid()));
    let watching = |entry: std::fs::DirEntry| {
        let is_inotify = std::fs::read_link(entry.path())
            .is_ok_and(|to| to == std::path::Path::new("anon_inode:inotify"));
        let info = process.join("fdinfo").join(entry.file_name());
        is_inotify && std::fs::read_to_string(info).is_ok_and(|info| info.lines().any(tells_writes))
    };
    let mut descriptors = std::fs::read_dir(process.join("fd")).unwrap().flatten();
    descriptors.any(watching)
}

fn sighup_checks_the_size_at_once() {
    let scratch = Scratch::in_memory();
    let path = scratch.image("disk", DISK);
    let daemon = Daemon::serve(&["--disk", path.to_str().unwrap()]);
    let mut client = daemon.open(&small(1));
    let channel = client.frontend().open_backend_channel().unwrap();
    let image = std::fs::File::options().write(true).open(&path).unwrap();
    let mut bytes = DISK;
    let mut grow = || {
        bytes += 1 << 20;
        image.set_len(bytes).unwrap();
    };
    let is_told = || channel.config_change(TIMEOUT).unwrap();
    // The daemon does not watch the file for a second after a change. If the test takes longer than that between its
    // two changes, either the signal or the watch may notice the second one.
    let noticed = unless_late("hang-up", Duration::from_millis(500), |lateness| {
        // An earlier attempt may have left it in that second.
        assert!(wait_until(|| is_watching(&daemon)), "{}", daemon.log());
        *lateness = Lateness::start(&[daemon.pid()]);
        grow();
        assert!(is_told());
        grow();
        daemon.signal(rustix::process::Signal::HUP);
        assert!(is_told());
        ensure(!is_watching(&daemon), || {
            format!(
                "the signal did not make it check the size\n{}",
                daemon.log_tail()
            )
        })
    });
    noticed.unwrap();
    drop(client);
    daemon.finish();
}
