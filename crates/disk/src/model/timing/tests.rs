//! The drive in virtual time: the figures of study A, and each rule of the mechanism on its own.

use super::*;
use crate::model::ModelSpec;

const DISK_BYTES: u64 = 8 << 30;
const READ: DriveWork = DriveWork::Read;
const BUFFERED: DriveWork = DriveWork::Write { buffered: true };
const THROUGH: DriveWork = DriveWork::Write { buffered: false };

fn preset(text: &str) -> Drive {
    text.parse::<ModelSpec>().unwrap().drive()
}

/// Returns a drive with round numbers and no jitter, so that times can be calculated.
fn exact() -> Drive {
    Drive {
        channels: 4,
        page_bytes: 4096,
        read_ns: 1000,
        write_ns: 3000,
        command_ns: 10,
        window: 2,
        transfer_ns: 0,
        link_ns: 100,
        jitter_per_mille: 0,
        write_buffer_bytes: 0,
        seed: 1,
    }
}

fn pages(count: u64) -> u64 {
    count * 4096
}

/// Runs until the drive is idle. Returns the completed commands and their times.
fn run(timing: &mut Timing) -> Vec<(u32, u64)> {
    let mut ends = Vec::new();
    while let Some(at) = timing.next_ns() {
        timing.advance(at);
        while let Some(token) = timing.finished() {
            ends.push((token, at));
        }
    }
    ends
}

/// Commands per second and their mean latency, at random aligned offsets, with `depth` outstanding.
fn rate(drive: Drive, work: DriveWork, len: u64, depth: u32, commands: u32) -> (f64, f64) {
    let mut random = drive.seed ^ 0x5eed;
    let mut offset = || {
        random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(random) % (DISK_BYTES / len) * len
    };
    let mut timing = Timing::new(drive);
    let mut began = vec![0; depth as usize];
    for token in 0..depth {
        timing.submit(0, token, work, offset(), len);
    }
    let (mut ended, mut sum_ns) = (0, 0);
    let mut now = 0;
    while ended < commands {
        now = timing.next_ns().unwrap();
        timing.advance(now);
        while let Some(token) = timing.finished() {
            ended += 1;
            sum_ns += now - began[token as usize];
            began[token as usize] = now;
            timing.submit(now, token, work, offset(), len);
        }
    }
    let seconds = now as f64 / 1e9;
    (
        f64::from(ended) / seconds,
        sum_ns as f64 / f64::from(ended) / 1e3,
    )
}

#[test]
fn presets_are_within_10_percent_of_the_study() {
    const K: u64 = 1024;
    // Drive, bytes, depth, and either the latency in us or the rate (IOPS, or MB/s for large ones).
    let latencies = [("p3700", 80.0, 90.0), ("p320h", 42.3, 51.7)];
    let iops = [("p3700", 450e3), ("p320h", 750e3)];
    let throughput = [
        ("p3700", 512 * K, 1, 0.97e9),
        ("p3700", 8 * K, 64, 1.93e9),
        ("p320h", 512 * K, 1, 1.6e9),
        ("p320h", 8 * K, 64, 3.1e9),
    ];
    for seed in 0..5 {
        let drive = |name: &str| preset(&format!("{name},seed={seed}"));
        for (name, least, most) in latencies {
            let (_, us) = rate(drive(name), READ, 4 * K, 1, 5000);
            println!("{name} seed {seed}: 4 KiB depth 1 {us:.1} us");
            assert!((least..=most).contains(&us), "{name}: {us} us");
        }
        for (name, wanted) in iops {
            let (iops, _) = rate(drive(name), READ, 4 * K, 128, 50_000);
            println!("{name} seed {seed}: 4 KiB depth 128 {:.0} k", iops / 1e3);
            assert!(
                (0.9..=1.1).contains(&(iops / wanted)),
                "{name}: {iops} IOPS"
            );
        }
        for (name, len, depth, wanted) in throughput {
            let (commands, _) = rate(drive(name), READ, len, depth, 20_000);
            let bytes = commands * len as f64;
            println!(
                "{name} seed {seed}: {} KiB depth {depth} {:.0} MB/s",
                len / K,
                bytes / 1e6
            );
            assert!(
                (0.9..=1.1).contains(&(bytes / wanted)),
                "{name} {len}: {bytes}"
            );
        }
        let (alone, _) = rate(drive("p3700"), READ, 512 * K, 1, 2000);
        let (many, _) = rate(drive("p3700"), READ, 8 * K, 64, 20_000);
        assert!(
            alone * 512.0 * 1024.0 < 1e9 && many * 8.0 * 1024.0 < 2e9,
            "just under"
        );
    }
}

