//! The kernel, io_uring, what watches over programs, and the group of the sockets.

use std::fs;
use std::process::Command;

use cleave_engine::Reactor;
use rustix::thread::{CapabilitySet, capabilities};

use super::finding::Finding;
use super::users::{self, User};

/// The oldest kernel that the tests of the daemon cover.
const KERNEL_MIN: (u32, u32) = (5, 19);

/// The newest libvirt that is known to leave `<reconnect>` out when a disk is attached to a running guest.
const LIBVIRT_FORGETS: (u32, u32) = (9, 0);

/// The group of the sockets that the units make.
const GROUP: &str = "cleave";

/// Checks the host: `ours` runs the daemon, `vmm` runs the guest.
pub(super) fn check(ours: &User, vmm: &User) -> Vec<Finding> {
    let mut findings = vec![
        kernel(&rustix::system::uname().release().to_string_lossy()),
        rings(),
    ];
    findings.extend(restricted(ours));
    findings.push(mandatory_access());
    findings.push(group(users::group(GROUP), vmm));
    findings.extend(libvirt_version().and_then(|version| libvirt(&version)));
    findings
}

fn kernel(release: &str) -> Finding {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map_while(|n| n.parse().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let (major, minor) = KERNEL_MIN;
    match version >= KERNEL_MIN {
        true => Finding::ok("kernel", format!("Linux {release}")),
        false => Finding::problem(
            "kernel",
            format!("Linux {release} is older than {major}.{minor}"),
            "boot a newer kernel",
        ),
    }
}

/// Makes a ring with every operation and feature that the daemon uses.
fn rings() -> Finding {
    match Reactor::probe() {
        Ok(()) => Finding::ok(
            "io_uring",
            "a ring with all that the daemon needs can be made",
        ),
        Err(error) => Finding::problem(
            "io_uring",
            error.to_string(),
            "set the sysctl kernel.io_uring_disabled to 0, or allow io_uring in the container's seccomp profile",
        ),
    }
}

/// `kernel.io_uring_disabled` = 1 leaves io_uring to a group, and to CAP_SYS_ADMIN, which the service drops.
fn restricted(ours: &User) -> Option<Finding> {
    let sysctl = |name: &str| {
        let text = fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok()?;
        text.trim().parse::<i64>().ok()
    };
    let disabled = sysctl("io_uring_disabled")?;
    let allowed = sysctl("io_uring_group").unwrap_or(-1);
    let is_member = ours.gids.iter().any(|gid| i64::from(*gid) == allowed);
    let is_admin =
        capabilities(None).is_ok_and(|ours| ours.effective.contains(CapabilitySet::SYS_ADMIN));
    match disabled {
        1 if is_admin && !is_member => Some(Finding::warning(
            "io_uring",
            "kernel.io_uring_disabled is 1: this process may use io_uring by CAP_SYS_ADMIN, which cleave@.service drops",
            "set the sysctl kernel.io_uring_group to the number of the group cleave",
        )),
        _ => None,
    }
}

fn mandatory_access() -> Finding {
    let check = "confinement";
    let is =
        |path: &str, value: &str| fs::read_to_string(path).is_ok_and(|found| found.trim() == value);
    if is("/sys/fs/selinux/enforce", "1") {
        return Finding::warning(
            check,
            "SELinux enforces its policy, which may keep QEMU from the socket and the daemon from the image",
            "if it does, ausearch -m avc names what it denied",
        );
    }
    match is("/sys/module/apparmor/parameters/enabled", "Y") {
        true => Finding::ok(
            check,
            "AppArmor is on; if it keeps QEMU from the socket, journalctl -k names what it denied",
        ),
        false => Finding::ok(check, "neither SELinux nor AppArmor restricts programs"),
    }
}

/// Returns what the daemon of libvirt says of its version, if it is installed.
fn libvirt_version() -> Option<String> {
    let asked = |program: &&str| Command::new(program).arg("--version").output().ok();
    let said = ["libvirtd", "virtqemud"].iter().find_map(asked)?;
    String::from_utf8(said.stdout).ok()
}

/// Judges a line such as `libvirtd (libvirt) 9.0.0`.
fn libvirt(version: &str) -> Option<Finding> {
    let version = version.split_whitespace().last()?;
    let mut numbers = version.split('.').map_while(|number| number.parse().ok());
    let numbers: (u32, u32) = (numbers.next()?, numbers.next()?);
    Some(match numbers <= LIBVIRT_FORGETS {
        true => Finding::warning(
            "libvirt",
            format!(
                "libvirt {version} forgets the <reconnect> of a disk that attach-device --live adds: after a restart of the daemon \
                 the disk hangs until its guest is started again"
            ),
            "attach disks with --config and start the guest again, or use the lines for the monitor in docs/recipes-node.md",
        ),
        false => Finding::ok("libvirt", format!("libvirt {version}")),
    })
}

/// The units give their sockets to the group.
fn group(gid: Option<u32>, vmm: &User) -> Finding {
    let name = &vmm.name;
    match gid {
        None => Finding::warning(
            "group",
            format!("there is no group {GROUP}, which the systemd units use"),
            format!("groupadd --system {GROUP}, or install the package"),
        ),
        Some(gid) if vmm.uid == 0 || vmm.gids.contains(&gid) => Finding::ok(
            "group",
            format!("{name} may use the sockets of the group {GROUP}"),
        ),
        Some(_) => Finding::warning(
            "group",
            format!(
                "{name} is not in the group {GROUP}, to which the sockets of the systemd units belong"
            ),
            format!("usermod -aG {GROUP} {name}, and start the VMM again"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    #[test]
    fn kernels_are_compared_by_number() {
        for (release, level) in [
            ("5.18.19-generic", Severity::Problem),
            ("5.19.0", Severity::Ok),
            ("6.1.0-49-amd64", Severity::Ok),
            ("10.0", Severity::Ok),
            ("4.20", Severity::Problem),
            ("", Severity::Problem),
        ] {
            assert_eq!(kernel(release).level, level, "{release}");
        }
    }

    #[test]
    fn an_old_libvirt_is_warned_of() {
        let level = |said: &str| libvirt(said).map(|found| found.level);
        for (said, wanted) in [
            ("libvirtd (libvirt) 9.0.0\n", Some(Severity::Warning)),
            ("virtqemud (libvirt) 8.10.0\n", Some(Severity::Warning)),
            ("virtqemud (libvirt) 11.3.0\n", Some(Severity::Ok)),
            ("", None),
            ("unknown option", None),
        ] {
            assert_eq!(level(said), wanted, "{said}");
        }
    }

    #[test]
    fn members_of_the_group_and_root_may_use_its_sockets() {
        let user = |uid, gid| User {
            name: "a".to_owned(),
            uid,
            gids: vec![gid],
        };
        assert_eq!(group(Some(9), &user(5, 9)).level, Severity::Ok);
        assert_eq!(group(Some(9), &user(0, 0)).level, Severity::Ok);
        assert_eq!(group(Some(9), &user(5, 8)).level, Severity::Warning);
        assert_eq!(group(None, &user(5, 8)).level, Severity::Warning);
    }
}
