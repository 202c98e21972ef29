//! Everything that all guests share: kernel, initramfs, accelerator, programs, the filled disk.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use cleave_rig::guest::{self, Accelerator, Initramfs, Kernel, QEMU, boot};
use cleave_rig::{At, Result, quietly};
use itertools::Itertools;

use super::options::{AcceleratorChoice, GuestBenchOptions};
use super::subject::Subject;
use crate::equipment::Equipment;
use crate::filled::random_file;

/// Programs of others that the guests need, and that run in them.
pub(crate) const PROGRAMS: [&str; 10] = [
    "qemu-system-x86_64",
    "qemu-storage-daemon",
    "fio",
    "busybox",
    "mkfs.ext4",
    "fstrim",
    "taskset",
    "setpriv",
    "xz",
    "zstd",
];

/// Set up once for all guests of a run.
pub(super) struct GuestKit {
    pub(super) kernel: Kernel,
    /// The kernel that QEMU starts, unpacked if that works.
    pub(super) image: PathBuf,
    initramfs: Initramfs,
    pub(super) accelerator: Accelerator,
    pub(super) cleave: PathBuf,
    /// Holds files that are needed only during the run: sockets, consoles, initramfs.
    pub(super) folder: PathBuf,
    /// Filled with bytes that nothing below can leave out.
    pub(super) filled: PathBuf,
    /// Held while it runs: two runs would measure each other.
    _lock: File,
    /// The devices that this QEMU can emulate, as its help lists them.
    devices: String,
}

impl GuestKit {
    pub(super) fn set_up(equipment: &Equipment, options: &GuestBenchOptions) -> Result<GuestKit> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err("the guests boot an x86-64 kernel and need an x86-64 machine".to_owned());
        }
        let count = std::thread::available_parallelism().map_or(1, |count| count.get());
        if count < 2 {
            return Err("a guest and its server need a CPU each; this machine has one".to_owned());
        }
        let missing = equipment.provide(&PROGRAMS)?;
        if !missing.is_empty() {
            let packages = missing.iter().map(|one| one.package).unique().join(" ");
            return Err(format!("the guests need these packages: {packages}"));
        }
        let [cleave, _] = equipment.programs(options.pace.pace())?;
        let store = equipment.folder().join("guest");
        let folder = store.join("bench");
        std::fs::create_dir_all(&folder).at(&folder)?;
        let lock = lock(&folder.join("lock"))?;
        clean(&folder);
        let kernel = match (&options.kernel.image, &options.kernel.modules) {
            (Some(image), Some(modules)) => Kernel::other(image, modules)?,
            _ => Kernel::full(&store)?,
        };
        let initramfs = Initramfs::build(&store, &kernel)?;
        let accelerator = accelerator(options.accelerator, &kernel, &initramfs, &folder)?;
        let bytes = options.effort().disk_bytes;
        Ok(GuestKit {
            _lock: lock,
            image: kernel.quick_image(&folder)?,
            filled: random_file(&folder.join(format!("filled-{}M.img", bytes >> 20)), bytes)?,
            devices: quietly(&store, "{} -device help", &[&QEMU])?,
            kernel,
            initramfs,
            accelerator,
            cleave,
            folder,
        })
    }

    /// Returns why a subject cannot be measured here.
    pub(super) fn lacks(&self, subject: &Subject) -> Option<String> {
        let (driver, device, release) = (&subject.driver, &subject.device, &self.kernel.release);
        match self.devices.contains(&format!("name \"{device}\"")) {
            _ if !self.kernel.has(driver) => Some(format!(
                "the guest's kernel {release} has no driver `{driver}`"
            )),
            false => Some(format!("this QEMU has no device `{device}`")),
            true => None,
        }
    }

    /// How a guest with so many disks boots; its initramfs is written once.
    pub(super) fn boot(&self, disks: usize) -> Result<Vec<String>> {
        let path = initramfs_path(&self.folder, disks);
        if !path.exists() {
            let script = include_str!("scripts/bench.sh");
            let settings = format!("DISKS={disks}\n");
            self.initramfs.write(&path, script, &settings, &[])?;
        }
        Ok(boot(&self.image, &path, ""))
    }

    /// Makes a file of the disk's size without a block in it.
    pub(super) fn thin(&self, bytes: u64) -> Result<PathBuf> {
        let path = self.folder.join("thin.img");
        let file = File::create(&path).and_then(|file| file.set_len(bytes));
        file.at(&path).map(|()| path)
    }
}

impl Drop for GuestKit {
    fn drop(&mut self) {
        clean(&self.folder);
    }
}

/// Removes the initramfs files of a run, 90 MB each, also those of a run that was killed.
fn clean(folder: &Path) {
    for disks in 0..16 {
        // A file that stays is only untidy.
        let _ = std::fs::remove_file(initramfs_path(folder, disks));
    }
}

fn initramfs_path(folder: &Path, disks: usize) -> PathBuf {
    folder.join(format!("bench-{disks}.initramfs"))
}

fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).at(path)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err("another guest-bench runs in this folder".to_owned()),
        Err(TryLockError::Error(error)) => Err(error).at(path),
    }
}

fn accelerator(
    wanted: AcceleratorChoice,
    kernel: &Kernel,
    initramfs: &Initramfs,
    folder: &Path,
) -> Result<Accelerator> {
    if wanted == AcceleratorChoice::Tcg {
        return Ok(Accelerator::Tcg);
    }
    match guest::probe(QEMU, kernel, initramfs, folder)? {
        Accelerator::Tcg if wanted == AcceleratorChoice::Kvm => {
            Err("no guest boots with KVM here; `--accel tcg` needs none".to_owned())
        }
        found => Ok(found),
    }
}
