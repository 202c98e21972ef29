//! The subjects of the comparison: a kind of controller, and the program that serves its disk.

use std::path::Path;

use crate::guest::machine::vhost_user_disk;

/// Whether the guest's driver was written for a controller of silicon or for a hypervisor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    Emulated,
    Paravirtual,
}

impl Class {
    pub(super) fn name(self) -> &'static str {
        match self {
            Class::Emulated => "emulated",
            Class::Paravirtual => "paravirtual",
        }
    }
}

/// A disk in a guest, by the way it is attached.
#[derive(Debug)]
pub(super) struct Subject {
    /// As `--only` and the raw data say it.
    pub(super) name: &'static str,
    /// As figures say it.
    pub(super) title: &'static str,
    pub(super) class: Class,
    /// The guest's module; named in the report where the kernel lacks it.
    pub(super) driver: &'static str,
    /// QEMU's name of the device.
    pub(super) device: &'static str,
    pub(super) server: Server,
}

/// The program that moves the data.
#[derive(Debug)]
pub(super) enum Server {
    /// QEMU itself: the controller, and a disk on it (`{node}` and its number `{n}`).
    Qemu {
        controller: &'static [&'static str],
        disk: &'static str,
        thread: Thread,
    },
    QemuStorageDaemon,
    /// `cleave serve` with these further options, each of which it must know.
    Cleave(&'static [(&'static str, &'static str)]),
}

/// The thread in which QEMU does a controller's I/O.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Thread {
    Main,
    Io,
}

/// The subject that ratios are taken to.
pub(super) const BASE: &str = "virtio-blk";

const fn emulated(
    [name, title]: [&'static str; 2],
    driver: &'static str,
    device: &'static str,
    controller: &'static [&'static str],
    disk: &'static str,
) -> Subject {
    Subject {
        name,
        title,
        class: Class::Emulated,
        driver,
        device,
        server: Server::Qemu {
            controller,
            disk,
            thread: Thread::Main,
        },
    }
}

const fn in_process(
    [name, title]: [&'static str; 2],
    driver: &'static str,
    device: &'static str,
    controller: &'static [&'static str],
    disk: &'static str,
) -> Subject {
    Subject {
        name,
        title,
        class: Class::Paravirtual,
        driver,
        device,
        server: Server::Qemu {
            controller,
            disk,
            thread: Thread::Io,
        },
    }
}

const fn vhost_user([name, title]: [&'static str; 2], server: Server) -> Subject {
    Subject {
        name,
        title,
        class: Class::Paravirtual,
        driver: "virtio_blk",
        device: "vhost-user-blk-pci",
        server,
    }
}

const fn cleave(
    name: [&'static str; 2],
    options: &'static [(&'static str, &'static str)],
) -> Subject {
    vhost_user(name, Server::Cleave(options))
}

pub(super) const ALL: &[Subject] = &[
    emulated(
        ["ide", "IDE (PIIX3)"],
        "ata_piix",
        "piix3-ide",
        &["-device", "piix3-ide,id=bus"],
        "ide-hd,drive={node},bus=bus.{n}",
    ),
    emulated(
        ["ahci", "AHCI"],
        "ahci",
        "ich9-ahci",
        &["-device", "ich9-ahci,id=bus"],
        "ide-hd,drive={node},bus=bus.{n}",
    ),
    emulated(
        ["lsi53c895a", "LSI 53C895A"],
        "sym53c8xx",
        "lsi53c895a",
        &["-device", "lsi53c895a,id=bus"],
        SCSI_DISK,
    ),
    emulated(
        ["megasas", "MegaRAID SAS"],
        "megaraid_sas",
        "megasas",
        &["-device", "megasas,id=bus"],
        SCSI_DISK,
    ),
    emulated(
        ["nvme", "NVMe"],
        "nvme",
        "nvme",
        &[],
        "nvme,drive={node},serial=disk{n}",
    ),
    // A hypervisor's controller, but its disk is emulated by QEMU as those above are.
    emulated(
        ["pvscsi", "PVSCSI"],
        "vmw_pvscsi",
        "pvscsi",
        &["-device", "pvscsi,id=bus"],
        SCSI_DISK,
    ),
    in_process(
        ["virtio-scsi", "virtio-scsi"],
        "virtio_scsi",
        "virtio-scsi-pci",
        &["-device", "virtio-scsi-pci,id=bus,num_queues=1,iothread=io"],
        SCSI_DISK,
    ),
    in_process(
        [BASE, "virtio-blk in QEMU"],
        "virtio_blk",
        "virtio-blk-pci",
        &[],
        "virtio-blk-pci,drive={node},num-queues=1,queue-size=256,iothread=io",
    ),
    vhost_user(["qsd", "QSD vhost-user"], Server::QemuStorageDaemon),
    cleave(
        ["cleave", "Cleave interrupt"],
        &[("--completion", "interrupt")],
    ),
    cleave(["cleave-poll", "Cleave poll"], &[("--completion", "poll")]),
    cleave(
        ["cleave-adaptive", "Cleave adaptive"],
        &[("--completion", "adaptive")],
    ),
    cleave(
        ["cleave-unsplit", "Cleave, split off"],
        &[("--completion", "interrupt"), ("--split", "off")],
    ),
];

const SCSI_DISK: &str = "scsi-hd,drive={node},bus=bus.0,scsi-id={n}";

/// A disk to be attached, in the order of the guest's numbering.
pub(super) struct Attached<'a> {
    pub(super) image: &'a Path,
    pub(super) pace: Pace,
    /// Whether other disks of the guest are on the same file: none of them is written then.
    pub(super) is_shared: bool,
}

/// How fast a disk may be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    Full,
    /// So many requests a second at most, of a disk that shows so many bytes.
    Throttled {
        iops: u32,
        bytes: u64,
    },
}

