//! A guest whose driver makes its vrings larger than the frontend expects, as QEMU 10.0 lets it: the region for requests in
//! flight is asked for with 128 entries, or the frontend brings one with 128, and the vrings have 1024.
//!
//! The sequences are those of QEMU's own test of vhost-user-blk back-ends (`tests/qtest/vhost-user-blk-test.c`).

use std::path::PathBuf;
use std::time::Duration;

use cleave_blk::spec::{feature, request_type as kind, status};
use cleave_client::message::{VringAddr, protocol};
use cleave_client::{Buffer, Client, DeviceOptions, Error, Frontend, InflightKind, Queue};
use cleave_tests::{Case, Daemon, Scratch, TIMEOUT, exercise, http, range, wait_until};

const DISK: u64 = 64 << 20;
const SECTOR: u32 = 512;
/// A ring of this size does not fit a region for [`EXPECTED`].
const RING: u16 = 1024;
const EXPECTED: u16 = 128;
/// How long no call comes, where none may come.
const SILENCE: Duration = Duration::from_millis(50);

/// The daemon's own region is large enough; one of the frontend is not, and then nothing is recorded.
const REGIONS: [InflightKind; 2] = [InflightKind::For(EXPECTED), InflightKind::Own(EXPECTED)];

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        basic,
        indirect_descriptors,
        one_call_for_two_answers,
        a_vring_that_does_not_exist,
        a_disk_that_is_plugged_and_unplugged,
        eight_vrings,
        which_vrings_are_recorded_is_reported,
    ]
}

fn options(region: InflightKind, without: u64) -> DeviceOptions {
    let plain = DeviceOptions::default();
    DeviceOptions {
        queue_size: RING,
        region,
        features: !without,
        protocol_features: plain.protocol_features | protocol::INFLIGHT_SHMFD,
        data_bytes: 1 << 20,
        timeout: TIMEOUT,
        ..plain
    }
}

/// A disk in a file, and the control socket of its daemon.
fn serve(queues: u16) -> (Daemon, PathBuf) {
    let scratch = Scratch::in_memory();
    let disk = scratch.image("disk", DISK);
    let (disk, queues) = (disk.to_str().unwrap(), queues.to_string());
    Daemon::serve_with_control_in(scratch, &["--disk", disk, "--queues", &queues])
}

/// Where a request lies in the guest's memory: header, data and status byte one after the other.
struct Place {
    header: u64,
    data: u64,
    status: u64,
}

/// Writes a request with this data into memory. The status byte follows the data.
fn place(queue: &Queue, kind: u32, sector: u64, data: &[u8]) -> Place {
    let (header, _) = queue.data_area();
    let memory = queue.memory();
    let place = Place {
        header,
        data: header + 16,
        status: header + 16 + data.len() as u64,
    };
    memory.write(header, &cleave_client::header(kind, sector));
    memory.write(place.data, data);
    memory.write(place.status, &[0xff]);
    place
}

fn status_of(queue: &Queue, place: &Place) -> u8 {
    queue.memory().bytes(place.status, 1)[0]
}

fn sector_of(text: &[u8]) -> Vec<u8> {
    let mut sector = text.to_vec();
    sector.resize(SECTOR as usize, 0);
    sector
}

/// Runs a request of three descriptors and returns its status.
fn three(queue: &mut Queue, kind: u32, sector: u64, data: &[u8]) -> u8 {
    let place = place(queue, kind, sector, data);
    let len = data.len() as u32;
    let data = match kind == kind::IN {
        true => Buffer::writable(place.data, len),
        false => Buffer::readable(place.data, len),
    };
    let header = Buffer::readable(place.header, 16);
    let chain = [header, data, Buffer::writable(place.status, 1)];
    queue.chain(&chain).unwrap();
    status_of(queue, &place)
}

/// Reads a sector with three descriptors.
fn read(queue: &mut Queue, sector: u64) -> Vec<u8> {
    assert_eq!(
        three(queue, kind::IN, sector, &[0xee; SECTOR as usize]),
        status::OK
    );
    let (area, _) = queue.data_area();
    queue.memory().bytes(area + 16, SECTOR as usize)
}

/// What a discard and a write of zeroes must not ask for.
fn ranges_that_no_device_accepts(queue: &mut Queue, kind: u32) {
    let capacity = DISK / u64::from(SECTOR);
    let two = [range(0, 1, 0), range(1, 1, 0)].concat();
    for (what, data, expected) in [
        ("two ranges", two, status::UNSUPP),
        ("too long", range(0, u32::MAX, 0).to_vec(), status::IOERR),
        (
            "beyond the end",
            range(capacity + 1, 1, 0).to_vec(),
            status::IOERR,
        ),
        ("reserved flags", range(0, 1, !1).to_vec(), status::UNSUPP),
    ] {
        assert_eq!(three(queue, kind, 0, &data), expected, "{what}");
    }
}

