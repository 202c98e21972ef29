//! Sockets on which a program listens, by their files. `/proc/net/unix` only has the name under which a socket was bound, and the
//! sockets of a node are bound under another name than they get.

use std::fs;
use std::io;
use std::path::Path;

use cleave_host::NEW_SOCKET;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

// Numbers of linux/netlink.h, linux/sock_diag.h and linux/unix_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const REQUEST_DUMP: u16 = 0x301;
const DONE: u16 = 3;
const LISTENING: u32 = 1 << 10;
const SHOW_VFS: u32 = 2;
const ATTRIBUTE_VFS: u16 = 1;
const AF_UNIX: u8 = 1;

/// Bytes of the header of a message, of what precedes the attributes of a socket, and of an attribute's header.
const HEADER_BYTES: usize = 16;
const SOCKET_BYTES: usize = 16;
const ATTRIBUTE_BYTES: usize = 4;

/// The kernel's messages are shorter.
const REPLY_BYTES: usize = 64 << 10;

/// A file as the kernel's list names it: the lower half of its inode number, and its file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SocketInode {
    inode: u32,
    device: u32,
}

/// Returns true if a program listens on the socket at `path`. It does not connect: a session of a frontend might end by that, and
/// one more connection in the backlog would wait there until the daemon sees that it is closed.
pub(super) fn listens(path: &Path) -> bool {
    match (listening(), inode_of(path)) {
        (Ok(found), Some(wanted)) => found.contains(&wanted),
        // The kernel was built without such lists.
        _ => {
            let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
            let bound = path.with_file_name(NEW_SOCKET);
            is_bound(&sockets, path) || is_bound(&sockets, &bound)
        }
    }
}

/// Asks the kernel for the files of all Unix sockets that listen.
fn listening() -> io::Result<Vec<SocketInode>> {
    let flags = SocketFlags::CLOEXEC;
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    let socket = socket_with(family, kind, flags, Some(SOCK_DIAG))?;
    let kernel = SocketAddrNetlink::new(0, 0);
    sendto(&socket, &request(), SendFlags::empty(), &kernel)?;
    let mut found = Vec::new();
    let mut reply = vec![0; REPLY_BYTES];
    loop {
        let (length, _) = recv(&socket, reply.as_mut_slice(), RecvFlags::empty())?;
        let mut rest = reply.get(..length).unwrap_or_default();
        if rest.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        while !rest.is_empty() {
            let (kind, body, after) = message(rest).ok_or(io::ErrorKind::InvalidData)?;
            match kind {
                SOCK_DIAG_BY_FAMILY => found.extend(file_of(body)),
                DONE => return Ok(found),
                _ => return Err(io::ErrorKind::Unsupported.into()),
            }
            rest = after;
        }
    }
}

/// A header (`nlmsghdr`), then `unix_diag_req`.
fn request() -> Vec<u8> {
    const REQUEST_BYTES: u32 = 40;
    const ANY: u32 = u32::MAX;
    let mut bytes = Vec::new();
    bytes.extend(REQUEST_BYTES.to_ne_bytes());
    bytes.extend(
        [SOCK_DIAG_BY_FAMILY, REQUEST_DUMP]
            .map(u16::to_ne_bytes)
            .as_flattened(),
    );
    bytes.extend([0; 8]);
    bytes.extend([AF_UNIX, 0, 0, 0]);
    let socket = [LISTENING, 0, SHOW_VFS, ANY, ANY];
    bytes.extend(socket.map(u32::to_ne_bytes).as_flattened());
    bytes
}

/// Splits the first message off: its type, its body and what follows it.
fn message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = usize::try_from(word(bytes, 0)?).ok()?;
    let kind = half(bytes, 4)?;
    let body = bytes.get(HEADER_BYTES..length)?;
    let after = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, body, after))
}

