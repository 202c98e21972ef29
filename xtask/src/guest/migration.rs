//! A guest that writes and verifies moves to another QEMU with another daemon, and back; moves are cancelled, and fail after
//! the guest was stopped. Its QEMU never connects again: a connection that is reset ends the guest's disk.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use cleave_rig::daemon::{DaemonProcess, has_listener};
use cleave_rig::guest::{Machine, Monitor};
use cleave_rig::{Result, words};
use serde_json::{Value, json};

use super::backend::{self, DaemonMode};
use super::bench::{BOOT_LIMIT, Bench};

const SCRIPT: &str = include_str!("scripts/fio.sh");
/// Fast enough to end, and slow enough to be cancelled before.
const FAST_BYTES: u64 = 1 << 30;
const SLOW_BYTES: u64 = 8 << 20;
/// Has the new QEMU map the memory of the old one.
const SHARED: &str = "-machine aux-ram-share=on";

/// A QEMU with its guest, or one that waits for a guest.
struct Guest {
    machine: Machine,
    monitor: PathBuf,
}

/// The guest as it runs now, and where it may go.
struct Journey<'a, 'b> {
    bench: &'a mut Bench<'b>,
    daemons: Vec<DaemonProcess>,
    /// The daemon that serves the guest.
    here: usize,
    guest: Guest,
    /// QEMUs started so far.
    started: usize,
    /// Milliseconds in which the guest did not run, as QEMU says.
    downtimes: Vec<u64>,
}

/// Two daemons with one image, between which the guest moves.
pub(super) fn run(bench: &mut Bench<'_>) -> Result {
    travel(bench, "moved", 2, "")
}

/// One daemon, on which one QEMU follows the other.
pub(super) fn upgrade(bench: &mut Bench<'_>) -> Result {
    travel(bench, "upgraded", 1, SHARED)
}

fn travel(bench: &mut Bench<'_>, boot: &str, daemons: usize, option: &str) -> Result {
    bench.empty_image()?;
    let initramfs = bench.folder.join("initramfs");
    bench.write_initramfs(&initramfs, SCRIPT, boot)?;
    let serve = |number: usize| {
        let folder = bench.folder.join(format!("host{number}"));
        std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
        backend::start(bench, &folder, DaemonMode::Inactive)
    };
    let daemons: Vec<_> = (0..daemons).map(serve).collect::<Result<_>>()?;
    let guest = start(bench, &daemons[0], 0, option.split_whitespace())?;
    let mut journey = Journey {
        bench,
        daemons,
        here: 0,
        guest,
        started: 1,
        downtimes: Vec::new(),
    };
    let checks = loop {
        let Some((mark, values)) = journey.guest.machine.mark()? else {
            break journey.guest.machine.off()?;
        };
        match &*mark {
            "move" => journey.go()?,
            "cancel" => journey.cancel()?,
            "roll-back" => journey.roll_back()?,
            "upgrade" => journey.upgrade()?,
            "note" => println!("{}: {values}", journey.bench.name),
            _ => return Err(format!("the guest asks for `{mark}`")),
        }
        journey.guest.machine.allow(BOOT_LIMIT);
        journey.guest.machine.say("\n")?;
    };
    journey.bench.checks.extend(checks);
    journey.downtimes.sort_unstable();
    if let Some(median) = journey.downtimes.get(journey.downtimes.len() / 2) {
        let (count, most) = (journey.downtimes.len(), journey.downtimes.last());
        println!(
            "{}: {count} moves, the guest stood still for {median} ms in the median, for {} ms at most",
            journey.bench.name,
            most.unwrap_or(median)
        );
    }
    journey
        .daemons
        .into_iter()
        .try_for_each(DaemonProcess::stop)
}

/// Starts a QEMU with a monitor, whose disk a daemon serves.
fn start<'a>(
    bench: &Bench<'_>,
    daemon: &DaemonProcess,
    number: usize,
    options: impl Iterator<Item = &'a str>,
) -> Result<Guest> {
    let monitor = bench.folder.join(format!("qemu{number}.sock"));
    let mut words = vec![
        bench.disk_at(&daemon.socket),
        bench.linux(&bench.folder.join("initramfs"), ""),
        Monitor::option(&monitor),
    ];
    words.push(options.map(str::to_owned).collect());
    let machine = bench.machine(&format!("qemu{number}"), &words, BOOT_LIMIT)?;
    Ok(Guest { machine, monitor })
}

