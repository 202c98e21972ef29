//! The cases: what is served, what boots, and what the host does meanwhile.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::backend::{self, BackendSpec, Mode};
use super::machine::{Boot, Check, Machine, MachineSpec, vhost_user_disk};
use super::{BackendKind, Lab, Outcome, boot_sector, iopoll, libvirt};
use crate::daemon::Daemon;

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 160 * MIB;
const GROWN_BYTES: u64 = 192 * MIB;
/// Of one boot. Generous: a busy machine without KVM needs a tenth of it.
pub(super) const BOOT_LIMIT: Duration = Duration::from_secs(300);

/// Of a guest and its disk: as many CPUs as vrings, and both sizes of blocks that a guest may be told.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) cpus: u32,
    pub(super) block_bytes: u32,
    /// Further options of QEMU's chardev.
    chardev: &'static str,
}

const ONE: Shape = Shape {
    cpus: 1,
    block_bytes: 512,
    chardev: "",
};
const RECONNECTING: Shape = Shape {
    chardev: ",reconnect=1",
    ..ONE
};
pub(super) const FOUR: Shape = Shape {
    cpus: 4,
    block_bytes: 4096,
    chardev: "",
};
const KILLED: Shape = Shape {
    chardev: ",reconnect=1",
    ..FOUR
};
/// Kills of the daemon under one guest; `CLEAVE_GUEST_KILLS` says otherwise.
const KILLS: u64 = 6;
/// Firmware sets up one vring of the four, and boots from blocks of 512 bytes only.
const FIRMWARE: Shape = Shape {
    block_bytes: 512,
    ..FOUR
};

/// A case by its name.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    run: fn(&Bench<'_>) -> Result<Outcome, String>,
}

/// The longest first: what starts late should be short.
pub(crate) const ALL: &[Case] = &[
    Case {
        name: "iopoll",
        run: |bench| iopoll::run(bench.lab, &bench.folder),
    },
    Case {
        name: "four-cpus",
        run: |bench| short_life(bench, FOUR).map(Outcome::Checked),
    },
    Case {
        name: "one-cpu",
        run: |bench| life(bench, ONE).map(Outcome::Checked),
    },
    Case {
        name: "killed",
        run: |bench| killed(bench, KILLED).map(Outcome::Checked),
    },
    Case {
        name: "fio-verify",
        run: |bench| verify(bench, FOUR, Mode::Plain).map(Outcome::Checked),
    },
    Case {
        name: "fio-verify-poll",
        run: |bench| verify(bench, ONE, Mode::Poll).map(Outcome::Checked),
    },
    Case {
        name: "libvirt",
        run: libvirt::run,
    },
    Case {
        name: "reconnect",
        run: |bench| reconnect(bench, RECONNECTING).map(Outcome::Checked),
    },
    Case {
        name: "firmware-boot",
        run: |bench| firmware_boot(bench).map(Outcome::Checked),
    },
];

/// A case's folder, and the lab.
pub(super) struct Bench<'a> {
    pub(super) lab: &'a Lab,
    pub(super) folder: PathBuf,
}

/// Runs a case; an error where a check did not pass, or none was made.
pub(crate) fn run(lab: &Lab, case: &Case) -> Result<Outcome, String> {
    let folder = lab.folder.join(case.name);
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let outcome = (case.run)(&Bench { lab, folder })?;
    let Outcome::Checked(checks) = &outcome else {
        return Ok(outcome);
    };
    let failed: Vec<String> = checks
        .iter()
        .filter_map(|(name, result)| result.as_ref().err().map(|why| format!("  {name}: {why}")))
        .collect();
    match (failed.is_empty(), checks.len()) {
        (true, 0) => Err("no check was made".to_owned()),
        (true, _) => Ok(outcome),
        (false, count) => Err(format!(
            "{} of {count} checks failed:\n{}",
            failed.len(),
            failed.join("\n")
        )),
    }
}

/// The firmware reads from the disk, with vring 0 alone and no interrupts.
fn firmware_boot(bench: &Bench<'_>) -> Result<Vec<Check>, String> {
    let image = bench.folder.join("disk.img");
    std::fs::write(&image, boot_sector::image(4 << 20)).map_err(|error| error.to_string())?;
    let daemon = bench.serve(&image, FIRMWARE, Mode::Plain)?;
    let mut machine = bench.machine(&daemon, "firmware", FIRMWARE, Boot::Disk)?;
    machine.expect_text(boot_sector::GREETING)?;
    machine.kill()?;
    daemon.stop()?;
    Ok(vec![("second-sector".to_owned(), Ok(()))])
}

