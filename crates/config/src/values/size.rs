//! Sizes that are powers of two.

use std::fmt;
use std::str::FromStr;

use cleave_disk::{format_size, parse_size};

use super::text::{Text, shown};

/// Bytes: a power of two from `MIN` to `MAX`. Written `64K`, or as a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size<const MIN: u32, const MAX: u32>(u32);

impl<const MIN: u32, const MAX: u32> Size<MIN, MAX> {
    /// Returns the bytes.
    pub const fn bytes(self) -> u32 {
        self.0
    }
}

/// The smallest one.
impl<const MIN: u32, const MAX: u32> Default for Size<MIN, MAX> {
    fn default() -> Size<MIN, MAX> {
        Size(MIN)
    }
}

impl<const MIN: u32, const MAX: u32> fmt::Display for Size<MIN, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_size(self.0.into()))
    }
}

impl<const MIN: u32, const MAX: u32> FromStr for Size<MIN, MAX> {
    type Err = String;

    fn from_str(text: &str) -> Result<Size<MIN, MAX>, String> {
        let bytes = u32::try_from(parse_size(text)?).ok();
        bytes
            .filter(|bytes| bytes.is_power_of_two() && (MIN..=MAX).contains(bytes))
            .map(Size)
            .ok_or_else(|| {
                let [min, max] = [MIN, MAX].map(|bytes| format_size(bytes.into()));
                format!("{} is not a power of two from {min} to {max}", shown(text))
            })
    }
}

impl<const MIN: u32, const MAX: u32> Text for Size<MIN, MAX> {
    const EXPECTED: &'static str = "a size such as \"64K\"";
    const TAKES_NUMBERS: bool = true;
}

as_text!([const MIN: u32, const MAX: u32] Size<MIN, MAX>);

described!([const MIN: u32, const MAX: u32] Size<MIN, MAX>, "Size",
    {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": MIN, "maximum": MAX}]});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_a_power_of_two_within_its_bounds() {
        type Block = Size<512, 65_536>;
        for (text, bytes) in [("512", 512), ("4k", 4096), ("64K", 65_536), ("4096", 4096)] {
            assert_eq!(text.parse::<Block>().map(Block::bytes), Ok(bytes));
        }
        for text in ["0", "256", "1000", "128K", "5G"] {
            let why = text.parse::<Block>().unwrap_err();
            assert!(
                why.ends_with("is not a power of two from 512 to 64K"),
                "{why}"
            );
        }
        assert!("x".parse::<Block>().is_err());
    }
}
