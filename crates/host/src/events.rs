//! `GET /v1/events`: what happens to the disks, a JSON object a line, for everyone who listens.
//!
//! The last events are kept, once for all readers, and each reader goes through them at its own pace. A reader that is slow loses
//! events, and is told how many. Nobody waits for it.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use cleave_api::{DiskRow, EventName, ProblemKind};
use hyper::body::Frame;
use serde_json::{Map, Value, json};

use crate::problem::Refusal;

/// Most readers at a time.
const READERS_MAX: usize = 16;
/// Most events that are kept, and most bytes of them. An event has some 200 bytes, a change of the settings 1 KiB.
const KEPT_MAX: usize = 1024;
const KEPT_BYTES_MAX: usize = 1 << 20;

/// The events of a process.
#[derive(Debug)]
pub(crate) struct Events {
    /// Names this start of the process. Events of another one have the same numbers.
    boot: String,
    log: Mutex<Log>,
}

/// The last events, and the readers.
#[derive(Debug, Default)]
struct Log {
    kept: VecDeque<Bytes>,
    /// Bytes of all that are kept.
    bytes: usize,
    /// Number of the last event that is not kept any more. The first event has number 1.
    dropped: u64,
    /// The readers by their numbers, with the wakers of those that wait.
    readers: BTreeMap<u64, Option<Waker>>,
    /// Number of the last reader that came.
    reader: u64,
}

/// A place in the events: after number `seq` of the process that `boot` names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Since {
    seq: u64,
    boot: String,
}

impl Since {
    /// Reads what follows `?`, such as `since=17&boot=5f0c`. `None`: it names no place.
    pub(crate) fn from_query(query: &str) -> Result<Option<Since>, Refusal> {
        let bad = |why: &str| {
            let why = format!("{why}: write ?since=SEQ&boot=BOOT with what the events have told");
            Refusal(ProblemKind::InvalidRequest, why)
        };
        let (mut seq, mut boot) = (None, None);
        for field in query.split('&').filter(|field| !field.is_empty()) {
            match field.split_once('=') {
                Some(("since", number)) if seq.is_none() => {
                    let number = number.parse::<u64>();
                    seq = Some(number.map_err(|_| bad("since is not the number of an event"))?);
                }
                Some(("boot", text)) if boot.is_none() => boot = Some(text.to_owned()),
                _ => return Err(bad("there is only since and boot, each once")),
            }
        }
        match (seq, boot) {
            (Some(seq), Some(boot)) => Ok(Some(Since { seq, boot })),
            (None, None) => Ok(None),
            _ => Err(bad("since and boot go together")),
        }
    }
}

impl Default for Events {
    fn default() -> Events {
        Events {
            // The keys of the hash are random, so two starts have two names.
            boot: format!("{:016x}", RandomState::new().hash_one(SystemTime::now())),
            log: Mutex::default(),
        }
    }
}

impl Events {
    /// Returns the name of this start of the process.
    pub(crate) fn boot(&self) -> &str {
        &self.boot
    }

    /// Tells of an event of a disk. `more`: an object whose fields follow.
    pub(crate) fn tell(&self, disk: &str, event: EventName, more: Value) {
        let mut fields = about(disk);
        if let Value::Object(more) = more {
            fields.extend(more);
        }
        self.lock().add(event, fields);
    }

    /// The answer to a new reader: a body without end. It begins with all disks, or with the events after `since` if all of them are
    /// still kept.
    pub(crate) fn listen(
        self: &Arc<Events>,
        since: Option<&Since>,
        disks: impl FnOnce() -> Vec<DiskRow>,
    ) -> Result<Response, Refusal> {
        let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
        let lines = self.lines(since, disks)?;
        Ok((kind, Body::new(lines)).into_response())
    }

