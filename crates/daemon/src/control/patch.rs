//! `PATCH /v1/disks/{id}`: a change of how the disk is served. All of it or nothing.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU32;

use cleave_disk::Disk;
use cleave_worker::{Coalesce, Completion, Limits, Split, Tuning};
use serde::Deserialize;
use serde::de::{MapAccess, Visitor};
use serde_json::Value;

use crate::pacing::{
    COALESCE_MAX_MAX, COALESCE_US_MAX, SPIN_MAX, SPIN_RATE_MAX, SPIN_WORTH_MAX, check_coalescing,
};
use crate::split::{SplitOption, check_chunk};

/// The fields of a change.
pub(crate) const FIELDS: [&str; 11] = [
    "completion",
    "vrings",
    "spin_cpu_max",
    "spin_cpu_total",
    "spin_rate_min",
    "spin_worth",
    "coalesce_us",
    "coalesce_max",
    "split",
    "on_error",
    "limits",
];

/// The fields of a change. Values are checked one by one, so that an error can name the field.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    #[serde(default, deserialize_with = "even_null")]
    completion: Option<Value>,
    #[serde(default, deserialize_with = "even_null")]
    vrings: Option<Settings>,
    #[serde(default, deserialize_with = "even_null")]
    spin_cpu_max: Option<Value>,
    #[serde(default, deserialize_with = "even_null")]
    spin_cpu_total: Option<Value>,
    #[serde(default, deserialize_with = "even_null")]
    spin_rate_min: Option<Value>,
    #[serde(default, deserialize_with = "even_null")]
    spin_worth: Option<Value>,
    #[serde(default, deserialize_with = "even_null")]
    coalesce_us: Option<Value>,
    #[serde(default, deserialize_with = "even_null")]
    coalesce_max: Option<Value>,
    #[serde(default, deserialize_with = "even_null")]
    split: Option<Value>,
    #[serde(default, deserialize_with = "even_null")]
    on_error: Option<Value>,
    #[serde(default, deserialize_with = "even_null")]
    limits: Option<Settings>,
}

/// Null is a value and not an absence: of most fields a wrong one.
fn even_null<'de, D, T>(from: D) -> Result<Option<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    T::deserialize(from).map(Some)
}

/// The entries of an object, in order. A `Value` would keep only the last of two of one name.
#[derive(Debug)]
struct Settings(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Settings {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Settings, D::Error> {
        struct Each;
        impl<'de> Visitor<'de> for Each {
            type Value = Settings;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object as `vrings` and as `limits`")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Settings, A::Error> {
                let mut each = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    each.push(entry);
                }
                Ok(Settings(each))
            }
        }
        from.deserialize_map(Each)
    }
}

/// The disk to which a change applies.
pub(super) struct Ground<'a> {
    pub(super) disk: &'a Disk,
    /// How many vrings the disk has.
    pub(super) vrings: u16,
    /// The initial state of `auto`.
    pub(super) auto: &'a Split,
}

/// The tuning that follows from one in force and the body of a request, or what is wrong with that.
pub(super) fn apply(body: &[u8], now: &Tuning, ground: &Ground<'_>) -> Result<Tuning, String> {
    // A list would pass for the fields in their order.
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err("the body is no JSON object".to_owned());
    }
    let change: Change =
        serde_json::from_slice(body).map_err(|error| format!("the body: {error}"))?;
    let mut tuning = now.clone();
    if let Some(value) = &change.completion {
        tuning.completion = completion("completion", value)?;
    }
    if let Some(Settings(each)) = &change.vrings {
        let mut named = BTreeSet::new();
        for (index, value) in each {
            if !named.insert(index) {
                return Err(format!("vrings.{}: is there twice", key(index)));
            }
            set_vring(&mut tuning, index, value, ground.vrings)?;
        }
    }
    if let Some(value) = &change.spin_cpu_max {
        tuning.spin_cpu_max = number("spin_cpu_max", value, 0, SPIN_MAX)?;
    }
    if let Some(value) = &change.spin_cpu_total {
        tuning.spin_cpu_total = match value {
            Value::Null => None,
            value => Some(number("spin_cpu_total", value, 1, SPIN_MAX)?),
        };
    }
    if let Some(value) = &change.spin_rate_min {
        tuning.spin_rate_min = number("spin_rate_min", value, 0, SPIN_RATE_MAX)?;
    }
    if let Some(value) = &change.spin_worth {
        tuning.spin_worth = number("spin_worth", value, 0, SPIN_WORTH_MAX)?;
    }
    tuning.coalesce = coalesce(&change, tuning.coalesce)?;
    if let Some(value) = &change.split {
        tuning.split = split(value, ground)?;
    }
    if let Some(value) = &change.on_error {
        tuning.on_error = policy(value)?
            .parse()
            .map_err(|why| format!("on_error: {why}"))?;
    }
    if let Some(Settings(each)) = &change.limits {
        tuning.limits = limits(each, tuning.limits)?;
    }
    Ok(tuning)
}

