//! The status byte of a request.

use cleave_blk::Outcome;
use cleave_guest::{Memory, Spot};

/// Stores the status byte as [`write_status_at`] does. `None` also if it is no longer in this memory because its region was removed.
#[inline]
pub(super) fn write_status(memory: &Memory, status_addr: u64, outcome: Outcome) -> Option<u32> {
    write_status_at(memory, memory.spot(status_addr)?, outcome)
}

/// Stores the status byte and returns the used length. `None`: the memory is lost, so neither the data nor the status can be trusted,
/// and the guest must not be shown the request: it would take what stands in the byte for the answer.
#[inline]
pub(super) fn write_status_at(memory: &Memory, spot: Spot<'_>, outcome: Outcome) -> Option<u32> {
    spot.store(outcome.status as u8);
    (!memory.is_lost()).then_some(outcome.used_bytes)
}
