//! What librbd needs for a request is bounded, whatever a guest asks for.

use cleave_blk::spec::request_type;
use cleave_client::{Buffer, DeviceOptions};
use cleave_tests::ceph::CEPH;
use cleave_tests::{Case, header, small};

use crate::daemons::{serve, with_cluster};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        memory_that_a_guest_names_often_does_not_make_the_daemon_grow: CEPH,
        a_large_request_gets_its_turn_among_many_smaller_ones: CEPH,
        writes_to_many_objects_of_a_clone_do_not_make_the_daemon_grow: CEPH,
        discards_of_many_small_objects_do_not_make_the_daemon_grow: CEPH,
    ]
}

/// librbd has a buffer for every byte that is under way, so what a guest may ask for at once has to be bounded.
fn memory_that_a_guest_names_often_does_not_make_the_daemon_grow() {
    const SEGMENT_BYTES: u32 = 2 << 20;
    const SEGMENTS: usize = 16;
    const GROWTH_MAX_KIB: u64 = 384 << 10;
    with_cluster(|ceph| {
        let (daemon, _) = serve(&ceph.image("named", 32), &["--split", "off"]);
        let mut client = daemon.open(&DeviceOptions {
            queue_size: 1024,
            ..small(1)
        });
        let sectors = 0..(SEGMENTS as u64 * u64::from(SEGMENT_BYTES)) / 512;
        let image: Vec<u8> = sectors
            .flat_map(|sector| sector.to_le_bytes().repeat(64))
            .collect();
        client.queue(0).write(0, &image).unwrap();
        let before = daemon.rss_kib();
        let queue = client.queue(0);
        queue.write_header(request_type::IN, 0);
        let ((header, status), (data, _)) = (queue.control(), queue.data_area());
        let mut chain = vec![Buffer::readable(header, 16)];
        chain.extend([Buffer::writable(data, SEGMENT_BYTES); SEGMENTS]);
        chain.push(Buffer::writable(status, 1));
        let (mut most, mut chains) = (before, 0);
        while queue.ring().add(&chain).is_some() {
            chains += 1;
        }
        assert!(chains > 40, "nearly 2 GiB at once");
        queue.ring().publish();
        queue.ring_kick();
        for _ in 0..chains {
            let used = queue.wait_used().unwrap();
            assert_eq!(used.len, SEGMENTS as u32 * SEGMENT_BYTES + 1);
            most = most.max(daemon.rss_kib());
        }
        assert_eq!(queue.memory().bytes(status, 1), [0]);
        // All segments are the same memory: whichever came last there, each sector is in its place.
        let last = queue.memory().bytes(data, SEGMENT_BYTES as usize);
        for (at, bytes) in (0..).zip(last.chunks(512)) {
            let sector = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            assert_eq!(sector % u64::from(SEGMENT_BYTES / 512), at);
            assert_eq!(bytes, sector.to_le_bytes().repeat(64));
        }
        assert!(
            most <= before + GROWTH_MAX_KIB,
            "{before} KiB became {most}"
        );
        drop(client);
        daemon.finish();
    });
}

/// The bytes under way are bounded, and there are always small requests that fit where a large one does not.
fn a_large_request_gets_its_turn_among_many_smaller_ones() {
    const SMALL: usize = 300;
    const SMALL_BYTES: u32 = 256 << 10;
    with_cluster(|ceph| {
        let disk = ceph.image("turns", 64);
        let (daemon, _) = serve(&disk, &["--split", "off", "--queue-size", "1024"]);
        let mut client = daemon.open(&DeviceOptions {
            queue_size: 1024,
            data_bytes: 32 << 20,
            ..small(1)
        });
        // Reads of what was never written would be too fast.
        client.queue(0).write(0, &vec![7; 16 << 20]).unwrap();
        let queue = client.queue(0);
        queue.write_header(request_type::IN, 0);
        let ((header, status), (data, _)) = (queue.control(), queue.data_area());
        let read = |buffers: &[Buffer]| {
            let head = Buffer::readable(header, 16);
            let tail = Buffer::writable(status, 1);
            [&[head], buffers, &[tail]].concat()
        };
        let small = read(&[Buffer::writable(data, SMALL_BYTES)]);
        let large = read(&[Buffer::writable(data + (1 << 20), 2 << 20); 8]);
        for _ in 0..SMALL {
            queue.ring().add(&small).unwrap();
        }
        let large = queue.ring().add(&large).unwrap();
        queue.ring().publish();
        queue.ring_kick();
        let mut before = 0;
        while queue.wait_used().unwrap().head != u32::from(large) {
            before += 1;
            assert!(before < 10 * SMALL, "the large one never gets its turn");
            queue.ring().add(&small).unwrap();
            queue.ring().publish();
            queue.ring_kick();
        }
        for _ in 0..SMALL {
            queue.wait_used().unwrap();
        }
        drop(client);
        daemon.finish();
    });
}

