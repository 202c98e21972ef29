//! Files of guest memory that are cut short while they are mapped.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use cleave_blk::spec::request_type as kind;
use cleave_client::{Client, DriverRequest, Error, MemoryMessages, RegionOptions};
use cleave_tests::{Daemon, Outcome, Row, ensure, flood, row};

use crate::attack::{check_both_vrings, check_other_vring_or_closed, context, negotiated};
use crate::config::refused;
use crate::regions::{MIB, in_memory, memfd, region};

/// Memory whose file is truncated under the daemon: SIGBUS would kill a program without a handler. The daemon may
/// close the connection, but must not die.
pub(crate) fn cut_files(rows: &mut Vec<Row>) {
    const DATA: u64 = 0x4000_0000;
    let plans = [
        RegionOptions::new(0x1000_0000, 16 << 20),
        RegionOptions::new(DATA, 4 << 20),
    ];
    for (name, keep) in [
        ("wholly", 0u64),
        ("in the middle", 2 << 20),
        (
            "by its last page",
            (4 << 20) - rustix::param::page_size() as u64,
        ),
    ] {
        for (what, request, writable) in [("read", kind::IN, true), ("write", kind::OUT, false)] {
            rows.push(row(
                format!("data memory cut {name}, then a {what}"),
                move |daemon| {
                    let mut client = in_memory(daemon, &plans, MemoryMessages::Whole)?;
                    context(client.memory().truncate(1, keep), "cut")?;
                    let data = (DATA + (4 << 20) - 4096, 4096);
                    let one = DriverRequest {
                        kind: request,
                        sector: 900,
                        data,
                        writable,
                    };
                    after_the_cut(
                        client.queue(0).execute(&one).map(|done| done.status),
                        &mut client,
                    )
                },
            ));
        }
    }
    for (name, part) in [("header", 0), ("status byte", 1), ("indirect table", 2)] {
        rows.push(row(format!("the memory of a {name} cut"), move |daemon| {
            let mut client = in_memory(daemon, &plans, MemoryMessages::Whole)?;
            let (head, status) = client.queue(0).control();
            let memory = Arc::clone(client.memory());
            client.queue(0).write_header(kind::FLUSH, 0);
            let far = DATA + (3 << 20);
            memory.write(far, &memory.bytes(head, 16));
            let (head, status) = match part {
                0 => (far, status),
                1 => (head, far + 64),
                _ => (head, status),
            };
            let chain = [
                cleave_client::Buffer::readable(head, 16),
                cleave_client::Buffer::writable(status, 1),
            ];
            context(memory.truncate(1, 0), "cut")?;
            let ring = client.queue(0).ring();
            let added = match part {
                2 => ring.add_indirect(far + 4096, &chain),
                _ => ring.add(&chain),
            };
            ensure(added.is_some(), || "the ring is full".into())?;
            ring.publish();
            client.queue(0).ring_kick();
            // A guest takes what stands in the status byte for the answer, also if that was not written.
            while client.frontend().features().is_ok() {
                let used = client.queue(0).ring().reap();
                ensure(used.is_none(), || format!("it was answered: {used:?}"))?;
            }
            let used = client.queue(0).ring().reap();
            ensure(used.is_none(), || format!("it was answered: {used:?}"))
        }));
    }
    for (name, part) in [
        ("descriptor table", 0),
        ("available ring", 1),
        ("used ring", 2),
    ] {
        rows.push(row(format!("the memory of a {name} cut"), move |daemon| {
            cut_ring(daemon, part, false)
        }));
        rows.push(row(
            format!("the memory of a {name} cut under load"),
            move |daemon| cut_ring(daemon, part, true),
        ));
    }
    rows.push(row("all memory cut under load", |daemon| {
        for _ in 0..5 {
            let mut client = in_memory(daemon, &plans_of_one(), MemoryMessages::Whole)?;
            flood(client.queue(0), 20, 64 << 10);
            flood(client.queue(1), 20, 64 << 10);
            context(client.memory().truncate(0, 0), "cut")?;
            client.queue(0).ring_kick();
            client.queue(1).ring_kick();
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }));
    rows.push(row(
        "a memory file that is too short from the start",
        |daemon| {
            let bare = negotiated(daemon)?;
            let file = memfd(4096);
            refused(bare.set_mem_table(&[region(0, MIB, 0x7f00_0000_0000, 0)], &[file.as_fd()]))
        },
    ));
    rows.push(row(
        "a hole punched into data memory is read as zeroes, and served",
        move |daemon| {
            let mut client = in_memory(daemon, &plans, MemoryMessages::Whole)?;
            let memory = Arc::clone(client.memory());
            memory.fill(DATA, 4096, 9);
            use rustix::fs::FallocateFlags;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(memory.fd(1), flags, 0, 4 << 20).unwrap();
            let write = DriverRequest {
                kind: kind::OUT,
                sector: 900,
                data: (DATA, 4096),
                writable: false,
            };
            let done = context(client.queue(0).execute(&write), "write")?;
            ensure(done.status == 0, || format!("{done:?}"))?;
            check_both_vrings(&mut client)
        },
    ));
}

fn plans_of_one() -> [RegionOptions; 1] {
    [RegionOptions::new(0x1000_0000, 32 << 20)]
}

/// A vring in a region of its own, which is truncated.
fn cut_ring(daemon: &Daemon, part: usize, load: bool) -> Outcome {
    let plans = [
        RegionOptions::new(0x1000_0000, 16 << 20),
        RegionOptions::new(0x4000_0000, 1 << 20),
    ];
    let mut client = in_memory(daemon, &plans, MemoryMessages::Whole)?;
    context(client.frontend().vring_base(0), "stop")?;
    let memory = Arc::clone(client.memory());
    let mut layout = client.queue(0).ring().layout();
    let far = 0x4000_0000;
    match part {
        0 => layout.desc = far,
        1 => layout.avail = far,
        _ => layout.used = far,
    }
    let event_idx = client.features() & cleave_blk::spec::feature::EVENT_IDX != 0;
    let fresh = cleave_client::DriverRing::new(&memory, layout, event_idx, 0);
    *client.queue(0).ring() = context(fresh, "lay out")?;
    context(client.resume_queue(0, 0), "start")?;
    context(
        client.queue(0).read(0, &mut [0; 512]),
        "read before the cut",
    )?;
    if load {
        flood(client.queue(0), 20, 64 << 10);
    }
    context(memory.truncate(1, 0), "cut")?;
    flood(client.queue(0), 1, 512);
    client.queue(0).ring_kick();
    std::thread::sleep(Duration::from_millis(30));
    // The daemon may retire the vring or close the connection.
    check_other_vring_or_closed(&mut client)
}

/// Checks that the request failed or the connection is closed; a success would be wrong.
fn after_the_cut(status: Result<u8, Error>, client: &mut Client) -> Outcome {
    match status {
        Ok(0) => Err("a request on memory that is not there succeeded".into()),
        Ok(_) => Ok(()),
        Err(_) => {
            let lost = client.frontend().features().is_err();
            ensure(lost, || "neither answered nor closed".into())
        }
    }
}
