//! Descriptors that block the thread that closes, queries or writes them. They must not stop the daemon.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use cleave_client::message::{self, FLAG_NEED_REPLY, RegionBytes, VERSION, request as number};
use cleave_client::{Client, Socket};
use cleave_tests::{
    Daemon, Lingering, Outcome, Row, Scratch, UnresponsiveFs, assert_serves, closes_within, ensure,
    flood, is_root, row, time_limit, wait_until,
};
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};
use rustix::process::Signal;
use rustix::thread::gettid;

use crate::attack::{
    check_both_vrings, check_other_vring, context, frontend, negotiated, open, open_with, polling,
    settle,
};
use crate::config::refused;

const MIB: u64 = 1 << 20;
const USER: u64 = 0x7f00_0000_0000;

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    lingering(&mut rows);
    silent_files(&mut rows);
    pipes_and_sockets(&mut rows);
    held_pipes(&mut rows);
    rows
}

fn lingering(rows: &mut Vec<Row>) {
    rows.push(row(
        "a lingering socket of a frontend that is refused",
        |daemon| {
            let mut client = open(daemon)?;
            let _parked = context(frontend(daemon), "connect")?;
            let _unread = while_stopped(daemon, || Lingering::new()?.queue(daemon.socket()))?;
            turned_away(daemon)?;
            check_both_vrings(&mut client)
        },
    ));
    rows.push(row(
        "40 lingering sockets of frontends that are refused",
        |daemon| {
            let mut client = open(daemon)?;
            let _parked = context(frontend(daemon), "connect")?;
            let mut unread = Vec::new();
            for _ in 0..40 {
                unread.push(while_stopped(daemon, || {
                    Lingering::new()?.queue(daemon.socket())
                })?);
            }
            turned_away(daemon)?;
            check_both_vrings(&mut client)
        },
    ));
    rows.push(row(
        "40 lingering sockets of former frontends, more than the offload threads",
        |daemon| {
            let bytes = message::message(number::GET_FEATURES, VERSION, &[]);
            let mut unread = Vec::new();
            for _ in 0..40 {
                let former = while_stopped(daemon, || {
                    let former =
                        context(Socket::connect(daemon.socket(), time_limit()), "connect")?;
                    let lingering = Lingering::new()?;
                    context(former.send_raw(&bytes, &[lingering.socket.as_fd()]), "send")?;
                    unread.push(lingering.give_up());
                    Ok(former)
                })?;
                ensure(closes_within(&former, time_limit()), || {
                    "the connection is not closed".into()
                })?;
            }
            let connect = || {
                let next = context(Socket::connect(daemon.socket(), time_limit()), "connect")?;
                context(next.send_raw(&bytes, &[]), "send")?;
                Ok::<_, String>(next)
            };
            let _both = [connect()?, connect()?];
            turned_away(daemon)
        },
    ));
    rows.push(row(
        "lingering sockets of silent frontends that are closed for others",
        |daemon| {
            let mut unread = Vec::new();
            let mut silent = Vec::new();
            while_stopped(daemon, || {
                (0..20).try_for_each(|_| {
                    let connection =
                        context(Socket::connect(daemon.socket(), time_limit()), "connect")?;
                    // A one-byte message is incomplete; its socket carries the socket that carries the lingering one.
                    let (inner, outer) = context(UnixStream::pair(), "pair")?;
                    let lingering = Lingering::new()?;
                    send(&outer, b"x", &[lingering.socket.as_fd()])?;
                    context(connection.send_raw(b"x", &[inner.as_fd()]), "send")?;
                    unread.push(lingering.give_up());
                    silent.push(connection);
                    Ok(())
                })
            })?;
            drop(silent);
            assert_serves(daemon)
        },
    ));
    for (name, request, len) in [
        ("beside GET_FEATURES", number::GET_FEATURES, 0),
        ("as a region", number::ADD_MEM_REG, 40),
        ("as kick", number::SET_VRING_KICK, 8),
        ("as call", number::SET_VRING_CALL, 8),
        ("as backend channel", number::SET_BACKEND_REQ_FD, 0),
    ] {
        rows.push(row(format!("a lingering socket {name}"), move |daemon| {
            let mut client = open(daemon)?;
            let lingering = Lingering::new()?;
            let bytes = message::message(request, VERSION | FLAG_NEED_REPLY, &vec![0; len]);
            let _unread = while_stopped(daemon, || {
                let fds = [lingering.socket.as_fd()];
                context(client.frontend().socket().send_raw(&bytes, &fds), "send")?;
                Ok(lingering.give_up())
            })?;
            drop(client);
            assert_serves(daemon)
        }));
    }
    rows.push(row(
        "lingering sockets beside out-of-band bytes, of as many frontends as a disk has",
        |daemon| {
            let both = [negotiated(daemon)?, negotiated(daemon)?];
            let mut unread = Vec::new();
            while_stopped(daemon, || {
                both.iter().try_for_each(|bare| {
                    unread.push(Lingering::new()?.send_out_of_band(bare.socket())?);
                    Ok(())
                })
            })?;
            drop(both);
            assert_serves(daemon)
        },
    ));
    rows.push(row(
        "a lingering socket inside the backend channel",
        |daemon| {
            let mut client = open(daemon)?;
            let (ours, theirs) = context(UnixStream::pair(), "pair")?;
            let lingering = Lingering::new()?;
            send(&ours, b"x", &[lingering.socket.as_fd()])?;
            let _unread = lingering.give_up();
            let said = client
                .frontend()
                .send(number::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
            context(said, "set")?;
            check_both_vrings(&mut client)
        },
    ));
    rows.push(row(
        "a lingering socket in a socket for calls, replaced by another",
        |daemon| {
            let mut client = open_with(daemon, &polling())?;
            let mut unread = Vec::new();
            for _ in 0..3 {
                let (ours, theirs) = context(UnixStream::pair(), "pair")?;
                let lingering = Lingering::new()?;
                send(&ours, b"x", &[lingering.socket.as_fd()])?;
                let fd = Some(theirs.as_fd());
                unread.push(lingering.give_up());
                context(client.frontend().set_vring_call(0, fd), "call")?;
            }
            check_both_vrings(&mut client)
        },
    ));
}

/// Runs an action while the daemon is stopped, so that the daemon finds the result complete and owns the last copy of
/// a descriptor.
fn while_stopped<T>(daemon: &Daemon, act: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    daemon.freeze();
    let done = act();
    daemon.signal(Signal::CONT);
    done
}

fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), String> {
    let socket = stream.try_clone().map_err(|error| error.to_string())?;
    let socket = context(Socket::new(socket, time_limit()), "socket")?;
    context(socket.send_raw(bytes, fds), "send")
}

