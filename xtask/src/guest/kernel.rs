//! A distribution's kernel for the guest: downloaded as a package and unpacked into the target
//! folder, never installed, so that the machine's own boot is left alone.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::setup;
use crate::step::quietly;

/// Which packages are tried, best first, and which modules the guest loads where the kernel has them as such.
pub(crate) struct Wish {
    pub(crate) packages: &'static [&'static str],
    pub(crate) modules: &'static [&'static str],
}

/// A disk of virtio and a file system: Debian's small kernel has them, and is the quickest to fetch.
pub(crate) const SMALL: Wish = Wish {
    packages: &[
        "linux-image-cloud-amd64",
        "linux-image-amd64",
        "linux-image-virtual",
        "linux-image-generic",
    ],
    modules: &["virtio_pci", "virtio_blk", "ext4", "crc32c_generic"],
};

/// A kernel image, and its modules in the order of loading.
pub(crate) struct Kernel {
    pub(crate) image: PathBuf,
    pub(crate) release: String,
    /// File name and content, uncompressed.
    pub(crate) modules: Vec<(String, Vec<u8>)>,
    /// What is compiled into the image, as file names of modules.
    builtin: BTreeSet<String>,
}

impl Kernel {
    /// Takes what lies below `folder`, or downloads it first.
    pub(crate) fn fetch(folder: &Path, wish: &Wish) -> Result<Kernel, String> {
        if image_in(folder).is_none() {
            download(folder, wish.packages)?;
        }
        let image = image_in(folder).ok_or("the kernel package holds no boot/vmlinuz-*")?;
        let modules = ["lib/modules", "usr/lib/modules"]
            .map(|modules| folder.join(modules))
            .into_iter()
            .find(|modules| modules.is_dir());
        Kernel::take(
            &image,
            &modules.unwrap_or_else(|| folder.to_path_buf()),
            wish,
        )
    }

    /// A kernel image with its modules, which lie anywhere below `modules`.
    pub(crate) fn take(image: &Path, modules: &Path, wish: &Wish) -> Result<Kernel, String> {
        if !image.is_file() {
            return Err(format!("there is no kernel image {}", image.display()));
        }
        if !modules.is_dir() {
            return Err(format!(
                "there is no folder of modules {}",
                modules.display()
            ));
        }
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        let files = files_below(modules);
        let mut loaded = Vec::new();
        for wanted in wish.modules {
            add_module(wanted, &files, &mut loaded)?;
        }
        Ok(Kernel {
            image: image.to_path_buf(),
            release: name.trim_start_matches("vmlinuz-").to_owned(),
            modules: loaded,
            builtin: builtin(&files),
        })
    }

    /// The image as QEMU can start it without the guest unpacking it first, which takes a translated one
    /// seconds (Xen's PVH entry); the image itself where it has no such entry.
    pub(crate) fn quick_image(&self, folder: &Path) -> Result<PathBuf, String> {
        let packed = read(&self.image)?;
        let Some((tool, payload)) = payload(&packed) else {
            return Ok(self.image.clone());
        };
        let source = folder.join("vmlinux.packed");
        let told = |error: std::io::Error| format!("{}: {error}", source.display());
        std::fs::write(&source, payload).map_err(told)?;
        // A size stands behind the payload, which the tools take for garbage and complain of.
        let output = std::process::Command::new(tool)
            .arg("-dcf")
            .arg(&source)
            .output();
        let unpacked = output.map_err(told)?.stdout;
        std::fs::remove_file(&source).map_err(told)?;
        if !has_pvh_entry(&unpacked) {
            return Ok(self.image.clone());
        }
        let target = folder.join("vmlinux");
        std::fs::write(&target, unpacked).map_err(told)?;
        Ok(target)
    }

    /// Whether it has a driver: as a module that was wished for, or compiled in.
    pub(crate) fn has(&self, driver: &str) -> bool {
        let file_name = format!("{driver}.ko");
        self.builtin.contains(&file_name) || self.modules.iter().any(|(name, _)| *name == file_name)
    }
}

