//! Invalid descriptor chains.

use std::iter::repeat_n;

use cleave_blk::spec::request_type as kind;
use cleave_client::{Descriptor, all_are};
use cleave_tests::{Cut, Random, Row, ensure, header, policy, row, stream};

use crate::attack::{Expect, NEXT, Parts, WRITE, check_both_vrings, context, entry, open};
use crate::buffers::{addresses, directions, lengths, statuses};
use crate::chain::{changed, direct, through};
use crate::indirect::indirect;

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    policy(&mut rows, "virtio 1.3 §2.7.5", links);
    policy(&mut rows, "virtio 1.3 §2.7.5", loops);
    policy(&mut rows, "virtio 1.3 §5.2.6", short);
    policy(&mut rows, "virtio 1.3 §2.7.5.3", indirect);
    policy(&mut rows, "virtio 1.3 §2.7.5", lengths);
    policy(&mut rows, "virtio 1.3 §2.7.5", addresses);
    policy(&mut rows, "virtio 1.3 §2.7.4.2", directions);
    policy(&mut rows, "virtio 1.3 §5.2.6", statuses);
    policy(&mut rows, "virtio 1.3 §2.7.4", headers);
    rows
}

fn links(rows: &mut Vec<Row>) {
    direct(
        rows,
        "an ordinary chain is served",
        Expect::Served(513),
        |parts| parts.usual().to_vec(),
    );
    for next in [64u16, 65, 1000, 0x7fff, 0x8000, 0xffff] {
        for index in [0, 1] {
            let name = format!("descriptor {index} links to {next} of 64");
            direct(rows, name, Expect::Refused, move |parts| {
                changed(parts, index, |entry| entry.next = next)
            });
        }
        direct(
            rows,
            format!("the status links to {next} of 64"),
            Expect::Refused,
            move |parts| {
                changed(parts, 2, |entry| {
                    (entry.flags, entry.next) = (WRITE | NEXT, next)
                })
            },
        );
    }
    for flags in [8u16, 0x10, 0x8000, 0xfff8] {
        direct(
            rows,
            format!("unknown descriptor flags {flags:#x}"),
            Expect::Any,
            move |parts| changed(parts, 1, |entry| entry.flags |= flags),
        );
    }
}

fn loops(rows: &mut Vec<Row>) {
    for index in [0usize, 1, 2] {
        for target in 0..=index as u16 {
            let name = format!("a loop from descriptor {index} to {target}");
            direct(rows, name, Expect::Refused, move |parts| {
                changed(parts, index, |entry| {
                    (entry.flags, entry.next) = (entry.flags | NEXT, target)
                })
            });
        }
    }
    for (what, len) in [("one byte", 1), ("no byte", 0)] {
        direct(
            rows,
            format!("a loop over the whole table, {what} each"),
            Expect::Refused,
            move |parts| ring(parts, len),
        );
        through(
            rows,
            format!("a loop in an indirect table, {what} each"),
            Expect::Refused,
            move |parts| ring(parts, len),
        );
    }
    direct(
        rows,
        "a whole table in line, header first and status last",
        Expect::Served(513),
        |parts| {
            let empty = repeat_n((parts.data, 0), 61);
            parts.read_into([(parts.data, 512)].into_iter().chain(empty))
        },
    );
}

/// A table that links to itself without end.
fn ring(parts: Parts, len: u32) -> Vec<Descriptor> {
    let link = |index: u16| entry(parts.data, len, NEXT, (index + 1) % 64);
    (0..64).map(link).collect()
}

fn short(rows: &mut Vec<Row>) {
    let one = |addr: fn(Parts) -> u64, len: u32, flags: u16| {
        move |parts: Parts| vec![entry(addr(parts), len, flags, 0)]
    };
    direct(
        rows,
        "a header alone",
        Expect::NoStatus,
        one(|parts| parts.header, 16, 0),
    );
    direct(
        rows,
        "one writable byte alone",
        Expect::Refused,
        one(|parts| parts.status, 1, WRITE),
    );
    direct(
        rows,
        "sixteen writable bytes alone",
        Expect::Refused,
        one(|parts| parts.data, 16, WRITE),
    );
    direct(
        rows,
        "one empty descriptor",
        Expect::NoStatus,
        one(|parts| parts.header, 0, 0),
    );
    direct(
        rows,
        "one empty writable descriptor",
        Expect::NoStatus,
        one(|parts| parts.header, 0, WRITE),
    );
    direct(rows, "one descriptor of zeroes", Expect::NoStatus, |_| {
        vec![Descriptor::default()]
    });
    direct(
        rows,
        "header and data without status",
        Expect::Any,
        |parts| changed(parts, 1, |entry| entry.flags = WRITE)[..2].to_vec(),
    );
}

fn headers(rows: &mut Vec<Row>) {
    for len in 0..16usize {
        rows.push(row(format!("a header of {len} bytes"), move |daemon| {
            let mut client = open(daemon)?;
            let mut random = Random::new(len as u64 + 1);
            let cut = Cut {
                pieces: 1,
                empty: false,
                indirect: false,
            };
            let head = header(kind::IN, 0);
            let got = stream(client.queue(0), cut, &mut random, &head[..len], 513);
            let (used, out) = context(got, "read")?;
            ensure(used == 1 && out[512] == 1, || {
                format!("used {used}, status {}", out[512])
            })?;
            ensure(all_are(&out[..512], 0xa5), || "data was written".into())?;
            check_both_vrings(&mut client)
        }));
    }
    for pieces in [2usize, 3, 8, 16] {
        for indirect in [false, true] {
            rows.push(
                row(
                    format!("a header in {pieces} pieces, indirect {indirect}"),
                    move |daemon| {
                        let mut client = open(daemon)?;
                        let mut random = Random::new(pieces as u64);
                        for _ in 0..10 {
                            let cut = Cut {
                                pieces,
                                empty: false,
                                indirect,
                            };
                            let got = stream(
                                client.queue(0),
                                cut,
                                &mut random,
                                &header(kind::IN, 0),
                                513,
                            );
                            let (used, out) = context(got, "read")?;
                            ensure(used == 513 && out[512] == 0, || format!("used {used}"))?;
                        }
                        check_both_vrings(&mut client)
                    },
                )
                .specified("virtio 1.3 §2.7.4.1"),
            );
        }
    }
    for extra in [1usize, 16, 511, 512] {
        rows.push(row(
            format!("a read with {extra} readable bytes after its header"),
            move |daemon| {
                let mut client = open(daemon)?;
                let readable = [&header(kind::IN, 0)[..], &vec![0; extra]].concat();
                let cut = Cut {
                    pieces: 1,
                    empty: false,
                    indirect: false,
                };
                let got = stream(client.queue(0), cut, &mut Random::new(1), &readable, 513);
                let (used, out) = context(got, "read")?;
                ensure(used == 1 && out[512] == 1, || {
                    format!("used {used}, status {}", out[512])
                })?;
                check_both_vrings(&mut client)
            },
        ));
    }
}
