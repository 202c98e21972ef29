//! Hostile guest memory: false tables, truncated files, regions that disappear.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use cleave_blk::spec::request_type as kind;
use cleave_client::message::{self, RegionBytes, request as number};
use cleave_client::{Client, DriverRequest, Error, MemoryMessages, RegionOptions, all_are};
use cleave_tests::{Messages as _, Outcome, Row, ensure, flood, policy, row, time_limit};

use crate::attack::{check_both_vrings, context, negotiated, open, settle};
use crate::config::refused;
use crate::cut_files::cut_files;
use crate::regions::{MIB, in_memory, memfd, region};

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    policy(&mut rows, "vhost-user SET_MEM_TABLE", lying_tables);
    policy(&mut rows, "vhost-user SET_MEM_TABLE", strange_files);
    policy(&mut rows, "vhost-user ADD_MEM_REG, REM_MEM_REG", slots);
    policy(&mut rows, "vhost-user \"Memory access\"", changing_tables);
    policy(&mut rows, "vhost-user \"Memory access\"", cut_files);
    let with_slots = [
        "slot",
        "region removed",
        "region of data removed",
        "replaced",
        "cut",
        "ADD_MEM",
    ];
    rows.into_iter()
        .map(
            |row| match with_slots.iter().any(|word| row.name.contains(word)) {
                true => row.with_protocol(message::protocol::CONFIGURE_MEM_SLOTS),
                false => row,
            },
        )
        .collect()
}

fn lying_tables(rows: &mut Vec<Row>) {
    let user = 0x7f00_0000_0000u64;
    let tables: Vec<(&str, Vec<RegionBytes>)> = vec![
        ("of no bytes", vec![region(0, 0, user, 0)]),
        ("of 2^63 bytes", vec![region(0, 1 << 63, user, 0)]),
        ("of 2^64 - 1 bytes", vec![region(0, u64::MAX, user, 0)]),
        (
            "whose guest addresses wrap",
            vec![region(u64::MAX - 4095, MIB, user, 0)],
        ),
        (
            "whose user addresses wrap",
            vec![region(0, MIB, u64::MAX - 4095, 0)],
        ),
        (
            "whose file offset wraps",
            vec![region(0, MIB, user, u64::MAX - 4095)],
        ),
        (
            "whose file offset is beyond the file",
            vec![region(0, MIB, user, 4 * MIB)],
        ),
        ("longer than its file", vec![region(0, 4 * MIB, user, 0)]),
        (
            "one page longer than its file",
            vec![region(0, MIB + 4096, user, 0)],
        ),
        (
            "one page longer than its file from its offset",
            vec![region(0, MIB, user, 4096)],
        ),
        (
            "with the largest offset",
            vec![region(0, 4096, user, i64::MAX as u64)],
        ),
        (
            "twice the same region",
            vec![region(0, MIB, user, 0), region(0, MIB, user, 0)],
        ),
        (
            "overlapping by one page",
            vec![
                region(0, MIB, user, 0),
                region(MIB - 4096, MIB, user + 2 * MIB, 0),
            ],
        ),
        (
            "one region inside another",
            vec![
                region(0, MIB, user, 0),
                region(4096, 4096, user + 2 * MIB, 0),
            ],
        ),
    ];
    for (name, regions) in tables {
        let whole = regions.clone();
        rows.push(row(format!("a table {name}"), move |daemon| {
            let bare = negotiated(daemon)?;
            let files: Vec<OwnedFd> = whole.iter().map(|_| memfd(MIB)).collect();
            let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            refused(bare.set_mem_table(&whole, &fds))
        }));
        rows.push(row(format!("slots {name}"), move |daemon| {
            let bare = negotiated(daemon)?;
            let file = memfd(MIB);
            let mut last = Ok(());
            for one in &regions {
                last = bare.add_mem_reg(*one, file.as_fd());
            }
            refused(last)
        }));
    }
    for (name, count, carried, files) in [
        ("a count of 8 and one region", 8u32, 1usize, 8usize),
        ("a count of 2^32 - 1", u32::MAX, 1, 1),
        ("a count of 0 and a descriptor", 0, 0, 1),
        ("more descriptors than regions", 1, 1, 2),
        ("fewer descriptors than regions", 2, 2, 1),
        ("a count of 9", 9, 9, 9),
        ("a count of 33", 33, 33, 33),
    ] {
        rows.push(row(format!("a table with {name}"), move |daemon| {
            let bare = negotiated(daemon)?;
            let fds: Vec<OwnedFd> = (0..files).map(|_| memfd(MIB)).collect();
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            let regions: Vec<_> = (0..carried as u64)
                .map(|at| region(at * MIB, MIB, user + at * MIB, 0))
                .collect();
            let payload = message::mem_table(count, &regions);
            let answer = bare.send(number::SET_MEM_TABLE, &payload, &fds);
            match answer {
                // More regions than the message can hold, all of them valid, may be accepted.
                Ok(()) if count as usize == carried && carried == files => Ok(()),
                other => refused(other),
            }
        }));
    }
    rows.push(row(
        "a table of no regions is accepted, and no vring is served in it",
        |daemon| {
            let mut client = open(daemon)?;
            match client.frontend().set_mem_table(&[], &[]) {
                Ok(()) => {
                    let retired = client.queue(0).err_signalled(time_limit());
                    ensure(retired, || "its vring was not retired".into())
                }
                other => refused(other),
            }
        },
    ));
}

