//! The subjects of the measurements: the disk itself, the peer, and ours in each of its ways to wait.

use std::path::{Path, PathBuf};

/// The program that answers the requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Subject {
    /// fio on the disk: no daemon.
    Bare,
    /// In its main loop, or with an I/O thread.
    QemuStorageDaemon {
        has_io_thread: bool,
    },
    /// With one reactor, which never sleeps.
    Spdk,
    Cleave(Completion),
}

/// How ours waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Completion {
    Interrupt,
    Poll,
    Adaptive,
    /// Adaptive that does not leave low rates to interrupts.
    AnyRate,
}

/// The disk that is served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Store {
    /// Touches no data.
    Null,
    /// A file or a block device.
    Disk(PathBuf),
}

impl Subject {
    pub(super) const QSD: Subject = Subject::QemuStorageDaemon {
        has_io_thread: false,
    };
    pub(super) const QSD_IO_THREAD: Subject = Subject::QemuStorageDaemon {
        has_io_thread: true,
    };
    pub(super) const SPDK: Subject = Subject::Spdk;
    pub(super) const INTERRUPT: Subject = Subject::Cleave(Completion::Interrupt);
    pub(super) const POLL: Subject = Subject::Cleave(Completion::Poll);
    pub(super) const ADAPTIVE: Subject = Subject::Cleave(Completion::Adaptive);
    pub(super) const ANY_RATE: Subject = Subject::Cleave(Completion::AnyRate);

    /// In tables, figures and raw lines.
    pub(super) fn name(self) -> &'static str {
        match self {
            Subject::Bare => "bare fio",
            Subject::QSD => "qemu-storage-daemon",
            Subject::QSD_IO_THREAD => "qemu-storage-daemon, I/O thread",
            Subject::Spdk => "SPDK",
            Subject::Cleave(Completion::Interrupt) => "cleave interrupt",
            Subject::Cleave(Completion::Poll) => "cleave poll",
            Subject::Cleave(Completion::Adaptive) => "cleave adaptive",
            Subject::Cleave(Completion::AnyRate) => "cleave adaptive, any rate",
        }
    }

    /// The daemon's command line; none for the disk itself. Why the peer is run so: docs/benchmarks.md.
    pub(super) fn command(
        self,
        cleave: &Path,
        store: &Store,
        queues: u32,
        socket: &Path,
    ) -> Option<Vec<String>> {
        match self {
            // SPDK is started by `spdk.rs`: it takes a file, not words.
            Subject::Bare | Subject::Spdk => None,
            Subject::QemuStorageDaemon { has_io_thread } => {
                let mut words = qemu_storage_daemon(store, queues, socket);
                if has_io_thread {
                    words[4].push_str(",iothread=io");
                    let thread = ["--object", "iothread,id=io"].map(str::to_owned);
                    words.splice(1..1, thread);
                }
                Some(words)
            }
            Subject::Cleave(completion) => Some(serve(cleave, completion, store, queues, socket)),
        }
    }
}

fn qemu_storage_daemon(store: &Store, queues: u32, socket: &Path) -> Vec<String> {
    let disk = match store {
        // Both leave the memory of reads alone.
        Store::Null => "driver=null-co,node-name=disk,size=1073741824,read-zeroes=off".to_owned(),
        // The protocol node itself: a `raw` node above it would only add a layer.
        Store::Disk(path) => format!(
            "driver={},node-name=disk,filename={},aio=io_uring,cache.direct=on,cache.no-flush=off",
            driver_of(path),
            doubled(&path.to_string_lossy())
        ),
    };
    let export = format!(
        "type=vhost-user-blk,id=export,node-name=disk,writable=on,num-queues={queues},addr.type=unix,addr.path={}",
        doubled(&socket.to_string_lossy())
    );
    [
        "qemu-storage-daemon",
        "--blockdev",
        &disk,
        "--export",
        &export,
    ]
    .map(str::to_owned)
    .to_vec()
}

/// QEMU tells files and devices apart by name.
fn driver_of(path: &Path) -> &'static str {
    match path.starts_with("/dev") {
        true => "host_device",
        false => "file",
    }
}

/// A comma within a value, as QEMU wants it.
fn doubled(value: &str) -> String {
    value.replace(',', ",,")
}

fn serve(
    cleave: &Path,
    completion: Completion,
    store: &Store,
    queues: u32,
    socket: &Path,
) -> Vec<String> {
    let disk = match store {
        Store::Null => "null:1G,read-zeroes=off".to_owned(),
        Store::Disk(path) => path.to_string_lossy().into_owned(),
    };
    let completion = match completion {
        Completion::Interrupt => "interrupt",
        Completion::Poll => "poll",
        Completion::Adaptive => "adaptive",
        Completion::AnyRate => "adaptive --spin-rate-min 0",
    };
    let mut words = vec![cleave.to_string_lossy().into_owned()];
    words.extend(
        format!("serve --queues {queues} --workers 1 --log warn --completion {completion} --disk")
            .split(' ')
            .map(str::to_owned),
    );
    words.extend([
        disk,
        "--socket-path".to_owned(),
        socket.to_string_lossy().into_owned(),
    ]);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_commas_and_blanks_survive() {
        let store = Store::Disk(PathBuf::from("/a b,c.img"));
        let line = |subject: Subject| {
            let words = subject.command(Path::new("cleave"), &store, 2, Path::new("/s,k"));
            words.unwrap()
        };
        let peer = line(Subject::QSD);
        assert!(peer[2].contains("filename=/a b,,c.img,"), "{peer:?}");
        assert!(peer[4].ends_with("addr.path=/s,,k"), "{peer:?}");
        let ours = line(Subject::POLL);
        assert!(ours.contains(&"/a b,c.img".to_owned()) && ours.contains(&"poll".to_owned()));
    }
}
