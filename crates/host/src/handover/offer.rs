//! The offer of a running process to one that takes over from it.

use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use cleave_api::{ClientError, HttpClient, HttpReply, ProblemKind, UpgradeReply};
use cleave_disk::{Backing, Disk, SyncFailure};

use super::link::{TakeOutcome, TakenLink, Taker, has_ended};
use super::parcel::Parcel;
use super::{PATH, PROTOCOL};
use crate::failure::Failure;
use crate::socket::path_lock::PathLock;

/// Longest wait for what the other process has at hand.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// Longest wait for the sessions: the other process gives up before, if its disk hangs.
const PARCEL_TIME: Duration = Duration::from_secs(15);
/// Longest wait for the lock of a process that has given its disk away, or has ended. If it was killed, that takes as long as its
/// last I/O.
const LOCK_TIME: Duration = Duration::from_secs(5);

/// Longest wait for a node to give all of its disks. That node has a bound for those that are not taken, and knows how far it is.
const NODE_TIME: Duration = Duration::from_secs(365 * 86_400);

/// A disk that another process offers, and serves until it is taken.
#[derive(Debug)]
pub(crate) struct Offer {
    /// The disk without its sessions.
    pub(crate) parcel: Parcel,
    taker: Taker,
}

/// Why another process goes on with what it serves.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotOffered {
    /// The process cannot hand over, and that lasts. A restart gets past it.
    Obstacle(String),
    /// The process does not hand over now, or does not answer.
    Failed(String),
}

impl NotOffered {
    /// Reads a refusal. A process that does not know the path is of an earlier version.
    fn refused(reply: &HttpReply) -> NotOffered {
        let why = reply.refusal().unwrap_or_default();
        let is_unknown = matches!(reply.status, 404 | 405);
        match is_unknown || reply.is_problem(ProblemKind::CannotHandOver) {
            true => NotOffered::Obstacle(why),
            false => NotOffered::Failed(why),
        }
    }

    /// Returns the failure that says this line.
    pub(crate) fn failure(&self, line: impl fmt::Display) -> Failure {
        match self {
            NotOffered::Obstacle(_) => Failure::obstacle(line),
            NotOffered::Failed(_) => Failure::run(line),
        }
    }
}

impl From<String> for NotOffered {
    fn from(why: String) -> NotOffered {
        NotOffered::Failed(why)
    }
}

impl fmt::Display for NotOffered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (NotOffered::Obstacle(why) | NotOffered::Failed(why)) = self;
        f.write_str(why)
    }
}