/// What an x86 boot image unpacks, and with what; Linux `Documentation/arch/x86/boot.rst`.
fn payload(image: &[u8]) -> Option<(&'static str, &[u8])> {
    const SETUP_SECTORS: usize = 0x1F1;
    const OFFSET: usize = 0x248;
    const LENGTH: usize = 0x24C;
    let number = |at: usize| {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(bytes) as usize)
    };
    let start = (usize::from(*image.get(SETUP_SECTORS)?) + 1) * 512 + number(OFFSET)?;
    let payload = image.get(start..start.checked_add(number(LENGTH)?)?)?;
    let tools: [(&str, &[u8]); 3] = [
        ("xz", b"\xFD7zXZ"),
        ("zstd", b"\x28\xB5\x2F\xFD"),
        ("gzip", b"\x1F\x8B"),
    ];
    let tool = tools.iter().find(|(_, magic)| payload.starts_with(magic))?;
    Some((tool.0, payload))
}

/// An ELF image with the note that names its entry: type 18 of "Xen".
fn has_pvh_entry(image: &[u8]) -> bool {
    const NOTE: &[u8] = b"\x12\0\0\0Xen\0";
    image.starts_with(b"\x7FELF") && image.windows(NOTE.len()).any(|window| window == NOTE)
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// The list that a kernel's build leaves beside its modules.
fn builtin(files: &[PathBuf]) -> BTreeSet<String> {
    let list = files
        .iter()
        .find(|path| path.ends_with("modules.builtin"))
        .and_then(|path| std::fs::read_to_string(path).ok());
    let list = list.unwrap_or_default();
    list.lines()
        .map(|line| module_name(Path::new(line)))
        .collect()
}

fn image_in(folder: &Path) -> Option<PathBuf> {
    let boot = std::fs::read_dir(folder.join("boot")).ok()?;
    let mut images = boot.flatten().map(|entry| entry.path());
    images.find(|path| {
        path.file_name()
            .is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz-"))
    })
}

fn download(folder: &Path, wanted: &[&str]) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut packages = named_packages(folder, wanted);
    if packages.is_empty() {
        setup::refresh_lists(folder)?;
        packages = named_packages(folder, wanted);
    }
    if packages.is_empty() {
        return Err(format!("apt knows none of the kernel packages {wanted:?}"));
    }
    println!(
        "downloading for the guest (unpacked below target, not installed): {}",
        packages.join(" ")
    );
    let words: Vec<&str> = ["apt-get", "download"]
        .into_iter()
        .chain(packages.iter().map(String::as_str))
        .collect();
    if quietly(folder, &words, &[]).is_err() {
        // The lists may be older than the archive: the version that they name is gone from it.
        setup::refresh_lists(folder)?;
        quietly(folder, &words, &[])?;
    }
    for package in files_in(folder).filter(|path| path.extension().is_some_and(|e| e == "deb")) {
        let package = package.to_string_lossy().into_owned();
        quietly(folder, &["dpkg-deb", "-x", &package, "."], &[])?;
        std::fs::remove_file(&package).map_err(|error| format!("{package}: {error}"))?;
    }
    Ok(())
}

/// The image's package and those of its modules, behind the first name that apt knows.
fn named_packages(folder: &Path, wanted: &[&str]) -> Vec<String> {
    for meta in wanted {
        let mut found = BTreeSet::new();
        let mut open = vec![(*meta).to_owned()];
        while let Some(name) = open.pop() {
            let listing = quietly(folder, &["apt-cache", "depends", "--important", &name], &[]);
            for need in depends(&listing.unwrap_or_default()) {
                if found.insert(need.clone()) {
                    open.push(need);
                }
            }
        }
        if !found.is_empty() {
            return found.into_iter().collect();
        }
    }
    Vec::new()
}

/// Kernel packages in what `apt-cache depends` prints.
fn depends(listing: &str) -> Vec<String> {
    let names = listing
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "));
    let is_kernel = |name: &&str| {
        // The image is wanted signed or unsigned, firmware and tools are not.
        name.starts_with("linux-image-") || name.starts_with("linux-modules-")
    };
    names.filter(is_kernel).map(str::to_owned).collect()
}

