//! Programs that the tests need: found by their names, and installed where they are missing.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use itertools::Itertools;

use crate::command::{At, Result, quietly};

/// Debian's and Ubuntu's packages, with the programs that are wanted of each. A package without a program has
/// the path of a file.
const NEEDS: &str = "\
qemu-system-x86: qemu-system-x86_64
qemu-system-common: qemu-storage-daemon
fio: fio
busybox-static: busybox
e2fsprogs: mkfs.ext4
util-linux: fstrim taskset setpriv unshare wipefs
libvirt-daemon: libvirtd
libvirt-clients: virsh
strace: strace
valgrind: valgrind
curl: curl
xz-utils: xz
zstd: zstd
xfsprogs: mkfs.xfs
qemu-utils: qemu-nbd qemu-img
nbdkit: nbdkit
nbd-server: nbd-server
dpkg: dpkg-deb
dpkg-dev: dpkg-gencontrol dpkg-source
rpm: rpmbuild
binutils: strip
lintian: lintian
man-db: man
umoci: umoci
runc: runc
python3-yaml: /usr/lib/python3/dist-packages/yaml/__init__.py
systemd: systemd-analyze
ceph-common: ceph rbd
ceph-mon: ceph-mon
ceph-osd: ceph-osd";

/// Folders of programs, with those of the administrator, which PATH may leave out.
const FOLDERS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Returns the full path of a program.
pub fn find(program: &str) -> Option<PathBuf> {
    let mut paths = std::env::split_paths(FOLDERS).map(|folder| folder.join(program));
    paths.find(|path| path.is_file())
}

/// A program that this machine lacks, and Debian's package of it.
#[derive(Clone, Debug, PartialEq)]
pub struct MissingProgram {
    /// The name of the program.
    pub program: String,
    /// The name of the package.
    pub package: &'static str,
}

/// Returns those of some programs that the machine lacks.
pub fn missing(programs: &[&str]) -> Vec<MissingProgram> {
    let missing = programs.iter().filter(|program| find(program).is_none());
    let package = |program: &str| {
        let mut needs = NEEDS.lines().filter_map(|need| need.split_once(": "));
        let need = needs.find(|need| need.1.split(' ').any(|name| name == program));
        need.map_or("", |need| need.0)
    };
    let missing = missing.map(|program| MissingProgram {
        program: (*program).to_owned(),
        package: package(program),
    });
    missing.collect()
}

/// Installs the programs that the tests need and the machine lacks; without the rights, the error is the command to run.
pub fn provide(root: &Path) -> Result {
    install(root, |_| true)
}

/// Installs those of some programs that the machine lacks.
pub fn provide_programs(root: &Path, programs: &[&str]) -> Result {
    install(root, |program| programs.contains(&program))
}

fn install(root: &Path, is_wanted: impl Fn(&str) -> bool) -> Result {
    let is_missing = |program| is_wanted(program) && find(program).is_none();
    let missing = || {
        let needs = NEEDS.lines().filter_map(|need| need.split_once(": "));
        let missing = needs.filter(|need| need.1.split(' ').any(is_missing));
        missing.map(|need| need.0).join(" ")
    };
    let packages = missing();
    if packages.is_empty() {
        return Ok(());
    }
    if find("apt-get").is_none() {
        let why = "this is neither Debian nor Ubuntu: install what holds";
        return Err(format!("{why} {packages}"));
    }
    let install = format!("apt-get install -y --no-install-recommends {packages}");
    if std::fs::metadata("/proc/self").at("/proc/self")?.uid() != 0 {
        return Err(format!("packages are missing; run: sudo {install}"));
    }
    println!("installing: {packages}");
    quietly(root, "apt-get update", &[])?;
    quietly(
        root,
        &format!("env DEBIAN_FRONTEND=noninteractive {install}"),
        &[],
    )?;
    match missing() {
        none if none.is_empty() => Ok(()),
        some => Err(format!(
            "installed, but without the programs wanted: {some}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let found = missing(&["sh", "nonesuch"]);
        let nonesuch = MissingProgram {
            program: "nonesuch".to_owned(),
            package: "",
        };
        assert_eq!(found, [nonesuch]);
    }
}
