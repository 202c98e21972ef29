//! Direction of the data.

use cleave_blk::Verb;

/// Direction of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

impl Direction {
    pub(super) const ALL: [Direction; 2] = [Direction::Read, Direction::Write];

    /// `None`: the request has no data.
    #[inline]
    pub(crate) fn of(verb: Verb) -> Option<Direction> {
        match verb {
            Verb::Read => Some(Direction::Read),
            Verb::Write => Some(Direction::Write),
            _ => None,
        }
    }
}
