//! Messages of every shape, and the end of connections.

use super::*;

/// Hostile case 35.
#[test]
fn malformed_messages_end_the_connection() {
    // (request, flags, size, payload bytes sent)
    let rows = [
        (1, 0x0, 0, 0),
        (1, 0x2, 0, 0),
        (1, 0x5, 0, 0),
        (1, 0x11, 0, 0),
        (1, 0x1, 8, 8),
        (1, 0x1, 4097, 0),
        (1, 0x1, u32::MAX, 0),
        (2, 0x1, 0, 0),
        (2, 0x1, 7, 7),
        (2, 0x1, 9, 9),
        (5, 0x1, 0, 0),
        (5, 0x1, 7, 7),
        (8, 0x1, 4, 4),
        (11, 0x1, 12, 12),
        (12, 0x1, 0, 0),
        (13, 0x1, 16, 16),
        (24, 0x1, 0, 0),
        (24, 0x1, 11, 11),
        (25, 0x1, 11, 11),
        (37, 0x1, 40, 40),
        (38, 0x1, 39, 39),
        (39, 0x1, 4, 4),
        (40, 0x1, 8, 8),
        (0, 0x1, 0, 0),
        (6, 0x1, 16, 16),
        (7, 0x1, 8, 8),
        (23, 0x1, 8, 8),
        (31, 0x1, 25, 25),
        (45, 0x1, 0, 0),
        (255, 0x1, 0, 0),
        (1 << 31, 0x1, 0, 0),
        (u32::MAX, 0x1, 0, 0),
    ];
    for (request, flags, size, sent) in rows {
        let mut frontend = Frontend::negotiated();
        frontend.send_raw(request, flags, size, &vec![0; sent], &[]);
        assert_eq!(
            frontend.answer(request),
            Closed,
            "request {request} flags {flags:#x} size {size}"
        );
        assert!(
            matches!(frontend.end(), Ending::Refused(_)),
            "{request} {flags:#x}"
        );
    }
}

#[test]
fn messages_that_are_not_served_are_refused_one_by_one() {
    let mut frontend = Frontend::negotiated();
    for request in [
        0,
        7,
        19,
        20,
        22,
        23,
        26,
        28,
        33,
        35,
        41,
        44,
        45,
        255,
        1 << 31,
    ] {
        let file = memory_file(4096);
        for fds in [&[][..], &[file.as_fd()][..]] {
            if !fds.is_empty() && !matches!(request, 0 | 45 | 255 | 0x8000_0000) {
                continue;
            }
            frontend.send_raw(request, 0x9, 24, &[0; 24], fds);
            assert_eq!(frontend.answer(request), Nack, "{request}");
        }
    }
    assert!(frontend.is_alive());
}

/// Hostile case 36.
#[test]
fn descriptors_that_a_message_does_not_take_end_the_connection() {
    let file = memory_file(4096);
    let number = longs(&[0]);
    let region = longs(&[0, 0, MEM_BYTES, USER, 0]);
    // (request, payload, descriptors)
    let rows: [(Req, &[u8], usize); 18] = [
        (Req::GET_FEATURES, &[], 1),
        (Req::SET_FEATURES, &number, 1),
        (Req::SET_OWNER, &[], 8),
        (Req::SET_VRING_NUM, &number, 1),
        (Req::SET_VRING_ENABLE, &number, 253),
        (Req::GET_VRING_BASE, &number, 1),
        (Req::SET_STATUS, &number, 1),
        (Req::GET_STATUS, &[], 1),
        (Req::RESET_DEVICE, &[], 1),
        (Req::ADD_MEM_REG, &region, 0),
        (Req::ADD_MEM_REG, &region, 2),
        (Req::ADD_MEM_REG, &region, 33),
        (Req::ADD_MEM_REG, &region, 253),
        (Req::SET_VRING_KICK, &number, 0),
        (Req::SET_VRING_KICK, &number, 2),
        (Req::SET_VRING_CALL, &number, 253),
        (Req::SET_BACKEND_REQ_FD, &[], 0),
        (Req::SET_BACKEND_REQ_FD, &[], 2),
    ];
    for (request, payload, count) in rows {
        let mut frontend = Frontend::negotiated();
        let fds = vec![file.as_fd(); count];
        assert_eq!(
            frontend.request_fds(request, payload, &fds),
            Closed,
            "{request:?} with {count}"
        );
        assert!(matches!(frontend.end(), Ending::Refused(_)));
    }
    // An unknown message cannot have more descriptors than there is room for either, at once or spread over its
    // bytes.
    let fds = [file.as_fd(); 33];
    for pieces in [1, 3] {
        let mut frontend = Frontend::negotiated();
        for piece in words(&[255, 9, 0]).chunks(12 / pieces) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(33))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(
                &fds[..33usize.div_ceil(pieces)]
            )));
            let bytes = [IoSlice::new(piece)];
            let _ = sendmsg(&frontend.stream, &bytes, &mut control, SendFlags::NOSIGNAL);
        }
        assert_eq!(frontend.answer(255), Closed);
    }
}