/// Settings that are not named stay as they are.
fn limits(each: &[(String, Value)], mut limits: Limits) -> Result<Limits, String> {
    let mut named = BTreeSet::new();
    for (name, value) in each {
        if name == "group" {
            return Err(
                "limits.group: a disk stays in its group: delete it, and add it to another"
                    .to_owned(),
            );
        }
        let number = value.as_u64();
        limits
            .set(name, number.unwrap_or(0))
            .map_err(|why| format!("limits: {why}"))?;
        if number.is_none() {
            let (name, value) = (key(name), shown(value));
            return Err(format!(
                "limits.{name}: {value} is no whole number of 0 or more"
            ));
        }
        if !named.insert(name) {
            return Err(format!("limits.{}: is there twice", key(name)));
        }
    }
    limits.check().map_err(|why| format!("limits: {why}"))?;
    Ok(limits)
}

fn coalesce(change: &Change, mut coalesce: Coalesce) -> Result<Coalesce, String> {
    if let Some(value) = &change.coalesce_us {
        coalesce.us = number("coalesce_us", value, 0, COALESCE_US_MAX)?;
    }
    if let Some(value) = &change.coalesce_max {
        coalesce.max = number("coalesce_max", value, 0, COALESCE_MAX_MAX)?;
        check_coalescing(coalesce.us, coalesce.max)
            .map_err(|why| format!("coalesce_max: {why} coalesce_us"))?;
    }
    Ok(coalesce)
}

/// Null: as all the others.
fn set_vring(tuning: &mut Tuning, index: &str, value: &Value, count: u16) -> Result<(), String> {
    let name = format!("vrings.{}", key(index));
    let number = index.parse().ok().filter(|number: &u16| *number < count);
    // In one way of writing: "01" would be another name of "1".
    let number = number.filter(|number| number.to_string() == index);
    let number = number.ok_or(format!("{name}: the disk has vrings 0 to {}", count - 1))?;
    match value {
        Value::Null => tuning.vrings.remove(&number),
        value => tuning.vrings.insert(number, completion(&name, value)?),
    };
    Ok(())
}

fn completion(name: &str, value: &Value) -> Result<Completion, String> {
    match value.as_str() {
        Some("interrupt") => Ok(Completion::Interrupt),
        Some("poll") => Ok(Completion::Poll),
        Some("adaptive") => Ok(Completion::Adaptive),
        _ => Err(format!(
            "{name}: {} is none of \"interrupt\", \"poll\" and \"adaptive\"",
            shown(value)
        )),
    }
}

fn number(name: &str, value: &Value, least: i64, most: i64) -> Result<u32, String> {
    value
        .as_i64()
        .filter(|number| (least..=most).contains(number))
        .and_then(|number| u32::try_from(number).ok())
        .ok_or_else(|| {
            let value = shown(value);
            format!("{name}: {value} is no whole number from {least} to {most}")
        })
}

