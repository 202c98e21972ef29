//! Hostile drivers: faults in the rings themselves.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cleave_blk::spec::{feature, request_type as kind};
use cleave_client::{Buffer, Client, DeviceOptions, DriverRing, ReapWait, RingLayout, message};
use cleave_tests::{
    Outcome, Random, Row, ensure, exercise_queue, flood, header, policy, row, scale, small,
    time_limit, wait_until,
};

use crate::attack::{
    INDIRECT, NEXT, Parts, WRITE, check_both_vrings, check_other_vring,
    check_other_vring_or_closed, context, entry, expect_retired, open, open_with, polling, restart,
    settle,
};
use crate::rewriting::rewriting;

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    policy(&mut rows, "virtio 1.3 §2.7.6", heads);
    policy(&mut rows, "virtio 1.3 §2.7.6", indices);
    policy(&mut rows, "virtio 1.3 §2.7.13", twice);
    policy(&mut rows, "virtio 1.3 §2.7.8", notifications);
    policy(&mut rows, "virtio 1.3 §2.7", overlaps);
    policy(
        &mut rows,
        "vhost-user SET_VRING_KICK, SET_VRING_CALL",
        doorbells,
    );
    policy(&mut rows, "virtio 1.3 §2.7", rewriting);
    rows
}

fn heads(rows: &mut Vec<Row>) {
    for head in [64u16, 65, 127, 255, 0x7fff, 0x8000, 0xffff] {
        rows.push(row(
            format!("head {head} in a table of 64"),
            move |daemon| {
                let mut client = open(daemon)?;
                exercise_queue(&mut client, 0)?;
                client.queue(0).ring().push(head);
                publish(&mut client);
                expect_retired(&mut client)
            },
        ));
    }
    rows.push(row("a bad head after good ones in one batch", |daemon| {
        let mut client = open(daemon)?;
        let queue = client.queue(0);
        flood(queue, 4, 4096);
        queue.ring().push(64);
        publish(&mut client);
        expect_retired(&mut client)
    }));
    rows.push(row("kicks for a retired vring", |daemon| {
        let mut client = open(daemon)?;
        client.queue(0).ring().push(64);
        publish(&mut client);
        expect_retired(&mut client)?;
        for _ in 0..100 {
            client.queue(0).ring().push(0);
            publish(&mut client);
        }
        let used = client.queue(0).ring().used_index();
        check_other_vring(&mut client)?;
        ensure(used == 0, || "a retired vring was served".into())
    }));
    rows.push(row(
        "a retired vring is restarted by its driver",
        |daemon| {
            let mut client = open(daemon)?;
            client.queue(0).ring().push(64);
            publish(&mut client);
            expect_retired(&mut client)?;
            context(client.frontend().vring_base(0), "stop")?;
            let mut fresh = context(client.start_queue(0, &tiny()), "start again")?;
            context(fresh.read(0, &mut [0; 4096]), "read again")?;
            check_other_vring(&mut client)
        },
    ));
    rows.push(row("both vrings are retired and restarted", |daemon| {
        let mut client = open(daemon)?;
        for index in 0..2 {
            client.queue(index).ring().push(9999);
            client.queue(index).ring().publish();
            client.queue(index).ring_kick();
            let signalled = client.queue(index).err_signalled(time_limit());
            ensure(signalled, || format!("vring {index} was not retired"))?;
        }
        for index in 0..2u16 {
            context(client.frontend().vring_base(index.into()), "stop")?;
            let mut fresh = context(client.start_queue(index, &tiny()), "start again")?;
            context(fresh.read(0, &mut [0; 4096]), "read again")?;
        }
        Ok(())
    }));
}

fn tiny() -> DeviceOptions {
    DeviceOptions {
        queue_size: 16,
        data_bytes: 8192,
        ..small(1)
    }
}

