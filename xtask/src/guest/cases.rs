//! The cases: what is served, what boots, and what the host does meanwhile.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::backend::{self, Mode};
use super::machine::{Boot, Check, Machine, MachineSpec, vhost_user_disk};
use super::{BackendKind, Lab, iopoll, libvirt};
use crate::daemon::Daemon;
use crate::step::{At, Result, quietly};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 160 * MIB;
const GROWN_BYTES: u64 = 192 * MIB;
/// Of one boot. Generous: a busy machine without KVM needs a tenth of it.
pub(super) const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// Kills of the daemon under one guest; `CLEAVE_GUEST_KILLS` says otherwise.
const KILLS: u64 = 6;

/// Scripts by what they need in the guest.
pub(super) const DISK: &str = include_str!("scripts/disk.sh");
const FIO: &str = include_str!("scripts/fio.sh");

/// A case by its name; a guest has as many CPUs as vrings, and both sizes of blocks are told to some.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) cpus: u32,
    pub(super) block_bytes: u32,
    /// Further options of QEMU's chardev.
    chardev: &'static str,
    run: fn(&mut Bench<'_>) -> Result,
}

const fn case(
    name: &'static str,
    cpus: u32,
    block_bytes: u32,
    chardev: &'static str,
    run: fn(&mut Bench<'_>) -> Result,
) -> Case {
    Case {
        name,
        cpus,
        block_bytes,
        chardev,
        run,
    }
}

/// The longest first: what starts late should be short. Firmware sets up one vring of the four, and boots from blocks of
/// 512 bytes only.
pub(super) const ALL: &[Case] = &[
    case("iopoll", 2, 512, "", iopoll::run),
    case("four-cpus", 4, 4096, "", |bench| live(bench)?.stop()),
    case("one-cpu", 1, 512, "", whole_life),
    case("killed", 4, 4096, ",reconnect=1", killed),
    case("fio-verify", 4, 4096, "", |bench| {
        verify(bench, Mode::Plain)
    }),
    case("fio-verify-poll", 1, 512, "", |bench| {
        verify(bench, Mode::Poll)
    }),
    case("libvirt", 4, 4096, "", libvirt::run),
    case("reconnect", 1, 512, ",reconnect=1", reconnect),
    case("firmware-boot", 4, 512, "", firmware_boot),
];

/// What a case works with, and what came of it.
pub(super) struct Bench<'a> {
    pub(super) lab: &'a Lab,
    pub(super) folder: PathBuf,
    pub(super) case: &'a Case,
    pub(super) checks: Vec<Check>,
    /// Why the case cannot run on this machine.
    pub(super) ignored: Option<String>,
}

/// Runs a case and prints its line; the number of its checks, unless it cannot run here.
pub(super) fn run(lab: &Lab, case: &Case) -> Result<Option<usize>, ()> {
    let (start, name) = (Instant::now(), case.name);
    let folder = lab.folder.join(name);
    let mut bench = Bench {
        lab,
        folder,
        case,
        checks: Vec::new(),
        ignored: None,
    };
    let made = std::fs::create_dir_all(&bench.folder).at(&bench.folder);
    let mut ran = made.and_then(|()| (case.run)(&mut bench));
    if let (Ok(()), Some(why)) = (&ran, &bench.ignored) {
        println!("ignored: guest case {name}: {why}");
        return Ok(None);
    }
    let checks = bench.checks.iter();
    let failed = checks.filter_map(|(name, result)| Some((name, result.as_ref().err()?)));
    let failed: Vec<String> = failed
        .map(|(name, why)| format!("\n  {name}: {why}"))
        .collect();
    let count = bench.checks.len();
    if ran.is_ok() && (count == 0 || !failed.is_empty()) {
        ran = Err(format!(
            "{} of {count} checks failed:{}",
            failed.len(),
            failed.concat()
        ));
    }
    let seconds = start.elapsed().as_secs_f64();
    match ran {
        Ok(()) => println!("{name:<16} ok   {seconds:6.1} s  {count} checks"),
        Err(ref why) => println!("{name:<16} FAIL {seconds:6.1} s  {why}"),
    }
    ran.map(|()| Some(count)).map_err(drop)
}

/// The whole life of a disk, through a reboot, a restart, a crash of the frontend, and read-only.
fn whole_life(bench: &mut Bench<'_>) -> Result {
    let daemon = live(bench)?;
    let mut machine = bench.linux(&daemon, DISK, "crash")?;
    machine.expect("busy")?;
    // Not luck but load: there are always writes in flight by then.
    sleep(Duration::from_secs(2));
    bench.checks.extend(machine.kill()?);
    let recovered = bench.linux(&daemon, DISK, "recover")?.finish()?;
    bench.checks.extend(recovered);
    daemon.stop()?;

    let image = bench.image();
    let sum = || {
        quietly(
            Path::new("/"),
            &["sha256sum", &image.to_string_lossy()],
            &[],
        )
    };
    let before = sum()?;
    let daemon = bench.serve(Mode::ReadOnly)?;
    let read = bench.linux(&daemon, DISK, "readonly_disk")?.finish()?;
    bench.checks.extend(read);
    daemon.stop()?;
    bench.check("read-only-image-untouched", sum()? == before, "it changed");
    Ok(())
}

