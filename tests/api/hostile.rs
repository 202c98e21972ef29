//! Requests that no honest client sends. Each ends in a refusal or in a closed connection, and leaves a
//! daemon that answers and serves.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use cleave_tests::http::{Response, converse, fetch, get};
use cleave_tests::{Daemon, TIMEOUT, assert_serves};

/// A name, what is sent, and the statuses that are right; 0: closed without an answer.
type Row = (&'static str, Vec<u8>, &'static [u16]);

fn request(line: &str, header: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes =
        format!("{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n").into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

fn rows() -> Vec<Row> {
    let get = |path: &str| request(&format!("GET {path}"), "", b"");
    let with = |header: &str| request("GET /v1/disks", header, b"");
    let many: String = (0..200).map(|n| format!("X-{n}: y\r\n")).collect();
    let mut rows: Vec<Row> = vec![
        ("no path of ours", get("/"), &[404]),
        ("a path too long by half", get("/v1/disks/ram:1M/x"), &[404]),
        ("no such disk", get("/v1/disks/other"), &[404]),
        (
            "a path out of the tree",
            get("/v1/disks/../../etc/passwd"),
            &[404],
        ),
        (
            "an encoded path out of the tree",
            get("/v1/disks/..%2F..%2Fetc"),
            &[404],
        ),
        (
            "a path that is not valid UTF-8",
            get("/v1/disks/%ff%fe"),
            &[400],
        ),
        (
            "an endless path",
            get(&format!("/{}", "x".repeat(10 << 10))),
            &[404],
        ),
        (
            "a path beyond all bounds",
            get(&format!("/{}", "x".repeat(1 << 20))),
            &[414, 431, 400],
        ),
        (
            "a header beyond all bounds",
            with(&format!("X: {}\r\n", "y".repeat(1 << 20))),
            &[431, 400],
        ),
        ("headers without end", with(&many), &[431, 400]),
        ("a header that is none", with("nonsense\r\n"), &[400]),
        (
            "two lengths",
            with("Content-Length: 1\r\nContent-Length: 2\r\n"),
            &[400],
        ),
        ("a negative length", with("Content-Length: -1\r\n"), &[400]),
        (
            "a length beyond all bounds",
            with("Content-Length: 99999999999999999999\r\n"),
            &[400],
        ),
        (
            "length and chunks",
            with("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"),
            &[200, 400],
        ),
        (
            "an encoding nobody knows",
            with("Transfer-Encoding: rot13\r\n"),
            &[400, 501],
        ),
        (
            "another protocol",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
            &[0, 400],
        ),
        ("zeroes", vec![0; 4096], &[0, 400]),
        (
            "a version to come",
            b"GET / HTTP/9.9\r\n\r\n".to_vec(),
            &[0, 400],
        ),
        ("no version", b"GET /v1/disks\r\n\r\n".to_vec(), &[0, 400]),
        (
            "the next protocol",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
            &[0, 400],
        ),
    ];
    for method in [
        "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW", "CONNECT",
    ] {
        rows.push((
            method,
            request(&format!("{method} /v1/disks"), "", b""),
            &[405, 400, 404],
        ));
    }
    for (name, header, body, expected) in [
        (
            "a change that is cut off",
            "Content-Length: 50\r\n",
            "{\"completion",
            &[0, 408, 413][..],
        ),
        (
            "a change in chunks that are none",
            "Transfer-Encoding: chunked\r\n",
            "zz\r\n{}",
            &[0, 400, 413],
        ),
        ("a change of nothing", "Content-Length: 0\r\n", "", &[400]),
        (
            "a change of another kind",
            "Content-Length: 5\r\nContent-Type: text/xml\r\n",
            "<a/>\n",
            &[400],
        ),
    ] {
        rows.push((
            name,
            request("PATCH /v1/disks/ram:1M", header, body.as_bytes()),
            expected,
        ));
    }
    for method in ["POST", "PUT", "DELETE"] {
        let line = format!("{method} /v1/disks/ram:1M");
        // The disk is that of the process: it is there to the end.
        let expected: &[u16] = match method {
            "PUT" => &[400],
            "DELETE" => &[409],
            _ => &[405],
        };
        rows.push((method, request(&line, "", b""), expected));
        rows.push((
            method,
            request(&format!("{method} /metrics"), "", b""),
            &[405],
        ));
    }
    rows
}

#[test]
fn odd_requests_are_refused() {
    let (daemon, control) = Daemon::serve_with_control(&["--disk", "ram:1M"]);
    let _ = get(&control, "/v1/disks");
    let (fds, rss) = (daemon.fds_at_rest(), daemon.rss_kib());
    let mut wrong = Vec::new();
    for (name, bytes, expected) in rows() {
        let text = converse(&control, &bytes, TIMEOUT).unwrap();
        let status = Response::parse(&text).map_or(0, |answer| answer.status);
        println!("{name}: {status}");
        if !expected.contains(&status) {
            wrong.push(format!("{name}: {status}, {text}"));
        }
        assert_eq!(
            fetch(&control, "GET", "/v1/disks", "").status,
            200,
            "after {name}"
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    daemon.fds_settle_at(fds).unwrap();
    daemon.settles_small(rss, 2047).unwrap();
    assert_serves(&daemon).unwrap();
    daemon.finish();
}

/// Returns true if the other side closes within a time.
fn closes(stream: &mut UnixStream, time: Duration) -> bool {
    let end = Instant::now() + time;
    let mut piece = [0; 4096];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        stream.set_read_timeout(Some(left)).unwrap();
        match stream.read(&mut piece) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return true,
            Err(_) => {}
        }
    }
}

#[test]
fn half_a_request_and_silence_is_not_waited_for() {
    let (daemon, control) = Daemon::serve_with_control(&["--disk", "ram:1M"]);
    let mut half: Vec<UnixStream> = [&b""[..], b"G", b"GET /v1/disks HTTP/1.1\r\nHost:"]
        .into_iter()
        .map(|bytes| {
            let mut stream = UnixStream::connect(&control).unwrap();
            stream.write_all(bytes).unwrap();
            stream
        })
        .collect();
    for stream in &mut half {
        assert!(closes(stream, TIMEOUT));
    }
    daemon.finish();
}

/// A crowd of clients that say nothing, or do not read what they asked for.
fn crowd(control: &Path, count: usize, said: &[u8]) -> Vec<UnixStream> {
    (0..count)
        .map(|_| {
            let mut stream = UnixStream::connect(control).unwrap();
            stream.set_write_timeout(Some(TIMEOUT)).unwrap();
            // Those that do not read are let go.
            let _ = stream.write_all(said);
            stream
        })
        .collect()
}

#[test]
fn a_crowd_keeps_nobody_out_and_costs_little() {
    let (daemon, control) = Daemon::serve_with_control(&["--disk", "ram:1M"]);
    let _ = get(&control, "/v1/disks");
    let (fds, rss) = (daemon.fds_at_rest(), daemon.rss_kib());
    let unread = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(200);
    for said in [&b""[..], b"GET ", &unread] {
        let held = crowd(&control, 300, said);
        assert_eq!(fetch(&control, "GET", "/v1/disks", "").status, 200);
        assert_serves(&daemon).unwrap();
        assert!(
            daemon.fds() < fds + 280,
            "{} of {fds} descriptors",
            daemon.fds()
        );
        daemon.stays_small(rss, (32 << 10) - 1).unwrap();
        drop(held);
        daemon.fds_settle_at(fds).unwrap();
    }
    daemon.finish();
}

/// With a crowd that never lets go, the end comes as soon as without.
#[test]
fn a_crowd_does_not_hold_up_the_end() {
    let (daemon, control) = Daemon::serve_with_control(&["--disk", "ram:1M"]);
    let _held = crowd(&control, 100, b"GET /metrics HTTP/1.1\r\n");
    daemon.finish();
}