/// Stores any number in a word of the rings, without the driver's knowledge.
fn store(ring: &DriverRing, addr: u64, word: u16) {
    ring.memory().write(addr, &word.to_le_bytes());
}

fn set_avail_index(ring: &DriverRing, index: u16) {
    store(ring, ring.layout().avail + 2, index);
}

fn set_used_event(ring: &DriverRing, event: u16) {
    let behind_avail = ring.layout().avail + 4 + 2 * u64::from(ring.size());
    store(ring, behind_avail, event);
}

fn publish(client: &mut Client) {
    client.queue(0).ring().publish();
    client.queue(0).ring_kick();
}

fn indices(rows: &mut Vec<Row>) {
    for ahead in [65u16, 66, 128, 1000, 0x7fff, 0x8000, 0xfffe, 0xffff] {
        rows.push(row(
            format!("available index {ahead} ahead in a ring of 64"),
            move |daemon| {
                let mut client = open(daemon)?;
                set_avail_index(client.queue(0).ring(), ahead);
                client.queue(0).ring_kick();
                expect_retired(&mut client)
            },
        ));
    }
    for back in [1u16, 2, 3] {
        rows.push(row(
            format!("available index {back} back after 3 requests"),
            move |daemon| {
                let mut client = open(daemon)?;
                for _ in 0..3 {
                    context(client.queue(0).read(0, &mut [0; 512]), "read")?;
                }
                let position = client.queue(0).ring().position();
                set_avail_index(client.queue(0).ring(), position - back);
                client.queue(0).ring_kick();
                expect_retired(&mut client)
            },
        ));
    }
    rows.push(
        row("an unchanged available index is not a fault", |daemon| {
            let mut client = open(daemon)?;
            context(client.queue(0).read(0, &mut [0; 512]), "read")?;
            for _ in 0..10 {
                client.queue(0).ring_kick();
            }
            check_both_vrings(&mut client)
        })
        .specified("virtio 1.3 §2.7.10.2"),
    );
    rows.push(
        row("a ring filled to its last entry", |daemon| {
            let mut client = open(daemon)?;
            let queue = client.queue(0);
            let parts = Parts::of(queue);
            let memory = queue.memory();
            memory.write(parts.header, &header(kind::FLUSH, 0));
            let table = [
                entry(parts.header, 16, NEXT, 1),
                entry(parts.status, 1, WRITE, 0),
            ];
            memory.write(
                parts.table,
                &[table[0].to_bytes(), table[1].to_bytes()].concat(),
            );
            for round in 0..3 {
                for index in 0..64 {
                    let head = entry(parts.table, 32, INDIRECT, 0);
                    queue.ring().write_descriptor(index, head);
                    queue.ring().push(index);
                }
                queue.ring().publish();
                queue.ring_kick();
                let seen = settle(queue.ring(), 64);
                ensure(seen == 64, || {
                    format!("round {round}: {seen} of 64 came back")
                })?;
            }
            queue.ring().free_all();
            check_both_vrings(&mut client)
        })
        .specified("virtio 1.3 §2.7.13"),
    );
}

