//! The parameters of a modelled drive.

/// The parts of a drive and their times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drive {
    /// Pages served at the same time.
    pub channels: u32,
    /// Bytes of a page.
    pub page_bytes: u32,
    /// Time on a channel to read a page.
    pub read_ns: u64,
    /// Time on a channel to write a page.
    pub write_ns: u64,
    /// Time that every command takes before its first page.
    pub command_ns: u64,
    /// Most pages of one command on the channels at a time.
    pub window: u32,
    /// Time of a page on its channel's bus, from the bandwidth of a channel; added to the read or write time.
    pub transfer_ns: u64,
    /// Time of a page on the shared link.
    pub link_ns: u64,
    /// Spread of the times on a channel: ± this share, in 1/1000.
    pub jitter_per_mille: u32,
    /// Size of the buffer in which writes may complete before they reach the channels; 0: no buffer.
    pub write_buffer_bytes: u64,
    /// Seed of placement and jitter.
    pub seed: u64,
}

impl Drive {
    /// Returns the time of a page on a channel without jitter.
    pub(crate) fn page_ns(&self, is_read: bool) -> u64 {
        let cell_ns = if is_read { self.read_ns } else { self.write_ns };
        cell_ns.saturating_add(self.transfer_ns)
    }

    /// Returns the shortest time that jitter can make of `ns`.
    pub(crate) fn least_ns(&self, ns: u64) -> u64 {
        let share = 1000_u64.saturating_sub(u64::from(self.jitter_per_mille));
        (u128::from(ns) * u128::from(share) / 1000) as u64
    }
}
