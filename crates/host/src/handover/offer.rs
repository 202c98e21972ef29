//! The offer of a running process to one that takes over from it.

use std::path::Path;
use std::time::{Duration, Instant};

use cleave_api::{ClientError, HttpClient};
use cleave_disk::{Backing, Disk, SyncFailure};

use super::link::{TakeOutcome, Taker, has_ended};
use super::parcel::Parcel;
use super::{PATH, PROTOCOL};
use crate::socket::path_lock::PathLock;

/// Longest wait for what the other process has at hand.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// Longest wait for the sessions: the other process gives up before, if its disk hangs.
const PARCEL_TIME: Duration = Duration::from_secs(15);
/// Longest wait for the lock of a process that has given its disk away, or has ended. If it was killed, that takes as long as its
/// last I/O.
const LOCK_TIME: Duration = Duration::from_secs(5);

/// Longest wait for a node to give all of its disks. One with an obstacle stays there until that has gone.
const NODE_TIME: Duration = Duration::from_secs(365 * 86_400);

/// A disk that another process offers, and serves until it is taken.
#[derive(Debug)]
pub(crate) struct Offer {
    /// The disk without its sessions.
    pub(crate) parcel: Parcel,
    taker: Taker,
}

/// Asks the process with this control socket for a disk, or for what it has besides its disks. `None`: there is no process, or it does
/// not serve that disk.
pub(crate) fn ask(control: &Path, disk: Option<&str>) -> Result<Option<Offer>, String> {
    let client = HttpClient::new(control, ANSWER_TIME);
    let target = match disk {
        Some(id) => format!("{PATH}?disk={id}"),
        None => PATH.to_owned(),
    };
    let stream = match client.upgrade(&target, PROTOCOL) {
        Ok(Some(stream)) => stream,
        Ok(None) | Err(ClientError::NoSocket | ClientError::NoListener) => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let deadline = Instant::now() + ANSWER_TIME;
    let taker = Taker::greet(stream, deadline).map_err(|error| error.to_string())?;
    let files = taker
        .receive_files(deadline)
        .map_err(|error| format!("it does not hand anything over: {error}"))?;
    let parcel = Parcel::unpack(files).map_err(|error| error.to_string())?;
    Ok(Some(Offer { parcel, taker }))
}

impl Offer {
    /// Waits until a node has given all disks that it serves, or has ended.
    pub(crate) fn await_all(self) {
        let ready = self.taker.send_ready(Instant::now() + ANSWER_TIME);
        match ready.and_then(|()| self.taker.receive_parcel(Instant::now() + NODE_TIME)) {
            // A node without disks ends, whatever it hears.
            Ok(_) => drop(self.taker.take(Instant::now() + ANSWER_TIME)),
            Err(error) => tracing::warn!("the node that ran before has ended early: {error}"),
        }
    }

    /// Takes the disk, when nothing else can keep this process from serving it. After an error the other process has it.
    ///
    /// The giver keeps the lock of the path until it has heard that the disk is taken. If it ends without a word, the lock tells
    /// when its last I/O has ended: then the disk is this process's, with the sessions if they had come.
    pub(crate) fn take(self, disk: &Disk, lock: Option<&PathLock>) -> Result<Parcel, String> {
        let has_inherited = || lock.is_some_and(|lock| lock.inherit(LOCK_TIME));
        let Offer { taker, .. } = self;
        let deadline = Instant::now() + PARCEL_TIME;
        let sent = taker.send_ready(deadline);
        let packed = match sent.and_then(|()| taker.receive_parcel(deadline)) {
            Ok(packed) => packed,
            Err(error) if has_ended(&error) && has_inherited() => {
                // Its server may go on with what it was sent last.
                if matches!(disk.backing(), Backing::Nbd(_)) {
                    return Err("the process that served the disk has died: start again".to_owned());
                }
                tracing::warn!(
                    "the process that served the disk has died: its frontend has to connect again"
                );
                let is_failed = lock.is_some_and(PathLock::tells_of_loss);
                return Ok(Parcel {
                    sync_failure: is_failed.then_some(SyncFailure::Untold),
                    ..Parcel::default()
                });
            }
            Err(error) => return Err(error.to_string()),
        };
        let parcel = Parcel::unpack(packed).map_err(|error| error.to_string())?;
        match taker.take(deadline) {
            TakeOutcome::Taken => {
                // Without a lock, or with one that the other process does not release, it is the disk's all the same.
                if lock.is_some() && !has_inherited() {
                    tracing::warn!(
                        "the lock beside the socket was not released: if this daemon is killed, the next one will not wait for its I/O"
                    );
                }
                Ok(parcel)
            }
            TakeOutcome::Ended(_) if has_inherited() => Ok(parcel),
            TakeOutcome::Ended(error) | TakeOutcome::Kept(error) => Err(error.to_string()),
        }
    }
}
