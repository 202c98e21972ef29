//! The guest's initial file system: busybox, a few real tools with their libraries, the modules, and a script. Packed by
//! busybox's `cpio`; the kernel unpacks archives that stand behind each other.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::kernel::Kernel;
use crate::setup;
use crate::step::{At, empty_folder, quietly};

/// Programs whose own behaviour is wanted, not that of busybox's version, and the shell.
const TOOLS: &[&str] = &[
    "busybox",
    "mkfs.ext4",
    "e2fsck",
    "fstrim",
    "blkdiscard",
    "taskset",
];

/// Archives from which a boot's initramfs is put together.
pub(crate) struct Initramfs {
    /// Busybox, tools, modules, init.
    base: Vec<u8>,
    /// fio, which needs 80 MB of libraries on Debian: only for scripts that run it.
    fio: Vec<u8>,
}

impl Initramfs {
    pub(crate) fn build(kernel: &Kernel) -> Result<Initramfs, String> {
        // Several are built at a time, for the cases and for the comparison.
        let line = "mkdir -p target/guest && mktemp --directory --tmpdir=$PWD/target/guest";
        let folder = quietly(&crate::root(), &["sh", "-c", line], &[])?;
        let folder = PathBuf::from(folder.trim());
        for name in ["dev", "proc", "sys", "tmp", "mnt", "modules"] {
            empty_folder(&folder.join(name))?;
        }
        for tool in TOOLS {
            add_program(&folder, tool, &installed(tool)?)?;
        }
        let shell = folder.join("bin/sh");
        symlink("busybox", &shell).at(&shell)?;
        let mut order = String::new();
        for (name, content) in &kernel.modules {
            add_file(&folder, &format!("modules/{name}"), content)?;
            order.push_str(&format!("{name}\n"));
        }
        add_file(&folder, "modules/order", order.trim_end().as_bytes())?;
        add_file(&folder, "init", include_bytes!("scripts/init.sh"))?;
        let base = pack(&folder)?;
        add_program(&folder, "fio", &installed("fio")?)?;
        let fio = pack(&folder)?;
        Ok(Initramfs { base, fio })
    }

    /// Writes the initramfs of one boot, which runs `script` with `settings` (shell assignments).
    pub(crate) fn write(&self, to: &Path, script: &str, settings: &str) -> Result<(), String> {
        self.write_with(to, script, settings, &[])
    }

    /// As `write`, with programs of ours in /bin: the name of each there, and its path here.
    pub(crate) fn write_with(
        &self,
        to: &Path,
        script: &str,
        settings: &str,
        programs: &[(&str, &Path)],
    ) -> Result<(), String> {
        let folder = to.with_extension("files");
        empty_folder(&folder)?;
        for (name, path) in programs {
            add_program(&folder, name, path)?;
        }
        add_file(&folder, "settings", settings.as_bytes())?;
        add_file(&folder, "script", script.as_bytes())?;
        let fio: &[u8] = if script.contains("fio ") {
            &self.fio
        } else {
            &[]
        };
        let own = pack(&folder)?;
        fs::write(to, [&self.base, fio, &own].concat()).at(to)
    }
}

fn installed(program: &str) -> Result<PathBuf, String> {
    setup::find(program).ok_or(format!("{program} is not installed"))
}

fn add_file(folder: &Path, name: &str, content: &[u8]) -> Result<(), String> {
    let path = folder.join(name);
    fs::write(&path, content).at(&path)?;
    // Executable, which harms no file and lets the kernel run /init.
    quietly(folder, &["chmod", "755", name], &[]).map(drop)
}

/// Adds a program in bin/, with the libraries that `ldd` names at their own paths.
fn add_program(folder: &Path, name: &str, path: &Path) -> Result<(), String> {
    let bin = folder.join("bin");
    fs::create_dir_all(&bin).at(&bin)?;
    fs::copy(path, bin.join(name)).at(path)?;
    // ldd fails for a static program, and names the reason on stderr only.
    let listing = match quietly(folder, &["ldd", &path.to_string_lossy()], &[]) {
        Err(why) if !why.contains("not a dynamic executable") => return Err(why),
        listing => listing.unwrap_or_default(),
    };
    let libraries = libraries(&listing);
    if libraries.is_empty() {
        return Ok(());
    }
    let words = [
        "cp",
        "--dereference",
        "--parents",
        "--target-directory",
        ".",
    ];
    quietly(folder, &[&words[..], &libraries].concat(), &[]).map(drop)
}

/// Absolute paths in what ldd prints: `name => /path (0x…)` or `/path (0x…)`.
fn libraries(listing: &str) -> Vec<&str> {
    let lines = listing.lines();
    let words = lines.map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    words.flatten().collect()
}

/// Packs a folder's content, and removes it.
fn pack(folder: &Path) -> Result<Vec<u8>, String> {
    let archive = folder.with_extension("cpio");
    let line = "find . -mindepth 1 | busybox cpio -o -H newc > \"$0\"";
    quietly(folder, &["sh", "-c", line, &archive.to_string_lossy()], &[])?;
    let bytes = fs::read(&archive).at(&archive)?;
    fs::remove_file(&archive).at(&archive)?;
    fs::remove_dir_all(folder).at(folder)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_the_paths_that_ldd_names() {
        let listing = "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x7f)\n\t/lib64/ld.so (0x7f)\n";
        assert_eq!(libraries(listing), ["/lib/x/libc.so.6", "/lib64/ld.so"]);
    }
}
