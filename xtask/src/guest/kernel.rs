//! A distribution's kernel for the guest: downloaded as a package and unpacked into the target
//! folder, never installed, so that the machine's own boot is left alone.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::setup;
use crate::step::{At, line, quietly};

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
    /// Drivers that are compiled into the image, as file names of modules.
    builtin: BTreeSet<String>,
}

impl Kernel {
    /// Takes the kernel below `folder`, or downloads it first.
    pub(crate) fn fetch(folder: &Path, wish: &Wish) -> Result<Kernel, String> {
        if image_in(folder).is_none() {
            download(folder, wish.packages)?;
        }
        let image = image_in(folder).ok_or("the kernel package holds no boot/vmlinuz-*")?;
        Kernel::take(&image, folder, wish)
    }

    /// A kernel image with its modules, which lie anywhere below `folder`.
    pub(crate) fn take(image: &Path, folder: &Path, wish: &Wish) -> Result<Kernel, String> {
        if !image.is_file() {
            return Err(format!("there is no kernel image {}", image.display()));
        }
        let listing = line(folder, "find . -name *.ko* -o -name modules.builtin", &[]);
        let listing =
            listing.map_err(|why| format!("no modules in {}: {why}", folder.display()))?;
        let files: Vec<PathBuf> = listing.lines().map(|file| folder.join(file)).collect();
        let mut modules = Vec::new();
        for wanted in wish.modules {
            add_module(wanted, &files, &mut modules)?;
        }
        // The kernel's build leaves a list of what is compiled in beside its modules.
        let list = files.iter().find(|path| path.ends_with("modules.builtin"));
        let builtin = list.and_then(|list| std::fs::read_to_string(list).ok());
        let builtin = builtin.unwrap_or_default();
        let builtin = builtin.lines().map(|line| module_name(Path::new(line)));
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        Ok(Kernel {
            image: image.to_path_buf(),
            release: name.trim_start_matches("vmlinuz-").to_owned(),
            modules,
            builtin: builtin.collect(),
        })
    }

    /// The image as QEMU can start it without the guest unpacking it first, which takes a translated one
    /// seconds (Xen's PVH entry); the image itself where it has no such entry.
    pub(crate) fn quick_image(&self, folder: &Path) -> Result<PathBuf, String> {
        let packed = std::fs::read(&self.image).at(&self.image)?;
        let Some((tool, payload)) = payload(&packed) else {
            return Ok(self.image.clone());
        };
        let target = folder.join("vmlinux");
        std::fs::write(&target, payload).at(&target)?;
        // A size stands behind the payload; the tools report it as garbage, and fail.
        let output = Command::new(tool).arg("-dcf").arg(&target).output();
        let unpacked = output.at(tool)?.stdout;
        std::fs::write(&target, &unpacked).at(&target)?;
        Ok(if has_pvh_entry(&unpacked) {
            target
        } else {
            self.image.clone()
        })
    }

    /// Whether it has a driver: as a module that was wished for, or compiled in.
    pub(crate) fn has(&self, driver: &str) -> bool {
        let file_name = format!("{driver}.ko");
        self.builtin.contains(&file_name) || self.modules.iter().any(|(name, _)| *name == file_name)
    }
}

/// The compressed part of an x86 boot image, and the program that unpacks it; Linux `Documentation/arch/x86/boot.rst`.
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

fn image_in(folder: &Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(folder.join("boot")).ok()?.flatten();
    let mut images =
        files.filter(|file| file.file_name().to_string_lossy().starts_with("vmlinuz-"));
    images.next().map(|file| file.path())
}