/// Asks the process with this control socket for a disk, or for what it has besides its disks. `None`: there is no process, or it does
/// not serve that disk.
pub(crate) fn ask(control: &Path, disk: Option<&str>) -> Result<Option<Offer>, NotOffered> {
    let client = HttpClient::new(control, ANSWER_TIME);
    let target = match disk {
        Some(id) => format!("{PATH}?disk={id}"),
        None => PATH.to_owned(),
    };
    let stream = match client.upgrade(&target, PROTOCOL) {
        Ok(UpgradeReply::Agreed(stream)) => stream,
        Ok(UpgradeReply::Nothing) | Err(ClientError::NoSocket | ClientError::NoListener) => {
            return Ok(None);
        }
        Ok(UpgradeReply::Refused(reply)) => return Err(NotOffered::refused(&reply)),
        Err(error) => return Err(NotOffered::Failed(error.to_string())),
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
    /// Waits until a node has given all disks that it serves, or has ended. An error is the reason for which it goes on: it has the
    /// control socket then, and what it had given it serves again. Otherwise the link is to be kept, if there is one.
    pub(crate) fn await_all(self) -> Result<Option<TakenLink>, String> {
        let ready = self.taker.send_ready(Instant::now() + ANSWER_TIME);
        match ready.and_then(|()| self.taker.receive_parcel(Instant::now() + NODE_TIME)) {
            // A node without disks ends, whatever it hears.
            Ok(_) => match self.taker.take(Instant::now() + ANSWER_TIME) {
                TakeOutcome::Taken(link) => Ok(Some(link)),
                TakeOutcome::Kept(_) | TakeOutcome::Ended(_) => Ok(None),
            },
            Err(error) if has_ended(&error) => {
                tracing::warn!("the node that ran before has ended early: {error}");
                Ok(None)
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Takes the disk, when nothing else can keep this process from serving it. After an error the other process has it.
    ///
    /// The giver keeps the lock of the path until it has heard that the disk is taken. If it ends without a word, the lock tells
    /// when its last I/O has ended: then the disk is this process's, with the sessions if they had come.
    ///
    /// A process that has taken its only disk keeps the link.
    pub(crate) fn take(
        self,
        disk: &Disk,
        lock: Option<&PathLock>,
    ) -> Result<(Parcel, Option<TakenLink>), String> {
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
                // Its guest may have left for another host before it died, so the locks may be free, or that host's.
                let acquired = disk.acquire();
                acquired.map_err(|error| format!("that process has died: {error}"))?;
                tracing::warn!(
                    "the process that served the disk has died: its frontend has to connect again"
                );
                let is_failed = lock.is_some_and(PathLock::tells_of_loss);
                let parcel = Parcel {
                    sync_failure: is_failed.then_some(SyncFailure::Untold),
                    ..Parcel::default()
                };
                return Ok((parcel, None));
            }
            Err(error) => return Err(error.to_string()),
        };
        let parcel = Parcel::unpack(packed).map_err(|error| error.to_string())?;
        match taker.take(deadline) {
            TakeOutcome::Taken(link) => {
                // Without a lock, or with one that the other process does not release, it is the disk's all the same.
                if lock.is_some() && !has_inherited() {
                    tracing::warn!(
                        "the lock beside the socket was not released: if this daemon is killed, the next one will not wait for its I/O"
                    );
                }
                Ok((parcel, Some(link)))
            }
            TakeOutcome::Ended(_) if has_inherited() => Ok((parcel, None)),
            TakeOutcome::Ended(error) | TakeOutcome::Kept(error) => Err(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::net::UnixStream;

    use cleave_disk::{DiskSpec, Locking, OpenOptions};
    use rustix::fs::{FlockOperation, flock};

    use super::*;
    use crate::handover::link::Giver;

    /// For what is sure to come.
    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    /// An offer, and the other end of its link.
    fn offered() -> (Giver, Offer) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let offer = offer_of(theirs);
        (Giver::accept(ours, later()).unwrap().0, offer)
    }

    fn offer_of(stream: UnixStream) -> Offer {
        Offer {
            parcel: Parcel::default(),
            taker: Taker::greet(stream, later()).unwrap(),
        }
    }

    /// A unit is restarted for an obstacle alone.
    #[test]
    fn an_obstacle_is_told_from_a_refusal_that_passes() {
        let refused = |status: u16, kind: Option<ProblemKind>| {
            let problem = |kind: ProblemKind| {
                let kind = kind.uri();
                format!(r#"{{"type": "{kind}", "title": "", "status": {status}, "detail": "why"}}"#)
            };
            let reply = HttpReply {
                status,
                header: String::new(),
                body: kind.map(problem).unwrap_or_default(),
            };
            NotOffered::refused(&reply)
        };
        let why = || "why".to_owned();
        let obstacle = refused(409, Some(ProblemKind::CannotHandOver));
        assert_eq!(obstacle, NotOffered::Obstacle(why()));
        let passes = refused(409, Some(ProblemKind::Busy));
        assert_eq!(passes, NotOffered::Failed(why()));
        // An earlier version.
        assert!(matches!(refused(404, None), NotOffered::Obstacle(_)));
        assert!(matches!(refused(503, None), NotOffered::Failed(_)));
    }

    /// The other process has given the disk to a third one meanwhile, so its lock is free.
    #[test]
    fn the_free_lock_of_a_process_that_waits_no_longer_is_not_inherited() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let running = PathLock::take(&path).unwrap().unwrap();
        let next = PathLock::of_running(&path).unwrap();
        let copy = PathLock::copy(Some(&running)).unwrap().unwrap();
        let disk = Disk::open(&"null:1M".parse().unwrap(), &OpenOptions::default()).unwrap();
        let (giver, offer) = offered();
        drop(giver);
        flock(&copy, FlockOperation::Unlock).unwrap();
        let kept = offer.take(&disk, Some(&next)).unwrap_err();
        assert!(kept.contains("does not wait any longer"), "{kept}");
        // That of one that has died is.
        let (ours, theirs) = UnixStream::pair().unwrap();
        let offer = offer_of(theirs);
        drop(ours);
        let (taken, _) = offer.take(&disk, Some(&next)).unwrap();
        assert!(taken.sessions.is_empty());
        running.leave();
    }

    /// Its guest may have left for another host before, which has the disk, or comes to have it.
    #[test]
    fn the_disk_of_a_process_that_died_is_locked_before_it_is_served() {
        let folder = tempfile::tempdir().unwrap();
        let (path, image) = (folder.path().join("s"), folder.path().join("image"));
        File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let open = || Disk::open(&DiskSpec::Path(image.clone()), &OpenOptions::default());
        let first = open().unwrap();
        first.release().unwrap();
        let files = first.held_files().map(|file| file.try_clone().unwrap());
        let options = OpenOptions {
            locking: Locking::Given,
            ..OpenOptions::default()
        };
        let spec = DiskSpec::Path(image.clone());
        let disk = Disk::open_given(&spec, &options, files.collect()).unwrap();
        drop(first);
        PathLock::take(&path).unwrap().unwrap().leave_to_rings();
        let next = PathLock::of_running(&path).unwrap();
        let take = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let offer = offer_of(theirs);
            drop(ours);
            offer.take(&disk, Some(&next))
        };
        let other = open().unwrap();
        let refused = take().unwrap_err();
        assert!(refused.contains("in use by another cleave"), "{refused}");
        drop(other);
        // A child that another test starts may hold it for a moment.
        let end = later();
        while take().is_err() {
            assert!(Instant::now() < end);
        }
        assert!(open().unwrap_err().holder().is_some());
    }

    /// Otherwise both would serve the control socket.
    #[test]
    fn a_node_that_waits_no_longer_is_not_taken_for_dead() {
        let (giver, offer) = offered();
        drop(giver);
        let kept = offer.await_all().unwrap_err();
        assert!(kept.contains("does not wait any longer"), "{kept}");
        let (ours, theirs) = UnixStream::pair().unwrap();
        let offer = offer_of(theirs);
        drop(ours);
        offer.await_all().unwrap();
    }
}