/// The whole life of a disk, through a reboot, a restart, a crash of the frontend, and read-only.
fn life(bench: &Bench<'_>, shape: Shape) -> Result<Vec<Check>, String> {
    let image = bench.empty_image()?;
    let daemon = bench.serve(&image, shape, Mode::Plain)?;
    let mut checks = live(bench, &daemon, &image, shape)?;

    let script = include_str!("scripts/crash.sh");
    let mut machine = bench.linux(&daemon, "crash", shape, script)?;
    machine.expect("busy")?;
    // Not luck but load: there are always writes in flight by then.
    std::thread::sleep(Duration::from_secs(2));
    checks.extend(machine.kill()?);

    let script = include_str!("scripts/recover.sh");
    checks.extend(bench.linux(&daemon, "recover", shape, script)?.finish()?);
    daemon.stop()?;

    let before = bench.sum(&image)?;
    let daemon = bench.serve(&image, shape, Mode::ReadOnly)?;
    let script = include_str!("scripts/readonly.sh");
    checks.extend(bench.linux(&daemon, "readonly", shape, script)?.finish()?);
    daemon.stop()?;
    let same = if bench.sum(&image)? == before {
        Ok(())
    } else {
        Err("it changed".to_owned())
    };
    checks.push(("read-only-image-untouched".to_owned(), same));
    Ok(checks)
}

/// The life without its violent part, which knows nothing of the number of CPUs and the size of blocks.
fn short_life(bench: &Bench<'_>, shape: Shape) -> Result<Vec<Check>, String> {
    let image = bench.empty_image()?;
    let daemon = bench.serve(&image, shape, Mode::Plain)?;
    let checks = live(bench, &daemon, &image, shape)?;
    daemon.stop()?;
    Ok(checks)
}

/// The first two boots of a disk, which are one QEMU.
fn live(
    bench: &Bench<'_>,
    daemon: &Daemon,
    image: &Path,
    shape: Shape,
) -> Result<Vec<Check>, String> {
    let mut checks = Vec::new();
    let mut machine = bench.linux(daemon, "life", shape, include_str!("scripts/life.sh"))?;
    machine.expect("queues-touched")?;
    checks.extend(worker_per_vring(bench, daemon, shape)?);
    machine.answer()?;

    machine.expect("before-trim")?;
    let before = allocated(image)?;
    machine.answer()?;
    machine.expect("after-trim")?;
    let after = allocated(image)?;
    // The ballast has 16 MiB; ext4 may keep a few blocks of them.
    let shrunk = match before.checked_sub(after) {
        Some(freed) if freed > 12 * MIB => Ok(()),
        _ => Err(format!("{before} bytes before, {after} after")),
    };
    checks.push(("fstrim-shrinks-image".to_owned(), shrunk));
    machine.answer()?;

    machine.expect("resize")?;
    if backend::can_grow(bench.lab.kind) {
        grow(image)?;
        daemon.look_again()?;
    }
    machine.expect("rebooting")?;
    machine.expect("second-boot")?;
    checks.extend(machine.finish()?);
    Ok(checks)
}

/// The daemon ends in order and a new one takes its place, twice: while the guest is idle, and in the middle of
/// its writes. QEMU connects again by itself, and the guest notices a pause.
fn reconnect(bench: &Bench<'_>, shape: Shape) -> Result<Vec<Check>, String> {
    let image = bench.empty_image()?;
    let mut daemon = bench.serve(&image, shape, Mode::Plain)?;
    let mut machine = bench.linux(
        &daemon,
        "reconnect",
        shape,
        include_str!("scripts/reconnect.sh"),
    )?;
    for mark in ["idle", "busy"] {
        machine.expect(mark)?;
        daemon.stop()?;
        // The guest goes on with no daemon there: what it asks for waits in its vrings.
        machine.answer()?;
        machine.expect("waiting")?;
        daemon = bench.serve(&image, shape, Mode::Plain)?;
    }
    let checks = machine.finish()?;
    daemon.stop()?;
    Ok(checks)
}

/// The daemon is killed and started again, and fio sees nothing but pauses.
fn killed(bench: &Bench<'_>, shape: Shape) -> Result<Vec<Check>, String> {
    let kills = std::env::var("CLEAVE_GUEST_KILLS").ok();
    let kills = kills.map_or(Ok(KILLS), |text| text.parse());
    let kills = kills.map_err(|error| format!("CLEAVE_GUEST_KILLS: {error}"))?;
    let image = bench.empty_image()?;
    let mut daemon = bench.serve(&image, shape, Mode::Plain)?;
    let script = include_str!("scripts/killed.sh");
    let mut machine = bench.linux(&daemon, "killed", shape, script)?;
    machine.expect("busy")?;
    let mut recovered = 0;
    for kill in 0..kills {
        // QEMU comes back after a second; then there are requests in flight at any moment.
        std::thread::sleep(Duration::from_millis(1300 + kill * 377 % 900));
        recovered += u64::from(daemon.said().contains("done again"));
        // Dropped is killed.
        drop(daemon);
        daemon = bench.serve(&image, shape, Mode::Plain)?;
    }
    machine.answer()?;
    let checks = machine.finish()?;
    // If the guest's CPU is the limit, few kills find a request in flight. So the number is printed and not checked.
    println!("killed: requests were done again after {recovered} of {kills} kills");
    daemon.stop()?;
    Ok(checks)
}

