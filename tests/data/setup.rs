//! Every way of setting a device up: features, vrings, eventfds and pipes.

use std::time::{Duration, Instant};

use cleave_blk::spec::{feature, request_type as kind};
use cleave_client::{Buffer, DeviceOptions, MemoryMessages, Notifier, ReapWait, Stop, Workload};
use cleave_tests::{
    Case, Daemon, exercise, exercise_queue, header, range, scale, small, wait_until,
};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        every_way_of_setting_up,
        a_full_call_pipe_does_not_block_other_vrings,
        the_largest_ring,
        one_partial_start_as_firmware_does_it,
    ]
}

fn every_way_of_setting_up() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    let base = small(2);
    let without = |bits: u64| DeviceOptions {
        features: !bits,
        ..base.clone()
    };
    let table = [
        ("all", base.clone()),
        ("no EVENT_IDX", without(feature::EVENT_IDX)),
        ("no INDIRECT", without(feature::INDIRECT_DESC)),
        (
            "none of EVENT_IDX, INDIRECT, MQ",
            without(feature::EVENT_IDX | feature::INDIRECT_DESC | feature::MQ),
        ),
        (
            "VERSION_1 alone",
            DeviceOptions {
                features: feature::VERSION_1 | feature::VHOST_USER_PROTOCOL,
                ..base.clone()
            },
        ),
        (
            "without bit 30 vrings start enabled",
            without(feature::VHOST_USER_PROTOCOL),
        ),
        (
            "no REPLY_ACK",
            DeviceOptions {
                protocol_features: base.protocol_features & !8,
                ..base.clone()
            },
        ),
        (
            "no protocol feature",
            DeviceOptions {
                protocol_features: 0,
                ..base.clone()
            },
        ),
        (
            "memory by slots",
            DeviceOptions {
                table: MemoryMessages::Slots,
                ..base.clone()
            },
        ),
        (
            "features first",
            DeviceOptions {
                features_first: true,
                ..base.clone()
            },
        ),
        (
            "blocking eventfds",
            DeviceOptions {
                kick: Notifier::Blocking,
                call: Notifier::Blocking,
                ..base.clone()
            },
        ),
        (
            "calls through a pipe",
            DeviceOptions {
                call: Notifier::Pipe,
                ..base.clone()
            },
        ),
        (
            "no call descriptor",
            DeviceOptions {
                call: Notifier::Absent,
                wait: ReapWait::Poll,
                ..base.clone()
            },
        ),
        (
            "no kick descriptor",
            DeviceOptions {
                kick: Notifier::Absent,
                ..base.clone()
            },
        ),
        (
            "rings of 4",
            DeviceOptions {
                queue_size: 4,
                ..base.clone()
            },
        ),
        (
            "rings of 1024",
            DeviceOptions {
                queue_size: 1024,
                ..base.clone()
            },
        ),
        (
            "from position 65530",
            DeviceOptions {
                base: 65530,
                ..base.clone()
            },
        ),
        (
            "no vring at all",
            DeviceOptions {
                queues: 0,
                ..base.clone()
            },
        ),
    ];
    for (name, options) in table {
        let began = Instant::now();
        let mut client = daemon.open(&options);
        if options.protocol_features & 0x200 == 0 {
            // Without CONFIG the driver does not know the size, but it still reads and writes.
            client.queue(0).write(8192, &[3; 4096]).unwrap();
            let mut back = [0; 4096];
            client.queue(1).read(8192, &mut back).unwrap();
            assert!(back == [3; 4096], "{name}");
            continue;
        }
        for _ in 0..40 {
            exercise(&mut client).unwrap_or_else(|what| panic!("{name}: {what}"));
        }
        println!("{name} ... ok ({} ms)", began.elapsed().as_millis());
    }
    daemon.finish();
}

fn the_largest_ring() {
    let daemon = Daemon::serve(&["--disk", "null:64M", "--queue-size", "32768"]);
    let options = DeviceOptions {
        queue_size: 32768,
        data_bytes: 64 << 20,
        ..small(1)
    };
    let mut client = daemon.open(&options);
    let workload = Workload {
        stop: Stop::Requests(scale(60_000) as u64),
        ..Workload::reads(512, 10_000, 32 << 20, Duration::ZERO)
    };
    assert_eq!(client.queue(0).run(&workload, |_| ()).unwrap().failed, 0);
    drop(client);
    daemon.finish();
}

fn one_partial_start_as_firmware_does_it() {
    let daemon = Daemon::serve(&["--disk", "ram:64M", "--queues", "8"]);
    let mut client = daemon.open(&small(1));
    exercise(&mut client).unwrap();
    // The operating system starts the remaining vrings later.
    let all = range(0, 1, 0);
    assert_eq!(all.len(), 16);
    for index in 1..8 {
        let mut queue = client
            .start_queue(
                index,
                &DeviceOptions {
                    data_bytes: 64 << 10,
                    queue_size: 16,
                    ..small(1)
                },
            )
            .unwrap();
        queue
            .write(u64::from(index) * 4096, &[index as u8; 4096])
            .unwrap();
    }
    exercise(&mut client).unwrap();
    drop(client);
    daemon.finish();
}

/// User-mode Linux uses a pipe for calls. A full pipe must not block the worker, which serves other vrings too.
fn a_full_call_pipe_does_not_block_other_vrings() {
    let daemon = Daemon::serve(&["--disk", "ram:16M", "--workers", "1"]);
    let mut client = daemon.open(&DeviceOptions {
        features: !feature::EVENT_IDX,
        call: Notifier::Pipe,
        ..small(2)
    });
    let queue = client.queue(0);
    let call = queue.call_descriptor().unwrap();
    rustix::pipe::fcntl_setpipe_size(&call, 4096).unwrap();
    // The call for the vring's start may be in the pipe already.
    let flags = rustix::fs::fcntl_getfl(&call).unwrap();
    rustix::fs::fcntl_setfl(&call, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&call, &[0]).is_ok() {}
    rustix::fs::fcntl_setfl(&call, flags).unwrap();
    let (header_at, _) = queue.data_area();
    queue.memory().write(header_at, &header(kind::FLUSH, 0));
    let request = [
        Buffer::readable(header_at, 16),
        Buffer::writable(header_at + 16, 1),
    ];
    for _ in 0..20 {
        // The ring asks for a call, and the pipe has no room for it.
        client.queue(0).ring().arm();
        client.queue(0).ring().add(&request).unwrap();
        client.queue(0).ring().publish();
        client.queue(0).ring_kick();
        assert!(
            wait_until(|| client.queue(0).ring().reap().is_some()),
            "no answer"
        );
        exercise_queue(&mut client, 1).unwrap();
    }
    drop(client);
    daemon.finish();
}
