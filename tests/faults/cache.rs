//! A guest that has switched its write cache off sends no flush any more. Whichever daemon it meets, each write has to be durable when
//! it completes. QEMU neither repeats the mode nor reads it again when it connects to the next daemon.

use std::path::{Path, PathBuf};

use cleave_client::message::protocol;
use cleave_client::{Base, Client, DeviceOptions, Error};
use cleave_tests::{
    Case, Daemon, LoopDevice, Messages as _, Node, Requirement, Scratch, UnresponsiveFs, connect,
    outliving, wait_until,
};
use rustix::process::Signal;
use serde_json::json;

const DISK: u64 = 1 << 20;
const BLOCK: usize = 4096;
const WCE_AT: u32 = 32;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        what_was_answered_is_durable_when_the_cache_is_off: Requirement::Fuse,
        a_flush_that_fails_when_the_cache_is_switched_off_fails_the_next_write: Requirement::LoopDevices,
        a_cache_that_is_off_stays_off_after_a_kill: Requirement::Fuse,
        a_cache_that_is_off_stays_off_after_a_stop: Requirement::Fuse,
        a_cache_that_is_off_stays_off_when_a_disk_of_a_node_is_added_again: Requirement::Fuse,
        a_cache_that_is_off_stays_off_if_a_daemon_between_had_no_frontend: Requirement::Fuse,
        a_cache_that_is_off_stays_off_after_a_take_over: Requirement::Fuse,
        a_cache_that_is_on_again_stays_on: Requirement::Fuse,
        a_guest_that_starts_anew_has_the_mode_of_the_option: Requirement::Fuse,
    ]
}

/// A file through the page cache, whose server counts syncs.
struct Disk(UnresponsiveFs);

impl Disk {
    fn mount() -> Disk {
        Disk(UnresponsiveFs::mount(&Scratch::new(), DISK).unwrap())
    }

    fn path(&self) -> String {
        self.0.file().display().to_string()
    }

    fn serve(&self) -> Daemon {
        self.serve_direct("off")
    }

    fn serve_direct(&self, direct: &str) -> Daemon {
        Daemon::serve(&["--direct", direct, "--disk", &self.path()])
    }

    /// Returns true if a write of this guest was on stable storage when it was answered.
    fn is_synced_by(&self, client: &mut Client) -> bool {
        let before = self.0.syncs();
        client.queue(0).write(0, &[b'A'; BLOCK]).unwrap();
        self.0.syncs() > before
    }
}

/// Connects as QEMU does: it has read the configuration from the first daemon.
fn go_on(client: &mut Client, socket: &Path) {
    let options = DeviceOptions {
        protocol_features: outliving().protocol_features & !protocol::CONFIG,
        ..outliving()
    };
    connect(|| client.reconnect(socket, &options, Base::Used));
}

fn switch(client: &mut Client, mode: u8) {
    client.frontend().set_config(WCE_AT, &[mode]).unwrap();
}

fn lock_of(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    path.into()
}

/// Kills a daemon and starts the next one.
fn kill(mut daemon: Daemon) -> Daemon {
    let next = daemon.succeed().unwrap();
    daemon.abandon();
    next
}

/// Stops a daemon in order. Its folder stays.
fn end(daemon: &mut Daemon) {
    daemon.signal(Signal::TERM);
    let ended = daemon.wait();
    assert!(
        matches!(ended, Some((Some(0), _))),
        "{ended:?}\n{}",
        daemon.log_tail()
    );
}

/// Stops a daemon in order and starts the next one.
fn stop(mut daemon: Daemon) -> Daemon {
    end(&mut daemon);
    daemon.start_again().unwrap()
}

