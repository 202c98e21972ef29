//! A distribution's kernel for the guest: downloaded as a package and unpacked into the target
//! folder, never installed, so that the machine's own boot is left alone.

use std::path::{Path, PathBuf};

use super::host;
use crate::step::{At, Result, words};

/// Which packages are tried, best first, and which modules the guest loads where the kernel has them as such.
pub(crate) struct KernelSpec {
    pub(crate) packages: &'static [&'static str],
    pub(crate) modules: &'static [&'static str],
}

/// A disk of virtio and a file system: Debian's small kernel has them, and is the quickest to fetch.
pub(crate) const SMALL: KernelSpec = KernelSpec {
    packages: &[
        "linux-image-cloud-amd64",
        "linux-image-amd64",
        "linux-image-virtual",
        "linux-image-generic",
    ],
    modules: &["virtio_pci", "virtio_blk", "ext4", "crc32c_generic"],
};

/// A kernel image, and its modules.
pub(crate) struct Kernel {
    pub(crate) image: PathBuf,
    pub(crate) release: String,
    /// The modules lie anywhere below it.
    folder: PathBuf,
    modules: &'static [&'static str],
}

impl Kernel {
    /// Takes the kernel below `folder`, or downloads it first.
    pub(crate) fn fetch(folder: &Path, spec: &KernelSpec) -> Result<Kernel> {
        let image = || {
            let mut files = folder.join("boot").read_dir().ok()?.flatten();
            let is_image = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("vmlinuz-");
            Some(files.find(|file| is_image(&file.file_name()))?.path())
        };
        if image().is_none() {
            std::fs::create_dir_all(folder).at(folder)?;
            let names = host::run(folder, &[&["packages"], spec.packages].concat())?;
            let names = String::from_utf8_lossy(&names);
            println!("downloading for the guest (unpacked below target, not installed): {names}");
            host::run(folder, &["fetch", &names])?;
        }
        let image = image().ok_or("the kernel package holds no boot/vmlinuz-*")?;
        Kernel::take(&image, folder, spec)
    }

    /// A kernel image with its modules, which lie anywhere below `folder`.
    pub(crate) fn take(image: &Path, folder: &Path, spec: &KernelSpec) -> Result<Kernel> {
        if !image.is_file() {
            return Err(format!("there is no kernel image {}", image.display()));
        }
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        Ok(Kernel {
            image: image.to_path_buf(),
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

    /// The image as QEMU can start it without the guest unpacking it first, which takes a translated one
    /// seconds; the image itself where it has no entry for that.
    pub(crate) fn quick_image(&self, folder: &Path) -> Result<PathBuf> {
        let target = folder.join("vmlinux");
        let [image, to] = [&self.image, &target].map(|path| path.to_string_lossy());
        let quick = host::run(&crate::root(), &["quick", &image, &to]);
        Ok(quick.map_or(self.image.clone(), |_| target))
    }

    /// Whether the kernel has a driver: as a module that was asked for, or compiled in.
    pub(crate) fn has(&self, driver: &str) -> bool {
        host::run(&self.folder, &["has", driver]).is_ok()
    }
}

/// QEMU loads a kernel's image and an initramfs, with further parameters on the kernel's command line.
pub(crate) fn boot(image: &Path, initramfs: &Path, parameters: &str) -> Vec<String> {
    // The kernel gets another address in each boot: at the old one, TCG would have to drop the code it has translated.
    let console = format!("console=ttyS0 quiet loglevel=1 panic=-1 {parameters}");
    let (image, initramfs) = (image.display(), initramfs.display());
    let line = "-kernel {} -initrd {} -append {}";
    words(line, &[&image, &initramfs, &console])
}
