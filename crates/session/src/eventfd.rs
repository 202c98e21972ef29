//! Descriptors that a frontend says are eventfds.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::event::PollFlags;
use rustix::fs::{CWD, FileType, OFlags, fcntl_getfl, fstat, readlinkat};

use crate::Refusal;
use crate::intake::is_ready;

/// What `/proc/self/fd` says of an eventfd.
const EVENTFD: &[u8] = b"anon_inode:[eventfd]";

/// Refuses what is no eventfd: a pipe, a socket, `/dev/null`, a ring. Its flags stay as they are: they
/// belong to the open file, which the frontend uses too.
pub(crate) fn checked(fd: OwnedFd) -> Result<OwnedFd, Refusal> {
    let refuse = || Refusal::message("a descriptor for kick, call or err is no eventfd");
    // An O_PATH descriptor has the name of its file and can neither be read nor written.
    let flags = fcntl_getfl(&fd).map_err(|_| refuse())?;
    if flags.contains(OFlags::PATH) {
        return Err(refuse());
    }
    match readlinkat(CWD, format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()) {
        Ok(name) if name.as_bytes() == EVENTFD => Ok(fd),
        Ok(_) => Err(refuse()),
        // No /proc in this sandbox: an anonymous inode has no file type, which pipes, sockets, files
        // and devices do have.
        Err(_) => match fstat(&fd) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Unknown => Ok(fd),
            _ => Err(refuse()),
        },
    }
}

/// Adds one to an eventfd, unless that would have to wait: it may be a blocking one that the frontend
/// has filled, and then it is as good as written.
pub(crate) fn ring(fd: impl AsFd) {
    if is_ready(fd.as_fd(), PollFlags::OUT) {
        let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, epoll, eventfd};
    use rustix::fs::{Mode, open};
    use rustix::pipe::pipe;

    #[test]
    fn only_eventfds_are_taken() {
        let new = |flags| eventfd(0, flags).unwrap();
        assert!(checked(new(EventfdFlags::empty())).is_ok());
        assert!(checked(new(EventfdFlags::NONBLOCK)).is_ok());
        let (reader, writer) = pipe().unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let path_of = |fd: &OwnedFd| {
            let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
            open(path, OFlags::PATH, Mode::empty()).unwrap()
        };
        let rows: [(&str, OwnedFd); 7] = [
            ("pipe", reader),
            ("pipe, writing", writer),
            ("socket", socket.into()),
            (
                "/dev/null",
                open("/dev/null", OFlags::RDWR, Mode::empty()).unwrap(),
            ),
            (
                "directory",
                open("/", OFlags::RDONLY, Mode::empty()).unwrap(),
            ),
            ("epoll", epoll::create(epoll::CreateFlags::empty()).unwrap()),
            ("path of an eventfd", path_of(&new(EventfdFlags::empty()))),
        ];
        for (name, fd) in rows {
            assert!(checked(fd).is_err(), "{name}");
        }
    }

    #[test]
    fn a_full_blocking_eventfd_is_left_alone() {
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        ring(&fd); // Would wait for ever if it wrote.
        let mut count = [0; 8];
        rustix::io::read(&fd, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), u64::MAX - 1);
        ring(&fd);
        rustix::io::read(&fd, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
    }
}
