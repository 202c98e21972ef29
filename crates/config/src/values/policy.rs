//! The policy for requests that the disk fails, as it is written.

use std::fmt;
use std::str::FromStr;

use cleave_worker::{ErrorAction, OnError};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::text::Text;

/// A policy for each kind of error. Written as a text such as `write=hold`, or as a table with a policy for each kind. It is kept as
/// it was written; two are equal if they mean the same.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ErrorPolicy {
    #[serde(skip_serializing_if = "Option::is_none")]
    read: Option<KindPolicy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    write: Option<KindPolicy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    enospc: Option<KindPolicy>,
}

/// The policy for one kind of error.
#[derive(Debug, Clone, Copy)]
struct KindPolicy(ErrorAction);

impl FromStr for KindPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<KindPolicy, String> {
        text.parse().map(KindPolicy)
    }
}

impl fmt::Display for KindPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Text for KindPolicy {
    const EXPECTED: &'static str = "a policy such as \"hold\"";
}

as_text!([] KindPolicy);

impl ErrorPolicy {
    /// Returns the policy. A kind that is left out is reported, except that a full disk is treated as any other failed write.
    pub fn policy(&self) -> OnError {
        let action = |kind: Option<KindPolicy>| kind.map(|kind| kind.0);
        let write = action(self.write).unwrap_or_default();
        OnError {
            read: action(self.read).unwrap_or_default(),
            write,
            enospc: action(self.enospc).unwrap_or(write),
        }
    }
}

impl PartialEq for ErrorPolicy {
    fn eq(&self, other: &ErrorPolicy) -> bool {
        self.policy() == other.policy()
    }
}

impl Eq for ErrorPolicy {}

impl fmt::Display for ErrorPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.policy().fmt(f)
    }
}

impl FromStr for ErrorPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<ErrorPolicy, String> {
        let policy: OnError = text.parse()?;
        // A text without kinds is for all of them.
        let is_written =
            |kind: &str| !text.contains('=') || text.split(',').any(|part| part.starts_with(kind));
        let kind = |name, action| is_written(name).then_some(KindPolicy(action));
        Ok(ErrorPolicy {
            read: kind("read=", policy.read),
            write: kind("write=", policy.write),
            enospc: kind("enospc=", policy.enospc),
        })
    }
}

impl Text for ErrorPolicy {
    const EXPECTED: &'static str =
        "a policy such as \"write=hold\", or an object such as {\"write\": \"hold\"}";
}

impl<'de> Deserialize<'de> for ErrorPolicy {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<ErrorPolicy, D::Error> {
        from.deserialize_any(PolicyVisitor)
    }
}

struct PolicyVisitor;

impl<'de> Visitor<'de> for PolicyVisitor {
    type Value = ErrorPolicy;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(ErrorPolicy::EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<ErrorPolicy, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ErrorPolicy, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Kinds {
            read: Option<KindPolicy>,
            write: Option<KindPolicy>,
            enospc: Option<KindPolicy>,
        }
        let kinds = Kinds::deserialize(MapAccessDeserializer::new(map))?;
        Ok(ErrorPolicy {
            read: kinds.read,
            write: kinds.write,
            enospc: kinds.enospc,
        })
    }
}

impl JsonSchema for ErrorPolicy {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ErrorPolicy".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let kind = |about: &str| json_schema!({"type": ["string", "null"], "description": about});
        json_schema!({"anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "properties": {
                    "read": kind("The policy for reads that fail."),
                    "write": kind("The policy for writes, discards and write-zeroes that fail."),
                    "enospc": kind("The policy for a full disk or quota. Without it the policy for writes applies."),
                },
                "additionalProperties": false,
            },
        ]})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_json(text: &str) -> ErrorPolicy {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_policy_is_kept_as_it_was_written_and_compared_by_meaning() {
        for (written, shown) in [
            (
                r#""hold""#,
                r#"{"read":"hold","write":"hold","enospc":"hold"}"#,
            ),
            (
                r#""read=retry:5,write=hold""#,
                r#"{"read":"retry:5","write":"hold"}"#,
            ),
            (r#"{"write": "hold"}"#, r#"{"write":"hold"}"#),
            (r#"{"read": null}"#, "{}"),
        ] {
            let policy = from_json(written);
            assert_eq!(serde_json::to_string(&policy).unwrap(), shown);
            assert_eq!(from_json(shown), policy);
        }
        for [one, other] in [
            [r#""write=hold""#, r#"{"enospc": "hold", "write": "hold"}"#],
            [r#""retry""#, r#""retry:30""#],
            ["{}", r#""report""#],
        ] {
            assert_eq!(from_json(one), from_json(other));
        }
        assert_ne!(from_json(r#""write=hold""#), from_json(r#""hold""#));
    }
}
