//! Whole numbers within bounds.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::text::{Text, shown};

/// Reads a type as a number or its text, and writes it as a number. In brackets: its generic parameters.
macro_rules! as_number {
    ([$($parameters:tt)*] $type:ty) => {
        impl<$($parameters)*> Text for $type {
            const EXPECTED: &'static str = "a whole number";
            const TAKES_NUMBERS: bool = true;
        }

        impl<'de, $($parameters)*> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                super::text::read(from)
            }
        }

        impl<$($parameters)*> Serialize for $type {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                self.0.serialize(to)
            }
        }
    };
}

/// A whole number from `MIN` to `MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Number<const MIN: u32, const MAX: u32, const DEFAULT: u32 = MIN>(u32);

impl<const MIN: u32, const MAX: u32, const DEFAULT: u32> Number<MIN, MAX, DEFAULT> {
    /// Returns the number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl<const MIN: u32, const MAX: u32, const DEFAULT: u32> Default for Number<MIN, MAX, DEFAULT> {
    fn default() -> Self {
        const { assert!(MIN <= DEFAULT && DEFAULT <= MAX) };
        Number(DEFAULT)
    }
}

impl<const MIN: u32, const MAX: u32, const DEFAULT: u32> fmt::Display
    for Number<MIN, MAX, DEFAULT>
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<const MIN: u32, const MAX: u32, const DEFAULT: u32> FromStr for Number<MIN, MAX, DEFAULT> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = digits(text)?;
        number
            .filter(|number| (MIN..=MAX).contains(number))
            .map(Number)
            .ok_or_else(|| format!("{} is not a whole number from {MIN} to {MAX}", shown(text)))
    }
}

/// Returns the number that a text of digits is; `None`: one that is too large, or below zero.
fn digits(text: &str) -> Result<Option<u32>, String> {
    let unsigned = text.strip_prefix('-').unwrap_or(text);
    // The parser of numbers takes a sign.
    if unsigned.is_empty() || !unsigned.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("write a whole number, without sign or unit".to_owned());
    }
    Ok(text.parse().ok())
}

as_number!([const MIN: u32, const MAX: u32, const DEFAULT: u32] Number<MIN, MAX, DEFAULT>);

described!([const MIN: u32, const MAX: u32, const DEFAULT: u32] Number<MIN, MAX, DEFAULT>, "Number",
    {"type": "integer", "minimum": MIN, "maximum": MAX});

/// Entries of a vring: two are the header and the status of a request, and one with less than four carries no data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSize(u16);

impl QueueSize {
    const MIN: u16 = 4;
    const MAX: u16 = 32_768;

    /// Returns the number of entries.
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl Default for QueueSize {
    fn default() -> QueueSize {
        QueueSize(1024)
    }
}

impl fmt::Display for QueueSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for QueueSize {
    type Err = String;

    fn from_str(text: &str) -> Result<QueueSize, String> {
        let size = digits(text)?.and_then(|size| u16::try_from(size).ok());
        let bounds = QueueSize::MIN..=QueueSize::MAX;
        size.filter(|size| size.is_power_of_two() && bounds.contains(size))
            .map(QueueSize)
            .ok_or_else(|| {
                let (min, max) = (QueueSize::MIN, QueueSize::MAX);
                format!("a vring has a power of two of entries, from {min} to {max}")
            })
    }
}

as_number!([] QueueSize);

described!([] QueueSize, "QueueSize",
    {"type": "integer", "minimum": QueueSize::MIN, "maximum": QueueSize::MAX});

/// A value, or none: `none` as a text, null in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrNone<T>(pub Option<T>);

impl<T> Default for OrNone<T> {
    fn default() -> OrNone<T> {
        OrNone(None)
    }
}

impl<T: fmt::Display> fmt::Display for OrNone<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("none"),
        }
    }
}

impl<T: FromStr<Err = String>> FromStr for OrNone<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<OrNone<T>, String> {
        match text {
            "none" => Ok(OrNone(None)),
            text => text.parse().map(|value| OrNone(Some(value))),
        }
    }
}

impl<T: Text> Text for OrNone<T> {
    const EXPECTED: &'static str = T::EXPECTED;
    const TAKES_NUMBERS: bool = T::TAKES_NUMBERS;
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OrNone<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<OrNone<T>, D::Error> {
        Option::deserialize(from).map(OrNone)
    }
}

impl<T: Serialize> Serialize for OrNone<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(to)
    }
}

impl<T: schemars::JsonSchema> schemars::JsonSchema for OrNone<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        Option::<T>::schema_name()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        Option::<T>::json_schema(generator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_within_its_bounds_or_refused_with_them() {
        type Few = Number<1, 256, 64>;
        assert_eq!("256".parse::<Few>().map(Few::get), Ok(256));
        assert_eq!(Few::default().to_string(), "64");
        for text in ["0", "257", "-1", "99999999999999999999999"] {
            let why = text.parse::<Few>().unwrap_err();
            assert_eq!(why, format!("{text} is not a whole number from 1 to 256"));
        }
        for text in ["", "+5", "x", "10%", "4K", "2.5", " 5"] {
            let why = text.parse::<Few>().unwrap_err();
            assert_eq!(why, "write a whole number, without sign or unit", "{text}");
        }
    }

    #[test]
    fn a_vring_has_a_power_of_two_of_entries() {
        for (text, size) in [
            ("4", Some(4)),
            ("32768", Some(32_768)),
            ("2", None),
            ("3", None),
            ("65536", None),
        ] {
            assert_eq!(
                text.parse::<QueueSize>().ok().map(QueueSize::get),
                size,
                "{text}"
            );
        }
    }
}
