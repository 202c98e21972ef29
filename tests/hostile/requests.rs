//! Invalid requests: ranges, lengths, types.

use cleave_blk::spec::{feature, request_type as kind, status};
use cleave_client::{Client, DeviceOptions, Queue, all_are};
use cleave_tests::{
    Cut, Outcome, Random, Row, ensure, header, policy, range, row, small, specified, stream,
};

use crate::attack::{check_both_vrings, check_disk, context, fill_disk, open, open_with};

const CAPACITY: u64 = (64 << 20) / 512;
const ONE: Cut = Cut {
    pieces: 1,
    empty: false,
    indirect: false,
};

/// Sends a readable stream; checks the status, the used length, and that nothing beyond the reply was written.
fn send(
    queue: &mut Queue,
    readable: &[u8],
    writable: usize,
    wanted: u8,
    used: u32,
) -> Result<Vec<u8>, String> {
    let got = stream(queue, ONE, &mut Random::new(1), readable, writable);
    let (found, out) = context(got, "no answer")?;
    let code = out[writable - 1];
    ensure(code == wanted, || {
        format!("status {code} where {wanted} is due")
    })?;
    ensure(found == used, || {
        format!("used {found} where {used} is due")
    })?;
    let answered = if wanted == status::OK {
        used as usize - 1
    } else {
        0
    };
    let rest = &out[answered..writable - 1];
    ensure(all_are(rest, 0xa5), || {
        "bytes beyond the used length were written".into()
    })?;
    Ok(out)
}

/// A row whose request must fail with this status and used length 1, without a change of the disk.
fn refused(
    rows: &mut Vec<Row>,
    name: impl Into<String>,
    wanted: u8,
    readable: Vec<u8>,
    writable: usize,
) {
    rows.push(row(name, move |daemon| {
        let mut client = open(daemon)?;
        fill_disk(&mut client)?;
        send(client.queue(0), &readable, writable, wanted, 1)?;
        check_disk(&mut client)?;
        check_both_vrings(&mut client)
    }));
}

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    policy(&mut rows, "virtio 1.3 §5.2.6.1", ranges);
    policy(&mut rows, "virtio 1.3 §5.2.6.1", lengths);
    specified(&mut rows, "virtio 1.3 §5.2.6", kinds);
    policy(&mut rows, "virtio 1.3 §5.2.6.1", discards);
    policy(&mut rows, "virtio 1.3 §5.2.6.1", ids);
    policy(&mut rows, "virtio 1.3 §5.2.6.1", flushes);
    policy(&mut rows, "virtio 1.3 §5.2.6", without_features);
    specified(&mut rows, "virtio 1.3 §2.7.8.2", successes);
    rows.into_iter()
        .map(|row| match row.name.split_whitespace().next() {
            Some("discard") => row.with_features(feature::DISCARD),
            Some("write-zeroes") => row.with_features(feature::WRITE_ZEROES),
            _ => row,
        })
        .collect()
}

fn ranges(rows: &mut Vec<Row>) {
    let table: [(&str, u64, usize); 12] = [
        ("at the capacity", CAPACITY, 512),
        ("of two sectors from the last one", CAPACITY - 1, 1024),
        (
            "of 1 MiB, half of it beyond the end",
            CAPACITY - 1024,
            1 << 20,
        ),
        ("one past the capacity", CAPACITY + 1, 512),
        ("at 2^55, which is 0 when shifted", 1 << 55, 512),
        ("at 2^55 - 1", (1 << 55) - 1, 512),
        ("at 2^55 - 1, wrapping", (1 << 55) - 1, 1024),
        ("at 2^54", 1 << 54, 512),
        ("at 2^63", 1 << 63, 512),
        ("at 2^64 - 1", u64::MAX, 512),
        ("at 2^64 - 1, wrapping", u64::MAX, 1024),
        ("of 64 KiB at 2^56 + 5", (1 << 56) + 5, 64 << 10),
    ];
    for (name, sector, len) in table {
        let write = [&header(kind::OUT, sector)[..], &vec![9; len]].concat();
        refused(rows, format!("a write {name}"), status::IOERR, write, 1);
        let read = header(kind::IN, sector).to_vec();
        refused(rows, format!("a read {name}"), status::IOERR, read, len + 1);
    }
}