impl Guest {
    fn until(&self, is_so: impl Fn() -> bool) -> Result {
        let end = Instant::now() + BOOT_LIMIT;
        while !is_so() {
            if Instant::now() > end {
                return Err("the new QEMU does not listen".to_owned());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Journey<'_, '_> {
    /// Starts a QEMU that waits for the guest, on this daemon.
    fn target(&mut self, daemon: usize, options: &[String]) -> Result<Guest> {
        let number = self.started;
        self.started += 1;
        let options = options.iter().map(String::as_str);
        start(self.bench, &self.daemons[daemon], number, options)
    }

    /// Returns a QEMU on the other daemon that waits for the guest, and its monitor.
    fn other(&mut self) -> Result<(Guest, Monitor)> {
        let other = (self.here + 1) % self.daemons.len();
        let target = self.target(other, &words("-incoming defer", &[]))?;
        let mut monitor = Monitor::connect(&target.monitor)?;
        // Without a way back, a target that fails at the end leaves a guest that runs nowhere.
        able(&mut monitor, "return-path", true)?;
        monitor.ask("migrate-incoming", json!({"uri": self.way()}))?;
        Ok((target, monitor))
    }

    fn way(&self) -> String {
        format!("unix:{}", self.bench.folder.join("way.sock").display())
    }

    /// Returns the monitor of the guest's QEMU, which has begun to move it at this speed.
    fn begin(&self, bytes: u64) -> Result<Monitor> {
        let mut monitor = Monitor::connect(&self.guest.monitor)?;
        able(&mut monitor, "return-path", true)?;
        monitor.ask("migrate-set-parameters", json!({"max-bandwidth": bytes}))?;
        monitor.ask("migrate", json!({"uri": self.way()}))?;
        Ok(monitor)
    }

    /// Moves the guest to the other daemon.
    fn go(&mut self) -> Result {
        let (target, arrived) = self.other()?;
        let source = self.begin(FAST_BYTES)?;
        self.arrive(target, source, arrived)?;
        self.here = (self.here + 1) % self.daemons.len();
        Ok(())
    }

    /// Waits until the guest runs in its new QEMU, and ends the old one.
    fn arrive(&mut self, target: Guest, mut source: Monitor, mut arrived: Monitor) -> Result {
        ended(&mut source, "completed")?;
        arrived.wait("query-status", "status", &["running"])?;
        let told = source.ask("query-migrate", json!({}))?;
        self.downtimes
            .extend(told.get("downtime").and_then(Value::as_u64));
        let before = std::mem::replace(&mut self.guest, target);
        self.bench.checks.extend(before.machine.kill()?);
        Ok(())
    }

    /// Cancels a move while the guest's memory is copied.
    fn cancel(&mut self) -> Result {
        let (target, _arrived) = self.other()?;
        let mut source = self.begin(SLOW_BYTES)?;
        source.wait("query-migrate", "status", &["active"])?;
        source.ask("migrate_cancel", json!({}))?;
        ended(&mut source, "cancelled")?;
        drop(target.machine);
        source
            .wait("query-status", "status", &["running"])
            .map(drop)
    }

    /// Ends the target when the guest was stopped for it, so that the guest goes on where it was.
    fn roll_back(&mut self) -> Result {
        let (target, _arrived) = self.other()?;
        let mut source = Monitor::connect(&self.guest.monitor)?;
        able(&mut source, "pause-before-switchover", true)?;
        drop(source);
        let mut source = self.begin(FAST_BYTES)?;
        source.wait("query-migrate", "status", &["pre-switchover"])?;
        drop(target.machine);
        source.ask("migrate-continue", json!({"state": "pre-switchover"}))?;
        ended(&mut source, "failed")?;
        source.wait("query-status", "status", &["running"])?;
        able(&mut source, "pause-before-switchover", false)
    }

    /// Replaces the guest's QEMU by another one on the same daemon, which takes over the guest's memory as it is.
    fn upgrade(&mut self) -> Result {
        let folder = &self.bench.folder;
        let [way, files] = ["way.sock", "files.sock"].map(|name| folder.join(name));
        let channel = |kind: &str, path: &PathBuf| {
            let address = json!({"transport": "socket", "type": "unix", "path": path});
            json!({"channel-type": kind, "addr": address})
        };
        let [main, files_channel] = [channel("main", &way), channel("cpr", &files)];
        let line = format!("{SHARED} -incoming unix:{{}} -incoming {{}}");
        let options = words(&line, &[&way.display(), &files_channel]);
        let _ = std::fs::remove_file(&files);
        let target = self.target(self.here, &options)?;
        let mut source = Monitor::connect(&self.guest.monitor)?;
        source.ask("migrate-set-parameters", json!({"mode": "cpr-transfer"}))?;
        // The new QEMU opens its monitor after it has got the files.
        target.until(|| has_listener(&files))?;
        source.ask("migrate", json!({"channels": [main, files_channel]}))?;
        let arrived = Monitor::connect(&target.monitor)?;
        self.arrive(target, source, arrived)
    }
}

/// Switches a capability of moving.
fn able(monitor: &mut Monitor, capability: &str, state: bool) -> Result {
    let capabilities = json!([{"capability": capability, "state": state}]);
    let asked = json!({"capabilities": capabilities});
    monitor.ask("migrate-set-capabilities", asked).map(drop)
}

/// Waits until a move has ended, in this way.
fn ended(monitor: &mut Monitor, how: &str) -> Result {
    let ends = ["completed", "cancelled", "failed"];
    let found = monitor.wait("query-migrate", "status", &ends)?;
    match found == how {
        true => Ok(()),
        false => {
            let told = monitor.ask("query-migrate", json!({}))?;
            Err(format!("the move ended as {found}, not {how}: {told}"))
        }
    }
}
