//! Events of `GET /v1/events`.

use crate::disk::DiskState;

words! {
    /// What happened.
    EventName {
        /// The client hears everything after number `seq`. First `disks` lines `disk` follow; none if events are `replayed`.
        Listening = "listening",
        /// The disk as it is when the client begins to listen, with the fields of the list.
        Disk = "disk",
        /// The client read too slowly, and `events` events are missing here, up to number `seq`.
        Lost = "lost",
        /// The disk is being opened.
        Opening = "opening",
        /// The disk is served, at `socket`.
        Serving = "serving",
        /// The disk has been told to end.
        Ending = "ending",
        /// The disk cannot be served, because of `error`.
        Failed = "failed",
        /// The disk has ended. `lost` says which requests were lost, if any were.
        Ended = "ended",
        /// The disk is not in the list any more.
        Removed = "removed",
        /// A frontend connected.
        Connected = "connected",
        /// The frontend disconnected.
        Disconnected = "disconnected",
        /// A second frontend connected. It is parked: its vrings start when the first has stopped its own.
        Parked = "parked",
        /// The parked frontend disconnected.
        ParkedLeft = "parked_left",
        /// The parked frontend started its vrings and has the disk now; the other one is parked.
        TakenOver = "taken_over",
        /// Settings changed: `tuning` has them all.
        Changed = "changed",
        /// The size changed, or bytes at the end of the disk are missing or back.
        Resized = "resized",
        /// The disk was taken over or handed over, or waits: `possession` says which, and `holder` who has the locks, if known.
        Possession = "possession",
        /// The disk is quiesced, for at most `seconds`.
        Quiesced = "quiesced",
        /// The disk goes on after a quiet.
        Resumed = "resumed",
        /// A request that the disk failed is held.
        Held = "held",
        /// Held requests were repeated or ended.
        Released = "released",
        /// The disk failed a request, and the guest was told.
        Error = "error",
        /// A vring is no longer served because its guest broke it.
        Retired = "retired",
        /// The server of the disk went away with changes that it had not flushed.
        ServerLost = "server_lost",
        /// Such changes were sent again. With `data_lost` the server refused some, and every flush fails.
        Resent = "resent",
    }
}

/// A disk that has reached this state.
impl From<DiskState> for EventName {
    fn from(state: DiskState) -> EventName {
        match state {
            DiskState::Opening => EventName::Opening,
            DiskState::Serving => EventName::Serving,
            DiskState::Ending => EventName::Ending,
            DiskState::Failed => EventName::Failed,
            DiskState::Ended => EventName::Ended,
        }
    }
}