fn strange_files(rows: &mut Vec<Row>) {
    for (name, make) in crate::descriptors::strange_descriptors() {
        rows.push(row(format!("{name} as guest memory"), move |daemon| {
            let bare = negotiated(daemon)?;
            let fd = make()?;
            let answer = bare.set_mem_table(&[region(0, MIB, 0x7f00_0000_0000, 0)], &[fd.as_fd()]);
            // /dev/zero can be mapped: private memory, which is harmless.
            if name == "/dev/zero" {
                Ok(())
            } else {
                refused(answer)
            }
        }));
    }
    rows.push(row("memory that cannot be written", |daemon| {
        let bare = negotiated(daemon)?;
        let file = memfd(MIB);
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let read_only = OwnedFd::from(std::fs::File::open(path).unwrap());
        refused(bare.set_mem_table(&[region(0, MIB, 0x7f00_0000_0000, 0)], &[read_only.as_fd()]))
    }));
    rows.push(row("memory sealed against writing", |daemon| {
        let bare = negotiated(daemon)?;
        let file = memfd(MIB);
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::WRITE).unwrap();
        refused(bare.set_mem_table(&[region(0, MIB, 0x7f00_0000_0000, 0)], &[file.as_fd()]))
    }));
    let sealed = row("memory sealed against shrinking is served", |daemon| {
        let plan = RegionOptions {
            sealed: true,
            ..RegionOptions::new(0x1000_0000, 16 << 20)
        };
        let mut client = in_memory(daemon, &[plan], MemoryMessages::Whole)?;
        check_both_vrings(&mut client)
    });
    rows.push(sealed.specified("vhost-user SET_MEM_TABLE"));
    let shared = row("the same file as two regions is served", |daemon| {
        let bare = negotiated(daemon)?;
        let file = memfd(2 * MIB);
        let user = 0x7f00_0000_0000;
        let regions = [region(0, MIB, user, 0), region(MIB, MIB, user + MIB, 0)];
        context(
            bare.set_mem_table(&regions, &[file.as_fd(), file.as_fd()]),
            "set",
        )
    });
    rows.push(shared.specified("vhost-user SET_MEM_TABLE"));
    for (offset, len) in [(100u64, MIB), (1, 4096), (4095, 4096), (0, 1000), (0, 1)] {
        rows.push(row(
            format!("a region of {len} bytes at file offset {offset}"),
            move |daemon| {
                // Unusual, but the frontend's own choice: accepted or refused, never fatal.
                let bare = negotiated(daemon)?;
                let file = memfd(2 * MIB);
                match bare
                    .set_mem_table(&[region(0, len, 0x7f00_0000_0000, offset)], &[file.as_fd()])
                {
                    Ok(()) => context(bare.features(), "afterwards").map(drop),
                    other => refused(other),
                }
            },
        ));
    }
    rows.push(row("the disk image itself as guest memory", |daemon| {
        let bare = negotiated(daemon)?;
        // The disk of the daemon itself, through the daemon's own descriptor.
        let folder = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
        let image = folder.flatten().find_map(|entry| {
            let target = std::fs::read_link(entry.path()).ok()?;
            target.ends_with("disk").then_some(target)
        });
        let Some(image) = image else { return Ok(()) };
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(image)
            .unwrap();
        let _ = bare.set_mem_table(&[region(0, MIB, 0x7f00_0000_0000, 0)], &[file.as_fd()]);
        Ok(())
    }));
}

