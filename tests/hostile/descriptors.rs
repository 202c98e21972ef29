//! Messages with descriptors of the wrong kind, too many of them, or none.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cleave_client::message::{self, FLAG_NEED_REPLY, VERSION, request as number};
use cleave_tests::{Daemon, Outcome, Row, flood, policy, row};

use crate::attack::{check_both_vrings, context, frontend, open};
use crate::messages::closes_soon;

/// Makes descriptors that are not eventfds.
pub(crate) type Make = fn() -> Result<OwnedFd, String>;

pub(crate) fn strange_descriptors() -> Vec<(&'static str, Make)> {
    fn file(path: &str) -> Result<OwnedFd, String> {
        File::open(path)
            .map(OwnedFd::from)
            .map_err(|error| error.to_string())
    }
    vec![
        ("a folder", || file("/")),
        ("/dev/null", || file("/dev/null")),
        ("/dev/zero", || file("/dev/zero")),
        ("a regular file", || {
            tempfile::tempfile()
                .map(OwnedFd::from)
                .map_err(|error| error.to_string())
        }),
        ("a pipe without a writer", || {
            Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
                .unwrap()
                .0)
        }),
        ("a pipe without a reader", || {
            Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
                .unwrap()
                .1)
        }),
        ("a pipe that is full", || {
            let (reader, writer) =
                rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
            rustix::io::ioctl_fionbio(&writer, true).unwrap();
            while rustix::io::write(&writer, &[1; 4096]).is_ok() {}
            rustix::io::ioctl_fionbio(&writer, false).unwrap();
            // The reader lives as long as this program.
            std::mem::forget(reader);
            Ok(writer)
        }),
        ("a socket whose peer is gone", || {
            Ok(UnixStream::pair().unwrap().0.into())
        }),
        ("a descriptor opened by O_PATH", || {
            use rustix::fs::{Mode, OFlags};
            Ok(rustix::fs::open("/", OFlags::PATH, Mode::empty()).unwrap())
        }),
        ("an epoll descriptor", || {
            Ok(rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap())
        }),
        ("a memfd", || {
            Ok(rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
        }),
        ("a semaphore eventfd", || {
            let flags = rustix::event::EventfdFlags::SEMAPHORE;
            Ok(rustix::event::eventfd(7, flags).unwrap())
        }),
    ]
}

/// Descriptors on messages that expect none, or others; none may stay open.
pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    policy(&mut rows, "vhost-user \"Communication\"", descriptors);
    policy(
        &mut rows,
        "vhost-user \"Back-end communication\"",
        strange_channels,
    );
    rows
}

fn descriptors(rows: &mut Vec<Row>) {
    for request in (1..=43).chain([255]) {
        for count in [1usize, 8, 32, 253] {
            rows.push(row(
                format!("message {request} with {count} descriptors"),
                move |daemon| {
                    let mut before = 0;
                    for round in 0..3 {
                        attach(daemon, request, count)?;
                        if round == 0 {
                            // By now everything that is allocated only once exists.
                            before = daemon.fds_at_rest();
                        }
                    }
                    daemon.fds_settle_at(before)
                },
            ));
        }
    }
    rows.push(row(
        "descriptors beside single bytes of a message",
        |daemon| {
            let before = daemon.fds_at_rest();
            let slow = context(frontend(daemon), "connect")?;
            let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            for byte in message::message(number::GET_FEATURES, VERSION, &[]) {
                if slow.socket().send_raw(&[byte], &[event.as_fd()]).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(slow);
            daemon.fds_settle_at(before)
        },
    ));
    for (request, name) in [
        (number::SET_VRING_KICK, "kick"),
        (number::SET_VRING_CALL, "call"),
        (number::SET_VRING_ERR, "err"),
        (number::SET_BACKEND_REQ_FD, "backend channel"),
    ] {
        rows.push(row(
            format!("the connection's own socket as {name}"),
            move |daemon| {
                let mut client = open(daemon)?;
                let own = client.frontend().socket().stream().try_clone().unwrap();
                let payload = 0u64.to_le_bytes();
                let payload = if request == number::SET_BACKEND_REQ_FD {
                    &[][..]
                } else {
                    &payload
                };
                let _ = client.frontend().send(request, payload, &[own.as_fd()]);
                flood(client.queue(0), 2, 512);
                std::thread::sleep(Duration::from_millis(10));
                // The test only closes its end: if the daemon kept its copy of this end open, it would never see the
                // hang-up.
                Ok(())
            },
        ));
    }
}

fn strange_channels(rows: &mut Vec<Row>) {
    for (name, make) in strange_descriptors() {
        rows.push(row(format!("{name} as backend channel"), move |daemon| {
            let mut client = open(daemon)?;
            let fd = make()?;
            let _ = client
                .frontend()
                .send(number::SET_BACKEND_REQ_FD, &[], &[fd.as_fd()]);
            daemon.signal(rustix::process::Signal::HUP);
            std::thread::sleep(Duration::from_millis(5));
            if client.frontend().features().is_ok() {
                check_both_vrings(&mut client)?;
            }
            Ok(())
        }));
    }
}

fn attach(daemon: &Daemon, request: u32, count: usize) -> Outcome {
    let client = context(frontend(daemon), "connect")?;
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let fds: Vec<BorrowedFd<'_>> = (0..count).map(|_| event.as_fd()).collect();
    let len = match request {
        number::GET_FEATURES | number::SET_OWNER | number::GET_PROTOCOL_FEATURES => 0,
        number::SET_VRING_ADDR | number::ADD_MEM_REG | number::REM_MEM_REG => 40,
        number::SET_MEM_TABLE => 8,
        number::GET_CONFIG | number::SET_CONFIG => 13,
        number::GET_INFLIGHT_FD | number::SET_INFLIGHT_FD => 24,
        _ => 8,
    };
    let bytes = message::message(request, VERSION | FLAG_NEED_REPLY, &vec![0; len]);
    let _ = client.socket().send_raw(&bytes, &fds);
    let _ = client.socket().stream().shutdown(std::net::Shutdown::Write);
    closes_soon(client.socket())
}
