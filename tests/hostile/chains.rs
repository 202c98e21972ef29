//! Invalid descriptor chains.

use cleave_blk::spec::request_type as kind;
use cleave_client::{Descriptor, all_are};
use cleave_tests::{
    Cut, Daemon, Outcome, Random, Row, ensure, header, policy, row, specified, stream,
};

use crate::attack::{
    Expect, HostileChain, INDIRECT, NEXT, Parts, WRITE, check_both_vrings, context, open, shoot,
};

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

/// A row of which the name says whether its chain is an ordinary one, which has to be served.
fn chain_row(name: impl Into<String>, check: impl Fn(&Daemon) -> Outcome + Send + 'static) -> Row {
    let made = row(name, check);
    match made.name.ends_with("is served") {
        true => made.specified("virtio 1.3 §2.7.4.1"),
        false => made,
    }
}

/// A row that sends a read with a descriptor table built by `table`.
fn direct(
    rows: &mut Vec<Row>,
    name: impl Into<String>,
    expect: Expect,
    table: impl Fn(Parts) -> Vec<Descriptor> + Send + 'static,
) {
    let aim = move |parts| HostileChain {
        kind: kind::IN,
        table: table(parts),
        indirect: Vec::new(),
    };
    rows.push(chain_row(name, move |daemon| shoot(daemon, expect, &aim)));
}

/// A row that sends a chain through an indirect table.
fn through(
    rows: &mut Vec<Row>,
    name: impl Into<String>,
    expect: Expect,
    table: impl Fn(Parts) -> Vec<Descriptor> + Send + 'static,
) {
    let aim = move |parts: Parts| {
        let indirect = table(parts);
        let len = 16 * indirect.len() as u32;
        let head = Descriptor {
            addr: parts.table,
            len,
            flags: INDIRECT,
            next: 0,
        };
        HostileChain {
            kind: kind::IN,
            table: vec![head],
            indirect,
        }
    };
    rows.push(chain_row(name, move |daemon| shoot(daemon, expect, &aim)));
}

fn changed(parts: Parts, index: usize, change: impl Fn(&mut Descriptor)) -> Vec<Descriptor> {
    let mut table = parts.usual().to_vec();
    change(&mut table[index]);
    table
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
            move |parts| {
                (0..64)
                    .map(|index| Descriptor {
                        addr: parts.data,
                        len,
                        flags: NEXT,
                        next: (index + 1) % 64,
                    })
                    .collect()
            },
        );
        through(
            rows,
            format!("a loop in an indirect table, {what} each"),
            Expect::Refused,
            move |parts| {
                (0..64)
                    .map(|index| Descriptor {
                        addr: parts.data,
                        len,
                        flags: NEXT,
                        next: (index + 1) % 64,
                    })
                    .collect()
            },
        );
    }
    direct(
        rows,
        "a whole table in line, header first and status last",
        Expect::Served(513),
        |parts| {
            let mut table = vec![Descriptor {
                addr: parts.header,
                len: 16,
                flags: NEXT,
                next: 1,
            }];
            table.push(Descriptor {
                addr: parts.data,
                len: 512,
                flags: NEXT | WRITE,
                next: 2,
            });
            for next in 3..64 {
                table.push(Descriptor {
                    addr: parts.data,
                    len: 0,
                    flags: NEXT | WRITE,
                    next,
                });
            }
            table.push(Descriptor {
                addr: parts.status,
                len: 1,
                flags: WRITE,
                next: 0,
            });
            table
        },
    );
}

