//! The dirty log: what is marked in it and when, logs that come and go under load, and logs that lie.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use cleave_blk::spec::{feature, request_type as kind};
use cleave_client::message::{self, VERSION, VringAddr, protocol, request as number};
use cleave_client::{
    Buffer, Client, DeviceOptions, DriverRequest, Error, Frontend, GuestMemory, Queue,
    RegionOptions, Workload, WriteLog,
};
use cleave_tests::{
    Daemon, Outcome, Row, ensure, exercise, exercise_queue, flood, policy, row, scale, small,
    specified,
};

use crate::attack::{check_both_vrings, context, frontend, open_with, settle};
use crate::config::refused;
use crate::descriptors::strange_descriptors;
use crate::regions::{MIB, memfd, region};

const PAGE: u64 = 4096;
/// Sectors of the disk of the tables.
const SECTORS: u64 = (64 << 20) / 512;

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    specified(&mut rows, "vhost-user \"Communication\"", answers);
    specified(&mut rows, "vhost-user \"Migration\"", marks);
    specified(&mut rows, "vhost-user \"Migration\"", switches);
    policy(&mut rows, "vhost-user \"Migration\"", failed_moves);
    policy(&mut rows, "vhost-user SET_LOG_BASE", floods);
    policy(&mut rows, "vhost-user SET_LOG_BASE", lying_logs);
    policy(&mut rows, "vhost-user SET_LOG_BASE", cut_logs);
    rows.into_iter()
        .map(|row| match row.name.starts_with("memory beyond") {
            true => row.with_protocol(protocol::CONFIGURE_MEM_SLOTS),
            false => row,
        })
        .map(|row| row.with_protocol(protocol::LOG_SHMFD))
        .map(|row| row.with_features(feature::LOG_ALL))
        .collect()
}

/// Options for two vrings of a device with a log.
fn with_log() -> DeviceOptions {
    let plain = small(2);
    DeviceOptions {
        protocol_features: plain.protocol_features | protocol::LOG_SHMFD,
        ..plain
    }
}

fn open(daemon: &Daemon) -> Result<Client, String> {
    open_with(daemon, &with_log())
}

/// Opens a client whose pages are marked.
fn open_marked(daemon: &Daemon) -> Result<(Client, WriteLog), String> {
    let client = open(daemon)?;
    let log = context(WriteLog::new(client.memory()), "make a log")?;
    context(client.start_log(&log), "start the log")?;
    Ok((client, log))
}