/// Hostile case 43.
#[test]
fn an_incomplete_message_times_out() {
    let whole = {
        let mut bytes = words(&[2, 1, 8]);
        bytes.extend(longs(&[FEATURES]));
        bytes
    };
    let started = Instant::now();
    let waiting: Vec<_> = [1, 11, 12, 19]
        .into_iter()
        .map(|count| {
            let mut frontend = Frontend::connect();
            frontend.stream.write_all(&whole[..count]).unwrap();
            frontend
        })
        .collect();
    for mut frontend in waiting {
        assert_eq!(frontend.reply(), None);
        assert!(matches!(frontend.end(), Ending::Refused(_)));
    }
    // Not before the limit. A connection that never ends would have failed above.
    assert!(started.elapsed() >= intake::MESSAGE_WITHIN);
}

/// A message sent byte by byte, and several messages sent at once.
#[test]
fn messages_are_separated_at_their_ends() {
    let mut frontend = Frontend::negotiated();
    let ask = words(&[1, 1, 0]);
    for byte in words(&[u32::from(Req::GET_STATUS), 1, 0]) {
        frontend.stream.write_all(&[byte]).unwrap();
        std::thread::yield_now();
    }
    assert_eq!(frontend.reply().unwrap().0, 40);
    frontend
        .stream
        .write_all(&[ask.clone(), ask.clone(), ask].concat())
        .unwrap();
    for _ in 0..3 {
        assert_eq!(frontend.reply().unwrap().0, 1);
    }
}

/// Hostile case 44.
#[test]
fn a_frontend_that_never_reads_is_disconnected() {
    let mut frontend = Frontend::connect();
    frontend.stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let asks = words(&[1, 1, 0]).repeat(100);
    let error = loop {
        if let Err(error) = frontend.stream.write_all(&asks) {
            break error;
        }
    };
    assert_ne!(
        error.kind(),
        io::ErrorKind::WouldBlock,
        "it is not disconnected"
    );
    let ending = frontend.thread.join().unwrap();
    assert!(matches!(ending, Ending::Refused(_)), "{ending:?}");
}

#[test]
fn a_remote_hangs_up() {
    let frontend = Frontend::negotiated();
    frontend.remote.hang_up();
    let ending = frontend.thread.join().unwrap();
    assert!(matches!(ending, Ending::HungUp));
}

/// Before its own limit has passed.
#[test]
fn a_frontend_that_does_not_read_is_not_waited_for() {
    let limit = intake::ANSWER_WITHIN;
    for end in [SessionHandle::hang_up, SessionHandle::hurry] {
        let is_soon = cleave_tests::unless_late("hangs-up", limit / 2, |_| {
            let mut frontend = Frontend::connect();
            let started = Instant::now();
            frontend.ask_until_full();
            end(&frontend.remote);
            let ending = frontend.thread.join().unwrap();
            let took = started.elapsed();
            cleave_tests::ensure(took < limit, || format!("{ending:?} after {took:?}"))?;
            assert!(matches!(ending, Ending::HungUp), "{ending:?}");
            Ok(())
        });
        is_soon.unwrap();
    }
}

/// If the daemon holds the frontend's end of the connection, it never sees the frontend leave, and no other
/// frontend can ever be served.
#[test]
fn a_frontend_cannot_keep_its_own_end_alive_through_the_backend_channel() {
    for queued in [false, true] {
        let mut frontend = Frontend::negotiated();
        let own = frontend.stream.try_clone().unwrap();
        let answer = if queued {
            let (channel, other) = UnixStream::pair().unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [own.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            sendmsg(
                &other,
                &[IoSlice::new(b"x")],
                &mut control,
                SendFlags::empty(),
            )
            .unwrap();
            frontend.request_fds(Req::SET_BACKEND_REQ_FD, &[], &[channel.as_fd()])
        } else {
            frontend.request_fds(Req::SET_BACKEND_REQ_FD, &[], &[own.as_fd()])
        };
        assert_eq!(answer, if queued { Ack } else { Closed });
        drop(own);
        drop(frontend.stream);
        let until = Instant::now() + PATIENCE;
        while !frontend.thread.is_finished() {
            assert!(
                Instant::now() < until,
                "the session never ends (queued: {queued})"
            );
            std::thread::yield_now();
        }
    }
}