/// Adds rows in which a head comes again while it may be in flight. A daemon that has completed the first before it sees the
/// second may serve both.
fn twice(rows: &mut Vec<Row>) {
    for times in [2u16, 3, 64] {
        rows.push(row(
            format!("the same head {times} times in one batch"),
            move |daemon| {
                let mut client = open(daemon)?;
                let queue = client.queue(0);
                let parts = Parts::of(queue);
                queue.write_header(kind::IN, 0);
                for (index, entry) in (0..).zip(parts.usual()) {
                    queue.ring().write_descriptor(index, entry);
                }
                (0..times).for_each(|_| queue.ring().push(0));
                queue.ring().publish();
                queue.ring_kick();
                let mut seen = 0;
                let is_over = wait_until(|| {
                    seen += std::iter::from_fn(|| client.queue(0).ring().reap()).count();
                    seen >= usize::from(times) || client.queue(0).err_signalled(Duration::ZERO)
                });
                ensure(is_over, || {
                    format!("neither retired nor served: {seen} of {times}")
                })?;
                check_other_vring(&mut client)
            },
        ));
    }
    rows.push(row(
        "the same head again and again, new vring each time",
        |daemon| {
            let mut client = open(daemon)?;
            for _ in 0..scale(300) {
                let queue = client.queue(0);
                let parts = Parts::of(queue);
                queue.write_header(kind::IN, 0);
                let mut chain = parts.usual();
                chain[1].len = 64 << 10;
                for (index, entry) in (0..).zip(chain) {
                    queue.ring().write_descriptor(index, entry);
                }
                for _ in 0..8 {
                    queue.ring().push(0);
                    queue.ring().publish();
                    queue.ring_kick();
                }
                context(client.frontend().vring_base(0), "stop")?;
                restart(&mut client)?;
            }
            check_both_vrings(&mut client)
        },
    ));
    rows.push(row("two heads whose chains share descriptors", |daemon| {
        let mut client = open(daemon)?;
        let queue = client.queue(0);
        let parts = Parts::of(queue);
        queue.write_header(kind::IN, 0);
        let [first, data, status] = parts.usual();
        for (index, entry) in [(0, first), (1, data), (2, status), (3, first)] {
            queue.ring().write_descriptor(index, entry);
        }
        queue.ring().push(0);
        queue.ring().push(3);
        queue.ring().publish();
        queue.ring_kick();
        let seen = settle(queue.ring(), 2);
        ensure(seen == 2, || format!("{seen} of 2 came back"))?;
        queue.ring().free_all();
        check_both_vrings(&mut client)
    }));
}

fn notifications(rows: &mut Vec<Row>) {
    for event in [0u16, 1, 63, 0x7fff, 0x8000, 0xffff] {
        rows.push(row(
            format!("used event {event} and available event {event} by the guest"),
            move |daemon| {
                let mut client = open_with(daemon, &polling())?;
                for _ in 0..20 {
                    let ring = client.queue(0).ring();
                    set_used_event(ring, event);
                    let behind_used = ring.layout().used + 4 + 8 * u64::from(ring.size());
                    store(ring, behind_used, event);
                    flood(client.queue(0), 2, 512);
                    set_used_event(client.queue(0).ring(), event);
                    let seen = settle(client.queue(0).ring(), 2);
                    ensure(seen == 2, || format!("{seen} of 2 came back"))?;
                }
                check_other_vring(&mut client)
            },
        ));
    }
    for flags in [1u16, 2, 0xfffe, 0xffff] {
        for event_idx in [true, false] {
            let name = format!("available flags {flags:#x}, event index {event_idx}");
            let made = row(name, move |daemon| {
                let features = if event_idx { !0 } else { !feature::EVENT_IDX };
                let mut client = open_with(
                    daemon,
                    &DeviceOptions {
                        features,
                        ..polling()
                    },
                )?;
                for _ in 0..20 {
                    let ring = client.queue(0).ring();
                    store(ring, ring.layout().avail, flags);
                    flood(client.queue(0), 2, 512);
                    let seen = settle(client.queue(0).ring(), 2);
                    ensure(seen == 2, || format!("{seen} of 2 came back"))?;
                }
                check_other_vring(&mut client)
            });
            rows.push(match (flags, event_idx) {
                // "Notifications are not needed" is the one value that a driver may store.
                (1, false) => made.specified("virtio 1.3 §2.7.7"),
                _ => made.policy("virtio 1.3 §2.7.7.1"),
            });
        }
    }
    for index in [0u16, 5, 0x8000, 0xffff] {
        rows.push(row(
            format!("the guest stores used index {index}"),
            move |daemon| {
                let mut client = open_with(daemon, &polling())?;
                context(client.queue(0).read(0, &mut [0; 512]), "read")?;
                let ring = client.queue(0).ring();
                store(ring, ring.layout().used + 2, index);
                flood(client.queue(0), 1, 512);
                // The daemon keeps its own count: two requests, index 2.
                let counts = wait_until(|| client.queue(0).ring().used_index() == 2);
                ensure(counts, || "the used index is not the daemon's own".into())?;
                check_other_vring(&mut client)
            },
        ));
    }
    rows.push(
        row("1000 kicks without a request", |daemon| {
            let mut client = open(daemon)?;
            (0..1000).for_each(|_| client.queue(0).ring_kick());
            ensure(client.queue(0).ring().used_index() == 0, || {
                "a completion without a request".into()
            })?;
            check_both_vrings(&mut client)
        })
        .specified("virtio 1.3 §2.7.10.2"),
    );
    rows.push(
        row("a storm of kicks, then an idle vring", |daemon| {
            let mut client = open(daemon)?;
            let end = std::time::Instant::now() + Duration::from_millis(300);
            while std::time::Instant::now() < end {
                client.queue(0).ring_kick();
            }
            check_other_vring(&mut client)?;
            daemon.stays_at_rest()?;
            check_both_vrings(&mut client)
        })
        .specified("virtio 1.3 §2.7.10.2"),
    );
    for features in [!0, !feature::EVENT_IDX] {
        let name =
            format!("a driver that toggles notifications under load, features {features:#x}");
        rows.push(row(name, move |daemon| {
            toggle_notifications(&mut open_with(
                daemon,
                &DeviceOptions {
                    features,
                    ..polling()
                },
            )?)
        }));
    }
}

