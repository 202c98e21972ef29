//! How requests are cut into ops, and the most ops that this can give.

use std::num::NonZeroU32;

use crate::{STRIPE_OPS_MAX, Stripe};

/// Most ops of a plan with one leg and no splitting: a parsed request is shorter than 4 GiB, which is 4
/// pieces if it begins at a multiple, otherwise 5. [`Cut::ops_max`] is the bound of any plan.
pub const PLAIN_OPS_MAX: usize = 5;

/// Most ops of a read or write that is split for speed: more ops cost more and gain nothing.
pub const SPLIT_OPS_MAX: usize = 64;

/// How a request is cut into ops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cut {
    /// Writes must be on stable storage before they complete.
    pub durable: bool,
    /// Reads and writes are split into chunks of this size, a power of two and at least the disk's block.
    /// `None`: split only where necessary.
    pub chunk_bytes: Option<NonZeroU32>,
    /// The disk's layout, if it has several legs.
    pub stripe: Option<Stripe>,
}

impl Cut {
    /// Returns the most ops of any request, for which slots and engines need room.
    #[inline]
    pub fn ops_max(&self) -> usize {
        match (self.stripe, self.chunk_bytes) {
            (Some(_), _) => STRIPE_OPS_MAX,
            (None, Some(_)) => SPLIT_OPS_MAX,
            (None, None) => PLAIN_OPS_MAX,
        }
    }
}
