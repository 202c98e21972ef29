//! One request to a control socket, and its answer.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cleave_api::encoded;
use serde::Serialize;
use serde_json::Value;

use super::ask::Ask;
use crate::failure::Failure;

/// The longest that a node takes for an answer, a quiet of 60 s and the end of a disk that hangs included, with room.
const PATIENCE: Duration = Duration::from_secs(180);
/// More than a node of 1024 disks has to list.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// A request that was sent.
pub(super) struct Exchange {
    socket: PathBuf,
    stream: BufReader<UnixStream>,
}

/// An answer.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: String,
}

impl Exchange {
    pub(super) fn begin(socket: &Path, ask: &Ask) -> Result<Exchange, Failure> {
        let (method, path, body) = request(ask);
        // An answer of HTTP/1.0 is not cut into chunks.
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: node\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut stream = UnixStream::connect(socket).map_err(|error| unheard(socket, &error))?;
        let sent = stream
            .set_read_timeout((*ask != Ask::Events).then_some(PATIENCE))
            .and_then(|()| stream.set_write_timeout(Some(PATIENCE)))
            .and_then(|()| stream.write_all(request.as_bytes()));
        match sent {
            // A refusal may come before the request has been read, and then counts.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                return Err(unheard(socket, &error));
            }
            _ => {}
        }
        Ok(Exchange {
            socket: socket.to_owned(),
            stream: BufReader::new(stream),
        })
    }

    /// Reads the answer to its end.
    pub(super) fn finish(mut self) -> Result<Answer, Failure> {
        let status = self.status()?;
        let body = self.rest()?;
        Ok(Answer { status, body })
    }

    /// Reads the lines of an answer without end, until the node ends or no more are taken.
    pub(super) fn each_line(
        mut self,
        mut take: impl FnMut(&str) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        let status = self.status()?;
        if status != 200 {
            let body = self.rest()?;
            return Err(Failure::run(Answer { status, body }.told()));
        }
        loop {
            let mut line = String::new();
            let mut bounded = self.stream.by_ref().take(ANSWER_BYTES_MAX);
            match bounded.read_line(&mut line) {
                Ok(0) => return Err(Failure::run("the node has ended")),
                Ok(_) if !take(line.trim_end())? => return Ok(()),
                Ok(_) => {}
                Err(error) => return Err(unheard(&self.socket, &error)),
            }
        }
    }

    fn rest(&mut self) -> Result<String, Failure> {
        let mut body = String::new();
        let mut read = self.stream.by_ref().take(ANSWER_BYTES_MAX);
        match read.read_to_string(&mut body) {
            Ok(_) => Ok(body),
            Err(error) => Err(unheard(&self.socket, &error)),
        }
    }

    /// The status, behind which the body begins.
    fn status(&mut self) -> Result<u16, Failure> {
        let mut status = None;
        loop {
            let mut line = String::new();
            let mut header = self.stream.by_ref().take(16 << 10);
            let read = header.read_line(&mut line);
            read.map_err(|error| unheard(&self.socket, &error))?;
            match (status, line.trim_end()) {
                (None, first) => {
                    let mut words = first.split(' ');
                    let is_http = words.next().is_some_and(|word| word.starts_with("HTTP/1."));
                    let code = words.next().filter(|_| is_http);
                    let code = code.and_then(|code| code.parse().ok());
                    let socket = self.socket.display();
                    status = Some(code.ok_or_else(|| {
                        Failure::run(format!(
                            "control socket {socket}: not the answer of a cleave"
                        ))
                    })?);
                }
                (Some(code), "") => return Ok(code),
                _ => {}
            }
        }
    }
}

impl Answer {
    /// Why the node refuses, if it does.
    pub(super) fn problem(&self) -> Option<String> {
        let is_good = (200..300).contains(&self.status);
        (!is_good).then(|| self.told())
    }

    /// The text of a refusal.
    fn told(&self) -> String {
        let body = serde_json::from_str::<Value>(&self.body).unwrap_or_default();
        let detail = body.get("detail").and_then(Value::as_str);
        let title = body.get("title").and_then(Value::as_str);
        let told = detail
            .or(title)
            .unwrap_or("the node refuses, and does not say why");
        told.to_owned()
    }

    pub(super) fn json(&self) -> Result<Value, Failure> {
        let read = serde_json::from_str(&self.body);
        read.map_err(|error| Failure::run(format!("not the answer of a cleave: {error}")))
    }
}

/// Method, path and body. An ID that could not be one is the node's to refuse.
fn request(ask: &Ask) -> (&'static str, String, String) {
    let disk = |id: &str| format!("/v1/disks/{}", encoded(id));
    match ask {
        Ask::Add(id, config) => ("PUT", disk(id), body_of(config)),
        Ask::List => ("GET", "/v1/disks".to_owned(), String::new()),
        Ask::Show(id) => ("GET", disk(id), String::new()),
        Ask::Set(id, change) => ("PATCH", disk(id), body_of(change)),
        Ask::Order(id, what, body) => {
            let body = match body {
                Value::Null => String::new(),
                body => body.to_string(),
            };
            ("POST", format!("{}/{what}", disk(id)), body)
        }
        Ask::Remove(id, mode) => ("DELETE", format!("{}?mode={mode}", disk(id)), String::new()),
        Ask::Events => ("GET", "/v1/events".to_owned(), String::new()),
    }
}

/// A description, or a change of it. Its names are texts and its numbers finite, so it can always be written.
fn body_of(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// Why nothing was heard.
fn unheard(socket: &Path, error: &io::Error) -> Failure {
    let socket = socket.display();
    Failure::run(match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => format!(
            "control socket {socket}: nobody listens: start `cleave node`, or name its socket with --control"
        ),
        io::ErrorKind::PermissionDenied => {
            format!(
                "control socket {socket}: it is for another user alone: run this command as that user"
            )
        }
        io::ErrorKind::WouldBlock => format!(
            "control socket {socket}: no answer in {} s",
            PATIENCE.as_secs()
        ),
        _ => format!("control socket {socket}: {error}"),
    })
}
