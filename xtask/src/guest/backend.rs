//! The daemon under test: cleave, or `qemu-storage-daemon` where the harness itself is in doubt.

use std::path::Path;
use std::process::Command;

use super::BackendKind;
use super::cases::Bench;
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

const CLEAVE: &str = "serve --serial=guest-test-7 --socket-path={socket} --disk={disk} --queues={vrings} \
--workers={vrings} --block-size={block}";

const QEMU: &str = "--blockdev driver=file,node-name=image,filename={disk},discard=unmap,cache.direct=on,aio=io_uring,\
read-only={read-only} --export type=vhost-user-blk,id=disk,node-name=image,writable={writable},num-queues={vrings},\
logical-block-size={block},addr.type=unix,addr.path={socket} --chardev stdio,id=monitor --monitor chardev=monitor";

/// Starts the daemon, with the socket in a folder of its own, and waits for its socket.
pub(super) fn start(bench: &Bench<'_>, folder: &Path, mode: Mode) -> Result<Daemon> {
    let (lab, case) = (bench.lab, bench.case);
    let socket = folder.join("disk.sock");
    let (program, words) = match lab.kind {
        BackendKind::Cleave => (lab.program.as_path(), CLEAVE),
        BackendKind::QemuStorageDaemon => (Path::new("qemu-storage-daemon"), QEMU),
    };
    let mut command = Command::new(program);
    if let Mode::Group(id) = mode {
        // The group gets all rights to what the daemon makes.
        let line = format!("umask 0007; exec setpriv --regid {id} --clear-groups -- \"$@\"");
        command = Command::new("sh");
        command.args(["-c", &line, "sh"]).arg(program);
    }
    let is_read_only = mode == Mode::ReadOnly;
    let on = |yes: bool| if yes { "on" } else { "off" }.to_owned();
    let values = [
        ("{socket}", socket.display().to_string()),
        ("{disk}", bench.image().display().to_string()),
        ("{vrings}", case.cpus.to_string()),
        ("{block}", case.block_bytes.to_string()),
        ("{read-only}", on(is_read_only)),
        ("{writable}", on(!is_read_only)),
    ];
    let filled = |word: &str| {
        let fill = |word: String, (name, value): &(&str, String)| word.replace(name, value);
        values.iter().fold(word.to_owned(), fill)
    };
    command.args(words.split(' ').map(filled));
    if lab.kind == BackendKind::Cleave {
        command.args((mode == Mode::Poll).then_some("--completion=poll"));
        command.args(is_read_only.then_some("--read-only"));
    }
    Daemon::start(command, socket, folder.join("daemon.log"))
}

/// The serial number that the guest must see.
pub(super) fn serial(kind: BackendKind) -> &'static str {
    match kind {
        BackendKind::Cleave => "guest-test-7",
        BackendKind::QemuStorageDaemon => "vhost_user_blk",
    }
}
