//! A real Linux in QEMU against the real daemon. Nothing here is skipped: what cannot run, fails and
//! says why.

mod archive;
mod backend;
mod boot_sector;
mod cases;
pub(crate) mod initramfs;
mod iopoll;
pub(crate) mod kernel;
pub(crate) mod machine;

use std::path::{Path, PathBuf};
use std::time::Duration;

use initramfs::Initramfs;
use kernel::Kernel;
use machine::{Accelerator, Boot, Machine, MachineSpec};

use crate::step::step;

/// The daemon that serves the disks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BackendKind {
    Cleave,
    /// A second opinion: where a test fails with this one too, the test is at fault.
    QemuStorageDaemon,
}

/// What all cases share.
pub(crate) struct Lab {
    kernel: Kernel,
    initramfs: Initramfs,
    accelerator: Accelerator,
    kind: BackendKind,
    program: PathBuf,
    folder: PathBuf,
    root: PathBuf,
}

/// Whether there is a guest case of this name.
pub(crate) fn is_case(name: &str) -> bool {
    cases::ALL.iter().any(|case| case.name == name)
}

/// Runs all cases, or only the one named; returns how many passed. Logs and images are kept if `keep` says so, or a
/// case failed.
pub(crate) fn run(
    root: &Path,
    kind: BackendKind,
    keep: Keep,
    only: Option<&str>,
) -> Result<String, String> {
    if cfg!(not(target_arch = "x86_64")) {
        return Err("the guest tests boot an x86-64 kernel and need an x86-64 machine".to_owned());
    }
    let target = root.join("target/guest");
    let folder = target.join("run");
    fresh(&folder)?;
    let kernel = Kernel::fetch(&target.join("kernel"), &kernel::SMALL)?;
    let initramfs = Initramfs::build(&kernel)?;
    let accelerator = probe(&kernel, &initramfs, &folder)?;
    println!(
        "guest: Linux {}, accelerator {}",
        kernel.release,
        accelerator.name()
    );
    let program = root.join("target/debug/cleave");
    let lab = Lab {
        kernel,
        initramfs,
        accelerator,
        kind,
        program,
        folder,
        root: root.to_path_buf(),
    };
    let (mut count, mut checks) = (0, 0);
    let chosen = |case: &&cases::Case| only.is_none_or(|name| name == case.name);
    for case in cases::ALL.iter().filter(chosen) {
        count += 1;
        let remedy = "read the logs below target/guest/run; `--against qemu-storage-daemon` tells the daemon's faults from the harness's";
        step(case.name, remedy, || {
            let found = cases::run(&lab, case)?;
            checks += found;
            Ok(format!("{found} checks"))
        })?;
    }
    if keep == Keep::No {
        fresh(&lab.folder)?;
    }
    Ok(format!(
        "{count} guest cases, {checks} checks, accelerator {}",
        accelerator.name()
    ))
}

/// Whether what a run leaves behind stays.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Keep {
    Yes,
    No,
}

fn fresh(folder: &Path) -> Result<(), String> {
    if folder.exists() {
        std::fs::remove_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))
}

/// KVM where it runs a guest, which a /dev/kvm alone does not prove; TCG otherwise.
pub(crate) fn probe(
    kernel: &Kernel,
    initramfs: &Initramfs,
    folder: &Path,
) -> Result<Accelerator, String> {
    const KVM_LIMIT: Duration = Duration::from_secs(12);
    let image = folder.join("probe.initramfs");
    initramfs.write(&image, include_str!("scripts/probe.sh"), "")?;
    let is_there = Path::new("/dev/kvm").exists();
    let boots = is_there && {
        let spec = MachineSpec {
            accelerator: Accelerator::Kvm,
            cpus: 1,
            devices: Vec::new(),
            pinned_to: None,
            boot: Boot::Linux {
                kernel: &kernel.image,
                initramfs: &image,
                parameters: "",
            },
            log: folder.join("probe.log"),
            limit: KVM_LIMIT,
        };
        Machine::start(&spec)?.expect("alive").is_ok()
    };
    if is_there && !boots {
        println!("guest: /dev/kvm is there, but does not run a guest");
    }
    Ok(if boots {
        Accelerator::Kvm
    } else {
        Accelerator::Tcg
    })
}