/// Linux sends no flush for what it has written before, neither when it switches nor later.
fn what_was_answered_is_durable_when_the_cache_is_off() {
    for direct in ["off", "on"] {
        let disk = Disk::mount();
        let daemon = disk.serve_direct(direct);
        let mut client = daemon.open(&outliving());
        for _ in 0..2 {
            client.queue(0).write(0, &[b'A'; BLOCK]).unwrap();
            let before = disk.0.syncs();
            switch(&mut client, 0);
            let switched = disk.0.syncs();
            assert_eq!(switched, before + 1, "{direct}: {}", daemon.log());
            switch(&mut client, 0);
            assert_eq!(disk.0.syncs(), switched, "it was off already");
            switch(&mut client, 1);
        }
        // A kill after the note and before the flush: the next daemon cannot know if it was done.
        switch(&mut client, 0);
        let before = disk.0.syncs();
        let next = kill(daemon);
        go_on(&mut client, next.socket());
        // It has started the vring.
        client.queue(0).read(0, &mut [0; BLOCK]).unwrap();
        assert_eq!(disk.0.syncs(), before + 1, "{direct}: {}", next.log());
        drop(client);
        next.finish();
    }
}

/// No answer tells the guest of it, and past the page cache a later write is durable by itself.
fn a_flush_that_fails_when_the_cache_is_switched_off_fails_the_next_write() {
    let disk = Disk::mount();
    // Past the page cache, and not a file of FUSE, whose durable writes end with an fsync in any case.
    let device = LoopDevice::attach_with(&disk.0.file(), &["--direct-io=on"]).unwrap();
    let path = device.path.display().to_string();
    let args = ["--direct", "on", "--disk", &path, "--take-over"];
    let (mut daemon, _) = Daemon::serve_with_control(&args);
    let mut client = daemon.open(&outliving());
    client.queue(0).write(0, &[b'A'; BLOCK]).unwrap();
    disk.0.fail_flush();
    switch(&mut client, 0);
    let is_told = || daemon.log_has("has switched its write cache off, but");
    assert!(wait_until(is_told), "{}", daemon.log());
    client.queue(0).read(0, &mut [0; BLOCK]).unwrap();
    let written = client.queue(0).write(0, &[b'B'; BLOCK]);
    let failed = matches!(written, Err(Error::Status { status: 1, .. }));
    assert!(failed, "{written:?}: {}", daemon.log());
    // It was told, in this process and in the next.
    client.queue(0).write(0, &[b'B'; BLOCK]).unwrap();
    let next = daemon.start_again().unwrap();
    assert!(matches!(daemon.wait(), Some((Some(0), _))));
    client.queue(0).write(0, &[b'B'; BLOCK]).unwrap();
    drop(client);
    next.finish();
    drop(device);
}

fn a_cache_that_is_off_stays_off_after_a_kill() {
    stays_off_in_the_next(kill);
}

fn a_cache_that_is_off_stays_off_after_a_stop() {
    stays_off_in_the_next(stop);
}

fn stays_off_in_the_next(next: fn(Daemon) -> Daemon) {
    let disk = Disk::mount();
    let mut daemon = disk.serve();
    let mut client = daemon.open(&outliving());
    assert!(!disk.is_synced_by(&mut client), "the cache is on at first");
    switch(&mut client, 0);
    assert!(disk.is_synced_by(&mut client));
    for _ in 0..2 {
        daemon = next(daemon);
        go_on(&mut client, daemon.socket());
        assert!(disk.is_synced_by(&mut client), "{}", daemon.log());
    }
    drop(client);
    daemon.finish();
}

fn a_cache_that_is_off_stays_off_if_a_daemon_between_had_no_frontend() {
    let disk = Disk::mount();
    let daemon = disk.serve();
    let mut client = daemon.open(&outliving());
    switch(&mut client, 0);
    assert!(disk.is_synced_by(&mut client));
    let mut daemon = kill(stop(kill(stop(stop(kill(daemon))))));
    go_on(&mut client, daemon.socket());
    assert!(disk.is_synced_by(&mut client), "{}", daemon.log());
    drop(client);
    let lock = lock_of(daemon.socket());
    let text = || std::fs::read_to_string(&lock).unwrap();
    assert!(text().contains("cache: is off"), "{}", text());
    end(&mut daemon);
    assert!(text().contains("cache: was off"), "{}", text());
}

