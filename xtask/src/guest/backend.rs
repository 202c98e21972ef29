//! The daemon under test: cleave, or `qemu-storage-daemon` where the harness itself is in doubt.

use std::path::{Path, PathBuf};

use cleave_rig::daemon::DaemonProcess;
use cleave_rig::{Result, quietly, words};

use super::bench::Bench;
use super::kit::{BackendKind, Kit};

/// How the daemon of a test differs from the usual one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DaemonMode {
    Plain,
    Poll,
    ReadOnly,
    /// Takes the disk when a guest's first vring starts, for another daemon may have it until then.
    Inactive,
    /// The disk is a qcow2 image, through an NBD server.
    Nbd,
    /// The disk is an image of a Ceph cluster.
    Rbd,
    /// Runs in a group, which may use its socket.
    Group(u32),
}

/// Socket, disk, vrings twice, size of a block.
const CLEAVE: &str = "serve --serial=guest-test-7 --socket-path={} --disk={} --queues={} --workers={} --block-size={} \
--stop-deadline=20";

/// Disk, whether it is read-only, whether it is writable, vrings, size of a block, socket.
const QEMU: &str = "qemu-storage-daemon \
--blockdev driver=file,node-name=image,filename={},discard=unmap,cache.direct=on,aio=io_uring,read-only={} \
--export type=vhost-user-blk,id=disk,node-name=image,writable={},num-queues={},logical-block-size={},addr.type=unix,\
addr.path={} --chardev stdio,id=monitor --monitor chardev=monitor";

/// Socket, image.
const NBD: &str = "qemu-nbd --persistent --shared=16 --discard=unmap --socket={} --format=qcow2 {}";

fn nbd_socket(folder: &Path) -> PathBuf {
    folder.join("nbd.sock")
}

/// Starts the NBD server of an image that it makes.
pub(super) fn nbd_server(folder: &Path, bytes: u64) -> Result<DaemonProcess> {
    let (socket, image) = (nbd_socket(folder), folder.join("disk.qcow2"));
    let line = "qemu-img create -q -f qcow2 {} {}";
    quietly(folder, line, &[&image.display(), &bytes])?;
    let line = words(NBD, &[&socket.display(), &image.display()]);
    DaemonProcess::start(&line, socket)
}

/// Starts a Ceph cluster with an image.
pub(super) fn cluster(kit: &Kit, folder: &Path, bytes: u64) -> Result<DaemonProcess> {
    let (program, folder) = (kit.ceph.display(), folder.join("ceph"));
    let megabytes = bytes >> 20;
    let line = words("{} {} {}", &[&program, &folder.display(), &megabytes]);
    DaemonProcess::start(&line, folder.with_extension("sock"))
}

/// Starts the daemon, with the socket in a folder of its own, and waits for its socket.
pub(super) fn start(bench: &Bench<'_>, folder: &Path, mode: DaemonMode) -> Result<DaemonProcess> {
    let kit = bench.kit;
    let socket = folder.join("disk.sock");
    let (at, image, vrings) = (socket.display(), bench.image(), bench.cpus);
    let nbd = format!("nbd+unix:///?socket={}", nbd_socket(folder).display());
    let rbd = format!("rbd:rbd/guest,conf={}/ceph/conf", folder.display());
    let file = image.display().to_string();
    let disk = match (mode, kit.kind) {
        (DaemonMode::Nbd, BackendKind::Cleave) => nbd,
        (DaemonMode::Rbd, BackendKind::Cleave) => rbd,
        _ => file,
    };
    let block = bench.block_bytes;
    let mut line = match mode {
        // The group gets all rights to the files that the daemon makes.
        DaemonMode::Group(id) => {
            let line = format!("umask 0007; exec setpriv --regid {id} --clear-groups -- \"$@\"");
            words("sh -c {} sh", &[&line])
        }
        _ => Vec::new(),
    };
    match kit.kind {
        BackendKind::Cleave => {
            line.push(kit.program.display().to_string());
            line.extend(words(CLEAVE, &[&at, &disk, &vrings, &vrings, &block]));
            line.extend((mode == DaemonMode::Poll).then(|| "--completion=poll".to_owned()));
            line.extend((mode == DaemonMode::ReadOnly).then(|| "--read-only".to_owned()));
            line.extend((mode == DaemonMode::Inactive).then(|| "--start=inactive".to_owned()));
        }
        BackendKind::QemuStorageDaemon => {
            let [writable, read_only] = match mode {
                DaemonMode::ReadOnly => ["off", "on"],
                _ => ["on", "off"],
            };
            line.extend(words(
                QEMU,
                &[&disk, &read_only, &writable, &vrings, &block, &at],
            ));
        }
    }
    DaemonProcess::start(&line, socket)
}
