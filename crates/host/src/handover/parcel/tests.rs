use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::{Value, json};

use super::*;

/// Seals that a document must have.
const SEALS: [SealFlags; 3] = [SealFlags::SHRINK, SealFlags::GROW, SealFlags::WRITE];
const DOCUMENT_BYTES_MAX: usize = 4 << 20;

type Fds = Vec<(String, OwnedFd)>;

/// The other ends of descriptors: they show when those are closed.
#[derive(Default)]
struct Ends(Vec<OwnedFd>);

impl Ends {
    fn pipe(&mut self) -> OwnedFd {
        let (end, fd) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        self.0.push(end);
        fd
    }

    fn connection(&mut self) -> UnixStream {
        let (end, stream) = UnixStream::pair().unwrap();
        end.set_nonblocking(true).unwrap();
        self.0.push(end.into());
        stream
    }

    fn closed(&self) -> usize {
        let is_closed = |end: &&OwnedFd| rustix::io::read(end, &mut [0; 8]) == Ok(0);
        self.0.iter().filter(is_closed).count()
    }

    #[track_caller]
    fn assert_closed(&self, what: &str) {
        assert_eq!(self.closed(), self.0.len(), "{what}: descriptors are open");
    }

    /// Waits until all are closed, which those of sessions are by another thread.
    fn all_close(&self) -> bool {
        let minute = Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        self.0.iter().all(|end| {
            let mut fds = [PollFd::new(end, PollFlags::IN)];
            poll(&mut fds, Some(&minute)) == Ok(1)
        }) && self.closed() == self.0.len()
    }
}

fn listener() -> OwnedFd {
    let folder = tempfile::tempdir().unwrap();
    UnixListener::bind(folder.path().join("s")).unwrap().into()
}

fn message(request: u32, payload: &[u8], fds: Vec<OwnedFd>) -> RecordedMessage {
    RecordedMessage {
        request,
        payload: payload.to_vec(),
        fds,
    }
}

fn parcel(ends: &mut Ends) -> Parcel {
    let owner = Handover {
        connection: ends.connection(),
        owns: true,
        has_owned: true,
        needs_reset: false,
        writeback: Some(false),
        device: vec![0xd1, 0x5c],
        messages: vec![
            message(5, &[0, 0x7f, 0xff], vec![ends.pipe(), ends.pipe()]),
            message(2, &[], Vec::new()),
        ],
    };
    let parked = Handover {
        connection: ends.connection(),
        owns: false,
        has_owned: true,
        needs_reset: true,
        writeback: None,
        device: Vec::new(),
        messages: Vec::new(),
    };
    Parcel {
        disk: DiskRecord {
            id: "a".to_owned(),
            storage: "/dev/a,/dev/b".to_owned(),
            endpoint: "/run/a.sock".to_owned(),
            identities: vec![None, Some([1, 2, 3])],
            raw_chunk_bytes: None,
        },
        files: vec![ends.pipe(), ends.pipe()],
        listener: vec![listener()].into(),
        control: Some(listener()),
        metrics: Some(listener()),
        watchdog: Some(Duration::from_secs(30)),
        sessions: vec![owner, parked].into(),
        since: Some(Duration::from_nanos(5_000_000_001)),
        limit_levels: Some([
            [0.0, 0.0],
            [1.5, 0.5],
            [0.0; 2],
            [0.0; 2],
            [0.0; 2],
            [7e9, 0.0],
        ]),
        sync_failure: None,
    }
}

fn memfd(text: &[u8], seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("document", flags).unwrap());
    file.write_all(text).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file.into()
}

fn sealed(text: &[u8]) -> OwnedFd {
    memfd(text, SEALS.into_iter().collect())
}

fn text_of(document: &OwnedFd) -> String {
    let path = format!("/proc/self/fd/{}", document.as_raw_fd());
    std::fs::read_to_string(path).unwrap()
}

