//! The transfer of a device's state through a descriptor of the frontend (vhost-user "Migrating back-end state"). It may be anything,
//! so it is read and written on the threads for such descriptors.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use crate::fd::{is_ready, wait};
use crate::foreign::Foreign;
use crate::offload::Offload;

/// Longest time for a transfer. The state is a few bytes, which a frontend sends or takes at once.
const WITHIN: Duration = Duration::from_secs(10);
/// Longest wait of a session for its end. The frontend asks when it has done its part, so only a thread without a CPU takes time.
/// Longer in tests, whose machine may be late.
const ENDED_WITHIN: Duration = Duration::from_secs(if cfg!(test) { 8 } else { 2 });

/// How often a transfer looks if anybody still wants it.
const LOOK: Duration = Duration::from_millis(100);

/// A transfer that has begun. One that is dropped gives its thread back, of which a disk has few.
#[derive(Debug)]
pub(crate) struct StateTransfer {
    /// What was read; nothing if it was written.
    ended: Receiver<io::Result<Option<Vec<u8>>>>,
    _wanted: Arc<()>,
}

/// When a transfer is given up.
#[derive(Debug)]
struct Limit {
    until: Instant,
    wanted: Weak<()>,
}

impl StateTransfer {
    /// Begins to write these bytes.
    pub(crate) fn save(
        offload: &Offload,
        fd: Foreign,
        bytes: Vec<u8>,
    ) -> io::Result<StateTransfer> {
        StateTransfer::begin(offload, fd, move |fd, limit| {
            write(fd, &bytes, limit).map(|()| None)
        })
    }

    /// Begins to read up to the end. Of more than `most` bytes not all are read.
    pub(crate) fn load(offload: &Offload, fd: Foreign, most: usize) -> io::Result<StateTransfer> {
        StateTransfer::begin(offload, fd, move |fd, limit| {
            read(fd, most, limit).map(Some)
        })
    }

    fn begin(
        offload: &Offload,
        fd: Foreign,
        transfer: impl FnOnce(&OwnedFd, &Limit) -> io::Result<Option<Vec<u8>>> + Send + 'static,
    ) -> io::Result<StateTransfer> {
        let (sender, ended) = sync_channel(1);
        let wanted = Arc::new(());
        let limit = Limit {
            until: Instant::now() + WITHIN,
            wanted: Arc::downgrade(&wanted),
        };
        offload.start(move || {
            let done = match fd.fd() {
                Some(fd) => transfer(fd, &limit),
                None => Err(io::ErrorKind::InvalidInput.into()),
            };
            // Given back first: a frontend reads up to the end before it asks how the transfer went.
            drop(fd);
            let _ = sender.send(done);
        })?;
        Ok(StateTransfer {
            ended,
            _wanted: wanted,
        })
    }

    /// Waits for the end. Returns what was read; nothing if it was written.
    pub(crate) fn end(self) -> io::Result<Option<Vec<u8>>> {
        let ended = self.ended.recv_timeout(ENDED_WITHIN);
        ended.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Waits until the descriptor is ready.
fn await_ready(fd: &OwnedFd, flags: PollFlags, limit: &Limit) -> io::Result<()> {
    while !is_ready(fd, flags | PollFlags::HUP | PollFlags::ERR) {
        let now = Instant::now();
        if now >= limit.until || limit.wanted.strong_count() == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let look = limit.until.min(now + LOOK);
        wait(&mut [PollFd::new(fd, flags)], Some(look))?;
    }
    Ok(())
}

fn write(fd: &OwnedFd, mut bytes: &[u8], limit: &Limit) -> io::Result<()> {
    while !bytes.is_empty() {
        await_ready(fd, PollFlags::OUT, limit)?;
        match rustix::io::write(fd, bytes) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn read(fd: &OwnedFd, most: usize, limit: &Limit) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut piece = [0; 64];
    while bytes.len() <= most {
        await_ready(fd, PollFlags::IN, limit)?;
        match rustix::io::read(fd, &mut piece) {
            Ok(0) => break,
            Ok(count) => bytes.extend_from_slice(piece.get(..count).unwrap_or_default()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}
