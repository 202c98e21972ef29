//! Descriptors that a frontend sent. They can be anything, so nothing here does an operation on them that might
//! block. Those not known to be harmless are queried, written and closed by [`offload`](crate::offload).

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::fs::{
    AtFlags, CWD, FileType, OFlags, StatxFlags, fcntl_get_seals, fcntl_getfl, fstat, fstatfs,
    readlinkat, statx,
};

use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_linger, socket_domain, socket_type};
use rustix::net::{AddressFamily, RecvFlags, Shutdown, SocketType, recv, shutdown};

use crate::MessageRefusal;
use crate::fd::is_ready;
use crate::offload::Offload;

/// Name of an eventfd in `/proc/self/fd`. Names of files begin with a slash.
const EVENTFD: &[u8] = b"anon_inode:[eventfd]";
const STREAMS: [&[u8]; 2] = [b"pipe:[", b"socket:["];

/// Maximum time for the server of a memory file to report the type of its file system. Longer in tests, whose machine may be late.
const FILE_WITHIN: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });
/// `statfs` types (linux/magic.h) of file systems whose pages come from this host: ext4, XFS, Btrfs, F2FS,
/// bcachefs, ZFS. Overlayfs is not one of them: its lower layer can be any file system.
const LOCAL: [u64; 6] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xf2f5_2010,
    0xca45_1a4e,
    0x2fc1_2fc1,
];

/// Descriptors of a message, in order. Those that are not taken out are closed by the disk's [`Offload`].
#[derive(Debug)]
pub(crate) struct Foreign {
    fds: Vec<OwnedFd>,
    offload: Offload,
}

/// Files that are accepted as guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryBacking {
    /// Those whose pages are in memory: memfds, and files on tmpfs and hugetlbfs.
    Memory,
    /// Those on a local disk too. An access to a page may wait for that disk.
    LocalDisk,
}

/// Kind of a descriptor, as far as the kernel knows it without a request to a file's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Eventfd,
    /// A pipe or a socket.
    Stream,
    Other,
}

impl Foreign {
    pub(crate) fn none(offload: Offload) -> Foreign {
        let fds = Vec::new();
        Foreign { fds, offload }
    }

    pub(crate) fn extend(&mut self, fds: impl Iterator<Item = OwnedFd>) {
        self.fds.extend(fds);
    }

    pub(crate) fn len(&self) -> usize {
        self.fds.len()
    }

    /// Removes and returns all of them.
    pub(crate) fn take(&mut self) -> Foreign {
        let offload = self.offload.clone();
        std::mem::replace(self, Foreign::none(offload))
    }

    /// Removes and returns the first one, or nothing if there is none.
    pub(crate) fn take_first(&mut self) -> Foreign {
        let count = self.fds.len().min(1);
        Foreign {
            fds: self.fds.drain(..count).collect(),
            offload: self.offload.clone(),
        }
    }

    pub(crate) fn fd(&self) -> Option<&OwnedFd> {
        self.fds.first()
    }

    /// Returns the descriptor, if it is an eventfd. Its flags are not changed: they belong to the open file, which the frontend
    /// uses too.
    pub(crate) fn into_eventfd(mut self) -> Result<OwnedFd, Foreign> {
        match self.fds.pop() {
            Some(fd) if kind(&fd) == Kind::Eventfd => Ok(fd),
            other => {
                self.fds.extend(other);
                Err(self)
            }
        }
    }

    /// Returns true if it is a pipe, or a socket that can be closed for reading.
    pub(crate) fn is_stream(&self) -> bool {
        let is_pipe = |fd| socket_type(fd) == Err(Errno::NOTSOCK);
        self.fd()
            .is_some_and(|fd| kind(fd) == Kind::Stream && (is_pipe(fd) || self.close_for_reading()))
    }

