//! Requests to a control socket: through the client, and as bytes for those that are not as they should be.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use cleave_api::HttpClient;
use serde_json::Value;

/// A response.
#[derive(Debug, Clone)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// Header block, unparsed.
    pub header: String,
    /// Body.
    pub body: String,
}

impl Response {
    /// Parses a response.
    pub fn parse(text: &str) -> Option<Response> {
        let (header, body) = text.split_once("\r\n\r\n")?;
        let status = header.split(' ').nth(1)?.parse().ok()?;
        Some(Response {
            status,
            header: header.to_owned(),
            body: body.to_owned(),
        })
    }

    /// The body, which must be JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The error message in the body.
    pub fn error(&self) -> String {
        self.json()["detail"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }
}

/// The events of a control socket from now on, as they come.
pub fn events(socket: &Path) -> impl Iterator<Item = Value> + use<> {
    let (_, _, events) = events_after(socket, "");
    events
}

/// The line with which the events of a control socket begin, the disks, and the events after a place such as `since=17&boot=5f0c`.
pub fn events_after(
    socket: &Path,
    place: &str,
) -> (Value, Vec<Value>, impl Iterator<Item = Value> + use<>) {
    let client = HttpClient::new(socket, crate::TIMEOUT);
    let lines = client.watch(place, Some(crate::TIMEOUT)).unwrap();
    let mut lines = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    let first = lines.next().unwrap();
    assert_eq!(first["event"], "listening");
    let count = first["disks"].as_u64().unwrap();
    let disks: Vec<_> = (0..count).map(|_| lines.next().unwrap()).collect();
    assert!(disks.iter().all(|line| line["event"] == "disk"));
    (first, disks, lines)
}

/// Sends bytes and reads until the peer closes the connection or the time limit passes.
pub fn converse(socket: &Path, bytes: &[u8], time: Duration) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(time))?;
    stream.set_write_timeout(Some(time))?;
    // The daemon may close the connection before it has read everything.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => break,
            Ok(n) => answer.extend_from_slice(&piece[..n]),
        }
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Sends one request and returns the response.
pub fn fetch(socket: &Path, method: &str, path: &str, body: &str) -> Response {
    let reply = HttpClient::new(socket, crate::TIMEOUT).send(method, path, body);
    let reply = reply.unwrap_or_else(|error| panic!("no response to {method} {path}: {error}"));
    Response {
        status: reply.status,
        header: reply.header,
        body: reply.body,
    }
}

/// GETs a path and returns its JSON.
pub fn get(socket: &Path, path: &str) -> Value {
    let answer = fetch(socket, "GET", path, "");
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    answer.json()
}
