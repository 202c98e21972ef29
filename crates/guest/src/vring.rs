//! The split virtqueue, device side (virtio 1.3 §2.7).

use std::sync::Arc;

use crate::{Chain, ChainFault, Memory};

/// Where a vring lies, in guest-physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringLayout {
    /// Entries: a power of two, at most 32768.
    pub size: u16,
    /// Descriptor table, 16-byte aligned.
    pub desc_addr: u64,
    /// Available ring, 2-byte aligned.
    pub avail_addr: u64,
    /// Used ring, 4-byte aligned.
    pub used_addr: u64,
}

/// Why a vring cannot be set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VringError {
    /// Not a power of two, zero, or too large.
    #[error("vring size {0} is not a power of two up to 32768")]
    Size(u16),
    /// A part is misaligned.
    #[error("vring part at {0:#x} is misaligned")]
    Align(u64),
    /// A part does not lie wholly inside one region.
    #[error("vring part at {0:#x} is not mapped")]
    Unmapped(u64),
}

/// The guest broke its vring: it must be retired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VringFault {
    /// The available index ran ahead of the ring.
    #[error("available index {found} is more than {size} ahead of {next}")]
    AvailIndex {
        /// Index found.
        found: u16,
        /// Index of the next entry.
        next: u16,
        /// Entries.
        size: u16,
    },
    /// A head beyond the table.
    #[error("head {head} in a table of {size}")]
    Head {
        /// Head found.
        head: u16,
        /// Entries.
        size: u16,
    },
}

/// A chain's head and whether its descriptors were sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// Index that goes back by `push_used`.
    pub head: u16,
    /// Set where the chain cannot be served; `Chain` then holds what could be read before the fault
    /// (`Order`, `TooMany`: all of it, so that its status byte is known), or nothing.
    pub fault: Option<ChainFault>,
}

/// Device side of one split vring. Call in this order: `take` until `None`; `push_used` for what has
/// ended; `publish` once for all of it; before sleeping `arm`, and if it answers `true`, go on instead.
#[derive(Debug)]
pub struct Vring {}

impl Vring {
    /// Binds a layout to memory, from available/used position `base`.
    /// `features`: EVENT_IDX is looked at; indirect descriptors are served whether taken or not
    /// (Windows uses them without).
    pub fn new(
        memory: Arc<Memory>,
        layout: VringLayout,
        features: u64,
        base: u16,
    ) -> Result<Vring, VringError> {
        let _ = (memory, layout, features, base);
        todo!()
    }

    /// The same vring in a changed memory table; positions stay.
    pub fn rebind(&mut self, memory: Arc<Memory>) -> Result<(), VringError> {
        let _ = memory;
        todo!()
    }

    /// Layout changed or logging toggled on a running ring (SET_VRING_ADDR while started): positions stay.
    pub fn size(&self) -> u16 {
        todo!()
    }

    /// Copies the next available chain into `chain`; `None`: nothing there. Looks at the shared
    /// index only when the last look is used up (one cache line per batch).
    pub fn take(&mut self, chain: &mut Chain) -> Result<Option<Taken>, VringFault> {
        let _ = chain;
        todo!()
    }

    /// Adds a used entry; not visible before `publish`.
    pub fn push_used(&mut self, head: u16, used_bytes: u32) {
        let _ = (head, used_bytes);
        todo!()
    }

    /// Stores the used index once for all entries added; whether the guest wants a call for them
    /// (virtio 1.3 §2.7.7.2: EVENT_IDX exact, else the NO_INTERRUPT flag). `false` where none was added.
    pub fn publish(&mut self) -> bool {
        todo!()
    }

    /// Asks the guest for kicks and looks once more; `true`: work arrived meanwhile, take it.
    pub fn arm(&mut self) -> bool {
        todo!()
    }

    /// Tells the guest that kicks are not needed (a hint; with EVENT_IDX leaving the event index
    /// behind is enough, so that costs nothing).
    pub fn disarm(&mut self) {
        todo!()
    }

    /// Whether unseen entries are available: one load, nothing stored.
    pub fn has_work(&self) -> bool {
        todo!()
    }

    /// Position of the next available entry: what GET_VRING_BASE answers.
    pub fn base(&self) -> u16 {
        todo!()
    }
}
