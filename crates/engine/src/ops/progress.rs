//! Interprets the kernel's result for an op. It is arithmetic without a ring, so that a test can cover every result.

use std::time::Duration;

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Store to memory.
    ToGuest,
    /// Memory to store.
    FromGuest,
}

/// A transfer as it was submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Transfer {
    pub(crate) direction: Direction,
    /// Bytes that complete it: less than was asked for if the rest only pads to a block.
    pub(crate) enough: u64,
    /// The store's unit of offsets and lengths; a transfer can continue only from a multiple of it.
    pub(crate) unit: u64,
}

/// The next action after a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Everything has been moved.
    Whole,
    /// This many bytes were moved, a multiple of the unit; the rest must be requested again.
    Part(u64),
    /// Nothing was moved, but the attempt may be repeated.
    Again,
    /// The op ends with this errno.
    Failed(i32),
}

/// Interprets the result of a transfer. A read that moves nothing has reached the end of the store. That is
/// an error and never a short success, because ops lie inside the disk. With O_DIRECT a transfer may end
/// inside a unit (4096 requested, 2560 done): the bytes after the last whole unit are requested again.
pub(crate) fn transfer_progress(transfer: Transfer, result: i32) -> Progress {
    let Ok(moved) = u64::try_from(result) else {
        return fault(result.checked_neg().unwrap_or(libc::EIO));
    };
    if moved >= transfer.enough {
        return Progress::Whole;
    }
    match (moved - moved % transfer.unit.max(1), transfer.direction) {
        (0, Direction::ToGuest) => Progress::Failed(libc::EIO),
        (0, Direction::FromGuest) => Progress::Again,
        (part, _) => Progress::Part(part),
    }
}

/// Interprets the result of an operation that is done completely or not at all: a sync, a fallocate, a command.
pub(crate) fn whole_progress(result: i32) -> Progress {
    if result >= 0 {
        Progress::Whole
    } else {
        fault(result.checked_neg().unwrap_or(libc::EIO))
    }
}

/// Interprets the result of an fsync. Any errno may report the failure of an earlier write-back: a device can fail one with ENOMEM
/// or EAGAIN, and the server of a file with whatever it likes. A second fsync would not report that again, so none is retried but
/// ECANCELED: with that the ring says that the fsync has not begun.
pub(crate) fn sync_progress(result: i32) -> Progress {
    match result.checked_neg() {
        Some(libc::ECANCELED) => Progress::Again,
        Some(errno @ 1..) => Progress::Failed(errno),
        _ => whole_progress(result),
    }
}

/// Interprets the result of a fallocate or a command on a range. On a device behind the page cache the kernel
/// first drops the range's pages, and returns EBUSY if one of them was written meanwhile. A page may be
/// larger than a block, so the write need not even overlap the range.
pub(crate) fn range_progress(result: i32) -> Progress {
    match whole_progress(result) {
        Progress::Failed(libc::EBUSY) => Progress::Again,
        verdict => verdict,
    }
}

fn fault(errno: i32) -> Progress {
    match errno {
        // The kernel has no memory for this I/O now; it did not reach the device.
        libc::EAGAIN | libc::EINTR | libc::ECANCELED | libc::ENOMEM => Progress::Again,
        _ => Progress::Failed(errno),
    }
}

/// When an op is retried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retry {
    /// At once.
    Now,
    /// After this time.
    After(Duration),
    /// Not any more: the op fails with EIO.
    Never,
}

/// Attempts without progress that are retried at once.
const TRIES_AT_ONCE: u16 = 3;
/// Attempts without progress after which the op fails; with the pauses below, after more than a minute.
const TRIES_MAX: u16 = 700;
/// Longest pause between attempts.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// When to repeat an op after `tries` consecutive attempts that moved nothing: the first few at once (a signal), then
/// with doubling pauses from 1 ms, so that a store that keeps returning EAGAIN does not occupy a core.
pub(crate) fn retry(tries: u16) -> Retry {
    match tries {
        0..=TRIES_AT_ONCE => Retry::Now,
        TRIES_MAX.. => Retry::Never,
        _ => {
            let doublings = u32::from(tries - TRIES_AT_ONCE - 1).min(7);
            Retry::After(Duration::from_millis(1 << doublings).min(PAUSE_MAX))
        }
    }
}

