//! The policy for requests that the disk fails: `--on-error`.

use std::fmt;
use std::str::FromStr;

use cleave_blk::Verb;
use rustix::io::Errno;

/// Treatment of a request that the disk failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ErrorAction {
    /// Report it to the guest as an I/O error.
    #[default]
    Report,
    /// Repeat it with pauses until this much time has passed since it first failed.
    Retry {
        /// From [`ErrorAction::SECONDS_MIN`] to [`ErrorAction::SECONDS_MAX`].
        seconds: u32,
        /// Afterwards hold it; otherwise it is reported.
        hold: bool,
    },
    /// Keep it until the operator has it repeated or failed. Meanwhile its vring does not take new requests.
    Hold,
}

impl ErrorAction {
    /// Default time for repeating a request.
    pub const SECONDS: u32 = 30;
    /// Minimum of that time.
    pub const SECONDS_MIN: u32 = 1;
    /// Maximum of that time: a day. An operator should notice a longer failure.
    pub const SECONDS_MAX: u32 = 86_400;
}

/// An [`ErrorAction`] for each kind of error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OnError {
    /// For reads.
    pub read: ErrorAction,
    /// For writes, discards and write-zeroes.
    pub write: ErrorAction,
    /// For writes, discards and write-zeroes that failed because the disk is full or a quota is exhausted.
    pub enospc: ErrorAction,
}

impl OnError {
    /// Returns true if any action can hold requests for the operator.
    pub fn may_hold(&self) -> bool {
        let holds = |action| {
            matches!(
                action,
                ErrorAction::Hold | ErrorAction::Retry { hold: true, .. }
            )
        };
        [self.read, self.write, self.enospc].into_iter().any(holds)
    }

    /// Returns the action for a request that failed with this errno. A failed flush is reported: the kernel may have dropped the
    /// pages that it could not write, so a later flush that succeeds proves nothing. One that a store could not send anywhere was
    /// not done, and is repeated like a write.
    pub(crate) fn action(&self, verb: Verb, errno: i32) -> ErrorAction {
        match (verb, kind_of(errno)) {
            (Verb::Flush, _) if is_unsent(errno) => self.write,
            (Verb::Flush | Verb::GetId, _) | (_, Fault::Ours) => ErrorAction::Report,
            (_, Fault::Full) => self.enospc,
            (Verb::Read, Fault::Disk) => self.read,
            (Verb::Write | Verb::Discard | Verb::WriteZeroes { .. }, Fault::Disk) => self.write,
        }
    }
}

/// Returns true if a store fails requests with this errno while there is no way to its storage. They were not done.
pub fn is_unsent(errno: i32) -> bool {
    errno == Errno::NOTCONN.raw_os_error()
}

/// Cause of an error.
enum Fault {
    /// The disk or the path to it. It may work again later.
    Disk,
    /// The disk has no space left.
    Full,
    /// The request or the daemon. The same request would fail again.
    Ours,
}

fn kind_of(errno: i32) -> Fault {
    match Errno::from_raw_os_error(errno) {
        Errno::NOSPC | Errno::DQUOT => Fault::Full,
        // Errors of the medium or the device, the block layer's errors for them, and a file system that stopped
        // writing.
        Errno::IO
        | Errno::NODATA
        | Errno::ILSEQ
        | Errno::REMOTEIO
        | Errno::BADE
        | Errno::NODEV
        | Errno::NXIO
        | Errno::NOMEDIUM
        | Errno::ROFS => Fault::Disk,
        // Errors of the path to the disk.
        Errno::NOLINK
        | Errno::TIMEDOUT
        | Errno::NOTCONN
        | Errno::STALE
        | Errno::HOSTDOWN
        | Errno::HOSTUNREACH
        | Errno::NETDOWN
        | Errno::NETUNREACH
        | Errno::CONNABORTED
        | Errno::CONNREFUSED
        | Errno::CONNRESET
        | Errno::PIPE
        | Errno::SHUTDOWN => Fault::Disk,
        _ => Fault::Ours,
    }
}

