//! Answers of a node in words.

use cleave_api::{EventName, Operation, natural};
use serde_json::{Map, Value};

use crate::output::size;

/// Columns of the list, and the fields that they show.
const COLUMNS: [(&str, &str); 7] = [
    ("ID", "id"),
    ("STATE", "state"),
    ("SIZE", "size_bytes"),
    ("GUEST", "connected"),
    ("DISK", "name"),
    ("SOCKET", "socket"),
    ("ERROR", "error"),
];

/// The fields of a disk that a sheet shows, and what they are called there.
const FIELDS: [(&str, &str); 11] = [
    ("state", "/state"),
    ("possession", "/possession"),
    ("error", "/error"),
    ("disk", "/name"),
    ("size", "/size_bytes"),
    ("cut off its end", "/store/short_bytes"),
    ("socket", "/socket"),
    ("guest", "/connected"),
    ("quiesced for, s", "/quiesced_seconds"),
    ("requests in flight", "/in_flight/requests"),
    ("requests that failed", "/totals/failed"),
];

/// The answer to `add`.
pub(super) fn added(id: &str, status: u16, body: &Value) -> String {
    let socket = text(body.get("socket"));
    match status {
        201 => format!("{id}: added; its socket is {socket}\n"),
        202 => format!("{id}: is still being opened; see `cleave disk show {id}`\n"),
        _ => format!("{id}: is there already, with the same options; its socket is {socket}\n"),
    }
}

