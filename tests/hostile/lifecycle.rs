//! Stops, resets and disconnects under load.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_blk::spec::request_type as kind;
use cleave_client::message::protocol;
use cleave_client::{Buffer, Client, DeviceOptions, Error, Stop, Workload, all_are};
use cleave_tests::{
    Daemon, Lateness, Messages as _, Outcome, Row, ensure, exercise, exercise_queue, flood, policy,
    row, scale, small, specified, unless_late,
};

use crate::attack::{check_both_vrings, check_other_vring, context, open, open_with, settle};

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    specified(&mut rows, "vhost-user GET_VRING_BASE", stops);
    specified(&mut rows, "vhost-user RESET_DEVICE, SET_STATUS", resets);
    policy(&mut rows, "vhost-user \"Communication\"", ends);
    rows.into_iter()
        .map(|row| match row.name.split_whitespace().next() {
            Some("RESET_DEVICE," | "RESET_DEVICE") => row.with_protocol(protocol::RESET_DEVICE),
            Some("SET_STATUS" | "device") => row.with_protocol(protocol::STATUS),
            _ => row,
        })
        .collect()
}

/// Rows that need a core at once: what else the machine does would fail them.
pub(crate) fn prompt_rows() -> Vec<Row> {
    let mut rows = Vec::new();
    policy(&mut rows, "vhost-user \"Communication\"", soon);
    rows
}

fn stops(rows: &mut Vec<Row>) {
    for (name, bytes, count) in [
        ("small", 512u32, 20u64),
        ("large", 1 << 20, 16),
        ("mixed", 12 << 10, 21),
    ] {
        rows.push(row(
            format!("a vring stopped with {name} reads in flight"),
            move |daemon| {
                let options = DeviceOptions {
                    data_bytes: 32 << 20,
                    ..small(2)
                };
                let mut client = open_with(daemon, &options)?;
                for round in 0..scale(20) {
                    flood(client.queue(0), count, bytes);
                    let stopped = stop_and_judge(&mut client);
                    let base = stopped.map_err(|what| format!("round {round}: {what}"))?;
                    check_other_vring(&mut client)?;
                    context(client.resume_queue(0, base), "start again")?;
                    let left = client.queue(0).ring().in_flight();
                    let seen = settle(client.queue(0).ring(), left.into());
                    ensure(seen == usize::from(left), || {
                        format!("round {round}: {seen} of {left}")
                    })?;
                }
                check_both_vrings(&mut client)
            },
        ));
    }
    let toggled = row(
        "a vring disabled and enabled under load loses nothing",
        |daemon| {
            let mut client = open(daemon)?;
            for round in 0..scale(100) {
                flood(client.queue(0), 8, 16 << 10);
                context(client.frontend().set_vring_enable(0, false), "disable")?;
                context(client.frontend().set_vring_enable(0, true), "enable")?;
                let seen = settle(client.queue(0).ring(), 8);
                ensure(seen == 8, || format!("round {round}: {seen} of 8"))?;
            }
            check_both_vrings(&mut client)
        },
    );
    rows.push(toggled.specified("vhost-user \"Ring states\""));
    rows.push(row(
        "all vrings stopped, then all restarted at their positions",
        |daemon| {
            let mut client = open_with(daemon, &small(4))?;
            for _ in 0..scale(20) {
                exercise(&mut client)?;
                for index in 0..4usize {
                    let wanted = client.queue(index).ring().reaped();
                    let base = context(client.frontend().vring_base(index as u32), "stop")?;
                    ensure(base == u32::from(wanted), || {
                        format!("position {base}, not {wanted}")
                    })?;
                }
                for index in 0..4 {
                    let base = client.queue(index).ring().reaped();
                    context(client.resume_queue(index, base), "start")?;
                }
            }
            exercise(&mut client)
        },
    ));
    rows.push(row("messages while another vring is busy", |daemon| {
        let mut client = open(daemon)?;
        let (frontend, queues) = client.parts();
        let [first, second] = queues else {
            return Err("two vrings".into());
        };
        std::thread::scope(|scope| {
            let load = scope.spawn(|| {
                let time = Duration::from_millis(400);
                second.run(&Workload::reads(4096, 16, 32 << 20, time), |_| ())
            });
            while !load.is_finished() {
                context(frontend.config(0, 60), "config")?;
                context(frontend.set_vring_enable(0, false), "disable")?;
                context(frontend.set_vring_enable(0, true), "enable")?;
                flood(first, 2, 512);
                let seen = settle(first.ring(), 2);
                ensure(seen == 2, || format!("{seen} of 2"))?;
            }
            let done = load.join().unwrap();
            let done = context(done, "load")?;
            ensure(done.failed == 0 && done.reads > 0, || format!("{done:?}"))
        })
    }));
}

