//! Labels of a disk: what its owner notes about it, to find it again.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

use super::text::{Text, shown};

/// Most labels, and most bytes of a name and of a value.
const LABELS_MAX: usize = 32;
const NAME_BYTES_MAX: usize = 63;
const VALUE_BYTES_MAX: usize = 255;

/// Names with values. The disk is served in the same way whatever they are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Labels(BTreeMap<String, String>);

impl Labels {
    /// Returns true if a label of this name has this value.
    pub fn has(&self, name: &str, value: &str) -> bool {
        self.0.get(name).is_some_and(|is| is == value)
    }

    fn checked(labels: BTreeMap<String, String>) -> Result<Labels, String> {
        if labels.len() > LABELS_MAX {
            return Err(format!(
                "{} labels are too many: a disk has at most {LABELS_MAX}",
                labels.len()
            ));
        }
        for (name, value) in &labels {
            let is_good = |c: char| c.is_ascii_alphanumeric() || "_.-/".contains(c);
            if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(is_good) {
                return Err(format!(
                    "{:?} is not the name of a label: take 1 to {NAME_BYTES_MAX} letters, digits and _.-/",
                    shown(name)
                ));
            }
            if value.len() > VALUE_BYTES_MAX || value.chars().any(char::is_control) {
                return Err(format!(
                    "{name}: the value of a label has at most {VALUE_BYTES_MAX} bytes, and no control characters"
                ));
            }
        }
        Ok(Labels(labels))
    }
}

impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = self.0.iter().map(|(name, value)| format!("{name}={value}"));
        f.write_str(&each.collect::<Vec<_>>().join(","))
    }
}

/// `owner=web,zone=b`. A value that has a comma can be written in a file or a request alone.
impl FromStr for Labels {
    type Err = String;

    fn from_str(text: &str) -> Result<Labels, String> {
        let mut labels = BTreeMap::new();
        for label in text.split(',').filter(|label| !label.is_empty()) {
            let (name, value) = label
                .split_once('=')
                .ok_or_else(|| format!("{:?} has no value: write NAME=VALUE", shown(label)))?;
            if labels.insert(name.to_owned(), value.to_owned()).is_some() {
                return Err(format!("{name} is there twice"));
            }
        }
        Labels::checked(labels)
    }
}

impl Text for Labels {
    const EXPECTED: &'static str = "an object such as {\"owner\": \"web\"}";
}

impl<'de> Deserialize<'de> for Labels {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Labels, D::Error> {
        Labels::checked(BTreeMap::deserialize(from)?).map_err(D::Error::custom)
    }
}

impl JsonSchema for Labels {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Labels".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "additionalProperties": {"type": "string", "maxLength": VALUE_BYTES_MAX},
            "maxProperties": LABELS_MAX,
        })
    }
}
