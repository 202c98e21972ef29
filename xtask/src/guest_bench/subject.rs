//! The subjects of the comparison: `subjects.toml` as values, and the command lines that they make.

use std::path::Path;
use std::sync::LazyLock;

use serde::Deserialize;

use crate::guest::machine::vhost_user_disk;

/// A disk in a guest, by the way it is attached; the file says what the fields mean.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Subject {
    /// As `--only` says it.
    pub(super) name: String,
    /// As raw data and figures say it.
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

/// One of them by its name.
pub(super) fn find(name: &str) -> Result<&'static Subject, String> {
    ALL.iter().find(|one| one.name == name).ok_or_else(|| {
        let names: Vec<&str> = ALL.iter().map(|one| one.name.as_str()).collect();
        format!("there are {}", names.join(", "))
    })
}

/// A disk to be attached, in the order of the guest's numbering.
pub(super) struct Attached<'a> {
    pub(super) image: &'a Path,
    /// So many requests a second at most, of a disk that shows so many bytes.
    pub(super) throttle: Option<(u32, u64)>,
    /// Whether other disks of the guest are on the same file: none of them is written then.
    pub(super) is_shared: bool,
}

impl Subject {
    /// Its daemons' command lines, one for each disk; none where QEMU serves.
    pub(super) fn daemons(
        &self,
        cleave: &Path,
        disks: &[(Attached<'_>, &Path)],
    ) -> Vec<Vec<String>> {
        let line = |(disk, socket): &(Attached<'_>, &Path)| match (&self.qemu, &self.cleave) {
            (Some(_), _) => None,
            (None, None) => Some(qsd_line(disk, socket)),
            (None, Some(options)) => Some(cleave_line(cleave, options, disk, socket)),
        };
        disks.iter().filter_map(line).collect()
    }

    /// QEMU's words for its disks.
    pub(super) fn devices(&self, disks: &[(Attached<'_>, &Path)]) -> Vec<String> {
        let Some(controller) = &self.qemu else {
            let attach = |(n, (_, socket)): (usize, &(Attached<'_>, &Path))| {
                vhost_user_disk(&format!("disk{n}"), socket, 1)
            };
            return disks.iter().enumerate().flat_map(attach).collect();
        };
        let mut words = controller.clone();
        for (n, (disk, _)) in disks.iter().enumerate() {
            let (node, number) = (format!("node{n}"), n.to_string());
            words.extend(block_nodes("-", disk, n, &node));
            let device = self.disk.replace("{node}", &node).replace("{n}", &number);
            words.extend(["-device".to_owned(), device]);
        }
        words
    }

    /// Whether QEMU does the I/O in its main loop.
    pub(super) fn is_served_by_main_loop(&self) -> bool {
        self.qemu.is_some() && !self.io_thread
    }

    /// Threads of QEMU that serve the disk beside its main one begin their names so.
    pub(super) fn io_thread(&self) -> Option<&'static str> {
        self.io_thread.then_some("IO io")
    }

    /// Whether it is ours.
    pub(super) fn is_cleave(&self) -> bool {
        self.cleave.is_some()
    }
}

/// QEMU's words for a file, behind a throttle where it is to be slow. QEMU takes one dash, its daemon two.
fn block_nodes(dash: &str, disk: &Attached<'_>, n: usize, name: &str) -> Vec<String> {
    let file = match disk.throttle {
        Some(_) => format!("file{n}"),
        None => name.to_owned(),
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
    if let Some((iops, bytes)) = disk.throttle {
        let group = format!(
            r#"{{"qom-type":"throttle-group","id":"slow{n}","limits":{{"iops-total":{iops}}}}}"#
        );
        let cut = format!("driver=raw,node-name=cut{n},size={bytes},file={file}");
        let throttle =
            format!("driver=throttle,node-name={name},throttle-group=slow{n},file=cut{n}");
        let [object, node] = ["object", "blockdev"].map(|word| format!("{dash}{word}"));
        words.extend([object, group, node.clone(), cut, node, throttle]);
    }
    words
}

fn qsd_line(disk: &Attached<'_>, socket: &Path) -> Vec<String> {
    let mut words = vec!["qemu-storage-daemon".to_owned()];
    words.extend(block_nodes("--", disk, 0, "node0"));
    let export =
        "type=vhost-user-blk,id=disk,node-name=node0,writable=on,num-queues=1,addr.type=unix";
    words.extend([
        "--export".to_owned(),
        format!("{export},addr.path={}", socket.display()),
    ]);
    words
}

fn cleave_line(
    program: &Path,
    options: &[String],
    disk: &Attached<'_>,
    socket: &Path,
) -> Vec<String> {
    let mut words = vec![program.to_string_lossy().into_owned()];
    let fixed = "serve --queues 1 --workers 1 --log warn";
    words.extend(
        fixed
            .split(' ')
            .map(str::to_owned)
            .chain(options.iter().cloned()),
    );
    if disk.is_shared {
        words.push("--read-only".to_owned());
    }
    let spec = match disk.throttle {
        None => disk.image.to_string_lossy().into_owned(),
        // A modelled drive of one channel answers at that rate.
        Some((iops, bytes)) => {
            let us = 1_000_000 / iops.max(1);
            let shape = "channels=1,window=1,jitter=0,write_buffer=0,command_us=0";
            format!("model:custom,size={bytes},{shape},read_us={us},write_us={us}")
        }
    };
    let socket = socket.to_string_lossy().into_owned();
    words.extend([
        "--disk".to_owned(),
        spec,
        "--socket-path".to_owned(),
        socket,
    ]);
    words
}
