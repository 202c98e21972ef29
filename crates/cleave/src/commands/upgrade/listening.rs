//! The process that listens on a socket, as the kernel names it. What a daemon answers proves nothing: one that a guest has taken
//! over chooses its answers.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// The flag of a listening socket in /proc/net/unix (`__SO_ACCEPTCON`).
const LISTENS: u64 = 1 << 16;

/// Returns true if this process has the listening socket of this path open. False as well for a process that cannot be looked at.
pub(super) fn listens_at(pid: u32, socket: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let Ok(wanted) = identity(socket) else {
        return false;
    };
    let process = PathBuf::from(format!("/proc/{pid}"));
    let open = open_sockets(&process);
    let all = fs::read(process.join("net/unix")).unwrap_or_default();
    let theirs = listeners(&all).filter(|listener| open.contains(&listener.inode));
    // By the file and not by its name: a path may have links, and the process another view of the file system.
    let mut found = theirs.filter_map(|listener| {
        let seen = match listener.path.strip_prefix("/") {
            Ok(inside) => process.join("root").join(inside),
            Err(_) => process.join("cwd").join(listener.path),
        };
        identity(&seen).ok()
    });
    found.any(|found| found == wanted)
}

/// Returns the inode numbers of the sockets that a process has open.
fn open_sockets(process: &Path) -> Vec<u64> {
    let fds = fs::read_dir(process.join("fd")).into_iter().flatten();
    let targets = fds.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    let inodes = targets.filter_map(|target| {
        let number = target.to_str()?.strip_prefix("socket:[")?;
        number.strip_suffix(']')?.parse().ok()
    });
    inodes.collect()
}

/// A listening unix socket.
#[derive(Debug, PartialEq, Eq)]
struct Listener<'a> {
    /// The inode number of the socket, which is not that of its file.
    inode: u64,
    /// The path that it was bound to.
    path: &'a Path,
}

/// Reads the listening sockets with a path out of the text of /proc/net/unix.
fn listeners(text: &[u8]) -> impl Iterator<Item = Listener<'_>> {
    text.split(|byte| *byte == b'\n').filter_map(|line| {
        // Address, references, protocol, flags, type, state, inode, path. The inode is padded, and a path may have blanks.
        let mut rest = line;
        let mut column = || {
            let (column, after) = split_column(rest)?;
            rest = after;
            std::str::from_utf8(column).ok()
        };
        let flags = u64::from_str_radix(column().and(column()).and(column()).and(column())?, 16);
        let inode = column().and(column()).and(column())?.parse().ok()?;
        let path = Path::new(OsStr::from_bytes(rest.strip_prefix(b" ")?));
        (flags.ok()? & LISTENS != 0).then_some(Listener { inode, path })
    })
}

/// Splits a line after its first column, before which there may be blanks.
fn split_column(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let line = line.trim_ascii_start();
    let end = line.iter().position(|byte| *byte == b' ')?;
    line.split_at_checked(end)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_listener_has_flags_an_inode_and_a_path() {
        let text = b"Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 12345 /run/cleave/a b/control.sock\n\
            0000000000000000: 00000002 00000000 00010000 0005 01   678 /run/udev/control\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 12347\n\
            0000000000000000: 00000003 00000000 00000000 0001 03 12346 /run/cleave/a b/control.sock\n";
        let expected = [
            (12345, "/run/cleave/a b/control.sock"),
            (678, "/run/udev/control"),
        ];
        let expected = expected.map(|(inode, path)| Listener {
            inode,
            path: Path::new(path),
        });
        assert_eq!(listeners(text).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn only_the_process_that_has_the_socket_listens_at_its_path() {
        let folder = std::env::temp_dir().join(format!("cleave-listens-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let [socket, link] = ["socket", "link"].map(|name| folder.join(name));
        let own = std::process::id();
        assert!(!listens_at(own, &socket));
        let listener = UnixListener::bind(&socket).unwrap();
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        assert!(listens_at(own, &socket) && listens_at(own, &link));
        assert!(!listens_at(1, &socket) && !listens_at(u32::MAX, &socket));
        // One that is connected is not the one that listens.
        let _connected = UnixStream::connect(&socket).unwrap();
        drop(listener);
        assert!(!listens_at(own, &socket));
        // Another socket has the path by now.
        let moved = folder.join("moved");
        let _first = UnixListener::bind(&moved).unwrap();
        fs::rename(&moved, &link).unwrap();
        assert!(!listens_at(own, &link));
        fs::remove_dir_all(&folder).unwrap();
    }
}
