//! What the guest boots into: busybox, a few real tools with their libraries, the modules, and a script.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::archive::Archive;
use super::kernel::Kernel;
use crate::setup;
use crate::step::quietly;

/// Tools whose own behaviour is wanted, not busybox's likeness of them.
const TOOLS: &[&str] = &["mkfs.ext4", "e2fsck", "fstrim", "blkdiscard", "taskset"];

/// Archives on the disk, from which a boot's initramfs is put together.
pub(crate) struct Initramfs {
    /// Busybox, tools, modules, init.
    base: Vec<u8>,
    /// fio, which drags 80 MB of libraries along on Debian: only for those who use it.
    fio: Vec<u8>,
}

impl Initramfs {
    pub(crate) fn build(kernel: &Kernel) -> Result<Initramfs, String> {
        let mut base = Archive::default();
        for folder in ["bin", "dev", "proc", "sys", "tmp", "mnt", "modules"] {
            base.folder(folder);
        }
        let mut seen = BTreeSet::new();
        add_programs(&mut base, &mut seen, &["busybox"])?;
        base.link("bin/sh", "busybox");
        add_programs(&mut base, &mut seen, TOOLS)?;
        for (name, content) in &kernel.modules {
            base.file(&format!("modules/{name}"), content);
        }
        let order: Vec<&str> = kernel
            .modules
            .iter()
            .map(|(name, _)| name.as_str())
            .collect();
        base.file("modules/order", order.join("\n").as_bytes());
        base.file("init", include_bytes!("scripts/init.sh"));
        let mut fio = Archive::default();
        add_programs(&mut fio, &mut seen, &["fio"])?;
        Ok(Initramfs {
            base: base.finish(),
            fio: fio.finish(),
        })
    }

    /// Writes the initramfs of one boot, which runs `script` with `settings` (shell assignments).
    pub(crate) fn write(&self, to: &Path, script: &str, settings: &str) -> Result<(), String> {
        self.write_with(to, script, settings, &[])
    }

    /// As `write`, with programs of ours in /bin: what each is called there, and where it lies here.
    pub(crate) fn write_with(
        &self,
        to: &Path,
        script: &str,
        settings: &str,
        programs: &[(&str, &Path)],
    ) -> Result<(), String> {
        let mut own = Archive::default();
        let mut seen = BTreeSet::new();
        for (name, path) in programs {
            add_program(&mut own, &mut seen, name, path)?;
        }
        own.file("settings", settings.as_bytes());
        own.file("script", script.as_bytes());
        let mut bytes = self.base.clone();
        if script.contains("fio ") {
            bytes.extend_from_slice(&self.fio);
        }
        bytes.extend_from_slice(&own.finish());
        std::fs::write(to, bytes).map_err(|error| format!("{}: {error}", to.display()))
    }
}

/// Adds programs with the libraries that `ldd` names, at their own paths.
fn add_programs(
    archive: &mut Archive,
    seen: &mut BTreeSet<PathBuf>,
    programs: &[&str],
) -> Result<(), String> {
    for program in programs {
        let path = setup::find(program).ok_or(format!("{program} is not installed"))?;
        add_program(archive, seen, program, &path)?;
    }
    Ok(())
}

fn add_program(
    archive: &mut Archive,
    seen: &mut BTreeSet<PathBuf>,
    name: &str,
    path: &Path,
) -> Result<(), String> {
    archive.file(&format!("bin/{name}"), &read(path)?);
    for library in libraries(path)? {
        if seen.insert(library.clone()) {
            add_with_folders(archive, seen, &library)?;
        }
    }
    Ok(())
}

fn add_with_folders(
    archive: &mut Archive,
    seen: &mut BTreeSet<PathBuf>,
    path: &Path,
) -> Result<(), String> {
    let relative = path.strip_prefix("/").unwrap_or(path);
    let folders: Vec<&Path> = relative
        .ancestors()
        .skip(1)
        .filter(|f| *f != Path::new(""))
        .collect();
    for folder in folders.into_iter().rev() {
        if seen.insert(folder.to_path_buf()) {
            archive.folder(&folder.to_string_lossy());
        }
    }
    archive.file(&relative.to_string_lossy(), &read(path)?);
    Ok(())
}

fn libraries(program: &Path) -> Result<Vec<PathBuf>, String> {
    // ldd ends with 1 for a static program, and says so on stderr only.
    match quietly(Path::new("/"), &["ldd", &program.to_string_lossy()], &[]) {
        Ok(listing) => Ok(listed_libraries(&listing)),
        Err(why) if why.contains("not a dynamic executable") => Ok(Vec::new()),
        Err(why) => Err(why),
    }
}

/// Absolute paths in what ldd prints: `name => /path (0x…)` or `/path (0x…)`.
fn listed_libraries(listing: &str) -> Vec<PathBuf> {
    let path_in = |line: &str| {
        line.split_whitespace()
            .find(|word| word.starts_with('/'))
            .map(PathBuf::from)
    };
    listing.lines().filter_map(path_in).collect()
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_the_paths_that_ldd_names() {
        let listing = "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x7f)\n\t/lib64/ld-linux-x86-64.so.2 (0x7f)\n\tlibno.so => not found\n";
        let found = listed_libraries(listing);
        assert_eq!(
            found,
            [
                Path::new("/lib/x/libc.so.6"),
                Path::new("/lib64/ld-linux-x86-64.so.2")
            ]
        );
    }
}