fn slots(rows: &mut Vec<Row>) {
    rows.push(row("509 slots, and one more", |daemon| {
        let bare = negotiated(daemon)?;
        let most = context(bare.max_mem_slots(), "slots")?;
        ensure(most >= 509, || format!("{most} slots"))?;
        let file = memfd(4096);
        for at in 0..most {
            let one = region(at * 8192, 4096, 0x7f00_0000_0000 + at * 8192, 0);
            context(bare.add_mem_reg(one, file.as_fd()), &format!("slot {at}"))?;
        }
        let one = region(most * 8192, 4096, 0x7f00_0000_0000 + most * 8192, 0);
        refused(bare.add_mem_reg(one, file.as_fd()))
    }));
    rows.push(row("a client whose memory is 300 slots", |daemon| {
        let mut plans = vec![RegionOptions::new(0x1000_0000, 16 << 20)];
        plans.extend((0..300).map(|at| RegionOptions::new(0x4000_0000 + at * 8192, 4096)));
        let mut client = in_memory(daemon, &plans, MemoryMessages::Slots)?;
        let memory = client.memory().clone();
        for at in [0u64, 150, 299] {
            let data = (0x4000_0000 + at * 8192, 4096);
            memory.fill(data.0, 4096, at as u8);
            let write = DriverRequest {
                kind: kind::OUT,
                sector: 800,
                data,
                writable: false,
            };
            let done = context(client.queue(0).execute(&write), "write")?;
            ensure(done.status == 0, || format!("{done:?}"))?;
        }
        check_both_vrings(&mut client)
    }));
    for with_fd in [false, true] {
        let made = row(
            format!("slots added and removed, descriptor {with_fd}"),
            move |daemon| {
                let mut client = open(daemon)?;
                let fds = daemon.fds();
                let file = memfd(MIB);
                for round in 0..200u64 {
                    let one = region(0x9_0000_0000, MIB, 0x7e00_0000_0000, 0);
                    let frontend = client.frontend();
                    context(
                        frontend.add_mem_reg(one, file.as_fd()),
                        &format!("add, round {round}"),
                    )?;
                    let fd = with_fd.then(|| file.as_fd());
                    context(
                        frontend.rem_mem_reg(one, fd),
                        &format!("remove, round {round}"),
                    )?;
                }
                daemon.fds_settle_at(fds)?;
                check_both_vrings(&mut client)
            },
        );
        rows.push(made.specified("vhost-user ADD_MEM_REG, REM_MEM_REG"));
    }
    type Change = fn(&mut RegionBytes);
    let changes: [(&str, Change); 4] = [
        ("that is not there", |one| one.guest_addr += 1 << 40),
        ("of another length", |one| one.len_bytes -= 4096),
        ("of another user address", |one| one.user_addr += 4096),
        ("of no bytes", |one| one.len_bytes = 0),
    ];
    for (name, change) in changes {
        rows.push(row(format!("removing a slot {name}"), move |daemon| {
            let mut client = open(daemon)?;
            let mut one = client.memory().region(0);
            change(&mut one);
            match client.frontend().rem_mem_reg(one, None) {
                Err(Error::Refused { .. }) => check_both_vrings(&mut client),
                other => refused(other),
            }
        }));
    }
    rows.push(row("adding a slot that overlaps a region", |daemon| {
        let mut client = open(daemon)?;
        let file = memfd(MIB);
        let mut one = client.memory().region(0);
        one.guest_addr += 4096;
        one.len_bytes = MIB;
        match client.frontend().add_mem_reg(one, file.as_fd()) {
            Err(Error::Refused { .. }) => check_both_vrings(&mut client),
            other => refused(other),
        }
    }));
    rows.push(row("ADD_MEM_REG without a descriptor", |daemon| {
        let bare = negotiated(daemon)?;
        let payload = message::mem_reg(region(0, MIB, 0x7f00_0000_0000, 0));
        refused(bare.send(number::ADD_MEM_REG, &payload, &[]))
    }));
}

