//! Finds out if a user may reach a path: every folder above it, and the thing itself, by owner, group and mode.
//!
//! The modes are read, not tried: the user in question is another one, or runs with fewer rights than this program, as the
//! service does, which is root without capabilities. Access control lists are mentioned and not read.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use cleave_host::is_home;
use rustix::process::geteuid;
use rustix::thread::{CapabilitySet, capabilities};

use super::finding::Finding;
use super::unit::{self, DiskUnit};
use super::users::{self, User};

/// Permission bits, as those for others in a mode.
pub(super) const READ: u32 = 4;
pub(super) const WRITE: u32 = 2;
const ENTER: u32 = 1;

/// The kind of thing that a user is to reach.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sought {
    /// The check that looks for it.
    pub(super) check: &'static str,
    /// The remedy where it is below a home, which is not to be opened to others.
    pub(super) in_home: &'static str,
}

/// A folder or a file whose mode keeps a user from a path.
#[derive(Debug, Clone, Copy)]
struct Obstacle<'a> {
    path: &'a Path,
    user: &'a User,
    /// The permissions that the user lacks there.
    wanted: u32,
    owner: u32,
    gid: u32,
    mode: u32,
    is_device: bool,
}

/// Checks that `user` can get to `path` and has the permissions `wanted` there. Nothing is returned if so.
pub(super) fn check(sought: Sought, path: &Path, user: &User, wanted: u32) -> Option<Finding> {
    find(sought, path, user, wanted, &|obstacle| {
        obstacle.of_user(sought)
    })
}

/// Checks the same for the daemon of a unit, which runs as `user` and is bound by modes.
pub(super) fn check_unit(
    sought: Sought,
    path: &Path,
    (unit, user): (&DiskUnit, &User),
    wanted: u32,
) -> Option<Finding> {
    find(sought, path, user, wanted, &|obstacle| {
        obstacle.of_unit(sought, &unit.name)
    })
}

