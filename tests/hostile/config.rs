//! Invalid features and accesses to the configuration space.

use cleave_blk::spec::feature;
use cleave_client::{DeviceOptions, Error, message};
use cleave_tests::{Messages as _, Outcome, Row, ensure, flood, policy, row, small};

use crate::attack::{check_both_vrings, context, fill_disk, frontend, open};

/// Bytes of the configuration space up to the fields of secure erase, which every device of today has.
const FIELDS: u32 = 60;

pub(crate) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    policy(&mut rows, "vhost-user GET_CONFIG", reading);
    policy(&mut rows, "vhost-user SET_CONFIG", writing);
    rows = rows
        .into_iter()
        .map(|row| row.with_protocol(message::protocol::CONFIG))
        .collect();
    policy(&mut rows, "vhost-user SET_FEATURES", features);
    rows
}

/// Checks for a refusal, by a reply or by a closed connection.
pub(crate) fn refused<T>(result: Result<T, Error>) -> Outcome {
    match result {
        Err(Error::Refused { .. } | Error::Closed) => Ok(()),
        Err(other) => Err(format!("{other} instead of a refusal")),
        Ok(_) => Err("accepted".into()),
    }
}

fn reading(rows: &mut Vec<Row>) {
    for (offset, size) in [
        (0u32, 257u32),
        (256, 1),
        (255, 2),
        (0xffff_ffff, 1),
        (0xffff_ffff, 0xffff_ffff),
        (1, 0xffff_ffff),
        (0x8000_0000, 0x8000_0000),
        (0, 0x7fff_ffff),
        (1000, 8),
    ] {
        rows.push(row(
            format!("reading {size:#x} bytes at {offset:#x}"),
            move |daemon| {
                let mut client = open(daemon)?;
                refused(client.frontend().config(offset, size))
            },
        ));
    }
    // SPDK's initiators read the last sizes, which exceed the fields of a disk.
    let served = [
        (0u32, 1u32),
        (0, 8),
        (8, 4),
        (59, 1),
        (34, 2),
        (60, 60),
        (95, 2),
        (96, 1),
        (255, 1),
        (0, 256),
    ];
    for (offset, size) in served {
        let is_field = offset + size <= FIELDS;
        let known = if is_field { FIELDS } else { 96 };
        let made = row(
            format!("reading {size} bytes at {offset} is served"),
            move |daemon| {
                let mut client = open(daemon)?;
                let mut whole = context(client.frontend().config(0, known), "whole")?;
                whole.resize(256, 0);
                let part = context(client.frontend().config(offset, size), "part")?;
                let wanted = &whole[offset as usize..(offset + size) as usize];
                ensure(part == wanted, || format!("{part:?}, not {wanted:?}"))?;
                check_both_vrings(&mut client)
            },
        );
        rows.push(match is_field {
            true => made.specified("vhost-user GET_CONFIG"),
            false => made,
        });
    }
    for (name, said, carried) in [
        ("more bytes than the message carries", 60u32, 8usize),
        ("fewer bytes than the message carries", 8, 60),
        ("none carried", 8, 0),
    ] {
        rows.push(row(format!("reading a size of {name}"), move |daemon| {
            let mut client = open(daemon)?;
            let payload = message::config_space(0, said, 0, &vec![0; carried]);
            let got = client
                .frontend()
                .request(message::request::GET_CONFIG, &payload, &[]);
            match got {
                Ok(message) => ensure(message.payload.len() <= 12 + 96, || {
                    "the reply is too long".into()
                }),
                Err(Error::Closed) => Ok(()),
                Err(other) => Err(other.to_string()),
            }
        }));
    }
}

fn writing(rows: &mut Vec<Row>) {
    for (name, offset, bytes) in [
        ("the capacity", 0u32, vec![1u8; 8]),
        ("the byte before the cache mode", 31, vec![1]),
        ("the byte after the cache mode", 33, vec![1]),
        ("the cache mode and one more", 32, vec![0, 1]),
        ("a word around the cache mode", 30, vec![0; 4]),
        ("the number of vrings", 34, vec![9, 9]),
        ("everything", 0, vec![0xff; 60]),
        ("beyond the end", 96, vec![1]),
        ("far beyond the end", 0xffff_ffff, vec![1]),
        ("256 bytes", 0, vec![0xff; 256]),
        ("nothing", 0, vec![]),
    ] {
        let has_fields = !bytes.is_empty() && offset as usize + bytes.len() <= FIELDS as usize;
        let made = row(format!("writing {name}"), move |daemon| {
            let mut client = open(daemon)?;
            let before = client.config().clone();
            // Refused or ignored; only the cache mode may change.
            let answer = client.frontend().set_config(offset, &bytes);
            if !matches!(answer, Ok(()) | Err(Error::Refused { .. } | Error::Closed)) {
                return Err(format!("{answer:?}"));
            }
            let mut after = match client.refresh_config() {
                Ok(after) => after.clone(),
                Err(_) => return Ok(()),
            };
            after.writeback = before.writeback;
            ensure(after == before, || format!("{after:?}"))?;
            check_both_vrings(&mut client)
        });
        rows.push(match has_fields {
            true => made.specified("vhost-user SET_CONFIG"),
            false => made,
        });
    }
    for value in [2u8, 0x80, 0xff] {
        let made = row(format!("cache mode {value}"), move |daemon| {
            let mut client = open(daemon)?;
            let _ = client.frontend().set_config(32, &[value]);
            match client.refresh_config() {
                Ok(config) => {
                    let mode = config.writeback;
                    ensure(mode <= 1, || format!("cache mode {mode}"))?;
                    check_both_vrings(&mut client)
                }
                Err(Error::Closed) => Ok(()),
                Err(other) => Err(other.to_string()),
            }
        });
        rows.push(made.policy("virtio 1.3 §5.2.6.1"));
    }
    let switched = row("the cache mode switched under load", |daemon| {
        let mut client = open(daemon)?;
        for round in 0..50u8 {
            flood(client.queue(0), 8, 4096);
            context(client.frontend().set_config(32, &[round & 1]), "switch")?;
            let seen = crate::attack::settle(client.queue(0).ring(), 8);
            ensure(seen == 8, || format!("{seen} of 8"))?;
            fill_disk(&mut client)?;
        }
        check_both_vrings(&mut client)
    });
    let switched = switched.specified("virtio 1.3 §5.2.6.1");
    rows.push(switched.with_features(feature::CONFIG_WCE));
}

