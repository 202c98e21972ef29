//! A distribution's kernel for the guest: downloaded as a package and unpacked into a folder, never
//! installed, so that the machine's own boot is left alone.

use std::path::{Path, PathBuf};

use super::host;
use crate::command::{At, Result, words};

/// A kind of kernel: where it is unpacked, which packages are tried, best first, and which modules the guest loads where the
/// kernel has them as such.
struct KernelSpec {
    folder: &'static str,
    packages: &'static [&'static str],
    modules: &'static [&'static str],
}

/// A disk of virtio and a file system: Debian's small kernel has them, and is the quickest to fetch.
const SMALL: KernelSpec = KernelSpec {
    folder: "kernel",
    packages: &[
        "linux-image-cloud-amd64",
        "linux-image-amd64",
        "linux-image-virtual",
        "linux-image-generic",
    ],
    modules: &["virtio_pci", "virtio_blk", "ext4", "crc32c_generic"],
};

/// A distribution's whole kernel: the small ones for clouds leave the controllers of real machines out.
const FULL: KernelSpec = KernelSpec {
    folder: "kernel-full",
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

/// A kernel image, and its modules.
pub struct Kernel {
    /// The image, as it is packaged.
    pub image: PathBuf,
    /// The release, as the image's name tells it.
    pub release: String,
    /// The modules lie anywhere below it.
    folder: PathBuf,
    modules: &'static [&'static str],
}

impl Kernel {
    /// Returns the kernel of a virtual machine with one disk, downloaded into a folder where it is not there.
    pub fn small(folder: &Path) -> Result<Kernel> {
        Kernel::fetch(folder, &SMALL)
    }

    /// Returns a kernel with the drivers of real controllers, downloaded into a folder where it is not there.
    pub fn full(folder: &Path) -> Result<Kernel> {
        Kernel::fetch(folder, &FULL)
    }

    /// Takes the image of another kernel, with its modules for real controllers, which lie anywhere below `folder`.
    pub fn other(image: &Path, folder: &Path) -> Result<Kernel> {
        Kernel::take(image, folder, &FULL)
    }

    fn fetch(folder: &Path, spec: &KernelSpec) -> Result<Kernel> {
        let folder = folder.join(spec.folder);
        let image = || {
            let mut files = folder.join("boot").read_dir().ok()?.flatten();
            let is_image = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("vmlinuz-");
            Some(files.find(|file| is_image(&file.file_name()))?.path())
        };
        if image().is_none() {
            std::fs::create_dir_all(&folder).at(&folder)?;
            let names = host::run(&folder, &[&["packages"], spec.packages].concat())?;
            let names = String::from_utf8_lossy(&names);
            let to = folder.display();
            println!("downloading for the guest (unpacked below {to}, not installed): {names}");
            host::run(&folder, &["fetch", &names])?;
        }
        let image = image().ok_or("the kernel package holds no boot/vmlinuz-*")?;
        Kernel::take(&image, &folder, spec)
    }

    fn take(image: &Path, folder: &Path, spec: &KernelSpec) -> Result<Kernel> {
        if !image.is_file() {
            return Err(format!("there is no kernel image {}", image.display()));
        }
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        Ok(Kernel {
            image: std::path::absolute(image).at(image)?,
            release: name.trim_start_matches("vmlinuz-").to_owned(),
            folder: folder.canonicalize().at(folder)?,
            modules: spec.modules,
        })
    }

    /// Puts the wanted modules into a folder, uncompressed, and their order of loading.
    pub(super) fn copy_modules(&self, to: &Path) -> Result {
        std::fs::create_dir_all(to).at(to)?;
        std::fs::write(to.join("order"), "").at(to)?;
        let to = to.to_string_lossy();
        let mut names = self.modules.iter();
        names.try_for_each(|name| host::run(&self.folder, &["module", &to, name]).map(drop))
    }

    /// Returns the image as QEMU can start it without the guest unpacking it first, which takes a translated one
    /// seconds; the image itself where it has no entry for that.
    pub fn quick_image(&self, folder: &Path) -> Result<PathBuf> {
        let target = folder.join("vmlinux");
        let [image, to] = [&self.image, &target].map(|path| path.to_string_lossy());
        let quick = host::run(folder, &["quick", &image, &to]);
        Ok(quick.map_or(self.image.clone(), |_| target))
    }

    /// Returns true if the kernel has a driver: as a module that was asked for, or compiled in.
    pub fn has(&self, driver: &str) -> bool {
        host::run(&self.folder, &["has", driver]).is_ok()
    }
}

/// Returns QEMU's words to load a kernel's image and an initramfs, with further parameters on the kernel's command line.
pub fn boot(image: &Path, initramfs: &Path, parameters: &str) -> Vec<String> {
    // The kernel gets another address in each boot: at the old one, TCG would have to drop the code it has translated.
    // The kernel's own tests of its ciphers once hung an emulated CPU for minutes, before there was a disk.
    let console = format!("console=ttyS0 quiet loglevel=1 panic=-1 cryptomgr.notests {parameters}");
    let (image, initramfs) = (image.display(), initramfs.display());
    let line = "-kernel {} -initrd {} -append {}";
    words(line, &[&image, &initramfs, &console])
}
