//! The parcels of one disk, of which a process may find several.
//!
//! A process leaves a disk as a whole when it ends in order, and a session when it is killed, never both. But two processes of a
//! service run while one takes over from the other. If the first one is killed then, the manager has its sessions, and the second one
//! opens their disks without them. When that one ends in order, it leaves the same disks once more.

use std::collections::BTreeMap;
use std::mem;
use std::os::fd::{AsFd as _, OwnedFd};

use cleave_disk::SyncFailure;
use cleave_session::Offload;
use rustix::net::{Shutdown, shutdown};

use super::parcel::Parcel;

/// Use of a disk by guests in the process that leaves it.
///
/// A session in another parcel comes from the main process before that one, because each main process takes all that the manager has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskUse {
    /// The process got nothing from one before, and no frontend has had a session since.
    Unused,
    /// A guest may have written the disk since the process before had it.
    MaybeUsed,
}

/// A parcel that a process of this service has left.
#[derive(Debug)]
pub(crate) struct LeftParcel {
    pub(crate) parcel: Parcel,
    pub(crate) disk_use: DiskUse,
}

/// The parcels with which this process goes on, and the rest.
#[derive(Debug, Default)]
pub(crate) struct MergedParcels {
    /// One for each disk.
    pub(crate) parcels: Vec<Parcel>,
    /// The others, which have to be [closed](close): until then their frontends do not see the end of their connections.
    pub(crate) surplus: Vec<Parcel>,
}

/// Merges the parcels of each disk.
pub(crate) fn by_disk(all: Vec<LeftParcel>) -> MergedParcels {
    let mut disks = BTreeMap::<String, Vec<LeftParcel>>::new();
    for left in all {
        let id = left.parcel.disk.id.clone();
        disks.entry(id).or_default().push(left);
    }
    let mut merged = MergedParcels::default();
    for disk in disks.into_values() {
        let MergedParcels { parcels, surplus } = of_disk(disk);
        merged.parcels.extend(parcels);
        merged.surplus.extend(surplus);
    }
    merged
}

/// Merges the parcels of a disk into one.
///
/// The disk is as the last process left it that ended in order. A session that waits in another parcel goes on with it only if nobody
/// can have written the disk since: what that session has in flight would be done over newer data. Of several sessions, nothing tells
/// which was served last. A frontend whose session ends here connects again, which is always right.
pub(crate) fn of_disk(mut all: Vec<LeftParcel>) -> MergedParcels {
    // Only a process that ended in order says when. The clock is that of all processes.
    all.sort_by_key(|left| left.parcel.since);
    let Some(last) = all.pop() else {
        return MergedParcels::default();
    };
    let LeftParcel {
        parcel: mut whole,
        disk_use,
    } = last;
    let mut surplus: Vec<Parcel> = all.into_iter().map(|left| left.parcel).collect();
    if whole.since.is_none() && !surplus.is_empty() {
        surplus.push(Parcel {
            sessions: mem::take(&mut whole.sessions),
            ..Parcel::default()
        });
    } else if whole.sessions.is_empty() && disk_use == DiskUse::Unused {
        take_the_only_sessions(&mut whole, &mut surplus);
    }
    for other in surplus.iter().filter(|other| other.disk == whole.disk) {
        whole.sync_failure = worse(whole.sync_failure, other.sync_failure);
    }
    let ends: usize = surplus.iter().map(|parcel| parcel.sessions.len()).sum();
    if ends > 0 {
        let id = &whole.disk.id;
        tracing::warn!(
            "{id}: {ends} of the frontends that earlier processes left cannot go on, because another may have used the disk since: \
             they have to connect again"
        );
    }
    MergedParcels {
        parcels: vec![whole],
        surplus,
    }
}

/// Moves the sessions of another parcel into this one, if it is of the same files and the only one with sessions.
fn take_the_only_sessions(whole: &mut Parcel, others: &mut [Parcel]) {
    let mut others = others.iter_mut().filter(|other| !other.sessions.is_empty());
    let (Some(one), None) = (others.next(), others.next()) else {
        return;
    };
    if one.disk == whole.disk {
        whole.sessions = mem::take(&mut one.sessions);
        // Their guest waits since then; since an unknown time if its process was killed.
        whole.since = one.since;
    }
}

/// Returns the one of which the guest knows less.
fn worse(one: Option<SyncFailure>, other: Option<SyncFailure>) -> Option<SyncFailure> {
    match (one, other) {
        (Some(SyncFailure::Untold), _) | (_, Some(SyncFailure::Untold)) => {
            Some(SyncFailure::Untold)
        }
        (one, other) => one.or(other),
    }
}

/// Ends the connections of a parcel with which nobody goes on, and has nobody listen on its socket any more. It is still to be
/// [closed](close), by threads that are confined.
pub(crate) fn hang_up(parcel: &Parcel) {
    let connections = parcel
        .sessions
        .iter()
        .map(|session| session.connection.as_fd());
    for socket in connections.chain(parcel.listener.iter().map(OwnedFd::as_fd)) {
        let _ = shutdown(socket, Shutdown::Both);
    }
}

/// Closes parcels with which nobody goes on. Their frontends see the end of their connections, unless another parcel has them too.
pub(crate) fn close(mut parcels: Vec<Parcel>) {
    if parcels.is_empty() {
        return;
    }
    let offload = Offload::default();
    // Before the files, whose server may not answer.
    for parcel in &mut parcels {
        for session in parcel.sessions.drain(..) {
            offload.close(session);
        }
    }
    offload.close(parcels);
}

#[cfg(test)]
mod tests;
