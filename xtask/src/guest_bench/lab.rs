//! Everything that all guests share: kernel, initramfs, accelerator, programs, the filled disk.

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use super::options::{Effort, Options, Wanted};
use super::subject::{Server, Subject};
use crate::bench::image::random_file;
use crate::built;
use crate::guest;
use crate::guest::initramfs::Initramfs;
use crate::guest::kernel::{Kernel, Wish};
use crate::guest::machine::{Accelerator, QEMU};
use crate::setup;
use crate::step::quietly;

/// A distribution's whole kernel: the small ones for clouds leave the controllers of real machines out.
const FULL: Wish = Wish {
    packages: &["linux-image-amd64", "linux-image-generic"],
    modules: &[
        "crc64_rocksoft_generic",
        "crct10dif_generic",
        "virtio_pci",
        "virtio_console",
        "virtio_blk",
        "virtio_scsi",
        "sd_mod",
        "ata_piix",
        "ahci",
        "sym53c8xx",
        "megaraid_sas",
        "vmw_pvscsi",
        "nvme",
    ],
};

/// Set up once for all guests of a run.
pub(super) struct Lab {
    pub(super) kernel: Kernel,
    /// The kernel that QEMU starts, unpacked if that works.
    pub(super) image: PathBuf,
    initramfs: Initramfs,
    pub(super) accelerator: Accelerator,
    pub(super) cleave: PathBuf,
    /// Of what is needed only while it runs: sockets, consoles, initramfs.
    pub(super) folder: PathBuf,
    /// Filled with bytes that nothing below can leave out.
    pub(super) filled: PathBuf,
    /// Held while it runs: two runs would measure each other.
    _lock: File,
    /// The devices that this QEMU can emulate.
    devices: BTreeSet<String>,
    /// The help of `cleave serve`.
    help: String,
}

impl Lab {
    pub(super) fn set_up(root: &Path, options: &Options) -> Result<Lab, String> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err("the guests boot an x86-64 kernel and need an x86-64 machine".to_owned());
        }
        let count = std::thread::available_parallelism().map_or(1, |count| count.get());
        if count < 2 {
            return Err("a guest and its server need a CPU each; this machine has one".to_owned());
        }
        setup::provide(root)?;
        let target = root.join("target");
        let cleave = match options.effort() {
            // A check that the harness works takes what the tests have built already.
            Effort::Smoke => {
                let [cleave, _] = built::programs(root)?;
                cleave
            }
            Effort::Quick | Effort::Whole => {
                println!("building for release");
                let build = "cargo build --release --locked -p cleave-daemon";
                let words: Vec<&str> = build.split(' ').collect();
                // A target folder of the caller's would leave an old program here.
                let to = target.to_string_lossy();
                quietly(root, &words, &[("CARGO_TARGET_DIR", &to)])?;
                target.join("release/cleave")
            }
        };
        let folder = target.join("guest/bench");
        std::fs::create_dir_all(&folder)
            .map_err(|error| format!("{}: {error}", folder.display()))?;
        let lock = lock(&folder.join("lock"))?;
        clean(&folder);
        let kernel = match options.kernel() {
            Some((image, modules)) => Kernel::take(image, modules, &FULL)?,
            None => fetch_kernel(root)?,
        };
        let initramfs = Initramfs::build(&kernel)?;
        let accelerator = accelerator(options.accelerator, &kernel, &initramfs, &folder)?;
        let help = quietly(root, &[&cleave.to_string_lossy(), "serve", "--help"], &[])?;
        let bytes = options.plan().disk_bytes;
        Ok(Lab {
            _lock: lock,
            image: kernel.quick_image(&folder)?,
            filled: random_file(&folder.join(format!("filled-{}M.img", bytes >> 20)), bytes)?,
            devices: devices_in(&quietly(root, &[QEMU, "-device", "help"], &[])?),
            kernel,
            initramfs,
            accelerator,
            cleave,
            folder,
            help,
        })
    }

    /// Why a subject cannot be measured here.
    pub(super) fn lacks(&self, subject: &Subject) -> Option<String> {
        let Subject { driver, device, .. } = subject;
        if !self.kernel.has(driver) {
            let release = &self.kernel.release;
            return Some(format!(
                "the guest's kernel {release} has no driver `{driver}`"
            ));
        }
        if !self.devices.contains(*device) {
            return Some(format!("this QEMU has no device `{device}`"));
        }
        let Server::Cleave(options) = &subject.server else {
            return None;
        };
        let unknown = options
            .iter()
            .find(|(name, value)| !knows(&self.help, name, value));
        unknown.map(|(name, value)| format!("this cleave has no `{name} {value}`"))
    }

    /// The initramfs of a guest with so many disks; written once.
    pub(super) fn initramfs_for(&self, disks: usize) -> Result<PathBuf, String> {
        let path = initramfs_path(&self.folder, disks);
        if !path.exists() {
            let settings = format!("DISKS={disks}\n");
            self.initramfs
                .write(&path, include_str!("scripts/bench.sh"), &settings)?;
        }
        Ok(path)
    }

    /// A file of the disk's size without a block in it.
    pub(super) fn thin(&self, bytes: u64) -> Result<PathBuf, String> {
        let path = self.folder.join("thin.img");
        let told = |error: std::io::Error| format!("{}: {error}", path.display());
        File::create(&path)
            .and_then(|file| file.set_len(bytes))
            .map_err(told)?;
        Ok(path)
    }
}

