//! The free-running indices of a vring, and the number of its outstanding chains. This is arithmetic modulo
//! 2^16 without memory, so that its properties can be checked for every value (`proofs.rs`).

/// Positions in the available and the used ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Positions {
    /// `size - 1`: turns a free-running index into an entry.
    mask: u16,
    /// Available index of the next entry to take.
    next_avail: u16,
    /// Available index at the last check.
    seen_avail: u16,
    /// Used index including entries that are not published yet.
    next_used: u16,
    /// Used index that the guest sees.
    published: u16,
    /// Chains taken since the start and not yet published as used. At most `size`, because a guest has no
    /// entries for more chains.
    outstanding: u16,
}

impl Positions {
    /// Makes the positions of a vring of which nothing has been taken. `size`: a power of two, at most 32768.
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

    /// Notes that the used ring is at `used`; nothing has been added to it yet.
    pub(crate) fn begin(&mut self, used: u16) {
        (self.next_used, self.published) = (used, used);
    }

    /// Continues for a dead daemon: the used ring is at `used`, and `again` chains are to be taken again.
    pub(crate) fn resume(&mut self, next_avail: u16, used: u16, again: u16) {
        self.begin(used);
        (self.next_avail, self.seen_avail) = (next_avail, next_avail);
        self.outstanding = again;
    }

    /// Returns the position of the next available entry.
    #[inline]
    pub(crate) fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Returns the available index at the last check.
    #[inline]
    pub(crate) fn seen_avail(&self) -> u16 {
        self.seen_avail
    }

    /// Returns the number of entries that were seen and not taken.
    #[inline]
    pub(crate) fn left(&self) -> u16 {
        self.seen_avail.wrapping_sub(self.next_avail)
    }

    /// Returns the entry of the available ring that follows the next one by `ahead`.
    #[inline]
    pub(crate) fn entry(&self, ahead: u16) -> u16 {
        self.next_avail.wrapping_add(ahead) & self.mask
    }

    /// Records the available index `found`, after all earlier entries were taken. Returns how many are new.
    /// `None`: the guest has no room for so many, and positions stay.
    #[inline]
    pub(crate) fn look(&mut self, found: u16) -> Option<u16> {
        let fresh = found.wrapping_sub(self.next_avail);
        let size = self.mask.wrapping_add(1);
        // The check includes outstanding chains, so that it catches a guest that never waits as well as one whose
        // index jumps. It also keeps a batch of used entries within `size`, which the arithmetic of a call requires.
        if fresh > size.saturating_sub(self.outstanding) {
            return None;
        }
        self.seen_avail = found;
        Some(fresh)
    }

    /// Takes the next available entry.
    #[inline]
    pub(crate) fn take(&mut self) {
        self.next_avail = self.next_avail.wrapping_add(1);
        self.outstanding = self.outstanding.saturating_add(1);
    }

    /// Gives back the entry that was taken last.
    pub(crate) fn untake(&mut self) {
        self.next_avail = self.next_avail.wrapping_sub(1);
        self.outstanding = self.outstanding.saturating_sub(1);
    }

    /// Adds a used entry and returns its place in the used ring.
    #[inline]
    pub(crate) fn push_used(&mut self) -> u16 {
        let entry = self.next_used & self.mask;
        self.next_used = self.next_used.wrapping_add(1);
        entry
    }

    /// Returns the number of used entries that were added and not published.
    pub(crate) fn added(&self) -> u16 {
        self.next_used.wrapping_sub(self.published)
    }

    /// Returns the entry of the used ring that was added `step` entries after those that are published.
    pub(crate) fn added_entry(&self, step: u16) -> u16 {
        self.published.wrapping_add(step) & self.mask
    }

    /// Publishes all added entries: the used index before and after. `None`: none was added.
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

    /// Returns the free-running used index of the entry that is added next.
    pub(crate) fn next_used(&self) -> u16 {
        self.next_used
    }

    /// Returns the free-running used index of the entry that was added `step` entries after those that are published.
    pub(crate) fn added_index(&self, step: u16) -> u16 {
        self.published.wrapping_add(step)
    }

    /// Takes back all added entries after the first `count`, for [`add_again`](Positions::add_again). Returns how many.
    pub(crate) fn hold_back(&mut self, count: u16) -> u16 {
        let rest = self.added().saturating_sub(count);
        self.next_used = self.next_used.wrapping_sub(rest);
        rest
    }

    /// Adds entries again that were held back.
    pub(crate) fn add_again(&mut self, rest: u16) {
        self.next_used = self.next_used.wrapping_add(rest);
    }

    /// Forgets entries that were seen and not taken, so that the index is read again.
    pub(crate) fn forget_seen(&mut self) {
        self.seen_avail = self.next_avail;
    }

    /// Withdraws entries that were added and not published.
    pub(crate) fn forget_added(&mut self) {
        self.next_used = self.published;
    }
}

#[cfg(any(test, kani))]
mod proofs;