/// Checks that the control loop still refuses a third frontend.
fn turned_away(daemon: &Daemon) -> Outcome {
    let closed = wait_until(|| {
        let third = Socket::connect(daemon.socket(), time_limit());
        third.is_ok_and(|third| closes_within(&third, Duration::from_secs(5)))
    });
    ensure(closed, || "a third frontend is not refused".into())
}

/// A file system whose server never answers, if this process can mount one.
fn silent_file(scratch: &Scratch) -> Option<UnresponsiveFs> {
    if !is_root() {
        println!("skipped: mounting a file system takes root");
        return None;
    }
    let server = UnresponsiveFs::mount(scratch, MIB);
    server.inspect_err(|why| println!("skipped: {why}")).ok()
}

fn silent_files(rows: &mut Vec<Row>) {
    for (name, request) in [
        ("as the whole of memory", number::SET_MEM_TABLE),
        ("as one more region", number::ADD_MEM_REG),
        ("as dirty log", number::SET_LOG_BASE),
    ] {
        rows.push(row(
            format!("a file whose server is silent {name}"),
            move |daemon| {
                let scratch = Scratch::new();
                let Some(server) = silent_file(&scratch) else {
                    return Ok(());
                };
                let file = context(std::fs::File::open(server.file()), "open")?;
                server.stop_answering();
                let bare = negotiated(daemon)?;
                let region = RegionBytes {
                    guest_addr: 0,
                    len_bytes: MIB,
                    user_addr: USER,
                    file_offset: 0,
                };
                let said = match request {
                    number::SET_MEM_TABLE => bare.set_mem_table(&[region], &[file.as_fd()]),
                    number::SET_LOG_BASE => {
                        let payload = message::log_base(MIB, 0);
                        bare.request(request, &payload, &[file.as_fd()]).map(drop)
                    }
                    _ => bare.add_mem_reg(region, file.as_fd()),
                };
                refused(said)?;
                drop(bare);
                let served = assert_serves(daemon);
                // The daemon's close queries the server, so that connection goes first.
                drop(server);
                served
            },
        ));
    }
    for part in ["kick", "call", "err"] {
        rows.push(row(
            format!("a file whose server is silent as {part}"),
            move |daemon| {
                let scratch = Scratch::new();
                let Some(server) = silent_file(&scratch) else {
                    return Ok(());
                };
                let file = context(std::fs::File::open(server.file()), "open")?;
                server.stop_answering();
                let mut client = open(daemon)?;
                refused(set(&mut client, part, file.as_fd()))?;
                drop(client);
                let served = assert_serves(daemon);
                drop(server);
                served
            },
        ));
    }
}

