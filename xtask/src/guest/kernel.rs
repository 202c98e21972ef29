//! A distribution's kernel for the guest: downloaded as a package and unpacked into the target
//! folder, never installed, so that the machine's own boot is left alone.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::setup;
use crate::step::quietly;

/// Debian's small one first, then its full one, then Ubuntu's.
const PACKAGES: &[&str] = &[
    "linux-image-cloud-amd64",
    "linux-image-amd64",
    "linux-image-virtual",
    "linux-image-generic",
];

/// What the guest needs, where the kernel has it as modules.
const WANTED: &[&str] = &["virtio_pci", "virtio_blk", "ext4", "crc32c_generic"];

/// A kernel image, and its modules in the order of loading.
pub(crate) struct Kernel {
    pub(crate) image: PathBuf,
    pub(crate) release: String,
    /// File name and content, uncompressed.
    pub(crate) modules: Vec<(String, Vec<u8>)>,
}

impl Kernel {
    /// Takes what lies below `folder`, or downloads it first.
    pub(crate) fn fetch(folder: &Path) -> Result<Kernel, String> {
        if image_in(folder).is_none() {
            download(folder)?;
        }
        let image = image_in(folder).ok_or("the kernel package holds no boot/vmlinuz-*")?;
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        let release = name.trim_start_matches("vmlinuz-").to_owned();
        let files = files_below(&folder.join("lib/modules"));
        let files = if files.is_empty() {
            files_below(&folder.join("usr/lib/modules"))
        } else {
            files
        };
        let mut modules = Vec::new();
        for wanted in WANTED {
            add_module(wanted, &files, &mut modules)?;
        }
        Ok(Kernel {
            image,
            release,
            modules,
        })
    }
}

fn image_in(folder: &Path) -> Option<PathBuf> {
    let boot = std::fs::read_dir(folder.join("boot")).ok()?;
    let mut images = boot.flatten().map(|entry| entry.path());
    images.find(|path| {
        path.file_name()
            .is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz-"))
    })
}

fn download(folder: &Path) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut packages = named_packages(folder);
    if packages.is_empty() {
        setup::refresh_lists(folder)?;
        packages = named_packages(folder);
    }
    if packages.is_empty() {
        return Err(format!(
            "apt knows none of the kernel packages {PACKAGES:?}"
        ));
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
fn named_packages(folder: &Path) -> Vec<String> {
    for meta in PACKAGES {
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
        _ => return std::fs::read(path).map_err(|error| format!("{}: {error}", path.display())),
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
