//! Conditions of a hand-over that stay the same for as long as a disk is served.

use std::sync::Arc;

use cleave_disk::{Backing, Disk, Leg};
use cleave_session::Owners;

use crate::service::Service;
use crate::socket::Endpoint;
use crate::status::HandOverTerms;

/// Returns these conditions for a disk.
pub(super) fn of(service: &Service, disk: &Disk, owners: Arc<Owners>) -> HandOverTerms {
    let lasting = if matches!(service.endpoint, Endpoint::Fd(_)) {
        Some("its socket was passed by a number")
    } else if is_in_memory(disk) {
        Some("its bytes are in the memory of this process")
    } else if !service.config.persistent.get().0 {
        Some("it is not persistent, so the next process does not serve it")
    } else {
        None
    };
    HandOverTerms { owners, lasting }
}

/// Returns true if the bytes of a disk are lost with the process.
pub(super) fn is_in_memory(disk: &Disk) -> bool {
    let is_in_memory = |leg: &Leg| matches!(leg.backing(), Backing::Ram(_) | Backing::Model { .. });
    disk.legs().iter().any(is_in_memory)
}
