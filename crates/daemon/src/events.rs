//! `GET /v1/events`: what happens to the disks, a JSON object a line, for everyone who listens.
//!
//! A reader that is slow loses events, and is told how many. Nobody waits for it, and it costs a bounded amount of memory.

use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use hyper::body::Frame;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use crate::control::Refusal;

/// Most readers at a time, and most lines that wait for one.
const READERS_MAX: usize = 16;
const LINES_MAX: usize = 256;

/// Everyone who listens.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<Vec<Reader>>);

#[derive(Debug)]
struct Reader {
    lines: mpsc::Sender<Bytes>,
    /// Events since the last line that it had no room for.
    lost: u64,
}

impl Events {
    /// Tells of an event of a disk. `more`: an object whose fields follow.
    pub(crate) fn tell(&self, disk: &str, event: &str, more: Value) {
        let mut readers = self.lock();
        if readers.is_empty() {
            return;
        }
        let mut fields = Map::new();
        fields.insert("disk".to_owned(), json!(disk));
        if let Value::Object(more) = more {
            fields.extend(more);
        }
        let line = line(event, fields);
        readers.retain_mut(|reader| reader.tell(&line));
    }

    /// The answer to a new reader: a body without end.
    pub(crate) fn listen(&self) -> Result<Response, Refusal> {
        let mut readers = self.lock();
        readers.retain(|reader| !reader.lines.is_closed());
        if readers.len() >= READERS_MAX {
            let why = format!("{READERS_MAX} programs listen already: end one of them");
            return Err(Refusal(StatusCode::SERVICE_UNAVAILABLE, why));
        }
        let (lines, taken) = mpsc::channel(LINES_MAX);
        let mut reader = Reader { lines, lost: 0 };
        // So that a client knows from when on it hears everything.
        reader.tell(&line("listening", Map::new()));
        readers.push(reader);
        let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
        Ok((kind, Body::new(Lines(taken))).into_response())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Reader>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reader {
    /// `false`: it has left.
    fn tell(&mut self, text: &Bytes) -> bool {
        // Room for the line that tells of lost ones is kept free.
        let room = self.lines.capacity();
        if room < 2 {
            self.lost += 1;
            return !self.lines.is_closed();
        }
        if self.lost > 0 {
            let mut fields = Map::new();
            fields.insert("events".to_owned(), json!(self.lost));
            self.lost = 0;
            let _ = self.lines.try_send(line("lost", fields));
        }
        self.lines.try_send(text.clone()).is_ok()
    }
}

/// Time and event, and what belongs to it.
fn line(event: &str, fields: Map<String, Value>) -> Bytes {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    let time = time.unwrap_or_default().as_millis() as f64 / 1e3;
    let mut all = Map::new();
    all.insert("time".to_owned(), json!(time));
    all.insert("event".to_owned(), json!(event));
    all.extend(fields);
    Bytes::from(format!("{}\n", Value::Object(all)))
}

/// The lines for one reader.
struct Lines(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Lines {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let line = self.0.poll_recv(context);
        line.map(|line| line.map(|line| Ok(Frame::data(line))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_reader_loses_events_and_hears_how_many() {
        let events = Events::default();
        let (lines, mut taken) = mpsc::channel(LINES_MAX);
        events.lock().push(Reader { lines, lost: 0 });
        for _ in 0..LINES_MAX + 9 {
            events.tell("d1", "connected", json!({"pid": 7}));
        }
        let mut read = || serde_json::from_slice::<Value>(&taken.try_recv().unwrap()).unwrap();
        let first = read();
        assert_eq!(
            (&first["event"], &first["pid"]),
            (&json!("connected"), &json!(7))
        );
        for _ in 1..LINES_MAX - 1 {
            assert_eq!(read()["disk"], "d1");
        }
        events.tell("d2", "failed", Value::Null);
        let lost = read();
        assert_eq!(
            (&lost["event"], &lost["events"]),
            (&json!("lost"), &json!(10))
        );
        assert_eq!(read()["disk"], "d2");
        drop(taken);
        events.tell("d2", "failed", Value::Null);
        assert!(events.lock().is_empty());
    }

    #[test]
    fn there_are_only_so_many_readers() {
        let events = Events::default();
        let readers: Vec<_> = (0..READERS_MAX).map(|_| events.listen().unwrap()).collect();
        assert!(events.listen().is_err());
        drop(readers);
        assert!(events.listen().is_ok());
    }
}