    /// Closes a local stream socket for reading. `false`: it is not one.
    ///
    /// Nothing is ever read from it, so queued data is discarded and no more can arrive. The queue could hold
    /// the frontend's end of the connection, which would then never close and keep other frontends out.
    /// If this socket is that end itself, [`Connection::probe`] detects it: the connection cannot be written
    /// once it is closed for reading.
    ///
    /// [`Connection::probe`]: crate::intake::Connection::probe
    pub(crate) fn close_for_reading(&self) -> bool {
        let copy = self.fd().filter(|fd| {
            socket_domain(fd) == Ok(AddressFamily::UNIX)
                && socket_type(fd) == Ok(SocketType::STREAM)
                && shutdown(fd, Shutdown::Read).is_ok()
        });
        let Some(copy) = copy.and_then(|fd| fd.try_clone().ok()) else {
            return false;
        };
        // Received without room for descriptors, they are closed by the kernel, on this thread. The loop ends,
        // because nothing can be added.
        self.offload.run(move || {
            let mut piece = [0u8; 512];
            while matches!(
                recv(&copy, &mut piece, RecvFlags::DONTWAIT),
                Ok((1.., _)) | Err(Errno::INTR)
            ) {}
        });
        true
    }

    /// Returns the file, if none of its pages depends on a server: an access to a missing page would block the thread.
    pub(crate) fn into_memory(mut self, accepted: MemoryBacking) -> Result<File, MessageRefusal> {
        // Files on tmpfs and hugetlbfs, which include memfds, can be asked for their seals; others cannot.
        if self.fd().is_some_and(|fd| fcntl_get_seals(fd).is_err()) {
            if accepted == MemoryBacking::Memory {
                return Err(MessageRefusal::message(
                    "guest memory of a disk in a pool must be a memfd or a file on tmpfs or hugetlbfs, because other disks would \
                     wait for pages of a file on a disk",
                ));
            }
            let (sender, receiver) = sync_channel(1);
            let offload = self.offload.clone();
            let none = Foreign::none(offload.clone());
            offload.run(move || {
                if self.fd().is_some_and(is_local_file) {
                    let _ = sender.send(self);
                }
            });
            self = receiver.recv_timeout(FILE_WITHIN).unwrap_or(none);
        }
        self.fds.pop().map(File::from).ok_or_else(|| {
            MessageRefusal::message(
                "guest memory must be a memfd or a file on tmpfs, hugetlbfs or a local disk",
            )
        })
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let fds = std::mem::take(&mut self.fds);
        if fds.is_empty() {
            return;
        }
        self.offload.run(move || {
            for fd in fds {
                // The close of a socket that lingers would wait until its peer has read everything. Fails for anything else.
                let _ = set_socket_linger(&fd, None);
            }
        });
    }
}

fn kind(fd: &OwnedFd) -> Kind {
    // An O_PATH descriptor has the name of its file but can be neither read nor written.
    if fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::PATH)) {
        return Kind::Other;
    }
    match readlinkat(CWD, format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()) {
        Ok(name) if name.as_bytes() == EVENTFD => Kind::Eventfd,
        Ok(name)
            if STREAMS
                .iter()
                .any(|start| name.as_bytes().starts_with(start)) =>
        {
            Kind::Stream
        }
        Ok(_) => Kind::Other,
        // Without /proc, as in some sandboxes. An anonymous inode has no file type. DONT_SYNC avoids a request
        // to the server.
        Err(_) => {
            let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
            let stat = statx(fd, "", flags, StatxFlags::TYPE);
            match stat.map(|stat| FileType::from_raw_mode(stat.stx_mode.into())) {
                Ok(FileType::Unknown) => Kind::Eventfd,
                Ok(FileType::Fifo | FileType::Socket) => Kind::Stream,
                _ => Kind::Other,
            }
        }
    }
}

/// Returns true if it is a file of this host. May never return, if the file's server does not answer.
fn is_local_file(fd: &OwnedFd) -> bool {
    let is_local = |kind: u64| LOCAL.contains(&(kind & 0xffff_ffff));
    fstatfs(fd).is_ok_and(|stat| is_local(stat.f_type as u64))
        && fstat(fd)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}

