use std::io::{Read as _, Write as _};
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::pipe::{PipeFlags, pipe_with};

use super::*;

/// For what is sure to come.
fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn memfd() -> OwnedFd {
    memfd_create("x", MemfdFlags::CLOEXEC).unwrap()
}

fn packed(count: usize) -> Packed {
    let fds = (0..count).map(|at| (format!("cleave-a-{at}"), memfd()));
    Packed::received(memfd(), fds.collect())
}

/// Names and files, in order.
fn content(packed: &Packed) -> (u64, Vec<(String, u64)>) {
    let file = |fd: &OwnedFd| fstat(fd).unwrap().st_ino;
    let fds = packed.fds().map(|(name, fd)| (name.clone(), file(fd)));
    (file(&packed.document), fds.collect())
}

fn linked() -> (Giver, Taker) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let taker = Taker::greet(theirs, later()).unwrap();
    (Giver::accept(ours, later()).unwrap().0, taker)
}

/// A disk that has been taken: the taker as its giver sees it, and the taker's link.
fn taken() -> (Peer, TakenLink) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let taker = Taker::greet(theirs, later()).unwrap();
    let (giver, peer) = Giver::accept(ours, later()).unwrap();
    let TakeOutcome::Taken(link) = taker.take(later()) else {
        panic!("the giver waits");
    };
    giver.end(later()).unwrap();
    (peer, link)
}

/// Ends the link as the death of the giver does.
fn die(mut giver: Giver) {
    giver.is_over = true;
}

#[test]
fn a_disk_goes_from_one_side_to_the_other() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    // As an acceptor may have left it.
    ours.set_nonblocking(true).unwrap();
    let (files, parcel) = (packed(1), packed(2 * CHUNK));
    let (first, second) = thread::scope(|scope| {
        let taking = scope.spawn(|| {
            let taker = Taker::greet(theirs, later()).unwrap();
            let files = taker.receive_files(later()).unwrap();
            taker.send_ready(later()).unwrap();
            let parcel = taker.receive_parcel(later()).unwrap();
            assert!(is_taken(taker));
            (files, parcel)
        });
        let (giver, peer) = Giver::accept(ours, later()).unwrap();
        assert_eq!(u32::try_from(peer.pid), Ok(std::process::id()));
        giver.send_files(&files, later()).unwrap();
        giver.await_ready(later()).unwrap();
        giver.give(&parcel, later()).unwrap();
        taking.join().unwrap()
    });
    assert_eq!(content(&first), content(&files));
    assert_eq!(content(&second), content(&parcel));
}

fn is_taken(taker: Taker) -> bool {
    matches!(taker.take(later()), TakeOutcome::Taken(_))
}

fn spin(ns: i64) {
    let until = Instant::now() + Duration::from_nanos(ns.try_into().unwrap_or(0));
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// The side that was faster is delayed more in the next round, so that both act at the same time in most rounds.
#[test]
fn exactly_one_side_has_the_disk() {
    let (send_taker, takers) = channel::<(Taker, i64)>();
    let (send_taken, taken) = channel();
    let start = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            for (taker, lead_ns) in takers {
                start.wait();
                spin(lead_ns);
                send_taken.send(is_taken(taker)).unwrap();
            }
        });
        let mut lead_ns = 0;
        for round in 0..5000 {
            let (giver, taker) = linked();
            send_taker.send((taker, lead_ns)).unwrap();
            start.wait();
            spin(-lead_ns);
            let given = giver.end(Instant::now());
            let taken = taken.recv().unwrap();
            assert_eq!(given.is_ok(), taken, "{round}: {given:?}");
            lead_ns += if taken { 250 } else { -250 };
        }
        drop(send_taker);
    });
}

type Act = fn(Taker);

