//! The token that identifies an op to the store, and comes back with its completion.

/// Lane, head, and the op's number within its request, packed into a store's token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) lane: u16,
    pub(crate) head: u16,
    pub(crate) op: u32,
}

impl Token {
    #[inline]
    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.lane) << 48 | u64::from(self.head) << 32 | u64::from(self.op)
    }

    #[inline]
    pub(crate) fn from_bits(bits: u64) -> Token {
        Token {
            lane: (bits >> 48) as u16,
            head: (bits >> 32) as u16,
            op: bits as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_packing() {
        for token in [
            Token {
                lane: 0,
                head: 0,
                op: 0,
            },
            Token {
                lane: 255,
                head: 32767,
                op: 1,
            },
            Token {
                lane: u16::MAX,
                head: u16::MAX,
                op: u32::MAX,
            },
        ] {
            assert_eq!(Token::from_bits(token.to_bits()), token);
        }
    }
}