fn changing_tables(rows: &mut Vec<Row>) {
    rows.push(row("the same table again and again under load", |daemon| {
        let mut client = open(daemon)?;
        for round in 0..50 {
            flood(client.queue(0), 16, 16 << 10);
            context(client.send_memory(), "table")?;
            let seen = settle(client.queue(0).ring(), 16);
            ensure(seen == 16, || format!("round {round}: {seen} of 16"))?;
        }
        check_both_vrings(&mut client)
    }));
    rows.push(row("slots added under load", |daemon| {
        let mut client = open(daemon)?;
        let file = memfd(MIB);
        for round in 0..50u64 {
            flood(client.queue(0), 16, 16 << 10);
            let one = region(
                0x9_0000_0000 + round * MIB,
                MIB,
                0x7e00_0000_0000 + round * MIB,
                0,
            );
            context(client.frontend().add_mem_reg(one, file.as_fd()), "add")?;
            let seen = settle(client.queue(0).ring(), 16);
            ensure(seen == 16, || format!("round {round}: {seen} of 16"))?;
        }
        check_both_vrings(&mut client)
    }));
    rows.push(row(
        "the vrings' region removed while requests run",
        |daemon| {
            let mut client = open(daemon)?;
            flood(client.queue(0), 20, 64 << 10);
            let one = client.memory().region(0);
            match client.frontend().rem_mem_reg(one, None) {
                Ok(()) => {
                    let retired = client.queue(0).err_signalled(time_limit());
                    ensure(retired, || "its vring did not signal err".into())?;
                    quiet(&mut client)
                }
                other => refused(other),
            }
        },
    ));
    rows.push(row(
        "a region of data removed while it is written",
        |daemon| {
            let plans = [
                RegionOptions::new(0x1000_0000, 16 << 20),
                RegionOptions::new(0x4000_0000, 16 << 20),
            ];
            let mut client = in_memory(daemon, &plans, MemoryMessages::Slots)?;
            for round in 0..10u64 {
                let (head, status) = client.queue(0).control();
                client.queue(0).write_header(kind::IN, 0);
                for place in 0..16u64 {
                    let data = cleave_client::Buffer::writable(0x4000_0000 + place * MIB, 1 << 20);
                    let chain = [
                        cleave_client::Buffer::readable(head, 16),
                        data,
                        cleave_client::Buffer::writable(status, 1),
                    ];
                    client.queue(0).ring().add(&chain);
                }
                client.queue(0).ring().publish();
                client.queue(0).ring_kick();
                let one = client.memory().region(1);
                context(client.frontend().rem_mem_reg(one, None), "remove")?;
                // The daemon writes nothing there after its reply.
                let memory = Arc::clone(client.memory());
                memory.fill(0x4000_0000, 16 << 20, 0x77);
                let seen = settle(client.queue(0).ring(), 16);
                ensure(seen == 16, || {
                    format!("round {round}: {seen} of 16 came back")
                })?;
                let bytes = memory.bytes(0x4000_0000, 16 << 20);
                ensure(all_are(&bytes, 0x77), || {
                    format!("round {round}: memory was written after its removal")
                })?;
                let fd = memory.fd(1);
                context(client.frontend().add_mem_reg(one, fd), "add again")?;
            }
            check_both_vrings(&mut client)
        },
    ));
    rows.push(row(
        "memory replaced by other memory at the same addresses",
        |daemon| {
            let mut client = open(daemon)?;
            flood(client.queue(0), 20, 64 << 10);
            let one = client.memory().region(0);
            let other = memfd(one.len_bytes);
            let answer = client.frontend().set_mem_table(&[one], &[other.as_fd()]);
            if answer.is_err() {
                return refused(answer);
            }
            // The vrings now lie in zeroes. Their requests may fail, but our old memory is no longer written.
            quiet(&mut client)
        },
    ));
}

/// Checks that guest memory does not change any more.
fn quiet(client: &mut Client) -> Outcome {
    let (area, _) = client.queue(0).data_area();
    let memory = Arc::clone(client.memory());
    memory.fill(area, 2 << 20, 0x77);
    std::thread::sleep(Duration::from_millis(50));
    let bytes = memory.bytes(area, 2 << 20);
    ensure(all_are(&bytes, 0x77), || {
        "memory was written after the reply".into()
    })
}