/// librbd reads an object of the parent as a whole before the first write to it.
fn writes_to_many_objects_of_a_clone_do_not_make_the_daemon_grow() {
    const OBJECTS: u64 = 192;
    const OBJECT_BYTES: u64 = 4 << 20;
    const GROWTH_MAX_KIB: u64 = 640 << 10;
    with_cluster(|ceph| {
        let megabytes = (OBJECTS * OBJECT_BYTES) >> 20;
        ceph.image("parent", megabytes as u32);
        let size = format!("{megabytes}M");
        let fill = ["bench", "--io-type", "write", "--io-size", "4M"];
        ceph.rbd(&[&fill[..], &["--io-total", &size, "rbd/parent"]].concat());
        ceph.rbd(&["snap", "create", "rbd/parent@now"]);
        ceph.rbd(&["snap", "protect", "rbd/parent@now"]);
        ceph.rbd(&["clone", "rbd/parent@now", "rbd/clone"]);
        let (daemon, _) = serve(&ceph.disk("rbd/clone"), &["--queue-size", "1024"]);
        let mut client = daemon.open(&DeviceOptions {
            queue_size: 1024,
            ..small(1)
        });
        let before = daemon.rss_kib();
        let queue = client.queue(0);
        let memory = queue.memory();
        let ((_, status), (data, _)) = (queue.control(), queue.data_area());
        for object in 0..OBJECTS {
            let head = data + 4096 + object * 16;
            let sector = (object * OBJECT_BYTES + 4096) / 512;
            memory.write(head, &header(request_type::OUT, sector));
            let chain = [
                Buffer::readable(head, 16),
                Buffer::readable(data, 512),
                Buffer::writable(status, 1),
            ];
            queue.ring().add(&chain).unwrap();
        }
        queue.ring().publish();
        queue.ring_kick();
        let mut most = before;
        for _ in 0..OBJECTS {
            queue.wait_used().unwrap();
            most = most.max(daemon.rss_kib());
        }
        assert_eq!(memory.bytes(status, 1), [0]);
        assert!(
            most <= before + GROWTH_MAX_KIB,
            "{before} KiB became {most}"
        );
        drop(client);
        daemon.finish();
        ceph.rbd(&["rm", "rbd/clone"]);
        ceph.rbd(&["snap", "unprotect", "rbd/parent@now"]);
        ceph.rbd(&["snap", "purge", "rbd/parent"]);
        ceph.rbd(&["rm", "rbd/parent"]);
    });
}

/// librbd has memory for each object of a discard, and an image may have objects of 4 KiB.
fn discards_of_many_small_objects_do_not_make_the_daemon_grow() {
    const DISCARDS: usize = 16;
    const DISCARD_BYTES: u32 = 16 << 20;
    const GROWTH_MAX_KIB: u64 = 48 << 10;
    with_cluster(|ceph| {
        let size = ["create", "rbd/crumbs", "--size", "16M"];
        // Without an object map, librbd asks the cluster for each.
        let crumbs = [
            "--object-size",
            "4K",
            "--image-feature",
            "layering,exclusive-lock",
        ];
        ceph.rbd(&[&size[..], &crumbs].concat());
        let (daemon, _) = serve(&ceph.disk("rbd/crumbs"), &[]);
        let mut client = daemon.open(&small(1));
        // In the first object and in the last.
        let edges = [512, (16 << 20) - 4096];
        for at in edges {
            client.queue(0).write(at, &[1; 2048]).unwrap();
        }
        let before = daemon.rss_kib();
        let queue = client.queue(0);
        queue.write_header(request_type::DISCARD, 0);
        let ((header, status), (data, _)) = (queue.control(), queue.data_area());
        let mut range = 0_u64.to_le_bytes().to_vec();
        range.extend((DISCARD_BYTES / 512).to_le_bytes());
        range.extend([0; 4]);
        queue.memory().write(data, &range);
        let chain = [
            Buffer::readable(header, 16),
            Buffer::readable(data, 16),
            Buffer::writable(status, 1),
        ];
        for _ in 0..DISCARDS {
            assert!(queue.ring().add(&chain).is_some());
        }
        queue.ring().publish();
        queue.ring_kick();
        let mut most = before;
        for _ in 0..DISCARDS {
            queue.wait_used().unwrap();
            most = most.max(daemon.rss_kib());
        }
        assert_eq!(queue.memory().bytes(status, 1), [0]);
        for at in edges {
            let mut back = [1; 2048];
            queue.read(at, &mut back).unwrap();
            assert_eq!(back, [0; 2048]);
        }
        assert!(
            most <= before + GROWTH_MAX_KIB,
            "{before} KiB became {most}"
        );
        drop(client);
        daemon.finish();
    });
}
