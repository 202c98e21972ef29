//! The systemd unit that serves disks at a socket: its name, and what systemd tells of it.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::users::{self, User};

/// Where the units have the sockets of their disks, and where those of single disks are configured.
pub(super) const SOCKETS: &str = "/run/cleave";
const SETTINGS: &str = "/etc/cleave";

/// Asked for by name, so that those without a value are told too.
const PROPERTIES: &str = "LoadState,Environment,ProtectSystem,ProtectHome,PrivateTmp,TemporaryFileSystem,BindPaths,ReadWritePaths,\
                          User,Group,SupplementaryGroups,DynamicUser,CapabilityBoundingSet,AmbientCapabilities";

/// Each of them lets a process read files that their modes close to it.
const EXEMPT: [&str; 2] = ["cap_dac_override", "cap_dac_read_search"];

/// How a unit was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    /// The socket in question is in its folder.
    BySocket,
    /// No socket is in question, and perhaps no unit is meant to serve the disk.
    Any,
}

/// A unit that serves disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DiskUnit {
    pub(super) choice: Choice,
    /// Its name, without the type.
    pub(super) name: String,
    /// Lines such as `ProtectSystem=strict`.
    pub(super) properties: String,
    /// True if its settings have the disk only read.
    pub(super) only_reads: bool,
}

impl DiskUnit {
    /// Asks systemd about the unit of a socket; without a socket, about that of any single disk. Nothing is returned for a socket
    /// elsewhere, and on a host without systemd.
    pub(super) fn of(socket: Option<&Path>) -> Option<DiskUnit> {
        let settings = Path::new(SETTINGS);
        let name = name_of(socket, settings)?;
        let shown = Command::new("systemctl")
            .args(["show", "--property", PROPERTIES])
            .arg(format!("{name}.service"))
            .output()
            .ok()?;
        let disk = name.split_once('@').map(|(_, disk)| disk);
        let file = disk.map(|disk| settings.join(format!("{disk}.conf")));
        let options = file.and_then(|file| fs::read_to_string(file).ok());
        Some(DiskUnit {
            choice: match socket {
                Some(_) => Choice::BySocket,
                None => Choice::Any,
            },
            name,
            properties: String::from_utf8_lossy(&shown.stdout).into_owned(),
            only_reads: options.is_some_and(|options| options.contains("--read-only")),
        })
    }

    /// Returns the unit to edit: that of all single disks, or the node.
    pub(super) fn edited(&self) -> String {
        match self.name.split_once('@') {
            Some((template, _)) => format!("{template}@"),
            None => self.name.clone(),
        }
    }

    /// Returns the user as which its daemon opens images. Nothing is returned if that is not known, and if modes of files do not bind
    /// its daemon.
    pub(super) fn user(&self) -> Option<User> {
        match self.choice {
            Choice::BySocket => user_of(&self.properties, User::named, users::group),
            Choice::Any => None,
        }
    }
}

/// Returns the value of a property, which may be empty. Nothing is returned for one that systemd does not tell.
pub(super) fn told<'a>(properties: &'a str, key: &str) -> Option<&'a str> {
    let mut lines = properties.lines();
    lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
}

/// The unit of a socket; that of any single disk if no socket is in question.
fn name_of(socket: Option<&Path>, settings: &Path) -> Option<String> {
    let Some(socket) = socket else {
        return Some("cleave@NAME".to_owned());
    };
    let socket = std::path::absolute(socket).ok()?;
    let name = socket.parent()?.strip_prefix(SOCKETS).ok()?.to_str()?;
    let is_disk = !name.is_empty() && !name.contains('/');
    is_disk.then(|| match settings.join(format!("{name}.conf")).exists() {
        true => format!("cleave@{name}"),
        false => "cleave".to_owned(),
    })
}

