//! A distribution's kernel for the guest: downloaded as a package and unpacked into the target
//! folder, never installed, so that the machine's own boot is left alone.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::setup;
use crate::step::{At, Result, line, quietly};

/// Which packages are tried, best first, and which modules the guest loads where the kernel has them as such.
pub(crate) struct KernelSpec {
    pub(crate) packages: &'static [&'static str],
    pub(crate) modules: &'static [&'static str],
}

/// The name under which the comparison in guests asks for a kernel.
pub(crate) use KernelSpec as Wish;

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

/// Prints the image's package and those of its modules, behind the first of the names that apt knows: the names may
/// stand for others, which stand for the image, which needs its modules. Neither firmware nor tools.
const PACKAGES: &str = r#"
needs() {
    apt-cache depends --important "$@" 2>/dev/null | sed -n 's/^ *Depends: \(linux-\(image\|modules\)-.*\)/\1/p'
}
for name; do
    first=$(needs $name) && [ -n "$first" ] && break
done
second=$(needs $first)
echo $first $second $(needs $second) | tr ' ' '\n' | sort -u"#;

/// Unpacks what was downloaded, and takes it away.
const UNPACK: &str = "set -e; for package in *.deb; do dpkg-deb -x $package .; rm $package; done";

/// Each passes on what it did not pack. A size stands behind a kernel, at which they fail once they have unpacked it.
const UNPACK_ANY: &str = r#"xz -dcf "$0" | zstd -dcf | gzip -dcf"#;

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
    pub(crate) fn fetch(folder: &Path, spec: &KernelSpec) -> Result<Kernel> {
        let image = || {
            let mut files = folder
                .join("boot")
                .read_dir()
                .ok()?
                .flatten()
                .map(|file| file.path());
            files.find(|path| path.to_string_lossy().contains("/boot/vmlinuz-"))
        };
        if image().is_none() {
            download(folder, spec.packages)?;
        }
        let image = image().ok_or("the kernel package holds no boot/vmlinuz-*")?;
        Kernel::take(&image, folder, spec)
    }

    /// A kernel image with its modules, which lie anywhere below `folder`.
    pub(crate) fn take(image: &Path, folder: &Path, spec: &KernelSpec) -> Result<Kernel> {
        if !image.is_file() {
            return Err(format!("there is no kernel image {}", image.display()));
        }
        let listing = line(folder, "find . -name *.ko* -o -name modules.builtin", &[]);
        let listing =
            listing.map_err(|why| format!("no modules in {}: {why}", folder.display()))?;
        let files: Vec<PathBuf> = listing.lines().map(|file| folder.join(file)).collect();
        let mut modules = Vec::new();
        for wanted in spec.modules {
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
    pub(crate) fn quick_image(&self, folder: &Path) -> Result<PathBuf> {
        let packed = std::fs::read(&self.image).at(&self.image)?;
        let target = folder.join("vmlinux");
        std::fs::write(&target, payload(&packed).unwrap_or_default()).at(&target)?;
        let unpacked = unpacked(&target)?;
        std::fs::write(&target, &unpacked).at(&target)?;
        Ok(if has_pvh_entry(&unpacked) {
            target
        } else {
            self.image.clone()
        })
    }

    /// Whether it has a driver: as a module that was asked for, or compiled in.
    pub(crate) fn has(&self, driver: &str) -> bool {
        let file_name = format!("{driver}.ko");
        self.builtin.contains(&file_name) || self.modules.iter().any(|(name, _)| *name == file_name)
    }
}

fn download(folder: &Path, wanted: &[&str]) -> Result {
    std::fs::create_dir_all(folder).at(folder)?;
    let packages = || {
        let listing = quietly(
            folder,
            &[&["sh", "-c", PACKAGES, "sh"], wanted].concat(),
            &[],
        )?;
        Ok::<_, String>(listing.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let mut names = packages()?;
    if names.is_empty() {
        setup::refresh_lists(folder)?;
        names = packages()?;
    }
    if names.is_empty() {
        return Err(format!("apt knows none of the kernel packages {wanted:?}"));
    }
    println!("downloading for the guest (unpacked below target, not installed): {names}");
    let download = || line(folder, &format!("apt-get download {names}"), &[]);
    if download().is_err() {
        // The lists may be older than the archive, which then lacks the version that they name.
        setup::refresh_lists(folder)?;
        download()?;
    }
    quietly(folder, &["sh", "-c", UNPACK], &[]).map(drop)
}

/// The compressed part of an x86 boot image; Linux `Documentation/arch/x86/boot.rst`.
fn payload(image: &[u8]) -> Option<&[u8]> {
    const SETUP_SECTORS: usize = 0x1F1;
    const OFFSET: usize = 0x248;
    const LENGTH: usize = 0x24C;
    let number = |at: usize| {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(bytes) as usize)
    };
    let start = (usize::from(*image.get(SETUP_SECTORS)?) + 1) * 512 + number(OFFSET)?;
    image.get(start..start.checked_add(number(LENGTH)?)?)
}

/// An ELF image with the note that names its entry: type 18 of "Xen".
fn has_pvh_entry(image: &[u8]) -> bool {
    const NOTE: &[u8] = b"\x12\0\0\0Xen\0";
    image.starts_with(b"\x7FELF") && image.windows(NOTE.len()).any(|window| window == NOTE)
}

fn unpacked(path: &Path) -> Result<Vec<u8>> {
    let output = Command::new("sh")
        .args(["-c", UNPACK_ANY])
        .arg(path)
        .output();
    Ok(output.at("sh")?.stdout)
}

/// Adds a module behind those that it needs; one that is no file is built into the kernel.
fn add_module(name: &str, files: &[PathBuf], modules: &mut Vec<(String, Vec<u8>)>) -> Result {
    let file_name = format!("{}.ko", name.replace('-', "_"));
    let is_known = modules.iter().any(|(known, _)| *known == file_name);
    let file = files.iter().find(|path| module_name(path) == file_name);
    let Some(path) = file.filter(|_| !is_known) else {
        return Ok(());
    };
    let content = unpacked(path)?;
    for need in needs(&content) {
        add_module(&need, files, modules)?;
    }
    modules.push((file_name, content));
    Ok(())
}

/// Its file's name, as if it were not compressed.
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

/// Names in the `depends=` entry of a module's `.modinfo` section.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let at = module.windows(KEY.len()).position(|window| window == KEY);
    let rest = at.map_or(&[][..], |at| &module[at + KEY.len()..]);
    let list = rest.split(|byte| *byte == 0).next().unwrap_or_default();
    let list = String::from_utf8_lossy(list);
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
            needs(b"\x7fELF\0license=GPL\0depends=virtio,ring\0x"),
            ["virtio", "ring"]
        );
        assert!(needs(b"\0depends=\0name=x\0").is_empty());
        assert_eq!(
            module_name(Path::new("a/virtio-blk.ko.xz")),
            "virtio_blk.ko"
        );
    }

    #[test]
    fn a_boot_image_says_where_its_payload_lies() {
        let mut image = vec![0; 4096];
        image[0x1F1] = 1;
        image[0x248..0x24C].copy_from_slice(&100_u32.to_le_bytes());
        image[0x24C..0x250].copy_from_slice(&2_u32.to_le_bytes());
        image[1124..1126].copy_from_slice(b"ab");
        assert_eq!(payload(&image), Some(&b"ab"[..]));
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
}
