//! The subjects of the comparison: `subjects.toml` as values, and the command lines that they make.

use std::path::Path;
use std::sync::LazyLock;

use cleave_rig::guest::VHOST_USER_DISK;
use cleave_rig::{Result, words};
use itertools::Itertools;
use serde::Deserialize;

/// A disk in a guest, by the way it is attached; the file says what the fields mean.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Subject {
    /// The name for `--only`.
    pub(super) name: String,
    /// The name in raw data and figures.
    pub(super) title: String,
    pub(super) class: String,
    pub(super) driver: String,
    pub(super) device: String,
    qemu: Option<Vec<String>>,
    #[serde(default)]
    disk: String,
    #[serde(default)]
    io_thread: bool,
    cleave: Option<Vec<String>>,
}

/// All of them, in the order of the table, so that the same ones always meet in the same order.
pub(super) static ALL: LazyLock<Vec<Subject>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct All {
        subject: Vec<Subject>,
    }
    let all: Result<All, _> = toml::from_str(include_str!("subjects.toml"));
    #[expect(clippy::panic, reason = "the file is built in, and a test reads it")]
    all.map(|all| all.subject)
        .unwrap_or_else(|error| panic!("subjects.toml: {error}"))
});

/// Finds a subject by its name.
pub(super) fn find(name: &str) -> Result<&'static Subject> {
    ALL.iter().find(|one| one.name == name).ok_or_else(|| {
        let names = ALL.iter().map(|one| &one.name).join(", ");
        format!("there are {names}")
    })
}

/// A disk to be attached, in the order of the guest's numbering.
pub(super) struct AttachedDisk<'a> {
    pub(super) image: &'a Path,
    /// The most requests a second, and the size that the disk shows, in bytes.
    pub(super) throttle: Option<(u32, u64)>,
    /// Other disks of the guest are on the same file: none of them is written then.
    pub(super) is_shared: bool,
}

impl Subject {
    /// Returns the command line of the daemon that serves a disk; none where QEMU serves.
    pub(super) fn daemon(
        &self,
        cleave: &Path,
        disk: &AttachedDisk<'_>,
        socket: &Path,
    ) -> Option<Vec<String>> {
        match (&self.qemu, &self.cleave) {
            (Some(_), _) => None,
            (None, None) => Some(qsd_line(disk, socket)),
            (None, Some(options)) => Some(cleave_line(cleave, options, disk, socket)),
        }
    }

    /// QEMU's words for its disks, each with the socket of its daemon.
    pub(super) fn devices(&self, disks: &[(AttachedDisk<'_>, &Path)]) -> Vec<String> {
        let mut line = self.qemu.clone().unwrap_or_default();
        for (n, (disk, socket)) in disks.iter().enumerate() {
            if self.qemu.is_none() {
                let id = format!("disk{n}");
                line.extend(words(VHOST_USER_DISK, &[&id, &socket.display(), &id, &1]));
                continue;
            }
            let (node, number) = (format!("node{n}"), n.to_string());
            line.extend(block_nodes("-", disk, n, &node));
            let device = self.disk.replace("{node}", &node).replace("{n}", &number);
            line.extend(words("-device {}", &[&device]));
        }
        line
    }

    /// Returns true if QEMU does the I/O in its main loop.
    pub(super) fn is_served_by_main_loop(&self) -> bool {
        self.qemu.is_some() && !self.io_thread
    }

    /// Threads of QEMU that serve the disk beside its main one begin their names so.
    pub(super) fn io_thread(&self) -> Option<&'static str> {
        self.io_thread.then_some("IO io")
    }

    /// Returns true if our daemon serves it.
    pub(super) fn is_cleave(&self) -> bool {
        self.cleave.is_some()
    }
}

/// QEMU's words for a file, with a throttle where it is to be slow. QEMU takes one dash, its daemon two.
fn block_nodes(dash: &str, disk: &AttachedDisk<'_>, n: usize, name: &str) -> Vec<String> {
    // A comma in a path is doubled, or it would begin the next property.
    let path = disk.image.to_string_lossy().replace(',', ",,");
    let locking = if disk.is_shared { "off" } else { "auto" };
    let file = |node: &str| {
        format!(
            "{dash}blockdev driver=file,node-name={node},filename={{}},cache.direct=on,aio=io_uring,locking={locking}"
        )
    };
    let Some((iops, bytes)) = disk.throttle else {
        return words(&file(name), &[&path]);
    };
    let line = format!(
        "{} {dash}object {{}} {dash}blockdev driver=raw,node-name=cut{n},size={bytes},file=file{n} \
         {dash}blockdev driver=throttle,node-name={name},throttle-group=slow{n},file=cut{n}",
        file(&format!("file{n}"))
    );
    let limits = format!(r#"{{"iops-total":{iops}}}"#);
    let group = format!(r#"{{"qom-type":"throttle-group","id":"slow{n}","limits":{limits}}}"#);
    words(&line, &[&path, &group])
}

fn qsd_line(disk: &AttachedDisk<'_>, socket: &Path) -> Vec<String> {
    let mut line = words("qemu-storage-daemon", &[]);
    line.extend(block_nodes("--", disk, 0, "node0"));
    let export = "--export type=vhost-user-blk,id=disk,node-name=node0,writable=on,num-queues=1,addr.type=unix,addr.path={}";
    line.extend(words(export, &[&socket.display()]));
    line
}

fn cleave_line(
    program: &Path,
    options: &[String],
    disk: &AttachedDisk<'_>,
    socket: &Path,
) -> Vec<String> {
    let spec = match disk.throttle {
        None => disk.image.display().to_string(),
        // A modelled drive of one channel answers at that rate.
        Some((iops, bytes)) => {
            let us = 1_000_000 / iops.max(1);
            let shape = "channels=1,window=1,jitter=0,write_buffer=0,command_us=0";
            format!("model:custom,size={bytes},{shape},read_us={us},write_us={us}")
        }
    };
    let read_only = if disk.is_shared { " --read-only" } else { "" };
    let line = format!(
        "{{}} serve --queues 1 --workers 1 --log warn{read_only} --disk {{}} --socket-path {{}}"
    );
    let line = words(&line, &[&program.display(), &spec, &socket.display()]);
    [&line, options].concat()
}