/// Sends SET_LOG_BASE, whose reply is an acceptance whatever it contains.
fn send_log(
    frontend: &Frontend,
    len_bytes: u64,
    file_offset: u64,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Error> {
    let payload = message::log_base(len_bytes, file_offset);
    let reply = frontend.request(number::SET_LOG_BASE, &payload, fds);
    reply.map(drop)
}

fn answers(rows: &mut Vec<Row>) {
    for (name, features) in [
        ("is answered without REPLY_ACK", 0),
        ("is answered once with REPLY_ACK", protocol::REPLY_ACK),
    ] {
        rows.push(row(format!("SET_LOG_BASE {name}"), move |daemon| {
            let options = DeviceOptions {
                protocol_features: protocol::MQ | protocol::CONFIG | protocol::LOG_SHMFD | features,
                ..with_log()
            };
            let mut client = open_with(daemon, &options)?;
            let log = context(WriteLog::new(client.memory()), "make a log")?;
            context(client.frontend().set_log(&log), "set the log")?;
            // A second reply would be taken for this one.
            context(client.frontend().features(), "afterwards")?;
            check_both_vrings(&mut client)
        }));
    }
}

/// Checks that the pages of these parts of memory are marked.
fn check_marked(log: &WriteLog, written: &[(&str, u64, u64)]) -> Outcome {
    let marked = log.pages();
    for (what, addr, len_bytes) in written {
        let mut pages = addr / PAGE..=(addr + len_bytes - 1) / PAGE;
        if let Some(page) = pages.find(|page| !marked.contains(page)) {
            return Err(format!("{what}: page {page:#x} is not marked"));
        }
    }
    Ok(())
}

/// Returns the part of the used ring that the first answer changes: index and entry.
fn used_ring(queue: &mut Queue) -> (&'static str, u64, u64) {
    ("used ring", queue.ring().layout().used + 2, 10)
}

fn marks(rows: &mut Vec<Row>) {
    for (name, request, sector, len, is_read) in [
        ("a read", kind::IN, 0, 3 * PAGE, true),
        ("a read of one sector", kind::IN, 0, 512, true),
        ("a get-id", kind::GET_ID, 0, 20, true),
        ("a write", kind::OUT, 0, PAGE, false),
        ("a flush", kind::FLUSH, 0, 0, false),
        ("a read beyond the end", kind::IN, SECTORS, 512, false),
    ] {
        for (how, is_indirect) in [("", false), (" through an indirect table", true)] {
            rows.push(row(
                format!("{name}{how} has its pages and those of the used ring marked"),
                move |daemon| {
                    let (mut client, log) = open_marked(daemon)?;
                    let queue = client.queue(0);
                    let (header, _) = queue.control();
                    let at = queue.data_area().0;
                    // Data across a border of pages, and a status byte in a page that nothing else is in.
                    let (data, status, table) = (at + PAGE - 8, at + 9 * PAGE, at + 16 * PAGE);
                    queue.write_header(request, sector);
                    let mut chain = vec![
                        Buffer::readable(header, 16),
                        Buffer {
                            addr: data,
                            len: len as u32,
                            writable: request != kind::OUT,
                        },
                        Buffer::writable(status, 1),
                    ];
                    chain.retain(|buffer| buffer.len > 0);
                    log.take_pages();
                    let used = match is_indirect {
                        true => queue.chain_through(table, &chain),
                        false => queue.chain(&chain),
                    };
                    context(used, "execute")?;
                    check_marked(&log, &[("status", status, 1), used_ring(queue)])?;
                    match is_read {
                        true => check_marked(&log, &[("data", data, len)]),
                        false => Ok(()),
                    }
                },
            ));
        }
    }
    rows.push(row(
        "the last page of memory is marked in a last byte that it has alone",
        |daemon| {
            const AT: u64 = 0x1000_0000;
            let len_bytes = 16 * MIB + PAGE;
            let plans = [RegionOptions::new(AT, len_bytes)];
            let mut client = in_memory_with_log(daemon, &plans)?;
            let log = context(WriteLog::new(client.memory()), "make a log")?;
            context(client.start_log(&log), "start the log")?;
            let data = (AT + len_bytes - PAGE, PAGE as u32);
            let one = DriverRequest {
                kind: kind::IN,
                sector: 0,
                data,
                writable: true,
            };
            let done = context(client.queue(0).execute(&one), "read")?;
            ensure(done.status == 0, || format!("{done:?}"))?;
            check_marked(&log, &[("data", data.0, PAGE)])
        },
    ));
    rows.push(row("a log begins at its offset in its file", |daemon| {
        let mut client = open(daemon)?;
        let wanted = context(WriteLog::new(client.memory()), "make a log")?;
        let len_bytes = wanted.len_bytes();
        let file = memfd(2 * PAGE + len_bytes);
        let sent = send_log(client.frontend(), len_bytes, PAGE, &[file.as_fd()]);
        context(sent, "set the log")?;
        let features = client.features() | feature::LOG_ALL;
        context(client.frontend().set_features(features), "features")?;
        context(client.queue(0).read(0, &mut [0; 512]), "read")?;
        let page = client.queue(0).data_area().0 / PAGE;
        let mut byte = [0];
        context(rustix::io::pread(&file, &mut byte, PAGE + page / 8), "look")?;
        ensure(byte[0] & 1 << (page % 8) != 0, || {
            format!("page {page:#x} is not marked")
        })
    }));
    rows.push(row(
        "after another log was taken, pages are marked in that alone",
        |daemon| {
            let (mut client, first) = open_marked(daemon)?;
            context(client.queue(0).read(0, &mut [0; 512]), "read")?;
            let next = context(WriteLog::new(client.memory()), "make a log")?;
            context(client.frontend().set_log(&next), "set the next log")?;
            first.take_pages();
            for _ in 0..20 {
                exercise(&mut client)?;
            }
            let queue = client.queue(0);
            let (status, data) = (queue.control().1, queue.data_area().0);
            let written = [
                used_ring(queue),
                ("status", status, 1),
                ("data", data, PAGE),
            ];
            check_marked(&next, &written)?;
            let late = first.pages();
            ensure(late.is_empty(), || {
                format!("{} pages are marked in the log before it", late.len())
            })
        },
    ));
}

fn in_memory_with_log(daemon: &Daemon, plans: &[RegionOptions]) -> Result<Client, String> {
    let memory = context(GuestMemory::new(plans), "memory")?;
    let bare = context(frontend(daemon), "connect")?;
    context(Client::start_in(bare, memory, &with_log()), "start")
}

/// The addresses of all vrings, without and with the flag of the log.
fn vring_addrs(client: &Client) -> Result<[Vec<VringAddr>; 2], String> {
    let all = 0..client.queue_count();
    let plain: Result<Vec<_>, Error> = all.clone().map(|at| client.vring_addr(at)).collect();
    let logged: Result<Vec<_>, Error> = all.map(|at| client.logged_vring_addr(at)).collect();
    Ok([context(plain, "addresses")?, context(logged, "addresses")?])
}

fn switches(rows: &mut Vec<Row>) {
    rows.push(row(
        "the log flag of a running vring keeps its position",
        |daemon| {
            let mut client = open(daemon)?;
            let [plain, logged] = vring_addrs(&client)?;
            exercise(&mut client)?;
            for round in 0..scale(20) {
                flood(client.queue(0), 20, 16 << 10);
                for addr in [logged[0], plain[0]] {
                    context(client.frontend().set_vring_addr(addr), "flag")?;
                }
                let seen = settle(client.queue(0).ring(), 20);
                ensure(seen == 20, || format!("round {round}: {seen} of 20"))?;
                exercise_queue(&mut client, 0)?;
            }
            let wanted = client.queue(0).ring().reaped();
            let base = context(client.frontend().vring_base(0), "stop")?;
            ensure(base == u32::from(wanted), || {
                format!("position {base}, not {wanted}")
            })
        },
    ));
    for (name, feature_first) in [("QEMU", true), ("Cloud Hypervisor", false)] {
        rows.push(row(
            format!("marking switched off and on under load, in the order of {name}"),
            move |daemon| {
                let (mut client, _log) = open_marked(daemon)?;
                let [plain, logged] = vring_addrs(&client)?;
                let features = client.features();
                under_load(&mut client, |frontend| {
                    let set = |features| context(frontend.set_features(features), "features");
                    let flag = |addrs: &[VringAddr]| {
                        let mut sent = addrs.iter().map(|addr| frontend.set_vring_addr(*addr));
                        context(sent.try_for_each(|sent| sent), "flags")
                    };
                    match feature_first {
                        true => set(features).and_then(|()| flag(&plain))?,
                        false => flag(&plain).and_then(|()| set(features))?,
                    }
                    set(features | feature::LOG_ALL)?;
                    flag(&logged)
                })?;
                check_both_vrings(&mut client)
            },
        ));
    }
}

/// Reads through both vrings while a frontend says something again and again. No read may fail, nor be without an answer.
fn under_load(client: &mut Client, say: impl Fn(&Frontend) -> Outcome) -> Outcome {
    let (frontend, queues) = client.parts();
    std::thread::scope(|scope| {
        let loads: Vec<_> = queues
            .iter_mut()
            .map(|queue| {
                let reads = Workload::reads(4096, 16, 32 << 20, Duration::from_millis(400));
                scope.spawn(move || queue.run(&reads, |_| ()))
            })
            .collect();
        let mut outcome = Ok(());
        while outcome.is_ok() && loads.iter().any(|load| !load.is_finished()) {
            outcome = say(frontend);
        }
        for load in loads {
            let done = context(load.join().unwrap(), "load")?;
            ensure(done.failed == 0 && done.reads > 0, || format!("{done:?}"))?;
        }
        outcome
    })
}

fn failed_moves(rows: &mut Vec<Row>) {
    rows.push(row(
        "LOG_ALL and the log flag of vrings without a log",
        |daemon| {
            let mut client = open(daemon)?;
            let [plain, logged] = vring_addrs(&client)?;
            for (log_all, addrs) in [(feature::LOG_ALL, logged), (0, plain)] {
                let features = client.features() | log_all;
                context(client.frontend().set_features(features), "features")?;
                for addr in addrs {
                    context(client.frontend().set_vring_addr(addr), "flag")?;
                }
                exercise(&mut client)?;
            }
            Ok(())
        },
    ));
    rows.push(row(
        "vrings that start with LOG_ALL before the log comes, as after a move that failed",
        |daemon| {
            let mut client = open(daemon)?;
            for is_marked in [false, true] {
                exercise(&mut client)?;
                let log = context(WriteLog::new(client.memory()), "make a log")?;
                if is_marked {
                    context(client.start_log(&log), "start the log")?;
                }
                let positions = context(client.stop(), "stop")?;
                drop(log);
                context(client.roll_back(&positions), "go on")?;
            }
            exercise(&mut client)
        },
    ));
}

fn floods(rows: &mut Vec<Row>) {
    rows.push(row("SET_LOG_BASE again and again under load", |daemon| {
        let (mut client, log) = open_marked(daemon)?;
        let before = daemon.fds();
        under_load(&mut client, |frontend| {
            context(frontend.set_log(&log), "set the log")
        })?;
        daemon.fds_settle_at(before)?;
        check_both_vrings(&mut client)
    }));
    rows.push(row(
        "a flood of SET_LOG_BASE whose replies nobody reads",
        |daemon| {
            let before = daemon.fds_at_rest();
            let (mut client, log) = open_marked(daemon)?;
            flood(client.queue(0), 20, 64 << 10);
            let payload = message::log_base(log.len_bytes(), 0);
            let one = message::message(number::SET_LOG_BASE, VERSION, &payload);
            let socket = client.frontend().socket();
            context(
                socket
                    .stream()
                    .set_write_timeout(Some(Duration::from_millis(20))),
                "time limit",
            )?;
            // In the end the daemon cannot send its replies, and so reads no more.
            for _ in 0..scale(10_000) {
                if socket.send_raw(&one, &[log.fd()]).is_err() {
                    break;
                }
            }
            drop(client);
            daemon.fds_settle_at(before)
        },
    ));
}

/// Sends a log that a back-end should refuse. One that takes it must at least survive it.
fn refuses_log(client: &mut Client, sent: Result<(), Error>) -> Outcome {
    if sent.is_ok() {
        let features = client.features() | feature::LOG_ALL;
        let _ = client.frontend().set_features(features);
        if let Ok([_, logged]) = vring_addrs(client) {
            let _ = client.frontend().set_vring_addr(logged[0]);
        }
        let _ = client.queue(0).read(0, &mut [0; 512]);
    }
    refused(sent)
}

fn lying_logs(rows: &mut Vec<Row>) {
    // Lengths and offsets; the file has just the bytes that are needed, up to a whole page.
    type Lie = fn(needed: u64) -> (u64, u64);
    let lies: [(&str, Lie); 8] = [
        ("of no bytes", |_| (0, 0)),
        ("too short for the memory", |needed| (needed - 1, 0)),
        ("longer than its file", |needed| (needed + PAGE, 0)),
        ("beyond the end of its file", |needed| (needed, 16 * MIB)),
        ("whose offset wraps", |needed| (needed, u64::MAX - PAGE + 1)),
        ("with the largest offset", |needed| (needed, u64::MAX)),
        ("of 2^64 - 1 bytes", |_| (u64::MAX, 0)),
        ("of 2^63 bytes at 2^63", |_| (1 << 63, 1 << 63)),
    ];
    for (name, lie) in lies {
        rows.push(row(format!("a dirty log {name}"), move |daemon| {
            let mut client = open(daemon)?;
            let log = context(WriteLog::new(client.memory()), "make a log")?;
            let (len_bytes, offset) = lie(log.len_bytes());
            let sent = send_log(client.frontend(), len_bytes, offset, &[log.fd()]);
            refuses_log(&mut client, sent)
        }));
    }
    for count in [0, 2] {
        rows.push(row(
            format!("a dirty log with {count} descriptors"),
            move |daemon| {
                let mut client = open(daemon)?;
                let log = context(WriteLog::new(client.memory()), "make a log")?;
                let fds = vec![log.fd(); count];
                let sent = send_log(client.frontend(), log.len_bytes(), 0, &fds);
                refuses_log(&mut client, sent)
            },
        ));
    }
    for (name, make) in strange_descriptors() {
        rows.push(row(format!("{name} as dirty log"), move |daemon| {
            let mut client = open(daemon)?;
            let log = context(WriteLog::new(client.memory()), "make a log")?;
            let fd = make()?;
            let sent = send_log(client.frontend(), log.len_bytes(), 0, &[fd.as_fd()]);
            refuses_log(&mut client, sent)
        }));
    }
    rows.push(row("a dirty log that cannot be written", |daemon| {
        let mut client = open(daemon)?;
        let log = context(WriteLog::new(client.memory()), "make a log")?;
        let path = format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&log.fd())
        );
        let read_only = OwnedFd::from(context(std::fs::File::open(path), "open")?);
        let sent = send_log(client.frontend(), log.len_bytes(), 0, &[read_only.as_fd()]);
        refuses_log(&mut client, sent)
    }));
    rows.push(row("memory beyond the end of the dirty log", |daemon| {
        let (mut client, log) = open_marked(daemon)?;
        let beyond = log.len_bytes() * 8 * PAGE;
        let file = memfd(MIB);
        let one = region(beyond, MIB, 0x7e00_0000_0000, 0);
        refused(client.frontend().add_mem_reg(one, file.as_fd()))
    }));
}

/// Logs whose file is truncated: SIGBUS would kill a program without a handler. The daemon may close the connection.
fn cut_logs(rows: &mut Vec<Row>) {
    for (name, keep_bytes) in [("wholly", 0), ("to one page", PAGE)] {
        rows.push(row(
            format!("the file of the dirty log cut {name} under load"),
            move |daemon| {
                for _ in 0..5 {
                    let (mut client, log) = open_marked(daemon)?;
                    flood(client.queue(0), 20, 64 << 10);
                    flood(client.queue(1), 20, 64 << 10);
                    context(rustix::fs::ftruncate(log.fd(), keep_bytes), "cut")?;
                    settle(client.queue(0).ring(), 20);
                    let _ = exercise(&mut client);
                }
                Ok(())
            },
        ));
    }
    rows.push(row(
        "no position from a vring whose marks were lost with the log's file",
        |daemon| {
            let (mut client, log) = open_marked(daemon)?;
            context(rustix::fs::ftruncate(log.fd(), 0), "cut")?;
            context(client.queue(0).read(0, &mut [0; 512]), "read")?;
            refused(client.frontend().vring_base(0))
        },
    ));
}
