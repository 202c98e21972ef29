//! How a setting changes.

use std::collections::BTreeMap;
use std::fmt;

use cleave_worker::CompletionPolicy;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use crate::given::Given;
use crate::values::labels::Labels;
use crate::values::number::{Number, OrNone};
use crate::values::policy::ErrorPolicy;
use crate::values::split::SplitOption;
use crate::values::text::shown;
use crate::values::words::CompletionOption;

/// A setting that can change while the disk is served.
pub trait Setting: Sized {
    /// The form that the setting has in a change.
    type Change;

    /// Returns the setting after a change.
    fn changed(now: &Given<Self>, change: &Self::Change) -> Result<Given<Self>, String>;
}

/// Settings of which a change names the new value.
macro_rules! replaced {
    ($([$($parameters:tt)*] $type:ty;)*) => {$(
        impl<$($parameters)*> Setting for $type {
            type Change = $type;

            fn changed(_: &Given<$type>, change: &$type) -> Result<Given<$type>, String> {
                Ok(Given::from(change.clone()))
            }
        }
    )*};
}

replaced! {
    [] CompletionOption;
    [] SplitOption;
    [] ErrorPolicy;
    [] Labels;
    [const MIN: u32, const MAX: u32, const DEFAULT: u32] Number<MIN, MAX, DEFAULT>;
}

impl<T: Clone> Setting for OrNone<T> {
    type Change = OrNone<T>;

    fn changed(_: &Given<OrNone<T>>, change: &OrNone<T>) -> Result<Given<OrNone<T>>, String> {
        Ok(match change {
            OrNone(None) => Given::default(),
            some => Given::from(some.clone()),
        })
    }
}

/// Reads a field of a change: null is a value, and of most fields a wrong one.
pub(crate) fn named<'de, D, T>(from: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    T::deserialize(from).map(Some)
}

/// Describes a field of a change by the values that it takes. The type of the field is an option, which says that null is one.
pub(crate) fn as_named<T: JsonSchema>(schema: &mut Schema) {
    let own = T::json_schema(&mut SchemaGenerator::default());
    let about = schema.remove("description");
    *schema = own;
    if let Some(about) = about {
        schema.insert("description".to_owned(), about);
    }
}

/// How single vrings are waited for, by their numbers; `None`: as the others. They are not kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VringModes(BTreeMap<u16, Option<CompletionOption>>);

impl VringModes {
    /// Returns the modes of single vrings after the change, of a disk with so many vrings.
    pub fn applied_to(
        &self,
        now: &BTreeMap<u16, CompletionPolicy>,
        vrings: u16,
    ) -> Result<BTreeMap<u16, CompletionPolicy>, String> {
        let mut next = now.clone();
        for (vring, wait) in &self.0 {
            if *vring >= vrings {
                let last = vrings - 1;
                return Err(format!("vrings.{vring}: the disk has vrings 0 to {last}"));
            }
            match wait {
                Some(wait) => next.insert(*vring, (*wait).into()),
                None => next.remove(vring),
            };
        }
        Ok(next)
    }

    /// Returns true if no vring is named.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for VringModes {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(&self.0)
    }
}

impl<'de> Deserialize<'de> for VringModes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<VringModes, D::Error> {
        struct ModesVisitor;
        impl<'de> Visitor<'de> for ModesVisitor {
            type Value = VringModes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object such as {\"0\": \"poll\"}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<VringModes, A::Error> {
                let mut modes = BTreeMap::new();
                while let Some(index) = map.next_key::<String>()? {
                    let refuse = |why| Error::custom(format!("vrings.{}: {why}", shown(&index)));
                    let number = index.parse::<u16>().ok();
                    // In one spelling: "01" would be another name of "1".
                    let number = number.filter(|number| number.to_string() == index);
                    let number = number.ok_or_else(|| refuse("there is no such vring"))?;
                    if modes.insert(number, map.next_value()?).is_some() {
                        return Err(refuse("is there twice"));
                    }
                }
                Ok(VringModes(modes))
            }
        }
        from.deserialize_map(ModesVisitor)
    }
}

impl JsonSchema for VringModes {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "VringModes".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mode = CompletionOption::json_schema(generator);
        json_schema!({"type": "object", "additionalProperties": {"anyOf": [mode, {"type": "null"}]}})
    }
}
