//! The description of a node's disk: the body of `PUT /v1/disks/{id}` and the file that keeps it.

use std::collections::BTreeMap;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::id::is_id;
use crate::cli;
use crate::service::Service;

/// A file is a few lines; one that is larger is none of ours.
pub(crate) const FILE_BYTES_MAX: u64 = 64 << 10;

/// A disk, in the words of the options of `cleave serve`. Fields that are left out have the option's default. To add one,
/// add it here; its name is the option's, and the option judges its value.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DiskFile {
    pub(crate) disk: Vec<String>,
    pub(crate) stripe: Option<Word>,
    pub(crate) stripe_raw: Option<bool>,
    pub(crate) read_only: Option<bool>,
    pub(crate) serial: Option<String>,
    pub(crate) block_size: Option<Word>,
    pub(crate) cache: Option<String>,
    pub(crate) direct: Option<String>,
    pub(crate) iopoll: Option<String>,
    pub(crate) discard: Option<String>,
    pub(crate) queues: Option<Word>,
    pub(crate) queue_size: Option<Word>,
    pub(crate) workers: Option<Word>,
    pub(crate) cpus: Option<Word>,
    /// The pool whose threads serve it.
    pub(crate) pool: Option<String>,
    pub(crate) completion: Option<String>,
    pub(crate) spin_cpu_max: Option<Word>,
    pub(crate) spin_cpu_total: Option<Word>,
    pub(crate) spin_rate_min: Option<Word>,
    pub(crate) spin_worth: Option<Word>,
    pub(crate) coalesce_us: Option<Word>,
    pub(crate) coalesce_max: Option<Word>,
    pub(crate) split: Option<Word>,
    pub(crate) profile: Option<String>,
    pub(crate) stats: Option<String>,
    pub(crate) stop_deadline: Option<Word>,
    /// Permissions of the socket, in octal: 0660 if left out.
    pub(crate) socket_mode: Option<String>,
    /// Group of the socket, by name or number.
    pub(crate) socket_group: Option<String>,
    /// Whether the disk comes back when the node starts again.
    pub(crate) persistent: Option<bool>,
    // Tables, and so the last in their file.
    #[serde(deserialize_with = "policies")]
    #[schemars(with = "Option<Policy>")]
    pub(crate) on_error: Option<BTreeMap<String, String>>,
    pub(crate) limits: Option<DiskLimits>,
}

/// The limits of a disk, and the group with whose disks it shares them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct DiskLimits {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) group: Option<String>,
    #[serde(flatten)]
    pub(crate) values: BTreeMap<String, u64>,
}

/// A number, or a text such as `64K`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "write a whole number, or a text such as \"64K\""
)]
pub(crate) enum Word {
    Number(u32),
    Text(String),
}

/// Policy for failed requests: a text such as `write=hold`, or an object with a policy for each kind.
#[derive(Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "write a policy such as \"write=hold\", or an object such as {\"write\": \"hold\"}"
)]
enum Policy {
    Text(String),
    ByKind(BTreeMap<String, String>),
}

/// Reads either form as the object.
fn policies<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<BTreeMap<String, String>>, D::Error> {
    let policy = Option::<Policy>::deserialize(from)?;
    Ok(policy.map(|policy| match policy {
        Policy::Text(text) => kinds(&text),
        Policy::ByKind(each) => each,
    }))
}

/// Fields that are no options.
const OWN: [&str; 4] = ["pool", "socket_mode", "socket_group", "persistent"];

impl DiskFile {
    /// Reads the body of a request; else what is wrong with it, in a line that names the field.
    pub(crate) fn from_json(body: &[u8]) -> Result<DiskFile, String> {
        // A list would pass for the fields in their order, and of two entries of one name the last would count.
        if body.trim_ascii_start().first() != Some(&b'{') {
            return Err("the body is no JSON object".to_owned());
        }
        match serde_json::from_slice(body) {
            Ok(file) => Ok(file),
            Err(error) => Err(wrong_field(body).unwrap_or(format!("the body: {error}"))),
        }
    }

