//! The daemon inside the guest, on disks with polled queues, which hardly any machine that runs tests has.
//! The driver runs there too, and so do the engine's own tests of the polled ring, on a device that polls.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use super::machine::{Boot, Machine, MachineSpec, pollable_disks};
use super::{BackendKind, Lab, Outcome};

/// The engine's tests take it for zeroes, and read all of it.
const DISK_BYTES: u64 = 4 << 20;
const LIMIT: Duration = Duration::from_secs(900);

pub(super) fn run(lab: &Lab, folder: &Path) -> Result<Outcome, String> {
    if lab.kind != BackendKind::Cleave {
        return Ok(Outcome::Ignored("no other daemon polls".to_owned()));
    }
    let image = |name: &str| {
        let path = folder.join(name);
        let made = File::create(&path).and_then(|file| file.set_len(DISK_BYTES));
        made.map(|()| path).map_err(|error| error.to_string())
    };
    let mut devices = pollable_disks(&image("nvme.img")?, &image("virtio.img")?);
    devices.extend(late_disk(&image("late.img")?));
    let initramfs = folder.join("iopoll.initramfs");
    lab.initramfs.write_with(
        &initramfs,
        include_str!("scripts/iopoll.sh"),
        "DISK=/dev/vda\n",
        &[
            ("cleave", &lab.program),
            ("drive", &lab.drive),
            ("engine-tests", &lab.engine_tests),
        ],
    )?;
    let mut machine = Machine::start(&MachineSpec {
        accelerator: lab.accelerator,
        // A worker that looks on, and who drives it.
        cpus: 2,
        devices,
        pinned_to: None,
        boot: Boot::Linux {
            kernel: &lab.kernel.image,
            initramfs: &initramfs,
            parameters: "nvme.poll_queues=1",
        },
        log: folder.join("iopoll.log"),
        limit: LIMIT,
    })?;
    if let Some((mark, _)) = machine.mark()? {
        return Err(format!("stopped at `{mark}`"));
    }
    // Not `finish`: to power off, the guest would wait for the writes that hang.
    machine.kill().map(Outcome::Checked)
}

/// QEMU's words for an NVMe drive that is known by its serial, takes two seconds for each write of 4 KiB, and fails
/// reads of its second one.
fn late_disk(image: &Path) -> [String; 4] {
    let fault = "file.inject-error.0.event=read_aio,file.inject-error.0.sector=8,file.inject-error.0.errno=5";
    let drive = format!(
        "driver=raw,file.driver=blkdebug,file.image.filename={},{fault},throttling.bps-write=2048,if=none,id=third",
        image.display()
    );
    let device = "nvme,drive=third,serial=late".to_owned();
    ["-drive".to_owned(), drive, "-device".to_owned(), device]
}
