//! Direction of the data.

use cleave_blk::Verb;

/// Direction of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitDirection {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

impl SplitDirection {
    pub(super) const ALL: [SplitDirection; 2] = [SplitDirection::Read, SplitDirection::Write];

    /// `None`: the request has no data.
    #[inline]
    pub(crate) fn of(verb: Verb) -> Option<SplitDirection> {
        match verb {
            Verb::Read => Some(SplitDirection::Read),
            Verb::Write => Some(SplitDirection::Write),
            _ => None,
        }
    }
}
