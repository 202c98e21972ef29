//! `cleave doctor`: looks for what keeps a disk from being served, and says how to mend it. It changes nothing.

mod access;
mod disk;
mod finding;
mod host;
mod limits;
mod listeners;
mod mounts;
mod socket;
mod unit;
mod users;

use std::path::PathBuf;

use cleave_disk::DiskSpec;
use cleave_host::Failure;

use crate::output::print;
use finding::Severity;
use users::User;

/// The things to check besides the host.
#[derive(Debug)]
pub(crate) struct Doctor {
    /// The socket of the frontends.
    pub(crate) socket: Option<PathBuf>,
    pub(crate) disk: Option<DiskSpec>,
    /// The VMM's user.
    pub(crate) user: Option<String>,
    pub(crate) json: bool,
}

/// Users that run QEMU under libvirt: Debian and Ubuntu, then Fedora.
const VMM_USERS: [&str; 2] = ["libvirt-qemu", "qemu"];

/// Prints all findings; a problem among them is a failure.
pub(crate) fn run(doctor: &Doctor) -> Result<(), Failure> {
    let ours = User::current();
    let theirs = vmm_user(doctor, &ours)?;
    let mut findings = host::check(&ours, &theirs);
    findings.extend(limits::check());
    if let Some(path) = &doctor.socket {
        findings.extend(socket::check(path, &theirs));
    }
    if let Some(spec) = &doctor.disk {
        findings.extend(disk::check(spec, &ours, doctor.socket.as_deref()));
    }
    print(&match doctor.json {
        true => finding::json(&findings),
        false => finding::lines(&findings),
    })?;
    let problems = findings
        .iter()
        .filter(|found| found.level == Severity::Problem);
    match problems.count() {
        0 => Ok(()),
        1 => Err(Failure::run("1 problem was found")),
        several => Err(Failure::run(format!("{several} problems were found"))),
    }
}

fn vmm_user(doctor: &Doctor, ours: &User) -> Result<User, Failure> {
    match &doctor.user {
        Some(name) => User::named(name).ok_or_else(|| {
            Failure::input(format!(
                "--user {name}: there is no such user in /etc/passwd: give a name or a number that is there"
            ))
        }),
        None => Ok(VMM_USERS
            .iter()
            .find_map(|name| User::named(name))
            .unwrap_or_else(|| ours.clone())),
    }
}
