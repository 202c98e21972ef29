//! Programs that the tests need: found by their names, and installed where they are missing.

use std::path::{Path, PathBuf};

use crate::step::line;

/// A program and the Debian and Ubuntu package that holds it.
const NEEDS: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-storage-daemon", "qemu-system-common"),
    ("fio", "fio"),
    ("busybox", "busybox-static"),
    ("mkfs.ext4", "e2fsprogs"),
    ("fstrim", "util-linux"),
    ("taskset", "util-linux"),
    ("setpriv", "util-linux"),
    ("unshare", "util-linux"),
    ("libvirtd", "libvirt-daemon"),
    ("virsh", "libvirt-clients"),
    ("strace", "strace"),
    ("valgrind", "valgrind"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("dpkg-deb", "dpkg"),
    ("rpmbuild", "rpm"),
    ("strip", "binutils"),
    ("lintian", "lintian"),
    ("man", "man-db"),
    ("systemd-analyze", "systemd"),
];

/// With the administrator's programs, which PATH may leave out.
const FOLDERS: &[&str] = &[
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
];

/// The full path of a program.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let mut paths = FOLDERS.iter().map(|folder| Path::new(folder).join(program));
    paths.find(|path| path.is_file())
}

/// Installs what the tests need and the machine lacks; without the rights, the error is the command to run.
pub(crate) fn provide(root: &Path) -> Result<(), String> {
    let all: Vec<&str> = NEEDS.iter().map(|need| need.0).collect();
    provide_programs(root, &all)
}

/// The same for some of the programs only.
pub(crate) fn provide_programs(root: &Path, programs: &[&str]) -> Result<(), String> {
    let missing = || {
        let wanted = NEEDS
            .iter()
            .filter(|(program, _)| programs.contains(program));
        wanted.filter(|(program, _)| find(program).is_none())
    };
    let packages: Vec<&str> = missing().map(|need| need.1).collect();
    if packages.is_empty() {
        return Ok(());
    }
    if find("apt-get").is_none() {
        return Err(format!(
            "this is neither Debian nor Ubuntu: install what holds {packages:?}"
        ));
    }
    let install = format!(
        "apt-get install -y --no-install-recommends {}",
        packages.join(" ")
    );
    if !is_root(root)? {
        return Err(format!("packages are missing; run: sudo {install}"));
    }
    println!("installing: {}", packages.join(" "));
    refresh_lists(root)?;
    line(root, &install, &[("DEBIAN_FRONTEND", "noninteractive")])?;
    missing().next().map_or(Ok(()), |(program, package)| {
        Err(format!("{package} is installed, but holds no {program}"))
    })
}

/// Brings apt's lists up to date, where we may.
pub(crate) fn refresh_lists(folder: &Path) -> Result<(), String> {
    if is_root(folder)? {
        line(folder, "apt-get update", &[]).map(drop)
    } else {
        Err("apt's package lists are missing or old; run: sudo apt-get update".to_owned())
    }
}

fn is_root(folder: &Path) -> Result<bool, String> {
    Ok(line(folder, "id -u", &[])?.trim() == "0")
}