/// A policy as the option has it, or one for each kind of error as the body of a PUT has it.
fn policy(value: &Value) -> Result<String, String> {
    let Value::Object(kinds) = value else {
        return text("on_error", value).map(str::to_owned);
    };
    let each = kinds
        .iter()
        .map(|(kind, policy)| Ok(format!("{kind}={}", text("on_error", policy)?)));
    Ok(each.collect::<Result<Vec<_>, String>>()?.join(","))
}

fn text<'a>(name: &str, value: &'a Value) -> Result<&'a str, String> {
    let text = value.as_str();
    text.ok_or_else(|| format!("{name}: {} is no text", shown(value)))
}

fn split(value: &Value, ground: &Ground<'_>) -> Result<Split, String> {
    let name_field = |why| format!("split: {why}");
    match text("split", value)?.parse().map_err(name_field)? {
        SplitOption::Off => Ok(Split::Off),
        SplitOption::Auto => Ok(ground.auto.clone()),
        SplitOption::Fixed(chunk) => fixed(chunk, ground.disk).map_err(name_field),
    }
}

fn fixed(chunk: NonZeroU32, disk: &Disk) -> Result<Split, String> {
    check_chunk(chunk, disk)?;
    Ok(Split::Fixed(chunk))
}

/// A vring's index as it was written, in an answer.
fn key(index: &str) -> String {
    shown(&Value::from(index)).trim_matches('"').to_owned()
}