fn basic() {
    let (daemon, _) = serve(1);
    for region in REGIONS {
        let without = feature::INDIRECT_DESC | feature::EVENT_IDX;
        let mut client = daemon.open(&options(region, without));
        assert_eq!(client.config().capacity_bytes(), DISK);
        let features = client.features();
        let queue = client.queue(0);
        let text = sector_of(b"TEST");
        assert_eq!(three(queue, kind::OUT, 0, &text), status::OK);
        assert_eq!(read(queue, 0), text, "{region:?}");
        for (kind, feature) in [
            (kind::WRITE_ZEROES, feature::WRITE_ZEROES),
            (kind::DISCARD, feature::DISCARD),
        ] {
            assert_ne!(features & feature, 0, "a file offers both");
            assert_eq!(three(queue, kind, 0, &range(0, 1, 0)), status::OK);
            assert_eq!(read(queue, 0), sector_of(b""));
            ranges_that_no_device_accepts(queue, kind);
        }
        // Header and data in one descriptor, then data and status.
        let at = place(queue, kind::OUT, 1, &text);
        let chain = [
            Buffer::readable(at.header, 16 + SECTOR),
            Buffer::writable(at.status, 1),
        ];
        queue.chain(&chain).unwrap();
        assert_eq!(status_of(queue, &at), status::OK);
        let at = place(queue, kind::IN, 1, &[0; SECTOR as usize]);
        let chain = [
            Buffer::readable(at.header, 16),
            Buffer::writable(at.data, SECTOR + 1),
        ];
        queue.chain(&chain).unwrap();
        assert_eq!(status_of(queue, &at), status::OK);
        assert_eq!(queue.memory().bytes(at.data, SECTOR as usize), text);
    }
    daemon.finish();
}

fn indirect_descriptors() {
    let (daemon, _) = serve(1);
    for region in REGIONS {
        let mut client = daemon.open(&options(region, feature::EVENT_IDX));
        assert_ne!(client.features() & feature::INDIRECT_DESC, 0);
        let queue = client.queue(0);
        let text = sector_of(b"TEST");
        let (area, _) = queue.data_area();
        let table = area + 8192;
        let at = place(queue, kind::OUT, 0, &text);
        let chain = [
            Buffer::readable(at.header, 16 + SECTOR),
            Buffer::writable(at.status, 1),
        ];
        queue.chain_through(table, &chain).unwrap();
        assert_eq!(status_of(queue, &at), status::OK, "{region:?}");
        let at = place(queue, kind::IN, 0, &[0; SECTOR as usize]);
        let chain = [
            Buffer::readable(at.header, 16),
            Buffer::writable(at.data, SECTOR + 1),
        ];
        queue.chain_through(table, &chain).unwrap();
        assert_eq!(status_of(queue, &at), status::OK, "{region:?}");
        assert_eq!(queue.memory().bytes(at.data, SECTOR as usize), text);
    }
    daemon.finish();
}

/// Makes a write or a read available, whose parts lie at a distance from those of others.
fn submit(queue: &mut Queue, kind: u32, nth: u64) -> (u16, u64) {
    let (area, _) = queue.data_area();
    let header = area + nth * 4096;
    let (data, status) = (header + 16, header + 16 + u64::from(SECTOR));
    let memory = queue.memory();
    memory.write(header, &cleave_client::header(kind, 1));
    memory.write(status, &[0xff]);
    let data = match kind == kind::IN {
        true => Buffer::writable(data, SECTOR),
        false => Buffer::readable(data, SECTOR),
    };
    let chain = [
        Buffer::readable(header, 16),
        data,
        Buffer::writable(status, 1),
    ];
    let head = queue.ring().add(&chain).unwrap();
    queue.ring().publish();
    queue.ring_kick();
    (head, status)
}