/// The first two boots of a disk, which are one QEMU: the life without its violent part, which knows nothing of the
/// number of CPUs and the size of blocks. The daemon serves on.
fn live(bench: &mut Bench<'_>) -> Result<Daemon> {
    let image = bench.empty_image()?;
    let daemon = bench.serve(Mode::Plain)?;
    let mut machine = bench.linux(&daemon, DISK, "life")?;
    machine.expect("queues-touched")?;
    bench.check_workers(&daemon)?;
    machine.answer()?;

    let allocated = || Ok::<u64, String>(image.metadata().at(&image)?.blocks() * 512);
    machine.expect("before-trim")?;
    let before = allocated()?;
    machine.answer()?;
    machine.expect("after-trim")?;
    let after = allocated()?;
    // The ballast has 16 MiB; ext4 may keep a few blocks of them.
    let why = format!("{before} bytes before, {after} after");
    bench.check("fstrim-shrinks-image", before > after + 12 * MIB, &why);
    machine.answer()?;

    machine.expect("resize")?;
    if bench.can_grow() {
        resize(&image, GROWN_BYTES)?;
        daemon.signal("HUP")?;
    }
    machine.expect("rebooting")?;
    machine.expect("second-boot")?;
    bench.checks.extend(machine.finish()?);
    Ok(daemon)
}

/// The daemon ends in order and a new one takes its place, twice: while the guest is idle, and in the middle of
/// its writes. QEMU connects again by itself, and the guest notices a pause.
fn reconnect(bench: &mut Bench<'_>) -> Result {
    bench.empty_image()?;
    let mut daemon = bench.serve(Mode::Plain)?;
    let mut machine = bench.linux(&daemon, DISK, "reconnect")?;
    for mark in ["idle", "busy"] {
        machine.expect(mark)?;
        daemon.stop()?;
        // The guest goes on with no daemon there: what it asks for waits in its vrings.
        machine.answer()?;
        machine.expect("waiting")?;
        daemon = bench.serve(Mode::Plain)?;
    }
    bench.checks.extend(machine.finish()?);
    daemon.stop()
}

/// The daemon is killed and started again, and fio sees nothing but pauses.
fn killed(bench: &mut Bench<'_>) -> Result {
    let kills = std::env::var("CLEAVE_GUEST_KILLS").ok();
    let kills = kills.map_or(Ok(KILLS), |text| text.parse());
    let kills = kills.map_err(|error| format!("CLEAVE_GUEST_KILLS: {error}"))?;
    bench.empty_image()?;
    let mut daemon = bench.serve(Mode::Plain)?;
    let mut machine = bench.linux(&daemon, FIO, "killed")?;
    machine.expect("busy")?;
    let mut recovered = 0;
    for kill in 0..kills {
        // QEMU comes back after a second; then there are requests in flight at any moment.
        sleep(Duration::from_millis(1300 + kill * 377 % 900));
        recovered += u64::from(daemon.said().contains("done again"));
        // Dropped is killed.
        drop(daemon);
        daemon = bench.serve(Mode::Plain)?;
    }
    machine.answer()?;
    bench.checks.extend(machine.finish()?);
    // If the guest's CPU is the limit, few kills find a request in flight. So the number is printed and not checked.
    println!("killed: requests were done again after {recovered} of {kills} kills");
    daemon.stop()
}

/// fio writes and verifies on all vrings.
fn verify(bench: &mut Bench<'_>, mode: Mode) -> Result {
    bench.empty_image()?;
    let daemon = bench.serve(mode)?;
    let mut machine = bench.linux(&daemon, FIO, "verify")?;
    machine.expect("fio-done")?;
    bench.check_workers(&daemon)?;
    machine.answer()?;
    bench.checks.extend(machine.finish()?);
    daemon.stop()
}

