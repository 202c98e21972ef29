//! The result of a request for the guest.

use crate::{Request, Status, Verb};

/// Status and used length of a completed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// The value for the last writable byte of the chain.
    pub status: Status,
    /// Bytes that the device wrote into the chain, status byte included. Exact on success; 1 (only the
    /// status) on failure, because the data is unreliable.
    pub used_bytes: u32,
}

impl Outcome {
    /// Returns the outcome of a request whose ops have all completed: `Ok`, or the errno of the first op that failed. Errors become
    /// status bytes only here.
    #[inline]
    pub fn ended(request: &Request, result: Result<(), i32>) -> Outcome {
        match result {
            Ok(()) => Outcome {
                status: Status::Ok,
                used_bytes: answer_bytes(request).saturating_add(1),
            },
            Err(_) => Outcome::refused(Status::IoErr),
        }
    }

    /// Returns the outcome of a request that never reached the disk: `Request::parse` refused it, or the chain has a fault. A
    /// chain without a status byte has no outcome and is used with length 0.
    #[inline]
    pub fn refused(status: Status) -> Outcome {
        Outcome {
            status,
            used_bytes: 1,
        }
    }
}

/// Returns the bytes of data that a successful request has written to guest memory.
#[inline]
fn answer_bytes(request: &Request) -> u32 {
    match request.verb {
        // It always fits: `Request::parse` refuses a chain of 4 GiB.
        Verb::Read | Verb::GetId => u32::try_from(request.len_bytes).unwrap_or(u32::MAX),
        Verb::Write | Verb::Flush | Verb::Discard | Verb::WriteZeroes { .. } => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EIO: i32 = 5;
    const EOPNOTSUPP: i32 = 95;

    const VERBS: [Verb; 7] = [
        Verb::Read,
        Verb::Write,
        Verb::Flush,
        Verb::GetId,
        Verb::Discard,
        Verb::WriteZeroes { unmap: false },
        Verb::WriteZeroes { unmap: true },
    ];

    fn request(verb: Verb, len_bytes: u64) -> Request {
        Request {
            verb,
            offset_bytes: 0,
            len_bytes,
        }
    }

    #[test]
    fn used_length_counts_bytes_written_into_the_chain() {
        let table = [
            (Verb::Read, 4096, 4097),
            (Verb::Read, 0, 1),
            (Verb::Read, 0xffff_fe00, 0xffff_fe01),
            (Verb::GetId, 20, 21),
            (Verb::GetId, 1, 2),
            (Verb::GetId, 0, 1),
            (Verb::Write, 4096, 1),
            (Verb::Flush, 0, 1),
            (Verb::Discard, 1 << 30, 1),
            (Verb::WriteZeroes { unmap: true }, 4096, 1),
        ];
        for (verb, len_bytes, used_bytes) in table {
            let outcome = Outcome::ended(&request(verb, len_bytes), Ok(()));
            assert_eq!(
                outcome,
                Outcome {
                    status: Status::Ok,
                    used_bytes
                },
                "{verb:?} of {len_bytes}"
            );
        }
    }

    /// UNSUPP would have the guest take the command for one that the device does not have (virtio 1.3 §5.2.6.2).
    #[test]
    fn a_failure_of_the_store_is_an_io_error() {
        for verb in VERBS {
            for errno in [EIO, EOPNOTSUPP, 0, -1, i32::MAX] {
                let outcome = Outcome::ended(&request(verb, 4096), Err(errno));
                assert_eq!(outcome, Outcome::refused(Status::IoErr), "{verb:?} {errno}");
                assert_eq!(outcome.used_bytes, 1, "the data is unreliable");
            }
        }
    }
}