#[test]
fn flat_takes_time_in_proportion_to_size_at_any_depth() {
    let drive = || preset("flat");
    let bytes = |len: u64, depth| rate(drive(), READ, len, depth, 2000).0 * len as f64;
    let whole = bytes(512 << 10, 1);
    for (len, depth) in [
        (512 << 10, 64),
        (64 << 10, 8),
        (128 << 10, 64),
        (1 << 20, 1),
    ] {
        let share = bytes(len, depth) / whole;
        assert!((0.97..=1.04).contains(&share), "{len} at {depth}: {share}");
    }
}

#[test]
fn same_seed_same_times_and_another_seed_others() {
    let ends = |seed| {
        let mut timing = Timing::new(preset(&format!("p3700,seed={seed}")));
        for token in 0..200 {
            let work =
                [READ, BUFFERED, THROUGH, DriveWork::Sync, DriveWork::Map][token as usize % 5];
            let offset = u64::from(token) * 77 * 4096;
            timing.submit(u64::from(token) * 1000, token, work, offset, 65_536);
        }
        run(&mut timing)
    };
    assert_eq!(ends(5), ends(5));
    assert_ne!(ends(5), ends(6));
    assert_eq!(ends(5).len(), 200);
}

#[test]
fn the_number_of_advances_changes_nothing() {
    let ends = |step: u64| {
        let mut timing = Timing::new(preset("p320h,write_buffer=128K"));
        for token in 0..100 {
            let work = [READ, BUFFERED, DriveWork::Sync][token as usize % 3];
            timing.submit(
                u64::from(token) * 500,
                token,
                work,
                u64::from(token) << 20,
                50_000,
            );
        }
        let mut order = Vec::new();
        for now in (0..100_000_000).step_by(step as usize) {
            timing.advance(now);
            order.extend(std::iter::from_fn(|| timing.finished()));
        }
        order
    };
    assert_eq!(ends(1_000), ends(50_000_000));
    assert_eq!(ends(1_000).len(), 100);
}

#[test]
fn window_bounds_the_pages_of_one_command() {
    // 10 to begin, three rounds of two pages, and the link for the last. Both pages of a pair reach the link
    // at the same time, so the second waits for the first.
    let mut timing = Timing::new(exact());
    timing.submit(0, 1, READ, 0, pages(6));
    assert_eq!(run(&mut timing), [(1, 10 + 3 * 1000 + 2 * 100)]);
    let mut timing = Timing::new(Drive {
        window: 4,
        ..exact()
    });
    timing.submit(0, 1, READ, 0, pages(4));
    assert_eq!(run(&mut timing), [(1, 10 + 1000 + 4 * 100)]);
}

#[test]
fn commands_on_one_channel_wait_and_on_others_do_not() {
    let mut timing = Timing::new(exact());
    timing.submit(0, 1, READ, 0, 4096);
    timing.submit(0, 2, READ, 0, 512);
    timing.submit(0, 3, READ, pages(1), 4096);
    assert_eq!(run(&mut timing), [(1, 1110), (3, 1210), (2, 2110)]);
}

#[test]
fn a_range_that_touches_two_pages_takes_two() {
    let mut timing = Timing::new(Drive {
        channels: 1,
        link_ns: 0,
        ..exact()
    });
    timing.submit(0, 1, READ, 4096 - 512, 1024);
    assert_eq!(run(&mut timing), [(1, 2010)]);
}

