//! The properties with every value if there are few, otherwise with random values.

use cleave_blk::spec::feature;
use proptest::prelude::*;

use super::*;
use crate::rig::{Desc, Driver, memory};
use crate::{Chain, Inflight, InflightLayout, Vring};

/// Indices at which arithmetic could overflow.
const PLACES: [u16; 6] = [0, 1, 255, 32_767, 32_768, 65_535];

#[test]
fn every_index_is_checked() {
    for size_log in 0..16 {
        let size = 1 << size_log;
        for outstanding in [0, 1, size / 2, size - 1, size] {
            for next in PLACES {
                let before = sound(size_log, [next, 0], [outstanding, 0, 0]);
                for found in 0..=u16::MAX {
                    a_check_accepts_what_the_guest_has_room_for(before, found);
                }
            }
        }
    }
}

/// A small ring in all its states, at each of these indices.
#[test]
fn every_step_of_a_small_ring() {
    for next in 0..=u16::MAX {
        for counts in all_counts(4) {
            let before = sound_and_level(2, next, counts);
            for step in 0..5 {
                a_step_does_one_thing(before, step);
            }
            for count in 0..=4 {
                a_part_is_published_first(before, count);
            }
            for is_shown in [false, true] {
                a_restart_continues_where_the_dead_daemon_stopped(before, is_shown);
            }
        }
    }
}

/// Returns all possible counts of outstanding, left and added entries.
fn all_counts(size: u16) -> impl Iterator<Item = [u16; 3]> {
    let pairs = (0..=size)
        .flat_map(move |outstanding| (0..=size - outstanding).map(move |left| (outstanding, left)));
    pairs.flat_map(|(outstanding, left)| {
        (0..=outstanding).map(move |added| [outstanding, left, added])
    })
}

#[test]
fn every_used_index_after_a_restart() {
    for entries in [1, 8, 256, 32_768] {
        for noted in PLACES {
            for used in 0..=u16::MAX {
                a_part_is_of_another_ring_beyond_its_entries(noted, used, entries);
            }
        }
    }
}

/// Every event for batches of every size at a few indices, and events around the batch at every index.
#[test]
fn every_call() {
    for old in PLACES {
        for count in [1, 2, 3, 255, 256, 32_767, 32_768] {
            for event in 0..=u16::MAX {
                a_call_is_made_exactly_when_it_is_asked_for(true, old, count, event, 1);
            }
        }
        for flags in 0..=u16::MAX {
            a_call_is_made_exactly_when_it_is_asked_for(false, old, 1, old, flags);
        }
    }
    for old in 0..=u16::MAX {
        for count in 1..=4 {
            for away in 0..=8 {
                let event = old.wrapping_add(away).wrapping_sub(2);
                a_call_is_made_exactly_when_it_is_asked_for(true, old, count, event, 0);
            }
        }
    }
}

#[test]
fn every_kick() {
    for event_idx in [false, true] {
        for position in 0..=u16::MAX {
            for [ahead, count] in [[0, 1], [0, 4], [3, 1]] {
                for taken in [0, 1, 2, 65_532] {
                    let steps = [taken, ahead, count];
                    kicks_come_only_where_they_are_asked_for(event_idx, position, steps);
                }
            }
        }
    }
}

/// A vring in shared memory, its driver, and the frontend's in-flight region.
struct RealRing {
    driver: Driver,
    region: Inflight,
    vring: Vring,
    chain: Chain,
}

impl RealRing {
    fn new(size: u16, base: u16) -> RealRing {
        let memory = memory(4096);
        let driver = Driver::new(&memory, 0, size, base);
        for head in 0..size {
            driver.set(head, Desc(2048, 16, 0, 0));
        }
        let layout = InflightLayout::new(1, size);
        let region = Inflight::map(Inflight::create(layout).unwrap(), layout).unwrap();
        RealRing {
            vring: serve(&driver, &region),
            chain: Chain::new(),
            driver,
            region,
        }
    }
}

/// Starts a worker. The position that its frontend gives is wrong.
fn serve(driver: &Driver, region: &Inflight) -> Vring {
    let (memory, layout) = (driver.memory.clone(), driver.layout);
    let mut vring = Vring::new(memory, layout, feature::EVENT_IDX, 4711).unwrap();
    vring.keep(region.journal(0).unwrap());
    vring
}

impl SharedRing for RealRing {
    fn offer(&mut self, head: u16) {
        self.driver.offer(head);
        self.driver.publish();
    }
    fn take(&mut self) -> Option<u16> {
        let taken = self.vring.take(&mut self.chain).unwrap()?;
        assert_eq!(taken.fault, None);
        Some(taken.head)
    }
    fn push_used(&mut self, head: u16) {
        self.vring.push_used(head, 0);
    }
    fn publish(&mut self) {
        self.vring.publish();
    }
    fn reap(&mut self) -> Option<u16> {
        self.driver.reap().map(|(head, _)| head as u16)
    }
    fn restart(&mut self) {
        self.vring = serve(&self.driver, &self.region);
    }
}

proptest! {
    #[test]
    fn any_step_of_any_ring(
        size_log in 0..16_u8, places in any::<[u16; 2]>(), counts in any::<[u16; 3]>(),
        found in any::<u16>(), step in any::<u8>(), is_shown in any::<bool>(),
    ) {
        let before = sound(size_log, places, counts);
        a_check_accepts_what_the_guest_has_room_for(before, found);
        a_part_is_published_first(before, found);
        a_step_does_one_thing(before, step);
        let before = sound_and_level(size_log, places[0], counts);
        a_step_does_one_thing(before, step);
        a_restart_continues_where_the_dead_daemon_stopped(before, is_shown);
    }

    #[test]
    fn any_call_and_any_kick(
        event_idx in any::<bool>(), old in any::<u16>(), count in 1..=32_768_u16,
        away in prop_oneof![0..4_u16, any::<u16>()], flags in any::<u16>(),
        ahead in any::<u16>(), taken in any::<u16>(),
    ) {
        for event in [old.wrapping_sub(away), old.wrapping_add(count).wrapping_sub(away)] {
            a_call_is_made_exactly_when_it_is_asked_for(event_idx, old, count, event, flags);
        }
        let ahead = ahead % (32_768 - count + 1);
        let taken = u32::from(taken) % ((1 << 16) - u32::from(ahead + count) + 1);
        let steps = [taken as u16, ahead, count];
        kicks_come_only_where_they_are_asked_for(event_idx, old, steps);
    }

    #[test]
    fn any_schedule(
        size_log in 0..4_u8, base in prop_oneof![any::<u16>(), 65_500..=65_535_u16],
        steps in prop::collection::vec((0..6_u8, 0..8_u8), 0..200),
    ) {
        let size = 1 << size_log;
        each_chain_is_served_once(&mut BareRing::new(size, base), size, &steps);
        each_chain_is_served_once(&mut RealRing::new(size, base), size, &steps);
    }
}
