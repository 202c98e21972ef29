//! Asks a control socket for what its disk does.

use std::fmt::Display;
use std::io;
use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::net::UnixStream;

use cleave_api::{DiskEntry, DiskReport, encoded, natural};

/// An answer takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);
/// Why a socket that exists does not let this user connect.
pub(super) const OTHER_USER: &str = "it is for another user alone";
/// More than a disk of 256 vrings has to tell.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// A disk behind a socket.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(super) enum Shown {
    Served(Box<DiskReport>),
    Away(Away),
}

/// A disk of a node that is not served.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Away {
    pub(super) id: String,
    pub(super) state: String,
    pub(super) name: String,
    /// Why it is not served, if that is a fault.
    pub(super) error: Option<String>,
    /// The other fields, for those who want all as it came.
    #[serde(flatten)]
    more: Map<String, Value>,
}

impl Shown {
    pub(super) fn id(&self) -> &str {
        match self {
            Shown::Served(report) => &report.id,
            Shown::Away(away) => &away.id,
        }
    }

    pub(super) fn report(&self) -> Option<&DiskReport> {
        match self {
            Shown::Served(report) => Some(report),
            Shown::Away(_) => None,
        }
    }

    /// The disk, if it is not served because of a fault.
    pub(super) fn failed(&self) -> Option<&Away> {
        match self {
            Shown::Away(away) if away.error.is_some() => Some(away),
            _ => None,
        }
    }
}

/// All disks behind a socket; else why there are none, in a few words. Each is asked for by itself: what the disks of a node have to
/// tell has no bound, and a node that told it at once would do nothing else meanwhile.
pub(super) async fn disks(socket: &Path) -> Result<Vec<Shown>, String> {
    let mut shown = Vec::new();
    for disk in list(socket).await? {
        if !is_served(&disk) {
            shown.push(read(disk)?);
            continue;
        }
        let DiskEntry { id, .. } = serde_json::from_value(disk).map_err(strange)?;
        let path = format!("/v1/disks/{}", encoded(&id));
        // A disk that has gone since then refuses.
        if let Some(disk) = in_time(ask(socket, "GET", &path, "")).await? {
            shown.push(read(disk)?);
        }
    }
    Ok(shown)
}

fn read(disk: Value) -> Result<Shown, String> {
    match is_served(&disk) {
        true => serde_json::from_value(disk).map(Shown::Served),
        false => serde_json::from_value(disk).map(Shown::Away),
    }
    .map_err(strange)
}

/// All disks, `d2` before `d10`.
async fn list(socket: &Path) -> Result<Vec<Value>, String> {
    let all = in_time(ask(socket, "GET", "/v1/disks", "")).await?;
    let mut all: Vec<Value> = all.ok_or_else(|| strange("it refuses"))?;
    all.sort_by_cached_key(|disk| disk.get("id").and_then(Value::as_str).map(natural));
    Ok(all)
}

/// Orders something of each disk behind a socket that is served: its answer, with the disk's id. `what` is the last part of the path; an empty `body` is
/// not sent.
pub(super) async fn each<T: DeserializeOwned>(
    socket: &Path,
    method: &str,
    what: &str,
    body: &str,
) -> Result<Vec<(String, T)>, String> {
    let mut answers = Vec::new();
    for disk in list(socket).await?.into_iter().filter(is_served) {
        let DiskEntry { id, .. } = serde_json::from_value(disk).map_err(strange)?;
        let path = ["/v1/disks", &encoded(&id), what].join("/");
        // A disk that has gone since then refuses.
        if let Some(answer) = in_time(ask(socket, method, path.trim_end_matches('/'), body)).await?
        {
            answers.push((id, answer));
        }
    }
    Ok(answers)
}

/// A disk of a node that is not served has nothing to report, and nothing of it is held.
fn is_served(disk: &Value) -> bool {
    let state = disk.get("state").and_then(Value::as_str);
    state.is_none_or(|state| state == "serving")
}

async fn in_time<T>(asked: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let answer = tokio::time::timeout(PATIENCE, asked).await;
    answer.unwrap_or_else(|_| Err("no answer".to_owned()))
}

/// `None`: the other side refuses.
async fn ask<T: DeserializeOwned>(
    socket: &Path,
    method: &str,
    path: &str,
    body: &str,
) -> Result<Option<T>, String> {
    let answer = exchange(socket, method, path, body)
        .await
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => "no such socket".to_owned(),
            io::ErrorKind::ConnectionRefused => "nobody listens".to_owned(),
            io::ErrorKind::PermissionDenied => OTHER_USER.to_owned(),
            _ => error.to_string(),
        })?;
    let body = body_of(&answer)?;
    body.map(serde_json::from_slice)
        .transpose()
        .map_err(strange)
}

fn strange(why: impl Display) -> String {
    format!("not the answer of a cleave: {why}")
}

/// The body of a good answer; `None`: it is a refusal.
fn body_of(answer: &[u8]) -> Result<Option<&[u8]>, String> {
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n");
    let end = end.ok_or_else(|| strange("it has no end"))?;
    let (header, body) = answer.split_at(end);
    match header.strip_prefix(b"HTTP/1.1 ") {
        Some([b'2', ..]) => Ok(Some(body.get(4..).unwrap_or_default())),
        Some(_) => Ok(None),
        None => Err(strange("it is no HTTP")),
    }
}

/// One request, and all that comes back until the other side closes.
async fn exchange(socket: &Path, method: &str, path: &str, body: &str) -> io::Result<Vec<u8>> {
    let stream = UnixStream::connect(socket).await?;
    let length = match body.len() {
        0 => String::new(),
        bytes => format!("Content-Length: {bytes}\r\n"),
    };
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: cleave\r\nConnection: close\r\n{length}\r\n{body}"
    );
    let mut rest = request.as_bytes();
    while !rest.is_empty() {
        stream.writable().await?;
        match stream.try_write(rest) {
            Ok(n) => rest = rest.get(n..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    let mut answer = Vec::new();
    let mut piece = [0; 16 << 10];
    while answer.len() < ANSWER_BYTES_MAX {
        stream.readable().await?;
        match stream.try_read(&mut piece) {
            Ok(0) => return Ok(answer),
            Ok(n) => answer.extend_from_slice(piece.get(..n).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("an answer without end"))
}

/// Why nothing was heard from a socket.
pub(super) fn unheard(socket: &Path, why: &str) -> String {
    let socket = socket.display();
    match why {
        OTHER_USER => format!("control socket {socket}: {why}: run this command as that user"),
        _ => format!(
            "control socket {socket}: {why}: is a `cleave serve --control {socket}`, or the node of that socket, running?"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_good_answer_has_a_body() {
        let good = body_of(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n{}\r\n\r\n");
        assert_eq!(good, Ok(Some(&b"{}\r\n\r\n"[..])));
        assert_eq!(body_of(b"HTTP/1.1 404 No\r\n\r\n{}"), Ok(None));
        for bad in [&b""[..], b"HTTP/1.1 200 OK\r\n", b"SSH-2.0\r\n\r\n"] {
            assert!(body_of(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_hint_fits_the_reason() {
        let path = Path::new("/run/a.ctl");
        let line = unheard(path, OTHER_USER);
        assert!(line.ends_with("run this command as that user"), "{line}");
        let line = unheard(path, "no such socket");
        assert!(
            line.ends_with(
                "is a `cleave serve --control /run/a.ctl`, or the node of that socket, running?"
            ),
            "{line}"
        );
    }
}
