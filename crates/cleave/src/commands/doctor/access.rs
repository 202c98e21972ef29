//! Finds out if a user may reach a path: every folder above it, and the thing itself, by owner, group and mode.
//!
//! The modes are read, not tried: the user in question is another one, or runs with fewer rights than this program, as the
//! service does, which is root without capabilities. Access control lists are mentioned and not read.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;
use rustix::thread::{CapabilitySet, capabilities};

use super::finding::Finding;
use super::users::{self, User};

/// Permission bits, as those for others in a mode.
pub(super) const READ: u32 = 4;
pub(super) const WRITE: u32 = 2;
const ENTER: u32 = 1;

/// Checks that `user` can get to `path` and has the permissions `wanted` there. Nothing is returned if so.
pub(super) fn check(check: &'static str, path: &Path, user: &User, wanted: u32) -> Option<Finding> {
    // Links are followed where that is possible; where not, the walk finds the reason.
    let path = path.canonicalize().or_else(|_| std::path::absolute(path));
    let path = path.unwrap_or_default();
    let folders = path.ancestors().skip(1).collect::<Vec<_>>();
    let folders = folders.into_iter().rev().map(|folder| (folder, ENTER));
    folders
        .chain([(&*path, wanted)])
        .find_map(|(path, wanted)| refusal(check, path, user, wanted))
}

/// Returns true if the mode gives the user these permissions.
fn may(found: &fs::Metadata, user: &User, wanted: u32) -> bool {
    let mode = found.mode();
    let granted = match () {
        () if found.uid() == user.uid => mode >> 6,
        () if user.gids.contains(&found.gid()) => mode >> 3,
        () => mode,
    };
    granted & wanted == wanted
}

fn refusal(check: &'static str, path: &Path, user: &User, wanted: u32) -> Option<Finding> {
    let shown = path.display();
    let found = match fs::metadata(path) {
        Ok(found) => found,
        Err(error) => return Some(unseen(check, path, &error)),
    };
    if may(&found, user, wanted) {
        return None;
    }
    let (owner, group) = (found.uid(), users::group_name(found.gid()));
    let name = &user.name;
    let what = format!(
        "{name} may not {} {shown} (mode {:04o}, user {owner}, group {group}{})",
        action(wanted),
        found.mode() & 0o7777,
        match has_acl(path) {
            true => ", and an access control list that was not read: getfacl shows it",
            false => "",
        },
    );
    let remedy = remedy(path, user, (found.gid(), found.mode()), wanted);
    Some(match overrides(user) {
        false => Finding::problem(check, what, remedy),
        true => Finding::warning(
            check,
            format!(
                "{what}, except with CAP_DAC_OVERRIDE, which this process has and cleave@.service drops"
            ),
            format!("chown {name} '{shown}', or run the service as its owner (User=)"),
        ),
    })
}

/// The commands after which the user has the permissions, for a file of this group and mode.
fn remedy(path: &Path, user: &User, (gid, mode): (u32, u32), wanted: u32) -> String {
    let (shown, name) = (path.display(), &user.name);
    let bits = if wanted == ENTER { "x" } else { "rw" };
    let is_member = user.gids.contains(&gid);
    let mut steps = Vec::new();
    // Membership in the group of root would give far more than this.
    let is_given = gid == 0 && !is_member;
    if is_given {
        steps.push(format!("chgrp cleave '{shown}'"));
    }
    if mode >> 3 & wanted != wanted {
        steps.push(format!("chmod g+{bits} '{shown}'"));
    }
    if !is_member {
        let group = match is_given {
            true => "cleave".to_owned(),
            false => users::group_name(gid),
        };
        steps.push(format!("usermod -aG {group} {name}"));
    }
    let group = steps.join(" && ");
    match wanted {
        _ if is_member => group,
        ENTER => format!("chmod o+x '{shown}', or {group}"),
        _ => format!("{group}, and start its programs again"),
    }
}

fn unseen(check: &'static str, path: &Path, error: &io::Error) -> Finding {
    let shown = path.display();
    match error.kind() {
        io::ErrorKind::NotFound => Finding::problem(
            check,
            format!("{shown} does not exist"),
            "create it, or correct the path",
        ),
        _ => Finding::problem(
            check,
            format!("{shown} cannot be looked at: {error}"),
            "run this command as root",
        ),
    }
}

fn action(wanted: u32) -> &'static str {
    match wanted {
        ENTER => "enter",
        READ => "read",
        WRITE => "write to",
        _ => "read and write",
    }
}

/// Returns true if modes do not bind this user, which is the one that runs this program.
fn overrides(user: &User) -> bool {
    let is_ours = user.uid == geteuid().as_raw();
    let ours = capabilities(None);
    is_ours && ours.is_ok_and(|ours| ours.effective.contains(CapabilitySet::DAC_OVERRIDE))
}

fn has_acl(path: &Path) -> bool {
    let mut nothing: [u8; 0] = [];
    rustix::fs::getxattr(path, "system.posix_acl_access", &mut nothing).is_ok_and(|size| size > 0)
}

/// The folder of a path.
pub(super) fn folder(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_default();
    path.parent()
        .map_or_else(|| path.clone(), Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_remedy_is_everything_that_is_missing() {
        let user = User {
            name: "vmm".to_owned(),
            uid: 1000,
            gids: vec![7],
        };
        let remedy = |gid, mode, wanted| remedy(Path::new("/s"), &user, (gid, mode), wanted);
        let again = ", and start its programs again";
        for (gid, mode, wanted, says) in [
            (7, 0o600, WRITE, "chmod g+rw '/s'".to_owned()),
            (
                0,
                0o755,
                WRITE,
                format!("chgrp cleave '/s' && chmod g+rw '/s' && usermod -aG cleave vmm{again}"),
            ),
            (
                0,
                0o770,
                WRITE,
                format!("chgrp cleave '/s' && usermod -aG cleave vmm{again}"),
            ),
            (
                0,
                0o700,
                ENTER,
                "chmod o+x '/s', or chgrp cleave '/s' && chmod g+x '/s' && usermod -aG cleave vmm"
                    .to_owned(),
            ),
        ] {
            assert_eq!(remedy(gid, mode, wanted), says, "{gid} {mode:o}");
        }
    }

    #[test]
    fn the_first_class_that_fits_decides() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        fs::write(&path, "").unwrap();
        let found = fs::metadata(&path).unwrap();
        let user = |uid, gid| User {
            name: "a".to_owned(),
            uid,
            gids: vec![gid],
        };
        let (owner, group) = (found.uid(), found.gid());
        for (mode, uid, gid, reads, writes) in [
            (0o600, owner, group, true, true),
            (0o066, owner, group, false, false),
            (0o640, owner + 1, group, true, false),
            (0o606, owner + 1, group, false, false),
            (0o604, owner + 1, group + 1, true, false),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let found = fs::metadata(&path).unwrap();
            let may = [READ, READ | WRITE].map(|wanted| may(&found, &user(uid, gid), wanted));
            assert_eq!(may, [reads, writes], "{mode:o}");
        }
    }
}