/// The firmware reads from the disk: SeaBIOS sets up vring 0 only, and polls without interrupts.
fn firmware_boot(bench: &mut Bench<'_>) -> Result {
    const GREETING: &[u8] = b"CLEAVE second sector read by the BIOS\r\n";
    /// 16-bit code: read sector 2 with INT 13h, print it on the serial port, halt.
    #[rustfmt::skip]
    const CODE: &[u8] = &[
        0x31, 0xC0, 0x8E, 0xD8, 0x8E, 0xC0, 0x8E, 0xD0, // xor ax, ax; mov ds, ax; mov es, ax; mov ss, ax
        0xBC, 0x00, 0x7C, // mov sp, 0x7C00
        0xB8, 0x01, 0x02, // mov ax, 0x0201: read one sector
        0xB9, 0x02, 0x00, 0xB6, 0x00, // mov cx, 2; mov dh, 0: cylinder 0, sector 2, head 0, drive as given in dl
        0xBB, 0x00, 0x7E, // mov bx, 0x7E00: to there
        0xCD, 0x13, 0x72, 0x0E, // int 0x13; jc halt
        0xBE, 0x00, 0x7E, 0xBA, 0xF8, 0x03, // mov si, 0x7E00; mov dx, 0x3F8
        0xAC, 0x84, 0xC0, 0x74, 0x03, // print: lodsb; test al, al; jz halt
        0xEE, 0xEB, 0xF8, // out dx, al; jmp print
        0xF4, 0xEB, 0xFD, // halt: hlt; jmp halt
    ];
    let mut image = vec![0; 4 << 20];
    image[..CODE.len()].copy_from_slice(CODE);
    image[510..512].copy_from_slice(&[0x55, 0xAA]);
    image[512..512 + GREETING.len()].copy_from_slice(GREETING);
    std::fs::write(bench.image(), image).at(bench.image())?;
    let daemon = bench.serve(Mode::Plain)?;
    let mut machine = bench.machine("firmware", bench.disk(&daemon), Boot::Disk, BOOT_LIMIT)?;
    machine.expect_text(String::from_utf8_lossy(GREETING).trim_end())?;
    machine.kill()?;
    bench.check("second-sector", true, "");
    daemon.stop()
}

/// Makes a file as long as this.
pub(super) fn resize(image: &Path, bytes: u64) -> Result {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(image)
        .at(image)?;
    file.set_len(bytes).at(image)
}

impl Bench<'_> {
    pub(super) fn image(&self) -> PathBuf {
        self.folder.join("disk.img")
    }

    pub(super) fn empty_image(&self) -> Result<PathBuf> {
        resize(&self.image(), DISK_BYTES)?;
        Ok(self.image())
    }

    fn serve(&self, mode: Mode) -> Result<Daemon> {
        backend::start(self, &self.folder, mode)
    }

    /// QEMU's daemon takes a new size over its monitor only.
    fn can_grow(&self) -> bool {
        self.lab.kind == BackendKind::Cleave
    }

    fn check(&mut self, name: &str, is_fine: bool, why: &str) {
        let result = if is_fine { Ok(()) } else { Err(why.to_owned()) };
        self.checks.push((name.to_owned(), result));
    }

    /// Each vring that the guest started has a worker of its own.
    fn check_workers(&mut self, daemon: &Daemon) -> Result {
        if self.lab.kind == BackendKind::Cleave {
            let threads = daemon.threads()?;
            let workers = threads
                .iter()
                .filter(|name| name.starts_with("cleave-w"))
                .count();
            let vrings = self.case.cpus as usize;
            let why = format!("{vrings} vrings, but the threads are {threads:?}");
            self.check("worker-per-vring", workers == vrings, &why);
        }
        Ok(())
    }

    /// Boots Linux with a function of a script; as many vrings as CPUs.
    fn linux(&self, daemon: &Daemon, script: &str, boot: &str) -> Result<Machine> {
        let initramfs = self.folder.join(format!("{boot}.initramfs"));
        self.write_initramfs(&initramfs, script, boot)?;
        self.machine(
            boot,
            self.disk(daemon),
            self.boot(&initramfs, ""),
            BOOT_LIMIT,
        )
    }

    /// Root file system that a guest boots into, to run a function of a script.
    pub(super) fn write_initramfs(&self, to: &Path, script: &str, boot: &str) -> Result {
        let Case {
            cpus, block_bytes, ..
        } = self.case;
        let grown = if self.can_grow() {
            GROWN_BYTES
        } else {
            DISK_BYTES
        };
        let settings = format!(
            "DISK=/dev/vda BOOT={boot} BYTES={DISK_BYTES} GROWN_BYTES={grown} SERIAL={} BLOCK={block_bytes} QUEUES={cpus}",
            backend::serial(self.lab.kind)
        );
        self.lab.initramfs.write(to, script, &settings)
    }

    pub(super) fn boot<'a>(&'a self, initramfs: &'a Path, parameters: &'a str) -> Boot<'a> {
        let kernel = &self.lab.kernel.image;
        Boot::Linux {
            kernel,
            initramfs,
            parameters,
        }
    }

    /// The disk as the first that the firmware tries.
    fn disk(&self, daemon: &Daemon) -> Vec<String> {
        let mut devices = vhost_user_disk("disk", &daemon.socket, self.case.cpus);
        if let [_, chardev, _, device] = devices.as_mut_slice() {
            *chardev += self.case.chardev;
            *device += ",bootindex=1";
        }
        devices
    }

    pub(super) fn machine(
        &self,
        name: &str,
        devices: Vec<String>,
        boot: Boot<'_>,
        limit: Duration,
    ) -> Result<Machine> {
        Machine::start(&MachineSpec {
            accelerator: self.lab.accelerator,
            cpus: self.case.cpus,
            devices,
            pinned_to: None,
            boot,
            log: self.folder.join(format!("{name}.log")),
            limit,
        })
    }
}
