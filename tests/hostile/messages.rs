//! Hostile frontends: bad headers, payloads, indices and descriptors.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cleave_client::message::{self, FLAG_NEED_REPLY, FLAG_REPLY, VERSION, request as number};
use cleave_client::{Client, Error, Socket};
use cleave_tests::{
    Daemon, Messages as _, Outcome, Row, Stopwatch, TIMEOUT, closes_within, ensure, exercise,
    flood, policy, row, scale, small, time_limit,
};

use crate::attack::{check_both_vrings, check_other_vring, context, frontend, open};
use crate::config::refused;

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    policy(&mut rows, "vhost-user \"Header\"", headers);
    policy(
        &mut rows,
        "vhost-user \"Front-end message types\"",
        every_number,
    );
    policy(&mut rows, "vhost-user \"Multiple queue support\"", indices);
    policy(&mut rows, "virtio 1.3 §2.7", vring_sizes);
    policy(&mut rows, "virtio 1.3 §2.7", vring_addresses);
    policy(&mut rows, "vhost-user \"Ring states\"", order);
    policy(&mut rows, "vhost-user \"Communication\"", slowness);
    policy(&mut rows, "vhost-user \"Communication\"", repetition);
    rows
}

/// After hostile bytes a daemon may reply, close the connection, or wait for more. It must not spin.
fn not_spinning(daemon: &Daemon) -> Outcome {
    daemon.does_not_spin()
}

fn send(daemon: &Daemon, bytes: &[u8]) -> Outcome {
    let frontend = context(frontend(daemon), "connect")?;
    // The daemon may close the connection while we still send.
    let _ = frontend.socket().send_raw(bytes, &[]);
    not_spinning(daemon)
}

/// Less than the daemon's time limit for an incomplete message.
pub(crate) fn closes_soon(socket: &Socket) -> Outcome {
    let watch = Stopwatch::start();
    let closed = closes_within(socket, time_limit());
    let took = watch.elapsed();
    ensure(closed && took < Duration::from_secs(2), || {
        format!("still open after {took:?}")
    })
}

