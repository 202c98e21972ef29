//! A vring that stops because its guest moves waits until its stalled requests have ended.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use cleave_blk::spec::status;
use cleave_guest::{Inflight, Memory, Vring};
use cleave_worker::{Pending, Stopped};

use crate::control::answer;
use crate::driver::{Driver, Part};
use crate::stall::*;
use crate::{Bench, FEATURES, event, inflight_region, is_rung, kept_vring};

/// How stalled requests end: the policy, what happens, and the statuses that the guest then sees.
type StalledEnd = (&'static str, fn(&Bench), [u8; 4]);

const STALLED_ENDS: [StalledEnd; 3] = [
    (
        "hold",
        |bench| {
            mend_disk(bench);
            bench.device.resume();
        },
        [status::OK; 4],
    ),
    (
        "hold",
        |bench| assert!(bench.device.fail().is_some()),
        [status::IOERR; 4],
    ),
    ("retry:60", mend_disk, [status::OK; 4]),
];

/// The only vring of a bench, which keeps its requests in a region or not, stops for a guest that moves with four of them stalled.
fn finishing(policy: &str, region: Option<&Inflight>) -> (Bench, Pending<Stopped>, Arc<OwnedFd>) {
    let mut bench = bench(23, policy);
    if let Some(region) = region {
        assert_eq!(bench.restart_from(region), Stopped::At(0));
    }
    break_disk(&bench, ALL, EIO);
    for byte in 1..=4 {
        bench.driver.submit(&write(byte.into(), byte)).unwrap();
    }
    until(&mut bench, |shown| {
        shown.is_some_and(|shown| shown.held + shown.retrying == 4)
    });
    let bell = Arc::new(event());
    let stopped = bench.control.finish(0, bell.clone());
    heard(&mut bench);
    (bench, stopped, bell)
}

/// A VMM that moves a guest may go on without a position, and then it guesses one.
#[test]
fn a_vring_of_a_guest_that_moves_stops_when_its_stalled_requests_have_ended() {
    for (policy, end, expected) in STALLED_ENDS {
        for region in [Some(inflight_region()), None] {
            let (mut bench, mut stopped, bell) = finishing(policy, region.as_ref());
            // The guest's next request is not taken.
            bench.driver.submit(&write(9, 9)).unwrap();
            settle(&mut bench);
            if policy == "hold" {
                // It costs no CPU time: each lap sleeps, without a timer.
                let idle_before = bench.store.lock().unwrap().idle_waits;
                settle_for(&mut bench, 10);
                let idle = bench.store.lock().unwrap().idle_waits;
                assert_eq!(idle - idle_before, 10);
            }
            stalls(&mut bench);
            stopped = stopped.wait_for(Duration::ZERO).unwrap_err();
            assert!(!is_rung(&bell) && bench.driver.collect(|_| 0).is_empty());
            watch_pushes(&bench);
            end(&bench);
            let answers = collect(&mut bench, 4);
            assert_eq!(statuses(&answers), expected, "{policy}");
            let stopped = answer(&mut bench, stopped);
            assert_eq!(stopped, Stopped::At(4), "{policy}");
            assert!(is_rung(&bell));
            assert_eq!((stalled(&bench), bench.driver.in_flight()), (None, 1));
            assert!(!pushed(&bench).contains(&9));
            let Some(region) = region else { continue };
            let mut next =
                Vring::new(bench.driver.memory(), Driver::layout(), FEATURES, 0).unwrap();
            next.keep(region.journal(0).unwrap());
            assert_eq!(next.again(), 0, "{policy}");
        }
    }
}

/// The session has to end meanwhile. The next one repeats them.
#[test]
fn a_vring_that_waits_for_its_stalled_requests_is_stopped_without_them() {
    for policy in ["hold", "retry:60"] {
        let region = inflight_region();
        let (mut bench, first, _) = finishing(policy, Some(&region));
        settle(&mut bench);
        let second = bench.control.stop(0);
        assert_eq!(answer(&mut bench, second), Stopped::Left, "{policy}");
        assert_eq!(first.wait(), None);
        assert_eq!((stalled(&bench), bench.driver.in_flight()), (None, 4));
        mend_disk(&bench);
        let started = bench.control.start(kept_vring(&region));
        bench.carry_out(started).unwrap();
        assert_eq!(statuses(&collect(&mut bench, 4)), [status::OK; 4]);
        let (bell, stopped) = (Arc::new(event()), bench.control.stop(0));
        assert_eq!(bench.carry_out(stopped), Stopped::At(4));
        let unknown = bench.control.finish(0, bell.clone());
        assert_eq!(bench.carry_out(unknown), Stopped::Unknown);
        assert!(is_rung(&bell), "the session sleeps until then");
    }
}

/// A ring that is away, or whose memory is lost, has no place for an answer. Nobody brings it back while the session waits.
#[test]
fn a_vring_that_cannot_answer_its_stalled_requests_is_not_waited_for() {
    let region = inflight_region();
    let (mut bench, stopped, _) = finishing("hold", Some(&region));
    settle(&mut bench);
    bench.driver.lose(Part::Requests);
    bench.device.resume();
    assert_eq!(answer(&mut bench, stopped), Stopped::Left);
    assert!(is_rung(&bench.alarm));
    let mut away = self::bench(24, "hold");
    hold_writes(&mut away, 3);
    let bound = away.control.bind(Memory::new(Vec::new()).unwrap());
    away.carry_out(bound);
    let stopped = away.control.finish(0, Arc::new(event()));
    assert_eq!(away.carry_out(stopped), Stopped::Left);
}

/// A guest that moves leaves nothing behind that the disk will be given later: the quiet ends.
#[test]
fn a_vring_of_a_guest_that_moves_waits_until_the_disk_is_not_quiesced() {
    let region = inflight_region();
    let (mut bench, ..) = finishing("hold", Some(&region));
    let stopped = bench.control.stop(0);
    assert_eq!(bench.carry_out(stopped), Stopped::Left);
    mend_disk(&bench);
    bench.device.quiesce();
    let started = bench.control.start(kept_vring(&region));
    bench.carry_out(started).unwrap();
    let stopped = bench.control.finish(0, Arc::new(event()));
    settle(&mut bench);
    let stopped = stopped.wait_for(Duration::ZERO).unwrap_err();
    bench.device.go_on();
    assert_eq!(statuses(&collect(&mut bench, 4)), [status::OK; 4]);
    assert_eq!(answer(&mut bench, stopped), Stopped::At(4));
}