fn short(rows: &mut Vec<Row>) {
    let one = |addr: fn(Parts) -> u64, len: u32, flags: u16| {
        move |parts: Parts| {
            vec![Descriptor {
                addr: addr(parts),
                len,
                flags,
                next: 0,
            }]
        }
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

fn indirect(rows: &mut Vec<Row>) {
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
                shoot(daemon, Expect::Refused, |parts| HostileChain {
                    kind: kind::IN,
                    table: vec![Descriptor {
                        addr: parts.table,
                        len,
                        flags: INDIRECT,
                        next: 0,
                    }],
                    indirect: parts.usual().to_vec(),
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
            table[1] = Descriptor {
                addr: parts.table,
                len: 48,
                flags: INDIRECT | NEXT,
                next: 2,
            };
            table
        },
    );
    through(
        rows,
        "an indirect table of itself",
        Expect::Refused,
        |parts| {
            vec![Descriptor {
                addr: parts.table,
                len: 16,
                flags: INDIRECT,
                next: 0,
            }]
        },
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
            shoot(daemon, expect, |parts| HostileChain {
                kind: kind::IN,
                table: vec![Descriptor {
                    addr: parts.table,
                    len: 48,
                    flags,
                    next: 1,
                }],
                indirect: parts.usual().to_vec(),
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
                kind: kind::IN,
                table: vec![
                    first,
                    Descriptor {
                        addr: parts.table,
                        len: 32,
                        flags: INDIRECT,
                        next: 0,
                    },
                ],
                indirect: vec![data, status],
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
            shoot(daemon, Expect::NoStatus, |_| HostileChain {
                kind: kind::IN,
                table: vec![Descriptor {
                    addr,
                    len: 48,
                    flags: INDIRECT,
                    next: 0,
                }],
                indirect: Vec::new(),
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
            shoot(daemon, Expect::NoStatus, |_| HostileChain {
                kind: kind::IN,
                table: vec![Descriptor {
                    addr: end - 32,
                    len: 48,
                    flags: INDIRECT,
                    next: 0,
                }],
                indirect: Vec::new(),
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
                let garbage = Descriptor {
                    addr: u64::MAX,
                    len: u32::MAX,
                    flags: 0xffff,
                    next: 0xffff,
                };
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
        let entry = Descriptor {
            addr: parts.table + 3,
            len: 48,
            flags: INDIRECT,
            next: 0,
        };
        queue.ring().write_descriptor(0, entry);
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
            move |parts| {
                let mut table = vec![Descriptor {
                    addr: parts.header,
                    len: 16,
                    flags: NEXT,
                    next: 1,
                }];
                for next in 2..=count as u16 + 1 {
                    table.push(Descriptor {
                        addr: parts.data,
                        len: 512,
                        flags: NEXT | WRITE,
                        next,
                    });
                }
                table.push(Descriptor {
                    addr: parts.status,
                    len: 1,
                    flags: WRITE,
                    next: 0,
                });
                table
            },
        );
    }
}

fn lengths(rows: &mut Vec<Row>) {
    for count in [1usize, 10, 60] {
        direct(
            rows,
            format!("{count} empty data descriptors"),
            Expect::Served(513),
            move |parts| {
                let mut table = vec![Descriptor {
                    addr: parts.header,
                    len: 16,
                    flags: NEXT,
                    next: 1,
                }];
                for next in 2..=count as u16 + 1 {
                    // The address of an empty descriptor has no meaning.
                    table.push(Descriptor {
                        addr: 0xdead_0000,
                        len: 0,
                        flags: NEXT | WRITE,
                        next,
                    });
                }
                let next = count as u16 + 2;
                table.push(Descriptor {
                    addr: parts.data,
                    len: 512,
                    flags: NEXT | WRITE,
                    next,
                });
                table.push(Descriptor {
                    addr: parts.status,
                    len: 1,
                    flags: WRITE,
                    next: 0,
                });
                table
            },
        );
    }
    for count in [100usize, 1000] {
        through(
            rows,
            format!("{count} empty descriptors in an indirect table"),
            Expect::Any,
            move |parts| {
                let mut table = vec![Descriptor {
                    addr: parts.header,
                    len: 16,
                    flags: NEXT,
                    next: 1,
                }];
                for next in 2..=count as u16 + 1 {
                    table.push(Descriptor {
                        addr: 0,
                        len: 0,
                        flags: NEXT | WRITE,
                        next,
                    });
                }
                table.push(Descriptor {
                    addr: parts.status,
                    len: 1,
                    flags: WRITE,
                    next: 0,
                });
                table
            },
        );
    }
    direct(
        rows,
        "empty descriptors before the header",
        Expect::Served(513),
        |parts| {
            let [mut first, mut data, status] = parts.usual();
            (first.next, data.next) = (2, 3);
            vec![
                Descriptor {
                    addr: 0,
                    len: 0,
                    flags: NEXT,
                    next: 1,
                },
                first,
                data,
                status,
            ]
        },
    );
    direct(
        rows,
        "an empty descriptor after the status",
        Expect::Served(513),
        |parts| {
            let mut table = parts.usual().to_vec();
            (table[2].flags, table[2].next) = (WRITE | NEXT, 3);
            table.push(Descriptor {
                addr: 0,
                len: 0,
                flags: WRITE,
                next: 0,
            });
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
        |parts| {
            let mut table = vec![Descriptor {
                addr: parts.header,
                len: 16,
                flags: NEXT,
                next: 1,
            }];
            // 1020 times 4.5 MiB; the data area is 4 MiB, and other areas follow it.
            for next in 2..=1021 {
                table.push(Descriptor {
                    addr: parts.data,
                    len: 0x48_0000,
                    flags: NEXT | WRITE,
                    next,
                });
            }
            table.push(Descriptor {
                addr: parts.status,
                len: 1,
                flags: WRITE,
                next: 0,
            });
            table
        },
    );
    through(
        rows,
        "lengths that wrap 32 bits to a small sum",
        Expect::Refused,
        |parts| {
            let mut table = vec![Descriptor {
                addr: parts.header,
                len: 16,
                flags: NEXT,
                next: 1,
            }];
            for next in [2, 3] {
                table.push(Descriptor {
                    addr: parts.data,
                    len: 0x8000_0100,
                    flags: NEXT | WRITE,
                    next,
                });
            }
            table.push(Descriptor {
                addr: parts.status,
                len: 1,
                flags: WRITE,
                next: 0,
            });
            table
        },
    );
}

fn addresses(rows: &mut Vec<Row>) {
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
                    table,
                    indirect: Vec::new(),
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
            shoot(daemon, expect, |parts| HostileChain {
                kind: kind::IN,
                table: changed(parts, 1, |entry| entry.addr = place(end)),
                indirect: Vec::new(),
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
            shoot(daemon, Expect::Refused, |parts| HostileChain {
                kind: kind::IN,
                table: changed(parts, 1, |entry| entry.addr = user),
                indirect: Vec::new(),
            })
        },
    ));
}

fn directions(rows: &mut Vec<Row>) {
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
            table: parts.usual().to_vec(),
            indirect: Vec::new(),
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
            table.push(Descriptor {
                addr: parts.data,
                len: 512,
                flags: 0,
                next: 0,
            });
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

fn statuses(rows: &mut Vec<Row>) {
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
