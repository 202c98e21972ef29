//! A guest sees the same device on every kind of disk, so that it can go on with another one.

use cleave_blk::spec::{feature, request_type as kind};
use cleave_client::DriverRequest;
use cleave_tests::{
    Case, Daemon, LoopDevice, Requirement, Scratch, assert_face_v1, run_to_exit, small,
};

const DISK: u64 = 64 << 20;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        every_kind_of_disk_has_the_same_face,
        block_devices_have_the_face_of_a_file: Requirement::LoopDevices,
        a_stripe_has_it_too_and_serves_requests_of_any_length,
    ]
}

fn check(name: &str, args: &[&str]) {
    let daemon = Daemon::serve(args);
    assert_face_v1(&daemon, name);
    daemon.finish();
}

fn every_kind_of_disk_has_the_same_face() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let image = image.to_str().unwrap();
    let model = "model:custom,size=64M,channels=1,window=1,page=64K,read_us=20,jitter=0";
    let rows: [(&str, &[&str]); 7] = [
        ("file", &["--disk", image]),
        ("buffered file", &["--disk", image, "--direct", "off"]),
        ("without discard", &["--disk", image, "--discard", "off"]),
        ("ram", &["--disk", "ram:64M"]),
        ("null", &["--disk", "null:1G"]),
        ("model", &["--disk", model]),
        (
            "written out",
            &["--disk", image, "--face", "v1", "--block-size", "512"],
        ),
    ];
    for (name, args) in rows {
        check(name, args);
    }
}

fn block_devices_have_the_face_of_a_file() {
    for sector in ["512", "4096"] {
        let scratch = Scratch::new();
        let options = ["--sector-size", sector, "--direct-io=on"];
        let device = LoopDevice::attach_with(&scratch.image("disk", DISK), &options).unwrap();
        check(sector, &["--disk", device.path.to_str().unwrap()]);
    }
}

/// With the smallest chunk, 3 MiB are 768 of them and 9 MiB more than a request has ops.
fn a_stripe_has_it_too_and_serves_requests_of_any_length() {
    let scratch = Scratch::new();
    let legs = [0, 1, 2].map(|leg| scratch.image(&format!("leg{leg}"), DISK));
    let legs = legs.each_ref().map(|leg| leg.to_str().unwrap());
    let made = run_to_exit(&[&["stripe", "create", "--chunk", "4K"], &legs[..]].concat());
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let mut args = vec!["--stripe", "4K"];
    legs.iter().for_each(|leg| args.extend(["--disk", leg]));
    let daemon = Daemon::serve(&args);
    assert_face_v1(&daemon, "stripe");
    let mut options = small(1);
    options.data_bytes = 20 << 20;
    let mut client = daemon.open(&options);
    let queue = client.queue(0);
    let (memory, (addr, _)) = (queue.memory(), queue.data_area());
    for (offset, len) in [(512, 3 << 20), (1024, 9 << 20), (10 << 20, (9 << 20) + 512)] {
        let bytes: Vec<u8> = (0..len)
            .map(|at: usize| (at / 512 + at % 253) as u8)
            .collect();
        let long = |kind, writable| DriverRequest {
            kind,
            sector: offset / 512,
            data: (addr, len as u32),
            writable,
        };
        memory.write(addr, &bytes);
        let written = queue.execute(&long(kind::OUT, false)).unwrap();
        assert_eq!((written.status, written.used_bytes), (0, 1), "{len}");
        // Each leg holds what belongs there: short reads find it.
        let mut back = vec![0; len];
        queue.read(offset, &mut back).unwrap();
        assert!(back == bytes, "{len} bytes written at {offset}");
        memory.fill(addr, len, 0);
        let read = queue.execute(&long(kind::IN, true)).unwrap();
        assert_eq!((read.status, read.used_bytes), (0, len as u32 + 1), "{len}");
        assert!(
            memory.bytes(addr, len) == bytes,
            "{len} bytes read at {offset}"
        );
    }
    // A guest that began with an earlier version, and now goes on, has taken the feature of a largest segment.
    client.frontend().vring_base(0).unwrap();
    let taken = client.features() | feature::SIZE_MAX;
    client.frontend().set_features(taken).unwrap();
    drop(client);
    daemon.finish();
}
