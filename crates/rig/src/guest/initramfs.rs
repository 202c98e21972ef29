//! The guest's initial file system: busybox, a few real tools with their libraries, the modules, and a script. The kernel
//! unpacks archives that follow each other.

use std::fs;
use std::path::{Path, PathBuf};

use super::host;
use super::kernel::Kernel;
use crate::command::{At, Result, empty_folder};
use crate::setup;

/// Programs whose own behaviour is wanted, not that of busybox's version, and the shell.
const TOOLS: [&str; 6] = [
    "busybox",
    "mkfs.ext4",
    "e2fsck",
    "fstrim",
    "blkdiscard",
    "taskset",
];

/// Archives from which a boot's initramfs is put together.
pub struct Initramfs {
    /// Busybox, tools, modules, init.
    base: Vec<u8>,
    /// fio, which needs 80 MB of libraries on Debian: only for scripts that run it.
    fio: Vec<u8>,
}

impl Initramfs {
    /// Packs what every boot of a kernel needs, below a folder.
    pub fn build(folder: &Path, kernel: &Kernel) -> Result<Initramfs> {
        fs::create_dir_all(folder).at(folder)?;
        // Several are built at a time, for the cases and for the comparison.
        let line = "mktemp --directory --tmpdir=$PWD";
        let folder = host::run(folder, &["eval", line])?;
        let folder = PathBuf::from(String::from_utf8_lossy(&folder).trim());
        kernel.copy_modules(&folder.join("modules"))?;
        fs::write(folder.join("init"), include_bytes!("scripts/init.sh")).at(&folder)?;
        let installed = |name: &str| {
            let path = setup::find(name).ok_or(format!("{name} is not installed"))?;
            Ok(format!("{name}={}", path.display()))
        };
        let tools = TOOLS.into_iter().map(installed);
        let base = pack(&folder, &tools.collect::<Result<Vec<_>>>()?)?;
        let fio = pack(&folder, &[installed("fio")?])?;
        Ok(Initramfs { base, fio })
    }

    /// Writes the initramfs of one boot, which runs `script` with `settings` (shell assignments), and with programs of
    /// ours in /bin: NAME=PATH, the name of each there and its path here.
    pub fn write(&self, to: &Path, script: &str, settings: &str, programs: &[String]) -> Result {
        let folder = to.with_extension("files");
        empty_folder(&folder)?;
        fs::write(folder.join("settings"), settings).at(to)?;
        fs::write(folder.join("script"), script).at(to)?;
        let own = pack(&folder, programs)?;
        let fio = script.contains("fio ").then_some(&*self.fio);
        let fio = fio.unwrap_or_default();
        fs::write(to, [&*self.base, fio, &own].concat()).at(to)
    }
}

/// Returns the archive of a folder and of programs; the folder is gone then.
fn pack(folder: &Path, programs: &[String]) -> Result<Vec<u8>> {
    fs::create_dir_all(folder).at(folder)?;
    let programs = programs.iter().map(String::as_str);
    let words: Vec<&str> = std::iter::once("pack").chain(programs).collect();
    let archive = host::run(folder, &words)?;
    fs::remove_dir_all(folder).at(folder)?;
    Ok(archive)
}
