//! Installs the `.deb` in overlays of this system's root, in namespaces of their own: once to check the installed files, and
//! once under a systemd that is booted there, which starts the units. Runs the image for containers as Kubernetes would. Nothing
//! of it reaches the system.

use std::fmt::Display;
use std::fs;
use std::path::Path;

use cleave_rig::built;
use cleave_rig::setup;
use cleave_rig::{At, Result, empty_folder, quietly};

use super::image::OciImage;
use crate::step::step;

/// Installs the packages in `out`, and runs the image, as root.
pub(super) fn run(root: &Path, out: &Path, image: &OciImage<'_>, version: &str) -> Result {
    let checked_with = ["lintian", "man", "systemd-analyze", "unshare"];
    let pasted = ["qemu-system-x86_64", "qemu-img"];
    let containers = [
        "umoci",
        "runc",
        "curl",
        "/usr/lib/python3/dist-packages/yaml/__init__.py",
    ];
    setup::provide_programs(root, &[&checked_with[..], &pasted, &containers].concat())?;
    let remedy = "the script is xtask/src/dist/check.sh";
    step("installation", remedy, || {
        let folder = out.join("root");
        empty_folder(&folder)?;
        let script = root.join("xtask/src/dist/check.sh");
        let (script, folder) = (script.display(), folder.display());
        let line = "unshare --mount sh {} {} {}";
        let said = quietly(out, line, &[&script, &folder, &version])?;
        Ok(said.trim().replace('\n', "; "))
    })?;
    let [_, drive] = built::programs(root)?;
    let remedy = "the script is xtask/src/dist/boot.sh";
    step("units", remedy, || {
        let folder = out.join("root");
        empty_folder(&folder)?;
        let script = root.join("xtask/src/dist/boot.sh");
        let architecture = quietly(root, "dpkg --print-architecture", &[])?;
        let deb = out.join(format!("cleave_{version}_{}.deb", architecture.trim()));
        let (script, folder, deb) = (script.display(), folder.display(), deb.display());
        let line = "sh {} {} {} {}";
        let said = quietly(out, line, &[&script, &folder, &deb, &drive.display()])?;
        Ok(said.trim().to_owned())
    })?;
    let remedy = "the script is xtask/src/dist/image.sh";
    step("container", remedy, || {
        let [folder, again] = ["root", "again"].map(|name| out.join(name));
        [&folder, &again]
            .into_iter()
            .try_for_each(|folder| empty_folder(folder))?;
        image.write(&again)?;
        let file = image.file()?;
        let line = "cmp {} {}";
        quietly(out, line, &[&file, &again.join(&file).display()])?;
        let [script, manifests] =
            ["xtask/src/dist/image.sh", "dist/kubernetes"].map(|path| root.join(path));
        let (script, folder, drive) = (script.display(), folder.display(), drive.display());
        let line = "sh {} {} {} {} {} {}";
        let values: [&dyn Display; 6] = [
            &script,
            &folder,
            &file,
            &version,
            &drive,
            &manifests.display(),
        ];
        let said = quietly(out, line, &values)?;
        fs::remove_dir_all(&again).at(&again)?;
        Ok(said.trim().to_owned())
    })
}