/// The answer to `list`: a line a disk, `d2` before `d10`.
pub(super) fn list(body: &Value) -> String {
    let mut disks: Vec<_> = body.as_array().into_iter().flatten().collect();
    disks.sort_by_cached_key(|disk| natural(&text(disk.get("id"))));
    let cells = |disk: &Value| COLUMNS.map(|(_, field)| shown(field, disk.get(field)));
    let mut rows = vec![COLUMNS.map(|(head, _)| head.to_owned())];
    rows.extend(disks.into_iter().map(cells));
    let widths = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..COLUMNS.len()).map(widths).collect();
    let line = |row: &[String; COLUMNS.len()]| {
        let cells = row.iter().zip(&widths);
        let cells: Vec<_> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// The answer to `show`.
pub(super) fn sheet(body: &Value) -> String {
    let state = FIELDS.iter().filter_map(|(name, path)| {
        let value = body.pointer(path).filter(|value| !value.is_null())?;
        let usual = match *path {
            "/store/short_bytes" => *value == 0,
            "/possession" => *value == "active",
            _ => false,
        };
        if usual {
            return None;
        }
        let field = path.rsplit('/').next().unwrap_or_default();
        Some((*name, shown(field, Some(value))))
    });
    let mut sheet = format!("{}\n", text(body.get("id")));
    for (name, value) in state {
        sheet += &format!("  {name:22}{value}\n");
    }
    sheet += "  options\n";
    let spec = body.get("spec").and_then(Value::as_object);
    for (name, value) in spec.into_iter().flatten() {
        sheet += &format!("    {name:20}{}\n", text(Some(value)));
    }
    sheet
}

/// The answer to an order.
pub(super) fn ordered(id: &str, operation: Operation, body: &Value) -> String {
    let number = |field: &str| body.get(field).and_then(Value::as_f64).unwrap_or_default();
    match operation {
        Operation::FailDisk if number("requests") == 0.0 => format!("{id}: no request was held\n"),
        Operation::FailDisk => format!(
            "{id}: held requests that end as I/O errors: {}\n",
            number("requests")
        ),
        Operation::FlushDisk => format!("{id}: flushed in {} ms\n", number("took_ms")),
        Operation::QuiesceDisk => format!(
            "{id}: quiesced after {} ms; goes on by itself in {:.0} s; this quiet is {}\n",
            number("took_ms"),
            number("seconds_left"),
            text(body.get("quiet"))
        ),
        Operation::SnapshotDisk => format!(
            "{id}: copied to {}; the guest waited for {} ms\n",
            text(body.get("to")),
            number("guest_waited_ms")
        ),
        _ => format!("{id}: {}\n", text(body.get("state"))),
    }
}

/// The answer to `resume`; `asked` is its body.
pub(super) fn resumed(id: &str, asked: &Value, body: &Value) -> String {
    let requests = body.get("requests").and_then(Value::as_u64).unwrap_or(0);
    let held = match (asked.get("quiet"), requests) {
        (Some(_), _) => None,
        (None, 0) => Some("no request was held".to_owned()),
        (None, count) => Some(format!("held requests are done again: {count}")),
    };
    let is_over = body.get("quiesced") == Some(&Value::Bool(false));
    let quiet = (!is_over).then(|| "goes on".to_owned());
    let told: Vec<_> = quiet.into_iter().chain(held).collect();
    match told.is_empty() {
        true => String::new(),
        false => format!("{id}: {}\n", told.join("; ")),
    }
}

/// The answer to `resize`.
pub(super) fn resized(id: &str, status: u16, body: &Value) -> String {
    match status {
        202 => format!("{id}: its size is still being checked: see whether its storage answers\n"),
        _ => format!(
            "{id}: its size is {}\n",
            shown("size_bytes", body.get("size_bytes"))
        ),
    }
}

/// Says that the end of a disk is missing, if it is.
pub(super) fn cut_off(id: &str, body: &Value) -> Option<String> {
    let short = body.pointer("/store/short_bytes")?.as_u64()?;
    (short > 0).then(|| {
        format!(
            "{id}: has shrunk: {} at its end are missing; reads and writes there fail until it is as large as before",
            size(short)
        )
    })
}

/// The answer to `remove`.
pub(super) fn removed(id: &str) -> String {
    format!("{id}: removed\n")
}

/// Says what was lost with a disk that was removed: the disk may still do it.
pub(super) fn lost(id: &str, body: &Value) -> Option<String> {
    let lost = body.get("lost")?.as_str()?;
    Some(format!("{id}: {}", clean(lost)))
}

/// Fields of events that are for programs: they say where a reader is.
const PLACES: [&str; 4] = ["seq", "boot", "replayed", "disks"];

/// An event: when, which disk, what, and the rest as it came.
pub(super) fn event(line: &str) -> String {
    let Ok(Value::Object(mut event)) = serde_json::from_str(line) else {
        return format!("{}\n", clean(line));
    };
    let mut take = |name: &str| event.remove(name);
    let (time, disk, what) = (take("time"), take("disk"), take("event"));
    for place in PLACES {
        take(place);
    }
    let seconds = time.and_then(|time| time.as_f64()).unwrap_or_default();
    let what = text(what.as_ref());
    let mut told = format!("{} {:10} ", clock(seconds), text(disk.as_ref()));
    if what == EventName::Disk.name() {
        return format!("{told}{}\n", standing(&event));
    }
    told += &what;
    for (name, value) in event.into_iter().filter(|(_, value)| !value.is_null()) {
        told += &format!(" {name}={}", text(Some(&value)));
    }
    format!("{}\n", told.trim_end())
}

/// A disk as it is when the events begin.
fn standing(disk: &Map<String, Value>) -> String {
    let field = |name: &str| match (name, disk.get(name)) {
        ("size_bytes", Some(size)) if *size == 0 => String::new(),
        ("connected", Some(Value::Bool(false))) => String::new(),
        (name, value) => shown(name, value),
    };
    let known = ["name", "size_bytes", "connected", "error"].map(field);
    let known: Vec<_> = known.into_iter().filter(|text| !text.is_empty()).collect();
    format!("is {}: {}", text(disk.get("state")), known.join(", "))
}

/// The time of day, UTC.
fn clock(seconds: f64) -> String {
    let of_day = seconds.max(0.0) as u64 % 86_400;
    format!(
        "{:02}:{:02}:{:02}Z",
        of_day / 3600,
        of_day / 60 % 60,
        of_day % 60
    )
}

/// A field as people read it.
fn shown(field: &str, value: Option<&Value>) -> String {
    match (field, value) {
        ("size_bytes" | "short_bytes", Some(value)) => size(value.as_u64().unwrap_or_default()),
        ("connected", Some(Value::Bool(true))) => "connected".to_owned(),
        ("connected", _) => "-".to_owned(),
        (_, value) => text(value),
    }
}

/// A value without quotes.
fn text(value: Option<&Value>) -> String {
    clean(&match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(all)) => {
            let all: Vec<_> = all.iter().map(|value| text(Some(value))).collect();
            all.join(" ")
        }
        Some(Value::Object(all)) => {
            let all: Vec<_> = all
                .iter()
                .map(|(name, value)| format!("{name}={}", text(Some(value))))
                .collect();
            all.join(",")
        }
        Some(other) => other.to_string(),
    })
}

