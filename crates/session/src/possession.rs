//! The right to a disk's bytes, as a session uses it.

use std::sync::mpsc::Receiver;

/// The right to a disk's bytes, which moves between hosts with the guest.
pub trait Possession: std::fmt::Debug + Send + Sync {
    /// Returns true if this host has the disk.
    fn is_here(&self) -> bool;
    /// Gives the disk up. Called when the last vring has stopped while a dirty log was in force, which means that the guest
    /// moves: every request is done and the store is flushed. The frontend gets its last position after this. Also called at the
    /// end of a connection that had a log while no vring ran.
    fn hand_over(&self);
    /// Notes that the guest moves and the disk could not be handed over. Without locks between the hosts, the guest may run on the
    /// other one all the same, until it starts here again.
    fn hand_over_failed(&self);
    /// Takes the disk before the first vring starts. `Ok(false)`: another has it, so ask again in a while; the disk says so
    /// itself. `Err`: it can never be had.
    fn take(&self) -> Result<bool, String>;
    /// Begins to look at the size of a disk that this host does not have, because another host may have made it larger. Nothing is
    /// ever received: the sender goes when that is done. `None`: the size is known, or an earlier look does not end.
    fn look(&self) -> Option<Receiver<()>>;
}
