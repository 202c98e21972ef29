//! Installs the `.deb` in overlays of this system's root, in namespaces of their own: once to check the installed files, and
//! once under a systemd that is booted there, which starts the units. Nothing of it reaches the system. Builds the source
//! packages where there is no network.

use std::path::Path;

use cleave_rig::built;
use cleave_rig::setup;
use cleave_rig::{Result, empty_folder, quietly};

use crate::step::step;

/// Installs the packages in `out`, as root.
pub(super) fn run(root: &Path, out: &Path, version: &str) -> Result {
    let checked_with = ["lintian", "man", "systemd-analyze", "unshare"];
    let pasted = ["qemu-system-x86_64", "qemu-img"];
    setup::provide_programs(root, &[&checked_with[..], &pasted].concat())?;
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
    let remedy = "the script is xtask/src/dist/boot.sh";
    step("units", remedy, || {
        let folder = out.join("root");
        empty_folder(&folder)?;
        let script = root.join("xtask/src/dist/boot.sh");
        let architecture = quietly(root, "dpkg --print-architecture", &[])?;
        let deb = out.join(format!("cleave_{version}-1_{}.deb", architecture.trim()));
        let [_, drive] = built::programs(root)?;
        let (script, folder, deb) = (script.display(), folder.display(), deb.display());
        let line = "sh {} {} {} {}";
        let said = quietly(out, line, &[&script, &folder, &deb, &drive.display()])?;
        Ok(said.trim().to_owned())
    })
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