/// The file of a socket. One without a name has none.
fn file_of(socket: &[u8]) -> Option<SocketInode> {
    let mut rest = socket.get(SOCKET_BYTES..)?;
    loop {
        let length = usize::from(half(rest, 0)?);
        if length < ATTRIBUTE_BYTES {
            return None;
        }
        if half(rest, 2)? == ATTRIBUTE_VFS {
            return Some(SocketInode {
                inode: word(rest, ATTRIBUTE_BYTES)?,
                device: word(rest, ATTRIBUTE_BYTES + 4)?,
            });
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*bytes))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u16::from_ne_bytes(*bytes))
}

/// The device is that of the mount: on Btrfs `stat` returns another one.
fn inode_of(path: &Path) -> Option<SocketInode> {
    let wanted = StatxFlags::INO | StatxFlags::MNT_ID;
    let found = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, wanted).ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    #[expect(clippy::cast_possible_truncation)] // so does the kernel
    Some(SocketInode {
        inode: found.stx_ino as u32,
        device: device_of(&mounts, found.stx_mnt_id)?,
    })
}

/// The device of a mount: `36 35 98:0 / /mnt rw - ext4 /dev/root rw` has the number 98 << 20.
fn device_of(mounts: &str, id: u64) -> Option<u32> {
    let mut lines = mounts.lines().map(|line| line.split(' '));
    let mut fields = lines.find_map(|mut fields| {
        let is_wanted = fields.next()?.parse() == Ok(id);
        is_wanted.then_some(fields)
    })?;
    let (major, minor) = fields.nth(1)?.split_once(':')?;
    Some(major.parse::<u32>().ok()? << 20 | minor.parse::<u32>().ok()?)
}

/// Returns true if a socket that was bound at this path accepts connections, by `/proc/net/unix`.
fn is_bound(sockets: &str, path: &Path) -> bool {
    // Num RefCount Protocol Flags Type State Inode Path; the flag is __SO_ACCEPTCON.
    const ACCEPTS: &str = "00010000";
    let path = path.to_string_lossy();
    sockets.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.get(3) == Some(&ACCEPTS) && fields.get(7) == Some(&&*path)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_listener_is_known_by_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        let _listener = UnixListener::bind(&old).unwrap();
        fs::rename(&old, &new).unwrap();
        let inode = inode_of(&new).unwrap();
        assert!(listening().unwrap().contains(&inode));
        fs::write(&old, "").unwrap();
        assert!(!listening().unwrap().contains(&inode_of(&old).unwrap()));
    }

    #[test]
    fn a_message_that_is_cut_off_has_no_socket() {
        let mut whole = [40_u32, u32::from(SOCK_DIAG_BY_FAMILY), 0, 0, 0, 0, 0, 0]
            .into_iter()
            .chain([8, 12 | 1 << 16, 7])
            .flat_map(u32::to_ne_bytes)
            .collect::<Vec<_>>();
        // An attribute without content, then the one that is wanted.
        whole[32..36].copy_from_slice(&[4, 0, 9, 0]);
        whole.extend(9_u32.to_ne_bytes());
        whole[0] = 48;
        let (kind, body, after) = message(&whole).unwrap();
        assert_eq!((kind, after.len()), (SOCK_DIAG_BY_FAMILY, 0));
        let file = SocketInode {
            inode: 7,
            device: 9,
        };
        assert_eq!(file_of(body), Some(file));
        for cut in 0..body.len() {
            assert_eq!(file_of(&body[..cut]), None, "{cut}");
        }
        assert_eq!(message(&whole[..47]), None);
    }

    #[test]
    fn the_device_of_a_mount_is_its_file_systems() {
        let mounts =
            "36 35 98:0 / /mnt rw - ext4 /dev/root rw\n7 1 0:27 / /run rw - tmpfs tmpfs rw\n";
        assert_eq!(device_of(mounts, 7), Some(27));
        assert_eq!(device_of(mounts, 36), Some(98 << 20));
        assert_eq!(device_of(mounts, 8), None);
    }

    #[test]
    fn without_the_kernels_list_the_bound_name_counts() {
        let sockets = "ffff: 00000002 00000000 00010000 0001 01 7 /run/a\nffff: 00000002 00000000 00000000 0001 01 7 /run/b\n";
        assert!(is_bound(sockets, Path::new("/run/a")));
        assert!(!is_bound(sockets, Path::new("/run/b")));
    }
}
