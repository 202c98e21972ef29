//! The subjects of the measurements: the disk itself, the peers, and ours in each of its ways to wait. Why the peers are
//! run so: docs/benchmarks.md.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::desk::{Case, Desk, Load};
use crate::step::At;

/// In a command line: the path of the daemon's socket.
pub(super) const SOCKET: &str = "{socket}";

pub(super) const BARE: &str = "bare fio";
pub(super) const QSD: &str = "qemu-storage-daemon";
pub(super) const QSD_IO_THREAD: &str = "qemu-storage-daemon, I/O thread";
pub(super) const SPDK: &str = "SPDK";
pub(super) const INTERRUPT: &str = "cleave interrupt";
pub(super) const POLL: &str = "cleave poll";
pub(super) const ADAPTIVE: &str = "cleave adaptive";
/// Adaptive that does not leave low rates to interrupts.
pub(super) const ANY_RATE: &str = "cleave adaptive, any rate";

/// The disk that is served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Store {
    /// Touches no data.
    Null,
    /// A file or a block device.
    Disk(PathBuf),
}

impl Desk {
    /// These subjects at a point, and SPDK if there is one.
    pub(super) fn cases(
        &self,
        point: &str,
        store: &Store,
        load: &Load,
        subjects: &[&str],
    ) -> Result<Vec<Case>, String> {
        let spdk = self.spdk.as_ref().map(|_| SPDK);
        let subjects = subjects.iter().copied().chain(spdk);
        subjects
            .map(|subject| self.case(point, store, load, subject))
            .collect()
    }

    pub(super) fn case(
        &self,
        point: &str,
        store: &Store,
        load: &Load,
        subject: &str,
    ) -> Result<Case, String> {
        let command = match (subject, &self.spdk) {
            (SPDK, Some(spdk)) => {
                Some(spdk.command(self.run.folder(), &self.cpus.daemon, store)?)
            }
            _ => command(&self.cleave, subject, store, load.queues),
        };
        let disk = match (&command, store) {
            (None, Store::Disk(path)) => Some(path.clone()),
            _ => None,
        };
        Ok(Case {
            point: point.to_owned(),
            subject: subject.to_owned(),
            daemons: command.into_iter().collect(),
            disk,
            load: load.clone(),
            learns: 0.0,
            facts: json!({ "store": format!("{store:?}") }),
        })
    }

    /// `cleave serve` with these options.
    pub(super) fn serve(&self, options: &str, disks: &[&Path]) -> Vec<String> {
        serve(&self.cleave, options, disks)
    }
}

/// The daemon's command line; none for the disk itself.
pub(super) fn command(
    cleave: &Path,
    subject: &str,
    store: &Store,
    queues: u32,
) -> Option<Vec<String>> {
    let completion = match subject {
        QSD => return Some(qemu_storage_daemon(store, queues, "")),
        QSD_IO_THREAD => return Some(qemu_storage_daemon(store, queues, ",iothread=io")),
        INTERRUPT => "interrupt",
        POLL => "poll",
        ADAPTIVE => "adaptive",
        ANY_RATE => "adaptive --spin-rate-min 0",
        _ => return None,
    };
    let disk = match store {
        Store::Null => Path::new("null:1G,read-zeroes=off"),
        Store::Disk(path) => path,
    };
    Some(serve(
        cleave,
        &format!("--queues {queues} --completion {completion}"),
        &[disk],
    ))
}

fn serve(cleave: &Path, options: &str, disks: &[&Path]) -> Vec<String> {
    let mut words = vec![cleave.to_string_lossy().into_owned()];
    let options = format!("serve --workers 1 --log warn {options} --socket-path");
    words.extend(options.split(' ').map(str::to_owned));
    words.push(SOCKET.to_owned());
    for disk in disks {
        words.extend(["--disk".to_owned(), disk.to_string_lossy().into_owned()]);
    }
    words
}

