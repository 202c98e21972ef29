//! The numbers and the face that a session offers to its frontend.

use cleave_blk::Face;

/// The offer to a frontend.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// The device that a guest sees.
    pub face: Face,
    /// Maximum number of vrings that are offered; at most 256, since messages name them in eight bits.
    pub vrings_max: u16,
    /// Maximum vring size that is accepted.
    pub vring_size_max: u16,
    /// Maximum number of workers, if the disk allows that many. Vring `i` is served by worker `i` modulo their
    /// number.
    pub workers_max: u16,
}
