//! A client of a control socket: HTTP/1.0 over a unix socket, with a connection for each request. A reply to that version never comes
//! in chunks.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::de::DeserializeOwned;

use crate::problem::{Problem, ProblemKind};
use crate::table::Operation;

/// Longest line of a header.
const LINE_BYTES_MAX: u64 = 16 << 10;
/// Most lines of a header.
const HEADER_LINES_MAX: usize = 100;
/// More than a node of 1024 disks has to list.
const BODY_BYTES_MAX: u64 = 64 << 20;
/// Most bytes of an event. Its settings are the longest that it has.
const EVENT_BYTES_MAX: u64 = 1 << 20;

/// A client of a control socket.
#[derive(Debug, Clone)]
pub struct HttpClient {
    socket: PathBuf,
    patience: Duration,
}

/// A reply that came in whole.
#[derive(Debug, Clone)]
pub struct HttpReply {
    /// The status.
    pub status: u16,
    /// The lines of the header, with the status line.
    pub header: String,
    /// The body.
    pub body: String,
}

/// A reply to a request for another protocol.
#[derive(Debug)]
pub enum UpgradeReply {
    /// The connection carries it from now on.
    Agreed(UnixStream),
    /// There is nothing to be said with it.
    Nothing,
    /// The server refuses.
    Refused(HttpReply),
}

