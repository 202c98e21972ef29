//! Descriptions of disks and changes of them, as they are written and refused.

use std::num::NonZeroU32;

use serde_json::{Value, json};

use super::*;

const EXAMPLE: &str = r#"{"disk":["ram:1M"],"queues":4,"serial":"a","on_error":{"write":"hold"},
    "limits":{"group":"g","iops-total":5000},"persistent":true}"#;

fn config(body: &Value) -> DiskConfig {
    DiskConfig::from_json(body.to_string().as_bytes()).unwrap()
}

fn judged(body: &str) -> Result<DiskConfig, String> {
    let config = DiskConfig::from_json(body.as_bytes())?;
    config.check(Names::Fields).map(|()| config)
}

fn changed(config: &DiskConfig, body: &str) -> Result<DiskConfig, String> {
    config.with(&Change::from_json(body.as_bytes())?)
}

#[test]
fn the_file_is_the_body() {
    let disk = judged(EXAMPLE).unwrap();
    let again = DiskConfig::from_toml(&disk.to_toml().unwrap()).unwrap();
    assert_eq!(disk, again);
    assert_eq!(disk.written(), again.written());
    let body: Value = serde_json::from_str(EXAMPLE).unwrap();
    assert_eq!(serde_json::to_value(&again).unwrap(), body);
    assert_eq!(disk.queues.get().get(), 4);
    assert!(disk.on_error.get().policy().may_hold());
    assert_eq!(disk.limits.to_string(), "iops-total=5000");
    assert_eq!(disk.limit_group(), Some("g"));
    let group_alone = judged(r#"{"disk": ["ram:1M"], "limits": {"group": "g"}}"#).unwrap();
    assert!(!group_alone.limits.get().values.any());
}

#[test]
fn what_is_written_out_is_what_is_left_out() {
    let defaults = [
        ("disk", json!(["/a", "/b"])),
        ("stripe", json!(65_536)),
        ("stripe_raw", json!(false)),
        ("read_only", json!(false)),
        ("read_only", json!(null)),
        ("queues", json!(null)),
        ("serial", json!("")),
        ("face", json!("v1")),
        ("block_size", json!(512)),
        ("cache", json!("writeback")),
        ("direct", json!("auto")),
        ("iopoll", json!("off")),
        ("discard", json!("on")),
        ("queues", json!(64)),
        ("queues", json!("64")),
        ("queue_size", json!(1024)),
        ("stats", json!("on")),
        ("start", json!("active")),
        ("stop_deadline", json!(2)),
        ("socket_mode", json!("0660")),
        ("socket_mode", json!("660")),
        ("persistent", json!(true)),
        ("completion", json!("adaptive")),
        ("spin_cpu_max", json!(25)),
        ("spin_cpu_total", json!(null)),
        ("spin_rate_min", json!(1100)),
        ("spin_worth", json!("5")),
        ("coalesce_us", json!(0)),
        ("split", json!("auto")),
        ("on_error", json!({})),
        ("on_error", json!("report")),
        ("limits", json!({})),
        ("limits", json!({"iops-total": 0})),
        ("labels", json!({})),
    ];
    for (field, value) in &defaults {
        assert_eq!(with(field, value), bare(), "{field}: {value}");
    }
}

#[test]
fn two_spellings_of_a_disk_are_the_same_disk() {
    for (field, one, other) in [
        (
            "disk",
            json!(["nbd://h/a", "/b"]),
            json!(["nbd://h:10809/a", "/b"]),
        ),
        ("block_size", json!(4096), json!("4k")),
        ("workers", json!(4), json!("4")),
        ("cpus", json!("0,1"), json!("0-1")),
        ("cpus", json!(3), json!("3")),
        ("split", json!("64K"), json!(65_536)),
        (
            "on_error",
            json!("retry"),
            json!({"read": "retry:30", "write": "retry:30"}),
        ),
        (
            "limits",
            json!({"bps-total": 5, "iops-total": 0}),
            json!({"bps-total": 5}),
        ),
    ] {
        assert_eq!(with(field, &one), with(field, &other), "{field}: {one}");
        assert_ne!(with(field, &one), bare(), "{field}: {one}");
    }
}

fn bare() -> DiskConfig {
    with("stripe", &json!("64K"))
}

/// Returns a stripe with one more field.
fn with(field: &str, value: &Value) -> DiskConfig {
    let mut body = json!({"disk": ["/a", "/b"], "stripe": "64K"});
    body[field] = value.clone();
    config(&body)
}

#[test]
fn labels_are_bounded() {
    let of = |labels: Value| judged(&json!({"disk": ["ram:1M"], "labels": labels}).to_string());
    let good = of(json!({"owner": "web, db", "a.b/c": ""})).unwrap();
    assert!(good.labels.get().has("owner", "web, db"));
    assert_eq!(
        "owner=web,zone=b".parse::<Labels>().unwrap().to_string(),
        "owner=web,zone=b"
    );
    let many: serde_json::Map<_, _> = (0..33).map(|n| (n.to_string(), json!("x"))).collect();
    for (labels, part) in [
        (json!({"": "x"}), "labels: \"\" is not the name of a label"),
        (json!({"a b": "x"}), "\"a b\" is not the name"),
        (json!({"a": "x\n"}), "a: the value of a label"),
        (json!({"a": "x".repeat(256)}), "255 bytes"),
        (json!({"a": 1}), "labels.a: invalid type"),
        (json!(many), "33 labels are too many"),
    ] {
        let why = of(labels.clone()).unwrap_err();
        assert!(why.contains(part), "{labels}: {why}");
    }
    for text in ["owner", "a=1,a=2"] {
        assert!(text.parse::<Labels>().is_err(), "{text}");
    }
}

#[test]
fn a_disk_becomes_as_a_description_says_unless_it_would_have_to_be_opened_anew() {
    let now = json!({"disk": ["ram:1M"], "queues": 4, "spin_worth": 9, "coalesce_us": 50});
    let turned = |wanted: &Value| config(&now).turned_into(&config(wanted));
    // What is left out has its default.
    let wanted = json!({"disk": ["ram:1M"], "queues": "4", "completion": "poll"});
    assert_eq!(turned(&wanted), Ok(config(&wanted)));
    let fixed = json!({"disk": ["ram:2M"], "queues": 5, "start": "inactive", "persistent": false, "limits": {"group": "g"}});
    let fields = vec!["disk", "queues", "start", "persistent", "limits.group"];
    assert_eq!(turned(&fixed), Err(Unlike::Fixed(fields)));
    let bad = json!({"disk": ["ram:1M"], "queues": 4, "coalesce_max": 8});
    assert!(matches!(turned(&bad), Err(Unlike::Check(why)) if why.contains("coalesce_us")));
}

#[test]
fn a_disk_whose_description_names_a_group_alone_keeps_the_limits_of_the_group() {
    let of = |limits: Value| config(&json!({"disk": ["ram:1M"], "limits": limits}));
    let now = of(json!({"group": "g", "iops-total": 5}));
    let alone = of(json!({"group": "g"}));
    assert_eq!(now.turned_into(&alone), Ok(now.clone()));
    assert_eq!(now.kept(), alone);
    let other = of(json!({"group": "g", "iops-total": 6}));
    assert_eq!(now.turned_into(&other), Ok(other));
    let single = of(json!({"iops-total": 5}));
    assert_eq!(single.kept(), single);
    assert_eq!(single.turned_into(&of(json!({}))), Ok(of(json!({}))));
}

#[test]
fn what_was_written_is_shown_and_what_was_not_is_not() {
    let body = json!({"disk": ["nbd://h/a"], "queues": 64, "persistent": true, "on_error": {"write": "hold"}});
    let disk = config(&body);
    assert_eq!(disk.written(), ["disk", "queues", "persistent", "on_error"]);
    assert_eq!(serde_json::to_value(&disk).unwrap(), body);
}

#[test]
fn a_file_that_cannot_be_read_is_wrong_in_a_line() {
    for (text, named) in [
        (
            "disk = [\"a\"]\ncolour = 1\n",
            "line 2: unknown field `colour`",
        ),
        ("\n\ndisk = 5\n", "line 3: disk: "),
        ("disk = [\"a\"]\n\n[limits]\niops = 5\n", "line 3: limits: "),
        (
            "disk = [\"a\"]\n[on_error]\nwrite = \"sulk\"\n",
            "line 3: on_error.write: ",
        ),
        ("disk = [\"a\"]\nqueues = 0", "line 2: queues: 0 is not"),
        ("disk = [\"a\"]\nqueues", "line 2: "),
    ] {
        let why = DiskConfig::from_toml(text).unwrap_err();
        assert!(why.starts_with(named) && why.len() < 200, "{text}: {why}");
    }
}

#[test]
fn a_change_is_kept_as_if_it_had_been_asked_for_first() {
    let mut disk = judged(EXAMPLE).unwrap();
    disk.profile = Some("/p".into());
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
        (r#"{"spin_cpu_total":150}"#, "spin_cpu_total", Some("150")),
        (r#"{"spin_cpu_total":null}"#, "spin_cpu_total", None),
        (r#"{"vrings":{"0":"poll"}}"#, "vrings", None),
        (r#"{"split":"auto"}"#, "profile", Some("\"/p\"")),
        (r#"{"split":"off"}"#, "profile", None),
    ];
    for (body, field, expected) in rows {
        let changed = changed(&disk, body).unwrap();
        let shown = serde_json::to_value(&changed).unwrap();
        let found = shown.get(field).map(Value::to_string);
        assert_eq!(found.as_deref(), expected, "{body}");
        assert!(DiskConfig::from_toml(&changed.to_toml().unwrap()).is_ok());
    }
}

#[test]
fn what_is_said_changes_and_the_rest_stays() {
    let start = judged(EXAMPLE).unwrap();
    assert_eq!(changed(&start, "{}").unwrap(), start);
    let body = r#" {"completion": "poll", "split": "64K", "spin_cpu_max": 0, "spin_rate_min": 0, "spin_worth": 8,
        "coalesce_us": 50, "coalesce_max": 8, "on_error": {"write": "hold", "read": "retry:5"}}"#;
    let mut expected = start.clone();
    expected.completion = CompletionOption::Poll.into();
    expected.split = SplitOption::Fixed(NonZeroU32::new(65_536).unwrap()).into();
    expected.on_error = "read=retry:5,write=hold,enospc=hold"
        .parse::<ErrorPolicy>()
        .unwrap()
        .into();
    let now = changed(&start, body).unwrap();
    let [max, rate, worth] = [
        now.spin_cpu_max.get().get(),
        now.spin_rate_min.get().get(),
        now.spin_worth.get().get(),
    ];
    assert_eq!([max, rate, worth], [0, 0, 8]);
    assert_eq!(
        (now.coalesce_us.get().get(), now.coalesce_max.get().get()),
        (50, 8)
    );
    expected.spin_cpu_max = now.spin_cpu_max;
    expected.spin_rate_min = now.spin_rate_min;
    expected.spin_worth = now.spin_worth;
    expected.coalesce_us = now.coalesce_us;
    expected.coalesce_max = now.coalesce_max;
    assert_eq!(now, expected);
}

#[test]
fn a_vring_has_one_name_and_must_be_there() {
    use cleave_worker::CompletionPolicy;
    let applied = |body: &str, now: &[(u16, CompletionPolicy)]| {
        let change = Change::from_json(body.as_bytes())?;
        change.vrings.applied_to(&now.iter().copied().collect(), 4)
    };
    let now = [
        (1, CompletionPolicy::Poll),
        (2, CompletionPolicy::Interrupt),
    ];
    let next = applied(r#"{"vrings": {"3": "interrupt", "1": null}}"#, &now).unwrap();
    let next: Vec<_> = next.into_iter().collect();
    assert_eq!(
        next,
        [
            (2, CompletionPolicy::Interrupt),
            (3, CompletionPolicy::Interrupt)
        ]
    );
    for (body, named) in [
        (
            r#"{"vrings": {"4": "poll"}}"#,
            "vrings.4: the disk has vrings 0 to 3",
        ),
        (r#"{"vrings": {"-1": "poll"}}"#, "vrings.-1"),
        (r#"{"vrings": {"65536": "poll"}}"#, "vrings.65536"),
        // Of two words for one vring neither is meant more.
        (r#"{"vrings": {"01": "poll"}}"#, "vrings.01"),
        (r#"{"vrings": {"+1": "poll"}}"#, "vrings.+1"),
        (r#"{"vrings": {"1": "poll", "1": "interrupt"}}"#, "vrings.1"),
        (r#"{"vrings": {"0": "spin"}}"#, "vrings.0: \"spin\""),
        (r#"{"vrings": ["poll"]}"#, "vrings"),
        (r#"{"vrings": null}"#, "vrings"),
    ] {
        let why = applied(body, &[]).unwrap_err();
        assert!(why.contains(named), "{body}: {why}");
    }
}

#[test]
#[allow(clippy::too_many_lines)] // a table
fn what_is_wrong_with_a_change_is_named() {
    let rows = [
        ("", "JSON"),
        ("[]", "JSON"),
        ("\"poll\"", "JSON"),
        ("{", "body"),
        ("{\"completion\": \"poll\"", "body"),
        ("{\"completion\": \"poll\"} x", "body"),
        (r#"{"complete": "poll"}"#, "`complete`"),
        (r#"{"queues": 4}"#, "`queues`"),
        (
            r#"{"completion": "poll", "completion": "poll"}"#,
            "`completion`",
        ),
        (
            r#"{"completion": "Poll"}"#,
            "completion: \"Poll\" is not one of interrupt, poll, adaptive",
        ),
        (r#"{"completion": 3}"#, "completion: "),
        (r#"{"completion": null}"#, "completion: "),
        (r#"{"split": null}"#, "split: "),
        (
            r#"{"spin_cpu_max": -1}"#,
            "spin_cpu_max: -1 is not a whole number from 0 to 25600",
        ),
        (r#"{"spin_cpu_max": 25601}"#, "spin_cpu_max"),
        (r#"{"spin_cpu_max": 2.5}"#, "spin_cpu_max"),
        (r#"{"spin_cpu_max": 1e400}"#, "body"),
        (r#"{"spin_cpu_max": "much"}"#, "spin_cpu_max"),
        (r#"{"spin_cpu_total": 0}"#, "spin_cpu_total"),
        (r#"{"spin_rate_min": null}"#, "spin_rate_min"),
        (r#"{"spin_rate_min": 1000000001}"#, "spin_rate_min"),
        (r#"{"spin_worth": null}"#, "spin_worth: "),
        (r#"{"spin_worth": 10001}"#, "spin_worth"),
        (r#"{"spin_worth": 0.5}"#, "spin_worth"),
        (r#"{"coalesce_us": 10001}"#, "coalesce_us"),
        (r#"{"coalesce_max": 18446744073709551616}"#, "coalesce_max"),
        (
            r#"{"coalesce_max": 8}"#,
            "coalesce_max: 8 has no effect without a time: also set coalesce_us",
        ),
        (r#"{"split": "3K"}"#, "split"),
        (r#"{"split": {"a": [1]}}"#, "split"),
        (r#"{"on_error": null}"#, "on_error: "),
        (r#"{"on_error": {"read": 5}}"#, "on_error.read: "),
        (r#"{"on_error": {"format": "hold"}}"#, "`format`"),
        (r#"{"on_error": "stop"}"#, "on_error: \"stop\" is none of"),
        (
            r#"{"on_error": "retry:0"}"#,
            "on_error: retry takes 1 to 86400",
        ),
        (r#"{"limits": 5}"#, "limits: "),
        (
            r#"{"limits": {"iops": 5}}"#,
            "limits: \"iops\" is not a limit",
        ),
        (r#"{"limits": {"iops-total": "5"}}"#, "limits.iops-total: "),
        (r#"{"limits": {"iops-total": -1}}"#, "limits.iops-total: "),
        (
            r#"{"limits": {"iops-total": 1, "iops-total": 2}}"#,
            "limits: iops-total is there twice",
        ),
        (
            r#"{"limits": {"iops-read": 5}}"#,
            "limits: iops-total excludes",
        ),
        (
            r#"{"limits": {"group": "h"}}"#,
            "limits.group: a disk stays in its group",
        ),
    ];
    let start = judged(EXAMPLE).unwrap();
    for (body, named) in rows {
        let error = changed(&start, body).unwrap_err();
        assert!(error.contains(named), "{body}: {error}");
        assert!(error.lines().count() == 1 && error.len() < 300, "{error}");
    }
    let long = format!("{{\"completion\": \"{}\"}}", "é".repeat(5000));
    assert!(changed(&start, &long).unwrap_err().len() < 300);
    let deep = format!("{{\"split\": {}", "[".repeat(10_000));
    assert!(changed(&start, &deep).is_err());
}

#[test]
#[allow(clippy::too_many_lines)] // a table
fn what_is_wrong_with_a_disk_is_named_in_a_line() {
    let rows = [
        ("", "JSON"),
        ("[]", "JSON"),
        ("{", "body"),
        ("{}", "no disk"),
        (r#"{"disk": "ram:1M"}"#, "disk: "),
        (r#"{"disk": ["ram:x"]}"#, "disk[0]: "),
        (r#"{"disk": ["ram:1M"], "disk": ["ram:1M"]}"#, "`disk`"),
        (
            r#"{"disk": ["ram:1M"], "colour": 1}"#,
            "unknown field `colour`",
        ),
        (
            r#"{"disk": ["ram:1M"], "queues": 0}"#,
            "queues: 0 is not a whole number from 1 to 256",
        ),
        (
            r#"{"disk": ["ram:1M"], "queues": [4]}"#,
            "queues: invalid type: sequence, expected a whole number",
        ),
        (
            r#"{"disk": ["ram:1M"], "queue_size": 3}"#,
            "queue_size: a vring has a power of two",
        ),
        (r#"{"disk": ["ram:1M"], "serial": "a b"}"#, "serial: "),
        (r#"{"disk": ["ram:1M"], "serial": 5}"#, "serial: "),
        (
            r#"{"disk": ["ram:1M"], "cache": "back"}"#,
            "cache: \"back\" is not one of writeback, writethrough",
        ),
        (r#"{"disk": ["ram:1M"], "discard": true}"#, "discard: "),
        (
            r#"{"disk": ["ram:1M"], "on_error": {"write": "stop"}}"#,
            "on_error.write: \"stop\"",
        ),
        (
            r#"{"disk": ["ram:1M"], "on_error": {"format": "hold"}}"#,
            "`format`",
        ),
        (r#"{"disk": ["ram:1M"], "on_error": 3}"#, "on_error: "),
        (r#"{"disk": ["ram:1M"], "limits": {"iops": 5}}"#, "limits: "),
        (
            r#"{"disk": ["ram:1M"], "limits": {"iops-total": "5"}}"#,
            "limits.iops-total: ",
        ),
        (
            r#"{"disk": ["ram:1M"], "limits": {"group": 5}}"#,
            "limits.group: ",
        ),
        (
            r#"{"disk": ["ram:1M"], "limits": {"group": "a/b"}}"#,
            "limits.group: \"a/b\": take 1 to 64",
        ),
        (
            r#"{"disk": ["ram:1M"], "socket_mode": "rw"}"#,
            "socket_mode: ",
        ),
        (
            r#"{"disk": ["ram:1M"], "socket_mode": "+660"}"#,
            "socket_mode: ",
        ),
        (
            r#"{"disk": ["ram:1M"], "socket_mode": "1777"}"#,
            "socket_mode: ",
        ),
        (
            r#"{"disk": ["ram:1M"], "socket_mode": 660}"#,
            "socket_mode: ",
        ),
        (
            r#"{"disk": ["ram:1M"], "stop_deadline": 86401}"#,
            "stop_deadline: 86401",
        ),
        (r#"{"disk": ["a", "b"]}"#, "make them one disk with stripe"),
        (r#"{"disk": ["a"], "stripe": "64K"}"#, "leave stripe out"),
        (
            r#"{"disk": ["a"], "stripe_raw": true}"#,
            "stripe_raw is for a stripe",
        ),
        (
            r#"{"disk": ["a", "b"], "stripe": "4K", "block_size": "8K"}"#,
            "stripe 4K is below block_size 8K",
        ),
        (
            r#"{"disk": ["ram:1M"], "split": "off", "profile": "/p"}"#,
            "profile: /p is for split auto",
        ),
        (
            r#"{"disk": ["ram:1M"], "pool": "fast", "cpus": "0"}"#,
            "pool: a disk in a pool has no threads of its own: leave cpus out",
        ),
    ];
    for (body, named) in rows {
        let error = judged(body).unwrap_err();
        assert!(error.contains(named), "{body}: {error}");
        assert!(error.lines().count() == 1 && error.len() < 400, "{error}");
    }
}

/// An option without a field would be accepted and have no effect.
#[test]
fn every_option_is_a_field_and_every_field_an_option() {
    use clap::Args as _;
    let ids = |command: clap::Command| {
        let mut ids: Vec<String> = command
            .get_arguments()
            .map(|arg| arg.get_id().to_string())
            .collect();
        ids.sort();
        ids
    };
    let properties = |schema: schemars::Schema| {
        let fields = schema.get("properties").unwrap().as_object().unwrap();
        let mut fields: Vec<String> = fields
            .keys()
            .filter(|name| *name != "vrings")
            .cloned()
            .collect();
        fields.sort();
        fields
    };
    let command = clap::Command::new("cleave");
    assert_eq!(
        ids(DiskConfig::augment_args(command.clone())),
        properties(schemars::schema_for!(DiskConfig))
    );
    assert_eq!(
        ids(Change::augment_args(command)),
        properties(schemars::schema_for!(Change))
    );
}