    /// Reads the file that keeps it.
    pub(crate) fn from_toml(text: &str) -> Result<DiskFile, String> {
        toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start));
            let number = before.map_or(1, |before| before.matches('\n').count() + 1);
            let why = error.message().lines().next().unwrap_or_default();
            // The list of all fields that follows would fill the line.
            let why = why.split(", expected one of").next().unwrap_or_default();
            format!("line {number}: {why}")
        })
    }

    /// As the file keeps it.
    pub(crate) fn to_toml(&self) -> Result<String, String> {
        toml::to_string(self).map_err(|error| error.to_string())
    }

    /// The fields that are set.
    pub(crate) fn fields(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(mut fields)) => {
                fields.retain(|_, value| !value.is_null());
                fields
            }
            _ => Map::new(),
        }
    }

    /// The name of a field in which the two differ. A disk that names a group alone has whatever limits the group has.
    pub(crate) fn difference(&self, other: &DiskFile) -> Option<String> {
        let (ours, mut theirs) = (self.fields(), other.fields());
        if other.limit_values().is_empty()
            && other
                .limit_group()
                .is_some_and(|group| self.limit_group() == Some(group))
        {
            theirs.insert(
                "limits".to_owned(),
                ours.get("limits").cloned().unwrap_or_default(),
            );
        }
        let names = ours.keys().chain(theirs.keys());
        let mut differing = names.filter(|name| ours.get(*name) != theirs.get(*name));
        differing.next().cloned()
    }

    /// The file after a PATCH with this body, which was carried out.
    pub(crate) fn changed(&self, body: &[u8]) -> Result<DiskFile, String> {
        let changes: Map<String, Value> =
            serde_json::from_slice(body).map_err(|error| error.to_string())?;
        let mut fields = self.fields();
        // A profile is for automatic splitting: with another, the disk could not be opened again.
        if changes.get("split").is_some_and(|split| split != "auto") {
            fields.remove("profile");
        }
        for (name, value) in changes {
            let value = match (name.as_str(), value) {
                // Of the vrings of this moment.
                ("vrings", _) => continue,
                ("limits", Value::Object(changes)) => merged(fields.remove("limits"), changes),
                ("on_error", Value::String(policy)) => by_kind(&policy),
                (_, value) => value,
            };
            match value {
                Value::Null => fields.remove(&name),
                value => fields.insert(name, value),
            };
        }
        serde_json::from_value(Value::Object(fields)).map_err(|error| error.to_string())
    }

    /// Whether it is kept.
    pub(crate) fn is_persistent(&self) -> bool {
        self.persistent.unwrap_or(true)
    }

    /// The options of `cleave serve` that it stands for: each name, and its words on a command line.
    pub(crate) fn options(&self) -> Result<Vec<(String, Vec<String>)>, String> {
        let fields = self.fields();
        let is_own = |name: &&&str| fields.contains_key(**name);
        if let Some(name) = OWN.iter().find(is_own) {
            return Err(format!(
                "{name}: it is for the disks of a node: leave it out"
            ));
        }
        if self.limit_group().is_some() {
            return Err("limits.group: it is for the disks of a node: leave it out".to_owned());
        }
        let words = |(name, value): (String, Value)| {
            let mut words = Vec::new();
            push_option(&mut words, &name, value);
            (option(&name), words)
        };
        Ok(fields.into_iter().map(words).collect())
    }

    /// The service, judged by the parser of the command line. `control` is the node's own socket.
    pub(crate) fn service(&self, socket: &Path, control: &Path) -> Result<Service, String> {
        let mut line = vec!["cleave".to_owned(), "serve".to_owned()];
        for (path, option) in [(socket, "--socket-path"), (control, "--control")] {
            line.push(format!("{option}={}", path.display()));
        }
        for (name, mut value) in self.fields() {
            if let ("limits", Some(limits)) = (name.as_str(), value.as_object_mut()) {
                limits.remove("group");
            }
            if !OWN.contains(&name.as_str()) {
                push_option(&mut line, &name, value);
            }
        }
        self.socket_mode()?;
        if let Some(group) = self.limit_group().filter(|group| !is_id(group)) {
            return Err(format!(
                "limits.group: {group:?}: take 1 to 64 letters, digits and _.- that begin with a letter or a digit"
            ));
        }
        cli::service(line.into_iter().map(Into::into)).map_err(|failure| {
            let why = failure.to_string();
            // Whoever sends a request has no command line.
            why.strip_suffix(cli::HELP_HINT).unwrap_or(&why).to_owned()
        })
    }

    /// Its limits, without the group. Zero is none.
    pub(crate) fn limit_values(&self) -> BTreeMap<String, u64> {
        let limits = self.limits.as_ref();
        let mut values = limits
            .map(|limits| limits.values.clone())
            .unwrap_or_default();
        values.retain(|_, value| *value > 0);
        values
    }

    /// The same with these limits.
    pub(crate) fn with_limits(&self, values: &BTreeMap<String, u64>) -> DiskFile {
        let limits = DiskLimits {
            group: self.limit_group().map(str::to_owned),
            values: values.clone(),
        };
        DiskFile {
            limits: Some(limits),
            ..self.clone()
        }
    }

    /// The group with whose disks it shares its limits.
    pub(crate) fn limit_group(&self) -> Option<&str> {
        self.limits.as_ref()?.group.as_deref()
    }

    /// Permissions of the socket.
    pub(crate) fn socket_mode(&self) -> Result<u32, String> {
        let text = self.socket_mode.as_deref().unwrap_or("0660");
        // The parser of numbers takes a sign.
        let digits = text
            .bytes()
            .all(|byte| byte.is_ascii_digit())
            .then_some(text);
        digits
            .and_then(|digits| u32::from_str_radix(digits, 8).ok())
            .filter(|mode| *mode <= 0o777)
            .ok_or_else(|| format!("socket_mode: {text:?} is no octal mode such as \"0660\""))
    }
}

