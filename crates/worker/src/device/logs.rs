//! The log lines that a guest, a frontend or a disk can cause at will. They belong to the device, because a frontend can make
//! any number of sessions and workers.

use super::quota::SharedQuota;

/// Limits of a device's log lines, one for each kind, so that a kind which a guest can cause does not suppress the others.
#[derive(Debug)]
pub struct Logs {
    /// Messages that were refused.
    pub refused: SharedQuota,
    /// Sessions that wait for the disk, take it over or keep it, and guests that begin to move.
    pub owners: SharedQuota,
    /// Totals of a stripe's legs at the end of a session.
    pub legs: SharedQuota,
    /// Vrings with held requests, which may continue by themselves and be held again.
    pub(crate) held: SharedQuota,
    /// Retired vrings.
    pub(crate) retired: SharedQuota,
    /// Requests of an earlier daemon that are repeated.
    pub(crate) repeated: SharedQuota,
    /// Vrings whose requests in flight are not recorded.
    pub(crate) unrecorded: SharedQuota,
    /// Requests that are lost for that reason.
    pub(crate) lost: SharedQuota,
    /// What the splitter has learnt.
    pub(crate) learnt: SharedQuota,
    /// All others.
    pub(crate) others: SharedQuota,
}

impl Default for Logs {
    fn default() -> Logs {
        // The vrings of a guest often have the same to report at the same time.
        let few = || SharedQuota::new(8);
        let one = || SharedQuota::new(1);
        Logs {
            refused: few(),
            owners: few(),
            legs: few(),
            held: few(),
            retired: few(),
            repeated: few(),
            unrecorded: one(),
            lost: few(),
            learnt: few(),
            others: one(),
        }
    }
}