/// Returns the user of a unit with these properties, with the groups that systemd gives its processes.
fn user_of(
    properties: &str,
    user: impl Fn(&str) -> Option<User>,
    group: impl Fn(&str) -> Option<u32>,
) -> Option<User> {
    let value = |key| told(properties, key).unwrap_or_default();
    let bounding = told(properties, "CapabilityBoundingSet")?;
    if value("LoadState") != "loaded" || value("DynamicUser") == "yes" {
        return None;
    }
    let named = value("User");
    let mut user = user(if named.is_empty() { "root" } else { named })?;
    // A program that root starts gets all that the unit leaves it.
    let granted = match user.uid {
        0 => bounding,
        _ => value("AmbientCapabilities"),
    };
    if granted
        .split_whitespace()
        .any(|name| EXEMPT.contains(&name))
    {
        return None;
    }
    let number = |name: &str| name.parse().ok().or_else(|| group(name));
    let mut gids = user.gids.into_iter();
    let own = gids.next();
    let own = match value("Group") {
        "" => own,
        name => number(name),
    };
    // Without a user systemd does not look up in which groups root is.
    let more = gids.filter(|_| !named.is_empty());
    let listed = value("SupplementaryGroups").split_whitespace();
    user.gids = own
        .into_iter()
        .chain(more)
        .chain(listed.filter_map(number))
        .collect();
    Some(user)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKAGED: &str = "LoadState=loaded\nUser=\nGroup=cleave\nSupplementaryGroups=\nDynamicUser=no\n\
                            CapabilityBoundingSet=\nAmbientCapabilities=\n";

    #[test]
    fn the_folder_of_a_socket_tells_its_unit() {
        let settings = tempfile::tempdir().unwrap();
        fs::write(settings.path().join("a.conf"), "").unwrap();
        let unit = |socket| name_of(Some(Path::new(socket)), settings.path());
        assert_eq!(unit("/run/cleave/a/disk.sock").as_deref(), Some("cleave@a"));
        assert_eq!(unit("/run/cleave/b/disk.sock").as_deref(), Some("cleave"));
        assert_eq!(unit("/run/cleave/control.sock"), None);
        assert_eq!(unit("/tmp/disk.sock"), None);
        let any = name_of(None, settings.path());
        assert_eq!(any.as_deref(), Some("cleave@NAME"));
    }

    #[test]
    fn modes_bind_the_user_of_a_unit_without_capabilities() {
        let user = |name: &str| {
            let (uid, gids) = match name {
                "root" => (0, vec![0, 6]),
                "vm" => (1000, vec![100, 36]),
                _ => return None,
            };
            let name = name.to_owned();
            Some(User { name, uid, gids })
        };
        let group = |name: &str| match name {
            "cleave" => Some(990),
            "disk" => Some(6),
            _ => None,
        };
        let of = |changes: &[(&str, &str)]| {
            let changed = |text: String, change: &(&str, &str)| text.replace(change.0, change.1);
            let properties = changes.iter().fold(PACKAGED.to_owned(), changed);
            user_of(&properties, user, group).map(|user| (user.uid, user.gids))
        };
        let vm = ("User=\nGroup=cleave", "User=vm\nGroup=");
        let (disk, empty) = ("SupplementaryGroups=disk 7", "SupplementaryGroups=");
        let bounding = "CapabilityBoundingSet=";
        let none: &[(&str, &str)] = &[];
        for (changes, wanted) in [
            (none, Some((0, vec![990]))),
            (&[("Group=cleave", "Group=")], Some((0, vec![0]))),
            (&[(empty, disk)], Some((0, vec![990, 6, 7]))),
            (&[vm], Some((1000, vec![100, 36]))),
            (&[("User=\n", "User=vm\n")], Some((1000, vec![990, 36]))),
            (&[("User=\n", "User=no-such\n")], None),
            (
                &[(bounding, "CapabilityBoundingSet=cap_chown cap_dac_override")],
                None,
            ),
            (
                &[(bounding, "CapabilityBoundingSet=cap_chown")],
                Some((0, vec![990])),
            ),
            // What a unit without this line has.
            (
                &[vm, (bounding, "CapabilityBoundingSet=cap_dac_override")],
                Some((1000, vec![100, 36])),
            ),
            (
                &[
                    vm,
                    (
                        "AmbientCapabilities=",
                        "AmbientCapabilities=cap_dac_read_search",
                    ),
                ],
                None,
            ),
            (&[("=loaded", "=not-found")], None),
            (&[("DynamicUser=no", "DynamicUser=yes")], None),
            (&[("CapabilityBoundingSet=\n", "")], None),
        ] {
            assert_eq!(of(changes), wanted, "{changes:?}");
        }
    }
}
