//! The permissions of a socket.

use std::fmt;
use std::str::FromStr;

use super::text::{Text, shown};

/// Permissions, written in octal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketMode(u32);

impl SocketMode {
    /// Returns the bits.
    pub const fn bits(self) -> u32 {
        self.0
    }
}

impl Default for SocketMode {
    fn default() -> SocketMode {
        SocketMode(0o660)
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl FromStr for SocketMode {
    type Err = String;

    fn from_str(text: &str) -> Result<SocketMode, String> {
        // The parser of numbers takes a sign.
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        let mode = digits.then(|| u32::from_str_radix(text, 8).ok()).flatten();
        mode.filter(|mode| *mode <= 0o777)
            .map(SocketMode)
            .ok_or_else(|| format!("{:?} is not an octal mode such as \"0660\"", shown(text)))
    }
}

impl Text for SocketMode {
    const EXPECTED: &'static str = "an octal mode as a text, such as \"0660\"";
}

as_text!([] SocketMode);

described!([] SocketMode, "SocketMode", {"type": "string", "pattern": "^[0-7]{1,4}$"});
