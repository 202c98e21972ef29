//! Direction of the data.

use cleave_blk::Verb;

/// Direction of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataDirection {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

impl DataDirection {
    pub(super) const ALL: [DataDirection; 2] = [DataDirection::Read, DataDirection::Write];

    /// Returns the direction of a request. `None`: the request has no data.
    #[inline]
    pub(crate) fn of(verb: Verb) -> Option<DataDirection> {
        match verb {
            Verb::Read => Some(DataDirection::Read),
            Verb::Write => Some(DataDirection::Write),
            _ => None,
        }
    }
}
