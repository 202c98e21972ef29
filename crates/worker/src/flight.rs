//! What is in flight, by how long it may take.

use cleave_blk::Verb;

use crate::policy::Outlook;

/// Up to here a read or write is small.
const SMALL_BYTES: u64 = 16 << 10;
/// Beyond this it is large.
const MEDIUM_BYTES: u64 = 128 << 10;

/// Requests in flight on all vrings of a worker.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Flight {
    requests: u32,
    small: u32,
    medium: u32,
    sync: u32,
}

impl Flight {
    /// All of them.
    #[inline]
    pub(crate) fn requests(&self) -> u32 {
        self.requests
    }

    /// One was handed to the engine.
    #[inline]
    pub(crate) fn begun(&mut self, verb: Verb, len_bytes: u64) {
        self.requests += 1;
        if let Some(count) = self.count_of(verb, len_bytes) {
            *count += 1;
        }
    }

    /// One has ended.
    #[inline]
    pub(crate) fn ended(&mut self, verb: Verb, len_bytes: u64) {
        self.requests = self.requests.saturating_sub(1);
        if let Some(count) = self.count_of(verb, len_bytes) {
            *count = count.saturating_sub(1);
        }
    }

    /// Who is to do something next, and how soon that may be.
    #[inline]
    pub(crate) fn outlook(&self) -> Outlook {
        match self {
            Flight { requests: 0, .. } => Outlook::Guest,
            Flight { small: 1.., .. } => Outlook::Small,
            Flight { medium: 1.., .. } => Outlook::Medium,
            Flight { sync: 1.., .. } => Outlook::Sync,
            _ => Outlook::Large,
        }
    }

    #[inline]
    fn count_of(&mut self, verb: Verb, len_bytes: u64) -> Option<&mut u32> {
        match verb {
            Verb::Read | Verb::Write if len_bytes <= SMALL_BYTES => Some(&mut self.small),
            Verb::Read | Verb::Write if len_bytes <= MEDIUM_BYTES => Some(&mut self.medium),
            Verb::Read | Verb::Write => None,
            _ => Some(&mut self.sync),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_in_flight_decides() {
        let mut flight = Flight::default();
        assert_eq!(flight.outlook(), Outlook::Guest);
        let steps = [
            (Verb::Write, 1 << 20, Outlook::Large),
            (Verb::Flush, 0, Outlook::Sync),
            (Verb::Read, 128 << 10, Outlook::Medium),
            (Verb::Read, 4096, Outlook::Small),
        ];
        for (verb, len_bytes, outlook) in steps {
            flight.begun(verb, len_bytes);
            assert_eq!(flight.outlook(), outlook);
        }
        for (verb, len_bytes, outlook) in steps.into_iter().rev() {
            assert_eq!(flight.outlook(), outlook);
            flight.ended(verb, len_bytes);
        }
        assert_eq!((flight.outlook(), flight.requests()), (Outlook::Guest, 0));
    }
}