    fn lines(
        self: &Arc<Events>,
        since: Option<&Since>,
        disks: impl FnOnce() -> Vec<DiskRow>,
    ) -> Result<Lines, Refusal> {
        let since = since.filter(|since| since.boot == self.boot);
        let (reader, seq, replayed) = self.lock().join(since)?;
        let mut lines = Lines {
            events: self.clone(),
            reader,
            first: None,
            seq,
        };
        // The reader hears all that happens from now on, so a disk that changes while the list is made is in it as it was or as it
        // is, and its event follows. The lock is free meanwhile: a worker that tells of an event does not wait for the list.
        let disks = match replayed {
            true => Vec::new(),
            false => disks(),
        };
        lines.first = Some(beginning(&self.boot, seq, replayed, &disks));
        Ok(lines)
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Log {
    /// Number of the last event.
    fn last(&self) -> u64 {
        self.dropped + self.kept.len() as u64
    }

    fn add(&mut self, event: EventName, fields: Map<String, Value>) {
        let line = line(self.last() + 1, event, fields);
        self.bytes += line.len();
        self.kept.push_back(line);
        while self.kept.len() > KEPT_MAX || self.bytes > KEPT_BYTES_MAX {
            self.bytes -= self.kept.pop_front().map_or(0, |line| line.len());
            self.dropped += 1;
        }
        let waiting = self.readers.values_mut().filter_map(Option::take);
        waiting.for_each(Waker::wake);
    }

    /// Adds a reader. Returns its number, the event after which it begins, and true if that is the one it asked for.
    fn join(&mut self, since: Option<&Since>) -> Result<(u64, u64, bool), Refusal> {
        if self.readers.len() >= READERS_MAX {
            let why = format!("{READERS_MAX} programs listen already: end one of them");
            return Err(Refusal(ProblemKind::TooManyListeners, why));
        }
        self.reader += 1;
        self.readers.insert(self.reader, None);
        let since = since.map(|since| since.seq);
        let since = since.filter(|seq| (self.dropped..=self.last()).contains(seq));
        Ok((self.reader, since.unwrap_or(self.last()), since.is_some()))
    }

    /// Returns the line that follows event `seq`, and the number of the last event that it tells of. If events after `seq` are not kept
    /// any more, it says how many.
    fn after(&self, seq: u64) -> Option<(u64, Bytes)> {
        match self.dropped.checked_sub(seq) {
            None | Some(0) => {
                let at = usize::try_from(seq - self.dropped).ok()?;
                Some((seq + 1, self.kept.get(at)?.clone()))
            }
            Some(lost) => {
                let fields = Map::from_iter([("events".to_owned(), json!(lost))]);
                Some((self.dropped, line(self.dropped, EventName::Lost, fields)))
            }
        }
    }
}

/// The lines before the events: where they begin, and the disks as they are.
fn beginning(boot: &str, seq: u64, replayed: bool, disks: &[DiskRow]) -> Bytes {
    let listening = json!({"boot": boot, "replayed": replayed, "disks": disks.len()});
    let Value::Object(listening) = listening else {
        return Bytes::new();
    };
    let disks = disks.iter().map(|disk| {
        let mut fields = about(&disk.id);
        // It has no part that could not be written.
        if let Ok(Value::Object(row)) = serde_json::to_value(disk) {
            fields.extend(row);
        }
        line(seq, EventName::Disk, fields)
    });
    let first = line(seq, EventName::Listening, listening);
    let all: Vec<Bytes> = std::iter::once(first).chain(disks).collect();
    all.concat().into()
}

/// The field that says which disk a line is about.
fn about(disk: &str) -> Map<String, Value> {
    Map::from_iter([("disk".to_owned(), json!(disk))])
}

/// Number, time and event, and what belongs to it.
fn line(seq: u64, event: EventName, fields: Map<String, Value>) -> Bytes {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    let time = time.unwrap_or_default().as_millis() as f64 / 1e3;
    let mut all = fields;
    all.insert("seq".to_owned(), json!(seq));
    all.insert("time".to_owned(), json!(time));
    all.insert("event".to_owned(), json!(event.name()));
    Bytes::from(format!("{}\n", Value::Object(all)))
}

/// The lines for one reader, as a body.
#[derive(Debug)]
struct Lines {
    events: Arc<Events>,
    reader: u64,
    /// Lines that come before all events.
    first: Option<Bytes>,
    /// The last event that was read.
    seq: u64,
}

impl Lines {
    /// The next line. Without one, `waker` is called when there is.
    fn next(&mut self, waker: &Waker) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        let mut log = self.events.lock();
        let Some((seq, line)) = log.after(self.seq) else {
            log.readers.insert(self.reader, Some(waker.clone()));
            return None;
        };
        self.seq = seq;
        Some(line)
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.events.lock().readers.remove(&self.reader);
    }
}

impl hyper::body::Body for Lines {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match self.next(context.waker()) {
            Some(line) => Poll::Ready(Some(Ok(Frame::data(line)))),
            None => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use cleave_api::DiskState;

    use super::*;

