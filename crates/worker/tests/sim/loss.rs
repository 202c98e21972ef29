//! Pages of guest memory that are not there. They read as zeroes, and the guest sees nothing of what is written to them.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

use cleave_guest::{Chain, Inflight, Memory, RegionSpec, Vring};
use cleave_sim::SimConfig;
use cleave_worker::{Split, Stopped, VringStart};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::batch::{Meddler, worker_with};
use crate::driver::{Ask, Driver, Part};
use crate::{Bench, DISK_BYTES, FEATURES, device, inflight_region, is_rung, kept_vring, quiet};

/// Serves the ring of a driver from the requests in flight that the region has.
pub(crate) fn next_of(region: &Inflight, driver: &Driver) -> Vring {
    let mut next = Vring::new(driver.memory(), Driver::layout(), FEATURES, 0).unwrap();
    next.keep(region.journal(0).unwrap());
    next
}

/// Takes all that the ring has, the requests in flight first.
pub(crate) fn take_all(vring: &mut Vring) -> Vec<u16> {
    let mut chain = Chain::new();
    std::iter::from_fn(|| vring.take(&mut chain).unwrap())
        .map(|taken| taken.head)
        .collect()
}

fn submit_reads(driver: &mut Driver, count: u64, indirect: bool) -> Vec<u16> {
    let reads = (0..count).map(|sector| Ask::read(sector, 512, 512, indirect));
    reads.map(|read| driver.submit(&read).unwrap()).collect()
}

/// Every entry of a ring that is not there names head 0, also if the guest has not offered that. The next connection would do
/// what lies in its descriptors, and miss a request in its place.
#[test]
fn a_head_that_the_guest_has_not_offered_is_not_left_in_flight() {
    for indirect in [false, true] {
        let region = inflight_region();
        let driver = Rc::new(RefCell::new(Driver::new()));
        let memory = driver.borrow().memory();
        let store = Meddler {
            ops: 64,
            on_the_spot: false,
            pushed: Rc::default(),
            meddle: Some(Box::new({
                let driver = driver.clone();
                move || driver.borrow().lose(Part::Rings)
            })),
            ended: Vec::new(),
        };
        let (mut worker, control) = worker_with(store, device(Split::Off), memory);
        let started = control.start(VringStart {
            call: None,
            ..kept_vring(&region)
        });
        worker.lap().unwrap();
        started.wait().unwrap().unwrap();
        let heads = submit_reads(&mut driver.borrow_mut(), 3, indirect);
        // Direct chains begin at the third descriptor.
        assert_eq!(heads.contains(&0), indirect);
        worker.lap().unwrap();
        let stopped = control.stop(0);
        worker.lap().unwrap();
        assert_eq!(stopped.wait().unwrap(), Stopped::Left);
        // The ring as the guest knows it.
        let mut whole = Driver::new();
        submit_reads(&mut whole, 3, indirect);
        let mut next = next_of(&region, &whole);
        assert_eq!(next.again(), 1, "{indirect}");
        assert_eq!(take_all(&mut next), heads);
    }
}

#[test]
fn the_requests_of_a_dead_daemon_stay_in_flight_if_memory_is_lost_before_they_are_done_again() {
    let region = inflight_region();
    let mut bench = Bench::new(quiet(1), FEATURES);
    assert_eq!(stop(&mut bench), Stopped::At(0));
    let heads = submit_reads(&mut bench.driver, 3, true);
    let mut dead = next_of(&region, &bench.driver);
    assert_eq!(take_all(&mut dead), heads);
    bench.driver.lose(Part::Requests);
    // It is stopped before it has taken any, so it takes them while it stops.
    let _started = bench.control.start(kept_vring(&region));
    are_left(&mut bench, &region, &heads);
}

/// Copies a part of the memory to a file of its own, and returns its region there.
fn copy(driver: &Driver, part: Part) -> RegionSpec {
    let file = File::from(memfd_create("copy", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(&driver.bytes(), 0).unwrap();
    RegionSpec {
        file,
        ..driver.region(part)
    }
}

/// A vring that keeps its requests in this region, on a slow disk.
fn slow_bench(region: &Inflight) -> Bench {
    let config = SimConfig {
        delay_max: 30,
        ..quiet(1)
    };
    let mut bench = Bench::new(config, FEATURES);
    assert_eq!(bench.restart_from(region), Stopped::At(0));
    bench
}

fn bind(bench: &mut Bench, parts: [RegionSpec; 2]) {
    let bound = bench.control.bind(Memory::new(parts.into()).unwrap());
    bench.carry_out(bound);
}

/// Takes all that was submitted, and answers none of it.
fn take(bench: &mut Bench, count: usize) {
    bench.store.lock().unwrap().pushed = Some(Vec::new());
    bench.lap();
    let pushed = bench.store.lock().unwrap().pushed.take().unwrap();
    assert_eq!(pushed.len(), count);
}

/// Stops the vring, and waits until all that it has taken is done.
pub(crate) fn stop(bench: &mut Bench) -> Stopped {
    let mut stopped = bench.control.stop(0);
    for _ in 0..100 {
        bench.lap();
        match stopped.wait_for(Duration::ZERO) {
            Ok(answer) => return answer.unwrap(),
            Err(again) => stopped = again,
        }
    }
    panic!("it does not stop");
}

/// Checks that the session is told to end, and that these requests are left to the next one.
fn are_left(bench: &mut Bench, region: &Inflight, heads: &[u16]) {
    assert_eq!(stop(bench), Stopped::Left);
    assert!(is_rung(&bench.alarm), "the session has to end");
    // The ring as the guest knows it.
    let mut whole = Driver::new();
    submit_reads(&mut whole, heads.len() as u64, true);
    assert_eq!(take_all(&mut next_of(region, &whole)), heads);
}

/// A vring whose ring has moved answers in the old memory what it took there.
#[test]
fn answers_that_cannot_be_shown_in_an_earlier_ring_are_left() {
    let region = inflight_region();
    let mut bench = slow_bench(&region);
    let rings = copy(&bench.driver, Part::Rings);
    let old = rings.file.try_clone().unwrap();
    let requests = bench.driver.region(Part::Requests);
    bind(&mut bench, [rings, requests]);
    let heads = submit_reads(&mut bench.driver, 1, true);
    old.write_all_at(&bench.driver.bytes(), 0).unwrap();
    take(&mut bench, heads.len());
    let both = [Part::Rings, Part::Requests].map(|part| bench.driver.region(part));
    bind(&mut bench, both);
    assert_eq!(Driver::used_index_in(&old), 0);
    old.set_len(0).unwrap();
    are_left(&mut bench, &region, &heads);
}

/// The ring is where it was, but the table has other memory at the addresses of the requests that were taken before.
#[test]
fn failures_that_cannot_be_told_in_an_earlier_table_are_left() {
    let region = inflight_region();
    let mut bench = slow_bench(&region);
    let both = [Part::Rings, Part::Requests].map(|part| bench.driver.region(part));
    bind(&mut bench, both);
    bench.store.lock().unwrap().failing = Some((0..DISK_BYTES, 5));
    let heads = submit_reads(&mut bench.driver, 3, true);
    take(&mut bench, heads.len());
    let requests = copy(&bench.driver, Part::Requests);
    let rings = bench.driver.region(Part::Rings);
    bind(&mut bench, [rings, requests]);
    assert_eq!(bench.driver.used_index(), 0);
    bench.driver.lose(Part::Requests);
    are_left(&mut bench, &region, &heads);
}
