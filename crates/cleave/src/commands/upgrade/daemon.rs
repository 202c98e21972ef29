//! A daemon before its restart: what it says of itself, and what the system says of it.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cleave_api::{ClientError, HttpClient, NodeReport, Operation};

use super::listening::listens_at;
use super::systemctl::Unit;
use crate::commands::remote::clean;
use crate::commands::view::ask::{self, ReportedDisk};

/// An answer takes milliseconds.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// A daemon, with its disks by their ids.
#[derive(Debug)]
pub(super) struct Daemon {
    pub(super) socket: PathBuf,
    pub(super) node: NodeReport,
    pub(super) program: Program,
    pub(super) unit: Unit,
    pub(super) disks: Vec<(String, Fate)>,
}

/// The program that a process runs, compared with this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Program {
    Installed,
    Other,
    /// The process cannot be looked at, or is not the daemon.
    Unknown,
}

/// The fate of a disk's frontend in a restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fate {
    NoFrontend,
    HandedOver,
    /// The frontend has to connect again, for this reason.
    ConnectsAgain(String),
    /// The disk is in this state.
    NotServed(String),
}

impl Daemon {
    /// Asks the daemon at a control socket.
    pub(super) fn at(socket: &Path) -> Result<Daemon, ClientError> {
        let node = node(&HttpClient::new(socket, PATIENCE))?;
        let (program, unit) = process(socket, node.pid);
        // Without a unit this command does not restart it, so the manager does not matter.
        let keeps = node.keeps || !matches!(unit, Unit::Of(_));
        let disks = ask::disks(socket)?;
        let disks = disks
            .iter()
            .map(|disk| (disk.id().to_owned(), Fate::of(disk, keeps)));
        Ok(Daemon {
            socket: socket.to_owned(),
            program,
            unit,
            disks: disks.collect(),
            node,
        })
    }

    /// Returns its name for the operator: that of its unit, or else its control socket.
    pub(super) fn name(&self) -> String {
        match self.unit.name() {
            Some(unit) => unit.to_owned(),
            None => clean(&self.socket.display().to_string()),
        }
    }

    /// Returns why this command does not restart it, and what to do.
    pub(super) fn hindrance(&self) -> Option<String> {
        let mut fates = self.disks.iter().map(|(_, fate)| fate);
        match &self.unit {
            Unit::Of(_) if self.node.keeps || !fates.any(Fate::is_bad) => None,
            Unit::Of(unit) => Some(format!(
                "nothing keeps its disks during a restart: its unit lacks FileDescriptorStoreMax= and Environment=FDSTORE=, or \
                 the program is too old; systemctl restart {unit} restarts it all the same"
            )),
            Unit::Unclear { why, .. } => Some(why.clone()),
            Unit::Nowhere if self.node.keeps => Some(
                "not in a unit of systemd: restart it by its service manager, which keeps its disks"
                    .to_owned(),
            ),
            Unit::Nowhere => Some(
                "not in a unit of systemd: start the installed program with the same options and --take-over, and this one hands \
                 its disks over and ends"
                    .to_owned(),
            ),
        }
    }
}

/// Returns what the system says of the process that a daemon claims to be. The daemon may be in the hands of its guest, so nothing is
/// restarted for an answer that the kernel does not confirm.
fn process(socket: &Path, pid: u32) -> (Program, Unit) {
    let why = if !is_of_owner(socket, pid) {
        "which is not of the user that the socket belongs to: restart it yourself"
    } else if !listens_at(pid, socket) {
        "which does not have this socket open, as far as this command can see: run it as root, and outside of containers; if that \
         changes nothing, take the daemon for compromised, and restart it yourself"
    } else {
        return (Program::of(pid), Unit::of(pid));
    };
    let why = format!("it says that it is process {pid}, {why}");
    (Program::Unknown, Unit::Unclear { unit: None, why })
}

/// Returns true if a process can be the one that has this socket: any if the socket is root's, otherwise one of its owner. A user
/// who answers in place of a daemon cannot have another's unit restarted.
fn is_of_owner(socket: &Path, pid: u32) -> bool {
    let owner = fs::metadata(socket).map(|found| found.uid());
    // The owner of its folder in /proc may be root.
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let user: Option<u32> = ids.and_then(|ids| ids.split_whitespace().nth(1)?.parse().ok());
    match (owner, user) {
        (Ok(0), _) | (_, None) => true,
        (owner, Some(user)) => owner.is_ok_and(|owner: u32| owner == user),
    }
}

/// Asks a daemon what it is.
pub(crate) fn node(client: &HttpClient) -> Result<NodeReport, ClientError> {
    let reply = client.call(Operation::GetNode, "", "")?;
    match reply.refusal() {
        // It does not know the question.
        Some(_) => Err(ClientError::Refused(
            "its version does not hand disks over: restart it yourself; its frontends have to connect again".to_owned(),
        )),
        None => reply.json(),
    }
}

impl Program {
    /// Compares the program of a process with this one. A file that was replaced is still another one.
    pub(super) fn of(pid: u32) -> Program {
        let identity = |process: &str| {
            let found = fs::metadata(format!("/proc/{process}/exe"))?;
            Ok::<_, std::io::Error>((found.dev(), found.ino()))
        };
        match (identity(&pid.to_string()), identity("self")) {
            (Ok(theirs), Ok(ours)) if theirs == ours => Program::Installed,
            (Ok(_), Ok(_)) => Program::Other,
            _ => Program::Unknown,
        }
    }
}

impl Fate {
    fn of(disk: &ReportedDisk, keeps: bool) -> Fate {
        let report = match disk {
            ReportedDisk::Away(away) => return Fate::NotServed(away.words()),
            ReportedDisk::Served(report) if !report.session.connected => return Fate::NoFrontend,
            ReportedDisk::Served(report) => report,
        };
        match &report.hand_over.obstacle {
            Some(obstacle) => Fate::ConnectsAgain(clean(obstacle)),
            None if keeps => Fate::HandedOver,
            None => Fate::ConnectsAgain("nothing keeps its connection".to_owned()),
        }
    }

    /// Returns true if a guest notices more than a pause.
    pub(super) fn is_bad(&self) -> bool {
        matches!(self, Fate::ConnectsAgain(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_names_no_process_of_another() {
        let file = std::env::temp_dir().join(format!("cleave-owner-{}", std::process::id()));
        fs::write(&file, "").unwrap();
        let own = std::process::id();
        assert!(is_of_owner(&file, own));
        if std::os::unix::fs::chown(&file, Some(65_534), None).is_ok() {
            assert!(!is_of_owner(&file, own) && !is_of_owner(&file, 1));
        }
        fs::remove_file(&file).unwrap();
    }

    #[test]
    fn this_program_is_the_installed_one() {
        let own = std::process::id();
        assert_eq!(Program::of(own), Program::Installed);
        let other = std::process::Command::new("sleep").arg("60").spawn();
        let mut other = other.unwrap();
        // Until then it is a copy of this one.
        while Program::of(other.id()) == Program::Installed {
            std::thread::yield_now();
        }
        assert_eq!(Program::of(other.id()), Program::Other);
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(Program::of(other.id()), Program::Unknown);
    }
}