fn set(client: &mut Client, part: &str, fd: BorrowedFd<'_>) -> Result<(), cleave_client::Error> {
    let frontend = client.frontend();
    match part {
        "kick" => frontend.set_vring_kick(0, Some(fd)),
        "call" => frontend.set_vring_call(0, Some(fd)),
        _ => frontend.set_vring_err(0, Some(fd)),
    }
}

/// Two ends that carry signals: a write to the second is read from the first.
type Ends = (OwnedFd, OwnedFd);

fn pipe_of(blocking: bool) -> Result<Ends, String> {
    let (reader, writer) = context(pipe_with(PipeFlags::CLOEXEC), "pipe")?;
    context(rustix::io::ioctl_fionbio(&writer, !blocking), "flags")?;
    Ok((reader, writer))
}

fn socket_of(blocking: bool) -> Result<Ends, String> {
    let (reader, writer) = context(UnixStream::pair(), "pair")?;
    context(writer.set_nonblocking(!blocking), "flags")?;
    Ok((reader.into(), writer.into()))
}

/// One signal: eight bytes, as for an eventfd.
fn check_signal(reader: &OwnedFd) -> Outcome {
    let mut bytes = [0; 8];
    let mut stream = std::fs::File::from(context(reader.try_clone(), "copy")?);
    let mut fds = [rustix::event::PollFd::new(
        reader,
        rustix::event::PollFlags::IN,
    )];
    let timeout = rustix::time::Timespec {
        tv_sec: 120,
        tv_nsec: 0,
    };
    let ready = context(rustix::event::poll(&mut fds, Some(&timeout)), "poll")?;
    ensure(ready == 1, || "no signal came".into())?;
    context(stream.read_exact(&mut bytes), "read")?;
    ensure(bytes == 1u64.to_ne_bytes(), || format!("{bytes:?}"))
}

/// Signals through pipes and sockets, as user-mode Linux passes them.
fn pipes_and_sockets(rows: &mut Vec<Row>) {
    type Make = fn(bool) -> Result<Ends, String>;
    for (name, make) in [("pipe", pipe_of as Make), ("socket", socket_of)] {
        for (mode, blocking) in [("blocks", true), ("does not block", false)] {
            rows.push(row(
                format!("calls by a {name} that {mode}"),
                move |daemon| {
                    let before = daemon.fds_at_rest();
                    let mut client = open(daemon)?;
                    let (reader, writer) = make(blocking)?;
                    let call = Some(writer.as_fd());
                    context(client.frontend().set_vring_call(0, call), "call")?;
                    drop(writer);
                    // A new call descriptor is signalled at once.
                    check_signal(&reader)?;
                    for _ in 0..3 {
                        client.queue(0).ring().arm();
                        flood(client.queue(0), 1, 512);
                        check_signal(&reader)?;
                        let seen = settle(client.queue(0).ring(), 1);
                        ensure(seen == 1, || "a call without a completion".into())?;
                    }
                    check_other_vring(&mut client)?;
                    drop(client);
                    daemon.fds_settle_at(before)
                },
            ));
            rows.push(row(
                format!("the fault of a vring reported by a {name} that {mode}"),
                move |daemon| {
                    let mut client = open(daemon)?;
                    let (reader, writer) = make(blocking)?;
                    let err = Some(writer.as_fd());
                    context(client.frontend().set_vring_err(0, err), "err")?;
                    client.queue(0).ring().push(9999);
                    client.queue(0).ring().publish();
                    client.queue(0).ring_kick();
                    check_signal(&reader)?;
                    check_other_vring(&mut client)
                },
            ));
            rows.push(row(
                format!("calls by a {name} that {mode} and is never read"),
                move |daemon| {
                    let mut client = open_with(daemon, &polling())?;
                    let (_reader, writer) = make(blocking)?;
                    let filler = context(writer.try_clone(), "copy")?;
                    context(rustix::io::ioctl_fionbio(&filler, true), "flags")?;
                    while rustix::io::write(&filler, &[0; 4096]).is_ok() {}
                    context(rustix::io::ioctl_fionbio(&filler, !blocking), "flags")?;
                    let call = Some(writer.as_fd());
                    context(client.frontend().set_vring_call(0, call), "call")?;
                    for _ in 0..3 {
                        client.queue(0).ring().arm();
                        flood(client.queue(0), 1, 512);
                        let seen = settle(client.queue(0).ring(), 1);
                        ensure(seen == 1, || "a full pipe stops the vring".into())?;
                    }
                    context(client.frontend().vring_base(0), "stop")?;
                    check_other_vring(&mut client)
                },
            ));
        }
    }
}

