//! Two frontends of one back-end: the second is parked, which means that its vrings start when the first has stopped its own, as
//! when a guest moves to another VMM on the same host.

use std::net::Shutdown;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cleave_client::message::{self, VERSION, request as number};
use cleave_client::{Client, Error, GuestMemory, RegionOptions};
use cleave_tests::{Daemon, Outcome, Row, ensure, exercise, policy, row, scale};

use crate::attack::{check_both_vrings, check_other_vring, context, frontend, open};
use crate::lifecycle::tiny;

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    policy(&mut rows, "vhost-user \"Migration\"", parked);
    rows
}

/// Connects a frontend with memory and without vrings.
fn second(daemon: &Daemon) -> Result<Client, String> {
    let memory = GuestMemory::new(&[RegionOptions::new(1 << 32, 2 << 20)]);
    let memory = context(memory, "memory")?;
    let bare = context(frontend(daemon), "connect a second frontend")?;
    let client = context(Client::handshake(bare, memory, &tiny()), "handshake")?;
    context(client.send_memory(), "send memory")?;
    Ok(client)
}

/// Starts a vring, which waits until the disk is free, reads through it, and stops it.
fn serve_once(client: &mut Client) -> Outcome {
    let mut queue = context(client.start_queue(0, &tiny()), "start the second")?;
    context(queue.read(0, &mut [0; 512]), "read by the second")?;
    context(client.frontend().vring_base(0), "stop the second").map(drop)
}

/// As `serve_once`, but the daemon may also hang up, because the first frontend goes on: then it returns false. `is_taken` is true
/// while the vring runs.
fn serve_while(client: &mut Client, is_taken: &AtomicBool) -> Result<bool, String> {
    let mut queue = match client.start_queue(0, &tiny()) {
        Err(Error::Closed) => return Ok(false),
        other => context(other, "start the second")?,
    };
    is_taken.store(true, Ordering::SeqCst);
    let read = queue.read(0, &mut [0; 512]);
    // The first would start meanwhile if it could.
    std::thread::sleep(Duration::from_millis(5));
    is_taken.store(false, Ordering::SeqCst);
    context(read, "read by the second")?;
    context(client.frontend().vring_base(0), "stop the second").map(|_| true)
}

