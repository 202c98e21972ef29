//! Chains whose buffers have a wrong length, address or direction, or no room for the status.

use std::iter::repeat_n;

use cleave_blk::spec::request_type as kind;
use cleave_client::Descriptor;
use cleave_tests::{Row, ensure, header, row};

use crate::attack::{
    Expect, HostileChain, NEXT, Parts, WRITE, check_both_vrings, context, entry, open, shoot,
};
use crate::chain::{changed, direct, through};

pub(crate) fn lengths(rows: &mut Vec<Row>) {
    for count in [1usize, 10, 60] {
        direct(
            rows,
            format!("{count} empty data descriptors"),
            Expect::Served(513),
            move |parts| {
                // The address of an empty descriptor has no meaning.
                let empty = repeat_n((0xdead_0000, 0), count);
                parts.read_into(empty.chain([(parts.data, 512)]))
            },
        );
    }
    for count in [100usize, 1000] {
        through(
            rows,
            format!("{count} empty descriptors in an indirect table"),
            Expect::Any,
            move |parts| parts.read_into(repeat_n((0, 0), count)),
        );
    }
    direct(
        rows,
        "empty descriptors before the header",
        Expect::Served(513),
        |parts| {
            let [mut first, mut data, status] = parts.usual();
            (first.next, data.next) = (2, 3);
            vec![entry(0, 0, NEXT, 1), first, data, status]
        },
    );
    direct(
        rows,
        "an empty descriptor after the status",
        Expect::Served(513),
        |parts| {
            let mut table = parts.usual().to_vec();
            (table[2].flags, table[2].next) = (WRITE | NEXT, 3);
            table.push(entry(0, 0, WRITE, 0));
            table
        },
    );
    for len in [0xffff_ffffu32, 0xffff_fe00, 0x8000_0000, 0x7fff_fe00] {
        direct(
            rows,
            format!("{len:#x} bytes of data"),
            Expect::Refused,
            move |parts| changed(parts, 1, |entry| entry.len = len),
        );
        direct(
            rows,
            format!("{len:#x} bytes of header"),
            Expect::Refused,
            move |parts| changed(parts, 0, |entry| entry.len = len),
        );
        direct(
            rows,
            format!("{len:#x} bytes of status"),
            Expect::Refused,
            move |parts| changed(parts, 2, |entry| entry.len = len),
        );
    }
    through(
        rows,
        "4 GiB and more, all of it mapped",
        Expect::Refused,
        // 1020 times 4.5 MiB; the data area is 4 MiB, and other areas follow it.
        |parts| parts.read_into(repeat_n((parts.data, 0x48_0000), 1020)),
    );
    through(
        rows,
        "lengths that wrap 32 bits to a small sum",
        Expect::Refused,
        |parts| parts.read_into([(parts.data, 0x8000_0100); 2]),
    );
}

pub(crate) fn addresses(rows: &mut Vec<Row>) {
    let places: [(&str, u64); 8] = [
        ("at 0", 0),
        ("in a hole", 0x7000_0000),
        ("one byte before memory", 0xffff_ffff),
        ("just before memory, into it", 0x1_0000_0000 - 8),
        ("ending at 2^64", 0u64.wrapping_sub(512)),
        ("wrapping 2^64", u64::MAX - 100),
        ("at 2^64 - 1", u64::MAX),
        ("at 2^63", 1 << 63),
    ];
    for (name, addr) in places {
        direct(
            rows,
            format!("data {name}"),
            Expect::Refused,
            move |parts| changed(parts, 1, |entry| entry.addr = addr),
        );
        direct(
            rows,
            format!("a header {name}"),
            Expect::Refused,
            move |parts| changed(parts, 0, |entry| entry.addr = addr),
        );
        let status = if name.contains("into it") {
            addr + 7
        } else {
            addr
        };
        direct(
            rows,
            format!("a status {name}"),
            Expect::Refused,
            move |parts| changed(parts, 2, |entry| entry.addr = status),
        );
        rows.push(row(format!("data to write {name}"), move |daemon| {
            shoot(daemon, Expect::Refused, |parts| {
                let mut table = changed(parts, 1, |entry| entry.addr = addr);
                table[1].flags = NEXT;
                HostileChain {
                    kind: kind::OUT,
                    ..HostileChain::read(table)
                }
            })
        }));
    }
    type Place = fn(u64) -> u64;
    let edges: [(&str, Place, Expect); 4] = [
        (
            "at the last 512 bytes of memory",
            |end| end - 512,
            Expect::Served(513),
        ),
        (
            "one byte across the end of memory",
            |end| end - 511,
            Expect::Refused,
        ),
        ("at the last byte of memory", |end| end - 1, Expect::Refused),
        ("at the end of memory", |end| end, Expect::Refused),
    ];
    for (name, place, expect) in edges {
        let made = row(format!("data {name}"), move |daemon| {
            let mut client = open(daemon)?;
            let _ = client.queue(0);
            let region = client.memory().region(0);
            let end = region.guest_addr + region.len_bytes;
            drop(client);
            shoot(daemon, expect, |parts| {
                HostileChain::read(changed(parts, 1, |entry| entry.addr = place(end)))
            })
        });
        rows.push(match expect {
            Expect::Served(_) => made.specified("vhost-user \"Memory access\""),
            _ => made,
        });
    }
    rows.push(row(
        "data at the frontend's own virtual address",
        |daemon| {
            let mut client = open(daemon)?;
            let parts = Parts::of(client.queue(0));
            let user = client.memory().user_addr(parts.data).unwrap_or(0);
            drop(client);
            shoot(daemon, Expect::Refused, |parts| {
                HostileChain::read(changed(parts, 1, |entry| entry.addr = user))
            })
        },
    ));
}