/// A document and its descriptors, with names as a store has them.
fn kept(ends: &mut Ends) -> (Value, Fds) {
    let document = json!({
        "format": "cleave-hand-over", "version": 1, "cleave": "9.8.7",
        "disk": {"id": "a", "storage": "/dev/a", "endpoint": "/run/a.sock", "identities": []},
        "files": ["cleave-a-17"], "listener": "l", "since_ns": 1,
        "sessions": [{"connection": "c", "owns": true, "has_owned": true, "needs_reset": false, "writeback": null, "device": "", "messages": [
            {"request": 5, "payload": "00ff", "fds": ["m"]}
        ]}]
    });
    let fds = [
        ("cleave-a-17", ends.pipe()),
        ("l", listener()),
        ("c", ends.connection().into()),
        ("m", ends.pipe()),
    ];
    (document, fds.map(|(name, fd)| (name.to_owned(), fd)).into())
}

fn unpack(text: &[u8], fds: Fds) -> Result<Parcel, UnpackError> {
    let document = sealed(text);
    Parcel::unpack(Packed::received(document, fds))
}

#[test]
fn a_parcel_is_unpacked_as_it_was_packed() {
    let mut ends = Ends::default();
    let parcel = parcel(&mut ends);
    // Descriptors are shown by their numbers, and keep them.
    let shown = format!("{parcel:?}");
    let packed = parcel.pack().unwrap();
    assert_eq!(packed.fds().count(), 9);
    let parcel = Parcel::unpack(packed).unwrap();
    assert_eq!(format!("{parcel:?}"), shown);
    assert_eq!(ends.closed(), 0);
    drop(parcel);
    assert!(ends.all_close(), "descriptors are open");
}

/// Written by a process, and read by another that may be years younger.
#[test]
fn the_format_is_fixed() {
    let packed = parcel(&mut Ends::default()).pack().unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let head = format!(r#"{{"format":"cleave-hand-over","version":1,"cleave":"{version}","#);
    let disk = r#""disk":{"id":"a","storage":"/dev/a,/dev/b","endpoint":"/run/a.sock","identities":[null,[1,2,3]]},"#;
    let files = r#""files":["0","1"],"listener":"2","control":"3","metrics":"4","#;
    let since = r#""watchdog_ns":30000000000,"since_ns":5000000001,"#;
    let levels = r#""limit_levels":[[0.0,0.0],[1.5,0.5],[0.0,0.0],[0.0,0.0],[0.0,0.0],[7000000000.0,0.0]],"sessions":["#;
    let owner = r#"{"connection":"5","owns":true,"has_owned":true,"needs_reset":false,"writeback":false,"device":"d15c","messages":["#;
    let messages = r#"{"request":5,"payload":"007fff","fds":["6","7"]},{"request":2,"payload":"","fds":[]}]},"#;
    let parked = r#"{"connection":"8","owns":false,"has_owned":true,"needs_reset":true,"writeback":null,"device":"","messages":[]}]}"#;
    let whole = [&head, disk, files, since, levels, owner, messages, parked].concat();
    assert_eq!(text_of(&packed.document), whole);
    let names: Vec<_> = packed.fds().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["0", "1", "2", "3", "4", "5", "6", "7", "8"]);
}