fn qemu_storage_daemon(store: &Store, queues: u32, thread: &str) -> Vec<String> {
    let disk = match store {
        // Both leave the memory of reads alone.
        Store::Null => "driver=null-co,node-name=disk,size=1073741824,read-zeroes=off".to_owned(),
        // The protocol node itself: a `raw` node above it would only add a layer. QEMU tells files and devices apart by
        // name, and wants a comma within a value doubled.
        Store::Disk(path) => format!(
            "driver={},node-name=disk,filename={},aio=io_uring,cache.direct=on,cache.no-flush=off",
            if path.starts_with("/dev") {
                "host_device"
            } else {
                "file"
            },
            path.to_string_lossy().replace(',', ",,")
        ),
    };
    let export = format!(
        "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues={queues}{thread},addr.type=unix,\
         addr.path={SOCKET}"
    );
    let mut words = vec![QSD];
    if !thread.is_empty() {
        words.extend(["--object", "iothread,id=io"]);
    }
    words.extend(["--blockdev", &disk, "--export", &export]);
    words.into_iter().map(str::to_owned).collect()
}

/// A built SPDK: its vhost target with one reactor, which never sleeps.
pub(super) struct Spdk {
    folder: PathBuf,
    pub(super) version: String,
}

/// In the run's folder: the socket of the first daemon, and those of its own.
const SPDK_FILES: [&str; 3] = ["disk0.sock", "spdk-rpc.sock", "spdk-rpc.sock.lock"];

impl Spdk {
    /// In the folder that `--spdk` names.
    pub(super) fn find(folder: &Path) -> Result<Spdk, String> {
        let folder = std::fs::canonicalize(folder).at(folder)?;
        let program = folder.join("build/bin/vhost");
        if !program.is_file() {
            let program = program.display();
            return Err(format!(
                "--spdk: there is no {program}; build SPDK there first"
            ));
        }
        let version = std::fs::read_to_string(folder.join("VERSION"));
        let version = version.map_or("unknown".to_owned(), |text| text.trim().to_owned());
        Ok(Spdk { folder, version })
    }

    /// Removes what it left when it was killed, which it would not replace itself.
    pub(super) fn clean(run: &Path) {
        for left in SPDK_FILES {
            let _ = std::fs::remove_file(run.join(left));
        }
    }

    /// Writes its configuration, and returns the command line that reads it. Without huge pages it serves as well: the
    /// driver's memory is not its own.
    fn command(&self, run: &Path, cpu: &str, store: &Store) -> Result<Vec<String>, String> {
        let name = match store {
            Store::Null => "spdk-null.json",
            Store::Disk(_) => "spdk-disk.json",
        };
        let config = run.join(name);
        std::fs::write(&config, configuration(store).to_string()).at(&config)?;
        let shown = |path: PathBuf| path.display().to_string();
        let mut words = vec!["env".to_owned()];
        words.push(format!(
            "LD_LIBRARY_PATH={}",
            shown(self.folder.join("build/lib"))
        ));
        words.push(shown(self.folder.join("build/bin/vhost")));
        let options = format!("-m [{cpu}] --no-huge -s 512 --no-pci -S");
        words.extend(options.split(' ').map(str::to_owned));
        words.extend([
            shown(run.to_owned()),
            "-r".to_owned(),
            shown(run.join(SPDK_FILES[1])),
        ]);
        words.extend(["-c".to_owned(), shown(config)]);
        Ok(words)
    }
}

/// A disk and its controller.
fn configuration(store: &Store) -> Value {
    let (method, disk) = match store {
        Store::Null => (
            "bdev_null_create",
            json!({ "name": "disk", "num_blocks": 1u32 << 18, "block_size": 4096 }),
        ),
        // Of its two drivers for files the faster one at depth 32.
        Store::Disk(path) => (
            "bdev_aio_create",
            json!({ "name": "disk", "filename": path, "block_size": 512 }),
        ),
    };
    let controller = json!({ "ctrlr": SPDK_FILES[0], "dev_name": "disk" });
    let subsystem = |name: &str, method: &str, params| json!({ "subsystem": name, "config": [{ "method": method, "params": params }] });
    json!({ "subsystems": [
        subsystem("bdev", method, disk),
        subsystem("vhost_blk", "vhost_create_blk_controller", controller),
    ] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_commas_and_blanks_survive() {
        let store = Store::Disk(PathBuf::from("/a b,c.img"));
        let line = |subject| command(Path::new("cleave"), subject, &store, 2).unwrap();
        assert!(line(QSD)[2].contains("filename=/a b,,c.img,"));
        let ours = line(POLL);
        assert!(ours.contains(&"/a b,c.img".to_owned()) && ours.contains(&"poll".to_owned()));
        assert!(command(Path::new("cleave"), BARE, &store, 2).is_none());
    }
}
