//! This machine as a place to measure on: what a run needs or suffers from, and how that is here. No serial numbers, and no names
//! of users.

use std::fs::{File, OpenOptions, read_to_string};
use std::path::Path;

use cleave_rig::{Result, quietly, setup};
use itertools::Itertools;
use serde::Serialize;

use crate::bench;
use crate::disk_options::DiskOptions;
use crate::equipment::Equipment;
use crate::filled;
use crate::guest_bench;

/// One thing that a run needs or suffers from.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Circumstance {
    name: String,
    fitness: Fitness,
    note: String,
}

/// The effect of a circumstance on a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Fitness {
    /// As it should be.
    Good,
    /// The run is made, and its figures are worth less.
    Poor,
    /// Something is left out.
    Missing,
}

impl std::fmt::Display for Circumstance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fitness = format!("{:?}", self.fitness).to_lowercase();
        write!(f, "{fitness:<8} {:<20} {}", self.name, self.note)
    }
}

/// Looks at the machine, and at the disk if there is one.
pub(crate) fn survey(equipment: &Equipment, disk: &DiskOptions) -> Vec<Circumstance> {
    let mut all = vec![
        daemon(equipment),
        cpus(),
        smt(&read("/sys/devices/system/cpu/smt/active")),
        governor(&governors()),
        hypervisor(&read("/proc/cpuinfo")),
        io_uring(&read("/proc/sys/kernel/io_uring_disabled")),
        kvm(),
    ];
    let programs = bench::PROGRAMS.iter().chain(&guest_bench::PROGRAMS);
    all.extend(programs.unique().map(|name| program(name)));
    all.push(match disk.path() {
        Some(path) => given_disk(path),
        None => new(
            "disk",
            Fitness::Good,
            "none is given: a file in the folder of the run is filled and measured",
        ),
    });
    all.extend(disk.path().map(|_| permission(disk)));
    all
}

fn new(name: &str, fitness: Fitness, note: impl Into<String>) -> Circumstance {
    Circumstance {
        name: name.to_owned(),
        fitness,
        note: note.into(),
    }
}

