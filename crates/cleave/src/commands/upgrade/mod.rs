//! `cleave upgrade`: replaces the daemons that run another program than the installed one, which is this one, and says what
//! became of the frontend of each disk. With `--check` it only says what would become of them.

mod daemon;
mod listening;
mod outcome;
mod sums;
mod systemctl;
mod told;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use cleave_api::{ClientError, HttpClient, NodeReport};
use cleave_host::Failure;

use crate::commands::remote::unanswered;
use crate::output::print;
use crate::progress;
pub(crate) use daemon::node;
use daemon::{Daemon, PATIENCE, Program};
use outcome::outcomes;
use sums::Sums;
use systemctl::{NotRenewed, Unit};

/// `cleave upgrade`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Upgrade {
    pub(crate) check: bool,
    /// The control sockets of the daemons. Empty: those of the units.
    pub(crate) sockets: Vec<PathBuf>,
}

/// The folder in which the packaged units have their control sockets.
const RUN: &str = "/run/cleave";

/// How long the next process may take to answer once the service manager says that it runs.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Pause between two questions.
const PAUSE: Duration = Duration::from_millis(10);

/// Goes from daemon to daemon. A fault of one leaves the others alone.
pub(crate) fn run(upgrade: &Upgrade) -> Result<(), Failure> {
    let are_named = !upgrade.sockets.is_empty();
    let sockets = match are_named {
        true => upgrade.sockets.clone(),
        false => of_units(Path::new(RUN))
            .map_err(|error| Failure::run(format!("{error}: run this command as root")))?,
    };
    let (mut sums, mut boots, mut units) = (Sums::default(), Vec::new(), Vec::new());
    for socket in &sockets {
        let daemon = match Daemon::at(socket) {
            Ok(daemon) => daemon,
            // The socket of a daemon that has ended.
            Err(ClientError::NoSocket | ClientError::NoListener) if !are_named => continue,
            Err(error) => {
                sums.add(true);
                print(&told::unknown(socket, &error))?;
                continue;
            }
        };
        if boots.contains(&daemon.node.boot) {
            continue;
        }
        units.extend(daemon.unit.name().map(str::to_owned));
        boots.push(daemon.node.boot.clone());
        match upgrade.check {
            true => check(&daemon, &mut sums)?,
            false => boots.extend(renew(&daemon, &mut sums)?),
        }
    }
    if !are_named {
        for unit in systemctl::running() {
            if !units.contains(&unit) {
                sums.add(true);
                print(&told::silent(&unit))?;
            }
        }
    }
    end(upgrade, sums)
}

/// Returns the places in which units have their control sockets: that of the node, then those of single disks.
fn of_units(run: &Path) -> io::Result<Vec<PathBuf>> {
    let mut sockets = Vec::new();
    let folders = match fs::read_dir(run) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(sockets),
        folders => folders?,
    };
    for folder in folders {
        let socket = folder?.path().join("control.sock");
        match fs::symlink_metadata(&socket) {
            Ok(_) => sockets.push(socket),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                let why = format!("cannot look for {}: {error}", socket.display());
                return Err(io::Error::new(error.kind(), why));
            }
            // The folder of a disk of a node, or no folder.
            Err(_) => {}
        }
    }
    sockets.sort();
    sockets.insert(0, run.join("control.sock"));
    Ok(sockets)
}

/// Says what a restart would mean.
fn check(daemon: &Daemon, sums: &mut Sums) -> Result<(), Failure> {
    sums.add(daemon.hindrance().is_some());
    let lost = daemon.disks.iter().filter(|(_, fate)| fate.is_bad());
    sums.add_disks(daemon.disks.len(), lost.count());
    print(&told::checked(daemon))
}

/// Has a daemon replaced, unless it runs the installed program or cannot be restarted without harm. Returns the name of its new
/// start.
fn renew(daemon: &Daemon, sums: &mut Sums) -> Result<Option<String>, Failure> {
    if daemon.program == Program::Installed {
        sums.add(false);
        return print(&told::left_alone(daemon)).map(|()| None);
    }
    let (Unit::Of(unit), None) = (&daemon.unit, daemon.hindrance()) else {
        sums.add(true);
        return print(&told::checked(daemon)).map(|()| None);
    };
    let begun = Instant::now();
    let (said, next) = match replace(daemon, unit) {
        Ok(replaced) => replaced,
        Err(why) => {
            sums.add(true);
            return print(&told::not_renewed(daemon, unit, &why)).map(|()| None);
        }
    };
    let is_another = Program::of(next.pid) == Program::Other;
    let client = HttpClient::new(&daemon.socket, PATIENCE);
    let outcomes = outcomes(&client, &daemon.disks, begun);
    let lost = outcomes.iter().filter(|(_, outcome)| outcome.is_bad());
    sums.add(is_another);
    sums.add_disks(outcomes.len(), lost.count());
    print(&told::restarted(
        daemon, &next, &said, is_another, &outcomes,
    ))?;
    Ok(Some(next.boot))
}

/// Has the unit of a daemon run the installed program. Returns warnings of the service manager and the next process, or why there is none.
fn replace(daemon: &Daemon, unit: &str) -> Result<(Vec<String>, NodeReport), NotRenewed> {
    progress::draw(&format!("upgrading {unit}"));
    let said = systemctl::renew(unit);
    progress::clear();
    let said = said?;
    let next = successor(&daemon.socket, &daemon.node.boot);
    let next = next.map_err(|why| NotRenewed::Failed(vec![why]))?;
    Ok((said, next))
}

/// Waits until another process than the one of this start answers.
fn successor(socket: &Path, boot: &str) -> Result<NodeReport, String> {
    let client = HttpClient::new(socket, PATIENCE);
    let end = Instant::now() + ANSWER_WITHIN;
    loop {
        match node(&client) {
            Ok(node) if node.boot != boot => return Ok(node),
            Ok(_) if Instant::now() >= end => {
                let socket = socket.display();
                return Err(format!("the process before still answers at {socket}"));
            }
            Err(error) if Instant::now() >= end => return Err(unanswered(socket, &error)),
            _ => thread::sleep(PAUSE),
        }
    }
}

fn end(upgrade: &Upgrade, sums: Sums) -> Result<(), Failure> {
    if sums.daemons == 0 {
        return Err(Failure::run(format!(
            "no daemon was found at {RUN}/control.sock and {RUN}/*/control.sock: name its control socket with --control PATH"
        )));
    }
    let faults = match upgrade.check {
        true => sums.faults_ahead(),
        false => sums.faults_left(),
    };
    match faults {
        Some(faults) => Err(Failure::run(faults)),
        None if upgrade.check => print(&sums.all_well()),
        None => Ok(()),
    }
}