fn lengths(rows: &mut Vec<Row>) {
    for len in [1usize, 15, 511, 513, 1000, 1023, 4095, 4097] {
        let write = [&header(kind::OUT, 0)[..], &vec![9; len]].concat();
        refused(
            rows,
            format!("a write of {len} bytes"),
            status::IOERR,
            write,
            1,
        );
        let read = header(kind::IN, 0).to_vec();
        refused(
            rows,
            format!("a read of {len} bytes"),
            status::IOERR,
            read,
            len + 1,
        );
    }
    for request in [kind::IN, kind::OUT] {
        rows.push(row(
            format!("no data, type {request}: served, and repeatably so"),
            move |daemon| {
                let mut client = open(daemon)?;
                fill_disk(&mut client)?;
                for sector in [0, 1, CAPACITY] {
                    send(client.queue(0), &header(request, sector), 1, status::OK, 1)?;
                }
                send(
                    client.queue(0),
                    &header(request, CAPACITY + 1),
                    1,
                    status::IOERR,
                    1,
                )?;
                check_disk(&mut client)?;
                check_both_vrings(&mut client)
            },
        ));
    }
}

fn kinds(rows: &mut Vec<Row>) {
    let unknown = [
        2u32,
        3,
        5,
        6,
        7,
        9,
        10,
        12,
        14,
        15,
        16,
        17,
        18,
        19,
        20,
        22,
        24,
        26,
        100,
        0xff,
        0x100,
        0x1_0000,
        0x8000_0000,
        0x8000_0001,
        0x8000_0004,
        0x8000_0008,
        0x7fff_ffff,
        0xffff_ffff,
    ];
    for request in unknown {
        let add = |rows: &mut Vec<Row>| {
            let readable = [&header(request, 0)[..], &[7; 512]].concat();
            let name = format!("type {request:#x} with readable data");
            refused(rows, name, status::UNSUPP, readable, 1);
        };
        match request {
            // A barrier in drafts before virtio 1.0: some devices still ignore that bit.
            0x8000_0000.. => policy(rows, "virtio 1.3 §5.2.6", add),
            _ => add(rows),
        }
        // How a device counts the status after data that it did not write is open.
        policy(rows, "virtio 1.3 §2.7.8.2", |rows| {
            let readable = header(request, 0).to_vec();
            let name = format!("type {request:#x} with writable data");
            refused(rows, name, status::UNSUPP, readable, 513);
        });
    }
}