#[test]
fn only_a_whole_message_takes_the_disk() {
    let cases: [(&str, Act, bool); 5] = [
        ("left", drop, false),
        ("took", |taker| assert!(is_taken(taker)), true),
        (
            "was ready",
            |taker| taker.send_ready(later()).unwrap(),
            false,
        ),
        (
            "was cut off",
            |taker| {
                let taken = header(FrameKind::Taken, 0, 0);
                let part = &taken.as_flattened()[..HEADER_BYTES - 1];
                (&*taker.0.0).write_all(part).unwrap();
            },
            false,
        ),
        (
            "sent zeroes",
            |taker| (&*taker.0.0).write_all(&[0; HEADER_BYTES]).unwrap(),
            false,
        ),
    ];
    for (what, act, is_taken) in cases {
        // What is queued counts even after the deadline.
        for deadline in [later(), Instant::now()] {
            let (giver, taker) = linked();
            giver.socket.write(b"unread", &[], later()).unwrap();
            act(taker);
            assert_eq!(giver.end(deadline).is_ok(), is_taken, "it {what}");
        }
    }
}

#[test]
fn after_the_deadline_nothing_is_taken() {
    let (giver, taker) = linked();
    let given = giver.give(&packed(1), Instant::now());
    assert_eq!(given.unwrap_err().kind(), io::ErrorKind::TimedOut);
    assert!(matches!(taker.take(later()), TakeOutcome::Kept(_)));
}

/// One that has died leaves the disk to the taker.
#[test]
fn a_giver_that_keeps_its_disk_says_so() {
    let (giver, taker) = linked();
    giver.end(Instant::now()).unwrap_err();
    let taking = taker.take(later());
    assert!(
        matches!(&taking, TakeOutcome::Kept(why) if why.to_string().contains("timed out")),
        "{taking:?}"
    );
    let (giver, taker) = linked();
    giver.keep("it is quiesced");
    let kept = taker.receive_parcel(later()).unwrap_err();
    assert!(!has_ended(&kept) && kept.to_string() == "it is quiesced");
    let (giver, taker) = linked();
    die(giver);
    assert!(has_ended(&taker.receive_parcel(later()).unwrap_err()));
    assert!(matches!(taker.take(later()), TakeOutcome::Ended(_)));
}