/// Limits after a change: 0 takes one away.
fn merged(limits: Option<Value>, changes: Map<String, Value>) -> Value {
    let mut all = match limits {
        Some(Value::Object(limits)) => limits,
        _ => Map::new(),
    };
    all.extend(changes);
    all.retain(|_, value| value.as_u64() != Some(0));
    match all.is_empty() {
        true => Value::Null,
        false => Value::Object(all),
    }
}

/// A policy such as `read=report,write=hold`, or one word for all kinds, as a table.
pub(crate) fn by_kind(policy: &str) -> Value {
    let kinds = kinds(policy).into_iter();
    Value::Object(kinds.map(|(kind, policy)| (kind, policy.into())).collect())
}

fn kinds(policy: &str) -> BTreeMap<String, String> {
    let each = |part: &str| match part.split_once('=') {
        Some((kind, policy)) => vec![(kind.to_owned(), policy.to_owned())],
        None => ["read", "write", "enospc"]
            .map(|kind| (kind.to_owned(), part.to_owned()))
            .to_vec(),
    };
    policy.split(',').flat_map(each).collect()
}

/// The first field that cannot be read by itself.
fn wrong_field(body: &[u8]) -> Option<String> {
    let fields: Map<String, Value> = serde_json::from_slice(body).ok()?;
    fields.into_iter().find_map(|(name, value)| {
        let alone = Map::from_iter([(name.clone(), value)]);
        let error = serde_json::from_value::<DiskFile>(Value::Object(alone)).err()?;
        let error = error.to_string();
        // The list of all fields that follows would fill the line.
        let why = error.split(", expected one of").next().unwrap_or_default();
        Some(format!("{name}: {why}"))
    })
}

/// The name of the option for a field.
fn option(name: &str) -> String {
    match name {
        "limits" => "limit".to_owned(),
        _ => name.replace('_', "-"),
    }
}