/// A process that does not know the field refuses a parcel that has it, and reads all others.
#[test]
fn a_failed_sync_is_written_down_only_if_there_is_one() {
    for (failure, word) in [(SyncFailure::Untold, "untold"), (SyncFailure::Told, "told")] {
        let mut parcel = parcel(&mut Ends::default());
        parcel.sync_failure = Some(failure);
        let packed = parcel.pack().unwrap();
        let field = format!(r#","sync_failure":"{word}","sessions":["#);
        assert!(text_of(&packed.document).contains(&field));
        let parcel = Parcel::unpack(packed).unwrap();
        assert_eq!(parcel.sync_failure, Some(failure));
    }
}

#[test]
fn names_are_those_of_the_sender() {
    let mut ends = Ends::default();
    let (document, mut fds) = kept(&mut ends);
    fds.reverse();
    let parcel = unpack(document.to_string().as_bytes(), fds).unwrap();
    assert_eq!(parcel.files.len(), 1);
    assert!(parcel.has_listener());
    let [session] = &parcel.sessions[..] else {
        panic!("{parcel:?}")
    };
    assert!(session.owns && !session.needs_reset && session.writeback.is_none());
    assert_eq!(session.messages[0].payload, [0, 0xff]);
    rustix::io::write(&session.messages[0].fds[0], b"m").unwrap();
    assert_eq!(rustix::io::read(&ends.0[2], &mut [0; 8]), Ok(1));
    assert_eq!(parcel.since, Some(Duration::from_nanos(1)));
}

#[test]
fn what_is_not_needed_may_be_missing() {
    let (mut document, mut fds) = kept(&mut Ends::default());
    for key in ["listener", "since_ns"] {
        document.as_object_mut().unwrap().remove(key);
    }
    fds.retain(|(name, _)| name != "l");
    let parcel = unpack(document.to_string().as_bytes(), fds).unwrap();
    assert!(!parcel.has_listener() && parcel.since.is_none());
    assert!(parcel.limit_levels.is_none() && parcel.watchdog.is_none());
}

/// Puts a value in place of the one at `place`, or adds it.
fn set(document: &mut Value, place: &str, value: Value) {
    let (parent, key) = place.rsplit_once('/').unwrap();
    match document.pointer_mut(parent).unwrap() {
        Value::Array(items) => items.push(value),
        parent => parent[key] = value,
    }
}

#[test]
fn a_document_that_differs_is_refused() {
    let rows = [
        ("/format", json!("other"), "its format is other version 1"),
        ("/version", json!(2), "version 2, by cleave 9.8.7, and this"),
        ("/version", json!(0), "version 0"),
        ("/version", json!(-1), "malformed"),
        ("/more", json!(1), "unknown field `more`"),
        ("/\u{1b}", json!(1), "unknown field `?`"),
        ("/disk/more", json!(1), "unknown field `more`"),
        ("/sessions/0/more", json!(1), "unknown field `more`"),
        (
            "/sessions/0/messages/0/more",
            json!(1),
            "unknown field `more`",
        ),
        ("/disk/id", json!(1), "malformed"),
        ("/disk", json!("\u{1b}\n"), "string \"\\u"),
        ("/since_ns", json!(1.5), "malformed"),
        ("/sync_failure", json!("yes"), "malformed"),
        ("/limit_levels", json!([[0.0, 0.0]]), "malformed"),
        ("/sessions/0/owns", json!(null), "malformed"),
        (
            "/sessions/0/messages/0/request",
            json!(1_u64 << 32),
            "malformed",
        ),
        ("/sessions/0/messages/0/payload", json!("0"), "hexadecimal"),
        ("/sessions/0/messages/0/payload", json!("+f"), "hexadecimal"),
        (
            "/files",
            json!([]),
            "does not use the descriptor \"cleave-a-17\"",
        ),
        (
            "/listener",
            json!(null),
            "does not use the descriptor \"l\"",
        ),
        (
            "/files/-",
            json!("none"),
            "\"none\" is missing or used twice",
        ),
        ("/files/-", json!("m"), "\"m\" is missing or used twice"),
        ("/files/-", json!("c"), "\"c\" is missing or used twice"),
        (
            "/listener",
            json!("c"),
            "\"c\" is not a unix stream socket that",
        ),
        (
            "/listener",
            json!("m"),
            "\"m\" is not a unix stream socket that",
        ),
        (
            "/sessions/0/connection",
            json!("l"),
            "\"l\" is missing or used",
        ),
    ];
    for (place, value, why) in rows {
        let mut ends = Ends::default();
        let (mut document, fds) = kept(&mut ends);
        set(&mut document, place, value.clone());
        let error = unpack(document.to_string().as_bytes(), fds).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(why), "{place} {value}: {error}");
        assert!(!error.contains(char::is_control), "{error}");
        ends.assert_closed(place);
    }
}

#[test]
fn no_part_of_a_document_is_taken_for_one() {
    let text = kept(&mut Ends::default()).0.to_string();
    for length in 0..text.len() {
        let mut ends = Ends::default();
        let (_, fds) = kept(&mut ends);
        assert!(unpack(&text.as_bytes()[..length], fds).is_err(), "{length}");
        ends.assert_closed("a part");
    }
}