/// Returns true if a failed durable write leaves the fate of earlier writes unknown. With RWF_DSYNC the kernel writes
/// out the page cache of the range and flushes the device inside the write. If that part fails, pages of
/// *earlier* writes may be dropped and the error is consumed, so no later fsync reports it. Errors that occur
/// before that (no space, a bad address, a refused descriptor) say nothing about earlier writes.
pub(crate) fn taints_sync(errno: i32) -> bool {
    !matches!(
        errno,
        libc::ENOSPC
            | libc::EDQUOT
            | libc::EFBIG
            | libc::EFAULT
            | libc::EINVAL
            | libc::EBADF
            | libc::EPERM
            | libc::EACCES
            | libc::EROFS
            | libc::EOPNOTSUPP
            | libc::ENOMEM
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(direction: Direction, enough: u64, unit: u64) -> Transfer {
        Transfer {
            direction,
            enough,
            unit,
        }
    }

    #[test]
    fn results_of_transfers() {
        use Direction::{FromGuest, ToGuest};
        use Progress::{Again, Failed, Part, Whole};
        let table = [
            (ToGuest, 4096, 1, 4096, Whole),
            (ToGuest, 4096, 1, 8192, Whole), // the rest is padding
            (ToGuest, 4096, 1, 4095, Part(4095)),
            (ToGuest, 4096, 512, 4095, Part(3584)),
            (ToGuest, 4096, 512, 511, Failed(libc::EIO)), // EOF inside the last unit
            (ToGuest, 4096, 1, 0, Failed(libc::EIO)),     // EOF
            (ToGuest, 2560, 4096, 2560, Whole), // the file ends inside the window, behind the op
            (FromGuest, 4096, 1, 4096, Whole),
            (FromGuest, 4096, 1, 1, Part(1)),
            (FromGuest, 8192, 4096, 4097, Part(4096)),
            (FromGuest, 4096, 4096, 4095, Again),
            (FromGuest, 4096, 1, 0, Again),
            (ToGuest, 4096, 1, -libc::EAGAIN, Again),
            (ToGuest, 4096, 1, -libc::EINTR, Again),
            (FromGuest, 4096, 1, -libc::ECANCELED, Again),
            (ToGuest, 4096, 1, -libc::EIO, Failed(libc::EIO)),
            (FromGuest, 4096, 1, -libc::ENOSPC, Failed(libc::ENOSPC)),
            (FromGuest, 4096, 1, -libc::EFAULT, Failed(libc::EFAULT)),
            (ToGuest, 4096, 1, i32::MIN, Failed(libc::EIO)),
            (ToGuest, 1 << 40, 4096, i32::MAX, Part(0x7fff_f000)),
        ];
        for (direction, enough, unit, result, expected) in table {
            assert_eq!(
                transfer_progress(transfer(direction, enough, unit), result),
                expected,
                "{direction:?} {enough} by {unit}: {result}"
            );
        }
    }

    #[test]
    fn results_of_syncs_and_commands() {
        assert_eq!(sync_progress(0), Progress::Whole);
        assert_eq!(sync_progress(-libc::ECANCELED), Progress::Again);
        assert_eq!(sync_progress(i32::MIN), Progress::Failed(libc::EIO));
        for errno in [libc::EAGAIN, libc::EINTR, libc::ENOMEM, libc::EIO] {
            assert_eq!(sync_progress(-errno), Progress::Failed(errno));
        }
        assert_eq!(whole_progress(0), Progress::Whole);
        assert_eq!(whole_progress(-libc::EINTR), Progress::Again);
        assert_eq!(
            whole_progress(-libc::EOPNOTSUPP),
            Progress::Failed(libc::EOPNOTSUPP)
        );
    }

    #[test]
    fn any_trace_of_short_results_ends_in_bounded_steps_with_all_moved_once() {
        let seed = 0x5eed_0001_u64;
        println!("seed {seed:#x}");
        let mut state = seed;
        let mut random = move || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            state >> 33
        };
        for _ in 0..2000 {
            let unit = 1 << (random() % 13);
            let len = (1 + random() % 64) * unit;
            let mut moved = 0;
            let mut tries = 0;
            loop {
                let asked = len - moved;
                let result = match random() % 4 {
                    0 => -libc::EAGAIN,
                    _ => i32::try_from(random() % (asked + 1)).unwrap(),
                };
                match transfer_progress(transfer(Direction::FromGuest, asked, unit), result) {
                    Progress::Whole => break,
                    Progress::Part(part) => {
                        assert!(part > 0 && part < asked && part % unit == 0);
                        moved += part;
                        tries = 0;
                    }
                    Progress::Again => tries += 1,
                    Progress::Failed(errno) => unreachable!("{errno}"),
                }
                if retry(tries) == Retry::Never {
                    break;
                }
            }
            assert!(moved < len, "only Whole completes a transfer");
        }
    }

    #[test]
    fn retries_are_at_once_then_paused_then_given_up() {
        assert_eq!(retry(1), Retry::Now);
        assert_eq!(retry(3), Retry::Now);
        assert_eq!(retry(4), Retry::After(Duration::from_millis(1)));
        assert_eq!(retry(5), Retry::After(Duration::from_millis(2)));
        assert_eq!(retry(699), Retry::After(Duration::from_millis(100)));
        assert_eq!(retry(700), Retry::Never);
        let total: Duration = (1..700)
            .map(|tries| match retry(tries) {
                Retry::After(pause) => pause,
                _ => Duration::ZERO,
            })
            .sum();
        assert!(total > Duration::from_secs(60), "{total:?}");
    }

    #[test]
    fn only_errors_that_may_have_dropped_pages_taint_the_sync() {
        assert!(taints_sync(libc::EIO));
        assert!(taints_sync(libc::ENODEV));
        assert!(!taints_sync(libc::ENOSPC));
        assert!(!taints_sync(libc::EFAULT));
    }
}