fn discards(rows: &mut Vec<Row>) {
    for (name, request) in [
        ("discard", kind::DISCARD),
        ("write-zeroes", kind::WRITE_ZEROES),
    ] {
        let with = |rest: &[u8]| [&header(request, 0)[..], rest].concat();
        let one = range(0, 8, 0);
        let flag = |flags| with(&range(0, 8, flags));
        refused(
            rows,
            format!("{name} of 2 ranges"),
            status::UNSUPP,
            with(&one.repeat(2)),
            1,
        );
        refused(
            rows,
            format!("{name} of 256 ranges"),
            status::UNSUPP,
            with(&one.repeat(256)),
            1,
        );
        for len in [0usize, 1, 8, 15, 17, 31, 33] {
            let rest: Vec<u8> = one.iter().cycle().take(len).copied().collect();
            rows.push(row(
                format!("{name} of {len} bytes of range"),
                move |daemon| {
                    let mut client = open(daemon)?;
                    fill_disk(&mut client)?;
                    let readable = [&header(request, 0)[..], &rest].concat();
                    let got = stream(client.queue(0), ONE, &mut Random::new(1), &readable, 1);
                    let (used, out) = context(got, "no answer")?;
                    let fair = used == 1 && matches!(out[0], status::IOERR | status::UNSUPP);
                    ensure(fair, || format!("used {used}, status {}", out[0]))?;
                    check_disk(&mut client)?;
                    check_both_vrings(&mut client)
                },
            ));
        }
        for flags in [2u32, 4, 0x100, 0x8000_0000, 0xffff_fffe, 0xffff_ffff] {
            specified(rows, "virtio 1.3 §5.2.6.2", |rows| {
                let name = format!("{name} with flags {flags:#x}");
                refused(rows, name, status::UNSUPP, flag(flags), 1);
            });
        }
        let beyond: [(&str, u64, u32); 9] = [
            ("at the capacity", CAPACITY, 1),
            ("across the capacity", CAPACITY - 1, 2),
            (
                "of the whole disk and one sector more",
                0,
                CAPACITY as u32 + 1,
            ),
            ("of 2^32 - 1 sectors", 0, u32::MAX),
            ("whose bytes wrap 32 bits", 0, 1 << 23),
            ("at 2^55", 1 << 55, 8),
            ("at 2^64 - 1", u64::MAX, 1),
            ("at 2^64 - 1, wrapping", u64::MAX, 8),
            ("at 2^63", 1 << 63, 8),
        ];
        for (what, sector, sectors) in beyond {
            let readable = with(&range(sector, sectors, 0));
            refused(rows, format!("{name} {what}"), status::IOERR, readable, 1);
        }
        rows.push(row(
            format!("{name} of no sectors: the same result each time"),
            move |daemon| {
                let mut client = open(daemon)?;
                fill_disk(&mut client)?;
                let readable = [&header(request, 0)[..], &range(0, 0, 0)].concat();
                let (first, _) = context(
                    stream(client.queue(0), ONE, &mut Random::new(1), &readable, 1),
                    "",
                )?;
                let (again, _) = context(
                    stream(client.queue(0), ONE, &mut Random::new(1), &readable, 1),
                    "",
                )?;
                ensure(first == again && first == 1, || {
                    format!("used {first}, then {again}")
                })?;
                check_disk(&mut client)?;
                check_both_vrings(&mut client)
            },
        ));
        refused(
            rows,
            format!("{name} whose range is writable"),
            status::IOERR,
            header(request, 0).to_vec(),
            17,
        );
        rows.push(
            row(
                format!("{name} of odd sectors changes no other sector"),
                move |daemon| {
                    let mut client = open(daemon)?;
                    fill_disk(&mut client)?;
                    let readable = [&header(request, 0)[..], &range(3, 7, 0)].concat();
                    send(client.queue(0), &readable, 1, status::OK, 1)?;
                    let mut back = vec![0; 64 << 10];
                    context(client.queue(1).read(0, &mut back), "read")?;
                    let near = all_are(&back[..3 * 512], 0x3c) && all_are(&back[10 * 512..], 0x3c);
                    ensure(near, || "a neighbouring sector was changed".into())?;
                    if request == kind::WRITE_ZEROES {
                        let zero = all_are(&back[3 * 512..10 * 512], 0);
                        ensure(zero, || "not zero".into())?;
                    }
                    check_both_vrings(&mut client)
                },
            )
            .specified("virtio 1.3 §5.2.6.2"),
        );
    }
    let unmap = [&header(kind::DISCARD, 0)[..], &range(0, 8, 1)].concat();
    specified(rows, "virtio 1.3 §5.2.6.2", |rows| {
        refused(rows, "discard with UNMAP", status::UNSUPP, unmap.clone(), 1);
    });
}

fn ids(rows: &mut Vec<Row>) {
    for len in [0usize, 1, 19, 20, 21, 64, 512, 4096] {
        let made = row(format!("get-id into {len} bytes"), move |daemon| {
            let mut client = open(daemon)?;
            let used = len.min(20) as u32 + 1;
            send(
                client.queue(0),
                &header(kind::GET_ID, 0),
                len + 1,
                status::OK,
                used,
            )?;
            check_both_vrings(&mut client)
        });
        rows.push(match len {
            20 => made.specified("virtio 1.3 §5.2.6"),
            _ => made,
        });
    }
    rows.push(row("get-id with a sector", |daemon| {
        let mut client = open(daemon)?;
        send(
            client.queue(0),
            &header(kind::GET_ID, u64::MAX),
            21,
            status::OK,
            21,
        )?;
        check_both_vrings(&mut client)
    }));
    let readable = [&header(kind::GET_ID, 0)[..], &[0; 20]].concat();
    refused(
        rows,
        "get-id with readable data",
        status::IOERR,
        readable,
        21,
    );
}