fn headers(rows: &mut Vec<Row>) {
    for flags in [
        0u32,
        2,
        3,
        VERSION | FLAG_REPLY,
        0xffff_ffff,
        0xffff_fff9,
        1 << 31,
    ] {
        rows.push(row(format!("header flags {flags:#x}"), move |daemon| {
            send(daemon, &message::message(number::GET_FEATURES, flags, &[]))
        }));
    }
    for size in [0u32, 7, 9, 4096, 65536, 0x7fff_ffff, 0xffff_ffff] {
        rows.push(row(
            format!("SET_FEATURES that says {size:#x} bytes and carries 8"),
            move |daemon| {
                let mut bytes = message::header(number::SET_FEATURES, VERSION, size).to_vec();
                bytes.extend_from_slice(&[0; 8]);
                let before = daemon.rss_kib();
                let frontend = context(frontend(daemon), "connect")?;
                let _ = frontend.socket().send_raw(&bytes, &[]);
                not_spinning(daemon)?;
                daemon
                    .stays_small(before, 1023)
                    .map_err(|what| format!("{what}: the daemon waits for the announced bytes"))
            },
        ));
    }
    rows.push(row("64 KiB of zeroes", |daemon| send(daemon, &[0; 65536])));
    rows.push(row("64 KiB of 0xff", |daemon| send(daemon, &[0xff; 65536])));
    rows.push(row("64 KiB of noise", |daemon| {
        send(daemon, &cleave_tests::Random::new(8).bytes(65536))
    }));
    rows.push(row("noise after a valid message", |daemon| {
        let mut bytes = message::message(number::GET_FEATURES, VERSION, &[]);
        bytes.extend(cleave_tests::Random::new(9).bytes(4096));
        send(daemon, &bytes)
    }));
    rows.push(row("an HTTP request", |daemon| {
        send(daemon, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    }));
}

/// All existing messages and some unknown ones, with payloads of the wrong length.
fn every_number(rows: &mut Vec<Row>) {
    let numbers = (0..=45).chain([
        64,
        100,
        255,
        256,
        1000,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
    ]);
    for request in numbers {
        rows.push(row(
            format!("message {request} with payloads of all lengths"),
            move |daemon| {
                for len in [0usize, 1, 4, 7, 8, 9, 12, 16, 24, 31, 40, 41, 256, 4000] {
                    for byte in [0u8, 0xff] {
                        let mut client = context(frontend(daemon), "connect")?;
                        client.set_reply_ack(true);
                        let flags = VERSION | FLAG_NEED_REPLY;
                        let bytes = message::message(request, flags, &vec![byte; len]);
                        let _ = client.socket().send_raw(&bytes, &[]);
                        // The daemon replies to the next message, or closes the connection.
                        let ask = message::message(number::GET_FEATURES, VERSION, &[]);
                        let _ = client.socket().send_raw(&ask, &[]);
                        let _ = client.socket().stream().shutdown(std::net::Shutdown::Write);
                        closes_soon(client.socket())
                            .map_err(|what| format!("{len} bytes of {byte:#x}: {what}"))?;
                    }
                }
                Ok(())
            },
        ));
    }
}

/// The eight messages that carry a vring index, with indices that do not exist.
fn indices(rows: &mut Vec<Row>) {
    type Say = fn(&mut Client, u32) -> Result<(), Error>;
    let messages: [(&str, Say); 8] = [
        ("SET_VRING_NUM", |client, index| {
            client.frontend().set_vring_num(index, 64)
        }),
        ("SET_VRING_ADDR", |client, index| {
            let layout = client.queue(1).ring().layout();
            let user = |addr| client.memory().user_addr(addr).unwrap_or(0);
            let (desc, avail, used) = (user(layout.desc), user(layout.avail), user(layout.used));
            let place = message::VringAddr {
                index,
                flags: 0,
                desc,
                used,
                avail,
                log: 0,
            };
            client.frontend().set_vring_addr(place)
        }),
        ("SET_VRING_BASE", |client, index| {
            client.frontend().set_vring_base(index, 0)
        }),
        ("GET_VRING_BASE", |client, index| {
            client.frontend().vring_base(index).map(drop)
        }),
        ("SET_VRING_KICK", |client, index| {
            vring_fd(client, number::SET_VRING_KICK, index)
        }),
        ("SET_VRING_CALL", |client, index| {
            vring_fd(client, number::SET_VRING_CALL, index)
        }),
        ("SET_VRING_ERR", |client, index| {
            vring_fd(client, number::SET_VRING_ERR, index)
        }),
        ("SET_VRING_ENABLE", |client, index| {
            client.frontend().set_vring_enable(index, true)
        }),
    ];
    for (name, say) in messages {
        for index in [
            64u32,
            65,
            255,
            256,
            257,
            32768,
            65536,
            65537,
            0x8000_0000,
            0xffff_ffff,
        ] {
            // In messages with descriptors, the low 8 bits are the index and bit 8 means "no descriptor".
            let masked = matches!(name, "SET_VRING_KICK" | "SET_VRING_CALL" | "SET_VRING_ERR");
            if masked && (index & 0xff) < 64 {
                continue;
            }
            rows.push(row(format!("{name} of vring {index}"), move |daemon| {
                let mut client = open(daemon)?;
                refused(say(&mut client, index))
            }));
        }
    }
    rows.push(row(
        "SET_VRING_KICK with unknown bits above the index",
        |daemon| {
            let mut client = open(daemon)?;
            let payload = (1u64 << 32 | 1).to_le_bytes();
            let event = client.queue(0).kick_descriptor().ok_or("no kick")?;
            let _ = client
                .frontend()
                .send(number::SET_VRING_KICK, &payload, &[event.as_fd()]);
            Ok(())
        },
    ));
}

fn vring_fd(client: &mut Client, request: u32, index: u32) -> Result<(), Error> {
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let payload = u64::from(index & 0xff) | u64::from(index) & !0x1ff;
    client
        .frontend()
        .send(request, &payload.to_le_bytes(), &[event.as_fd()])
}

fn vring_sizes(rows: &mut Vec<Row>) {
    for size in [
        0u32,
        3,
        5,
        63,
        65,
        1000,
        1023,
        1025,
        2048,
        32768,
        65535,
        65536,
        65544,
        0xffff_ffff,
    ] {
        rows.push(row(format!("a vring of {size} entries"), move |daemon| {
            let mut client = open(daemon)?;
            context(client.frontend().vring_base(0), "stop")?;
            refused(client.frontend().set_vring_num(0, size))
        }));
    }
    for size in [1u32, 2] {
        rows.push(row(
            format!("a vring of {size} entries is served or refused"),
            move |daemon| {
                let mut client = open(daemon)?;
                context(client.frontend().vring_base(0), "stop")?;
                match client.frontend().set_vring_num(0, size) {
                    Ok(()) | Err(Error::Refused { .. }) => check_other_vring(&mut client),
                    Err(Error::Closed) => Ok(()),
                    Err(other) => Err(other.to_string()),
                }
            },
        ));
    }
    rows.push(row("another size for a running vring", |daemon| {
        let mut client = open(daemon)?;
        for size in [32u32, 128, 1024] {
            match client.frontend().set_vring_num(0, size) {
                Err(Error::Closed) => return Ok(()),
                Err(Error::Refused { .. }) => check_both_vrings(&mut client)?,
                Ok(()) => return Err(format!("{size} entries were accepted while the vring runs")),
                Err(other) => return Err(other.to_string()),
            }
        }
        Ok(())
    }));
    for base in [65535u32, 65534] {
        rows.push(
            row(format!("a vring from position {base}"), move |daemon| {
                let options = cleave_client::DeviceOptions {
                    base: base as u16,
                    ..small(2)
                };
                let mut client = context(daemon.try_open(&options), "open")?;
                (0..5).try_for_each(|_| check_both_vrings(&mut client))
            })
            .specified("vhost-user SET_VRING_BASE"),
        );
    }
    for base in [65536u32, 0x1_0005, 0x8000_0000, 0xffff_ffff] {
        let made = row(format!("a vring from position {base:#x}"), move |daemon| {
            let mut client = open(daemon)?;
            context(client.frontend().vring_base(0), "stop")?;
            refused(client.frontend().set_vring_base(0, base))
        });
        rows.push(made.policy("vhost-user SET_VRING_BASE"));
    }
}

fn vring_addresses(rows: &mut Vec<Row>) {
    type Change = fn(&mut message::VringAddr, u64);
    let changes: [(&str, Change); 17] = [
        ("a descriptor table 1 byte off", |place, _| place.desc += 1),
        ("a descriptor table 8 bytes off", |place, _| place.desc += 8),
        ("an available ring 1 byte off", |place, _| place.avail += 1),
        ("a used ring 1 byte off", |place, _| place.used += 1),
        ("a used ring 2 bytes off", |place, _| place.used += 2),
        ("a descriptor table at 0", |place, _| place.desc = 0),
        ("an available ring at 0", |place, _| place.avail = 0),
        ("a used ring at 0", |place, _| place.used = 0),
        ("a descriptor table at 2^64 - 16", |place, _| {
            place.desc = 0u64.wrapping_sub(16)
        }),
        ("an available ring at 2^64 - 2", |place, _| {
            place.avail = u64::MAX - 1
        }),
        ("a used ring at 2^64 - 4", |place, _| {
            place.used = u64::MAX - 3
        }),
        (
            "a descriptor table across the end of memory",
            |place, end| place.desc = end - 512,
        ),
        (
            "an available ring across the end of memory",
            |place, end| place.avail = end - 64,
        ),
        ("a used ring across the end of memory", |place, end| {
            place.used = end - 256
        }),
        (
            "a used ring whose event index is beyond the end",
            |place, end| place.used = end - 4 - 512,
        ),
        ("everything at the end of memory", |place, end| {
            (place.desc, place.avail, place.used) = (end, end, end);
        }),
        ("guest addresses in place of the frontend's", |place, _| {
            (place.desc, place.avail, place.used) = (0x1_0000_0000, 0x1_0000_4000, 0x1_0000_8000);
        }),
    ];
    for (name, change) in changes {
        rows.push(row(name, move |daemon| {
            let mut client = open(daemon)?;
            context(client.frontend().vring_base(0), "stop")?;
            let layout = client.queue(0).ring().layout();
            let user = |addr| client.memory().user_addr(addr).unwrap_or(0);
            let (desc, avail, used) = (user(layout.desc), user(layout.avail), user(layout.used));
            let mut place = message::VringAddr {
                index: 0,
                flags: 0,
                desc,
                used,
                avail,
                log: 0,
            };
            let region = client.memory().region(0);
            change(&mut place, region.user_addr + region.len_bytes);
            let kick = client.queue(0).kick_descriptor().ok_or("no kick")?;
            // Refused at once or when the vring starts; never served.
            let frontend = client.frontend();
            let said = frontend
                .set_vring_addr(place)
                .and_then(|()| frontend.set_vring_kick(0, Some(kick.as_fd())))
                .and_then(|()| frontend.set_vring_enable(0, true));
            match said {
                Err(Error::Closed) => Ok(()),
                Err(Error::Refused { .. }) => check_other_vring(&mut client),
                Err(other) => Err(other.to_string()),
                Ok(()) => {
                    let retired = client.queue(0).err_signalled(time_limit());
                    ensure(retired, || "accepted and not retired".into())?;
                    check_other_vring(&mut client)
                }
            }
        }));
    }
    rows.push(row("vring addresses before any memory", |daemon| {
        let mut bare = context(frontend(daemon), "connect")?;
        bare.set_reply_ack(false);
        let _ = bare.set_owner();
        let _ = bare.set_features(1 << 32);
        let _ = bare.set_vring_num(0, 64);
        let place = message::VringAddr {
            index: 0,
            flags: 0,
            desc: 4096,
            used: 8192,
            avail: 12288,
            log: 0,
        };
        let _ = bare.set_vring_addr(place);
        let _ = bare.set_vring_kick(0, None);
        let _ = bare.features();
        Ok(())
    }));
    rows.push(row(
        "the same addresses again while the vring runs keep its position",
        |daemon| {
            let mut client = open(daemon)?;
            exercise(&mut client)?;
            let layout = client.queue(0).ring().layout();
            let user = |addr| client.memory().user_addr(addr).unwrap_or(0);
            let (desc, avail, used) = (user(layout.desc), user(layout.avail), user(layout.used));
            let place = message::VringAddr {
                index: 0,
                flags: 0,
                desc,
                used,
                avail,
                log: 0,
            };
            for _ in 0..10 {
                context(client.frontend().set_vring_addr(place), "set")?;
                check_both_vrings(&mut client)?;
            }
            Ok(())
        },
    ));
}

fn order(rows: &mut Vec<Row>) {
    rows.push(row("a vring enabled without any set-up", |daemon| {
        let mut client = open(daemon)?;
        let _ = client.frontend().set_vring_enable(9, true);
        if client.frontend().features().is_ok() {
            check_both_vrings(&mut client)?;
        }
        Ok(())
    }));
    rows.push(row("a vring started without addresses", |daemon| {
        let mut client = open(daemon)?;
        let kick = client.queue(0).kick_descriptor().ok_or("no kick")?;
        let _ = client.frontend().set_vring_kick(7, Some(kick.as_fd()));
        let _ = client.frontend().set_vring_enable(7, true);
        if client.frontend().features().is_ok() {
            check_both_vrings(&mut client)?;
        }
        Ok(())
    }));
    rows.push(row("the base of a vring that never ran", |daemon| {
        let mut client = open(daemon)?;
        match client.frontend().vring_base(5) {
            Ok(0) => check_both_vrings(&mut client),
            Ok(base) => Err(format!("position {base}")),
            Err(Error::Closed) => Ok(()),
            Err(other) => Err(other.to_string()),
        }
    }));
    rows.push(
        row("a vring stopped twice", |daemon| {
            let mut client = open(daemon)?;
            exercise(&mut client)?;
            let first = context(client.frontend().vring_base(0), "first")?;
            let second = context(client.frontend().vring_base(0), "second")?;
            ensure(first == second && first == 2, || {
                format!("positions {first}, {second}")
            })?;
            check_other_vring(&mut client)
        })
        .specified("vhost-user GET_VRING_BASE"),
    );
    rows.push(row(
        "enabled and disabled by other values than 0 and 1",
        |daemon| {
            let mut client = open(daemon)?;
            for value in [2u32, 0xff, 0xffff_ffff] {
                let payload = message::vring_state(0, value);
                let _ = client
                    .frontend()
                    .send(number::SET_VRING_ENABLE, &payload, &[]);
            }
            if client.frontend().features().is_err() {
                return Ok(());
            }
            context(client.frontend().set_vring_enable(0, true), "enable")?;
            check_both_vrings(&mut client)
        },
    ));
    // A disabled ring is processed "without causing any side effects"; what that means for a disk is open.
    rows.push(row(
        "a disabled vring is not served, and is when enabled",
        |daemon| {
            let mut client = open(daemon)?;
            context(client.frontend().set_vring_enable(0, false), "disable")?;
            flood(client.queue(0), 1, 512);
            std::thread::sleep(Duration::from_millis(30));
            ensure(client.queue(0).ring().used_index() == 0, || {
                "served while disabled".into()
            })?;
            context(client.frontend().set_vring_enable(0, true), "enable")?;
            let seen = crate::attack::settle(client.queue(0).ring(), 1);
            ensure(seen == 1, || "not served when enabled".into())?;
            check_both_vrings(&mut client)
        },
    ));
}

fn slowness(rows: &mut Vec<Row>) {
    rows.push(
        row("a header that arrives byte by byte", |daemon| {
            let slow = context(frontend(daemon), "connect")?;
            for byte in message::message(number::GET_FEATURES, VERSION, &[]) {
                context(slow.socket().send_raw(&[byte], &[]), "send")?;
                std::thread::sleep(Duration::from_millis(5));
            }
            context(slow.socket().recv(), "answer").map(drop)
        })
        .specified("vhost-user \"Communication\""),
    );
    for half in [1usize, 4, 11, 12, 15] {
        rows.push(row(
            format!("{half} bytes of a message, then a disconnect"),
            move |daemon| {
                let slow = context(frontend(daemon), "connect")?;
                let bytes = message::message(number::SET_FEATURES, VERSION, &[0; 8]);
                context(slow.socket().send_raw(&bytes[..half], &[]), "send")?;
                let _ = slow.socket().stream().shutdown(std::net::Shutdown::Write);
                closes_soon(slow.socket())
            },
        ));
    }
    rows.push(row(
        "half a message, then nothing: closed in time, the next frontend is served",
        |daemon| {
            let slow = context(frontend(daemon), "connect")?;
            let bytes = message::message(number::SET_FEATURES, VERSION, &[0; 8]);
            context(slow.socket().send_raw(&bytes[..15], &[]), "send")?;
            let closed = closes_within(slow.socket(), TIMEOUT);
            ensure(closed, || "half a message keeps the connection open".into())
        },
    ));
    rows.push(row("300 silent connections", |daemon| {
        let before = daemon.fds_at_rest();
        let silent: Vec<_> = (0..300)
            .filter_map(|_| Socket::connect(daemon.socket(), time_limit()).ok())
            .collect();
        let mut client = open(daemon)?;
        check_both_vrings(&mut client)?;
        drop((silent, client));
        daemon.fds_settle_at(before)
    }));
    rows.push(row(
        "connections that open and close without a message",
        |daemon| {
            let before = daemon.fds_at_rest();
            for _ in 0..scale(500) {
                drop(UnixStream::connect(daemon.socket()));
            }
            daemon.fds_settle_at(before)
        },
    ));
    rows.push(row("a frontend that never reads its replies", |daemon| {
        let deaf = context(frontend(daemon), "connect")?;
        let ask = message::message(number::GET_FEATURES, VERSION, &[]).repeat(1000);
        let stream = deaf.socket().stream();
        let _ = stream.set_write_timeout(Some(Duration::from_millis(500)));
        let mut full = false;
        for _ in 0..1000 {
            if deaf.socket().send_raw(&ask, &[]).is_err() {
                full = true;
                break;
            }
        }
        ensure(full, || "the daemon never stopped reading".into())?;
        not_spinning(daemon)
    }));
}

fn repetition(rows: &mut Vec<Row>) {
    type Say = fn(&mut Client) -> Result<(), Error>;
    let messages: [(&str, usize, Say); 9] = [
        ("SET_MEM_TABLE", 300, |client| client.send_memory()),
        ("SET_VRING_CALL", 1000, |client| {
            let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            client.frontend().set_vring_call(0, Some(event.as_fd()))
        }),
        ("SET_VRING_ERR", 1000, |client| {
            let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            client.frontend().set_vring_err(0, Some(event.as_fd()))
        }),
        ("SET_VRING_KICK", 1000, |client| {
            let kick = client.queue(0).kick_descriptor().unwrap();
            client.frontend().set_vring_kick(0, Some(kick.as_fd()))
        }),
        ("SET_BACKEND_REQ_FD", 500, |client| {
            client.frontend().open_backend_channel().map(drop)
        }),
        ("GET_CONFIG", 2000, |client| {
            client.frontend().config(0, 60).map(drop)
        }),
        ("SET_VRING_ENABLE", 1000, |client| {
            client.frontend().set_vring_enable(0, false)?;
            client.frontend().set_vring_enable(0, true)
        }),
        ("GET_INFLIGHT_FD", 300, |client| {
            // A message for a feature that is not offered: refused, without a leaked descriptor.
            match client.frontend().inflight_fd(2, 64) {
                Err(Error::Closed) => Err(Error::Closed),
                _ => Ok(()),
            }
        }),
        ("the start and stop of a vring", 200, |client| {
            let base = client.frontend().vring_base(1)?;
            client.resume_queue(1, base as u16)
        }),
    ];
    for (name, rounds, say) in messages {
        rows.push(row(format!("{name} {rounds} times"), move |daemon| {
            let mut client = open(daemon)?;
            exercise(&mut client)?;
            let (fds, rss) = (daemon.fds(), daemon.rss_kib());
            for _ in 0..scale(rounds) {
                match say(&mut client) {
                    Err(Error::Closed) => return Ok(()),
                    other => other.map_err(|error| error.to_string())?,
                }
            }
            // The backend channel may add one descriptor.
            daemon.fds_settle_at(fds + 1)?;
            daemon.settles_small(rss, 511)?;
            check_other_vring(&mut client)
        }));
    }
}
