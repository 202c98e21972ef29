//! The status byte of a request.

use cleave_blk::Outcome;
use cleave_guest::{Memory, Spot};

/// Stores the status byte as [`write_status_at`] does. Writes nothing if the status byte is no longer in this memory because its region was
/// removed.
#[inline]
pub(super) fn write_status(memory: &Memory, status_addr: u64, outcome: Outcome) -> u32 {
    memory
        .spot(status_addr)
        .map_or(0, |spot| write_status_at(memory, spot, outcome))
}

/// Stores the status byte and returns the used length. Writes nothing into memory that is lost, because what
/// was read from it cannot be trusted.
#[inline]
pub(super) fn write_status_at(memory: &Memory, spot: Spot<'_>, outcome: Outcome) -> u32 {
    if memory.is_lost() {
        return 0;
    }
    spot.store(outcome.status as u8);
    outcome.used_bytes
}
