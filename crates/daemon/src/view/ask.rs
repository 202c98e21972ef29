//! Asks a control socket for what its disk does.

use std::fmt::Display;
use std::io;
use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::UnixStream;

use crate::control::report::{Entry, Report};

/// An answer takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);
/// Why a socket that exists does not let this user connect.
pub(super) const OTHER_USER: &str = "it is for another user alone";
/// More than a disk of 256 vrings has to tell.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// All disks behind a socket; else why there are none, in a few words.
pub(super) async fn reports(socket: &Path) -> Result<Vec<Report>, String> {
    let asked = ask::<Vec<Value>>(socket, "GET", "/v1/disks?full=1");
    let all = tokio::time::timeout(PATIENCE, asked)
        .await
        .unwrap_or_else(|_| Err("no answer".to_owned()))?;
    let all = all.into_iter().filter(is_served);
    all.map(|disk| serde_json::from_value(disk).map_err(strange))
        .collect()
}

/// A disk of a node that is not served has nothing to report, and takes no order.
fn is_served(disk: &Value) -> bool {
    let state = disk.get("state").and_then(Value::as_str);
    state.is_none_or(|state| state == "serving")
}

/// Asks something of each disk behind a socket: its answer, with the disk's id. `what` is the last part of the path.
pub(super) async fn each<T: DeserializeOwned>(
    socket: &Path,
    method: &str,
    what: &str,
) -> Result<Vec<(String, T)>, String> {
    tokio::time::timeout(PATIENCE, all(socket, method, what))
        .await
        .unwrap_or_else(|_| Err("no answer".to_owned()))
}

async fn all<T: DeserializeOwned>(
    socket: &Path,
    method: &str,
    what: &str,
) -> Result<Vec<(String, T)>, String> {
    let mut answers = Vec::new();
    let all = ask::<Vec<Value>>(socket, "GET", "/v1/disks").await?;
    for disk in all.into_iter().filter(is_served) {
        let entry: Entry = serde_json::from_value(disk).map_err(strange)?;
        let path = ["/v1/disks", &encoded(&entry.id), what].join("/");
        let answer = ask(socket, method, path.trim_end_matches('/')).await?;
        answers.push((entry.id, answer));
    }
    Ok(answers)
}

async fn ask<T: DeserializeOwned>(socket: &Path, method: &str, path: &str) -> Result<T, String> {
    let answer = exchange(socket, method, path)
        .await
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => "no such socket".to_owned(),
            io::ErrorKind::ConnectionRefused => "nobody listens".to_owned(),
            io::ErrorKind::PermissionDenied => OTHER_USER.to_owned(),
            _ => error.to_string(),
        })?;
    let body = body_of(&answer)?;
    serde_json::from_slice(body).map_err(strange)
}

fn strange(why: impl Display) -> String {
    format!("not the answer of a cleave: {why}")
}

/// The body of a good answer.
fn body_of(answer: &[u8]) -> Result<&[u8], String> {
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n");
    let end = end.ok_or_else(|| strange("it has no end"))?;
    let (header, body) = answer.split_at(end);
    match header.starts_with(b"HTTP/1.1 200 ") {
        true => Ok(body.get(4..).unwrap_or_default()),
        false => Err(strange("it refuses")),
    }
}

/// One request, and all that comes back until the other side closes.
async fn exchange(socket: &Path, method: &str, path: &str) -> io::Result<Vec<u8>> {
    let stream = UnixStream::connect(socket).await?;
    let request = format!("{method} {path} HTTP/1.1\r\nHost: cleave\r\nConnection: close\r\n\r\n");
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

/// As a part of a path.
pub(crate) fn encoded(id: &str) -> String {
    id.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                char::from(byte).to_string()
            }
            byte => format!("%{byte:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_fits_into_a_path() {
        assert_eq!(encoded("a.img"), "a.img");
        assert_eq!(encoded("null:1G /é?#%"), "null%3A1G%20%2F%C3%A9%3F%23%25");
    }

    #[test]
    fn only_a_good_answer_has_a_body() {
        let good = body_of(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n{}\r\n\r\n");
        assert_eq!(good, Ok(&b"{}\r\n\r\n"[..]));
        for bad in [
            &b""[..],
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 404 No\r\n\r\n{}",
            b"SSH-2.0\r\n\r\n",
        ] {
            assert!(body_of(bad).is_err(), "{bad:?}");
        }
    }
}
