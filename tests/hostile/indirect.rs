//! Invalid indirect tables.

use std::iter::repeat_n;

use cleave_blk::spec::request_type as kind;
use cleave_tests::{Row, header, row, specified};

use crate::attack::{
    Expect, HostileChain, INDIRECT, NEXT, Parts, WRITE, check_both_vrings, context, entry, open,
    shoot,
};
use crate::chain::{changed, through};

pub(crate) fn indirect(rows: &mut Vec<Row>) {
    through(
        rows,
        "an indirect chain is served",
        Expect::Served(513),
        |parts| parts.usual().to_vec(),
    );
    for len in [
        0u32,
        1,
        8,
        15,
        17,
        40,
        47,
        49,
        0xffff_ffff,
        0xffff_fff0,
        0x7fff_ffff,
        16 * 65536,
    ] {
        rows.push(row(
            format!("an indirect table of {len:#x} bytes"),
            move |daemon| {
                shoot(daemon, Expect::Refused, |parts| {
                    let head = entry(parts.table, len, INDIRECT, 0);
                    HostileChain::read_through(head, parts.usual().to_vec())
                })
            },
        ));
    }
    through(
        rows,
        "an indirect table inside an indirect table",
        Expect::Refused,
        |parts| {
            let mut table = parts.usual().to_vec();
            table[1] = entry(parts.table, 48, INDIRECT | NEXT, 2);
            table
        },
    );
    through(
        rows,
        "an indirect table of itself",
        Expect::Refused,
        |parts| vec![entry(parts.table, 16, INDIRECT, 0)],
    );
    for (name, flags, expect) in [
        ("INDIRECT and NEXT", INDIRECT | NEXT, Expect::Refused),
        // The device must ignore WRITE beside INDIRECT (virtio 1.3 §2.7.5.3.2).
        ("INDIRECT and WRITE", INDIRECT | WRITE, Expect::Served(513)),
        (
            "INDIRECT, NEXT and WRITE",
            INDIRECT | NEXT | WRITE,
            Expect::Refused,
        ),
    ] {
        let made = row(name, move |daemon| {
            shoot(daemon, expect, |parts| {
                let head = entry(parts.table, 48, flags, 1);
                HostileChain::read_through(head, parts.usual().to_vec())
            })
        });
        rows.push(match expect {
            Expect::Served(_) => made.specified("virtio 1.3 §2.7.5.3.2"),
            _ => made,
        });
    }
    // "normal chained descriptors followed by a single descriptor with INDIRECT" (virtio 1.3 §2.7.5.3.2).
    let mixed = row("a direct header before an indirect rest", |daemon| {
        shoot(daemon, Expect::Served(513), |parts| {
            let [first, mut data, status] = parts.usual();
            data.next = 1;
            HostileChain {
                indirect: vec![data, status],
                ..HostileChain::read(vec![first, entry(parts.table, 32, INDIRECT, 0)])
            }
        })
    });
    rows.push(mixed.specified("virtio 1.3 §2.7.5.3.2"));
    for (name, addr) in [
        ("nowhere", 0u64),
        ("in a hole", 0x7000_0000),
        ("at the end of the address space", u64::MAX - 15),
        ("beyond the address space", u64::MAX - 31),
    ] {
        rows.push(row(format!("an indirect table {name}"), move |daemon| {
            shoot(daemon, Expect::NoStatus, |_| {
                HostileChain::read(vec![entry(addr, 48, INDIRECT, 0)])
            })
        }));
    }
    rows.push(row(
        "an indirect table across the end of memory",
        |daemon| {
            let end = {
                let mut client = open(daemon)?;
                let memory = client.memory().region(0);
                let _ = client.queue(0);
                memory.guest_addr + memory.len_bytes
            };
            shoot(daemon, Expect::NoStatus, |_| {
                HostileChain::read(vec![entry(end - 32, 48, INDIRECT, 0)])
            })
        },
    ));
    for next in [3u16, 4, 100, 0xffff] {
        through(
            rows,
            format!("an indirect table of 3 links to {next}"),
            Expect::Refused,
            move |parts| changed(parts, 1, |entry| entry.next = next),
        );
    }
    specified(rows, "virtio 1.3 §2.7.5.3", |rows| {
        through(
            rows,
            "an indirect table with garbage after its chain",
            Expect::Served(513),
            |parts| {
                let mut table = parts.usual().to_vec();
                let garbage = entry(u64::MAX, u32::MAX, 0xffff, 0xffff);
                table.extend([garbage; 10]);
                table
            },
        );
    });
    // "anywhere in memory" (virtio 1.3 §2.7.5.3).
    let odd = row("an indirect table at an odd address", |daemon| {
        let mut client = open(daemon)?;
        let parts = Parts::of(client.queue(0));
        let memory = client.memory().clone();
        memory.write(parts.header, &header(kind::IN, 0));
        let bytes: Vec<u8> = parts
            .usual()
            .iter()
            .flat_map(|entry| entry.to_bytes())
            .collect();
        memory.write(parts.table + 3, &bytes);
        let queue = client.queue(0);
        let head = entry(parts.table + 3, 48, INDIRECT, 0);
        queue.ring().write_descriptor(0, head);
        queue.ring().push(0);
        queue.ring().publish();
        queue.ring_kick();
        context(queue.wait_used(), "the chain did not complete")?;
        queue.ring().free_all();
        check_both_vrings(&mut client)
    });
    rows.push(odd.specified("virtio 1.3 §2.7.5.3"));
    through(
        rows,
        "an indirect table that the request itself overwrites",
        Expect::Served(513),
        |parts| changed(parts, 1, |entry| entry.addr = parts.table),
    );
    through(
        rows,
        "an indirect table with the status in it",
        Expect::Any,
        |parts| changed(parts, 2, |entry| entry.addr = parts.table),
    );
    for (count, expect) in [
        (65usize, Expect::Any),
        (256, Expect::Any),
        (1024, Expect::Any),
        (1100, Expect::Any),
        (4096, Expect::Refused),
    ] {
        through(
            rows,
            format!("{count} data descriptors of 512 bytes"),
            expect,
            move |parts| parts.read_into(repeat_n((parts.data, 512), count)),
        );
    }
}