/// JSON with the escapes of control characters that may stand in it as they are: a terminal may take U+0080 to U+009F, and DEL, for
/// commands. Its value stays the same.
pub(crate) fn visible(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\u{7f}'..='\u{9f}' => text += &format!("\\u{:04x}", u32::from(c)),
            '\n' => text.push(c),
            c if c.is_control() => text.push(' '),
            c => text.push(c),
        }
    }
    text
}

/// A terminal obeys control characters, and a path may hold them.
pub(crate) fn clean(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_list_has_a_line_for_each_disk() {
        let body = json!([
            {"id": "longer", "state": "failed", "size_bytes": 0, "connected": false, "name": "/b", "socket": "/s", "error": "no file"},
            {"id": "d10", "state": "ended", "size_bytes": 0, "connected": false, "name": "/c", "socket": "/s", "error": null},
            {"id": "d1", "state": "serving", "size_bytes": 1 << 30, "connected": true, "name": "/a\n.img", "socket": "/s", "error": null},
            {"id": "d2", "state": "ended", "size_bytes": 0, "connected": false, "name": "/d", "socket": "/s", "error": null},
        ]);
        assert_eq!(
            list(&body),
            "ID      STATE    SIZE   GUEST      DISK     SOCKET  ERROR\n\
             d1      serving  1 GiB  connected  /a?.img  /s\n\
             d2      ended    0 B    -          /d       /s\n\
             d10     ended    0 B    -          /c       /s\n\
             longer  failed   0 B    -          /b       /s      no file\n"
        );
        assert_eq!(
            list(&json!([])),
            "ID  STATE  SIZE  GUEST  DISK  SOCKET  ERROR\n"
        );
    }

    #[test]
    fn a_sheet_shows_what_is_known() {
        let body = json!({
            "id": "d1", "state": "serving", "possession": "waiting", "error": null, "size_bytes": 1536, "socket": "/s",
            "spec": {"disk": ["/a"], "limits": {"group": "g", "iops-total": 5}},
        });
        assert_eq!(
            sheet(&body),
            "d1\n  state                 serving\n  possession            waiting\n  size                  1.5 KiB\n  \
             socket                /s\n  options\n    disk                /a\n    limits              group=g,iops-total=5\n"
        );
    }

    #[test]
    fn an_event_is_a_line() {
        let line = r#"{"time":3661.5,"event":"held","disk":"d1","vring":0,"error":"No space left on device"}"#;
        assert_eq!(
            event(line),
            "01:01:01Z d1         held error=No space left on device vring=0\n"
        );
        let line = r#"{"time":1,"event":"ended","disk":"d1","lost":null,"seq":7}"#;
        assert_eq!(event(line), "00:00:01Z d1         ended\n");
        let line =
            r#"{"time":1,"event":"listening","boot":"5f","replayed":false,"disks":2,"seq":7}"#;
        assert_eq!(event(line), "00:00:01Z            listening\n");
        let mut disk = json!({
            "time": 1, "event": "disk", "seq": 7, "disk": "d1", "id": "d1", "state": "serving", "name": "/a\n.img",
            "size_bytes": 1 << 30, "connected": true, "socket": "/s", "serial": "a", "error": null,
        });
        assert_eq!(
            event(&disk.to_string()),
            "00:00:01Z d1         is serving: /a?.img, 1 GiB, connected\n"
        );
        for (name, value) in [
            ("state", json!("failed")),
            ("size_bytes", json!(0)),
            ("connected", json!(false)),
            ("error", json!("no file")),
        ] {
            disk[name] = value;
        }
        assert_eq!(
            event(&disk.to_string()),
            "00:00:01Z d1         is failed: /a?.img, no file\n"
        );
        assert_eq!(event("x\u{1b}"), "x?\n");
    }

    #[test]
    fn json_moves_no_cursor_and_keeps_its_value() {
        let value = json!({"name": "a\u{9b}2J\u{1b}[2J\u{7f}\n", "more": [1]});
        let body = serde_json::to_string_pretty(&value).unwrap() + "\n";
        assert!(body.contains('\u{9b}'), "{body:?}");
        let text = visible(&body);
        assert!(
            !text.contains(|c: char| c.is_control() && c != '\n'),
            "{text:?}"
        );
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
        assert_eq!(visible("\u{1b}[2J"), " [2J");
    }

    #[test]
    #[allow(clippy::too_many_lines)] // a table
    fn an_answer_is_said_in_a_line() {
        let rows = [
            (
                added("d", 201, &json!({"socket": "/s"})),
                "d: added; its socket is /s\n",
            ),
            (
                added("d", 202, &json!({})),
                "d: is still being opened; see `cleave disk show d`\n",
            ),
            (
                added("d", 200, &json!({"socket": "/s"})),
                "d: is there already, with the same options; its socket is /s\n",
            ),
            (
                resumed("d", &json!(null), &json!({"requests": 0, "quiesced": true})),
                "d: goes on; no request was held\n",
            ),
            (
                resumed("d", &json!({}), &json!({"requests": 2})),
                "d: goes on; held requests are done again: 2\n",
            ),
            (
                resumed(
                    "d",
                    &json!({"held": true}),
                    &json!({"requests": 2, "quiesced": false}),
                ),
                "d: held requests are done again: 2\n",
            ),
            (
                resumed(
                    "d",
                    &json!({"quiet": "a"}),
                    &json!({"requests": 0, "quiesced": false}),
                ),
                "",
            ),
            (
                ordered("d", Operation::FailDisk, &json!({"requests": 2})),
                "d: held requests that end as I/O errors: 2\n",
            ),
            (
                ordered("d", Operation::FlushDisk, &json!({"took_ms": 1.5})),
                "d: flushed in 1.5 ms\n",
            ),
            (
                ordered(
                    "d",
                    Operation::QuiesceDisk,
                    &json!({"took_ms": 1.5, "seconds_left": 9.99, "quiet": "a1"}),
                ),
                "d: quiesced after 1.5 ms; goes on by itself in 10 s; this quiet is a1\n",
            ),
            (
                ordered(
                    "d",
                    Operation::SnapshotDisk,
                    &json!({"to": "/c", "guest_waited_ms": 3.1}),
                ),
                "d: copied to /c; the guest waited for 3.1 ms\n",
            ),
            (
                resized("d", 202, &json!({"size_bytes": 4096})),
                "d: its size is still being checked: see whether its storage answers\n",
            ),
            (
                ordered("d", Operation::StartDisk, &json!({"state": "serving"})),
                "d: serving\n",
            ),
            (removed("d"), "d: removed\n"),
        ];
        for (said, expected) in rows {
            assert_eq!(said, expected);
        }
        assert_eq!(lost("d", &json!({"lost": null})), None);
        let found = lost("d", &json!({"lost": "1 request is lost"}));
        assert_eq!(found.as_deref(), Some("d: 1 request is lost"));
    }
}