/// Why there is no reply.
#[derive(Debug)]
pub enum ClientError {
    /// There is no socket of that name.
    NoSocket,
    /// The socket is there, but no process listens on it.
    NoListener,
    /// The socket does not let this user connect.
    OtherUser,
    /// The reply did not come in time.
    Late(Duration),
    /// The reply is not one of a control socket, for this reason.
    Unexpected(String),
    /// The request was refused, for this reason.
    Refused(String),
    /// The connection failed.
    Failed(io::Error),
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientError::NoSocket => f.write_str("no such socket"),
            ClientError::NoListener => f.write_str("nobody listens"),
            ClientError::OtherUser => f.write_str("it is for another user alone"),
            ClientError::Late(patience) => write!(f, "no answer in {} s", patience.as_secs()),
            ClientError::Unexpected(why) => write!(
                f,
                "unexpected reply; is this the control socket of cleave? ({why})"
            ),
            ClientError::Refused(why) => f.write_str(why),
            ClientError::Failed(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ClientError {}

impl HttpReply {
    /// Returns why the request was refused, if it was.
    pub fn refusal(&self) -> Option<String> {
        if (200..300).contains(&self.status) {
            return None;
        }
        let problem = serde_json::from_str::<Problem>(&self.body);
        Some(match problem {
            Ok(problem) => problem.detail,
            Err(_) => format!("refused with status {}, without a reason", self.status),
        })
    }

    /// Returns true if the request was refused with a problem of this kind.
    pub fn is_problem(&self, kind: ProblemKind) -> bool {
        let problem = serde_json::from_str::<Problem>(&self.body);
        problem.is_ok_and(|problem| problem.r#type == kind.uri())
    }

    /// Reads the body as JSON.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, ClientError> {
        serde_json::from_str(&self.body).map_err(|error| ClientError::Unexpected(error.to_string()))
    }
}

impl HttpClient {
    /// Makes a client of this socket that waits at most `patience` for a reply.
    pub fn new(socket: &Path, patience: Duration) -> HttpClient {
        let socket = socket.to_owned();
        HttpClient { socket, patience }
    }

    /// Requests an operation on the disk `id`, if it is about a disk.
    pub fn call(
        &self,
        operation: Operation,
        id: &str,
        body: &str,
    ) -> Result<HttpReply, ClientError> {
        self.send(operation.route().method.name(), &operation.path(id), body)
    }

    /// Sends a request, and takes the reply to its end. `target` is the path, and what follows it.
    pub fn send(&self, method: &str, target: &str, body: &str) -> Result<HttpReply, ClientError> {
        self.exchange(method, target, body)
            .map_err(|error| self.explain(error))
    }

    /// Asks for a connection that carries another protocol from then on.
    pub fn upgrade(&self, target: &str, protocol: &str) -> Result<UpgradeReply, ClientError> {
        let request = format!(
            "POST {target} HTTP/1.1\r\nHost: cleave\r\nConnection: upgrade\r\nUpgrade: {protocol}\r\nContent-Length: 0\r\n\r\n"
        );
        let begun = self.start(&request).map_err(|error| self.explain(error))?;
        match begun.status {
            101 => return Ok(UpgradeReply::Agreed(begun.stream.into_inner().stream)),
            204 => return Ok(UpgradeReply::Nothing),
            _ => {}
        }
        let reply = begun.finish().map_err(|error| self.explain(error))?;
        match (200..300).contains(&reply.status) {
            true => Err(ClientError::Unexpected(
                "it does not change the protocol".to_owned(),
            )),
            false => Ok(UpgradeReply::Refused(reply)),
        }
    }

    /// Takes the disks and the events from now on, or the events after a place such as `since=17&boot=5f0c`, as long as none is further
    /// from the one before than `silence`; `None`: without end.
    pub fn watch(&self, place: &str, silence: Option<Duration>) -> Result<EventLines, ClientError> {
        let route = Operation::WatchEvents.route();
        let target = match place {
            "" => route.path.to_owned(),
            place => format!("{}?{place}", route.path),
        };
        let begun = self.begin(route.method.name(), &target, "");
        let mut begun = begun.map_err(|error| self.explain(error))?;
        if begun.status != 200 {
            let reply = begun.finish().map_err(|error| self.explain(error))?;
            return Err(ClientError::Refused(reply.refusal().unwrap_or_default()));
        }
        let stream = begun.stream.get_mut();
        stream.until = None;
        let set = stream.stream.set_read_timeout(silence);
        set.map_err(|error| self.explain(error))?;
        Ok(EventLines {
            client: self.clone(),
            lines: begun.stream,
        })
    }

    fn exchange(&self, method: &str, target: &str, body: &str) -> io::Result<HttpReply> {
        self.begin(method, target, body)?.finish()
    }

    /// Sends a request, and reads the header of the reply.
    fn begin(&self, method: &str, target: &str, body: &str) -> io::Result<Begun> {
        self.start(&format!(
            "{method} {target} HTTP/1.0\r\nHost: cleave\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ))
    }

    fn start(&self, request: &str) -> io::Result<Begun> {
        let mut stream = Timed {
            stream: connected(&self.socket, self.patience)?,
            until: Some(Instant::now() + self.patience),
        };
        match stream.write_all(request.as_bytes()) {
            // A refusal may come before the request has been read, and then counts.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
            _ => Begun::read(BufReader::new(stream)),
        }
    }

    fn explain(&self, error: io::Error) -> ClientError {
        match error.kind() {
            io::ErrorKind::NotFound => ClientError::NoSocket,
            io::ErrorKind::ConnectionRefused => ClientError::NoListener,
            io::ErrorKind::PermissionDenied => ClientError::OtherUser,
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ClientError::Late(self.patience),
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
                ClientError::Unexpected(error.to_string())
            }
            _ => ClientError::Failed(error),
        }
    }
}

/// Connects. A process that is stopped accepts nobody, so the wait for that has an end as well.
fn connected(socket: &Path, patience: Duration) -> io::Result<UnixStream> {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    let stream = socket_with(family, SocketType::STREAM, flags, None)?;
    set_socket_timeout(&stream, Timeout::Send, Some(patience))?;
    connect(&stream, &SocketAddrUnix::new(socket)?)?;
    Ok(stream.into())
}

/// A connection whose reads and writes have an end together.
#[derive(Debug)]
struct Timed {
    stream: UnixStream,
    until: Option<Instant>,
}

impl Timed {
    /// Returns the time that is left; `None`: there is no end.
    fn left(&self) -> io::Result<Option<Duration>> {
        let Some(until) = self.until else {
            return Ok(None);
        };
        match until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

impl Read for Timed {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if let Some(left) = self.left()? {
            self.stream.set_read_timeout(Some(left))?;
        }
        self.stream.read(to)
    }
}

impl Write for Timed {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        if let Some(left) = self.left()? {
            self.stream.set_write_timeout(Some(left))?;
        }
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A reply whose header has been read.
struct Begun<S = Timed> {
    status: u16,
    header: String,
    stream: BufReader<S>,
    /// Bytes of the body. `None`: it ends with the connection.
    length: Option<u64>,
}

impl<S: Read> Begun<S> {
    fn read(mut stream: BufReader<S>) -> io::Result<Begun<S>> {
        let mut header = line(&mut stream)?;
        let mut words = header.split(' ');
        let is_http = words.next().is_some_and(|word| word.starts_with("HTTP/1."));
        let status = words.next().filter(|_| is_http);
        let status = status.and_then(|status| status.trim_end().parse().ok());
        let status = status.ok_or_else(|| broken("it is not HTTP"))?;
        let mut length = None;
        for _ in 0..HEADER_LINES_MAX {
            let line = line(&mut stream)?;
            if line.trim_end().is_empty() {
                return Ok(Begun {
                    status,
                    header,
                    stream,
                    length,
                });
            }
            let (name, value) = line.split_once(':').unwrap_or((&line, ""));
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().ok();
            }
            header += &line;
        }
        Err(broken("its header has no end"))
    }

    fn finish(self) -> io::Result<HttpReply> {
        let mut body = String::new();
        let most = BODY_BYTES_MAX + 1;
        let mut bounded = self
            .stream
            .take(self.length.map_or(most, |length| length.min(most)));
        match bounded.read_to_string(&mut body)? as u64 {
            read if read > BODY_BYTES_MAX => return Err(broken("it is too long")),
            read if self.length.is_some_and(|length| read < length) => {
                return Err(broken("it breaks off"));
            }
            _ => {}
        }
        Ok(HttpReply {
            status: self.status,
            header: self.header,
            body,
        })
    }
}

fn broken(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Reads a line with its end.
fn line(stream: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    stream.take(LINE_BYTES_MAX).read_line(&mut line)?;
    match line.ends_with('\n') {
        true => Ok(line),
        false => Err(broken("a line of it has no end")),
    }
}

/// Events as they come, a line of JSON each. They end when the daemon ends.
pub struct EventLines {
    client: HttpClient,
    lines: BufReader<Timed>,
}

impl Iterator for EventLines {
    type Item = Result<String, ClientError>;

    fn next(&mut self) -> Option<Result<String, ClientError>> {
        let mut line = String::new();
        let mut bounded = self.lines.by_ref().take(EVENT_BYTES_MAX);
        match bounded.read_line(&mut line) {
            Ok(_) if line.ends_with('\n') => Some(Ok(line.trim_end().to_owned())),
            // The other side went away, maybe in the middle of a line.
            Ok(_) => None,
            Err(error) => Some(Err(self.client.explain(error))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::net::listen;

    use super::*;

    fn read(bytes: &str) -> io::Result<HttpReply> {
        Begun::read(BufReader::new(bytes.as_bytes()))?.finish()
    }

    #[test]
    fn a_body_ends_where_its_header_says() {
        for (reply, body) in [
            ("HTTP/1.1 200 OK\r\nA: b\r\n\r\n{}\r\n\r\n", "{}\r\n\r\n"),
            ("HTTP/1.0 200\r\ncontent-length: 2\r\n\r\n{}rest", "{}"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ""),
        ] {
            let read = read(reply).unwrap();
            assert_eq!((read.status, &*read.body), (200, body), "{reply:?}");
            assert_eq!(read.refusal(), None);
        }
    }

    #[test]
    fn what_is_not_whole_is_not_a_reply() {
        for reply in [
            "",
            "SSH-2.0\r\n\r\n",
            "HTTP/1.1 200 OK\r\n",
            "HTTP/1.1 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}",
            &["HTTP/1.1 200 OK\r\n", &"A: b\r\n".repeat(200)].concat(),
            &["HTTP/1.1 200 OK\r\nA: ", &"b".repeat(20_000)].concat(),
        ] {
            assert!(read(reply).is_err(), "{reply:?}");
        }
    }

    #[test]
    fn a_socket_without_a_reply_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let ask = || {
            let client = HttpClient::new(&socket, Duration::from_millis(20));
            let reply = client.call(Operation::ListDisks, "", "");
            reply.unwrap_err().to_string()
        };
        assert_eq!(ask(), "no such socket");
        // Nobody is accepted, and the queue is full after the first.
        let listener = UnixListener::bind(&socket).unwrap();
        listen(&listener, 0).unwrap();
        for _ in 0..3 {
            assert_eq!(ask(), "no answer in 0 s");
        }
        drop(listener);
        assert_eq!(ask(), "nobody listens");
    }

    #[test]
    fn a_refusal_says_why() {
        let problem =
            r#"{"type":"about:blank","title":"Not Found","status":404,"detail":"no disk `a`"}"#;
        for (body, why) in [
            (problem, "no disk `a`"),
            ("", "refused with status 404, without a reason"),
        ] {
            let reply = read(&format!("HTTP/1.1 404 Not Found\r\n\r\n{body}")).unwrap();
            assert_eq!(reply.refusal().as_deref(), Some(why));
        }
    }
}
