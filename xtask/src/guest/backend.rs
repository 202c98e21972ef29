//! The daemon under test: cleave, or `qemu-storage-daemon` where the harness itself is in doubt.

use std::path::Path;
use std::process::Command;

use super::BackendKind;
use crate::daemon::Daemon;

/// How a disk is served.
pub(crate) struct BackendSpec<'a> {
    pub(crate) kind: BackendKind,
    /// Built `cleave` program; unused by QEMU's.
    pub(crate) program: &'a Path,
    pub(crate) folder: &'a Path,
    pub(crate) image: &'a Path,
    pub(crate) vrings: u32,
    pub(crate) block_bytes: u32,
    pub(crate) mode: Mode,
}

/// How the daemon of a test differs from the usual one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Plain,
    Poll,
    ReadOnly,
    /// In a group, which may use its socket.
    Group(u32),
}

/// Starts the daemon and waits for its socket.
pub(crate) fn start(spec: &BackendSpec<'_>) -> Result<Daemon, String> {
    let socket = spec.folder.join("disk.sock");
    let mut command = match spec.kind {
        BackendKind::Cleave => cleave(spec, &socket),
        BackendKind::QemuStorageDaemon => qemu_storage_daemon(spec, &socket),
    };
    if let Mode::Group(id) = spec.mode {
        command = in_group(id, &command);
    }
    Daemon::start(command, socket, spec.folder.join("daemon.log"))
}

/// The serial number that the guest must see.
pub(crate) fn serial(kind: BackendKind) -> &'static str {
    match kind {
        BackendKind::Cleave => SERIAL,
        BackendKind::QemuStorageDaemon => "vhost_user_blk",
    }
}

/// Whether the daemon notices that its image has another size.
pub(crate) fn can_grow(kind: BackendKind) -> bool {
    // QEMU's daemon takes a new size over its monitor only.
    kind == BackendKind::Cleave
}

const SERIAL: &str = "guest-test-7";

/// The command with this group, which gets all rights to what it makes.
fn in_group(id: u32, command: &Command) -> Command {
    let line = format!("umask 0007; exec setpriv --regid {id} --clear-groups -- \"$@\"");
    let mut changed = Command::new("sh");
    changed.args(["-c", &line, "sh"]).arg(command.get_program());
    changed.args(command.get_args());
    changed
}

fn cleave(spec: &BackendSpec<'_>, socket: &Path) -> Command {
    let (vrings, block_bytes) = (spec.vrings, spec.block_bytes);
    let mut command = Command::new(spec.program);
    command
        .args(["serve", "--serial", SERIAL, "--socket-path"])
        .arg(socket);
    command
        .arg("--disk")
        .arg(spec.image)
        .arg(format!("--queues={vrings}"));
    command.args([
        format!("--workers={vrings}"),
        format!("--block-size={block_bytes}"),
    ]);
    command.args(match spec.mode {
        Mode::Plain | Mode::Group(_) => None,
        Mode::Poll => Some("--completion=poll"),
        Mode::ReadOnly => Some("--read-only"),
    });
    command
}

fn qemu_storage_daemon(spec: &BackendSpec<'_>, socket: &Path) -> Command {
    let (writable, read_only) = match spec.mode {
        Mode::ReadOnly => ("off", "on"),
        _ => ("on", "off"),
    };
    let mut command = Command::new("qemu-storage-daemon");
    command.arg("--blockdev").arg(format!(
        "driver=file,node-name=image,filename={},discard=unmap,cache.direct=on,aio=io_uring,read-only={read_only}",
        spec.image.display()
    ));
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=disk,node-name=image,writable={writable},num-queues={},logical-block-size={},\
         addr.type=unix,addr.path={}",
        spec.vrings,
        spec.block_bytes,
        socket.display()
    ));
    let monitor = "--chardev stdio,id=monitor --monitor chardev=monitor";
    command.args(monitor.split(' '));
    command
}