fn download(folder: &Path, wanted: &[&str]) -> Result<(), String> {
    std::fs::create_dir_all(folder).at(folder)?;
    let mut packages = named_packages(folder, wanted);
    if packages.is_empty() {
        setup::refresh_lists(folder)?;
        packages = named_packages(folder, wanted);
    }
    if packages.is_empty() {
        return Err(format!("apt knows none of the kernel packages {wanted:?}"));
    }
    let names = packages.into_iter().collect::<Vec<_>>().join(" ");
    println!("downloading for the guest (unpacked below target, not installed): {names}");
    let download = || line(folder, &format!("apt-get download {names}"), &[]);
    if download().is_err() {
        // The lists may be older than the archive, which then lacks the version that they name.
        setup::refresh_lists(folder)?;
        download()?;
    }
    let unpack = "set -e; for package in *.deb; do dpkg-deb -x $package .; rm $package; done";
    quietly(folder, &["sh", "-c", unpack], &[]).map(drop)
}

/// The image's package and those of its modules, behind the first name that apt knows.
fn named_packages(folder: &Path, wanted: &[&str]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for meta in wanted {
        let mut open = vec![(*meta).to_owned()];
        while let Some(name) = open.pop() {
            let listing = line(
                folder,
                &format!("apt-cache depends --important {name}"),
                &[],
            );
            let needs = depends(&listing.unwrap_or_default());
            open.extend(needs.into_iter().filter(|need| found.insert(need.clone())));
        }
        if !found.is_empty() {
            break;
        }
    }
    found
}

/// Kernel packages in the output of `apt-cache depends`: the image, signed or unsigned, without firmware and tools.
fn depends(listing: &str) -> Vec<String> {
    let names = listing
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "));
    let is_kernel =
        |name: &&str| name.starts_with("linux-image-") || name.starts_with("linux-modules-");
    names.filter(is_kernel).map(str::to_owned).collect()
}

/// Adds a module behind those that it needs; one that is no file is built into the kernel.
fn add_module(
    name: &str,
    files: &[PathBuf],
    modules: &mut Vec<(String, Vec<u8>)>,
) -> Result<(), String> {
    let file_name = format!("{}.ko", name.replace('-', "_"));
    let is_known = modules.iter().any(|(known, _)| *known == file_name);
    let file = files.iter().find(|path| module_name(path) == file_name);
    let Some(path) = file.filter(|_| !is_known) else {
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
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.replace('-', "_");
    name.trim_end_matches(".xz")
        .trim_end_matches(".zst")
        .to_owned()
}

fn uncompressed(path: &Path) -> Result<Vec<u8>, String> {
    let tool = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return std::fs::read(path).at(path),
    };
    match Command::new(tool).arg("-dc").arg(path).output().at(tool)? {
        output if output.status.success() => Ok(output.stdout),
        output => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// Names in the `depends=` entry of a module's `.modinfo` section.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let at = module.windows(KEY.len()).position(|window| window == KEY);
    let rest = at.map_or(&[][..], |at| &module[at + KEY.len()..]);
    let list = rest.split(|byte| *byte == 0).next().unwrap_or_default();
    let list = String::from_utf8_lossy(list).into_owned();
    let names = list.split(',').filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
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
        let note = b"\x7FELF....\x04\0\0\0\x08\0\0\0\x12\0\0\0Xen\0entry";
        assert!(has_pvh_entry(note));
        assert!(!has_pvh_entry(&note.map(|byte| if byte == 0x12 {
            0x11
        } else {
            byte
        })));
        assert!(!has_pvh_entry(b"\x12\0\0\0Xen\0"));
    }

    #[test]
    fn of_a_meta_package_only_kernels_are_taken() {
        let listing = "linux-image-virtual\n  Depends: linux-image-6.8\n  Depends: linux-firmware\n |Depends: x\n";
        assert_eq!(depends(listing), ["linux-image-6.8"]);
    }

    #[test]
    fn compressed_modules_are_known_by_their_names() {
        for (file, name) in [
            ("a/virtio-blk.ko.xz", "virtio_blk.ko"),
            ("a/virtio_pci.ko.zst", "virtio_pci.ko"),
            ("a/ext4.ko", "ext4.ko"),
        ] {
            assert_eq!(module_name(Path::new(file)), name);
        }
    }
}