    /// A reader, whose lines a test takes one by one.
    struct Reader {
        lines: Lines,
        /// Lines that came in one piece.
        rest: VecDeque<Value>,
        woken: Arc<Woken>,
    }

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Woken>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Reader {
        fn new(events: &Arc<Events>, since: Option<&Since>) -> Reader {
            let lines = events.lines(since, || vec![row("d1"), row("d2")]);
            Reader {
                lines: lines.unwrap(),
                rest: VecDeque::new(),
                woken: Arc::default(),
            }
        }

        fn next(&mut self) -> Option<Value> {
            if self.rest.is_empty() {
                let piece = self.lines.next(&self.woken.clone().into())?;
                let lines = piece.split_inclusive(|byte| *byte == b'\n');
                let lines = lines.map(|line| serde_json::from_slice(line).unwrap());
                self.rest.extend(lines);
            }
            self.rest.pop_front()
        }

        /// The numbers and names of all lines that are there.
        fn told(&mut self) -> Vec<(u64, String)> {
            let next = || self.next();
            let lines = std::iter::from_fn(next);
            let line = |line: Value| {
                let name = line["event"].as_str().unwrap().to_owned();
                (line["seq"].as_u64().unwrap(), name)
            };
            lines.map(line).collect()
        }

        fn is_replayed(&mut self) -> bool {
            let first = self.next().unwrap();
            assert_eq!(first["event"], "listening");
            let disks = if first["replayed"] == json!(true) {
                0
            } else {
                2
            };
            assert_eq!(first["disks"], json!(disks));
            for _ in 0..disks {
                let disk = self.next().unwrap();
                assert_eq!(
                    (&disk["event"], &disk["seq"]),
                    (&json!("disk"), &first["seq"])
                );
            }
            disks == 0
        }
    }

    fn row(id: &str) -> DiskRow {
        DiskRow {
            id: id.to_owned(),
            state: DiskState::Serving,
            generation: String::new(),
            labels: cleave_config::Labels::default(),
            socket: "/s".to_owned(),
            name: "ram:1M".to_owned(),
            serial: None,
            size_bytes: 1 << 20,
            connected: false,
            error: None,
        }
    }

    fn tell(events: &Events, count: u64) {
        for _ in 0..count {
            events.tell("d1", EventName::Connected, json!({"pid": 7}));
        }
    }

    fn since(events: &Events, seq: u64) -> Since {
        let boot = events.boot().to_owned();
        Since { seq, boot }
    }

    fn told(lines: &[(u64, &str)]) -> Vec<(u64, String)> {
        let lines = lines.iter();
        lines
            .map(|(seq, name)| (*seq, (*name).to_owned()))
            .collect()
    }

    #[test]
    fn a_reader_learns_of_all_disks_and_then_of_each_event() {
        let events = Arc::<Events>::default();
        tell(&events, 3);
        let mut reader = Reader::new(&events, None);
        tell(&events, 1);
        let first = reader.next().unwrap();
        assert_eq!(
            (
                &first["event"],
                &first["seq"],
                &first["disks"],
                &first["replayed"]
            ),
            (&json!("listening"), &json!(3), &json!(2), &json!(false))
        );
        assert_eq!(first["boot"], json!(events.boot()));
        let disk = reader.next().unwrap();
        assert_eq!(
            (&disk["event"], &disk["disk"], &disk["id"], &disk["state"]),
            (
                &json!("disk"),
                &json!("d1"),
                &json!("d1"),
                &json!("serving")
            )
        );
        assert_eq!(reader.told(), told(&[(3, "disk"), (4, "connected")]));
        // It waits now, and is woken once.
        tell(&events, 2);
        assert_eq!(reader.woken.0.load(Ordering::Relaxed), 1);
        let event = reader.next().unwrap();
        assert_eq!((&event["seq"], &event["pid"]), (&json!(5), &json!(7)));
        assert_eq!(reader.told(), told(&[(6, "connected")]));
    }

    /// What happens while the list of the disks is made is not lost.
    #[test]
    fn an_event_during_the_snapshot_follows_it() {
        let events = Arc::<Events>::default();
        let lines = events.lines(None, || {
            events.tell("d3", EventName::Opening, Value::Null);
            Vec::new()
        });
        let mut reader = Reader {
            lines: lines.unwrap(),
            rest: VecDeque::new(),
            woken: Arc::default(),
        };
        assert_eq!(reader.told(), told(&[(0, "listening"), (1, "opening")]));
    }