/// The kernel of the guests, downloaded where it is not there.
pub(crate) fn fetch_kernel(root: &Path) -> Result<Kernel, String> {
    Kernel::fetch(&root.join("target/guest/kernel-full"), &FULL)
}

impl Drop for Lab {
    fn drop(&mut self) {
        clean(&self.folder);
    }
}

/// Takes away what a run writes for itself, 90 MB each; also what one that was killed left.
fn clean(folder: &Path) {
    for disks in 0..16 {
        // A file that stays is only untidy.
        let _ = std::fs::remove_file(initramfs_path(folder, disks));
    }
}

fn initramfs_path(folder: &Path, disks: usize) -> PathBuf {
    folder.join(format!("bench-{disks}.initramfs"))
}

fn lock(path: &Path) -> Result<File, String> {
    let told = |error: std::io::Error| format!("{}: {error}", path.display());
    let file = File::create(path).map_err(told)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err("another guest-bench runs in this checkout".to_owned())
        }
        Err(TryLockError::Error(error)) => Err(told(error)),
    }
}

fn accelerator(
    wanted: Wanted,
    kernel: &Kernel,
    initramfs: &Initramfs,
    folder: &Path,
) -> Result<Accelerator, String> {
    match wanted {
        Wanted::Tcg => Ok(Accelerator::Tcg),
        Wanted::Auto => guest::probe(kernel, initramfs, folder),
        Wanted::Kvm => match guest::probe(kernel, initramfs, folder)? {
            Accelerator::Kvm => Ok(Accelerator::Kvm),
            Accelerator::Tcg => {
                Err("no guest boots with KVM here; `--accel tcg` needs none".to_owned())
            }
        },
    }
}

/// Names in lines like `name "nvme", bus PCI`.
fn devices_in(help: &str) -> BTreeSet<String> {
    let name = |line: &str| {
        let (_, rest) = line.split_once("name \"")?;
        Some(rest.split_once('"')?.0.to_owned())
    };
    help.lines().filter_map(name).collect()
}

/// Whether an option's own part of the help names a value, or takes any.
fn knows(help: &str, option: &str, value: &str) -> bool {
    let Some((_, behind)) = help.split_once(&format!("\n      {option} ")) else {
        return false;
    };
    let own = behind.split("\n      --").next().unwrap_or_default();
    own.split(|letter: char| !letter.is_alphanumeric() && letter != '-')
        .any(|word| word == value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_knows_the_values_in_its_own_part_of_the_help() {
        let help = "\n      --completion <HOW>\n          waits\n          [possible values: interrupt, poll]\n\n      --split <HOW>\n          off, auto, or adaptive\n";
        assert!(knows(help, "--completion", "poll"));
        assert!(!knows(help, "--completion", "adaptive"));
        assert!(knows(help, "--split", "off"));
        assert!(!knows(help, "--chunk", "off"));
    }

    #[test]
    fn devices_are_named_in_quotes() {
        let help = "Storage devices:\nname \"ahci\", bus PCI, desc \"x\"\nname \"nvme\", bus PCI\n";
        assert_eq!(
            devices_in(help).into_iter().collect::<Vec<_>>(),
            ["ahci", "nvme"]
        );
    }
}