/// Whatever the taker does next: it may have sent something before that was not read, or find that it can send nothing any more.
#[test]
fn a_giver_that_is_dropped_has_kept_its_disk() {
    let steps: [fn(&Taker) -> io::Error; 3] = [
        |taker| taker.send_ready(later()).unwrap_err(),
        |taker| taker.receive_parcel(later()).unwrap_err(),
        |taker| taker.receive_files(later()).unwrap_err(),
    ];
    for step in steps {
        for is_ready in [false, true] {
            let (giver, taker) = linked();
            if is_ready {
                taker.send_ready(later()).unwrap();
            }
            drop(giver);
            let kept = step(&taker);
            assert!(!has_ended(&kept), "{kept:?}");
            assert_eq!(kept.to_string(), "it does not wait any longer");
        }
    }
    let (giver, taker) = linked();
    drop(giver);
    let taking = taker.take(later());
    assert!(matches!(taking, TakeOutcome::Kept(_)), "{taking:?}");
    // It says nothing after it has given the disk.
    let (giver, taker) = linked();
    let socket = taker.0.0.clone();
    assert!(is_taken(taker));
    giver.end(later()).unwrap();
    assert_eq!((&*socket).read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_taker_that_dies_after_it_has_taken_the_disk_is_noticed() {
    let (peer, link) = taken();
    peer.check_alive().unwrap();
    drop(link);
    let died = peer.check_alive().unwrap_err();
    assert!(died.to_string().contains("started again"), "{died}");
}

/// A third process has the disk before the giver has ended.
#[test]
fn a_taker_that_gives_the_disk_away_at_once_ends_after_the_giver() {
    let (peer, link) = taken();
    let ends = std::thread::spawn(|| link.outlive_giver());
    // A taker that does not wait has ended by then.
    std::thread::sleep(Duration::from_millis(50));
    peer.check_alive().unwrap();
    drop(peer);
    ends.join().unwrap();
}

/// A taker that is stopped leaves no room for the word.
#[test]
fn a_giver_that_cannot_say_that_it_keeps_its_disk_does_not_end_the_link() {
    let (giver, taker) = linked();
    let mut filled = 0;
    while giver.socket.write(&[0], &[], Instant::now()).is_ok() {
        filled += 1;
    }
    drop(giver);
    let mut socket = &*taker.0.0;
    socket.read_exact(&mut vec![0; filled]).unwrap();
    socket.set_nonblocking(true).unwrap();
    let more = socket.read(&mut [0]).unwrap_err();
    assert_eq!(more.kind(), io::ErrorKind::WouldBlock);
}

/// The giver may have had no time for the rest, and keep the disk.
#[test]
fn a_link_that_ends_within_a_message_tells_of_no_death() {
    let start = header(FrameKind::Parcel, 2, 1);
    for message in [
        start.as_flattened(),
        &[start.as_flattened(), b"[]"].concat(),
    ] {
        let (giver, taker) = linked();
        giver.socket.write(message, &[], later()).unwrap();
        die(giver);
        let cut = taker.receive_parcel(later()).unwrap_err();
        assert!(!has_ended(&cut), "{cut:?}");
    }
}

#[test]
fn a_giver_that_ends_leaves_the_rest_whatever_is_answered() {
    let (giver, taker) = linked();
    let rest = packed(1);
    giver.leave(&rest, Instant::now());
    let left = taker.receive_parcel(later()).unwrap();
    assert_eq!(content(&left), content(&rest));
    assert!(matches!(taker.take(later()), TakeOutcome::Ended(_)));
}

#[test]
fn a_silent_side_is_waited_for_until_the_deadline() {
    let soon = || Instant::now() + Duration::from_millis(20);
    let (giver, taker) = linked();
    let kind = |error: io::Error| error.kind();
    let deadline = soon();
    assert_eq!(
        giver.await_ready(deadline).map_err(kind),
        Err(io::ErrorKind::TimedOut)
    );
    assert!(Instant::now() >= deadline);
    let received = taker.receive_files(soon()).map(drop);
    assert_eq!(received.map_err(kind), Err(io::ErrorKind::TimedOut));
    // More than the socket has room for.
    let parcel = Packed::received(memfd(), vec![("x".repeat(1 << 20), memfd())]);
    let sent = giver.give(&parcel, soon());
    assert_eq!(sent.map_err(kind), Err(io::ErrorKind::TimedOut));
}

/// Bytes that come one by one must not put the deadline off.
#[test]
fn a_slow_side_is_waited_for_until_the_deadline() {
    let (giver, taker) = linked();
    let sending = thread::spawn(move || {
        let start = header(FrameKind::Files, 1 << 20, 1);
        let _ = giver.socket.write(start.as_flattened(), &[], later());
        // The first write after the other end is closed fails.
        let mut bytes = (0..5000).map(|_| giver.socket.write(b" ", &[], later()));
        while bytes.next().is_some_and(|sent| sent.is_ok()) {
            thread::sleep(Duration::from_millis(1));
        }
    });
    let received = taker.receive_files(Instant::now() + Duration::from_millis(20));
    assert_eq!(received.unwrap_err().kind(), io::ErrorKind::TimedOut);
    drop(taker);
    sending.join().unwrap();
}

#[test]
fn a_greeting_of_another_version_is_refused() {
    for hello in [&2_u32.to_le_bytes()[..], &[], &[1, 0, 0, 0, 0]] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let socket = FrameSocket::new(theirs);
        socket.send(FrameKind::Hello, hello, &[], later()).unwrap();
        let error = Giver::accept(ours, later()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{hello:?}");
    }
}

#[test]
fn only_our_user_and_root_are_trusted() {
    for (uid, own, trusted) in [
        (1000, 1000, true),
        (0, 1000, true),
        (0, 0, true),
        (1000, 0, false),
        (1001, 1000, false),
        (u32::MAX, 1000, false),
    ] {
        assert_eq!(is_trusted(uid, own), trusted, "{uid} {own}");
    }
}

/// Writes of one frame: bytes, and how many descriptors go with each.
type Writes = &'static [(&'static [u8], usize)];

