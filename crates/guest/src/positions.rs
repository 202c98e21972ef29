//! How far a vring has come: its free-running indices, and how many of its chains are out. Arithmetic modulo 2^16 and no
//! memory, so that what must hold of it can be shown for every value (`proofs.rs`).

/// Positions in the available and the used ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Positions {
    /// `size - 1`: turns a free-running index into an entry.
    mask: u16,
    /// Entries up to here were taken.
    next_avail: u16,
    /// Available index when last looked at.
    seen_avail: u16,
    /// Used index with the entries that were added.
    next_used: u16,
    /// Used index that the guest sees.
    published: u16,
    /// Chains taken since the start and not yet published as used: at most `size`, since a guest has
    /// no more entries to make chains of.
    outstanding: u16,
}

impl Positions {
    /// Nothing taken. `size`: a power of two, at most 32768.
    pub(crate) fn new(size: u16, next_avail: u16) -> Positions {
        Positions {
            mask: size - 1,
            next_avail,
            seen_avail: next_avail,
            next_used: 0,
            published: 0,
            outstanding: 0,
        }
    }

    /// The used ring is at `used`: nothing was added to it yet.
    pub(crate) fn begin(&mut self, used: u16) {
        (self.next_used, self.published) = (used, used);
    }

    /// Goes on for a daemon that died: the used ring is at `used`, and so many chains are to be taken again.
    pub(crate) fn resume(&mut self, next_avail: u16, used: u16, again: u16) {
        self.begin(used);
        (self.next_avail, self.seen_avail) = (next_avail, next_avail);
        self.outstanding = again;
    }

    /// Position of the next available entry.
    #[inline]
    pub(crate) fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// The available index when last looked at.
    #[inline]
    pub(crate) fn seen_avail(&self) -> u16 {
        self.seen_avail
    }

    /// Entries that were seen and not taken.
    #[inline]
    pub(crate) fn left(&self) -> u16 {
        self.seen_avail.wrapping_sub(self.next_avail)
    }

    /// The entry of the available ring that is `ahead` behind the next one.
    #[inline]
    pub(crate) fn entry(&self, ahead: u16) -> u16 {
        self.next_avail.wrapping_add(ahead) & self.mask
    }

    /// The available index was found to be `found`, all entries before having been taken: how many are new. `None`: the
    /// guest has no room for so many, and positions stay.
    #[inline]
    pub(crate) fn look(&mut self, found: u16) -> Option<u16> {
        let fresh = found.wrapping_sub(self.next_avail);
        let size = self.mask.wrapping_add(1);
        // Checked with what is outstanding, so that a guest that never waits is caught as well as one
        // whose index jumps; it also keeps a batch of used entries within `size`, which the
        // arithmetic of a call needs.
        if fresh > size.saturating_sub(self.outstanding) {
            return None;
        }
        self.seen_avail = found;
        Some(fresh)
    }

    /// The next available entry is taken.
    #[inline]
    pub(crate) fn take(&mut self) {
        self.next_avail = self.next_avail.wrapping_add(1);
        self.outstanding = self.outstanding.saturating_add(1);
    }

    /// The entry of the used ring that the next one to be added goes to; it counts as added.
    #[inline]
    pub(crate) fn push_used(&mut self) -> u16 {
        let entry = self.next_used & self.mask;
        self.next_used = self.next_used.wrapping_add(1);
        entry
    }

    /// All that were added are shown to the guest: the used index before and after. `None`: none was added.
    #[inline]
    pub(crate) fn publish(&mut self) -> Option<(u16, u16)> {
        let (old, new) = (self.published, self.next_used);
        if old == new {
            return None;
        }
        self.published = new;
        self.outstanding = self.outstanding.saturating_sub(new.wrapping_sub(old));
        Some((old, new))
    }

    /// Entries that were seen and not taken are looked for again.
    pub(crate) fn forget_seen(&mut self) {
        self.seen_avail = self.next_avail;
    }

    /// Entries that were added and not published are taken back.
    pub(crate) fn forget_added(&mut self) {
        self.next_used = self.published;
    }
}

#[cfg(any(test, kani))]
mod proofs;
