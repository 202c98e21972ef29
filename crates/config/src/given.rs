//! A setting that may be left out, and then has its default.

use std::marker::PhantomData;

use clap::builder::{PossibleValue, TypedValueParser, ValueParserFactory};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::values::text::Text;

/// A setting, or nothing if it was left out. Two are equal if they mean the same: the default that was written is the default that
/// was left out.
#[derive(Debug, Clone, Copy)]
pub struct Given<T>(Option<T>);

impl<T> Given<T> {
    /// Returns the value, if one was written.
    pub fn written(&self) -> Option<&T> {
        self.0.as_ref()
    }
}

impl<T: Clone + Default> Given<T> {
    /// Returns the value that was written, or the default.
    pub fn get(&self) -> T {
        self.0.clone().unwrap_or_default()
    }
}

impl<T> Default for Given<T> {
    fn default() -> Given<T> {
        Given(None)
    }
}

impl<T> From<T> for Given<T> {
    fn from(value: T) -> Given<T> {
        Given(Some(value))
    }
}

impl<T: Clone + Default + PartialEq> PartialEq for Given<T> {
    fn eq(&self, other: &Given<T>) -> bool {
        self.get() == other.get()
    }
}

impl<T: Clone + Default + Eq> Eq for Given<T> {}

impl<T: Clone + Default + std::fmt::Display> std::fmt::Display for Given<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.get().fmt(f)
    }
}

impl<T: Serialize> Serialize for Given<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(to)
    }
}

/// Null is a setting that is left out.
impl<'de, T: Deserialize<'de>> Deserialize<'de> for Given<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Given<T>, D::Error> {
        Option::deserialize(from).map(Given)
    }
}

impl<T: JsonSchema + Default + Serialize> JsonSchema for Given<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        T::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = T::json_schema(generator);
        if let Ok(default) = serde_json::to_value(T::default())
            && !default.is_null()
            && default != serde_json::json!({})
        {
            schema.insert("default".to_owned(), default);
        }
        schema
    }
}

/// Takes the text of a setting on a command line.
#[derive(Debug, Clone)]
pub struct GivenParser<T>(PhantomData<T>);

impl<T: Text + Clone + Send + Sync + 'static> ValueParserFactory for Given<T> {
    type Parser = GivenParser<T>;

    fn value_parser() -> GivenParser<T> {
        GivenParser(PhantomData)
    }
}

impl<T: Text + Clone + Send + Sync + 'static> TypedValueParser for GivenParser<T> {
    type Value = Given<T>;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        text: &std::ffi::OsStr,
    ) -> Result<Given<T>, clap::Error> {
        let parse = |text: &str| text.parse::<T>().map(Given::from);
        parse.parse_ref(command, arg, text)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let words = T::words();
        (!words.is_empty()).then(|| Box::new(words.into_iter()) as Box<_>)
    }
}

/// Returns what stands on a command line, without the defaults that the parser has filled in. With it, `update_from_arg_matches`
/// changes those fields of a description that were given.
pub fn given_only(matches: &ArgMatches) -> ArgMatches {
    let mut given = matches.clone();
    for id in matches.ids() {
        // Groups of options have ids too, the names of their types, and no values.
        let is_option = !id.as_str().starts_with(char::is_uppercase);
        if is_option && matches.value_source(id.as_str()) != Some(ValueSource::CommandLine) {
            let _ = given.try_clear_id(id.as_str());
        }
    }
    given
}

/// Reads a truth; null is false.
pub(crate) fn flag<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

/// A field that a file need not have.
pub(crate) trait LeftOut {
    /// Returns true if the field says nothing.
    fn is_left_out(&self) -> bool;
}

impl<T> LeftOut for Given<T> {
    fn is_left_out(&self) -> bool {
        self.0.is_none()
    }
}

impl<T> LeftOut for Option<T> {
    fn is_left_out(&self) -> bool {
        self.is_none()
    }
}

impl<T> LeftOut for Vec<T> {
    fn is_left_out(&self) -> bool {
        self.is_empty()
    }
}

impl LeftOut for bool {
    fn is_left_out(&self) -> bool {
        !self
    }
}