#[test]
fn a_frame_is_what_its_header_says() {
    let files = |length, count| header(FrameKind::Files, length, count);
    let most = |number| u32::try_from(number).unwrap();
    let rows: [([[u8; 4]; 3], usize, Writes, &str); 13] = [
        (files(4, 2), 0, &[(b"[\"\"]", 0), (b"\0", 2)], ""),
        (
            files(4, 2),
            1,
            &[(b"[\"\"]", 0), (b"\0", 2)],
            "more descriptors",
        ),
        (
            files(4, 2),
            0,
            &[(b"[\"\"]", 1), (b"\0", 1)],
            "more descriptors",
        ),
        (
            files(4, 2),
            0,
            &[(b"[\"\"]", 0), (b"\0", 3)],
            "more descriptors",
        ),
        (
            files(4, 2),
            0,
            &[(b"[\"\"]", 0), (b"\0", 1)],
            "fewer descriptors",
        ),
        (
            files(4, 2),
            0,
            &[(b"[\"\"]", 0), (b"\0", 0)],
            "fewer descriptors",
        ),
        (files(4, 2), 0, &[(b"[\"\"]", 0)], "within a message"),
        (files(4, 2), 0, &[(b"[\"", 0)], "within a message"),
        (files(2, 2), 0, &[(b"[]", 0), (b"\0", 2)], "without names"),
        (files(2, 0), 0, &[(b"[]", 0)], "without names"),
        (
            header(FrameKind::Parcel, 2, 1),
            0,
            &[(b"[]", 0), (b"\0", 1)],
            "instead of Files",
        ),
        (files(most(BYTES_MAX + 1), 1), 0, &[], "instead of Files"),
        (files(2, most(FDS_MAX + 1)), 0, &[], "instead of Files"),
    ];
    for (at, (head, head_fds, writes, why)) in rows.into_iter().enumerate() {
        let (giver, taker) = linked();
        let (end, fd) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let fds = vec![fd.as_fd(); CHUNK];
        let (head, fds_of_head) = (head.as_flattened(), &fds[..head_fds]);
        giver.socket.write(head, fds_of_head, later()).unwrap();
        for (bytes, count) in writes {
            giver.socket.write(bytes, &fds[..*count], later()).unwrap();
        }
        die(giver);
        drop(fd);
        match taker.receive_files(later()) {
            Ok(_) => assert_eq!(why, "", "{at}"),
            Err(error) => {
                let error = error.to_string();
                assert!(!why.is_empty() && error.contains(why), "{at}: {error}");
            }
        }
        // More may be queued.
        drop(taker);
        let closed = rustix::io::read(&end, &mut [0; 8]);
        assert_eq!(closed, Ok(0), "{at}: a descriptor is open");
    }
}

#[test]
fn names_are_a_list_of_texts() {
    for names in [&b"{}"[..], b"[1]", b"[\"a\"", b"\xff", b""] {
        let (giver, taker) = linked();
        let fd = memfd();
        let fds = [fd.as_fd(), fd.as_fd()];
        giver
            .socket
            .send(FrameKind::Files, names, &fds, later())
            .unwrap();
        assert!(taker.receive_files(later()).is_err(), "{names:?}");
    }
}

/// The kernel closes those that do not fit, as it does when this process may not open more.
#[test]
fn lost_descriptors_are_noticed() {
    let (giver, taker) = linked();
    let fd = memfd();
    let fds = vec![fd.as_fd(); 2 * CHUNK];
    let start = header(FrameKind::Files, 2, u32::try_from(fds.len()).unwrap());
    giver
        .socket
        .write(start.as_flattened(), &[], later())
        .unwrap();
    giver.socket.write(b"[]", &[], later()).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2 * CHUNK))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [IoSlice::new(&[0])];
    sendmsg(&giver.socket.0, &bytes, &mut control, SendFlags::NOSIGNAL).unwrap();
    let error = taker.receive_files(later()).unwrap_err();
    assert!(
        error.to_string().contains("descriptors were lost"),
        "{error}"
    );
}

#[test]
fn what_the_other_side_would_refuse_is_not_sent() {
    let (giver, taker) = linked();
    let fd = memfd();
    let fds = vec![fd.as_fd(); FDS_MAX + 1];
    let long = vec![0; BYTES_MAX + 1];
    for (bytes, fds) in [(&[][..], &fds[..]), (&long, &[])] {
        let sent = giver.socket.send(FrameKind::Files, bytes, fds, later());
        assert!(sent.unwrap_err().to_string().contains("too large"));
    }
    die(giver);
    let error = taker.receive_files(later()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}
