//! A real Linux in QEMU: its kernel, what it boots into, and the machine.

mod host;
mod initramfs;
mod kernel;
mod machine;
mod monitor;

use std::path::Path;
use std::time::Duration;

use crate::command::{Result, command};
pub use initramfs::Initramfs;
pub use kernel::{Kernel, boot};
pub use machine::{
    Accelerator, CRASHED, Check, Machine, QEMU, VHOST_USER_DISK, failed, qemu, reconnect,
};
pub use monitor::Monitor;

/// A script that proves that an accelerator runs a guest at all. There is no disk.
const ALIVE: &str = "mark alive\npoweroff -f\n";

/// Returns KVM where it runs a guest, which a /dev/kvm alone does not prove, and TCG otherwise.
pub fn probe(
    program: &str,
    kernel: &Kernel,
    initramfs: &Initramfs,
    folder: &Path,
) -> Result<Accelerator> {
    if !Path::new("/dev/kvm").exists() {
        return Ok(Accelerator::Tcg);
    }
    let image = folder.join("probe.initramfs");
    initramfs.write(&image, ALIVE, "", &[])?;
    let line = qemu(
        program,
        Accelerator::Kvm,
        1,
        &[boot(&kernel.image, &image, "")],
    );
    let (log, limit) = (folder.join("probe.log"), Duration::from_secs(12));
    let mut machine = Machine::run(command(&line), &log, limit)?;
    if machine.expect("alive").is_ok() {
        return Ok(Accelerator::Kvm);
    }
    println!("guest: /dev/kvm is there, but does not run a guest");
    Ok(Accelerator::Tcg)
}
