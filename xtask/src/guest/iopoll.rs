//! The daemon inside the guest, on disks with polled queues, which hardly any machine that runs tests has.
//! The driver runs there too, and so do the engine's own tests of the polled ring, on a device that polls.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::machine::{Boot, Check, Machine, MachineSpec, pollable_disks};
use super::{BackendKind, Lab};
use crate::step::quietly;

/// The engine's tests take it for zeroes, and read all of it.
const DISK_BYTES: u64 = 4 << 20;
const LIMIT: Duration = Duration::from_secs(900);

pub(super) fn run(lab: &Lab, folder: &Path) -> Result<Vec<Check>, String> {
    if lab.kind != BackendKind::Cleave {
        return Ok(vec![("left-out-nobody-else-polls".to_owned(), Ok(()))]);
    }
    let image = |name: &str| {
        let path = folder.join(name);
        let made = File::create(&path).and_then(|file| file.set_len(DISK_BYTES));
        made.map(|()| path).map_err(|error| error.to_string())
    };
    let mut devices = pollable_disks(&image("nvme.img")?, &image("virtio.img")?);
    devices.extend(late_disk(&image("late.img")?));
    let (drive, tests) = built(&lab.root)?;
    let initramfs = folder.join("iopoll.initramfs");
    lab.initramfs.write_with(
        &initramfs,
        include_str!("scripts/iopoll.sh"),
        "DISK=/dev/vda\n",
        &[
            ("cleave", &lab.program),
            ("drive", &drive),
            ("engine-tests", &tests),
        ],
    )?;
    let machine = Machine::start(&MachineSpec {
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
    machine.finish()
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

/// The driver, and the engine's tests.
fn built(root: &Path) -> Result<(PathBuf, PathBuf), String> {
    let target = root.join("target");
    let target = [("CARGO_TARGET_DIR", &*target.to_string_lossy())];
    let drive = "build -p cleave-client --example drive";
    let tests = "test -p cleave-engine --lib --no-run";
    let [drive, tests] = [drive, tests].map(|what| {
        let line = format!("cargo --locked {what} --message-format json");
        let words: Vec<&str> = line.split_whitespace().collect();
        let printed = quietly(root, &words, &target)?;
        executable(&printed).ok_or(format!("`{line}` names no program"))
    });
    Ok((drive?, tests?))
}

/// The program that cargo's JSON lines name.
fn executable(printed: &str) -> Option<PathBuf> {
    let named = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        Some(PathBuf::from(line["executable"].as_str()?))
    };
    printed.lines().rev().find_map(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_names_the_program_that_it_has_built() {
        let printed = "{\"reason\":\"compiler-artifact\",\"executable\":null}\n\
                       {\"reason\":\"compiler-artifact\",\"executable\":\"/t/drive\"}\n\
                       {\"reason\":\"build-finished\",\"success\":true}\n";
        assert_eq!(executable(printed), Some("/t/drive".into()));
        assert_eq!(executable("{\"executable\":null}\nnoise"), None);
    }
}
