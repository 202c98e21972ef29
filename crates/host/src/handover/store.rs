//! Parcels in the store of the service manager, which keeps them from one process of a service to the next.
//!
//! The descriptors of a parcel wait in a socket, and the manager has that. So each disk is one entry of its store, descriptors that
//! are equal are no concern of it, and when the manager gives up the socket all of them are closed.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cleave_session::{Handover, Keeper};

use super::link;
use super::merge::{DiskUse, LeftParcel};
use super::parcel::{DiskRecord, Packed, Parcel};
use crate::process::systemd::{self, KeptName, Manager};
use crate::socket;

/// A parcel waits in the buffer of its socket, which has room for it.
const TIME: Duration = Duration::from_secs(1);
/// How long a parcel waits for a manager whose queue is full, and the pause between two attempts. Many disks end at once, and the
/// manager may be loading its units.
const KEEP_TIME: Duration = Duration::from_secs(4);
const KEEP_PAUSE: Duration = Duration::from_millis(1);

/// Gives a disk to the manager, for the next process of this service. Its name there tells what is known of its guest, and the document
/// does not, so that earlier versions can read that.
pub(crate) async fn keep(manager: &Manager, disk_use: DiskUse, packed: &Packed) -> io::Result<()> {
    let name = match disk_use {
        DiskUse::Unused => KeptName::UnusedDisk,
        DiskUse::MaybeUsed => KeptName::Disk,
    };
    let (ours, kept) = UnixStream::pair()?;
    link::send_parcel(ours, packed, Instant::now() + TIME)?;
    let until = Instant::now() + KEEP_TIME;
    loop {
        match manager.keep(name, &kept) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                tokio::time::sleep(KEEP_PAUSE).await;
            }
            kept => return kept,
        }
    }
}

/// Keeps a session while it waits for its frontend, for a process that follows this one if it is killed.
///
/// The manager has one end of a pair of sockets, in which the parcel waits. This process has a copy of that end, so it can take the parcel
/// out again without the manager, at once and whatever the manager does.
#[derive(Debug)]
pub(crate) struct SessionKeeper {
    manager: Arc<Manager>,
    disk: DiskRecord,
    /// Its name in the store. No two processes of a service use the same one.
    name: KeptName,
    /// The end into which parcels go, and the one that the manager has, once there was a parcel.
    pair: Option<(UnixStream, UnixStream)>,
}

impl SessionKeeper {
    pub(crate) fn new(manager: Arc<Manager>, disk: DiskRecord) -> SessionKeeper {
        static SESSIONS: AtomicU64 = AtomicU64::new(0);
        let number = SESSIONS.fetch_add(1, Ordering::Relaxed);
        let process = std::process::id();
        SessionKeeper {
            manager,
            disk,
            name: KeptName::Session(process, number),
            pair: None,
        }
    }

    /// Puts a parcel where the manager's end is. After an error there may be a part of it.
    fn put(&mut self, parcel: Parcel) -> io::Result<()> {
        let packed = parcel.pack().map_err(|failed| failed.1)?;
        let put = self.put_packed(&packed);
        // The session goes on with its own. This happens once for each message, for which no thread is to be started.
        drop(packed.into_fds());
        put
    }

    fn put_packed(&mut self, packed: &Packed) -> io::Result<()> {
        let send =
            |ours: &UnixStream| link::send_parcel(ours.try_clone()?, packed, Instant::now() + TIME);
        if let Some((ours, _)) = &self.pair {
            return send(ours);
        }
        let pair = UnixStream::pair()?;
        // Before the manager has the other end, so that it never keeps one in which nothing waits yet.
        send(&pair.0)?;
        self.manager.keep(self.name, &pair.1)?;
        self.pair = Some(pair);
        Ok(())
    }
}

impl Keeper for SessionKeeper {
    fn keep(&mut self, session: Handover) -> io::Result<()> {
        let parcel = Parcel {
            disk: self.disk.clone(),
            sessions: vec![session].into(),
            ..Parcel::default()
        };
        // A part of a parcel is nothing, and a whole one must not follow it.
        self.put(parcel).inspect_err(|_| self.forget())
    }

    fn forget(&mut self) {
        if let Some((_, theirs)) = &self.pair {
            link::discard(theirs);
        }
    }
}

impl Drop for SessionKeeper {
    fn drop(&mut self) {
        if self.pair.is_some() {
            self.forget();
            self.manager.forget_kept(self.name);
        }
    }
}

/// Takes the parcels that processes of this service have left. The manager forgets them, because a connection that it had open would
/// outlive this process.
pub(crate) fn take(manager: &Manager) -> Vec<LeftParcel> {
    let kept = systemd::kept().into_iter();
    let taken = kept.filter_map(|(name, number)| {
        let parcel = open(number);
        manager.forget_kept(name);
        let parcel = parcel
            .transpose()?
            .inspect_err(|why| tracing::warn!("{why}: its frontends have to connect again"))
            .ok()?;
        let disk_use = match name {
            KeptName::UnusedDisk => DiskUse::Unused,
            KeptName::Disk | KeptName::Session(..) => DiskUse::MaybeUsed,
        };
        Some(LeftParcel { parcel, disk_use })
    });
    taken.collect()
}

/// Returns the parcel in a socket of the manager; `None`: there is none, because a session was not waiting for its frontend when its
/// process died.
fn open(number: u32) -> Result<Option<Parcel>, String> {
    let fd: OwnedFd = socket::inherited_fd(number).map_err(|failure| failure.to_string())?;
    let packed = match link::receive_parcel(UnixStream::from(fd), Instant::now() + TIME) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        packed => packed.map_err(|error| {
            format!("what the process before handed over cannot be received: {error}")
        })?,
    };
    Parcel::unpack(packed)
        .map(Some)
        .map_err(|error| error.to_string())
}
