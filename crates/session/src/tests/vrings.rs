//! Descriptors, indices, sizes and addresses of vrings.

use rustix::fs::{OFlags, fcntl_setfl};

use super::*;
use crate::fd::is_readable;

/// Hostile case 36: a descriptor that cannot signal is refused, and the connection goes on. A socket cannot be
/// a kick.
#[test]
fn only_descriptors_that_can_signal_are_accepted() {
    let mut frontend = Frontend::negotiated();
    let null = File::open("/dev/null").unwrap();
    let folder = File::open("/").unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let memory = memory_file(4096);
    let good = bell();
    for request in [Req::SET_VRING_KICK, Req::SET_VRING_CALL, Req::SET_VRING_ERR] {
        for fd in [null.as_fd(), folder.as_fd(), memory.as_fd()] {
            assert_eq!(
                frontend.request_fds(request, &longs(&[0]), &[fd]),
                Nack,
                "{request:?}"
            );
        }
        let answer = match request {
            Req::SET_VRING_KICK => Nack,
            _ => Ack,
        };
        assert_eq!(
            frontend.request_fds(request, &longs(&[0]), &[socket.as_fd()]),
            answer
        );
        assert_eq!(
            frontend.request_fds(request, &longs(&[0]), &[good.as_fd()]),
            Ack
        );
        assert_eq!(
            frontend.request(request, &longs(&[0x100])),
            Ack,
            "no descriptor"
        );
    }
    assert!(frontend.is_alive());
}

/// Our poll and our write are two steps. Between them the frontend fills its blocking err eventfd.
#[test]
fn an_err_eventfd_that_fills_up_meanwhile_blocks_nothing() {
    let mut frontend = Frontend::with_memory();
    let err = eventfd(0, EventfdFlags::empty()).unwrap();
    let number = longs(&[0]);
    assert_eq!(
        frontend.request_fds(Req::SET_VRING_ERR, &number, &[err.as_fd()]),
        Ack
    );
    assert_eq!(frontend.request(Req::SET_VRING_NUM, &words(&[0, 8])), Ack);
    let kick = bell();
    assert_eq!(
        frontend.request_fds(Req::SET_VRING_KICK, &number, &[kick.as_fd()]),
        Ack
    );
    // There is room for one more signal only.
    let almost = (u64::MAX - 2).to_ne_bytes();
    let (begin, begun) = std::sync::mpsc::channel::<u32>();
    let (done, ended) = std::sync::mpsc::channel();
    let filler = err.try_clone().unwrap();
    let filler = std::thread::spawn(move || {
        for spins in begun {
            (0..spins).for_each(|_| std::hint::spin_loop());
            rustix::io::write(&filler, &1u64.to_ne_bytes()).unwrap();
            done.send(()).unwrap();
        }
    });
    let nowhere = words(&[0, 0].repeat(5));
    for round in 0..4000u32 {
        // A signal of the last round may still arrive, and this write must not wait for room then.
        fcntl_setfl(&err, OFlags::NONBLOCK).unwrap();
        while rustix::io::write(&err, &almost).is_err() {
            let _ = rustix::io::read(&err, &mut [0; 8]);
        }
        fcntl_setfl(&err, OFlags::empty()).unwrap();
        begin.send(round.wrapping_mul(7919) % 4096).unwrap();
        assert_eq!(frontend.request(Req::SET_VRING_ADDR, &nowhere), Nack);
        // Read until the filling thread is through, since our signal may have arrived first.
        while ended.try_recv().is_err() {
            if is_readable(&err) {
                rustix::io::read(&err, &mut [0; 8]).unwrap();
            }
        }
        while is_readable(&err) {
            rustix::io::read(&err, &mut [0; 8]).unwrap();
        }
    }
    drop(begin);
    filler.join().unwrap();
    assert!(frontend.is_alive());
}