#[test]
fn commands_finish_in_the_order_of_their_ends() {
    let mut timing = Timing::new(exact());
    timing.submit(0, 1, READ, 0, pages(16));
    timing.submit(0, 2, DriveWork::Map, 0, pages(1 << 20));
    timing.submit(0, 3, READ, pages(3), 4096);
    timing.submit(0, 4, THROUGH, pages(2), 4096);
    let ends = run(&mut timing);
    let order: Vec<_> = ends.iter().map(|(token, _)| *token).collect();
    assert_eq!(order, [2, 3, 4, 1]);
    assert!(ends.is_sorted_by_key(|(_, at)| *at));
    assert_eq!(ends[0], (2, 10), "a map update moves no page");
}

#[test]
fn a_write_through_crosses_the_link_and_reaches_the_channels() {
    let mut timing = Timing::new(exact());
    timing.submit(0, 1, THROUGH, 0, pages(2));
    assert_eq!(run(&mut timing), [(1, 10 + 2 * 100 + 3000)]);
}

#[test]
fn a_buffered_write_ends_at_the_link_while_there_is_room() {
    let buffer = Drive {
        write_buffer_bytes: pages(4),
        ..exact()
    };
    let mut timing = Timing::new(buffer.clone());
    for token in 0..3 {
        timing.submit(0, token, BUFFERED, pages(4) * u64::from(token), pages(2));
    }
    let ends = run(&mut timing);
    // The third waits until the first's two pages have left the buffer.
    assert_eq!(ends, [(0, 210), (1, 410), (2, 10 + 3000 + 200)]);
    // A write that can never fit, and any write to a drive without a buffer, goes to the channels.
    for (drive, len) in [(buffer, pages(5)), (exact(), pages(2))] {
        let mut timing = Timing::new(drive);
        timing.submit(0, 1, BUFFERED, 0, len);
        assert!(run(&mut timing)[0].1 > 3000);
    }
}

#[test]
fn a_sync_waits_for_the_writes_before_it_and_for_no_other() {
    let drive = Drive {
        write_buffer_bytes: pages(64),
        window: 64,
        ..exact()
    };
    let mut timing = Timing::new(drive);
    timing.submit(0, 1, BUFFERED, 0, pages(1));
    timing.submit(500, 2, DriveWork::Sync, 0, 0);
    timing.submit(600, 3, BUFFERED, pages(1), pages(32));
    timing.submit(700, 4, DriveWork::Sync, 0, 0);
    let ends = run(&mut timing);
    let at = |token| ends.iter().find(|end| end.0 == token).unwrap().1;
    assert_eq!(
        at(2),
        3010,
        "after the first write's page, while the second write still drains"
    );
    assert_eq!(
        at(4),
        3010 + 8 * 3000,
        "32 pages on 4 channels, one of them busy"
    );
    // Without writes to wait for, it ends at once.
    timing.submit(1_000_000, 5, DriveWork::Sync, 0, 0);
    assert_eq!(run(&mut timing), [(5, 1_000_010)]);
}

#[test]
fn a_sync_waits_for_a_write_that_the_buffer_has_no_room_for() {
    let mut timing = Timing::new(Drive {
        write_buffer_bytes: pages(1),
        ..exact()
    });
    timing.submit(0, 1, BUFFERED, 0, pages(1));
    timing.submit(0, 2, BUFFERED, pages(1), pages(1));
    timing.submit(0, 3, DriveWork::Sync, 0, 0);
    assert_eq!(run(&mut timing), [(1, 110), (2, 3110), (3, 6010)]);
}

