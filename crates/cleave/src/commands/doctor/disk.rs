//! The disk: whether it can be opened as `cleave serve` does; for a file also whether it can be locked, and which processes have it
//! open.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use cleave_disk::{Disk, DiskSpec, OpenError, OpenOptions, format_size, other_partition_block};
use cleave_host::lock_record;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::access::{self, READ, Sought, WRITE};
use super::finding::{Finding, Severity};
use super::mounts;
use super::unit::DiskUnit;
use super::users::User;

const CHECK: &str = "disk";
const SOUGHT: Sought = Sought {
    check: CHECK,
    in_home: "move it elsewhere, such as to /var/lib/images",
};

/// How long a server may take.
const OPEN_TIME: Duration = Duration::from_secs(20);

/// Most processes that are named.
const NAMED_MAX: usize = 4;

/// Checks a disk for the user that runs this program. A daemon may serve it at `socket` already.
pub(super) fn check(spec: &DiskSpec, user: &User, socket: Option<&Path>) -> Vec<Finding> {
    match spec.path() {
        Some(path) => file(spec, path, user, socket),
        None => vec![other(spec)],
    }
}

/// Checks a disk without a file, mostly one that a server has. The client of a cluster that does not answer waits without end.
fn other(spec: &DiskSpec) -> Finding {
    let (to, opened) = channel();
    let theirs = spec.clone();
    let opener = thread::Builder::new().name("open".to_owned());
    // Left behind if it hangs. If it cannot be started, nothing is received.
    let _ = opener.spawn(move || to.send(open(&theirs).map(|disk| disk.capacity_bytes())));
    match opened.recv_timeout(OPEN_TIME) {
        Ok(Ok(bytes)) => Finding::ok(
            CHECK,
            format!("{spec} can be opened; its size is {}", format_size(bytes)),
        ),
        Ok(Err(error)) => unopened(&error, &[]),
        Err(_) => Finding::problem(
            CHECK,
            format!("{spec} did not open within {} s", OPEN_TIME.as_secs()),
            "see whether its storage answers",
        ),
    }
}

/// Checks an image or a block device.
fn file(spec: &DiskSpec, path: &Path, user: &User, socket: Option<&Path>) -> Vec<Finding> {
    let unit = DiskUnit::of(socket);
    let daemon = unit.as_ref().and_then(|unit| Some((unit, unit.user()?)));
    let mut permission = permission(path, user, daemon.as_ref());
    let Ok(found) = fs::metadata(path) else {
        return vec![permission];
    };
    let mut holders = holders(&found);
    let server = socket.and_then(|socket| served(socket, &found, &mut holders));
    let is_served = server.is_some();
    // Its daemon has it open. The next one could not open it.
    if is_served && permission.level == Severity::Problem {
        permission.level = Severity::Warning;
    }
    let mut findings = vec![permission];
    findings.extend(read_by_all(path));
    findings.extend(server);
    if !is_served {
        findings.extend(
            unit.as_ref()
                .and_then(|unit| mounts::check(CHECK, path, unit)),
        );
    }
    if found.file_type().is_block_device() && !is_served {
        findings.extend(claimed(path));
    }
    let opened = open(spec);
    if let Ok(disk) = &opened {
        findings.extend(other_blocks(path, disk.limits().block_bytes));
    }
    match opened {
        Ok(_) if !holders.is_empty() => findings.push(open_elsewhere(path, &holders)),
        Err(OpenError::InUse(_)) if is_served && !holders.is_empty() => {
            findings.push(open_elsewhere(path, &holders));
        }
        Ok(_) | Err(OpenError::InUse(_)) if is_served => {}
        Ok(_) => findings.push(Finding::ok(
            CHECK,
            "it can be locked, and no process that can be seen has it open",
        )),
        Err(OpenError::NoRead(_)) if daemon.is_some() => findings.push(Finding::warning(
            CHECK,
            format!("{} may not open it, so its locks were not tried", user.name),
            "run this command as root",
        )),
        // Already said, with the folder or the mode.
        Err(OpenError::NoRead(_)) if access::check(SOUGHT, path, user, READ).is_some() => {}
        Err(error) => findings.push(unopened(&error, &holders)),
    }
    findings
}

/// Checks the modes of an image and of its folders for the daemon of a unit, or else for this process.
fn permission(path: &Path, user: &User, daemon: Option<&(&DiskUnit, User)>) -> Finding {
    let refused = |wanted| match daemon {
        Some((unit, theirs)) => access::check_unit(SOUGHT, path, (*unit, theirs), wanted),
        None => access::check(SOUGHT, path, user, wanted),
    };
    let (wanted, action) = match daemon {
        Some((unit, _)) if unit.only_reads => (READ, "read"),
        _ => (READ | WRITE, "read and write"),
    };
    let name = daemon.map_or(&user.name, |(_, theirs)| &theirs.name);
    let permitted = || Finding::ok(CHECK, format!("{name} may {action} {}", path.display()));
    refused(READ)
        .or_else(|| refused(wanted))
        .unwrap_or_else(permitted)
}

