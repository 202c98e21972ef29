//! A disk whose server may still do what a killed daemon sent.

use std::time::{Duration, Instant};

use cleave_blk::spec::status;
use cleave_disk::{Disk, OpenOptions};
use cleave_tests::Scratch;
use cleave_tests::nbd::{Export, NbdServer};
use cleave_worker::{Split, Stopped, Tuning};

use crate::driver::Ask;
use crate::{Bench, DISK_BYTES, FEATURES, device_of, inflight_region, quiet};

const EIO: i32 = 5;
const FENCE: Duration = Duration::from_secs(1);

/// What is known of an earlier daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Earlier {
    /// The lock of the socket says that it died.
    Died,
    /// The frontend brings requests that it left in flight.
    LeftRequests,
    Nothing,
}

/// A snapshot that is taken meanwhile would not have the requests of the earlier daemon, and the disk would.
#[test]
fn a_disk_is_still_only_when_what_an_earlier_daemon_sent_has_ended() {
    for earlier in [Earlier::Died, Earlier::LeftRequests, Earlier::Nothing] {
        let scratch = Scratch::new();
        let server = NbdServer::start(&scratch.join("nbd"), Export::able(DISK_BYTES as u64));
        let opened = Instant::now();
        let spec = server.uri("&fence=1").parse().unwrap();
        let mut disk = Disk::open(&spec, &OpenOptions::default()).unwrap();
        if earlier == Earlier::Died {
            disk.mark_predecessor_died();
        }
        let mut bench = Bench::over(device_of(disk, Split::Off), quiet(1), FEATURES);
        match earlier {
            Earlier::LeftRequests => leave_request(&mut bench),
            _ => write(&mut bench),
        }
        bench.device.quiesce();
        while !bench.device.is_still() {
            bench.lap();
            assert!(opened.elapsed() < Duration::from_secs(60), "{earlier:?}");
        }
        assert_eq!(bench.device.unsettled_for(), None);
        let is_settled = opened.elapsed() >= FENCE;
        assert!(is_settled || earlier == Earlier::Nothing, "{earlier:?}");
        // The guest's request goes to the disk after the quiet.
        bench.device.go_on();
        let answer = loop {
            bench.lap();
            if let Some(answer) = bench.driver.collect(|_| 0).pop() {
                break answer;
            }
            assert!(opened.elapsed() < Duration::from_secs(60), "{earlier:?}");
        };
        assert_eq!(answer.status, status::OK, "{earlier:?}");
    }
}

fn write(bench: &mut Bench) {
    let ask = Ask::write(1, vec![1; 512], 512, true);
    bench.driver.submit(&ask).unwrap();
}

/// Has the guest's only vring start with a request that is in flight already.
fn leave_request(bench: &mut Bench) {
    let region = inflight_region();
    bench.restart_from(&region);
    bench.device.tune(Tuning {
        on_error: "hold".parse().unwrap(),
        ..Tuning::clone(&bench.device.tuning())
    });
    bench.store.lock().unwrap().failing = Some((0..DISK_BYTES, EIO));
    write(bench);
    for _ in 0..60 {
        bench.lap();
    }
    assert_eq!(bench.restart_from(&region), Stopped::Left);
    bench.store.lock().unwrap().failing = None;
}