fn a_cache_that_is_off_stays_off_when_a_disk_of_a_node_is_added_again() {
    for persistent in [true, false] {
        let disk = Disk::mount();
        let node = Node::start();
        let body = json!({"disk": [disk.path()], "direct": "off", "persistent": persistent});
        node.add("d", &body);
        let mut client = node.open("d", &outliving());
        switch(&mut client, 0);
        assert!(disk.is_synced_by(&mut client));
        node.remove("d");
        // Its new description may differ.
        let body =
            json!({"disk": [disk.path()], "direct": "off", "persistent": persistent, "queues": 1});
        node.add("d", &body);
        go_on(&mut client, &node.socket("d"));
        assert!(
            disk.is_synced_by(&mut client),
            "{persistent}: {}",
            node.daemon.log()
        );
        drop(client);
        node.daemon.finish();
    }
}

/// Two processes have the lock file open for a while.
fn a_cache_that_is_off_stays_off_after_a_take_over() {
    let disk = Disk::mount();
    let path = disk.path();
    let args = ["--direct", "off", "--disk", &path, "--take-over"];
    let (mut daemon, _) = Daemon::serve_with_control(&args);
    let mut client = daemon.open(&outliving());
    switch(&mut client, 0);
    assert!(disk.is_synced_by(&mut client));
    let next = daemon.start_again().unwrap();
    let ended = daemon.wait();
    assert!(matches!(ended, Some((Some(0), _))), "{ended:?}");
    assert!(disk.is_synced_by(&mut client), "{}", next.log());
    let next = kill(next);
    go_on(&mut client, next.socket());
    assert!(disk.is_synced_by(&mut client), "{}", next.log());
    drop(client);
    next.finish();
}

fn a_cache_that_is_on_again_stays_on() {
    let disk = Disk::mount();
    let mut daemon = disk.serve();
    let mut client = daemon.open(&outliving());
    switch(&mut client, 0);
    assert!(disk.is_synced_by(&mut client));
    daemon = kill(daemon);
    // Some frontends read the configuration whenever they connect. The position of its vring tells that this guest goes on.
    let options = outliving();
    connect(|| client.reconnect(daemon.socket(), &options, Base::Used));
    assert_eq!(client.refresh_config().unwrap().writeback, 0);
    assert!(disk.is_synced_by(&mut client), "{}", daemon.log());
    switch(&mut client, 1);
    assert!(!disk.is_synced_by(&mut client));
    // The note is removed after the answer to that, and before the next one.
    client.refresh_config().unwrap();
    daemon = kill(daemon);
    go_on(&mut client, daemon.socket());
    assert!(!disk.is_synced_by(&mut client), "{}", daemon.log());
    let lock = lock_of(daemon.socket());
    assert!(lock.exists());
    end(&mut daemon);
    assert!(!lock.exists(), "nothing is left to tell");
}

/// A new VMM reads from the next daemon what the mode is.
fn a_guest_that_starts_anew_has_the_mode_of_the_option() {
    let disk = Disk::mount();
    let mut daemon = disk.serve();
    let mut client = daemon.open(&outliving());
    switch(&mut client, 0);
    assert!(disk.is_synced_by(&mut client));
    daemon = kill(daemon);
    drop(client);
    let mut client = daemon.open(&outliving());
    assert_eq!(client.config().writeback, 1);
    assert!(!disk.is_synced_by(&mut client), "{}", daemon.log());
    client.refresh_config().unwrap();
    // That of the guest before is forgotten.
    daemon = kill(daemon);
    go_on(&mut client, daemon.socket());
    assert!(!disk.is_synced_by(&mut client), "{}", daemon.log());
    drop(client);
    daemon.finish();
}
