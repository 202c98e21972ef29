//! Everything that all cases share: kernel, programs, accelerator, and the kind of daemon that they run against.

use std::path::{Path, PathBuf};

use cleave_rig::built::{self, Artifact};
use cleave_rig::guest::{Accelerator, Initramfs, Kernel, QEMU, probe, reconnect};
use cleave_rig::{Result, empty_folder};

/// The daemon that serves the disks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum BackendKind {
    Cleave,
    QemuStorageDaemon,
}

impl BackendKind {
    /// Returns the serial number that the guest must see.
    pub(super) fn serial(self) -> &'static str {
        match self {
            BackendKind::Cleave => "guest-test-7",
            BackendKind::QemuStorageDaemon => "vhost_user_blk",
        }
    }
}

/// Everything that all cases share.
pub(super) struct Kit {
    pub(super) kernel: Kernel,
    pub(super) initramfs: Initramfs,
    pub(super) accelerator: Accelerator,
    pub(super) kind: BackendKind,
    /// QEMU, if it is not the one that libvirt takes too.
    pub(super) other_qemu: Option<String>,
    /// The option by which it connects again.
    pub(super) reconnect: &'static str,
    pub(super) program: PathBuf,
    /// Runs a Ceph cluster.
    pub(super) ceph: PathBuf,
    /// Programs for a guest in which the daemon itself runs.
    pub(super) programs: [String; 3],
    pub(super) folder: PathBuf,
    /// For the reports of attempts that are repeated.
    pub(super) late: PathBuf,
}

impl Kit {
    pub(super) fn new(
        root: &Path,
        artifacts: &[Artifact],
        kind: BackendKind,
        other_qemu: Option<String>,
    ) -> Result<Kit> {
        let folder = root.join("target/guest/run");
        empty_folder(&folder)?;
        let kernel = Kernel::small(&root.join("target/guest"))?;
        let initramfs = Initramfs::build(&root.join("target/guest"), &kernel)?;
        // The engine's own tests run on a polled drive in a guest too.
        let package = root.join("crates/engine");
        let is_engine = |found: &&Artifact| found.target == "lib" && found.package == package;
        let engine_tests = artifacts.iter().find(is_engine);
        let engine_tests = engine_tests.ok_or("cargo built no tests of the engine")?;
        let program = built::program(artifacts, "cleave")?;
        let drive = built::program(artifacts, "drive")?;
        let qemu = other_qemu.as_deref().unwrap_or(QEMU);
        Ok(Kit {
            accelerator: probe(qemu, &kernel, &initramfs, &folder)?,
            reconnect: reconnect(qemu)?,
            other_qemu,
            kernel,
            initramfs,
            kind,
            programs: [
                format!("cleave={}", program.display()),
                format!("drive={}", drive.display()),
                format!("engine-tests={}", engine_tests.file.display()),
            ],
            program,
            ceph: built::program(artifacts, "ceph-cluster")?,
            folder,
            late: root.join("target/late"),
        })
    }

    pub(super) fn qemu(&self) -> &str {
        self.other_qemu.as_deref().unwrap_or(QEMU)
    }
}