fn files_in(folder: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(folder) = open.pop() {
        for path in files_in(&folder) {
            if path.is_dir() && !path.is_symlink() {
                open.push(path);
            } else {
                found.push(path);
            }
        }
    }
    found
}

/// Adds a module behind those that it needs; one that is no file is built into the kernel.
fn add_module(
    name: &str,
    files: &[PathBuf],
    modules: &mut Vec<(String, Vec<u8>)>,
) -> Result<(), String> {
    let file_name = format!("{}.ko", name.replace('-', "_"));
    if modules.iter().any(|(known, _)| *known == file_name) {
        return Ok(());
    }
    let Some(path) = files.iter().find(|path| module_name(path) == file_name) else {
        return Ok(());
    };
    let content = uncompressed(path)?;
    for need in needs(&content) {
        add_module(&need, files, modules)?;
    }
    modules.push((file_name, content));
    Ok(())
}

fn module_name(path: &Path) -> String {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .replace('-', "_");
    name.trim_end_matches(".xz")
        .trim_end_matches(".zst")
        .to_owned()
}

fn uncompressed(path: &Path) -> Result<Vec<u8>, String> {
    let tool = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return read(path),
    };
    let output = std::process::Command::new(tool)
        .arg("-dc")
        .arg(path)
        .output();
    match output {
        Ok(output) if output.status.success() => Ok(output.stdout),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(format!("{tool}, to unpack {}: {error}", path.display())),
    }
}

/// Names in the `depends=` entry of a module's `.modinfo` section.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let list = module[at + KEY.len()..]
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default();
    let list = String::from_utf8_lossy(list).into_owned();
    list.split(',')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_modules_needs_stand_in_its_modinfo() {
        assert_eq!(
            needs(b"\x7fELF\0license=GPL\0depends=virtio,virtio_ring\0x"),
            ["virtio", "virtio_ring"]
        );
        assert!(needs(b"\0depends=\0name=x\0").is_empty());
        assert!(needs(b"").is_empty());
    }

    #[test]
    fn a_boot_image_says_where_its_payload_lies() {
        let mut image = vec![0; 4096];
        image[0x1F1] = 1;
        image[0x248..0x24C].copy_from_slice(&100_u32.to_le_bytes());
        image[0x24C..0x250].copy_from_slice(&8_u32.to_le_bytes());
        assert!(payload(&image).is_none(), "no format that is known");
        image[1124..1132].copy_from_slice(b"\xFD7zXZ\0ab");
        assert_eq!(payload(&image), Some(("xz", &b"\xFD7zXZ\0ab"[..])));
        image[0x24C..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(payload(&image).is_none(), "beyond the end");
        assert!(payload(b"MZ").is_none());
    }

    #[test]
    fn only_an_elf_image_with_the_note_is_started_by_it() {
        assert!(has_pvh_entry(
            b"\x7FELF....\x04\0\0\0\x08\0\0\0\x12\0\0\0Xen\0entry"
        ));
        assert!(!has_pvh_entry(
            b"\x7FELF....\x04\0\0\0\x08\0\0\0\x11\0\0\0Xen\0entry"
        ));
        assert!(!has_pvh_entry(b"\x12\0\0\0Xen\0"));
    }

    #[test]
    fn of_a_meta_package_only_kernels_are_taken() {
        let listing = "linux-image-virtual\n  Depends: linux-image-6.8.0-1-generic\n  Depends: linux-firmware\n |Depends: x\n  Depends: linux-modules-6.8.0-1-generic\n";
        assert_eq!(
            depends(listing),
            [
                "linux-image-6.8.0-1-generic",
                "linux-modules-6.8.0-1-generic"
            ]
        );
    }

    #[test]
    fn compressed_modules_are_known_by_their_names() {
        assert_eq!(
            module_name(Path::new("a/virtio-blk.ko.xz")),
            "virtio_blk.ko"
        );
        assert_eq!(
            module_name(Path::new("a/virtio_pci.ko.zst")),
            "virtio_pci.ko"
        );
        assert_eq!(module_name(Path::new("a/ext4.ko")), "ext4.ko");
    }
}