#[test]
fn a_long_reason_is_cut_off() {
    let (mut document, fds) = kept(&mut Ends::default());
    set(&mut document, "/format", json!("x".repeat(1 << 20)));
    let error = unpack(document.to_string().as_bytes(), fds).unwrap_err();
    assert!((REASON_CHARS_MAX..300).contains(&error.to_string().len()));
}

#[test]
fn each_name_belongs_to_one_descriptor() {
    let mut ends = Ends::default();
    let (document, mut fds) = kept(&mut ends);
    fds.push(("m".to_owned(), ends.pipe()));
    let error = unpack(document.to_string().as_bytes(), fds).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("two descriptors with the name \"m\"")
    );
    ends.assert_closed("a name twice");
}

#[test]
fn sockets_are_asked_what_they_are() {
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let far = TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
    let bare = || rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let file = || File::open("/dev/null").unwrap().into();
    let rows: [(&str, &str, OwnedFd); 8] = [
        ("c", "is connected", listener()),
        ("c", "is connected", bare()),
        ("c", "is connected", far.into()),
        ("c", "is connected", UnixDatagram::pair().unwrap().0.into()),
        ("c", "is connected", file()),
        ("l", "listens", bare()),
        ("l", "listens", tcp.into()),
        ("l", "listens", file()),
    ];
    for (at, (name, why, fd)) in rows.into_iter().enumerate() {
        let mut ends = Ends::default();
        let (document, mut fds) = kept(&mut ends);
        fds.iter_mut().find(|(other, _)| other == name).unwrap().1 = fd;
        let error = unpack(document.to_string().as_bytes(), fds).unwrap_err();
        assert!(error.to_string().ends_with(why), "{at}: {error}");
        ends.assert_closed(why);
    }
}

/// A frontend that leaves meanwhile must not cost the other one its session.
#[test]
fn a_connection_whose_frontend_has_left_is_one() {
    let mut ends = Ends::default();
    let (document, fds) = kept(&mut ends);
    drop(ends);
    unpack(document.to_string().as_bytes(), fds).unwrap();
}

#[test]
fn a_document_that_could_change_is_not_read() {
    let text = kept(&mut Ends::default()).0.to_string();
    let without =
        |seal| -> SealFlags { SEALS.into_iter().filter(|other| *other != seal).collect() };
    let mut rows = Vec::from(SEALS.map(|seal| memfd(text.as_bytes(), without(seal))));
    let future = without(SealFlags::WRITE) | SealFlags::FUTURE_WRITE;
    rows.push(memfd(text.as_bytes(), future));
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    rows.push(file.into());
    rows.push(Ends::default().pipe());
    for (at, document) in rows.into_iter().enumerate() {
        let mut ends = Ends::default();
        let (_, fds) = kept(&mut ends);
        let error = Parcel::unpack(Packed::received(document, fds)).unwrap_err();
        assert!(error.to_string().contains("sealed against changes"), "{at}");
        ends.assert_closed("a document that is not sealed");
    }
}

#[test]
fn the_position_of_the_file_does_not_matter() {
    let (document, fds) = kept(&mut Ends::default());
    let mut document = File::from(sealed(document.to_string().as_bytes()));
    document.seek(std::io::SeekFrom::Start(7)).unwrap();
    let document = document.into();
    Parcel::unpack(Packed::received(document, fds)).unwrap();
}

/// Unpacks the document after a change.
fn changed(change: impl FnOnce(&mut Value, &mut Fds)) -> Result<Parcel, String> {
    let (mut document, mut fds) = kept(&mut Ends::default());
    change(&mut document, &mut fds);
    let unpacked = unpack(document.to_string().as_bytes(), fds);
    unpacked.map_err(|error| error.to_string())
}

#[track_caller]
fn check_bound(most: usize, why: &str, change: impl Fn(&mut Value, &mut Fds, usize)) {
    changed(|document, fds| change(document, fds, most)).unwrap();
    let refused = changed(|document, fds| change(document, fds, most + 1));
    let error = refused.unwrap_err();
    assert!(error.contains(why), "{error}");
}

