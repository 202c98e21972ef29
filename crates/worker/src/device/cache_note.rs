//! The note by which the process after this one knows the cache mode of a guest.
//!
//! A guest that has switched its write cache off sends no flush. Its frontend tells the mode once: a process that meets the guest after
//! the death of this one would serve it write-back, and a loss of power could take what the guest believes durable.

use std::fmt::Debug;

/// Notes where it outlives this process that a guest has switched its write cache off.
pub trait CacheNote: Debug + Send + Sync {
    /// Returns true if that is noted, by this process or by one before.
    fn is_off(&self) -> bool;
    /// Notes it, or takes it back. A failure is logged.
    fn set_off(&self, is_off: bool);
}
