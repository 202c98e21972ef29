//! Hostile drivers: memory that is rewritten while the daemon reads it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cleave_blk::spec::request_type as kind;
use cleave_client::{Client, RingLayout};
use cleave_tests::{Outcome, Random, Row, header, row, scale};

use crate::attack::{
    INDIRECT, Parts, check_other_vring, check_served_or_retired, context, entry, open_with,
    polling, restart, settle_within,
};

/// Time of check to time of use: another thread rewrites the memory that the daemon reads.
pub(crate) fn rewriting(rows: &mut Vec<Row>) {
    for (name, part) in [
        ("descriptors", 0),
        ("request headers", 1),
        ("indirect tables", 2),
        ("available entries", 3),
        ("all of it", 4),
    ] {
        rows.push(row(
            format!("{name} rewritten while requests run"),
            move |daemon| {
                let mut client = open_with(daemon, &polling())?;
                rewrite(&mut client, part)?;
                check_served_or_retired_after_noise(&mut client)
            },
        ));
    }
}

fn check_served_or_retired_after_noise(client: &mut Client) -> Outcome {
    if client.queue(0).err_signalled(Duration::ZERO) {
        return check_other_vring(client);
    }
    // Chains in flight cannot be reclaimed, so start from a fresh ring.
    context(client.frontend().vring_base(0), "stop")?;
    restart(client)?;
    check_served_or_retired(client)
}

fn rewrite(client: &mut Client, part: usize) -> Outcome {
    let queue = client.queue(0);
    let parts = Parts::of(queue);
    let layout = queue.ring().layout();
    let memory = queue.memory();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random::new(part as u64 + 1);
            while !stop.load(Ordering::Relaxed) {
                let which = if part == 4 {
                    random.below(4) as usize
                } else {
                    part
                };
                let good = random.below(2) == 0;
                scribble(&memory, parts, layout, which, good, &mut random);
            }
        });
        for _ in 0..scale(3000) {
            let queue = client.queue(0);
            queue.write_header(kind::IN, 0);
            let usual = parts.usual();
            let entries: Vec<u8> = usual.iter().flat_map(|entry| entry.to_bytes()).collect();
            memory.write(parts.table, &entries);
            if part == 2 {
                let head = entry(parts.table, 48, INDIRECT, 0);
                queue.ring().write_descriptor(0, head);
            } else {
                for (index, entry) in (0..).zip(usual) {
                    queue.ring().write_descriptor(index, entry);
                }
            }
            queue.ring().push(0);
            queue.ring().publish();
            queue.ring_kick();
            if settle_within(queue.ring(), 1, Duration::from_millis(20)) == 0 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    Ok(())
}

fn scribble(
    memory: &cleave_client::GuestMemory,
    parts: Parts,
    layout: RingLayout,
    which: usize,
    good: bool,
    random: &mut Random,
) {
    let usual = parts.usual();
    match which {
        0 | 2 => {
            let index = random.below(3);
            let mut entry = usual[index as usize];
            if !good {
                match random.below(4) {
                    0 => entry.addr = random.draw(),
                    1 => entry.len = random.draw() as u32,
                    2 => entry.flags = random.draw() as u16 & 7,
                    _ => entry.next = random.draw() as u16,
                }
            }
            let table = if which == 0 { layout.desc } else { parts.table };
            memory.write(table + 16 * index, &entry.to_bytes());
        }
        1 => {
            let sector = if good { 0 } else { random.draw() };
            let request = if good {
                kind::IN
            } else {
                random.below(16) as u32
            };
            // Never a write: other rows rely on the disk's first sectors.
            let request = if matches!(request, 1 | 11 | 13) {
                kind::IN
            } else {
                request
            };
            memory.write(parts.header, &header(request, sector));
        }
        _ => {
            let head = if good { 0 } else { random.below(64) as u16 };
            let slot = random.below(layout.size.into());
            memory.write(layout.avail + 4 + 2 * slot, &head.to_le_bytes());
        }
    }
}