/// Notifications by index (EVENT_IDX): the driver asks for one after the third answer, and gets none before.
fn one_call_for_two_answers() {
    let (daemon, _) = serve(1);
    for region in REGIONS {
        let mut client = daemon.open(&options(region, feature::INDIRECT_DESC));
        assert_ne!(client.features() & feature::EVENT_IDX, 0);
        let queue = client.queue(0);
        let memory = queue.memory();
        let used_event = queue.ring().layout().avail + 4 + 2 * u64::from(RING);
        assert!(queue.called(TIMEOUT), "once when the vring starts");
        memory.write(used_event, &0u16.to_le_bytes());
        submit(queue, kind::OUT, 0);
        assert!(queue.called(TIMEOUT), "{region:?}");
        assert!(queue.ring().reap().is_some());
        memory.write(used_event, &2u16.to_le_bytes());
        let (second, status) = submit(queue, kind::OUT, 1);
        assert!(wait_until(|| memory.bytes(status, 1) == [status::OK]));
        assert!(!queue.called(SILENCE), "after the second of three");
        let (third, status) = submit(queue, kind::IN, 2);
        assert!(queue.called(TIMEOUT), "after the third");
        assert_eq!(memory.bytes(status, 1), [status::OK]);
        let heads = [queue.ring().reap(), queue.ring().reap()].map(|used| used.unwrap().head);
        assert_eq!(heads, [u32::from(second), u32::from(third)]);
    }
    daemon.finish();
}

/// A driver without VIRTIO_BLK_F_MQ sets up a vring that the device does not have.
fn a_vring_that_does_not_exist() {
    let (daemon, _) = serve(1);
    for region in REGIONS {
        let mut client = daemon.open(&options(region, feature::MQ));
        let (frontend, _) = client.parts();
        for index in [1, 2, 255] {
            let addr = VringAddr {
                index,
                flags: 0,
                desc: 0x1000,
                used: 0x2000,
                avail: 0x3000,
                log: 0,
            };
            assert!(matches!(
                frontend.set_vring_num(index, 1024),
                Err(Error::Refused { .. })
            ));
            assert!(matches!(
                frontend.set_vring_addr(addr),
                Err(Error::Refused { .. })
            ));
        }
        exercise(&mut client).unwrap();
    }
    daemon.finish();
}

/// Another disk is plugged, looked at, and unplugged while this one is in use.
fn a_disk_that_is_plugged_and_unplugged() {
    let ((first, _), (second, _)) = (serve(1), serve(1));
    for region in REGIONS {
        let mut client = first.open(&options(region, 0));
        exercise(&mut client).unwrap();
        for _ in 0..3 {
            let frontend = Frontend::connect(second.socket(), TIMEOUT).unwrap();
            let memory = client.memory().clone();
            let plugged = Client::handshake(frontend, memory, &options(region, 0)).unwrap();
            assert_eq!(plugged.config().capacity_bytes(), DISK);
            drop(plugged);
            exercise(&mut client).unwrap();
        }
        exercise(&mut second.open(&options(region, 0))).unwrap();
    }
    first.finish();
    second.finish();
}

fn eight_vrings() {
    let (daemon, _) = serve(8);
    for region in REGIONS {
        let eight = DeviceOptions {
            queues: 8,
            ..options(region, 0)
        };
        let mut client = daemon.open(&eight);
        assert_ne!(client.features() & feature::MQ, 0);
        assert_eq!(client.config().num_queues, 8);
        exercise(&mut client).unwrap();
        drop(client);
        // A driver that takes one of the vrings and not the feature.
        exercise(&mut daemon.open(&options(region, feature::MQ))).unwrap();
    }
    daemon.finish();
}

fn which_vrings_are_recorded_is_reported() {
    let (daemon, control) = serve(2);
    let both = |region| DeviceOptions {
        queues: 2,
        ..options(region, 0)
    };
    let rows = [
        (InflightKind::Fitting, [true; 2]),
        (InflightKind::For(EXPECTED), [true; 2]),
        (InflightKind::Own(EXPECTED), [false; 2]),
    ];
    for (region, expected) in rows {
        let mut client = daemon.open(&both(region));
        exercise(&mut client).unwrap();
        let disks = http::get(&control, "/v1/disks");
        let id = disks[0]["id"].as_str().unwrap();
        let report = http::get(&control, &format!("/v1/disks/{id}"));
        let vrings = report["session"]["vrings"].as_array().unwrap();
        let found: Vec<bool> = vrings
            .iter()
            .map(|vring| vring["recovery"].as_bool().unwrap())
            .collect();
        assert_eq!(found, expected, "{region:?}");
        let metrics = http::fetch(&control, "GET", "/metrics", "").body;
        let count = expected.iter().filter(|recorded| !**recorded).count();
        let sample = format!("}} {count}");
        let line = metrics
            .lines()
            .find(|line| line.starts_with("cleave_vrings_without_recovery{"));
        assert!(line.unwrap().ends_with(&sample), "{line:?}");
    }
    assert!(daemon.log_has("queue-size=1024"), "{}", daemon.log());
    let log = daemon.log();
    let warnings = log.matches("is served without crash recovery").count();
    assert_eq!(warnings, 1, "one for both vrings: {log}");
    assert!(
        log.contains("1024 entries large") && log.contains("has room for 128"),
        "{log}"
    );
    daemon.finish();
}