/// Another thread changes events and flags continuously while requests run.
fn toggle_notifications(client: &mut Client) -> Outcome {
    let layout = client.queue(0).ring().layout();
    let memory = client.memory().clone();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random::new(11);
            while !stop.load(Ordering::Relaxed) {
                memory.write(layout.avail, &random.draw().to_le_bytes()[..2]);
                let event = layout.avail + 4 + 2 * u64::from(layout.size);
                memory.write(event, &random.draw().to_le_bytes()[..2]);
                let event = layout.used + 4 + 8 * u64::from(layout.size);
                memory.write(event, &random.draw().to_le_bytes()[..2]);
            }
        });
        let mut done = Ok(());
        for _ in 0..scale(500) {
            flood(client.queue(0), 4, 512);
            let seen = settle(client.queue(0).ring(), 4);
            done = ensure(seen == 4, || format!("{seen} of 4 came back"));
            if done.is_err() {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        done
    })?;
    check_other_vring(client)
}

fn overlaps(rows: &mut Vec<Row>) {
    type Place = fn(RingLayout) -> u64;
    let places: [(&str, Place); 4] = [
        ("the descriptor table", |layout| layout.desc),
        ("the available ring", |layout| layout.avail),
        ("the used ring", |layout| layout.used),
        ("the used index", |layout| layout.used + 2),
    ];
    for (name, place) in places {
        for (what, bytes) in [("data", 512u32), ("a status byte", 0)] {
            rows.push(row(format!("{what} read into {name}"), move |daemon| {
                let mut client = open(daemon)?;
                let queue = client.queue(0);
                let at = place(queue.ring().layout());
                let (head, status) = queue.control();
                queue.write_header(kind::IN, 0);
                let chain = if bytes > 0 {
                    vec![
                        Buffer::readable(head, 16),
                        Buffer::writable(at, bytes),
                        Buffer::writable(status, 1),
                    ]
                } else {
                    vec![Buffer::readable(head, 16), Buffer::writable(at, 1)]
                };
                queue.ring().add(&chain);
                queue.ring().publish();
                queue.ring_kick();
                std::thread::sleep(Duration::from_millis(10));
                check_other_vring(&mut client)
            }));
        }
    }
    rows.push(row("two vrings in the same memory", |daemon| {
        let mut client = open_with(daemon, &small(3))?;
        let layout = client.queue(0).ring().layout();
        context(client.frontend().vring_base(2), "stop")?;
        let addr = |client: &Client, addr| client.memory().user_addr(addr).unwrap_or(0);
        let place = message::VringAddr {
            index: 2,
            flags: 0,
            desc: addr(&client, layout.desc),
            used: addr(&client, layout.used),
            avail: addr(&client, layout.avail),
            log: 0,
        };
        let _ = client.frontend().set_vring_addr(place);
        let _ = client.frontend().set_vring_enable(2, true);
        for _ in 0..20 {
            flood(client.queue(0), 2, 4096);
            client.queue(2).ring_kick();
        }
        std::thread::sleep(Duration::from_millis(20));
        check_other_vring(&mut client)
    }));
    rows.push(row("all three parts of a vring at one address", |daemon| {
        let mut client = open(daemon)?;
        context(client.frontend().vring_base(0), "stop")?;
        let at = client.queue(0).ring().layout().desc;
        let user = client.memory().user_addr(at).unwrap_or(0);
        let place = message::VringAddr {
            index: 0,
            flags: 0,
            desc: user,
            used: user,
            avail: user,
            log: 0,
        };
        let _ = client.frontend().set_vring_addr(place);
        let kick = client.queue(0).kick_descriptor();
        if let Some(kick) = kick {
            let _ = client.frontend().set_vring_kick(0, Some(kick.as_fd()));
        }
        client.memory().fill(at, 4096, 1);
        client.queue(0).ring_kick();
        std::thread::sleep(Duration::from_millis(10));
        client.memory().fill(at, 4096, 0xff);
        client.queue(0).ring_kick();
        std::thread::sleep(Duration::from_millis(10));
        check_other_vring(&mut client)
    }));
}

