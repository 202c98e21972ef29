//! A guest that libvirt starts, with the disk as docs/qemu.md describes it and QEMU as a user of its own, in the group of the daemon.

use std::fmt::Display;

use cleave_rig::guest::Machine;
use cleave_rig::{At, Result, command, quietly, words};

use super::backend::{self, DaemonMode};
use super::bench::{BOOT_LIMIT, Bench};
use super::boots::DISK;

/// User and group of QEMU: Debian's numbers. Only files in the namespace name them.
const QEMU_ID: u32 = 64055;

/// The group `cleave`, in which QEMU's user is.
const CLEAVE_ID: u32 = QEMU_ID + 2;

/// Namespaces in which libvirtd finds its folders, and which end with all that runs in them.
const UNSHARE: &str = "unshare --mount --pid --fork --kill-child --mount-proc";

pub(super) fn run(bench: &mut Bench<'_>) -> Result {
    let folder = &bench.folder;
    if bench.kit.other_qemu.is_some() {
        bench.ignored = Some("libvirt chooses its QEMU itself".to_owned());
        return Ok(());
    }
    if let Err(why) = quietly(folder, &format!("{UNSHARE} true"), &[]) {
        let needs = "libvirt's QEMU driver needs root and namespaces of its own";
        bench.ignored = Some(format!("{needs}: {}", why.trim()));
        return Ok(());
    }
    let root = cleave_rig::root();
    let script = root.join("xtask/src/guest/scripts/libvirt.sh");
    let (script, document) = (script.display(), root.join("docs/qemu.md"));
    let values: [&dyn Display; 5] = [
        &script,
        &QEMU_ID,
        &CLEAVE_ID,
        &bench.cpus,
        &document.display(),
    ];
    quietly(folder, "sh -e {} files {} {} {} {}", &values)?;
    let home = folder.join("var/lib/libvirt");
    bench.write_initramfs(&home.join("initramfs"), DISK, "attached")?;
    std::fs::copy(&bench.kit.kernel.image, home.join("kernel")).at(&home)?;

    bench.empty_image()?;
    let daemon = backend::start(bench, &home, DaemonMode::Group(CLEAVE_ID))?;
    let line = words(&format!("{UNSHARE} sh -e {{}} libvirt"), &[&script]);
    let mut command = command(&line);
    command.current_dir(folder);
    let mut machine = Machine::run(command, &folder.join("console.log"), BOOT_LIMIT)?;
    while machine.mark()?.is_some() {}
    bench.checks = machine.off()?;
    daemon.stop()
}
