//! The disk's limits also hold for requests that an earlier daemon left in flight. Their list is in memory of the frontend, which may
//! write it at any time.

use cleave_guest::Inflight;
use cleave_worker::{Stopped, Tuning};

use crate::driver::{Ask, DATA_MAX};
use crate::loss::{next_of, stop, take_all};
use crate::{Bench, FEATURES, inflight_region, kept_vring, quiet};

/// After a write the next one waits for a minute, longer than any delay of the machine.
const LIMITS: &str = "bps-write=8";

fn limit(bench: &Bench, limits: &str) {
    bench.device.tune(Tuning {
        limits: limits.parse().unwrap(),
        ..Tuning::clone(&bench.device.tuning())
    });
}

/// Offers writes, which a daemon takes that dies with them in flight.
fn leave_writes(bench: &mut Bench, region: &Inflight) -> usize {
    for sector in 0..4 {
        let ask = Ask::write(sector, vec![1; 512], DATA_MAX as u32, true);
        bench.driver.submit(&ask).unwrap();
    }
    take_all(&mut next_of(region, &bench.driver)).len()
}

fn start(bench: &mut Bench, region: &Inflight) {
    let started = bench.control.start(kept_vring(region));
    bench.carry_out(started).unwrap();
    for _ in 0..50 {
        bench.lap();
    }
}

fn answered(bench: &mut Bench) -> usize {
    bench.driver.collect(|_| 0).len()
}

#[test]
fn requests_that_an_earlier_daemon_left_wait_for_the_limits() {
    let region = inflight_region();
    let mut bench = Bench::new(quiet(1), FEATURES);
    assert_eq!(stop(&mut bench), Stopped::At(0));
    limit(&bench, LIMITS);
    let left = leave_writes(&mut bench, &region);
    start(&mut bench, &region);
    bench
        .driver
        .submit(&Ask::write(9, vec![2; 512], 512, true))
        .unwrap();
    for _ in 0..50 {
        bench.lap();
    }
    assert_eq!(answered(&mut bench), 1);
    limit(&bench, "none");
    for _ in 0..100 {
        bench.lap();
    }
    assert_eq!(answered(&mut bench), left);
    assert_eq!(bench.totals().writes, 5);
}

/// Control must not wait for the limits, and a guest that is stopped in order is to have its answers. But a frontend that writes the
/// list again for each start has nothing done past the limits by a stop.
#[test]
fn a_stop_does_what_was_left_past_the_limits_once() {
    let region = inflight_region();
    let mut bench = Bench::new(quiet(1), FEATURES);
    assert_eq!(stop(&mut bench), Stopped::At(0));
    limit(&bench, LIMITS);
    assert_eq!(leave_writes(&mut bench, &region), 4);
    start(&mut bench, &region);
    assert_eq!(answered(&mut bench), 1);
    assert_eq!(stop(&mut bench), Stopped::At(4));
    assert_eq!(answered(&mut bench), 3);
    for _ in 0..3 {
        leave_writes(&mut bench, &region);
        start(&mut bench, &region);
        assert_eq!(stop(&mut bench), Stopped::Left);
        assert_eq!(answered(&mut bench), 0);
    }
    // None of them is lost, and none is done twice.
    limit(&bench, "none");
    start(&mut bench, &region);
    assert_eq!((answered(&mut bench), bench.totals().writes), (12, 16));
}
