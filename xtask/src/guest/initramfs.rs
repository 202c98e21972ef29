//! The guest's initial file system: busybox, a few real tools with their libraries, the modules, and a script. Packed by
//! busybox's `cpio`; the kernel unpacks archives that stand behind each other.

use std::fs;
use std::path::{Path, PathBuf};

use super::kernel::Kernel;
use crate::setup;
use crate::step::{At, Result, empty_folder, quietly};

/// Programs whose own behaviour is wanted, not that of busybox's version, and the shell.
const TOOLS: &[&str] = &[
    "busybox",
    "mkfs.ext4",
    "e2fsck",
    "fstrim",
    "blkdiscard",
    "taskset",
];

/// Packs what is in the folder as an archive, with programs, each as NAME=PATH, and the libraries that ldd names: `name =>
/// /path (0x…)` or `/path (0x…)`. It fails for a static program. Everything is executable, which harms no file and lets
/// the kernel run /init.
const PACK: &str = r#"
set -e
for program; do
    mkdir -p bin
    cp "${program#*=}" "bin/${program%%=*}"
    ldd "${program#*=}" 2>/dev/null | grep -o '/[^ ]*' | xargs -r cp --dereference --parents --target-directory .
done
chmod -R 755 .
find . -mindepth 1 | busybox cpio -o -H newc >"$0""#;

/// Archives from which a boot's initramfs is put together.
pub(crate) struct Initramfs {
    /// Busybox, tools, modules, init.
    base: Vec<u8>,
    /// fio, which needs 80 MB of libraries on Debian: only for scripts that run it.
    fio: Vec<u8>,
}

impl Initramfs {
    pub(crate) fn build(kernel: &Kernel) -> Result<Initramfs> {
        // Several are built at a time, for the cases and for the comparison.
        let line = "mkdir -p target/guest && mktemp --directory --tmpdir=$PWD/target/guest";
        let folder = quietly(&crate::root(), &["sh", "-c", line], &[])?;
        let folder = PathBuf::from(folder.trim());
        for name in ["bin", "dev", "proc", "sys", "tmp", "mnt", "modules"] {
            empty_folder(&folder.join(name))?;
        }
        std::os::unix::fs::symlink("busybox", folder.join("bin/sh")).at(&folder)?;
        let mut order = String::new();
        for (name, content) in &kernel.modules {
            fs::write(folder.join("modules").join(name), content).at(name)?;
            order += &format!("{name}\n");
        }
        fs::write(folder.join("modules/order"), order).at(&folder)?;
        fs::write(folder.join("init"), include_bytes!("scripts/init.sh")).at(&folder)?;
        let installed = |name: &&'static str| {
            Ok((
                *name,
                setup::find(name).ok_or(format!("{name} is not installed"))?,
            ))
        };
        let tools = TOOLS.iter().map(installed).collect::<Result<Vec<_>>>()?;
        let base = pack(&folder, &tools)?;
        let fio = pack(&folder, &[installed(&"fio")?])?;
        Ok(Initramfs { base, fio })
    }

    /// Writes the initramfs of one boot, which runs `script` with `settings` (shell assignments).
    pub(crate) fn write(&self, to: &Path, script: &str, settings: &str) -> Result {
        self.write_with(to, script, settings, &[])
    }

    /// As `write`, with programs of ours in /bin: the name of each there, and its path here.
    pub(crate) fn write_with(
        &self,
        to: &Path,
        script: &str,
        settings: &str,
        programs: &[(&str, PathBuf)],
    ) -> Result {
        let folder = to.with_extension("files");
        empty_folder(&folder)?;
        fs::write(folder.join("settings"), settings).at(to)?;
        fs::write(folder.join("script"), script).at(to)?;
        let own = pack(&folder, programs)?;
        let fio = if script.contains("fio ") {
            &*self.fio
        } else {
            &[]
        };
        fs::write(to, [&*self.base, fio, &own].concat()).at(to)
    }
}

/// The archive of a folder and of programs; the folder is gone then.
fn pack(folder: &Path, programs: &[(&str, PathBuf)]) -> Result<Vec<u8>> {
    let archive = folder.with_extension("cpio");
    let to = archive.to_string_lossy();
    let programs = programs
        .iter()
        .map(|(name, path)| format!("{name}={}", path.display()));
    let programs: Vec<String> = programs.collect();
    let programs = programs.iter().map(String::as_str);
    let words: Vec<&str> = ["sh", "-c", PACK, &to]
        .into_iter()
        .chain(programs)
        .collect();
    fs::create_dir_all(folder).at(folder)?;
    quietly(folder, &words, &[])?;
    let bytes = fs::read(&archive).at(&archive)?;
    fs::remove_file(&archive).at(&archive)?;
    fs::remove_dir_all(folder).at(folder)?;
    Ok(bytes)
}
