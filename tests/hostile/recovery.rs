//! The back-end is killed and its successor takes over, with the frontend's in-flight region.

use std::time::Duration;

use cleave_blk::spec::request_type as kind;
use cleave_client::message::protocol;
use cleave_client::{Base, Buffer, Client, DeviceOptions};
use cleave_tests::{
    Daemon, Outcome, Row, ensure, exercise, flood, row, scale, small, specified, wait_until,
};

use crate::attack::{context, open_with, settle};

const REQUESTS: u64 = 20;

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    specified(
        &mut rows,
        "vhost-user \"Inflight I/O tracking\"",
        kills_under_load,
    );
    specified(
        &mut rows,
        "vhost-user \"Inflight I/O tracking\"",
        kills_after_writes,
    );
    rows.into_iter()
        .map(|row| row.with_protocol(protocol::INFLIGHT_SHMFD).killing())
        .collect()
}

fn options() -> DeviceOptions {
    let plain = small(2);
    DeviceOptions {
        protocol_features: plain.protocol_features | protocol::INFLIGHT_SHMFD,
        ..plain
    }
}

fn open(daemon: &Daemon) -> Result<Client, String> {
    let client = open_with(daemon, &options())?;
    ensure(client.keeps_inflight(), || {
        "GET_INFLIGHT_FD returned no region".into()
    })?;
    Ok(client)
}

/// Kills the daemon, starts its successor, and connects to that with the same memory, vrings and in-flight region.
fn replace(daemon: &Daemon, client: &mut Client, base: Base) -> Result<Daemon, String> {
    let next = daemon.succeed()?;
    let mut last = Ok(());
    wait_until(|| {
        last = client.reconnect(next.socket(), &options(), base);
        last.is_ok()
    });
    context(last, "reconnect")?;
    Ok(next)
}

fn kills_under_load(rows: &mut Vec<Row>) {
    for (name, base) in [
        ("the used index, as QEMU sends", Base::Used),
        (
            "the available index, as Cloud Hypervisor sends",
            Base::Avail,
        ),
        ("an arbitrary position", Base::At(12345)),
    ] {
        let made = row(
            format!("requests in flight at a kill complete once, vring base: {name}"),
            move |daemon| complete_once(daemon, base),
        );
        rows.push(match base {
            Base::Used => made,
            _ => made.policy("vhost-user SET_VRING_BASE"),
        });
    }
    rows.push(row(
        "the guest sends requests while no back-end runs",
        |daemon| {
            let mut client = open(daemon)?;
            exercise(&mut client)?;
            let next = daemon.succeed()?;
            flood(client.queue(0), REQUESTS, 4096);
            reconnect_and_check(&next, &mut client, Base::Used, REQUESTS)
        },
    ));
}

fn complete_once(daemon: &Daemon, base: Base) -> Outcome {
    let mut client = open(daemon)?;
    exercise(&mut client)?;
    let mut served = None;
    for _ in 0..scale(5) {
        let now = served.as_ref().unwrap_or(daemon);
        flood(client.queue(0), REQUESTS, 64 << 10);
        let next = replace(now, &mut client, base)?;
        check_completions(&mut client, REQUESTS)?;
        exercise(&mut client)?;
        served = Some(next);
    }
    Ok(())
}

fn reconnect_and_check(next: &Daemon, client: &mut Client, base: Base, count: u64) -> Outcome {
    let reconnected = client.reconnect(next.socket(), &options(), base);
    context(reconnected, "reconnect")?;
    check_completions(client, count)?;
    exercise(client)
}

/// All requests complete, and none of them twice.
fn check_completions(client: &mut Client, count: u64) -> Outcome {
    let ring = client.queue(0).ring();
    let seen = settle(ring, count as usize);
    ensure(seen as u64 == count, || {
        format!("{seen} of {count} requests completed")
    })?;
    std::thread::sleep(Duration::from_millis(20));
    let (used, reaped) = (ring.used_index(), ring.reaped());
    ensure(used == reaped, || {
        format!("used index {used}, but only {reaped} requests were sent")
    })
}

fn kills_after_writes(rows: &mut Vec<Row>) {
    // No flush followed, so the write may still be volatile.
    let completed = row("a completed write survives a kill", |daemon| {
        let mut client = open(daemon)?;
        let written = client.queue(0).write(1 << 20, &[0x5a; 8192]);
        context(written, "write")?;
        let _next = replace(daemon, &mut client, Base::Used)?;
        let mut back = [0; 8192];
        context(client.queue(0).read(1 << 20, &mut back), "read")?;
        ensure(back == [0x5a; 8192], || "the write is lost".into())
    });
    rows.push(completed.policy("virtio 1.3 §5.2.6.2"));
    rows.push(row(
        "a write in flight at a kill is done afterwards",
        |daemon| {
            let mut client = open(daemon)?;
            let queue = client.queue(0);
            let (area, _) = queue.data_area();
            let (head, status) = queue.control();
            queue.memory().fill(area, 4096, 0x66);
            queue.write_header(kind::OUT, 2048);
            queue.ring().add(&[
                Buffer::readable(head, 16),
                Buffer::readable(area, 4096),
                Buffer::writable(status, 1),
            ]);
            queue.ring().publish();
            queue.ring_kick();
            let _next = replace(daemon, &mut client, Base::Used)?;
            check_completions(&mut client, 1)?;
            let mut back = [0; 4096];
            context(client.queue(0).read(1 << 20, &mut back), "read")?;
            ensure(back == [0x66; 4096], || "the write is lost".into())
        },
    ));
}