fn parked(rows: &mut Vec<Row>) {
    rows.push(row(
        "a parked frontend floods the daemon with messages",
        |daemon| {
            let mut client = open(daemon)?;
            for _ in 0..scale(20) {
                let other = context(frontend(daemon), "connect")?;
                let bytes = message::message(number::GET_FEATURES, VERSION, &[]).repeat(1000);
                let stream = other.socket().stream();
                let _ = stream.set_write_timeout(Some(Duration::from_millis(20)));
                // It never reads, so it cannot send all.
                let _ = other.socket().send_raw(&bytes, &[]);
                check_both_vrings(&mut client)?;
            }
            Ok(())
        },
    ));
    rows.push(row("a parked frontend sends random bytes", |daemon| {
        let mut client = open(daemon)?;
        for round in 0..scale(50) as u64 {
            let other = context(frontend(daemon), "connect")?;
            let bytes: Vec<u8> = (1..256u64)
                .map(|at| (at.wrapping_mul(round.wrapping_mul(2) | 0x9e37_79b9) >> 13) as u8)
                .collect();
            let _ = other.socket().send_raw(&bytes, &[]);
            check_both_vrings(&mut client)?;
        }
        Ok(())
    }));
    rows.push(row(
        "parked frontends that die while they wait for the first to stop",
        |daemon| {
            let mut client = open(daemon)?;
            for _ in 0..scale(20) {
                let mut waiting = second(daemon)?;
                waiting.frontend().set_reply_ack(false);
                let _queue = context(waiting.start_queue(0, &tiny()), "start")?;
                check_both_vrings(&mut client)?;
            }
            Ok(())
        },
    ));
    rows.push(row(
        "a parked frontend sets up all but its vrings while the first is served",
        |daemon| {
            let mut client = open(daemon)?;
            let mut other = second(daemon)?;
            check_both_vrings(&mut client)?;
            context(other.refresh_config(), "configuration")?;
            check_both_vrings(&mut client)
        },
    ));
    rows.push(row(
        "a parked frontend starts when the first has stopped its vrings",
        |daemon| {
            let mut client = open(daemon)?;
            let mut other = second(daemon)?;
            std::thread::scope(|scope| {
                let other = scope.spawn(|| serve_once(&mut other));
                // One vring is enough to keep the disk.
                context(client.frontend().vring_base(0), "stop")?;
                for _ in 0..20 {
                    check_other_vring(&mut client)?;
                    let waits = !other.is_finished();
                    ensure(waits, || "both are served, or the second has left".into())?;
                    std::thread::sleep(Duration::from_millis(1));
                }
                context(client.frontend().vring_base(1), "stop")?;
                other.join().unwrap()
            })?;
            // Before that, its guest runs there. A child that another test starts may have a copy of the connection for a moment.
            let _ = other.frontend().socket().stream().shutdown(Shutdown::Both);
            drop(other);
            for index in 0..2 {
                let base = client.queue(index).ring().reaped();
                context(client.resume_queue(index, base), "start again")?;
            }
            check_both_vrings(&mut client)
        },
    ));
    rows.push(row(
        "a frontend that was taken over starts while the other is connected",
        |daemon| {
            let mut client = open(daemon)?;
            let mut other = second(daemon)?;
            let positions = context(client.stop(), "stop")?;
            serve_once(&mut other)?;
            let goes_on = client.go_on(&positions);
            let is_hung_up = matches!(goes_on, Err(Error::Closed));
            ensure(is_hung_up, || format!("it is not hung up: {goes_on:?}"))?;
            serve_once(&mut other)
        },
    ));
    rows.push(row(
        "a parked frontend that starts at the same moment as the first goes on",
        |daemon| {
            let mut client = open(daemon)?;
            for round in 0..scale(20) {
                let mut other = second(daemon)?;
                let positions = context(client.stop(), "stop")?;
                // True while the second frontend's vring is started.
                let is_taken = AtomicBool::new(false);
                let start = Barrier::new(2);
                std::thread::scope(|scope| -> Outcome {
                    let other = scope.spawn(|| {
                        start.wait();
                        serve_while(&mut other, &is_taken)
                    });
                    start.wait();
                    let goes_on = match client.go_on(&positions) {
                        // If the other was faster, the guest runs there.
                        Err(Error::Closed) => Ok(false),
                        goes_on => goes_on.map(|()| true),
                    };
                    let is_taken = is_taken.load(Ordering::SeqCst);
                    let is_served = other.join().unwrap()?;
                    let goes_on = context(goes_on, &format!("round {round}: go on"))?;
                    let both = goes_on && is_taken;
                    ensure(!both, || format!("round {round}: both are served"))?;
                    ensure(goes_on != is_served, || {
                        format!("round {round}: {goes_on} and {is_served}")
                    })?;
                    if is_served {
                        client = open(daemon)?;
                    }
                    Ok(())
                })?;
                check_both_vrings(&mut client)?;
            }
            Ok(())
        },
    ));
    rows.push(row("two frontends that start by turns", |daemon| {
        let starts = || -> Outcome {
            for _ in 0..scale(20) {
                // One whose turn it is not is disconnected, or waits until the other has left.
                let mut client = open(daemon)?;
                exercise(&mut client)?;
                let positions = context(client.stop(), "stop")?;
                match client.go_on(&positions) {
                    // The other was waiting, and has taken the disk over.
                    Err(Error::Closed) => {}
                    goes_on => {
                        context(goes_on, "go on")?;
                        exercise(&mut client)?;
                    }
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(starts);
            starts()?;
            other.join().unwrap()
        })
    }));
}