#[test]
fn every_bound_is_where_it_is_said_to_be() {
    const MESSAGES: &str = "/sessions/0/messages";
    check_bound(2, "3 sessions, more than 2", |document, fds, count| {
        for name in (1..count).map(|at| at.to_string()) {
            let (stream, _) = UnixStream::pair().unwrap();
            let session = json!({"connection": name, "owns": false, "has_owned": true, "needs_reset": false, "writeback": null, "device": "", "messages": []});
            set(document, "/sessions/-", session);
            fds.push((name, stream.into()));
        }
    });
    check_bound(
        20_000,
        "20001 messages, more than 20000",
        |document, _, count| {
            let message = json!({"request": 1, "payload": "", "fds": []});
            let messages = document.pointer_mut(MESSAGES).unwrap();
            messages.as_array_mut().unwrap().resize(count, message);
        },
    );
    check_bound(4096, "8194 digits in a payload", |document, _, count| {
        set(
            document,
            &format!("{MESSAGES}/0/payload"),
            "00".repeat(count).into(),
        );
    });
    check_bound(32, "33 descriptors in a message", |document, fds, count| {
        for name in (1..count).map(|at| at.to_string()) {
            set(
                document,
                &format!("{MESSAGES}/0/fds/-"),
                name.clone().into(),
            );
            fds.push((name, memfd(b"", SealFlags::empty())));
        }
    });
}

#[test]
fn a_document_is_not_too_long() {
    for (length, is_accepted) in [(DOCUMENT_BYTES_MAX, true), (DOCUMENT_BYTES_MAX + 1, false)] {
        let (document, fds) = kept(&mut Ends::default());
        let mut text = document.to_string().into_bytes();
        text.resize(length, b' ');
        assert_eq!(unpack(&text, fds).is_ok(), is_accepted, "{length}");
    }
}

#[test]
fn a_parcel_that_cannot_be_packed_comes_back() {
    let mut ends = Ends::default();
    let mut parcel = parcel(&mut ends);
    let more = (0..20_000).map(|_| message(1, &[], Vec::new()));
    parcel.sessions[1].messages.extend(more);
    let (parcel, error) = *parcel.pack().unwrap_err();
    assert!(error.to_string().contains("20002 messages"), "{error}");
    assert_eq!(ends.closed(), 0);
    assert_eq!(parcel.sessions[1].messages.len(), 20_000);
}

const SNIPPETS: [&str; 18] = [
    "",
    "\"",
    "0",
    "ff",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "null",
    "-1",
    "1e99",
    "\"m\"",
    "\"c\"",
    "\\u0000",
    "99999999999999999999",
    " ",
];

proptest! {
    /// Whatever a document says, its descriptors are in the parcel or closed, and a parcel can be packed again.
    #[test]
    fn no_document_is_too_strange(
        edits in proptest::collection::vec((any::<usize>(), 0..6_usize, 0..SNIPPETS.len(), any::<[u8; 2]>()), 1..4),
        raw in any::<bool>(),
    ) {
        let mut ends = Ends::default();
        let (document, fds) = kept(&mut ends);
        let mut text = document.to_string().into_bytes();
        for (at, length, snippet, bytes) in edits {
            let at = at % (text.len() + 1);
            let end = text.len().min(at + length);
            let put = if raw { &bytes[..] } else { SNIPPETS[snippet].as_bytes() };
            text.splice(at..end, put.iter().copied());
        }
        match unpack(&text, fds) {
            Ok(parcel) => {
                let shown = format!("{parcel:?}");
                let packed = parcel.pack().unwrap();
                prop_assert_eq!(packed.fds().count(), 4);
                prop_assert_eq!(ends.closed(), 0);
                prop_assert_eq!(format!("{:?}", Parcel::unpack(packed).unwrap()), shown);
                prop_assert!(ends.all_close());
            }
            Err(error) => {
                let error = error.to_string();
                prop_assert!(!error.contains(char::is_control) && error.len() < 1000, "{}", error);
                prop_assert_eq!(ends.closed(), ends.0.len());
            }
        }
    }
}
