//! The limits of a disk, as they are written, and a change of them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use cleave_disk::parse_size;
use cleave_worker::RateLimits;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Serialize, Serializer};

use super::text::{Text, shown};
use crate::change::Setting;
use crate::given::Given;
use crate::id::{ID_CHARS_MAX, is_id};

/// The name of the group among the limits.
const GROUP: &str = "group";

/// The limits of a disk, and the group with whose disks it shares them. Zero means no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiskLimits {
    /// The group.
    pub group: Option<String>,
    /// What a second may have.
    pub values: RateLimits,
}

impl DiskLimits {
    /// Returns true if there is neither a limit nor a group.
    pub fn is_empty(&self) -> bool {
        *self == DiskLimits::default()
    }
}

impl fmt::Display for DiskLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.values.fmt(f)
    }
}

/// As the option has them, which has no group.
impl FromStr for DiskLimits {
    type Err = String;

    fn from_str(text: &str) -> Result<DiskLimits, String> {
        let values = text.parse()?;
        Ok(DiskLimits {
            group: None,
            values,
        })
    }
}

impl Text for DiskLimits {
    const EXPECTED: &'static str = "an object such as {\"iops-total\": 5000}";
}

impl Serialize for DiskLimits {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        if let Some(group) = &self.group {
            map.serialize_entry(GROUP, group)?;
        }
        for (name, value) in self.values.settings() {
            map.serialize_entry(&name, &value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for DiskLimits {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<DiskLimits, D::Error> {
        let (group, change) = from.deserialize_map(LimitsVisitor { has_group: true })?;
        let values = change.applied_to(RateLimits::default());
        Ok(DiskLimits {
            group,
            values: values.map_err(Error::custom)?,
        })
    }
}

impl Setting for DiskLimits {
    type Change = LimitChange;

    fn changed(now: &Given<DiskLimits>, change: &LimitChange) -> Result<Given<DiskLimits>, String> {
        let now = now.get();
        let next = DiskLimits {
            values: change.applied_to(now.values)?,
            group: now.group,
        };
        Ok(match next.is_empty() {
            true => Given::default(),
            false => Given::from(next),
        })
    }
}

impl JsonSchema for DiskLimits {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "DiskLimits".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = LimitChange::json_schema(generator);
        if let Some(properties) = schema
            .get_mut("properties")
            .and_then(|all| all.as_object_mut())
        {
            properties.insert(
                GROUP.to_owned(),
                serde_json::json!({
                    "type": ["string", "null"],
                    "description": "The group of disks that share these limits. It cannot change.",
                }),
            );
        }
        schema
    }
}

/// The limits that are to change; those that it does not name stay. Zero takes one away.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct LimitChange(BTreeMap<String, u64>);

impl LimitChange {
    /// Returns the limits after the change, if they make sense together.
    fn applied_to(&self, mut limits: RateLimits) -> Result<RateLimits, String> {
        for (name, value) in &self.0 {
            limits.set(name, *value)?;
        }
        limits.check().map(|()| limits)
    }

    /// Adds a limit. Returns an error if there is none of this name, or if it is there already.
    fn add(&mut self, name: &str, value: u64) -> Result<(), String> {
        RateLimits::default().set(name, value)?;
        match self.0.insert(name.to_owned(), value) {
            Some(_) => Err(format!("{name} is there twice")),
            None => Ok(()),
        }
    }
}

/// `iops-total=5000,bps-write=100M`, or `none`, which takes all limits away.
impl FromStr for LimitChange {
    type Err = String;

    fn from_str(text: &str) -> Result<LimitChange, String> {
        let mut change = LimitChange::default();
        if text == "none" {
            change.0.extend(RateLimits::names().map(|name| (name, 0)));
            return Ok(change);
        }
        for part in text.split(',') {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            // An unknown name is the more helpful complaint.
            RateLimits::default().set(name, 0)?;
            let value = parse_size(value).map_err(|_| {
                format!("{name} takes a whole number, followed by K, M, G or T if need be")
            })?;
            change.add(name, value)?;
        }
        Ok(change)
    }
}

impl fmt::Display for LimitChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = self.0.iter().map(|(name, value)| format!("{name}={value}"));
        f.write_str(&each.collect::<Vec<_>>().join(","))
    }
}

impl<'de> Deserialize<'de> for LimitChange {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<LimitChange, D::Error> {
        let (_, change) = from.deserialize_map(LimitsVisitor { has_group: false })?;
        Ok(change)
    }
}

impl JsonSchema for LimitChange {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "LimitChange".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let value =
            serde_json::json!({"type": "integer", "minimum": 0, "maximum": RateLimits::VALUE_MAX});
        let properties: serde_json::Map<_, _> = RateLimits::names()
            .map(|name| (name, value.clone()))
            .collect();
        json_schema!({"type": "object", "properties": properties, "additionalProperties": false})
    }
}

/// Reads limits by their names. A map would keep only the last of two of one name.
struct LimitsVisitor {
    has_group: bool,
}

impl<'de> Visitor<'de> for LimitsVisitor {
    type Value = (Option<String>, LimitChange);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(DiskLimits::EXPECTED)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut group, mut change) = (None, LimitChange::default());
        while let Some(name) = map.next_key::<String>()? {
            if name == GROUP {
                group = map.next_value_seed(GroupName(self.has_group))?;
                continue;
            }
            RateLimits::default().set(&name, 0).map_err(Error::custom)?;
            let LimitValue(value) = map.next_value()?;
            change.add(&name, value).map_err(Error::custom)?;
        }
        Ok((group, change))
    }
}

/// Reads the name of a group, or refuses one where it cannot change.
struct GroupName(bool);

impl<'de> DeserializeSeed<'de> for GroupName {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Option<String>, D::Error> {
        let name = Option::<String>::deserialize(from)?;
        if !self.0 {
            return Err(Error::custom(
                "a disk stays in its group: delete it, and add it to another",
            ));
        }
        match name {
            Some(name) if !is_id(&name) => Err(Error::custom(format!(
                "{:?}: take 1 to {ID_CHARS_MAX} letters, digits and _.- that begin with a letter or a digit",
                shown(&name)
            ))),
            name => Ok(name),
        }
    }
}

/// The value of a limit.
struct LimitValue(u64);

impl<'de> Deserialize<'de> for LimitValue {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<LimitValue, D::Error> {
        struct ValueVisitor;
        impl Visitor<'_> for ValueVisitor {
            type Value = LimitValue;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number of 0 or more")
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<LimitValue, E> {
                Ok(LimitValue(value))
            }

            // All numbers of TOML have a sign.
            fn visit_i64<E: Error>(self, value: i64) -> Result<LimitValue, E> {
                let unexpected = serde::de::Unexpected::Signed(value);
                let value = u64::try_from(value).map(LimitValue);
                value.map_err(|_| E::invalid_value(unexpected, &self))
            }
        }
        from.deserialize_u64(ValueVisitor)
    }
}