/// Adds one to an eventfd. This may block regardless of earlier checks, because the frontend can make the
/// eventfd blocking and fill it at any moment. A full eventfd needs no write.
pub(crate) fn signal(offload: &Offload, fd: OwnedFd) {
    if offload.is_full() {
        return;
    }
    offload.run(move || {
        if is_ready(&fd, PollFlags::OUT) {
            let _ = rustix::io::write(&fd, &1u64.to_ne_bytes());
        }
    });
}

#[cfg(test)]
impl<T: Into<OwnedFd>> From<T> for Foreign {
    fn from(fd: T) -> Foreign {
        Foreign {
            fds: vec![fd.into()],
            offload: Offload::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, epoll, eventfd};
    use rustix::fs::{Mode, open};
    use rustix::pipe::pipe;

    #[test]
    fn descriptor_kinds_are_distinguished() {
        let new = |flags| eventfd(0, flags).unwrap();
        let (reader, writer) = pipe().unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let path_of = |fd: &OwnedFd| {
            let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
            open(path, OFlags::PATH, Mode::empty()).unwrap()
        };
        let opened = |path| open(path, OFlags::RDONLY, Mode::empty()).unwrap();
        let epoll = epoll::create(epoll::CreateFlags::empty()).unwrap();
        let path = path_of(&new(EventfdFlags::empty()));
        let rows: [(&str, OwnedFd, Kind); 9] = [
            ("eventfd", new(EventfdFlags::empty()), Kind::Eventfd),
            ("non-blocking", new(EventfdFlags::NONBLOCK), Kind::Eventfd),
            ("pipe", reader, Kind::Stream),
            ("pipe, writing", writer, Kind::Stream),
            ("socket", socket.into(), Kind::Stream),
            ("/dev/null", opened("/dev/null"), Kind::Other),
            ("directory", opened("/"), Kind::Other),
            ("epoll", epoll, Kind::Other),
            ("path of an eventfd", path, Kind::Other),
        ];
        for (name, fd, expected) in rows {
            assert_eq!(kind(&fd), expected, "{name}");
            let taken = Foreign::from(fd).into_eventfd();
            assert_eq!(taken.is_ok(), expected == Kind::Eventfd, "{name}");
        }
    }

    /// Its close would wait ten minutes for the peer to read.
    #[test]
    fn a_socket_that_lingers_blocks_no_thread() {
        use std::io::Write as _;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_unread, _) = listener.accept().unwrap();
        set_socket_linger(&stream, Some(Duration::from_secs(600))).unwrap();
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 1 << 16]).is_ok() {}
        let foreign = Foreign::from(stream);
        let offload = foreign.offload.clone();
        drop(foreign);
        let until = std::time::Instant::now() + Duration::from_secs(60);
        while !offload.is_idle() {
            assert!(std::time::Instant::now() < until, "the close waits");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The third row is on a disk, or on tmpfs if the tests run there.
    #[test]
    fn only_memory_without_a_server_is_accepted() {
        let memfd = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let opened = |path| open(path, OFlags::RDONLY, Mode::empty()).unwrap();
        let program = File::open(std::env::current_exe().unwrap()).unwrap();
        for (name, fd, taken) in [
            ("memfd", memfd, true),
            ("/dev/null", opened("/dev/null"), false),
            ("a file of the kernel", opened("/proc/self/maps"), false),
            ("folder", opened("/"), false),
        ] {
            assert_eq!(
                Foreign::from(fd)
                    .into_memory(MemoryBacking::LocalDisk)
                    .is_ok(),
                taken,
                "{name}"
            );
        }
        let kind = fstatfs(&program).unwrap().f_type as u64;
        let expected = LOCAL.contains(&kind) || fcntl_get_seals(&program).is_ok();
        assert_eq!(
            Foreign::from(program)
                .into_memory(MemoryBacking::LocalDisk)
                .is_ok(),
            expected
        );
    }
}
