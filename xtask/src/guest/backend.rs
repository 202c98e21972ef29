//! The daemon under test: cleave, or `qemu-storage-daemon` where the harness itself is in doubt.

use std::path::Path;
use std::process::Command;

use super::cases::Shape;
use super::{BackendKind, Lab};
use crate::daemon::Daemon;
use crate::step::Result;

/// How the daemon of a test differs from the usual one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Plain,
    Poll,
    ReadOnly,
    /// In a group, which may use its socket.
    Group(u32),
}

/// Starts the daemon, with the socket in a folder of its own, and waits for its socket.
pub(super) fn start(
    lab: &Lab,
    folder: &Path,
    image: &Path,
    shape: Shape,
    mode: Mode,
) -> Result<Daemon> {
    let socket = folder.join("disk.sock");
    let (file, to, vrings, block) = (
        image.display(),
        socket.display(),
        shape.cpus,
        shape.block_bytes,
    );
    let is_read_only = mode == Mode::ReadOnly;
    let on = |yes: bool| if yes { "on" } else { "off" };
    let (program, mut words) = match lab.kind {
        BackendKind::Cleave => (
            lab.program.as_path(),
            vec![
                "serve".to_owned(),
                format!("--serial={}", serial(lab.kind)),
                format!("--socket-path={to}"),
                format!("--disk={file}"),
                format!("--queues={vrings}"),
                format!("--workers={vrings}"),
                format!("--block-size={block}"),
            ],
        ),
        BackendKind::QemuStorageDaemon => (
            Path::new("qemu-storage-daemon"),
            vec![
                format!(
                    "--blockdev=driver=file,node-name=image,filename={file},discard=unmap,cache.direct=on,\
                     aio=io_uring,read-only={}",
                    on(is_read_only)
                ),
                format!(
                    "--export=type=vhost-user-blk,id=disk,node-name=image,writable={},num-queues={vrings},\
                     logical-block-size={block},addr.type=unix,addr.path={to}",
                    on(!is_read_only)
                ),
                "--chardev=stdio,id=monitor".to_owned(),
                "--monitor=chardev=monitor".to_owned(),
            ],
        ),
    };
    if lab.kind == BackendKind::Cleave {
        words.extend((mode == Mode::Poll).then(|| "--completion=poll".to_owned()));
        words.extend(is_read_only.then(|| "--read-only".to_owned()));
    }
    let mut command = Command::new(program);
    if let Mode::Group(id) = mode {
        // The group gets all rights to what the daemon makes.
        let line = format!("umask 0007; exec setpriv --regid {id} --clear-groups -- \"$@\"");
        command = Command::new("sh");
        command.args(["-c", &line, "sh"]).arg(program);
    }
    command.args(words);
    Daemon::start(command, socket, folder.join("daemon.log"))
}

/// The serial number that the guest must see.
pub(super) fn serial(kind: BackendKind) -> &'static str {
    match kind {
        BackendKind::Cleave => "guest-test-7",
        BackendKind::QemuStorageDaemon => "vhost_user_blk",
    }
}