/// A call or kick descriptor of the wrong type: refused or harmless.
fn doorbells(rows: &mut Vec<Row>) {
    for (name, make) in crate::descriptors::strange_descriptors() {
        for part in ["kick", "call", "err"] {
            rows.push(row(format!("{name} as {part} descriptor"), move |daemon| {
                let mut client = open(daemon)?;
                exercise_queue(&mut client, 0)?;
                let fd: OwnedFd = make()?;
                let frontend = client.frontend();
                let _ = match part {
                    "kick" => frontend.set_vring_kick(0, Some(fd.as_fd())),
                    "call" => frontend.set_vring_call(0, Some(fd.as_fd())),
                    _ => frontend.set_vring_err(0, Some(fd.as_fd())),
                };
                drop(fd);
                for _ in 0..3 {
                    flood(client.queue(0), 2, 512);
                }
                if part == "err" {
                    client.queue(0).ring().push(9999);
                    publish(&mut client);
                }
                std::thread::sleep(Duration::from_millis(10));
                // If the message was refused, the connection may be closed too.
                check_other_vring_or_closed(&mut client)
            }));
        }
    }
    for (name, part) in [("call", true), ("err", false)] {
        rows.push(row(
            format!("a {name} counter that is full and blocks"),
            move |daemon| {
                let options = DeviceOptions {
                    call: cleave_client::Notifier::Blocking,
                    wait: ReapWait::Poll,
                    ..small(2)
                };
                let mut client = open_with(daemon, &options)?;
                let full = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
                rustix::io::write(&full, &0xffff_ffff_ffff_fffe_u64.to_ne_bytes()).unwrap();
                let frontend = client.frontend();
                if part {
                    context(frontend.set_vring_call(0, Some(full.as_fd())), "set call")?;
                } else {
                    context(frontend.set_vring_err(0, Some(full.as_fd())), "set err")?;
                    client.queue(0).ring().push(9999);
                }
                for _ in 0..3 {
                    flood(client.queue(0), 2, 512);
                }
                std::thread::sleep(Duration::from_millis(20));
                context(client.frontend().features(), "ask for features")?;
                check_other_vring(&mut client)
            },
        ));
    }
}
