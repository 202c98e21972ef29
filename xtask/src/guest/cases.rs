//! The cases: the disk that is served, the guest that boots, and the work of the host meanwhile.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cleave_rig::daemon::Daemon;
use cleave_rig::guest::{self, Check, Machine, VHOST_USER_DISK, qemu};
use cleave_rig::{At, Result, command, quietly, words};

use super::backend::{self, Mode};
use super::{BackendKind, Lab, iopoll, libvirt};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 160 * MIB;
const GROWN_BYTES: u64 = 192 * MIB;
/// Time limit of one boot. It is generous: a busy machine without KVM needs a tenth of it.
pub(super) const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// Kills of the daemon under one guest; `CLEAVE_GUEST_KILLS` says otherwise.
const KILLS: u64 = 6;

/// The case with a Ceph cluster. It runs only when it is asked for.
pub(crate) const RBD: &str = "fio-verify-rbd";

/// Script of most boots.
pub(super) const DISK: &str = include_str!("scripts/disk.sh");

/// A case by its name; a guest has as many CPUs as vrings, and both sizes of blocks are told to some.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) cpus: u32,
    pub(super) block_bytes: u32,
    how: How,
}

/// Boots of Linux, one after the other, each a function of a script; or a function of the host.
enum How {
    Disk(&'static str),
    Fio(&'static str),
    Own(fn(&mut Bench<'_>) -> Result),
}

const fn case(name: &'static str, cpus: u32, block_bytes: u32, how: How) -> Case {
    Case {
        name,
        cpus,
        block_bytes,
        how,
    }
}

/// The longest first, for a case that starts late should be short.
pub(super) const ALL: &[Case] = &[
    case("iopoll", 2, 512, How::Own(iopoll::run)),
    case("four-cpus", 4, 4096, How::Disk("life")),
    case("one-cpu", 1, 512, How::Disk("life crash recover read_only")),
    case("killed", 4, 4096, How::Fio("killed")),
    case("fio-verify", 4, 4096, How::Fio("verify")),
    case("fio-verify-poll", 1, 512, How::Fio("verify_polled")),
    case("fio-verify-nbd", 4, 512, How::Fio("verify_nbd")),
    case(RBD, 4, 512, How::Fio("verify_rbd")),
    case("libvirt", 4, 4096, How::Own(libvirt::run)),
    case("reconnect", 1, 512, How::Disk("reconnect")),
    // Firmware sets up one vring of the four, and boots from blocks of 512 bytes only.
    case("firmware-boot", 4, 512, How::Own(firmware_boot)),
];

/// How the daemon serves a boot.
fn mode(boot: &str) -> Mode {
    match boot {
        "read_only" => Mode::ReadOnly,
        "verify_polled" => Mode::Poll,
        "verify_nbd" => Mode::Nbd,
        "verify_rbd" => Mode::Rbd,
        _ => Mode::Plain,
    }
}

/// The things that a case works with, and its result.
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
    let mut ran = made.and_then(|()| match case.how {
        How::Disk(boots) => bench.boot(DISK, boots),
        How::Fio(boots) => bench.boot(include_str!("scripts/fio.sh"), boots),
        How::Own(run) => run(&mut bench),
    });
    if let (Ok(()), Some(why)) = (&ran, &bench.ignored) {
        println!("ignored: guest case {name}: {why}");
        return Ok(None);
    }
    let (failed, count) = (guest::failed(&bench.checks), bench.checks.len());
    if ran.is_ok() && (count == 0 || !failed.is_empty()) {
        ran = Err(format!("of {count} checks failed:{failed}"));
    }
    let seconds = start.elapsed().as_secs_f64();
    match ran {
        Ok(()) => println!("{name:<16} ok   {seconds:6.1} s  {count} checks"),
        Err(ref why) => println!("{name:<16} FAIL {seconds:6.1} s  {why}"),
    }
    ran.map(|()| Some(count)).map_err(drop)
}

/// The firmware reads from the disk: SeaBIOS sets up vring 0 only, and polls without interrupts.
fn firmware_boot(bench: &mut Bench<'_>) -> Result {
    const MARK: &[u8] = b"CLEAVE-MARK second-sector\r\n";
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
    image[512..512 + MARK.len()].copy_from_slice(MARK);
    std::fs::write(bench.image(), image).at(bench.image())?;
    let daemon = bench.serve(Mode::Plain)?;
    let mut machine = bench.machine("firmware", &[bench.disk()], BOOT_LIMIT)?;
    machine.expect("second-sector")?;
    machine.kill()?;
    bench.checks.push(("second-sector".to_owned(), Ok(())));
    daemon.stop()
}

/// Makes a file as long as this.
pub(super) fn resize(image: &Path, bytes: u64) -> Result {
    let mut options = File::options();
    let file = options.create(true).truncate(false).write(true).open(image);
    file.and_then(|file| file.set_len(bytes)).at(image)
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

    /// Boots Linux with functions of a script, one after the other, and acts on their requests meanwhile; as many vrings
    /// as CPUs. A daemon serves on while the next boot wants it as it is.
    fn boot(&mut self, script: &str, boots: &str) -> Result {
        self.empty_image()?;
        let _server = match mode(boots) {
            Mode::Nbd => Some(backend::nbd_server(&self.folder, DISK_BYTES)?),
            Mode::Rbd => Some(backend::cluster(self.lab, &self.folder, DISK_BYTES)?),
            _ => None,
        };
        let mut daemon: Option<Daemon> = None;
        let mut served = None;
        for boot in boots.split(' ') {
            let mode = mode(boot);
            if served != Some(mode) {
                daemon.take().map_or(Ok(()), Daemon::stop)?;
                daemon = Some(self.serve(mode)?);
                served = Some(mode);
            }
            let initramfs = self.folder.join(format!("{boot}.initramfs"));
            self.write_initramfs(&initramfs, script, boot)?;
            let linux = self.linux(&initramfs, "");
            let mut machine = self.machine(boot, &[self.disk(), linux], BOOT_LIMIT)?;
            let checks = loop {
                match machine.mark()? {
                    None => break machine.off()?,
                    Some((mark, _)) if mark == "crash" => break machine.kill()?,
                    Some(mark) => {
                        let answer = self.act(&mut daemon, mode, &mark)?;
                        machine.say(&format!("{}\n", answer.trim()))?;
                    }
                }
            };
            self.checks.extend(checks);
        }
        daemon.map_or(Ok(()), Daemon::stop)
    }

    /// Carries out a request of the guest, a mark and the words behind it; returns the answer.
    fn act(
        &self,
        daemon: &mut Option<Daemon>,
        mode: Mode,
        mark: &(String, String),
    ) -> Result<String> {
        let image = self.image();
        let mut answer = String::new();
        match (&*mark.0, daemon.as_ref()) {
            ("allocated", _) => answer = (image.metadata().at(&image)?.blocks() * 512).to_string(),
            ("sum", _) => answer = quietly(&self.folder, "sha256sum disk.img", &[])?,
            ("note", _) => println!("{}: {}", self.case.name, mark.1),
            ("workers", Some(daemon)) => {
                let threads = daemon.threads().into_iter();
                let workers = threads.filter(|name| name.starts_with("cleave-w"));
                answer = workers.count().to_string();
            }
            ("grow", Some(daemon)) => {
                resize(&image, GROWN_BYTES)?;
                daemon.signal("HUP")?;
            }
            ("stop", Some(_)) => daemon.take().map_or(Ok(()), Daemon::stop)?,
            ("start", None) => *daemon = Some(self.serve(mode)?),
            ("kill", Some(killed)) => {
                answer = u8::from(killed.said().contains("done again")).to_string();
                // Dropped is killed.
                drop(daemon.take());
                *daemon = Some(self.serve(mode)?);
            }
            _ => return Err(format!("the guest asks for `{}`", mark.0)),
        }
        Ok(answer)
    }

    /// Root file system that a guest boots into, to run a function of a script.
    pub(super) fn write_initramfs(&self, to: &Path, script: &str, boot: &str) -> Result {
        let (cpus, block_bytes) = (self.case.cpus, self.case.block_bytes);
        // QEMU's daemon takes a new size over its monitor only.
        let (ours, grown) = match self.lab.kind {
            BackendKind::Cleave => ("yes", GROWN_BYTES),
            BackendKind::QemuStorageDaemon => ("", DISK_BYTES),
        };
        let kills = std::env::var("CLEAVE_GUEST_KILLS").ok();
        let kills = kills.map_or(Ok(KILLS), |text| text.parse().at("CLEAVE_GUEST_KILLS"))?;
        let settings = format!(
            "DISK=/dev/vda BOOT={boot} BYTES={DISK_BYTES} GROWN_BYTES={grown} SERIAL={} BLOCK={block_bytes} \
             QUEUES={cpus} KILLS={kills} OURS={ours}",
            backend::serial(self.lab.kind)
        );
        self.lab.initramfs.write(to, script, &settings, &[])
    }

    pub(super) fn linux(&self, initramfs: &Path, parameters: &str) -> Vec<String> {
        guest::boot(&self.lab.kernel.image, initramfs, parameters)
    }

    /// The disk as the first that the firmware tries.
    fn disk(&self) -> Vec<String> {
        let reconnect = match self.case.name {
            "killed" | "reconnect" => format!(",{}", self.lab.reconnect),
            _ => String::new(),
        };
        let socket = format!("{}{reconnect}", self.folder.join("disk.sock").display());
        let device = format!("{},bootindex=1", self.case.cpus);
        words(VHOST_USER_DISK, &[&"disk", &socket, &"disk", &device])
    }

    /// Boots a guest with disks and a kernel, or from its disk.
    pub(super) fn machine(
        &self,
        name: &str,
        words: &[Vec<String>],
        limit: Duration,
    ) -> Result<Machine> {
        let (qemu_program, accelerator) = (self.lab.qemu(), self.lab.accelerator);
        let line = qemu(qemu_program, accelerator, self.case.cpus, words);
        Machine::run(
            command(&line),
            &self.folder.join(format!("{name}.log")),
            limit,
        )
    }
}