    #[test]
    fn events_that_are_kept_are_replayed_instead_of_the_disks() {
        let events = Arc::<Events>::default();
        tell(&events, 5);
        let mut reader = Reader::new(&events, Some(&since(&events, 3)));
        tell(&events, 1);
        let (four, five, six) = ((4, "connected"), (5, "connected"), (6, "connected"));
        assert_eq!(reader.told(), told(&[(3, "listening"), four, five, six]));
        // There may have been none.
        let mut reader = Reader::new(&events, Some(&since(&events, 6)));
        assert!(reader.is_replayed());
        assert_eq!(reader.told(), []);
    }

    #[test]
    fn a_place_that_is_not_kept_begins_with_the_disks() {
        let events = Arc::<Events>::default();
        tell(&events, KEPT_MAX as u64 + 2);
        for (seq, is_kept) in [
            (0, false),
            (1, false),
            (2, true),
            (1026, true),
            (1027, false),
        ] {
            let mut reader = Reader::new(&events, Some(&since(&events, seq)));
            assert_eq!(reader.is_replayed(), is_kept, "{seq}");
        }
        let boot = Arc::<Events>::default().boot().to_owned();
        assert_ne!(boot, events.boot());
        let mut reader = Reader::new(&events, Some(&Since { seq: 2, boot }));
        assert!(!reader.is_replayed());
    }

    #[test]
    fn a_slow_reader_loses_events_and_hears_how_many() {
        let events = Arc::<Events>::default();
        let mut reader = Reader::new(&events, None);
        assert!(!reader.is_replayed());
        tell(&events, KEPT_MAX as u64 + 9);
        // Although nothing else happens.
        let lost = reader.next().unwrap();
        assert_eq!(
            (&lost["event"], &lost["events"], &lost["seq"]),
            (&json!("lost"), &json!(9), &json!(9))
        );
        assert_eq!(reader.next().unwrap()["seq"], json!(10));
        assert_eq!(reader.told().len(), KEPT_MAX - 1);
        tell(&events, KEPT_MAX as u64);
        let all = reader.told();
        assert_eq!(all.len(), KEPT_MAX);
        assert!(all.iter().all(|(_, name)| name == "connected"));
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let events = Events::default();
        let large = json!({"error": "x".repeat(KEPT_BYTES_MAX / 10)});
        for _ in 0..KEPT_MAX {
            events.tell("d1", EventName::Error, large.clone());
        }
        let kept = |events: &Events| {
            let log = events.lock();
            let bytes: usize = log.kept.iter().map(Bytes::len).sum();
            assert_eq!(log.bytes, bytes);
            assert_eq!(log.last(), log.dropped + log.kept.len() as u64);
            (log.kept.len(), bytes)
        };
        let (count, bytes) = kept(&events);
        assert_eq!(count, 9);
        assert!(bytes <= KEPT_BYTES_MAX, "{bytes}");
        // One that is larger by itself is lost to all.
        let huge = json!({"error": "x".repeat(KEPT_BYTES_MAX)});
        events.tell("d1", EventName::Error, huge);
        assert_eq!(kept(&events), (0, 0));
        tell(&events, 2 * KEPT_MAX as u64);
        assert_eq!(kept(&events).0, KEPT_MAX);
    }

    #[test]
    fn there_are_only_so_many_readers() {
        let events = Arc::<Events>::default();
        let readers: Vec<_> = (0..READERS_MAX)
            .map(|_| events.listen(None, Vec::new).unwrap())
            .collect();
        assert!(events.listen(None, Vec::new).is_err());
        drop(readers);
        assert!(events.lock().readers.is_empty());
        assert!(events.listen(None, Vec::new).is_ok());
    }

    #[test]
    fn a_place_is_named_whole_or_refused() {
        let read = |query| Since::from_query(query).map_err(|Refusal(kind, _)| kind.status());
        let boot = "5f".to_owned();
        let place = Some(Since { seq: 17, boot });
        assert_eq!(read(""), Ok(None));
        assert_eq!(read("since=17&boot=5f"), Ok(place));
        assert!(matches!(read("boot=&since=0"), Ok(Some(_))));
        for bad in [
            "since=17",
            "boot=5f",
            "since=-1&boot=5f",
            "since=x&boot=5f",
            "since=&boot=5f",
            "since=18446744073709551616&boot=5f",
            "since=1&since=2&boot=5f",
            "since=1&boot=5f&boot=60",
            "since=1&boot=5f&wait=1",
            "since",
        ] {
            assert_eq!(read(bad), Err(400), "{bad}");
        }
    }
}