fn features(rows: &mut Vec<Row>) {
    let foreign: [(&str, u64); 8] = [
        ("bit 0", 1),
        ("SCSI, bit 7", 1 << 7),
        ("secure erase, bit 16", 1 << 16),
        ("zoned, bit 17", 1 << 17),
        ("an IOMMU, bit 33", 1 << 33),
        ("packed rings, bit 34", 1 << 34),
        ("ring reset, bit 40", 1 << 40),
        ("bit 63", 1 << 63),
    ];
    for (name, bit) in foreign {
        rows.push(row(
            format!("accepting {name}, which was not offered"),
            move |daemon| {
                let mut frontend = context(frontend(daemon), "connect")?;
                let offered = context(frontend.features(), "features")?;
                ensure(offered & bit == 0, || "it was offered".into())?;
                context(frontend.set_owner(), "owner")?;
                let protocol = context(frontend.protocol_features(), "protocol features")?;
                context(
                    frontend.set_protocol_features(protocol),
                    "protocol features",
                )?;
                refused(frontend.set_features(offered | bit))
            },
        ));
    }
    rows.push(row("a device without VERSION_1", |daemon| {
        let options = DeviceOptions {
            features: !feature::VERSION_1,
            ..small(2)
        };
        match daemon.try_open(&options) {
            Err(Error::Refused { .. } | Error::Closed) => Ok(()),
            Err(other) => Err(other.to_string()),
            Ok(mut client) => check_both_vrings(&mut client),
        }
    }));
    for (name, bits) in [
        ("bit 63", 1u64 << 63),
        ("bit 12, inflight", 1 << 12),
        ("bit 40", 1 << 40),
    ] {
        rows.push(row(
            format!("accepting protocol feature {name}, which was not offered"),
            move |daemon| {
                let mut frontend = context(frontend(daemon), "connect")?;
                context(frontend.features(), "features")?;
                let protocol = context(frontend.protocol_features(), "protocol features")?;
                if protocol & bits != 0 {
                    return Ok(());
                }
                frontend.set_reply_ack(true);
                refused(frontend.set_protocol_features(protocol | bits))
            },
        ));
    }
    rows.push(row(
        "features set again and again while requests run",
        |daemon| {
            let mut client = open(daemon)?;
            let features = client.features();
            for _ in 0..50 {
                flood(client.queue(0), 4, 4096);
                let _ = client.frontend().set_features(features);
                let seen = crate::attack::settle(client.queue(0).ring(), 4);
                ensure(seen == 4, || format!("{seen} of 4"))?;
            }
            check_both_vrings(&mut client)
        },
    ));
    rows.push(row("other features while vrings run", |daemon| {
        let mut client = open(daemon)?;
        let features = client.features() & !(feature::EVENT_IDX | feature::INDIRECT_DESC);
        let answer = client.frontend().set_features(features);
        match answer {
            Err(Error::Refused { .. }) => check_both_vrings(&mut client),
            Ok(()) | Err(Error::Closed) => Ok(()),
            Err(other) => Err(other.to_string()),
        }
    }));
    rows.push(row(
        "no feature message at all, then vring messages",
        |daemon| {
            let frontend = context(frontend(daemon), "connect")?;
            let _ = frontend.set_vring_num(0, 64);
            let _ = frontend.set_vring_base(0, 0);
            let _ = frontend.set_vring_kick(0, None);
            let _ = frontend.features();
            Ok(())
        },
    ));
    rows.push(row("the owner set twice, then reset", |daemon| {
        let mut client = open(daemon)?;
        let _ = client.frontend().set_owner();
        let _ = client.frontend().set_owner();
        if client.frontend().features().is_ok() {
            check_both_vrings(&mut client)?;
        }
        let _ = client.frontend().reset_owner();
        Ok(())
    }));
}
