//! Just enough HTTP to query a control socket: one request for each connection, the response read to its end.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

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
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(crate::TIMEOUT)).unwrap();
    stream
        .write_all(b"GET /v1/events HTTP/1.0\r\nHost: cleave\r\n\r\n")
        .unwrap();
    let lines = BufReader::new(stream).lines();
    let mut events = lines
        .map(|line| line.unwrap())
        .skip_while(|line| !line.is_empty())
        .skip(1)
        .map(|line| serde_json::from_str::<Value>(&line).unwrap());
    assert_eq!(events.next().unwrap()["event"], "listening");
    events
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
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: cleave\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let text = converse(socket, request.as_bytes(), crate::TIMEOUT).unwrap();
    Response::parse(&text).unwrap_or_else(|| panic!("no response to {method} {path}: {text}"))
}

/// GETs a path and returns its JSON.
pub fn get(socket: &Path, path: &str) -> Value {
    let answer = fetch(socket, "GET", path, "");
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    answer.json()
}
