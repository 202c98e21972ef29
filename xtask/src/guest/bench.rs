//! The things that a case works with: its image, what its guest boots into, and the machine.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cleave_rig::guest::{self, Check, Machine, VHOST_USER_DISK, qemu};
use cleave_rig::{At, Result, command, words};

use super::kit::{BackendKind, Kit};

const MIB: u64 = 1 << 20;
pub(super) const DISK_BYTES: u64 = 160 * MIB;
pub(super) const GROWN_BYTES: u64 = 192 * MIB;
/// Time limit of one boot. It is generous: a busy machine without KVM needs a tenth of it.
pub(super) const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// Kills of the daemon under one guest, and moves of one to another daemon and QEMU; `CLEAVE_GUEST_KILLS` and
/// `CLEAVE_GUEST_MOVES` say otherwise.
const KILLS: u64 = 6;
const MOVES: u64 = 3;

/// The things that a case works with, and its result.
pub(super) struct Bench<'a> {
    pub(super) kit: &'a Kit,
    pub(super) folder: PathBuf,
    /// The name of the case.
    pub(super) name: &'static str,
    /// As many vrings as CPUs.
    pub(super) cpus: u32,
    pub(super) block_bytes: u32,
    pub(super) checks: Vec<Check>,
    /// Why the case cannot run on this machine.
    pub(super) ignored: Option<String>,
}

impl Bench<'_> {
    pub(super) fn image(&self) -> PathBuf {
        self.folder.join("disk.img")
    }

    pub(super) fn empty_image(&self) -> Result<PathBuf> {
        resize(&self.image(), DISK_BYTES)?;
        Ok(self.image())
    }

    /// Root file system that a guest boots into, to run a function of a script.
    pub(super) fn write_initramfs(&self, to: &Path, script: &str, boot: &str) -> Result {
        let (cpus, block_bytes) = (self.cpus, self.block_bytes);
        // QEMU's daemon takes a new size over its monitor only.
        let (ours, grown) = match self.kit.kind {
            BackendKind::Cleave => ("yes", GROWN_BYTES),
            BackendKind::QemuStorageDaemon => ("", DISK_BYTES),
        };
        let kills = number("CLEAVE_GUEST_KILLS", KILLS)?;
        let moves = number("CLEAVE_GUEST_MOVES", MOVES)?;
        let settings = format!(
            "DISK=/dev/vda BOOT={boot} BYTES={DISK_BYTES} GROWN_BYTES={grown} SERIAL={} BLOCK={block_bytes} \
             QUEUES={cpus} KILLS={kills} MOVES={moves} OURS={ours}",
            self.kit.kind.serial()
        );
        self.kit.initramfs.write(to, script, &settings, &[])
    }

    pub(super) fn linux(&self, initramfs: &Path, parameters: &str) -> Vec<String> {
        guest::boot(&self.kit.kernel.image, initramfs, parameters)
    }

    /// Returns the disk as the first that the firmware tries.
    pub(super) fn disk(&self) -> Vec<String> {
        self.disk_at(&self.folder.join("disk.sock"))
    }

    /// Returns that disk, served on this socket.
    pub(super) fn disk_at(&self, socket: &Path) -> Vec<String> {
        let reconnect = match self.name {
            "killed" | "reconnect" => format!(",{}", self.kit.reconnect),
            _ => String::new(),
        };
        let socket = format!("{}{reconnect}", socket.display());
        let device = format!("{},bootindex=1", self.cpus);
        words(VHOST_USER_DISK, &[&"disk", &socket, &"disk", &device])
    }

    /// Boots a guest with disks and a kernel, or from its disk.
    pub(super) fn machine(
        &self,
        name: &str,
        words: &[Vec<String>],
        limit: Duration,
    ) -> Result<Machine> {
        let (qemu_program, accelerator) = (self.kit.qemu(), self.kit.accelerator);
        let line = qemu(qemu_program, accelerator, self.cpus, words);
        Machine::run(
            command(&line),
            &self.folder.join(format!("{name}.log")),
            limit,
        )
    }
}

/// Returns the number that an environment variable says, or this one.
fn number(variable: &str, otherwise: u64) -> Result<u64> {
    let said = std::env::var(variable).ok();
    said.map_or(Ok(otherwise), |text| text.parse().at(variable))
}

/// Makes a file as long as this.
pub(super) fn resize(image: &Path, bytes: u64) -> Result {
    let mut options = File::options();
    let file = options.create(true).truncate(false).write(true).open(image);
    file.and_then(|file| file.set_len(bytes)).at(image)
}