/// Hostile case 37: all bits of an index are checked.
#[test]
fn vrings_that_do_not_exist_are_refused() {
    let mut frontend = Frontend::with_memory();
    let fd = bell();
    for index in [4u32, 255, 256, 257, 65536, 65537, u32::MAX] {
        for request in [Req::SET_VRING_NUM, Req::SET_VRING_BASE] {
            assert_eq!(
                frontend.request(request, &words(&[index, 8])),
                Nack,
                "{request:?} {index}"
            );
        }
        assert_eq!(
            frontend.request(Req::SET_VRING_ENABLE, &words(&[index, 1])),
            Nack,
            "{index}"
        );
        let mut payload = words(&[index, 0]);
        payload.extend(longs(&[USER, USER + 0x1000, USER + 0x2000, 0]));
        assert_eq!(
            frontend.request(Req::SET_VRING_ADDR, &payload),
            Nack,
            "{index}"
        );
    }
    for number in [4, 255, 65536, 0x200, 1 << 32, 1 << 63, 0x1_0000_0000_0100] {
        for request in [Req::SET_VRING_KICK, Req::SET_VRING_CALL, Req::SET_VRING_ERR] {
            let answer = frontend.request_fds(request, &longs(&[number]), &[fd.as_fd()]);
            assert_eq!(answer, Nack, "{request:?} {number:#x}");
        }
    }
    for index in [4u32, 256, 65536, u32::MAX] {
        let mut frontend = Frontend::negotiated();
        assert_eq!(frontend.base(index), None, "{index}");
    }
}

/// Hostile case 38.
#[test]
fn vring_sizes_are_powers_of_two_up_to_the_largest() {
    let mut frontend = Frontend::negotiated();
    for size in [1, 2, 128, 256] {
        assert_eq!(
            frontend.request(Req::SET_VRING_NUM, &words(&[0, size])),
            Ack,
            "{size}"
        );
    }
    for size in [
        0,
        3,
        255,
        512,
        1023,
        32768,
        65535,
        65536,
        65536 + 8,
        u32::MAX,
    ] {
        assert_eq!(
            frontend.request(Req::SET_VRING_NUM, &words(&[0, size])),
            Nack,
            "{size}"
        );
    }
}

/// Hostile case 39.
#[test]
fn vring_bases_fit_sixteen_bits() {
    let mut frontend = Frontend::negotiated();
    for (base, answer) in [(0, Ack), (65535, Ack), (65536, Nack), (u32::MAX, Nack)] {
        assert_eq!(
            frontend.request(Req::SET_VRING_BASE, &words(&[1, base])),
            answer,
            "{base}"
        );
    }
    assert_eq!(frontend.base(1), Some((1, 65535)));
    assert_eq!(frontend.base(1), Some((1, 65535)));
}

/// Hostile case 39: a vring that cannot start affects nothing else, and writes its err descriptor.
#[test]
fn a_vring_outside_memory_does_not_start() {
    let mut frontend = Frontend::with_memory();
    let (kick, err) = (bell(), bell());
    assert_eq!(
        frontend.request_fds(Req::SET_VRING_ERR, &longs(&[0]), &[err.as_fd()]),
        Ack
    );
    assert_eq!(frontend.request(Req::SET_VRING_NUM, &words(&[0, 8])), Ack);
    // Outside the region, and across its end.
    for (shift, tries) in [(MEM_BYTES, 1), (MEM_BYTES - 0x2000, 2)] {
        assert_eq!(frontend.request(Req::SET_VRING_ADDR, &addrs(0, shift)), Ack);
        let answer = frontend.request_fds(Req::SET_VRING_KICK, &longs(&[0]), &[kick.as_fd()]);
        assert_eq!(answer, Nack, "{shift:#x}");
        let mut fds = [PollFd::new(&err, PollFlags::IN)];
        wait(&mut fds, Some(Instant::now() + PATIENCE)).unwrap();
        let mut count = [0; 8];
        rustix::io::read(&err, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1, "try {tries}");
    }
    // The connection goes on even if no acknowledgement was asked for.
    frontend.send(Req::SET_VRING_KICK, &longs(&[0]), &[kick.as_fd()]);
    assert!(frontend.is_alive());
    assert_eq!(frontend.base(0), Some((0, 0)));
}

#[test]
fn a_misaligned_vring_is_refused() {
    let mut frontend = Frontend::with_memory();
    frontend.send(Req::SET_VRING_ADDR, &addrs(0, 1), &[]);
    assert!(!frontend.is_alive());
}
