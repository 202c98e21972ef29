//! Values that have one text, wherever they are written.

use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::str::FromStr;

use clap::builder::PossibleValue;
use serde::de::{Deserializer, Error, Visitor};

/// Most characters of a text that a message repeats.
const SHOWN_CHARS_MAX: usize = 40;

/// A value that is written as a text: on a command line, in a file, and in the body of a request.
pub trait Text: FromStr<Err = String> + Display {
    /// The kind of value, to complete "expected …".
    const EXPECTED: &'static str;
    /// True if a number stands for the text of its digits.
    const TAKES_NUMBERS: bool = false;

    /// Returns all texts, if they are few.
    fn words() -> Vec<PossibleValue> {
        Vec::new()
    }
}

/// Reads a value as its text, or as the number that stands for it.
pub(crate) fn read<'de, T: Text, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    from.deserialize_any(TextVisitor(PhantomData))
}

struct TextVisitor<T>(PhantomData<T>);

impl<T: Text> Visitor<'_> for TextVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        match T::TAKES_NUMBERS {
            true => self.visit_str(&number.to_string()),
            false => Err(E::invalid_type(
                serde::de::Unexpected::Unsigned(number),
                &self,
            )),
        }
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        match T::TAKES_NUMBERS {
            true => self.visit_str(&number.to_string()),
            false => Err(E::invalid_type(
                serde::de::Unexpected::Signed(number),
                &self,
            )),
        }
    }
}

/// Returns enough of a text to recognise it in a message.
pub(crate) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// Reads and writes a type as its text. In brackets: its generic parameters.
macro_rules! as_text {
    ([$($parameters:tt)*] $type:ty) => {
        impl<'de, $($parameters)*> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                $crate::values::text::read(from)
            }
        }

        impl<$($parameters)*> serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }
    };
}

/// Describes a type in the OpenAPI document by this schema, in place.
macro_rules! described {
    ([$($parameters:tt)*] $type:ty, $name:literal, $($schema:tt)*) => {
        impl<$($parameters)*> schemars::JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                $name.into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!($($schema)*)
            }
        }
    };
}