/// fio writes and verifies on all vrings.
fn verify(bench: &Bench<'_>, shape: Shape, mode: Mode) -> Result<Vec<Check>, String> {
    let image = bench.empty_image()?;
    let daemon = bench.serve(&image, shape, mode)?;
    let mut machine = bench.linux(&daemon, "fio", shape, include_str!("scripts/verify.sh"))?;
    machine.expect("fio-done")?;
    let mut checks = worker_per_vring(bench, &daemon, shape)?;
    machine.answer()?;
    checks.extend(machine.finish()?);
    daemon.stop()?;
    Ok(checks)
}

/// Each vring that the guest started has a worker of its own.
fn worker_per_vring(
    bench: &Bench<'_>,
    daemon: &Daemon,
    shape: Shape,
) -> Result<Vec<Check>, String> {
    if bench.lab.kind != BackendKind::Cleave {
        return Ok(Vec::new());
    }
    let threads = daemon.threads()?;
    let workers = threads
        .iter()
        .filter(|name| name.starts_with("cleave-w"))
        .count();
    let result = match workers == shape.cpus as usize {
        true => Ok(()),
        false => Err(format!(
            "{} vrings, but the threads are {threads:?}",
            shape.cpus
        )),
    };
    Ok(vec![("worker-per-vring".to_owned(), result)])
}

/// The disk, as the first that the firmware tries.
fn devices(socket: &Path, shape: Shape) -> Vec<String> {
    let mut words = vhost_user_disk("disk", socket, shape.cpus);
    if let [_, chardev, _, device] = words.as_mut_slice() {
        chardev.push_str(shape.chardev);
        device.push_str(",bootindex=1");
    }
    words
}

fn allocated(image: &Path) -> Result<u64, String> {
    let metadata = std::fs::metadata(image).map_err(|error| error.to_string())?;
    Ok(metadata.blocks() * 512)
}

fn grow(image: &Path) -> Result<(), String> {
    let file = File::options()
        .write(true)
        .open(image)
        .map_err(|error| error.to_string())?;
    file.set_len(GROWN_BYTES).map_err(|error| error.to_string())
}

impl Bench<'_> {
    pub(super) fn empty_image(&self) -> Result<PathBuf, String> {
        let image = self.folder.join("disk.img");
        let file = File::create(&image).map_err(|error| error.to_string())?;
        file.set_len(DISK_BYTES)
            .map_err(|error| error.to_string())?;
        Ok(image)
    }

    fn serve(&self, image: &Path, shape: Shape, mode: Mode) -> Result<Daemon, String> {
        self.serve_in(&self.folder, image, shape, mode)
    }

    /// Serves with the socket in a folder of its own.
    pub(super) fn serve_in(
        &self,
        folder: &Path,
        image: &Path,
        shape: Shape,
        mode: Mode,
    ) -> Result<Daemon, String> {
        backend::start(&BackendSpec {
            kind: self.lab.kind,
            program: &self.lab.program,
            folder,
            image,
            vrings: shape.cpus,
            block_bytes: shape.block_bytes,
            mode,
        })
    }

    /// Boots Linux with a script; as many vrings as CPUs.
    fn linux(
        &self,
        daemon: &Daemon,
        name: &str,
        shape: Shape,
        script: &str,
    ) -> Result<Machine, String> {
        let initramfs = self.folder.join(format!("{name}.initramfs"));
        self.write_initramfs(&initramfs, shape, script)?;
        let boot = Boot::Linux {
            kernel: &self.lab.kernel.image,
            initramfs: &initramfs,
            parameters: "",
        };
        self.machine(daemon, name, shape, boot)
    }

    /// Root file system that a guest boots into, to run a script.
    pub(super) fn write_initramfs(
        &self,
        to: &Path,
        shape: Shape,
        script: &str,
    ) -> Result<(), String> {
        let serial = backend::serial(self.lab.kind);
        let grown = if backend::can_grow(self.lab.kind) {
            GROWN_BYTES
        } else {
            DISK_BYTES
        };
        let settings = format!(
            "DISK=/dev/vda\nBYTES={DISK_BYTES}\nGROWN_BYTES={grown}\nSERIAL={serial}\nBLOCK={}\nQUEUES={}\n",
            shape.block_bytes, shape.cpus
        );
        self.lab.initramfs.write(to, script, &settings)
    }

    fn machine(
        &self,
        daemon: &Daemon,
        name: &str,
        shape: Shape,
        boot: Boot<'_>,
    ) -> Result<Machine, String> {
        Machine::start(&MachineSpec {
            accelerator: self.lab.accelerator,
            cpus: shape.cpus,
            devices: devices(&daemon.socket, shape),
            pinned_to: None,
            boot,
            log: self.folder.join(format!("{name}.log")),
            limit: BOOT_LIMIT,
        })
    }

    fn sum(&self, image: &Path) -> Result<String, String> {
        crate::step::quietly(&self.folder, &["sha256sum", &image.to_string_lossy()], &[])
    }
}
