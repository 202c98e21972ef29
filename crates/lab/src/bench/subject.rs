//! The subjects of the measurements: the disk itself, the peers, and ours in each of its ways to wait. Why the peers are
//! run so: docs/benchmarks.md.

use std::path::{Path, PathBuf};

use cleave_rig::{At, Result, words};
use serde_json::{Value, json};

/// Stands in a command line for the path of the daemon's socket.
pub(super) const SOCKET: &str = "{socket}";

pub(super) const BARE: &str = "bare fio";
pub(super) const QSD: &str = "qemu-storage-daemon";
pub(super) const QSD_IO_THREAD: &str = "qemu-storage-daemon, I/O thread";
pub(super) const SPDK: &str = "SPDK";
pub(super) const INTERRUPT: &str = "cleave interrupt";
pub(super) const POLL: &str = "cleave poll";
pub(super) const ADAPTIVE: &str = "cleave adaptive";

/// The disk that is served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ServedDisk {
    /// Touches no data.
    Null,
    /// A file or a block device.
    Disk(PathBuf),
}

/// A disk in the words of each side.
pub(super) struct DiskSpelling {
    /// As `cleave serve --disk` takes it.
    pub(super) ours: String,
    /// As QEMU's `--blockdev` takes it; the node's name is `disk`.
    pub(super) qemus: String,
}

impl ServedDisk {
    pub(super) fn words(&self) -> DiskSpelling {
        match self {
            // Both leave the memory of reads alone.
            ServedDisk::Null => DiskSpelling {
                ours: "null:1G,read-zeroes=off".to_owned(),
                qemus: "driver=null-co,size=1073741824,read-zeroes=off".to_owned(),
            },
            // The protocol node itself: a `raw` node above it would only add a layer. QEMU tells files and devices apart by
            // name, and wants a comma within a value doubled.
            ServedDisk::Disk(path) => {
                let is_device = path.starts_with("/dev");
                let driver = if is_device { "host_device" } else { "file" };
                let path = path.to_string_lossy();
                let name = path.replace(',', ",,");
                let cache = "aio=io_uring,cache.direct=on,cache.no-flush=off";
                DiskSpelling {
                    qemus: format!("driver={driver},filename={name},{cache}"),
                    ours: path.into_owned(),
                }
            }
        }
    }
}

/// Returns the command line of a daemon, QEMU's or ours.
pub(super) fn line(cleave: &Path, subject: &str, disk: &DiskSpelling, queues: u32) -> Vec<String> {
    let completion = match subject {
        QSD => return qemu_storage_daemon(disk, queues, "", ""),
        QSD_IO_THREAD => {
            let object = " --object iothread,id=io";
            return qemu_storage_daemon(disk, queues, object, ",iothread=io");
        }
        INTERRUPT => "interrupt",
        POLL => "poll",
        _ => "adaptive",
    };
    let options = format!("--queues {queues} --completion {completion}");
    serve(cleave, &options, &[&disk.ours])
}

/// `cleave serve` with these options.
pub(super) fn serve<P: AsRef<Path>>(cleave: &Path, options: &str, disks: &[P]) -> Vec<String> {
    let line = format!("{{}} serve --workers 1 --log warn {options} --socket-path {SOCKET}");
    let mut line = words(&line, &[&cleave.display()]);
    for disk in disks {
        line.extend(words("--disk {}", &[&disk.as_ref().display()]));
    }
    line
}

fn qemu_storage_daemon(
    disk: &DiskSpelling,
    queues: u32,
    object: &str,
    thread: &str,
) -> Vec<String> {
    let line = format!(
        "{QSD}{object} --blockdev node-name=disk,{{}} --export type=vhost-user-blk,id=export,node-name=disk,writable=on,\
         num-queues={queues}{thread},addr.type=unix,addr.path={SOCKET}"
    );
    words(&line, &[&disk.qemus])
}

/// A built SPDK: its vhost target with one reactor, which never sleeps.
pub(super) struct Spdk {
    folder: PathBuf,
    pub(super) version: String,
}

/// Files in the run's folder: the socket of the first daemon, and those of its own.
const SPDK_FILES: [&str; 3] = ["disk0.sock", "spdk-rpc.sock", "spdk-rpc.sock.lock"];

impl Spdk {
    /// Finds it in the folder that `--spdk` names.
    pub(super) fn find(folder: &Path) -> Result<Spdk> {
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

    /// Removes the files that it left when it was killed, which it would not replace itself.
    pub(super) fn clean(run: &Path) {
        for left in SPDK_FILES {
            let _ = std::fs::remove_file(run.join(left));
        }
    }

    /// Writes its configuration, and returns the command line that reads it. Without huge pages it serves as well: the
    /// driver's memory is not its own.
    pub(super) fn line(&self, run: &Path, cpu: &str, store: &ServedDisk) -> Result<Vec<String>> {
        let config = run.join(match store {
            ServedDisk::Null => "spdk-null.json",
            ServedDisk::Disk(_) => "spdk-disk.json",
        });
        std::fs::write(&config, configuration(store).to_string()).at(&config)?;
        let (program, socket) = (self.folder.join("build/bin/vhost"), run.join(SPDK_FILES[1]));
        let line = format!(
            "env LD_LIBRARY_PATH={{}}/build/lib {{}} -m [{cpu}] --no-huge -s 512 --no-pci -S {{}} -r {{}} -c {{}}"
        );
        let (folder, program) = (self.folder.display(), program.display());
        let (socket, config) = (socket.display(), config.display());
        Ok(words(
            &line,
            &[&folder, &program, &run.display(), &socket, &config],
        ))
    }
}

/// Returns a disk and its controller.
fn configuration(store: &ServedDisk) -> Value {
    let (method, disk) = match store {
        ServedDisk::Null => (
            "bdev_null_create",
            json!({ "name": "disk", "num_blocks": 1u32 << 18, "block_size": 4096 }),
        ),
        // The faster one at depth 32 of its two drivers for files.
        ServedDisk::Disk(path) => (
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
        let store = ServedDisk::Disk(PathBuf::from("/a b,c.img"));
        let line = |subject| line(Path::new("cleave"), subject, &store.words(), 2);
        assert!(line(QSD)[2].contains("filename=/a b,,c.img,"));
        let ours = line(POLL);
        assert!(ours.contains(&"/a b,c.img".to_owned()) && ours.contains(&"poll".to_owned()));
    }
}