/// Warns of an image that every user of the host may read: all data of the guest is in it.
fn read_by_all(path: &Path) -> Option<Finding> {
    let nobody = User::nobody();
    let is_hidden = access::check(SOUGHT, path, &nobody, READ).is_some();
    let shown = access::quoted(path);
    (!is_hidden).then(|| {
        Finding::warning(
            CHECK,
            format!("every user of this host may read {shown}, and so the guest's data"),
            format!("chmod o= {shown}"),
        )
    })
}

/// Takes the daemon out of `holders` that serves the file `found` at `socket`. It has the socket's lock file open, which names the disk:
/// a node has other disks open as well.
fn served(socket: &Path, found: &fs::Metadata, holders: &mut Vec<String>) -> Option<Finding> {
    let recorded = lock_record(socket)?;
    let is_same = |spec: DiskSpec| {
        let path = spec.path()?;
        // A path that is not absolute starts at the folder of the daemon, which has one disk then.
        let is_same = || fs::metadata(path).is_ok_and(|named| same(&named, found));
        Some(path.is_relative() || is_same())
    };
    let mut specs = recorded.disk.split(", ").chain([&*recorded.disk]);
    let is_named = specs.any(|spec| spec.parse().ok().and_then(is_same) == Some(true));
    let daemons = self::holders(&recorded.lock);
    let server = holders
        .iter()
        .position(|holder| is_named && daemons.contains(holder))?;
    let server = holders.remove(server);
    let shown = socket.display();
    Some(Finding::ok(CHECK, format!("{server} serves it at {shown}")))
}

fn open_elsewhere(path: &Path, holders: &[String]) -> Finding {
    Finding::warning(
        CHECK,
        format!("{} is open in {}", path.display(), named(holders)),
        "make sure that none of them writes to it while a guest has it",
    )
}

/// Opens it as a read-only daemon does. A daemon that starts at this moment retries.
fn open(spec: &DiskSpec) -> Result<Disk, OpenError> {
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    Disk::open(spec, &options)
}

/// Names partitions that a guest would not find without another option.
fn other_blocks(path: &Path, block_bytes: u32) -> Option<Finding> {
    let file = fs::File::open(path).ok()?;
    let other = other_partition_block(&file, block_bytes).ok()??;
    Some(Finding::warning(
        CHECK,
        format!(
            "its partitions are in blocks of {other} bytes, and a guest has blocks of {block_bytes} unless told otherwise"
        ),
        format!("serve it with --block-size {other}"),
    ))
}

/// The daemon's own line has the remedy.
fn unopened(error: &OpenError, holders: &[String]) -> Finding {
    let line = error.to_string();
    let (what, remedy) = line
        .split_once("; ")
        .unwrap_or((&line, "see cleave serve --help"));
    let held = match holders {
        [] => String::new(),
        holders => format!(" ({})", named(holders)),
    };
    Finding::problem(CHECK, format!("{what}{held}"), remedy)
}

/// A block device that is mounted, or part of another, cannot be opened for exclusive use.
fn claimed(path: &Path) -> Option<Finding> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Err(Errno::BUSY) => Some(Finding::problem(
            CHECK,
            format!(
                "{} is in use by this host: mounted, swap, or part of another device",
                path.display()
            ),
            "unmount it; lsblk shows where it is used",
        )),
        _ => None,
    }
}

/// Processes with the file open, as far as this user may see.
fn holders(file: &fs::Metadata) -> Vec<String> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let own = std::process::id().to_string();
    let numbers = processes.filter_map(|entry| entry.file_name().into_string().ok());
    let numbers = numbers.filter(|name| *name != own && name.bytes().all(|b| b.is_ascii_digit()));
    numbers
        .filter(|pid| has_open(pid, file))
        .map(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("{} [{pid}]", name.trim())
        })
        .collect()
}

fn has_open(pid: &str, file: &fs::Metadata) -> bool {
    let opened = fs::read_dir(format!("/proc/{pid}/fd"));
    let mut opened = opened.into_iter().flatten().flatten();
    opened.any(|fd| fs::metadata(fd.path()).is_ok_and(|found| same(&found, file)))
}

/// Returns true if both are the same file or the same device.
fn same(one: &fs::Metadata, other: &fs::Metadata) -> bool {
    let is_device = |file: &fs::Metadata| file.file_type().is_block_device();
    match is_device(one) && is_device(other) {
        true => one.rdev() == other.rdev(),
        false => (one.dev(), one.ino()) == (other.dev(), other.ino()),
    }
}

fn named(holders: &[String]) -> String {
    let more = holders.len().saturating_sub(NAMED_MAX);
    let named: Vec<&str> = holders.iter().take(NAMED_MAX).map(String::as_str).collect();
    match more {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