/// A pipe that another thread splices into without any data to splice: a write or close of it then waits in the
/// kernel and cannot be interrupted.
struct HeldPipe {
    _reader: OwnedFd,
    feed: UnixStream,
    holder: JoinHandle<()>,
}

impl HeldPipe {
    /// Makes one, and the end to write.
    fn new() -> Result<(HeldPipe, OwnedFd), String> {
        // One that does not block would not be waited for by the splice.
        let (reader, writer) = pipe_of(true)?;
        let (source, feed) = context(UnixStream::pair(), "pair")?;
        let into = context(writer.try_clone(), "copy")?;
        let (thread, holds) = channel();
        let holder = std::thread::spawn(move || {
            let _ = thread.send(gettid());
            let _ = splice(source, None, &into, None, 4096, SpliceFlags::empty());
        });
        let thread = context(holds.recv(), "holder")?.as_raw_nonzero();
        // It has nothing else to sleep for.
        let file = format!("/proc/self/task/{thread}/stat");
        let sleeps = || std::fs::read_to_string(&file).is_ok_and(|stat| stat.contains(") S "));
        ensure(wait_until(sleeps), || "the pipe is not held".into())?;
        let held = HeldPipe {
            _reader: reader,
            feed,
            holder,
        };
        Ok((held, writer))
    }

    /// Data ends the splice, and with it the wait of everything that is blocked on the pipe.
    fn let_go(self) -> Outcome {
        let _ = (&self.feed).write_all(b"x");
        drop(self.feed);
        context(self.holder.join().map_err(|_| "panicked"), "holder")
    }
}

fn held_pipes(rows: &mut Vec<Row>) {
    rows.push(row("fresh pipes as call behind a blocked one", |daemon| {
        let most = daemon.fds_at_rest() + 100;
        let (pipe, writer) = HeldPipe::new()?;
        let mut client = open_with(daemon, &polling())?;
        let said = set(&mut client, "call", writer.as_fd());
        context(said, "the blocked one")?;
        let has_blocked = wait_until(|| is_any_thread_blocked(daemon));
        ensure(has_blocked, || "the pipe blocks no thread".into())?;
        let mut outcome = fresh_pipes(&mut client).and_then(|()| daemon.fds_settle_at(most));
        outcome = outcome.and(check_other_vring(&mut client));
        drop(client);
        outcome.and(pipe.let_go())
    }));
    for part in ["kick", "call", "err"] {
        rows.push(row(format!("a blocked pipe as {part}"), move |daemon| {
            let (pipe, writer) = HeldPipe::new()?;
            let mut client = open_with(daemon, &polling())?;
            let said = set(&mut client, part, writer.as_fd());
            drop(writer);
            let mut outcome = Ok(());
            if said.is_ok() {
                for _ in 0..3 {
                    client.queue(0).ring().arm();
                    flood(client.queue(0), 1, 512);
                    let seen = settle(client.queue(0).ring(), 1);
                    outcome = outcome.and(ensure(seen == 1, || "the pipe stops the vring".into()));
                }
                let stopped = client.frontend().vring_base(0);
                outcome = outcome.and(context(stopped, "stop").map(drop));
                outcome = outcome.and(check_other_vring(&mut client));
            }
            drop(client);
            outcome = outcome.and(assert_serves(daemon));
            pipe.let_go()?;
            outcome
        }));
    }
}

/// Returns true if a thread of the daemon waits in the kernel and cannot be interrupted.
fn is_any_thread_blocked(daemon: &Daemon) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{}/task", daemon.pid()));
    threads.into_iter().flatten().flatten().any(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat"));
        stat.is_ok_and(|stat| stat.contains(") D "))
    })
}

/// Sends a thousand pipes, each of which takes the place of the one before.
fn fresh_pipes(client: &mut Client) -> Outcome {
    for _ in 0..1000 {
        let (_reader, writer) = pipe_of(false)?;
        context(set(client, "call", writer.as_fd()), "a fresh one")?;
    }
    Ok(())
}
