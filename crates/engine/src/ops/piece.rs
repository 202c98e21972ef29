//! Cuts an op into pieces that fit a buffer and the store's blocks: arithmetic only.

/// One step of an op through a buffer: `take` bytes of the op lie `skip` bytes into the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Piece {
    /// Start of the window on the store; a multiple of the unit.
    pub(crate) start: u64,
    /// Bytes of the window; a multiple of the unit.
    pub(crate) len: u64,
    /// Bytes of the window before the op's.
    pub(crate) skip: u64,
    /// Bytes of the op in the window; not 0.
    pub(crate) take: u64,
}

impl Piece {
    /// Returns true if the op covers the whole window, so that it can be written without reading it first.
    pub(crate) fn is_whole(self) -> bool {
        self.skip == 0 && self.take == self.len
    }
}

/// The piece of a read that begins at `at` with `left` bytes to go: the whole blocks around it, at most
/// `most` bytes (a multiple of `unit`).
pub(crate) fn for_read(at: u64, left: u64, unit: u64, most: u64) -> Piece {
    let skip = at % unit;
    let start = at - skip;
    let end = at.saturating_add(left);
    let len = end
        .div_ceil(unit)
        .saturating_mul(unit)
        .saturating_sub(start)
        .min(most);
    Piece {
        start,
        len,
        skip,
        take: (len - skip).min(left),
    }
}

/// The piece of a write that begins at `at` with `left` bytes to go: either whole blocks (at most
/// `most` bytes), or the one block of which the op covers a part.
///
/// Worked example, unit 4096: 10 240 bytes at 3584 go as [0, 4096) with skip 3584 take 512, then
/// [4096, 12 288) whole, then [12 288, 16 384) with skip 0 take 1536.
pub(crate) fn for_write(at: u64, left: u64, unit: u64, most: u64) -> Piece {
    let skip = at % unit;
    if skip != 0 || left < unit {
        return Piece {
            start: at - skip,
            len: unit,
            skip,
            take: left.min(unit - skip),
        };
    }
    let len = (left - left % unit).min(most - most % unit);
    Piece {
        start: at,
        len,
        skip: 0,
        take: len,
    }
}

/// The whole blocks inside a range, or `None` if it contains none.
pub(crate) fn inside(offset: u64, len: u64, unit: u64) -> Option<(u64, u64)> {
    let start = offset.checked_next_multiple_of(unit)?;
    let end = offset.checked_add(len)? / unit * unit;
    (start < end).then(|| (start, end - start))
}

/// The whole blocks around a range.
pub(crate) fn around(offset: u64, len: u64, unit: u64) -> (u64, u64) {
    let start = offset - offset % unit;
    let end = offset
        .saturating_add(len)
        .div_ceil(unit)
        .saturating_mul(unit);
    (start, end - start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_write_goes_as_head_middle_tail() {
        let mut at = 3584;
        let mut left = 10_240;
        let mut pieces = Vec::new();
        while left > 0 {
            let piece = for_write(at, left, 4096, 1 << 20);
            at += piece.take;
            left -= piece.take;
            pieces.push((piece.start, piece.len, piece.skip, piece.take));
        }
        assert_eq!(
            pieces,
            [
                (0, 4096, 3584, 512),
                (4096, 8192, 0, 8192),
                (12_288, 4096, 0, 1536)
            ]
        );
    }

    #[test]
    fn inside_and_around() {
        assert_eq!(inside(0, 4096, 4096), Some((0, 4096)));
        assert_eq!(inside(1, 4096, 4096), None);
        assert_eq!(inside(512, 12_288, 4096), Some((4096, 8192)));
        assert_eq!(inside(u64::MAX - 5, 5, 4096), None);
        assert_eq!(around(512, 512, 4096), (0, 4096));
        assert_eq!(around(4096, 4096, 4096), (4096, 4096));
        assert_eq!(around(4095, 2, 4096), (0, 8192));
    }

    proptest! {
        #[test]
        fn pieces_cover_an_op_once_and_in_order(
            at in 0_u64..1 << 20, len in 1_u64..1 << 20, unit_log in 0_u32..14, blocks in 1_u64..64,
        ) {
            let unit = 1_u64 << unit_log;
            let most = unit * blocks;
            type Cut = fn(u64, u64, u64, u64) -> Piece;
            for cut in [for_read as Cut, for_write as Cut] {
                let (mut pos, mut steps) = (at, 0_u64);
                while pos < at + len {
                    let piece = cut(pos, at + len - pos, unit, most);
                    prop_assert!(piece.take > 0 && piece.take <= at + len - pos);
                    prop_assert_eq!(piece.start + piece.skip, pos);
                    prop_assert!(piece.skip + piece.take <= piece.len && piece.len <= most);
                    prop_assert!(piece.start % unit == 0 && piece.len % unit == 0);
                    pos += piece.take;
                    steps += 1;
                }
                prop_assert_eq!(pos, at + len);
                prop_assert!(steps <= len / most + 4);
            }
        }
    }
}
