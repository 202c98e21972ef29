//! How large requests are split.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use cleave_disk::{format_size, parse_size};
use cleave_worker::splitter::{CHUNK_MAX_BYTES, CHUNK_MIN_BYTES};

use super::text::Text;

/// How large requests are split.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SplitOption {
    /// They are not.
    Off,
    /// They are split if that pays.
    #[default]
    Auto,
    /// They are split into pieces of so many bytes.
    Fixed(NonZeroU32),
}

impl FromStr for SplitOption {
    type Err = String;

    fn from_str(text: &str) -> Result<SplitOption, String> {
        match text {
            "off" => return Ok(SplitOption::Off),
            "auto" => return Ok(SplitOption::Auto),
            _ => {}
        }
        let bytes = parse_size(text).map_err(|why| format!("write off, auto or a size ({why})"))?;
        u32::try_from(bytes)
            .ok()
            .filter(|bytes| bytes.is_power_of_two())
            .filter(|bytes| (CHUNK_MIN_BYTES..=CHUNK_MAX_BYTES).contains(bytes))
            .and_then(NonZeroU32::new)
            .map(SplitOption::Fixed)
            .ok_or_else(|| "a piece is a power of two from 4K to 4M".to_owned())
    }
}

impl fmt::Display for SplitOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SplitOption::Off => f.write_str("off"),
            SplitOption::Auto => f.write_str("auto"),
            SplitOption::Fixed(bytes) => f.write_str(&format_size(bytes.get().into())),
        }
    }
}

impl Text for SplitOption {
    const EXPECTED: &'static str = "\"off\", \"auto\" or a size such as \"64K\"";
    const TAKES_NUMBERS: bool = true;
}

as_text!([] SplitOption);

described!([] SplitOption, "SplitOption", {"anyOf": [{"type": "string"}, {"type": "integer"}]});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_read_as_written() {
        for (text, chunk) in [
            ("4K", 4 << 10),
            ("64k", 64 << 10),
            ("4M", 4 << 20),
            ("8192", 8192),
        ] {
            let fixed = SplitOption::Fixed(NonZeroU32::new(chunk).unwrap());
            assert_eq!(text.parse(), Ok(fixed));
            assert_eq!(fixed.to_string().parse(), Ok(fixed));
        }
        for text in ["", "on", "0", "2K", "6K", "8M", "4T", "-4K", "OFF"] {
            let why = text.parse::<SplitOption>().unwrap_err();
            assert!(!why.contains('\n') && why.len() < 120, "{why}");
        }
    }
}