fn read(path: &str) -> String {
    read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn daemon(equipment: &Equipment) -> Circumstance {
    match equipment.daemon() {
        Ok(said) => new("cleave", Fitness::Good, said),
        Err(why) => new("cleave", Fitness::Missing, why),
    }
}

fn cpus() -> Circumstance {
    match bench::placement() {
        Ok((placement, None)) => new("CPUs", Fitness::Good, placement),
        Ok((placement, Some(caveat))) => {
            new("CPUs", Fitness::Poor, format!("{placement}; {caveat}"))
        }
        Err(why) => new("CPUs", Fitness::Missing, why),
    }
}

fn smt(active: &str) -> Circumstance {
    match active {
        "1" => new(
            "SMT",
            Fitness::Poor,
            "on: the second threads of the cores that are measured have to be idle",
        ),
        "0" => new("SMT", Fitness::Good, "off"),
        _ => new("SMT", Fitness::Good, "the kernel says nothing about it"),
    }
}

/// Returns each frequency governor that a CPU has.
fn governors() -> Vec<String> {
    let count = std::thread::available_parallelism().map_or(1, |count| count.get());
    let path = |cpu| format!("/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor");
    let all = (0..count).map(|cpu| read(&path(cpu)));
    all.filter(|governor| !governor.is_empty())
        .unique()
        .collect()
}

fn governor(governors: &[String]) -> Circumstance {
    match governors {
        [] => new(
            "governor",
            Fitness::Good,
            "the kernel sets no frequencies here",
        ),
        [only] if only == "performance" => new("governor", Fitness::Good, only),
        some => new(
            "governor",
            Fitness::Poor,
            format!(
                "{}: `cpupower frequency-set -g performance` keeps the frequency",
                some.join(", ")
            ),
        ),
    }
}

fn hypervisor(cpuinfo: &str) -> Circumstance {
    match cpuinfo.contains(" hypervisor") {
        true => new(
            "machine",
            Fitness::Poor,
            "a virtual machine: its host shares the CPUs and the disk with others",
        ),
        false => new("machine", Fitness::Good, "not a virtual machine"),
    }
}

fn io_uring(disabled: &str) -> Circumstance {
    match disabled {
        "" | "0" => new("io_uring", Fitness::Good, "allowed"),
        other => new(
            "io_uring",
            Fitness::Missing,
            format!("kernel.io_uring_disabled is {other}: run as root, or set it to 0"),
        ),
    }
}

fn kvm() -> Circumstance {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    match opened {
        Ok(_) => new(
            "KVM",
            Fitness::Good,
            "/dev/kvm can be opened; a guest is booted to see whether it works",
        ),
        Err(error) => new(
            "KVM",
            Fitness::Poor,
            format!("/dev/kvm: {error}; guests run on an emulated CPU, whose figures say little"),
        ),
    }
}

/// A program of others, with its version or the package to install.
fn program(name: &str) -> Circumstance {
    if let Some(missing) = setup::missing(&[name]).first() {
        let package = missing.package;
        return new(name, Fitness::Missing, format!("install {package}"));
    }
    // Some print their usage instead, or nothing: that they are there is enough.
    let said = quietly(Path::new("/"), "{} --version", &[&name]).unwrap_or_default();
    let version = said.lines().find(|line| line.contains(char::is_numeric));
    new(name, Fitness::Good, version.unwrap_or("installed").trim())
}

fn given_disk(path: &Path) -> Circumstance {
    let shown = path.display();
    let checked = File::open(path)
        .map_err(|error| error.to_string())
        .and_then(|_| filled::check(path));
    let drive = drive(path).unwrap_or_default();
    match checked {
        Ok(()) => new("disk", Fitness::Good, format!("{shown}{drive}: filled")),
        Err(why) => new(
            "disk",
            Fitness::Missing,
            format!("{shown}{drive}: {why}; with --destructive it is filled first"),
        ),
    }
}

/// Returns the model of the drive that holds a block device, and the scheduler of its requests.
fn drive(path: &Path) -> Option<String> {
    let name = path.canonicalize().ok()?;
    let own = Path::new("/sys/class/block").join(name.file_name()?);
    let own = own.canonicalize().ok()?;
    // A partition lies in the folder of its drive.
    let whole = match own.join("partition").exists() {
        true => own.parent()?,
        false => &own,
    };
    let read = |name: &str| read(&whole.join(name).to_string_lossy());
    let [model, rotational, scheduler] =
        ["device/model", "queue/rotational", "queue/scheduler"].map(read);
    let kind = if rotational == "1" {
        "rotating"
    } else {
        "solid state"
    };
    Some(format!(" ({model}, {kind}, scheduler {scheduler})").replace("(, ", "("))
}

fn permission(disk: &DiskOptions) -> Circumstance {
    match (disk.check(), disk.may_be_written()) {
        (Err(why), _) => new("writes", Fitness::Missing, why),
        (Ok(()), true) => new("writes", Fitness::Good, "the disk is written to"),
        (Ok(()), false) => new(
            "writes",
            Fitness::Poor,
            "not allowed: the disk is only read, and what writes is measured on a file; --destructive allows it",
        ),
    }
}

/// Returns which studies are measured here and which are not, a line each.
pub(crate) fn outlook(equipment: &Equipment) -> Vec<Circumstance> {
    let guests: Vec<&str> = setup::missing(&guest_bench::PROGRAMS)
        .iter()
        .map(|one| one.package)
        .unique()
        .collect();
    let peers: Vec<String> = setup::missing(&bench::PROGRAMS)
        .into_iter()
        .map(|one| one.program)
        .collect();
    let host = match (equipment.daemon(), peers.as_slice()) {
        (Err(_), _) => new(
            "on the host",
            Fitness::Missing,
            "nothing runs without cleave",
        ),
        (Ok(_), []) => new("on the host", Fitness::Good, "everything runs"),
        (Ok(_), some) => new(
            "on the host",
            Fitness::Poor,
            format!("runs without {}", some.join(", ")),
        ),
    };
    let guests = match (cfg!(target_arch = "x86_64"), guests.as_slice()) {
        (false, _) => new("in guests", Fitness::Missing, "needs an x86-64 machine"),
        (true, []) => new("in guests", Fitness::Good, "everything runs"),
        (true, some) => new(
            "in guests",
            Fitness::Missing,
            format!("does not run without the packages {}", some.join(", ")),
        ),
    };
    vec![host, guests]
}

/// Prints everything, and returns what was found as it is kept beside the results.
pub(crate) fn describe(equipment: &Equipment, disk: &DiskOptions) -> Result<String> {
    let found = survey(equipment, disk);
    let outlook = outlook(equipment);
    found
        .iter()
        .chain(&outlook)
        .for_each(|one| println!("{one}"));
    serde_json::to_string_pretty(&found).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn circumstances_are_judged() {
        let governors = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            governor(&names).fitness
        };
        for (found, fitness) in [
            (smt("1").fitness, Fitness::Poor),
            (smt("0").fitness, Fitness::Good),
            (governors(&[]), Fitness::Good),
            (governors(&["performance"]), Fitness::Good),
            (governors(&["performance", "powersave"]), Fitness::Poor),
            (
                hypervisor("flags : fpu hypervisor x").fitness,
                Fitness::Poor,
            ),
            (hypervisor("flags : fpu").fitness, Fitness::Good),
            (io_uring("2").fitness, Fitness::Missing),
            (io_uring("").fitness, Fitness::Good),
            (program("nonesuch").fitness, Fitness::Missing),
        ] {
            assert_eq!(found, fitness);
        }
        assert_eq!(smt("0").to_string(), "good     SMT                  off");
    }
}