/// After GET_VRING_BASE: the position is exact, every request that was taken has completed, and nothing is written
/// any more.
fn stop_and_judge(client: &mut Client) -> Result<u16, String> {
    let base = context(client.frontend().vring_base(0), "stop")? as u16;
    let used = client.queue(0).ring().used_index();
    ensure(used == base, || {
        format!("position {base}, but {used} completed")
    })?;
    let (area, len) = client.queue(0).data_area();
    let memory = Arc::clone(client.memory());
    let len = len.min(32 << 20) as usize;
    memory.fill(area, len, 0x77);
    std::thread::sleep(Duration::from_millis(5));
    let bytes = memory.bytes(area, len);
    ensure(all_are(&bytes, 0x77), || "written after the reply".into())?;
    Ok(base)
}

fn resets(rows: &mut Vec<Row>) {
    type Say = fn(&mut Client) -> Result<(), Error>;
    let messages: [(&str, Say); 3] = [
        ("RESET_DEVICE", |client| client.frontend().reset_device()),
        ("SET_STATUS 0", |client| client.frontend().set_status(0)),
        ("RESET_OWNER", |client| client.frontend().reset_owner()),
    ];
    for (name, say) in messages {
        let made = row(format!("{name} with requests in flight"), move |daemon| {
            for _ in 0..scale(10) {
                let mut client = open(daemon)?;
                flood(client.queue(0), 20, 64 << 10);
                match say(&mut client) {
                    Err(Error::Refused { .. } | Error::Closed) if name == "RESET_OWNER" => {
                        continue;
                    }
                    other => context(other, "say")?,
                }
                if name == "RESET_OWNER" {
                    continue;
                }
                let (area, _) = client.queue(0).data_area();
                let memory = Arc::clone(client.memory());
                memory.fill(area, 2 << 20, 0x77);
                std::thread::sleep(Duration::from_millis(5));
                let bytes = memory.bytes(area, 2 << 20);
                let rests = all_are(&bytes, 0x77);
                ensure(rests, || "written after the reply".into())?;
            }
            Ok(())
        });
        rows.push(match name {
            // Deprecated: a back-end may ignore it.
            "RESET_OWNER" => made.policy("vhost-user RESET_OWNER"),
            _ => made,
        });
    }
    rows.push(row("RESET_DEVICE, then vrings from position 0", |daemon| {
        let mut client = open(daemon)?;
        for _ in 0..5 {
            exercise(&mut client)?;
            let features = client.features();
            context(client.frontend().reset_device(), "reset")?;
            context(client.frontend().set_features(features), "features")?;
            for index in 0..2 {
                let mut queue = context(client.start_queue(index, &tiny()), "start")?;
                context(queue.read(0, &mut [0; 512]), "read")?;
            }
            let mut next = context(client.start_queue(2, &tiny()), "start")?;
            context(next.read(0, &mut [0; 512]), "read")?;
            for index in 0..3 {
                context(client.frontend().vring_base(index), "stop")?;
            }
            for index in 0..2 {
                let layout = client.queue(index).ring().layout();
                let memory = client.memory().clone();
                let event_idx = client.features() & cleave_blk::spec::feature::EVENT_IDX != 0;
                let fresh = cleave_client::DriverRing::new(&memory, layout, event_idx, 0);
                *client.queue(index).ring() = context(fresh, "lay out")?;
                context(client.resume_queue(index, 0), "start")?;
            }
        }
        exercise(&mut client)
    }));
    for status in [0x80u8, 0x40, 0xff, 1, 3, 11] {
        let made = row(format!("device status {status:#x}"), move |daemon| {
            let mut client = open(daemon)?;
            let _ = client.frontend().set_status(status);
            match client.frontend().status() {
                Ok(_) | Err(Error::Closed) => Ok(()),
                Err(other) => Err(other.to_string()),
            }
        });
        rows.push(made.policy("vhost-user SET_STATUS"));
    }
}

