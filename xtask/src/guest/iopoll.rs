//! The daemon inside the guest, on disks with polled queues, which hardly any machine that runs tests has.
//! The driver runs there too, and so do the engine's own tests of the polled ring, on a device that polls.

use cleave_rig::{Result, words};

use super::bench::{BOOT_LIMIT, Bench, resize};
use super::kit::BackendKind;

/// The engine's tests take it for zeroes, and read all of it.
const DISK_BYTES: u64 = 4 << 20;

/// Disks of QEMU's own: an NVMe drive and a virtio one whose drivers can poll, given queues for that; and an NVMe drive
/// that is known by its serial, takes two seconds for each write of 4 KiB, and fails reads of its second one.
/// The first two do without flushes: the guest stands still while QEMU waits for that of a drive that is pulled.
const DISKS: &str = "\
format=raw,discard=unmap,cache=unsafe,file= nvme,serial=polled
format=raw,discard=unmap,cache=unsafe,file= virtio-blk-pci,num-queues=2
driver=raw,file.driver=blkdebug,file.inject-error.0.event=read_aio,file.inject-error.0.sector=8,\
file.inject-error.0.errno=5,throttling.bps-write=2048,file.image.filename= nvme,serial=late";

pub(super) fn run(bench: &mut Bench<'_>) -> Result {
    let (kit, folder) = (bench.kit, &bench.folder);
    if kit.kind != BackendKind::Cleave {
        bench.ignored = Some("no other daemon polls".to_owned());
        return Ok(());
    }
    let disks = DISKS.lines().filter_map(|disk| disk.split_once(' '));
    let mut devices = Vec::new();
    for (number, (drive, device)) in disks.enumerate() {
        let id = format!("disk{number}");
        let image = folder.join(&id);
        resize(&image, DISK_BYTES)?;
        let line = format!("-drive if=none,id={id},{drive}{{}} -device {device},drive={id}");
        devices.extend(words(&line, &[&image.display()]));
    }
    let initramfs = folder.join("iopoll.initramfs");
    let script = include_str!("scripts/iopoll.sh");
    kit.initramfs
        .write(&initramfs, script, "DISK=/dev/vda\n", &kit.programs)?;
    let boot = bench.linux(&initramfs, "nvme.poll_queues=1");
    let mut machine = bench.machine("iopoll", &[devices, boot], BOOT_LIMIT)?;
    if let Some((mark, _)) = machine.mark()? {
        return Err(format!("stopped at `{mark}`"));
    }
    // Not `finish`: to power off, the guest would wait for the writes that hang.
    bench.checks = machine.kill()?;
    Ok(())
}