fn flushes(rows: &mut Vec<Row>) {
    for (name, sector, len) in [
        ("a sector", 5u64, 0usize),
        ("a sector far away", u64::MAX, 0),
        ("data", 0, 512),
    ] {
        rows.push(row(format!("flush with {name}"), move |daemon| {
            let mut client = open(daemon)?;
            fill_disk(&mut client)?;
            let readable = [&header(kind::FLUSH, sector)[..], &vec![1; len]].concat();
            send(client.queue(0), &readable, 1, status::OK, 1)?;
            check_disk(&mut client)?;
            check_both_vrings(&mut client)
        }));
    }
    rows.push(
        row(
            "as many flushes as the ring holds, among writes",
            |daemon| {
                let mut client = open(daemon)?;
                let queue = client.queue(0);
                let (head, status) = queue.control();
                queue.write_header(kind::FLUSH, 0);
                for round in 0..20 {
                    let chain = [
                        cleave_client::Buffer::readable(head, 16),
                        cleave_client::Buffer::writable(status, 1),
                    ];
                    let mut count = 0;
                    while queue.ring().add(&chain).is_some() {
                        count += 1;
                    }
                    queue.ring().publish();
                    queue.ring_kick();
                    for _ in 0..count {
                        context(queue.wait_used(), &format!("round {round}"))?;
                    }
                }
                check_both_vrings(&mut client)
            },
        )
        .specified("virtio 1.3 §5.2.6.2"),
    );
}

fn without_features(rows: &mut Vec<Row>) {
    for (name, bit, request) in [
        ("discard", feature::DISCARD, kind::DISCARD),
        ("write-zeroes", feature::WRITE_ZEROES, kind::WRITE_ZEROES),
    ] {
        rows.push(row(format!("{name} without its feature"), move |daemon| {
            let mut client = open_with(
                daemon,
                &DeviceOptions {
                    features: !bit,
                    ..small(2)
                },
            )?;
            fill_disk(&mut client)?;
            let readable = [&header(request, 0)[..], &range(0, 8, 0)].concat();
            send(client.queue(0), &readable, 1, status::UNSUPP, 1)?;
            check_disk(&mut client)?;
            check_both_vrings(&mut client)
        }));
    }
}

/// Used lengths on success.
fn successes(rows: &mut Vec<Row>) {
    for len in [512usize, 4096, 65536, 1 << 20] {
        rows.push(row(
            format!("the used lengths of {len} bytes written and read"),
            move |daemon| {
                let mut client = open(daemon)?;
                let bytes = Random::new(len as u64).bytes(len);
                let readable = [&header(kind::OUT, 256)[..], &bytes].concat();
                send(client.queue(0), &readable, 1, status::OK, 1)?;
                let used = len as u32 + 1;
                let out = send(
                    client.queue(0),
                    &header(kind::IN, 256),
                    len + 1,
                    status::OK,
                    used,
                )?;
                ensure(out[..len] == bytes, || "other data was read".into())?;
                check_both_vrings(&mut client)
            },
        ));
    }
}

pub(crate) fn read_only_rows() -> Vec<Row> {
    let changes: [(&str, Vec<u8>); 5] = [
        ("a write", [&header(kind::OUT, 0)[..], &[1; 512]].concat()),
        (
            "a write beyond the end",
            [&header(kind::OUT, CAPACITY)[..], &[1; 512]].concat(),
        ),
        (
            "a write of 513 bytes",
            [&header(kind::OUT, 0)[..], &[1; 513]].concat(),
        ),
        (
            "a discard",
            [&header(kind::DISCARD, 0)[..], &range(0, 8, 0)].concat(),
        ),
        (
            "a write-zeroes",
            [&header(kind::WRITE_ZEROES, 0)[..], &range(0, 8, 1)].concat(),
        ),
    ];
    let mut rows = Vec::new();
    for (name, readable) in changes {
        for features in [!0, !feature::RO] {
            let readable = readable.clone();
            let name = format!("{name}, RO taken {}", features == !0);
            rows.push(row(name, move |daemon| {
                let mut client = open_with(
                    daemon,
                    &DeviceOptions {
                        features,
                        ..small(2)
                    },
                )?;
                send(client.queue(0), &readable, 1, status::IOERR, 1)?;
                still_zero(&mut client)?;
                check_both_vrings(&mut client)
            }));
        }
    }
    rows
}

fn still_zero(client: &mut Client) -> Outcome {
    let mut back = vec![1; 64 << 10];
    context(client.queue(1).read(0, &mut back), "read")?;
    ensure(all_are(&back, 0), || "the disk was changed".into())
}
