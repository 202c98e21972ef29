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
/// Kills of the daemon under one guest; `CLEAVE_GUEST_KILLS` says otherwise.
const KILLS: u64 = 6;

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
        let kills = std::env::var("CLEAVE_GUEST_KILLS").ok();
        let kills = kills.map_or(Ok(KILLS), |text| text.parse().at("CLEAVE_GUEST_KILLS"))?;
        let settings = format!(
            "DISK=/dev/vda BOOT={boot} BYTES={DISK_BYTES} GROWN_BYTES={grown} SERIAL={} BLOCK={block_bytes} \
             QUEUES={cpus} KILLS={kills} OURS={ours}",
            self.kit.kind.serial()
        );
        self.kit.initramfs.write(to, script, &settings, &[])
    }

    pub(super) fn linux(&self, initramfs: &Path, parameters: &str) -> Vec<String> {
        guest::boot(&self.kit.kernel.image, initramfs, parameters)
    }

    /// Returns the disk as the first that the firmware tries.
    pub(super) fn disk(&self) -> Vec<String> {
        let reconnect = match self.name {
            "killed" | "reconnect" => format!(",{}", self.kit.reconnect),
            _ => String::new(),
        };
        let socket = format!("{}{reconnect}", self.folder.join("disk.sock").display());
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

/// Makes a file as long as this.
pub(super) fn resize(image: &Path, bytes: u64) -> Result {
    let mut options = File::options();
    let file = options.create(true).truncate(false).write(true).open(image);
    file.and_then(|file| file.set_len(bytes)).at(image)
}