#[test]
fn a_change_takes_effect_from_the_next_page_and_keeps_the_geometry() {
    let mut timing = Timing::new(exact());
    timing.submit(0, 1, READ, 0, 4096);
    timing.advance(500);
    let slow = Drive {
        read_ns: 9000,
        channels: 1,
        page_bytes: 512,
        seed: 9,
        ..exact()
    };
    timing.change(slow);
    timing.submit(500, 2, READ, pages(1), 4096);
    assert_eq!(run(&mut timing), [(1, 1110), (2, 9610)]);
    assert_eq!(
        (timing.drive().channels, timing.drive().page_bytes),
        (4, 4096)
    );
}

#[test]
fn time_does_not_run_backwards() {
    let mut timing = Timing::new(exact());
    timing.submit(5000, 1, READ, 0, 4096);
    timing.submit(100, 2, READ, pages(1), 4096);
    assert_eq!(run(&mut timing), [(1, 6110), (2, 6210)]);
}

#[test]
fn no_command_finishes_before_its_floor() {
    for (name, seed) in [
        ("p3700", 1),
        ("p320h,write_buffer=64K", 2),
        ("flat,jitter=30%", 3),
    ] {
        let mut timing = Timing::new(preset(&format!("{name},seed={seed}")));
        let (mut floors, mut numbers) = (vec![0; 400], vec![None; 400]);
        let mut now = 0;
        let mut close = 0;
        for token in 0..400_u32 {
            now += mix(u64::from(token) + seed) % 40_000;
            let draw = mix(u64::from(token) * 3 + seed);
            let work = [READ, READ, BUFFERED, THROUGH, DriveWork::Sync][draw as usize % 5];
            timing.advance(now);
            while let Some(token) = timing.finished() {
                assert!(floors[token as usize] <= now);
                numbers[token as usize] = None;
            }
            let id = CommandId { owner: 0, token };
            let number = timing.submit_for(now, id, work, draw >> 30, 1 << (9 + draw % 10));
            numbers[token as usize] = Some(number);
            let until = if token == 399 { u64::MAX } else { now + 20_000 };
            while let Some(at) = timing.next_ns().filter(|at| *at <= until) {
                for (floor, number) in floors.iter_mut().zip(&numbers) {
                    let seen = number.and_then(|number| timing.floor_ns(number));
                    *floor = seen.unwrap_or(0).max(*floor);
                }
                timing.advance(at);
                now = now.max(at);
                while let Some(token) = timing.finished() {
                    let floor = floors[token as usize];
                    assert!(
                        floor <= at,
                        "{name:?}: {token} ended at {at}, floor {floor}"
                    );
                    close += u32::from(at - floor < 10_000);
                    numbers[token as usize] = None;
                }
            }
        }
        assert!(numbers.iter().all(Option::is_none));
        println!("{name}: {close} of 400 floors were close in the end");
        assert!(
            close > 200,
            "the floors are too far from the ends to be useful"
        );
    }
}

#[test]
fn numbers_of_ended_commands_are_reused() {
    let mut timing = Timing::new(preset("p3700,write_buffer=1M"));
    for round in 0..1000_u64 {
        for token in 0..8 {
            let work = if token % 2 == 0 { READ } else { BUFFERED };
            timing.submit(round * 10_000_000, token, work, round << 16, 65_536);
        }
        assert_eq!(run(&mut timing).len(), 8);
    }
    assert!(timing.commands.len() <= 8, "{}", timing.commands.len());
    assert_eq!((timing.buffered_bytes, timing.writes), (0, 0));
}

#[test]
fn extremes_end() {
    let worst = preset(
        "custom,channels=1,read_us=100000,write_us=100000,mbps_per_channel=1,page=1M,window=65536,\
         link_mbps=1,command_us=100000,jitter=100%",
    );
    for drive in [
        worst.clone(),
        Drive {
            channels: 0,
            page_bytes: 0,
            window: 0,
            ..worst
        },
    ] {
        let mut timing = Timing::new(drive);
        timing.submit(u64::MAX, 1, READ, u64::MAX, 4096);
        timing.submit(u64::MAX, 2, BUFFERED, 0, 4096);
        timing.submit(0, 3, DriveWork::Sync, 0, 0);
        assert_eq!(run(&mut timing).len(), 3);
    }
}
