//! The socket: whether it is there, whether a daemon listens, and whether the VMM may connect.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use super::access::{self, Sought, WRITE};
use super::finding::Finding;
use super::listeners;
use super::users::User;

const CHECK: &str = "socket";
const SOUGHT: Sought = Sought {
    check: CHECK,
    in_home: "add --user with the user that runs QEMU; a QEMU of another user needs the socket elsewhere, such as in /run/cleave/NAME",
};

/// Checks the socket for the VMM's user. Nothing connects to it: a frontend that connects and leaves is logged.
pub(super) fn check(path: &Path, vmm: &User) -> Vec<Finding> {
    let shown = path.display();
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(_) => return vec![absent(path, vmm)],
    };
    if !found.file_type().is_socket() {
        let what = format!("{shown} is not a socket, and the daemon refuses to replace it");
        return vec![Finding::problem(
            CHECK,
            what,
            "remove it, or choose another path",
        )];
    }
    let is_root = vmm.uid == 0;
    let refused = access::check(SOUGHT, path, vmm, WRITE).filter(|_| !is_root);
    let reached = refused
        .unwrap_or_else(|| Finding::ok(CHECK, format!("{} may connect to {shown}", vmm.name)));
    let listening = match listeners::listens(path) {
        true => Finding::ok(CHECK, format!("a program listens on {shown}")),
        false => Finding::warning(
            CHECK,
            format!("nothing listens on {shown}"),
            "start the daemon, which replaces the stale file (systemctl status cleave@NAME, or cleave for a node)",
        ),
    };
    vec![reached, listening]
}

/// There is no socket: nothing runs, or the path or its folder is wrong.
fn absent(path: &Path, vmm: &User) -> Finding {
    let folder = access::folder(path);
    let refused = access::check(SOUGHT, &folder, vmm, access::READ >> 2);
    refused.unwrap_or_else(|| {
        Finding::problem(
            CHECK,
            format!("{} does not exist", path.display()),
            "start the daemon (systemctl start cleave@NAME), or correct the path",
        )
    })
}
