//! Installs the `.deb` with dpkg in an overlay of this system's root, in a mount namespace of its own, and checks the
//! installed files. Nothing of it reaches the system.

use std::path::Path;

use super::{Release, VERSION};
use crate::setup;
use crate::step::{Result, empty_folder, quietly, step};

/// Runs as root.
pub(super) fn run(root: &Path, release: &Release) -> Result {
    setup::provide_programs(root, &["lintian", "man", "systemd-analyze", "unshare"])?;
    let remedy = "the script is xtask/src/dist/check.sh";
    step("installation", remedy, || {
        let folder = release.out.join("root");
        empty_folder(&folder)?;
        let script = root.join("xtask/src/dist/check.sh");
        let (script, folder) = (script.display(), folder.display());
        let line = "unshare --mount sh {} {} {}";
        let said = quietly(&release.out, line, &[&script, &folder, &VERSION])?;
        Ok(said.trim().replace('\n', "; "))
    })
}