impl fmt::Display for ErrorAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ErrorAction::Report => f.write_str("report"),
            ErrorAction::Hold => f.write_str("hold"),
            ErrorAction::Retry { seconds, hold } => {
                write!(f, "retry:{seconds}{}", if *hold { ":hold" } else { "" })
            }
        }
    }
}

impl FromStr for ErrorAction {
    type Err = String;

    fn from_str(text: &str) -> Result<ErrorAction, String> {
        let words: Vec<&str> = text.splitn(4, ':').collect();
        let retry = |seconds, hold| Ok(ErrorAction::Retry { seconds, hold });
        match words.as_slice() {
            ["report"] => Ok(ErrorAction::Report),
            ["hold"] => Ok(ErrorAction::Hold),
            ["retry"] => retry(ErrorAction::SECONDS, false),
            ["retry", "hold"] => retry(ErrorAction::SECONDS, true),
            ["retry", digits] if is_number(digits) => retry(seconds(digits)?, false),
            ["retry", digits, "hold"] if is_number(digits) => retry(seconds(digits)?, true),
            _ => Err(format!(
                "{:?} is none of report, hold and retry[:SECONDS][:hold]",
                shortened(text)
            )),
        }
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn seconds(digits: &str) -> Result<u32, String> {
    let bounds = ErrorAction::SECONDS_MIN..=ErrorAction::SECONDS_MAX;
    let seconds = digits.parse().ok();
    seconds
        .filter(|seconds| bounds.contains(seconds))
        .ok_or_else(|| format!("retry takes {} to {} seconds", bounds.start(), bounds.end()))
}

/// Returns enough of the input to recognise it.
fn shortened(text: &str) -> String {
    const CHARS_MAX: usize = 40;
    text.chars().take(CHARS_MAX).collect()
}

impl fmt::Display for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OnError {
            read,
            write,
            enospc,
        } = self;
        match read == write && write == enospc {
            true => read.fmt(f),
            false => write!(f, "read={read},write={write},enospc={enospc}"),
        }
    }
}

impl FromStr for OnError {
    type Err = String;