/// A field as the option of its name.
fn push_option(line: &mut Vec<String>, name: &str, value: Value) {
    let option = format!("--{}", option(name));
    match value {
        Value::Bool(true) => line.push(option),
        Value::Bool(false) | Value::Null => {}
        // None of its kinds is set.
        Value::Object(each) if each.is_empty() => {}
        Value::Array(each) => each
            .into_iter()
            .for_each(|value| push_option(line, name, value)),
        Value::Object(each) => {
            let each = each.iter();
            let each = each.map(|(kind, value)| {
                let value = value.as_str().map_or(value.to_string(), str::to_owned);
                format!("{kind}={value}")
            });
            line.push(format!("{option}={}", each.collect::<Vec<_>>().join(",")));
        }
        Value::String(text) => line.push(format!("{option}={text}")),
        Value::Number(number) => line.push(format!("{option}={number}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = r#"{"disk":["ram:1M"],"queues":4,"serial":"a","on_error":{"write":"hold"},
        "limits":{"group":"g","iops-total":5000},"persistent":true}"#;

    fn judged(body: &str) -> Result<Service, String> {
        let file = DiskFile::from_json(body.as_bytes())?;
        file.service(Path::new("/run/cleave/d1/disk.sock"), Path::new("/run/c"))
    }

    #[test]
    fn the_file_is_the_body() {
        let file = DiskFile::from_json(EXAMPLE.as_bytes()).unwrap();
        let again = DiskFile::from_toml(&file.to_toml().unwrap()).unwrap();
        assert_eq!(file, again);
        assert_eq!(file.difference(&again), None);
        let service = judged(EXAMPLE).unwrap();
        assert_eq!(service.session.vrings_max, 4);
        assert!(service.tuning.on_error.may_hold());
        assert_eq!(service.tuning.limits.to_string(), "iops-total=5000");
        assert_eq!(file.limit_group(), Some("g"));
        let group_alone = judged(r#"{"disk": ["ram:1M"], "limits": {"group": "g"}}"#).unwrap();
        assert!(!group_alone.tuning.limits.any());
    }

    #[test]
    fn a_file_that_cannot_be_read_is_wrong_in_a_line() {
        for (text, named) in [
            (
                "disk = [\"a\"]\ncolour = 1\n",
                "line 2: unknown field `colour`",
            ),
            ("\n\ndisk = 5\n", "line 3: "),
            ("disk = [\"a\"]\nqueues", "line 2: "),
        ] {
            let why = DiskFile::from_toml(text).unwrap_err();
            assert!(why.starts_with(named) && why.len() < 200, "{text}: {why}");
        }
    }

    #[test]
    fn a_change_is_kept_as_if_it_had_been_asked_for_first() {
        let mut file = DiskFile::from_json(EXAMPLE.as_bytes()).unwrap();
        file.profile = Some("/p".to_owned());
        let rows = [
            (
                r#"{"limits":{"iops-total":0}}"#,
                "limits",
                Some(r#"{"group":"g"}"#),
            ),
            (
                r#"{"limits":{"bps-total":7}}"#,
                "limits",
                Some(r#"{"bps-total":7,"group":"g","iops-total":5000}"#),
            ),
            (r#"{"completion":"poll"}"#, "completion", Some("\"poll\"")),
            (r#"{"coalesce_us":9}"#, "coalesce_us", Some("9")),
            (
                r#"{"on_error":"report"}"#,
                "on_error",
                Some(r#"{"enospc":"report","read":"report","write":"report"}"#),
            ),
            (
                r#"{"on_error":"read=hold,write=retry:5"}"#,
                "on_error",
                Some(r#"{"read":"hold","write":"retry:5"}"#),
            ),
            (r#"{"spin_cpu_total":null}"#, "spin_cpu_total", None),
            (r#"{"vrings":{"0":"poll"}}"#, "vrings", None),
            (r#"{"split":"auto"}"#, "profile", Some("\"/p\"")),
            (r#"{"split":"off"}"#, "profile", None),
        ];
        for (body, field, expected) in rows {
            let changed = file.changed(body.as_bytes()).unwrap();
            let found = changed.fields().get(field).map(Value::to_string);
            assert_eq!(found.as_deref(), expected, "{body}");
            judged(&Value::Object(changed.fields()).to_string()).unwrap();
        }
    }

    #[test]
    fn what_is_wrong_is_named_in_a_line() {
        let rows = [
            ("", "JSON"),
            ("[]", "JSON"),
            ("{", "body"),
            ("{}", "no disk"),
            (r#"{"disk": "ram:1M"}"#, "disk: "),
            (r#"{"disk": ["ram:1M"], "disk": ["ram:1M"]}"#, "`disk`"),
            (r#"{"disk": ["ram:1M"], "colour": 1}"#, "`colour`"),
            (r#"{"disk": ["ram:1M"], "queues": 0}"#, "--queues"),
            (
                r#"{"disk": ["ram:1M"], "queues": [4]}"#,
                "queues: write a whole number",
            ),
            (r#"{"disk": ["ram:1M"], "serial": "a b"}"#, "--serial"),
            (r#"{"disk": ["ram:1M"], "serial": 5}"#, "serial: "),
            (r#"{"disk": ["ram:1M"], "cache": "back"}"#, "--cache"),
            (
                r#"{"disk": ["ram:1M"], "on_error": {"write": "stop"}}"#,
                "--on-error",
            ),
            (
                r#"{"disk": ["ram:1M"], "on_error": {"format": "hold"}}"#,
                "--on-error",
            ),
            (r#"{"disk": ["ram:1M"], "limits": {"iops": 5}}"#, "--limit"),
            (
                r#"{"disk": ["ram:1M"], "limits": {"iops-total": "5"}}"#,
                "limits: ",
            ),
            (
                r#"{"disk": ["ram:1M"], "limits": {"group": 5}}"#,
                "limits: ",
            ),
            (
                r#"{"disk": ["ram:1M"], "limits": {"group": "a/b"}}"#,
                "limits.group",
            ),
            (
                r#"{"disk": ["ram:1M"], "socket_mode": "rw"}"#,
                "socket_mode",
            ),
            (
                r#"{"disk": ["ram:1M"], "socket_mode": "+660"}"#,
                "socket_mode",
            ),
            (
                r#"{"disk": ["ram:1M"], "socket_mode": "1777"}"#,
                "socket_mode",
            ),
            (
                r#"{"disk": ["ram:1M"], "stop_deadline": 86401}"#,
                "--stop-deadline",
            ),
        ];
        for (body, named) in rows {
            let error = judged(body).unwrap_err();
            assert!(error.contains(named), "{body}: {error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }
}
