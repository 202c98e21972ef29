//! `GET /v1/events`: what happens to the disks, a JSON object a line, for everyone who listens.
//!
//! A reader that is slow loses events, and is told how many. Nobody waits for it, and it costs a bounded amount of memory.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use cleave_api::{EventName, ProblemKind};
use hyper::body::Frame;
use serde_json::{Map, Value, json};

use crate::problem::Refusal;

/// Most readers at a time, and the most events that wait for one.
const READERS_MAX: usize = 16;
const LINES_MAX: usize = 256;

/// Everyone who listens.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<Vec<Weak<Mutex<Waiting>>>>);

/// Lines that wait for one reader.
#[derive(Debug, Default)]
struct Waiting {
    lines: VecDeque<Bytes>,
    /// Events for which there was no room since the last of them.
    lost: u64,
    reader: Option<Waker>,
}

impl Events {
    /// Tells of an event of a disk. `more`: an object whose fields follow.
    pub(crate) fn tell(&self, disk: &str, event: EventName, more: Value) {
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
        readers.retain(|reader| {
            let reader = reader.upgrade();
            reader.inspect(|reader| lock(reader).tell(&line)).is_some()
        });
    }

    /// The answer to a new reader: a body without end.
    pub(crate) fn listen(&self) -> Result<Response, Refusal> {
        let mut readers = self.lock();
        readers.retain(|reader| reader.strong_count() > 0);
        if readers.len() >= READERS_MAX {
            let why = format!("{READERS_MAX} programs listen already: end one of them");
            return Err(Refusal(ProblemKind::TooManyListeners, why));
        }
        let reader = Arc::<Mutex<Waiting>>::default();
        // So that a client knows from when on it hears everything.
        lock(&reader).tell(&line(EventName::Listening, Map::new()));
        readers.push(Arc::downgrade(&reader));
        let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
        Ok((kind, Body::new(Lines(reader))).into_response())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Mutex<Waiting>>>> {
        lock(&self.0)
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Waiting {
    fn tell(&mut self, text: &Bytes) {
        if self.lines.len() >= LINES_MAX {
            self.lost += 1;
        } else {
            let lost = self.confess();
            self.lines.extend(lost);
            self.lines.push_back(text.clone());
        }
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    /// The next line. Lost events are told when all that came before them has been read, whether or not more events follow.
    fn next(&mut self) -> Option<Bytes> {
        self.lines.pop_front().or_else(|| self.confess())
    }

    /// The line that says how many events were lost, if any were.
    fn confess(&mut self) -> Option<Bytes> {
        let lost = std::mem::take(&mut self.lost);
        let fields = Map::from_iter([("events".to_owned(), json!(lost))]);
        (lost > 0).then(|| line(EventName::Lost, fields))
    }
}

/// Time and event, and what belongs to it.
fn line(event: EventName, fields: Map<String, Value>) -> Bytes {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    let time = time.unwrap_or_default().as_millis() as f64 / 1e3;
    let mut all = Map::new();
    all.insert("time".to_owned(), json!(time));
    all.insert("event".to_owned(), json!(event.name()));
    all.extend(fields);
    Bytes::from(format!("{}\n", Value::Object(all)))
}

/// The lines for one reader, as a body.
struct Lines(Arc<Mutex<Waiting>>);

impl hyper::body::Body for Lines {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let mut waiting = lock(&self.0);
        match waiting.next() {
            Some(line) => Poll::Ready(Some(Ok(Frame::data(line)))),
            None => {
                waiting.reader = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_reader_loses_events_and_hears_how_many() {
        let events = Events::default();
        let reader = Arc::<Mutex<Waiting>>::default();
        events.lock().push(Arc::downgrade(&reader));
        let read = || {
            let line = lock(&reader).next()?;
            Some(serde_json::from_slice::<Value>(&line).unwrap())
        };
        let lost = |line: &Value| (line["event"] == "lost").then(|| line["events"].clone());
        let fill = |more: usize| {
            for _ in 0..LINES_MAX + more {
                events.tell("d1", EventName::Connected, json!({"pid": 7}));
            }
        };
        fill(9);
        let first = read().unwrap();
        assert_eq!(
            (&first["event"], &first["pid"]),
            (&json!("connected"), &json!(7))
        );
        for _ in 1..LINES_MAX {
            assert_eq!(read().unwrap()["disk"], "d1");
        }
        // Although nothing else happens.
        assert_eq!(lost(&read().unwrap()), Some(json!(9)));
        assert_eq!(read(), None);

        // An event that comes after lost ones is read after the line that counts them.
        fill(2);
        read().unwrap();
        events.tell("d2", EventName::Failed, Value::Null);
        for _ in 1..LINES_MAX {
            assert_eq!(read().unwrap()["disk"], "d1");
        }
        assert_eq!(lost(&read().unwrap()), Some(json!(2)));
        assert_eq!(read().unwrap()["disk"], "d2");
        drop(reader);
        events.tell("d2", EventName::Failed, Value::Null);
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
