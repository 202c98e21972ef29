//! The layout of a stripe (RAID-0) over several legs.

use std::num::NonZeroU16;

/// A disk distributed over legs chunk by chunk: byte `b` is in chunk `b / chunk_bytes`, and chunk `n` is on
/// leg `n % legs` as that leg's chunk number `n / legs`.
///
/// Example with three legs and chunks of 64 KiB: byte 300 000 is byte 37 856 of chunk 4, which is chunk 1 of
/// leg 1: byte 65 536 + 37 856 = 103 392 there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stripe {
    legs: NonZeroU16,
    chunk_shift: u8,
}

impl Stripe {
    /// Fewest legs; a stripe of one would be a plain disk.
    pub const LEGS_MIN: u16 = 2;
    /// Most legs.
    pub const LEGS_MAX: u16 = 64;
    /// Smallest chunk.
    pub const CHUNK_MIN_BYTES: u32 = 4 << 10;
    /// Largest chunk.
    pub const CHUNK_MAX_BYTES: u32 = 4 << 20;

    /// Makes a stripe. `None` if a number is out of range or the chunk is not a power of two.
    pub fn new(legs: u16, chunk_bytes: u32) -> Option<Stripe> {
        let fits = (Self::LEGS_MIN..=Self::LEGS_MAX).contains(&legs)
            && (Self::CHUNK_MIN_BYTES..=Self::CHUNK_MAX_BYTES).contains(&chunk_bytes)
            && chunk_bytes.is_power_of_two();
        let legs = NonZeroU16::new(legs)?;
        // A shift below 32 always fits a byte.
        let chunk_shift = u8::try_from(chunk_bytes.trailing_zeros()).ok()?;
        fits.then_some(Stripe { legs, chunk_shift })
    }

    /// Returns the number of legs.
    #[inline]
    pub fn legs(self) -> u16 {
        self.legs.get()
    }

    /// Contiguous bytes on a leg.
    #[inline]
    pub fn chunk_bytes(self) -> u32 {
        1 << self.chunk_shift
    }

    /// Returns the leg of a byte, and its offset there.
    #[inline]
    pub fn place(self, offset_bytes: u64) -> (u16, u64) {
        let (leg, row) = self.chunk_place(offset_bytes >> self.chunk_shift);
        let inside = offset_bytes & (u64::from(self.chunk_bytes()) - 1);
        (leg, (row << self.chunk_shift) | inside)
    }

    /// Returns the leg of a chunk, and its number there.
    #[inline]
    pub(crate) fn chunk_place(self, chunk: u64) -> (u16, u64) {
        let legs = u64::from(self.legs.get());
        // The remainder of a division by a u16.
        ((chunk % legs) as u16, chunk / legs)
    }

    #[inline]
    pub(crate) fn chunk_shift(self) -> u32 {
        u32::from(self.chunk_shift)
    }
}

/// Most ops of a request to a stripe. A read or write of more chunks has ops over several of them.
pub const STRIPE_OPS_MAX: usize = 1024;
/// Most chunks of one such op: the longest request has 2^20 chunks and one more, which go to 64 legs or fewer in parts, as many as
/// [`STRIPE_OPS_MAX`] has room for.
pub const OP_CHUNKS_MAX: usize = 1100;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn worked_example_of_the_doc() {
        let stripe = Stripe::new(3, 64 << 10).unwrap();
        assert_eq!(stripe.place(300_000), (1, 103_392));
    }

    #[test]
    fn numbers_out_of_range_make_no_stripe() {
        // legs, chunk; whether they make a stripe.
        let table = [
            (2, 4096, true),
            (64, 4 << 20, true),
            (28, 64 << 10, true),
            (0, 4096, false),
            (1, 4096, false),
            (65, 4096, false),
            (2, 0, false),
            (2, 2048, false),
            (2, 8 << 20, false),
            (2, 12 << 10, false),
            (2, u32::MAX, false),
        ];
        for (legs, chunk, is_one) in table {
            assert_eq!(Stripe::new(legs, chunk).is_some(), is_one, "{legs} {chunk}");
        }
    }

    proptest! {
        /// Every byte of the disk has its own place, and every place of every leg has a byte.
        #[test]
        fn places_and_bytes_are_one_to_one(
            legs in 2..=64u16, shift in 12..=22u32, offset in 0..1u64 << 50,
        ) {
            let stripe = Stripe::new(legs, 1 << shift).unwrap();
            let (leg, at) = stripe.place(offset);
            prop_assert!(leg < legs);
            let (row, inside) = (at >> shift, at & ((1 << shift) - 1));
            let back = ((row * u64::from(legs) + u64::from(leg)) << shift) | inside;
            prop_assert_eq!(back, offset);
        }
    }
}