impl Subject {
    /// Its daemons' command lines, one for each disk; none where QEMU serves.
    pub(super) fn daemons(
        &self,
        cleave: &Path,
        disks: &[(Attached<'_>, &Path)],
    ) -> Vec<Vec<String>> {
        let line = |(disk, socket): &(Attached<'_>, &Path)| match &self.server {
            Server::Qemu { .. } => None,
            Server::QemuStorageDaemon => Some(qsd_line(disk, socket)),
            Server::Cleave(options) => Some(cleave_line(cleave, options, disk, socket)),
        };
        disks.iter().filter_map(line).collect()
    }

    /// QEMU's words for its disks.
    pub(super) fn devices(&self, disks: &[(Attached<'_>, &Path)]) -> Vec<String> {
        let Server::Qemu {
            controller,
            disk: on_it,
            thread,
        } = &self.server
        else {
            let attach = |(n, (_, socket)): (usize, &(Attached<'_>, &Path))| {
                vhost_user_disk(&format!("disk{n}"), socket, 1)
            };
            return disks.iter().enumerate().flat_map(attach).collect();
        };
        let mut words = Vec::new();
        if *thread == Thread::Io {
            words.extend(["-object", "iothread,id=io"].map(str::to_owned));
        }
        words.extend(controller.iter().map(|&word| word.to_owned()));
        for (n, (disk, _)) in disks.iter().enumerate() {
            let node = format!("node{n}");
            words.extend(block_nodes("-", disk, n, &node));
            let device = on_it
                .replace("{node}", &node)
                .replace("{n}", &n.to_string());
            words.extend(["-device".to_owned(), device]);
        }
        words
    }

    /// Whether its slow disk is a real one behind a throttle, and not a modelled drive.
    pub(super) fn is_throttled_by_qemu(&self) -> bool {
        !matches!(self.server, Server::Cleave(_))
    }

    pub(super) fn is_served_by_main_loop(&self) -> bool {
        matches!(
            self.server,
            Server::Qemu {
                thread: Thread::Main,
                ..
            }
        )
    }

    /// Threads of QEMU that serve the disk beside its main one begin their names so.
    pub(super) fn io_thread(&self) -> Option<&'static str> {
        match self.server {
            Server::Qemu {
                thread: Thread::Io, ..
            } => Some("IO io"),
            _ => None,
        }
    }
}

/// QEMU's words for a file, behind a throttle where it is to be slow. QEMU takes one dash, its daemon two.
fn block_nodes(dash: &str, disk: &Attached<'_>, n: usize, name: &str) -> Vec<String> {
    let is_slow = disk.pace != Pace::Full;
    let file = if is_slow {
        format!("file{n}")
    } else {
        name.to_owned()
    };
    let locking = if disk.is_shared { "off" } else { "auto" };
    // A comma in a path is doubled, or it would begin the next property.
    let path = disk.image.to_string_lossy().replace(',', ",,");
    let mut words = vec![
        format!("{dash}blockdev"),
        format!(
            "driver=file,node-name={file},filename={path},cache.direct=on,aio=io_uring,locking={locking}"
        ),
    ];
    if let Pace::Throttled { iops, bytes } = disk.pace {
        words.push(format!("{dash}object"));
        words.push(format!(
            r#"{{"qom-type":"throttle-group","id":"slow{n}","limits":{{"iops-total":{iops}}}}}"#
        ));
        words.push(format!("{dash}blockdev"));
        words.push(format!(
            "driver=raw,node-name=cut{n},size={bytes},file={file}"
        ));
        words.push(format!("{dash}blockdev"));
        words.push(format!(
            "driver=throttle,node-name={name},throttle-group=slow{n},file=cut{n}"
        ));
    }
    words
}

fn qsd_line(disk: &Attached<'_>, socket: &Path) -> Vec<String> {
    let mut words = vec!["qemu-storage-daemon".to_owned()];
    words.extend(block_nodes("--", disk, 0, "node0"));
    words.push("--export".to_owned());
    words.push(format!(
        "type=vhost-user-blk,id=disk,node-name=node0,writable=on,num-queues=1,addr.type=unix,addr.path={}",
        socket.display()
    ));
    words
}

fn cleave_line(
    program: &Path,
    options: &[(&str, &str)],
    disk: &Attached<'_>,
    socket: &Path,
) -> Vec<String> {
    let mut words = vec![program.to_string_lossy().into_owned()];
    words.extend(
        "serve --queues 1 --workers 1 --log warn"
            .split(' ')
            .map(str::to_owned),
    );
    for (name, value) in options {
        words.extend([(*name).to_owned(), (*value).to_owned()]);
    }
    if disk.is_shared {
        words.push("--read-only".to_owned());
    }
    words.push("--disk".to_owned());
    words.push(match disk.pace {
        Pace::Full => disk.image.to_string_lossy().into_owned(),
        Pace::Throttled { iops, bytes } => slow_model(iops, bytes),
    });
    words.extend([
        "--socket-path".to_owned(),
        socket.to_string_lossy().into_owned(),
    ]);
    words
}

/// The daemon has no throttle; a modelled drive of one channel answers at that rate.
fn slow_model(iops: u32, bytes: u64) -> String {
    let each_us = 1_000_000 / iops.max(1);
    format!(
        "model:custom,size={bytes},channels=1,window=1,jitter=0,write_buffer=0,command_us=0,read_us={each_us},write_us={each_us}"
    )
}
