//! Changes of the memory table under requests. Each request completes in the memory in which it was taken.
//! Memory that is no longer in the table is released when its last request has completed, in every state of the
//! vring.

use std::sync::Arc;
use std::time::Duration;

use cleave_blk::spec::status;
use cleave_guest::{Departure, Memory};
use cleave_sim::SimConfig;
use cleave_worker::Stopped;

use crate::driver::{Answer, Ask, Driver, Part};
use crate::{Bench, FEATURES, is_rung, quiet};

const BOTH: [Part; 2] = [Part::Rings, Part::Requests];

fn table(driver: &Driver, parts: &[Part]) -> Arc<Memory> {
    Memory::new(parts.iter().map(|part| driver.region(*part)).collect()).unwrap()
}

/// A guest on a slow disk, with its memory in two regions.
fn bench(seed: u64) -> (Bench, Arc<Memory>) {
    let config = SimConfig {
        delay_max: 30,
        ..quiet(seed)
    };
    let mut bench = Bench::new(config, FEATURES);
    let memory = table(&bench.driver, &BOTH);
    bind(&mut bench, &memory);
    (bench, memory)
}

/// Puts a table in force in the worker's next lap, whatever is in flight.
fn bind(bench: &mut Bench, memory: &Arc<Memory>) {
    let bound = bench.control.bind(memory.clone());
    bench.carry_out(bound);
}

/// Replaces a table, and drops this test's reference to it.
fn replace(bench: &mut Bench, old: Arc<Memory>, new: &Arc<Memory>) -> Departure {
    let departure = old.departing(new);
    bind(bench, new);
    departure
}

fn turn(bench: &mut Bench, laps: u32) {
    for _ in 0..laps {
        bench.lap();
    }
}

fn is_over(departure: &Departure) -> bool {
    departure.is_over_within(Duration::ZERO)
}

fn write_some(bench: &mut Bench, n: u64) {
    for at in 0..n {
        let ask = Ask::write(at * 8, vec![at as u8 + 1; 4096], 4096, true);
        bench.driver.submit(&ask).unwrap();
    }
    bench.lap();
}

/// Runs laps until `n` requests have completed. Checks that the old memory is not released before the last one.
fn collect(bench: &mut Bench, departure: &Departure, n: usize) -> Vec<Answer> {
    let mut answers = Vec::new();
    for _ in 0..10_000 {
        answers.extend(bench.driver.collect(|_| 0));
        if answers.len() == n {
            return answers;
        }
        assert!(!is_over(departure), "after {} of {n}", answers.len());
        bench.lap();
    }
    panic!("{} of {n} answers", answers.len());
}

fn all_well(answers: &[Answer]) {
    for answer in answers {
        assert_eq!((answer.status, answer.used_bytes), (status::OK, 1));
    }
}

/// Returns true if the worker releases the memory within a lap or two after the last completion.
fn soon_over(bench: &mut Bench, departure: &Departure) -> bool {
    (0..3).any(|_| {
        bench.lap();
        is_over(departure)
    })
}

#[test]
fn a_table_of_the_same_memory_is_in_force_at_once_and_the_old_one_is_released_with_its_last_request()
 {
    for seed in 0..30 {
        let (mut bench, memory) = bench(seed);
        write_some(&mut bench, 8);
        let next = table(&bench.driver, &BOTH);
        let departure = replace(&mut bench, memory, &next);
        all_well(&collect(&mut bench, &departure, 8));
        assert!(soon_over(&mut bench, &departure), "seed {seed}");
        let store = bench.store.lock().unwrap();
        assert!((0..8).all(|n| store.now[n * 4096] == n as u8 + 1));
    }
}

#[test]
fn a_request_whose_status_byte_has_left_the_table_still_completes() {
    for seed in 0..30 {
        let (mut bench, memory) = bench(seed);
        write_some(&mut bench, 8);
        let rings = table(&bench.driver, &[Part::Rings]);
        let departure = replace(&mut bench, memory, &rings);
        all_well(&collect(&mut bench, &departure, 8));
        assert!(soon_over(&mut bench, &departure), "seed {seed}");
        // A request for memory that is gone fails, and the vring continues.
        bench
            .driver
            .submit(&Ask::write(0, vec![1; 512], 512, false))
            .unwrap();
        turn(&mut bench, 40);
        let [answer] = &bench.driver.collect(|_| 0)[..] else {
            panic!("one answer");
        };
        assert_eq!(answer.used_bytes, 0);
        let whole = table(&bench.driver, &BOTH);
        bind(&mut bench, &whole);
        assert_eq!(bench.ask(&Ask::read(0, 512, 512, true)).status, status::OK);
    }
}

#[test]
fn a_vring_without_its_ring_drains_and_continues_when_the_ring_is_back() {
    for seed in 0..30 {
        let (mut bench, memory) = bench(seed);
        write_some(&mut bench, 8);
        let requests = table(&bench.driver, &[Part::Requests]);
        let departure = replace(&mut bench, memory, &requests);
        bench.lap();
        assert!(is_rung(&bench.err), "the frontend is notified");
        // Not taken, because the ring is gone.
        bench.driver.submit(&Ask::read(0, 512, 512, true)).unwrap();
        all_well(&collect(&mut bench, &departure, 8));
        assert!(soon_over(&mut bench, &departure), "seed {seed}");
        turn(&mut bench, 40);
        assert!(bench.driver.collect(|_| 0).is_empty());
        let whole = table(&bench.driver, &BOTH);
        bind(&mut bench, &whole);
        turn(&mut bench, 1000);
        assert_eq!(bench.driver.collect(|_| 512).len(), 1);
        assert!(!is_rung(&bench.err));
    }
}

#[test]
fn a_moved_ring_drains_in_the_old_memory_and_continues_in_the_new() {
    for seed in 0..30 {
        let (mut bench, memory) = bench(seed);
        write_some(&mut bench, 8);
        let before = bench.driver.move_to_a_copy();
        let moved = table(&bench.driver, &BOTH);
        let departure = replace(&mut bench, memory, &moved);
        turn(&mut bench, 1000);
        assert!(is_over(&departure), "seed {seed}");
        assert_eq!(
            Driver::used_index_in(&before),
            8,
            "all of them where they were taken"
        );
        assert!(bench.driver.collect(|_| 0).is_empty(), "and none elsewhere");
        // The driver does not know of the eight, but the ring continues after them.
        bench.driver.submit(&Ask::read(0, 512, 512, true)).unwrap();
        turn(&mut bench, 1000);
        assert_eq!(bench.device.totals().reads, 1);
        assert!(!is_rung(&bench.err));
    }
}

#[test]
fn a_retired_or_disabled_vring_releases_memory_too() {
    for seed in 0..30 {
        for retired in [false, true] {
            let (mut bench, memory) = bench(seed);
            write_some(&mut bench, 4);
            match retired {
                true => bench.driver.submit_raw(crate::driver::SIZE),
                false => {
                    let disabled = bench.control.enable(0, false);
                    bench.carry_out(disabled);
                }
            }
            bench.lap();
            let nothing = Memory::new(Vec::new()).unwrap();
            let departure = replace(&mut bench, memory, &nothing);
            all_well(&collect(&mut bench, &departure, 4));
            assert!(soon_over(&mut bench, &departure), "seed {seed}, {retired}");
            let mut stopped = bench.control.stop(0);
            let base = loop {
                bench.lap();
                match stopped.wait_for(Duration::ZERO) {
                    Ok(base) => break base.unwrap(),
                    Err(again) => stopped = again,
                }
            };
            assert_eq!(base, Stopped::At(4));
        }
    }
}