    /// Parses one action for all errors, or a list of `read=`, `write=` and `enospc=`. Without `enospc` a full
    /// disk is treated as any other failed write. Other kinds that are left out are reported.
    fn from_str(text: &str) -> Result<OnError, String> {
        if !text.contains('=') {
            let all = text.parse()?;
            return Ok(OnError {
                read: all,
                write: all,
                enospc: all,
            });
        }
        let (mut read, mut write, mut enospc) = (None, None, None);
        for part in text.split(',') {
            let (name, action) = part.split_once('=').unwrap_or((part, ""));
            let place = match name {
                "read" => &mut read,
                "write" => &mut write,
                "enospc" => &mut enospc,
                _ => {
                    return Err(format!(
                        "{:?} begins with none of read=, write= and enospc=",
                        shortened(part)
                    ));
                }
            };
            if place.replace(action.parse()?).is_some() {
                return Err(format!("{name}= is given twice"));
            }
        }
        let write = write.unwrap_or_default();
        Ok(OnError {
            read: read.unwrap_or_default(),
            write,
            enospc: enospc.unwrap_or(write),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn retry(seconds: u32, hold: bool) -> ErrorAction {
        ErrorAction::Retry { seconds, hold }
    }

    #[test]
    fn policies_parse_as_documented() {
        use ErrorAction::{Hold, Report};
        let rows = [
            ("report", [Report, Report, Report]),
            ("hold", [Hold, Hold, Hold]),
            ("retry", [retry(30, false); 3]),
            ("retry:5", [retry(5, false); 3]),
            ("retry:5:hold", [retry(5, true); 3]),
            ("retry:hold", [retry(30, true); 3]),
            ("retry:86400", [retry(86_400, false); 3]),
            ("read=hold", [Hold, Report, Report]),
            ("write=hold", [Report, Hold, Hold]),
            ("enospc=hold", [Report, Report, Hold]),
            ("enospc=report,write=hold", [Report, Hold, Report]),
            (
                "read=report,write=hold,enospc=retry:30",
                [Report, Hold, retry(30, false)],
            ),
        ];
        for (text, [read, write, enospc]) in rows {
            let expected = OnError {
                read,
                write,
                enospc,
            };
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn invalid_policies_are_named_in_the_error() {
        let rows = [
            ("", "none of report"),
            ("stop", "\"stop\""),
            ("Hold", "\"Hold\""),
            ("hold:", "\"hold:\""),
            ("hold:3", "\"hold:3\""),
            ("report:hold", "\"report:hold\""),
            ("retry:", "\"retry:\""),
            ("retry::hold", "none of"),
            ("retry:1:hold:", "none of"),
            ("retry:hold:1", "none of"),
            ("retry:0", "1 to 86400"),
            ("retry:86401", "1 to 86400"),
            ("retry:99999999999999999999", "1 to 86400"),
            ("retry:-1", "none of"),
            ("retry:+1", "none of"),
            ("retry:1.5", "none of"),
            ("retry:1:report", "none of"),
            ("retry:1hold", "none of"),
            ("retryhold", "none of"),
            ("retry:30,hold", "none of"),
            ("read", "none of"),
            ("read=", "none of"),
            ("read=hold,", "begins with none"),
            ("hold,read=report", "\"hold\" begins with none"),
            ("read=hold,read=hold", "read= is given twice"),
            ("flush=hold", "\"flush=hold\" begins with none"),
            ("write=hold=hold", "\"hold=hold\""),
            (" hold", "none of"),
        ];
        for (text, part) in rows {
            let why = text.parse::<OnError>().unwrap_err();
            assert!(why.contains(part), "{text:?}: {why}");
        }
        let long = "é".repeat(100_000).parse::<OnError>().unwrap_err();
        assert!(long.lines().count() == 1 && long.len() < 200, "{long}");
    }

    fn action() -> impl Strategy<Value = ErrorAction> {
        prop_oneof![
            Just(ErrorAction::Report),
            Just(ErrorAction::Hold),
            (
                ErrorAction::SECONDS_MIN..=ErrorAction::SECONDS_MAX,
                any::<bool>()
            )
                .prop_map(|(seconds, hold)| retry(seconds, hold)),
        ]
    }

    proptest! {
        #[test]
        fn a_policy_parses_as_it_is_displayed(read in action(), write in action(), enospc in action()) {
            let policy = OnError { read, write, enospc };
            prop_assert_eq!(policy.to_string().parse(), Ok(policy));
        }
    }

    #[test]
    fn only_errors_of_the_disk_are_not_reported_and_a_flush_is_repeated_only_if_it_was_not_sent() {
        let policy: OnError = "read=retry:1,write=retry:2,enospc=retry:3".parse().unwrap();
        let [read, write, enospc] = [1, 2, 3].map(|seconds| retry(seconds, false));
        let zeroes = Verb::WriteZeroes { unmap: true };
        let writes = [Verb::Write, Verb::Discard, zeroes];
        // EIO, ENODATA, ENOLINK, EREMOTEIO, ETIMEDOUT, ENOTCONN, ESTALE, EROFS.
        for errno in [5, 61, 67, 121, 110, 107, 116, 30] {
            assert_eq!(policy.action(Verb::Read, errno), read, "{errno}");
            for verb in writes {
                assert_eq!(policy.action(verb, errno), write, "{verb:?} {errno}");
            }
        }
        for errno in [28, 122] {
            for verb in writes {
                assert_eq!(policy.action(verb, errno), enospc, "{verb:?} {errno}");
            }
        }
        // EINVAL, EBADF, EFAULT, EOPNOTSUPP, EFBIG, EPERM, and the last that Linux has room for.
        for errno in [22, 9, 14, 95, 27, 1, 4095] {
            for verb in [Verb::Read, Verb::Write] {
                assert_eq!(policy.action(verb, errno), ErrorAction::Report, "{errno}");
            }
        }
        for errno in [5, 28, 110, 122] {
            for verb in [Verb::Flush, Verb::GetId] {
                assert_eq!(policy.action(verb, errno), ErrorAction::Report, "{errno}");
            }
        }
        assert_eq!(policy.action(Verb::Flush, 107), write);
    }
}