/// A value in an answer: enough of it to be recognised.
fn shown(value: &Value) -> String {
    const SHOWN_MAX: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use cleave_disk::OpenOptions;
    use cleave_worker::Prior;

    use super::*;

    fn disk() -> Disk {
        let options = OpenOptions {
            block_bytes: Some(8192),
            ..OpenOptions::default()
        };
        Disk::open(&"ram:1M".parse().unwrap(), &options).unwrap()
    }

    fn changed(body: &str, now: &Tuning) -> Result<Tuning, String> {
        let disk = disk();
        let auto = Split::Auto(Prior::from_limits(disk.limits()));
        let ground = Ground {
            disk: &disk,
            vrings: 4,
            auto: &auto,
        };
        apply(body.as_bytes(), now, &ground)
    }

    #[test]
    fn the_fields_are_listed() {
        let unknown = serde_json::from_str::<Change>(r#"{"colour": 1}"#).unwrap_err();
        let quoted = FIELDS.map(|field| format!("`{field}`")).join(", ");
        let told = unknown.to_string();
        assert!(
            told.contains(&format!("expected one of {quoted} at")),
            "{told}"
        );
    }

    #[test]
    fn what_is_said_changes_and_the_rest_stays() {
        let start = Tuning::new(Split::Off);
        let chunk = NonZeroU32::new(65536).unwrap();
        let mut expected = start.clone();
        assert_eq!(changed("{}", &start).unwrap(), expected);
        let body = r#" {"completion": "poll", "vrings": {"3": "interrupt"}, "split": "64K"}"#;
        expected.completion = Completion::Poll;
        expected.vrings.insert(3, Completion::Interrupt);
        expected.split = Split::Fixed(chunk);
        let now = changed(body, &start).unwrap();
        assert_eq!(now, expected);
        let body = r#"{"spin_cpu_max": 0, "spin_cpu_total": 150, "spin_rate_min": 0, "spin_worth": 8, "coalesce_us": 50, "coalesce_max": 8}"#;
        (expected.spin_cpu_max, expected.spin_cpu_total) = (0, Some(150));
        (expected.spin_rate_min, expected.spin_worth) = (0, 8);
        expected.coalesce = Coalesce { us: 50, max: 8 };
        let now = changed(body, &now).unwrap();
        assert_eq!(now, expected);
        let body = r#"{"on_error": {"write": "hold", "read": "retry:5"}}"#;
        expected.on_error = "read=retry:5,write=hold,enospc=hold".parse().unwrap();
        let now = changed(body, &now).unwrap();
        assert_eq!(now, expected);
        let body = r#"{"spin_cpu_total": null, "vrings": {"3": null, "2": null}, "split": "auto"}"#;
        let now = changed(body, &now).unwrap();
        assert_eq!((now.spin_cpu_total, now.vrings.len()), (None, 0));
        assert!(matches!(now.split, Split::Auto(_)));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let rows = [
            ("", "JSON"),
            ("[]", "JSON"),
            ("\"poll\"", "JSON"),
            ("{", "body"),
            ("{\"completion\": \"poll\"", "body"),
            ("{\"completion\": \"poll\"} x", "body"),
            (r#"{"complete": "poll"}"#, "`complete`"),
            (
                r#"{"completion": "poll", "completion": "poll"}"#,
                "`completion`",
            ),
            (r#"{"completion": "Poll"}"#, "completion: \"Poll\""),
            (r#"{"completion": 3}"#, "completion: 3"),
            (r#"{"vrings": {"4": "poll"}}"#, "vrings.4"),
            (r#"{"vrings": {"-1": "poll"}}"#, "vrings.-1"),
            (r#"{"vrings": {"65536": "poll"}}"#, "vrings.65536"),
            // One vring has one name, and is named once: of two words for it neither is meant more.
            (r#"{"vrings": {"01": "poll"}}"#, "vrings.01"),
            (r#"{"vrings": {"+1": "poll"}}"#, "vrings.+1"),
            (r#"{"vrings": {"1": "poll", "1": "interrupt"}}"#, "vrings.1"),
            (r#"{"vrings": {"0": "spin"}}"#, "vrings.0: \"spin\""),
            (r#"{"vrings": ["poll"]}"#, "vrings"),
            (r#"{"vrings": null}"#, "vrings"),
            (r#"{"completion": null}"#, "completion: null"),
            (r#"{"split": null}"#, "split: null"),
            (r#"{"spin_cpu_max": -1}"#, "spin_cpu_max: -1"),
            (r#"{"spin_cpu_max": 25601}"#, "spin_cpu_max"),
            (r#"{"spin_cpu_max": 2.5}"#, "spin_cpu_max"),
            (r#"{"spin_cpu_max": 1e400}"#, "body"),
            (r#"{"spin_cpu_max": "25"}"#, "spin_cpu_max"),
            (r#"{"spin_cpu_total": 0}"#, "spin_cpu_total"),
            (r#"{"spin_rate_min": null}"#, "spin_rate_min"),
            (r#"{"spin_rate_min": 1000000001}"#, "spin_rate_min"),
            (r#"{"spin_worth": null}"#, "spin_worth: null"),
            (r#"{"spin_worth": 10001}"#, "spin_worth"),
            (r#"{"spin_worth": 0.5}"#, "spin_worth"),
            (r#"{"coalesce_us": 10001}"#, "coalesce_us"),
            (r#"{"coalesce_max": 18446744073709551616}"#, "coalesce_max"),
            (
                r#"{"coalesce_max": 8}"#,
                "coalesce_max: 8 has no effect without a time: also set coalesce_us",
            ),
            (r#"{"split": "3K"}"#, "split"),
            (r#"{"split": "4K"}"#, "split"),
            (r#"{"split": 65536}"#, "split"),
            (r#"{"split": {"a": [1]}}"#, "split"),
            (r#"{"on_error": null}"#, "on_error: null"),
            (r#"{"on_error": {"read": 5}}"#, "on_error"),
            (r#"{"on_error": {"format": "hold"}}"#, "on_error"),
            (r#"{"on_error": {}}"#, "on_error"),
            (r#"{"on_error": "stop"}"#, "on_error: \"stop\" is none of"),
            (
                r#"{"on_error": "retry:0"}"#,
                "on_error: retry takes 1 to 86400",
            ),
        ];
        let start = Tuning::new(Split::Off);
        for (body, named) in rows {
            let error = changed(body, &start).unwrap_err();
            assert!(error.contains(named), "{body}: {error}");
            assert!(error.lines().count() == 1 && error.len() < 300, "{error}");
        }
        let long = format!("{{\"completion\": \"{}\"}}", "é".repeat(5000));
        assert!(changed(&long, &start).unwrap_err().len() < 300);
        let deep = format!("{{\"split\": {}", "[".repeat(10_000));
        assert!(changed(&deep, &start).is_err());
    }
}
