//! Installs the `.deb` in overlays of a system's root, which is usually that of this one, in namespaces of their own: once to check the installed files, and
//! once under a systemd that is booted there, which starts the units. Runs the image for containers as Kubernetes would. Nothing
//! of it reaches the system. Builds the source packages where there is no network.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use cleave_rig::built;
use cleave_rig::guest::{Accelerator, Initramfs, Kernel, QEMU, VHOST_USER_DISK, boot, qemu};
use cleave_rig::setup;
use cleave_rig::{At, Result, empty_folder, execute, quietly, words};

use super::image::OciImage;
use super::recipe::VERSION;
use crate::step::step;

/// Script of the guest whose daemons end.
const GUEST: &str = include_str!("guest.sh");
/// The disks of that guest: one of a unit of its own, and one of the node.
const GUEST_DISKS: [&str; 2] = ["a", "d1"];
/// Programs with which it is made.
const GUEST_PROGRAMS: [&str; 7] = [
    "qemu-system-x86_64",
    "busybox",
    "mkfs.ext4",
    "fstrim",
    "fio",
    "xz",
    "zstd",
];

/// Programs that run the image.
const CONTAINER_PROGRAMS: [&str; 4] = [
    "umoci",
    "runc",
    "curl",
    "/usr/lib/python3/dist-packages/yaml/__init__.py",
];

/// Installs the packages in `out` in copies of the system in a folder, and runs the image, as root.
pub(super) fn run(root: &Path, out: &Path, image: &OciImage<'_>, system: &Path) -> Result {
    if cfg!(not(target_arch = "x86_64")) {
        return Err("the check boots an x86-64 guest and needs an x86-64 machine".to_owned());
    }
    let checked_with = ["lintian", "man", "systemd-analyze", "unshare", "qemu-img"];
    setup::provide_programs(
        root,
        &[&checked_with[..], &GUEST_PROGRAMS, &CONTAINER_PROGRAMS].concat(),
    )?;
    let [_, drive] = built::programs(root)?;
    let check = Check {
        root,
        out,
        system: std::path::absolute(system).at(system)?,
        drive,
    };
    // Each of them waits for most of its time.
    thread::scope(|scope| {
        let units = scope.spawn(|| check.units());
        let container = scope.spawn(|| check.container(image));
        let ended = [check.installation(), joined(container), joined(units)];
        ended.into_iter().collect()
    })
}

fn joined(check: thread::ScopedJoinHandle<'_, Result>) -> Result {
    check
        .join()
        .unwrap_or_else(|_| Err("a check panicked".to_owned()))
}

/// The packages and folders that the three checks use.
struct Check<'a> {
    root: &'a Path,
    out: &'a Path,
    system: PathBuf,
    drive: PathBuf,
}

impl Check<'_> {
    /// Makes an empty folder of a check's own.
    fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.out.join(name);
        empty_folder(&folder)?;
        Ok(folder)
    }

    fn installation(&self) -> Result {
        let remedy = "the script is xtask/src/dist/check.sh";
        step("installation", remedy, || {
            let folder = self.folder("root")?;
            let script = self.root.join("xtask/src/dist/check.sh");
            let (script, folder, system) =
                (script.display(), folder.display(), self.system.display());
            let line = "unshare --mount sh {} {} {} {}";
            let said = quietly(self.out, line, &[&script, &folder, &system, &VERSION])?;
            Ok(said.trim().replace('\n', "; "))
        })
    }

    fn units(&self) -> Result {
        let remedy = "the script is xtask/src/dist/boot.sh";
        step("units", remedy, || {
            let folder = self.folder("booted")?;
            let script = self.root.join("xtask/src/dist/boot.sh");
            let architecture = quietly(self.root, "dpkg --print-architecture", &[])?;
            let deb = format!("cleave_{VERSION}-1_{}.deb", architecture.trim());
            let deb = self.out.join(deb);
            let guest = self.root.join("target/guest/units");
            let booted = guest_in(self.root, &guest)?;
            let line = "sh {} {} {} {} {} {}";
            let values: [&dyn Display; 6] = [
                &script.display(),
                &folder.display(),
                &self.system.display(),
                &deb.display(),
                &self.drive.display(),
                &guest.display(),
            ];
            let said = execute(self.out, &[words(line, &values), booted].concat())?;
            Ok(said.trim().replace('\n', "; "))
        })
    }

    fn container(&self, image: &OciImage<'_>) -> Result {
        let remedy = "the script is xtask/src/dist/image.sh";
        step("container", remedy, || {
            let [folder, again] = [self.folder("container")?, self.folder("again")?];
            image.write(&again)?;
            let file = image.file()?;
            let line = "cmp {} {}";
            quietly(self.out, line, &[&file, &again.join(&file).display()])?;
            let [script, manifests] =
                ["xtask/src/dist/image.sh", "dist/kubernetes"].map(|path| self.root.join(path));
            let line = "sh {} {} {} {} {} {}";
            let values: [&dyn Display; 6] = [
                &script.display(),
                &folder.display(),
                &file,
                &VERSION,
                &self.drive.display(),
                &manifests.display(),
            ];
            let said = quietly(self.out, line, &values)?;
            fs::remove_dir_all(&again).at(&again)?;
            Ok(said.trim().to_owned())
        })
    }
}

/// Leaves a kernel and an initramfs in `folder`. Returns the command that boots them where that folder is /guest.
fn guest_in(root: &Path, folder: &Path) -> Result<Vec<String>> {
    empty_folder(folder)?;
    let guests = root.join("target/guest");
    let kernel = Kernel::small(&guests)?;
    let [image, initramfs] = ["kernel", "initramfs"].map(|name| folder.join(name));
    fs::copy(&kernel.image, &image).at(&kernel.image)?;
    let settings = "DISK=/dev/vdb\nBOOT=works\n";
    Initramfs::build(&guests, &kernel)?.write(&initramfs, GUEST, settings, &[])?;
    let disk = |id: &&str| {
        let socket = format!("/run/cleave/{id}/disk.sock");
        words(VHOST_USER_DISK, &[id, &socket, id, &2])
    };
    let mut more: Vec<_> = GUEST_DISKS.iter().map(disk).collect();
    let [image, initramfs] = ["/guest/kernel", "/guest/initramfs"].map(Path::new);
    more.push(boot(image, initramfs, ""));
    Ok(qemu(QEMU, Accelerator::Tcg, 2, &more))
}

/// Builds the source packages in `out` without network, as root.
pub(super) fn rebuild(root: &Path, out: &Path) -> Result {
    let built_with = ["dpkg-source", "lintian", "rpmbuild", "unshare"];
    setup::provide_programs(root, &built_with)?;
    let remedy = "the script is xtask/src/dist/rebuild.sh";
    step("rebuilding", remedy, || {
        let script = root.join("xtask/src/dist/rebuild.sh");
        let said = quietly(out, "unshare --net sh {}", &[&script.display()])?;
        Ok(said.trim().replace('\n', "; "))
    })
}