pub(crate) fn tiny() -> DeviceOptions {
    DeviceOptions {
        queue_size: 16,
        data_bytes: 8192,
        ..small(1)
    }
}

fn ends(rows: &mut Vec<Row>) {
    rows.push(row(
        "repeated disconnects with requests in flight",
        |daemon| {
            exercise(&mut open(daemon)?)?;
            let (fds, rss) = (daemon.fds_at_rest(), daemon.rss_kib());
            for _ in 0..scale(100) {
                let mut client = open(daemon)?;
                flood(client.queue(0), 20, 64 << 10);
                flood(client.queue(1), 20, 4096);
            }
            daemon.fds_settle_at(fds)?;
            daemon.settles_small(rss, 1023)
        },
    ));
    for how in [
        std::net::Shutdown::Write,
        std::net::Shutdown::Read,
        std::net::Shutdown::Both,
    ] {
        rows.push(row(
            format!("half the connection closed ({how:?}) with requests in flight"),
            move |daemon| {
                let mut client = open(daemon)?;
                flood(client.queue(0), 20, 64 << 10);
                let _ = client.frontend().socket().stream().shutdown(how);
                std::thread::sleep(Duration::from_millis(20));
                Ok(())
            },
        ));
    }
    rows.push(row(
        "writes in flight at a disconnect are whole or absent",
        |daemon| {
            for round in 1..=scale(10) as u8 {
                let mut client = open(daemon)?;
                let queue = client.queue(0);
                let (area, _) = queue.data_area();
                let (head, status) = queue.control();
                let memory = queue.memory();
                memory.fill(area, 1 << 20, round);
                queue.write_header(kind::OUT, 2048);
                let chain = [
                    Buffer::readable(head, 16),
                    Buffer::readable(area, 4096),
                    Buffer::writable(status, 1),
                ];
                queue.ring().add(&chain);
                queue.ring().publish();
                queue.ring_kick();
                drop(client);
                let mut next = open(daemon)?;
                let mut back = vec![0; 4096];
                context(next.queue(0).read(1 << 20, &mut back), "read")?;
                let first = back[0];
                ensure(all_are(&back, first) && first <= round, || {
                    format!("round {round}: a partial write")
                })?;
            }
            Ok(())
        },
    ));
    rows.push(row("more requests than the engine can hold", |daemon| {
        let options = DeviceOptions {
            queue_size: 1024,
            data_bytes: 64 << 20,
            queues: 2,
            ..small(2)
        };
        let mut client = open_with(daemon, &options)?;
        let workload = Workload {
            stop: Stop::Requests(scale(20_000) as u64),
            ..Workload::reads(4096, 1024, 32 << 20, Duration::ZERO)
        };
        let all = context(client.run(&workload, |_| |_| ()), "run")?;
        ensure(all.iter().all(|tally| tally.failed == 0), || {
            format!("{all:?}")
        })
    }));
}

fn soon(rows: &mut Vec<Row>) {
    rows.push(row(
        "the next frontend is served within 100 ms of an abrupt disconnect",
        violent_end,
    ));
    rows.push(row(
        "a connected but idle frontend costs no CPU",
        |daemon| {
            let mut client = open(daemon)?;
            exercise(&mut client)?;
            daemon.stays_at_rest()?;
            exercise(&mut client)
        },
    ));
}

fn violent_end(daemon: &Daemon) -> Outcome {
    for _ in 0..10 {
        unless_late("violent-end", Duration::from_millis(20), |lateness| {
            let mut client = open(daemon)?;
            flood(client.queue(0), 20, 4096);
            *lateness = Lateness::start(&[daemon.pid()]);
            let start = Instant::now();
            drop(client);
            let mut next = open(daemon)?;
            exercise_queue(&mut next, 0)?;
            let took = start.elapsed();
            // Before its threads end.
            lateness.note();
            ensure(took < Duration::from_millis(100), || {
                format!("after {took:?}\n{}", daemon.log_tail())
            })
        })?;
    }
    Ok(())
}