/// Looks for the first obstacle on the way to a path, and returns what `judge` says of it.
fn find(
    sought: Sought,
    path: &Path,
    user: &User,
    wanted: u32,
    judge: &dyn Fn(&Obstacle<'_>) -> Finding,
) -> Option<Finding> {
    // Links are followed where that is possible; where not, the walk finds the reason.
    let path = path.canonicalize().or_else(|_| std::path::absolute(path));
    let path = path.unwrap_or_default();
    let folders = path.ancestors().skip(1).collect::<Vec<_>>();
    let folders = folders.into_iter().rev().map(|folder| (folder, ENTER));
    let mut steps = folders.chain([(&*path, wanted)]);
    steps.find_map(|(path, wanted)| match fs::metadata(path) {
        Err(error) => Some(unseen(sought.check, path, &error)),
        Ok(found) if may(&found, user, wanted) => None,
        Ok(found) => Some(judge(&Obstacle {
            path,
            user,
            wanted,
            owner: found.uid(),
            gid: found.gid(),
            mode: found.mode(),
            is_device: found.file_type().is_block_device(),
        })),
    })
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

impl Obstacle<'_> {
    /// Returns the finding about a VMM, or about this process.
    fn of_user(&self, sought: Sought) -> Finding {
        let what = self.what(&self.user.name);
        match overrides(self.user) {
            false => Finding::problem(sought.check, what, self.remedy(sought)),
            true => Finding::warning(
                sought.check,
                format!(
                    "{what}, except with CAP_DAC_OVERRIDE, which this process has and cleave@.service drops"
                ),
                match self.is_home() {
                    true => sought.in_home.to_owned(),
                    false => format!("{}, or run the service as its owner (User=)", self.opened()),
                },
            ),
        }
    }

    /// Returns the finding about the daemon of a unit.
    fn of_unit(&self, sought: Sought, unit: &str) -> Finding {
        let what = self.what(&format!(
            "the unit {unit}, which runs as {},",
            self.user.name
        ));
        let action = action(self.wanted);
        let edit = format!(
            "systemctl edit {unit}, [Service] User= or SupplementaryGroups= that may {action} it"
        );
        let remedy = match () {
            () if self.is_home() => sought.in_home.to_owned(),
            // It gets its owner back when it is attached again.
            () if self.is_device => edit,
            () => format!("{}, or {edit}", self.opened()),
        };
        Finding::problem(sought.check, what, remedy)
    }

    fn what(&self, subject: &str) -> String {
        format!(
            "{subject} may not {} {} (mode {:04o}, user {}, group {}{})",
            action(self.wanted),
            self.path.display(),
            self.mode & 0o7777,
            self.owner,
            users::group_name(self.gid),
            match has_acl(self.path) {
                true => ", and an access control list that was not read: getfacl shows it",
                false => "",
            },
        )
    }

    /// Returns true for a folder in a home.
    fn is_home(&self) -> bool {
        self.wanted == ENTER && is_home(self.path)
    }

    /// The command after which a daemon gets past.
    fn opened(&self) -> String {
        let (shown, user) = (quoted(self.path), self.user);
        let is_own = self.owner == user.uid;
        match () {
            () if self.wanted == ENTER => {
                format!("chmod {}+x {shown}", if is_own { "u" } else { "o" })
            }
            () if is_own => format!("chmod u+rw {shown}"),
            () if user.uid == 0 => format!("chown root:root {shown}"),
            () => format!("chown {} {shown}", user.name),
        }
    }

    /// The commands after which a VMM gets past.
    fn remedy(&self, sought: Sought) -> String {
        let (shown, name) = (quoted(self.path), &self.user.name);
        let (gid, wanted) = (self.gid, self.wanted);
        let is_member = self.user.gids.contains(&gid);
        // Membership in the group of root would give far more than this.
        let is_given = gid == 0 && !is_member;
        let group = match is_given {
            true => "cleave".to_owned(),
            false => users::group_name(gid),
        };
        let joined = format!("usermod -aG {group} {name}");
        let again = "and start its programs again";
        if self.is_home() {
            return sought.in_home.to_owned();
        }
        // A unit sets the modes and groups of its folder and its socket when it starts.
        if self.path.starts_with(unit::SOCKETS) {
            return match is_member {
                true => "restart its daemon, which sets the mode as configured".to_owned(),
                false => format!("{joined}, {again}"),
            };
        }
        let bits = if wanted == ENTER { "x" } else { "rw" };
        let mut steps = Vec::new();
        if is_given {
            steps.push(format!("chgrp cleave {shown}"));
        }
        if self.mode >> 3 & wanted != wanted {
            steps.push(format!("chmod g+{bits} {shown}"));
        }
        if !is_member {
            steps.push(joined);
        }
        let steps = steps.join(" && ");
        match wanted {
            _ if is_member => steps,
            ENTER => format!("chmod o+x {shown}, or {steps}"),
            _ => format!("{steps}, {again}"),
        }
    }
}

/// Returns a path as one word of a shell, whatever is in it: another user may have named a folder on the way.
pub(super) fn quoted(path: &Path) -> String {
    let shown = path.display().to_string();
    format!("'{}'", shown.replace('\'', r"'\''"))
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

    use super::super::finding;
    use super::*;

    const SOUGHT: Sought = Sought {
        check: "thing",
        in_home: "move it",
    };

    fn user(name: &str, uid: u32, gid: u32) -> User {
        User {
            name: name.to_owned(),
            uid,
            gids: vec![gid],
        }
    }

    /// What keeps `user` from `path`, which another user owns.
    fn obstacle<'a>(
        path: &'a str,
        user: &'a User,
        (gid, mode): (u32, u32),
        wanted: u32,
    ) -> Obstacle<'a> {
        Obstacle {
            path: Path::new(path),
            user,
            wanted,
            owner: 1234,
            gid,
            mode,
            is_device: false,
        }
    }

    #[test]
    fn the_remedy_is_everything_that_is_missing() {
        let vmm = user("vmm", 1000, 7);
        let again = ", and start its programs again";
        let home = Path::new("/home").join("a").display().to_string();
        let joined = format!("usermod -aG cleave vmm{again}");
        for (path, gid, mode, wanted, says) in [
            ("/s", 7, 0o600, WRITE, "chmod g+rw '/s'".to_owned()),
            (
                "/s",
                0,
                0o755,
                WRITE,
                format!("chgrp cleave '/s' && chmod g+rw '/s' && {joined}"),
            ),
            (
                "/s",
                0,
                0o770,
                WRITE,
                format!("chgrp cleave '/s' && {joined}"),
            ),
            (
                "/s",
                0,
                0o700,
                ENTER,
                "chmod o+x '/s', or chgrp cleave '/s' && chmod g+x '/s' && usermod -aG cleave vmm"
                    .to_owned(),
            ),
            // The unit would undo any other.
            ("/run/cleave/a", 0, 0o750, ENTER, joined.clone()),
            ("/run/cleave/a/disk.sock", 0, 0o600, WRITE, joined),
            (
                "/run/cleave/a",
                7,
                0o700,
                ENTER,
                "restart its daemon, which sets the mode as configured".to_owned(),
            ),
            // Others must not come into a home.
            ("/root", 0, 0o700, ENTER, "move it".to_owned()),
            (&home, 1234, 0o700, ENTER, "move it".to_owned()),
        ] {
            let remedy = obstacle(path, &vmm, (gid, mode), wanted).remedy(SOUGHT);
            assert_eq!(remedy, says, "{path} {gid} {mode:o}");
        }
    }

    /// An operator pastes remedies into a shell.
    #[test]
    fn a_path_in_a_remedy_is_one_word() {
        let vmm = user("vmm", 1000, 7);
        let found = obstacle("/a';id;'", &vmm, (7, 0o600), WRITE);
        let word = "'/a'\\'';id;'\\'''";
        assert_eq!(found.remedy(SOUGHT), format!("chmod g+rw {word}"));
        assert_eq!(found.opened(), format!("chown vmm {word}"));
    }

    #[test]
    fn a_unit_that_may_not_open_its_image_is_a_problem() {
        let [root, vm] = [("root", 0), ("vm", 1000)].map(|(name, uid)| user(name, uid, 990));
        let is_said = |obstacle: Obstacle<'_>, remedy: &str| {
            let found = obstacle.of_unit(SOUGHT, "cleave@a");
            let line = finding::lines(&[found]);
            assert!(line.starts_with("problem "), "{line}");
            assert!(line.contains("the unit cleave@a, which runs as "), "{line}");
            assert!(line.contains(remedy), "{remedy} is not in {line}");
        };
        let edit = "systemctl edit cleave@a, [Service] User= or SupplementaryGroups= that may read";
        let image = |user| obstacle("/i", user, (5, 0o600), READ);
        is_said(
            image(&root),
            &format!("): chown root:root '/i', or {edit} it\n"),
        );
        is_said(image(&vm), &format!("): chown vm '/i', or {edit} it\n"));
        let read_only = Obstacle {
            owner: 0,
            wanted: READ | WRITE,
            ..image(&root)
        };
        is_said(
            read_only,
            &format!("): chmod u+rw '/i', or {edit} and write it\n"),
        );
        let device = Obstacle {
            is_device: true,
            ..image(&root)
        };
        is_said(device, &format!("): {edit} it\n"));
        is_said(
            obstacle("/s", &root, (5, 0o700), ENTER),
            "): chmod o+x '/s', or ",
        );
        is_said(obstacle("/root", &vm, (0, 0o700), ENTER), "): move it\n");
    }

    #[test]
    fn the_first_class_that_fits_decides() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        fs::write(&path, "").unwrap();
        let found = fs::metadata(&path).unwrap();
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
            let user = user("a", uid, gid);
            let may = [READ, READ | WRITE].map(|wanted| may(&found, &user, wanted));
            assert_eq!(may, [reads, writes], "{mode:o}");
        }
    }
}