pub(crate) fn directions(rows: &mut Vec<Row>) {
    direct(rows, "a writable header", Expect::Refused, |parts| {
        changed(parts, 0, |entry| entry.flags |= WRITE)
    });
    direct(
        rows,
        "a read into a readable buffer",
        Expect::Refused,
        |parts| changed(parts, 1, |entry| entry.flags = NEXT),
    );
    direct(rows, "a readable status", Expect::Any, |parts| {
        changed(parts, 2, |entry| entry.flags = 0)
    });
    rows.push(row("a write from a writable buffer", |daemon| {
        shoot(daemon, Expect::Refused, |parts| HostileChain {
            kind: kind::OUT,
            ..HostileChain::read(parts.usual().to_vec())
        })
    }));
    direct(
        rows,
        "the status before the header",
        Expect::Refused,
        |parts| {
            let [first, data, status] = parts.usual();
            vec![
                Descriptor {
                    flags: WRITE | NEXT,
                    next: 1,
                    ..status
                },
                Descriptor { next: 2, ..first },
                Descriptor {
                    flags: WRITE,
                    ..data
                },
            ]
        },
    );
    direct(
        rows,
        "readable data after writable data",
        Expect::Refused,
        |parts| {
            let mut table = parts.usual().to_vec();
            (table[2].flags, table[2].next) = (WRITE | NEXT, 3);
            table.push(entry(parts.data, 512, 0, 0));
            table
        },
    );
    direct(rows, "everything readable", Expect::NoStatus, |parts| {
        parts
            .usual()
            .iter()
            .map(|entry| Descriptor {
                flags: entry.flags & NEXT,
                ..*entry
            })
            .collect()
    });
    direct(rows, "everything writable", Expect::Refused, |parts| {
        parts
            .usual()
            .iter()
            .map(|entry| Descriptor {
                flags: entry.flags | WRITE,
                ..*entry
            })
            .collect()
    });
}

pub(crate) fn statuses(rows: &mut Vec<Row>) {
    direct(rows, "a status of no bytes", Expect::Any, |parts| {
        changed(parts, 2, |entry| entry.len = 0)
    });
    for len in [2u32, 3, 16, 512, 4096] {
        rows.push(row(
            format!("a flush with {len} writable bytes: the last byte is the status"),
            move |daemon| {
                let mut client = open(daemon)?;
                let parts = Parts::of(client.queue(0));
                let memory = client.memory().clone();
                memory.write(parts.header, &header(kind::FLUSH, 0));
                memory.fill(parts.data, 8192, 0xa5);
                let chain = [
                    cleave_client::Buffer::readable(parts.header, 16),
                    cleave_client::Buffer::writable(parts.data, len),
                ];
                let used = context(client.queue(0).chain(&chain), "flush")?;
                let bytes = memory.bytes(parts.data, 8192);
                let last = len as usize - 1;
                ensure(bytes[last] == 0, || format!("status {:#x}", bytes[last]))?;
                let rest = bytes
                    .iter()
                    .enumerate()
                    .all(|(at, byte)| at == last || *byte == 0xa5);
                ensure(rest, || "bytes other than the status were written".into())?;
                ensure(used.len <= len, || format!("used {} of {len}", used.len))?;
                check_both_vrings(&mut client)
            },
        ));
    }
    type Place = fn(Parts) -> u64;
    let places: [(&str, Place); 3] = [
        ("in the data", |parts| parts.data + 100),
        ("in the header", |parts| parts.header),
        ("at the end of the header", |parts| parts.header + 15),
    ];
    for (name, place) in places {
        direct(
            rows,
            format!("a status {name}"),
            Expect::Any,
            move |parts| changed(parts, 2, |entry| entry.addr = place(parts)),
        );
    }
    direct(rows, "data over the header", Expect::Served(513), |parts| {
        changed(parts, 1, |entry| entry.addr = parts.header)
    });
}
