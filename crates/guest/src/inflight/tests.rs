use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use cleave_blk::spec::feature;

use super::*;
use crate::rig::{Desc, Driver, die_after, memory};
use crate::{Chain, Memory, Vring, VringFault};

const SIZE: u16 = 8;
/// Just before the indices wrap.
const BASE: u16 = 65_530;

/// Returns a region for one vring, and the file that outlives every process that maps it.
fn region() -> (Inflight, File) {
    let layout = InflightLayout::new(1, SIZE);
    let file = Inflight::create(layout).unwrap();
    let copy = file.try_clone().unwrap();
    (Inflight::map(file, layout).unwrap(), copy)
}

/// A guest with its requests, and the region that its frontend keeps.
struct Guest {
    driver: Driver,
    region: Inflight,
    /// Heads that are free.
    free: VecDeque<u16>,
    /// Made available and not seen as used, in order.
    waiting: Vec<u16>,
}

/// Which index the frontend of a restarted daemon says.
#[derive(Debug, Clone, Copy)]
enum Base {
    Used,
    Avail,
    Junk,
}

impl Guest {
    fn new() -> Guest {
        Guest::of(memory(1 << 20))
    }

    fn of(memory: Arc<Memory>) -> Guest {
        let driver = Driver::new(&memory, 0, SIZE, BASE);
        for head in 0..SIZE {
            driver.set(head, Desc(0x8_0000 + 16 * u64::from(head), 16, 0, 0));
        }
        Guest {
            driver,
            region: region().0,
            free: (0..SIZE).collect(),
            waiting: Vec::new(),
        }
    }

    fn offer(&mut self, count: usize) {
        for head in self.free.drain(..count.min(self.free.len())) {
            self.driver.offer(head);
            self.waiting.push(head);
        }
        self.driver.publish();
    }

    /// Takes the answers; none comes for a request that does not wait for one.
    fn collect(&mut self) {
        while let Some((head, _)) = self.driver.reap() {
            let head = head as u16;
            let at = self.waiting.iter().position(|waiting| *waiting == head);
            let at = at.unwrap_or_else(|| panic!("{head} is answered twice"));
            self.waiting.remove(at);
            self.free.push_back(head);
        }
    }

    /// Begins a daemon.
    fn serve(&self, base: u16) -> Vring {
        let memory = self.driver.memory.clone();
        let layout = self.driver.layout;
        let mut vring = Vring::new(memory, layout, feature::EVENT_IDX, base).unwrap();
        vring.keep(self.region.journal(0).unwrap());
        vring
    }

    fn serve_again(&self, base: Base) -> Vring {
        self.serve(match base {
            Base::Used => self.driver.used_index(),
            Base::Avail => self.driver.avail,
            Base::Junk => 4711,
        })
    }
}

/// Takes whatever there is.
fn take_all(vring: &mut Vring) -> Vec<u16> {
    let mut chain = Chain::new();
    let mut heads = Vec::new();
    while let Some(taken) = vring.take(&mut chain).unwrap() {
        heads.push(taken.head);
    }
    heads
}

/// Does a daemon's work on what `guest` has made available, in batches of different sizes and out of order.
fn work(vring: &mut Vring, turn: usize) {
    // The first is given back, as one that may not go yet is.
    if vring.again() == 0
        && let Some(taken) = vring.take(&mut Chain::new()).unwrap()
    {
        vring.untake(taken.head);
    }
    let mut taken: VecDeque<u16> = take_all(vring).into();
    for batch in [1, 3, 2].into_iter().cycle().skip(turn) {
        if taken.len() <= 1 {
            break;
        }
        taken.rotate_left(1);
        for head in taken.drain(..batch.min(taken.len())) {
            vring.push_used(head, 1);
        }
        vring.publish();
    }
    // The last one stays out.
}

/// The guest does not see what is written to a page that is not there.
#[test]
fn answers_in_a_ring_whose_memory_is_lost_leave_their_requests_in_flight() {
    let _alone = crate::rig::alone();
    let spec = crate::rig::region(0, 1 << 20);
    let file = spec.file.try_clone().unwrap();
    let mut guest = Guest::of(Memory::new(vec![spec]).unwrap());
    guest.offer(3);
    let mut vring = guest.serve(BASE);
    let heads = take_all(&mut vring);
    file.set_len(0).unwrap();
    for head in &heads {
        vring.push_used(*head, 1);
    }
    assert!(!vring.publish());
    // The ring as the guest knows it.
    let mut whole = Guest {
        region: guest.region,
        ..Guest::new()
    };
    whole.offer(3);
    assert_eq!(take_all(&mut whole.serve_again(Base::Junk)), heads);
}

/// Every entry of a ring that is not there names head 0. The one that was taken before, and is answered but not shown, stays in flight;
/// one that the guest has not offered does not.
#[test]
fn a_head_from_a_page_that_is_not_there_changes_nothing() {
    let _alone = crate::rig::alone();
    for first in [0, 1] {
        for is_answered in [false, true] {
            let spec = crate::rig::region(0, 1 << 20);
            let file = spec.file.try_clone().unwrap();
            let mut guest = Guest::of(Memory::new(vec![spec]).unwrap());
            guest.free.rotate_left(first);
            let heads: Vec<u16> = guest.free.iter().copied().take(3).collect();
            guest.offer(3);
            let mut vring = guest.serve(BASE);
            let mut chain = Chain::new();
            let taken = vring.take(&mut chain).unwrap().unwrap();
            assert_eq!(taken.head, heads[0]);
            if is_answered {
                vring.push_used(taken.head, 1);
            }
            file.set_len(0).unwrap();
            let phantom = vring.take(&mut chain).unwrap().unwrap();
            assert_eq!(phantom.head, 0);
            // A worker that has the same head in flight does not come this far.
            if is_answered || phantom.head != taken.head {
                vring.leave(phantom.head);
            }
            assert!(!vring.publish());
            assert!(take_all(&mut vring).is_empty());
            let mut whole = Guest {
                region: guest.region,
                ..Guest::new()
            };
            whole.free.rotate_left(first);
            whole.offer(3);
            let mut next = whole.serve_again(Base::Junk);
            assert_eq!(next.again(), 1, "{first} {is_answered}");
            assert_eq!(take_all(&mut next), heads, "{first} {is_answered}");
        }
    }
}

/// Every store that a daemon makes is its last, and then every store of the daemon that comes after it, whatever the frontend
/// says of the position: each request is answered once.
#[test]
fn a_daemon_that_dies_between_any_two_stores_loses_nothing_and_repeats_nothing() {
    let mut states = 0;
    for base in [Base::Used, Base::Avail, Base::Junk] {
        let mut first = 0;
        loop {
            let mut second = 0;
            let ran_through = loop {
                let mut guest = Guest::new();
                guest.offer(5);
                let mut vring = None;
                let died = die_after(first, || {
                    let begun = vring.insert(guest.serve(BASE));
                    for turn in 0..2 {
                        work(begun, turn);
                    }
                });
                drop(vring);
                // The guest continues meanwhile, with heads that have just become free.
                guest.collect();
                guest.offer(2);
                let mut vring = None;
                let died_again = die_after(second, || {
                    let again = vring.insert(guest.serve_again(base));
                    work(again, 1);
                });
                drop(vring);
                guest.collect();
                guest.offer(3);
                let expected = guest.waiting.clone();
                let mut vring = guest.serve_again(base);
                let taken = take_all(&mut vring);
                let at = format!("{base:?}, {first} and {second} stores");
                assert_eq!(taken, expected, "{at}: in the guest's order");
                for head in taken {
                    vring.push_used(head, 1);
                }
                vring.publish();
                guest.collect();
                assert!(guest.waiting.is_empty(), "{at}");
                states += 1;
                if !died_again {
                    break !died;
                }
                second += 1;
            };
            if ran_through {
                break;
            }
            first += 1;
        }
    }
    assert!(states > 3000, "{states}");
}

#[test]
fn requests_come_again_in_the_order_in_which_they_were_taken() {
    let mut guest = Guest::new();
    guest.free = [5, 1, 7, 0, 3, 2].into();
    guest.offer(6);
    let mut vring = guest.serve(BASE);
    let taken = take_all(&mut vring);
    assert_eq!(taken, [5, 1, 7, 0, 3, 2]);
    vring.push_used(7, 1);
    vring.push_used(5, 1);
    vring.publish();
    vring.push_used(0, 1);
    drop(vring);
    let mut vring = guest.serve_again(Base::Junk);
    assert_eq!(vring.again(), 4);
    assert!(vring.arm(), "there is work without a kick");
    assert_eq!(vring.seen().1, 4);
    assert_eq!(take_all(&mut vring), [1, 0, 3, 2]);
    assert_eq!(vring.base(), guest.driver.avail);
    // A guest with that much outstanding may add two more, not three.
    let index = guest.driver.index(guest.driver.layout.avail_addr + 2);
    index.store(guest.driver.avail.wrapping_add(5), SeqCst);
    let refused = vring.take(&mut Chain::new());
    assert!(matches!(refused, Err(VringFault::AvailIndex { .. })));
}

#[test]
fn a_ring_that_nobody_served_begins_where_its_guest_waits() {
    let mut guest = Guest::new();
    guest.offer(2);
    let vring = guest.serve_again(Base::Avail);
    assert_eq!((vring.base(), vring.again()), (BASE, 0));
    drop(vring);
    let mut vring = guest.serve_again(Base::Junk);
    assert_eq!(take_all(&mut vring), [0, 1]);
}

#[test]
fn the_region_of_another_ring_counts_as_new() {
    let mut guest = Guest::new();
    guest.offer(3);
    let mut vring = guest.serve(BASE);
    take_all(&mut vring);
    drop(vring);
    // Another driver set the ring up anew, and the frontend kept the region.
    guest.driver = Driver::new(&guest.driver.memory, 0, SIZE, 100);
    guest.waiting.clear();
    guest.free = (0..SIZE).collect();
    guest.offer(2);
    let mut vring = guest.serve(100);
    assert_eq!(vring.again(), 0);
    assert_eq!(take_all(&mut vring), [0, 1]);
    drop(vring);
    let mut vring = guest.serve_again(Base::Junk);
    assert_eq!(
        take_all(&mut vring),
        [0, 1],
        "and nothing of the ring before"
    );
}

/// Writes a word of the part, as a hostile frontend would.
fn poke(journal: &Journal, at: usize, value: u16) {
    journal.set_word(at, value);
}

#[test]
fn what_cannot_be_true_is_a_fault_of_the_vring() {
    type Spoil = fn(&Journal);
    let head = JournalFault::Head { head: 8, size: 8 };
    let rows: [(Spoil, JournalFault); 6] = [
        (|part| poke(part, VERSION_AT, 2), JournalFault::Version(2)),
        (
            |part| poke(part, ENTRIES_AT, 0),
            JournalFault::Entries {
                found: 0,
                expected: 8,
            },
        ),
        (
            |part| poke(part, ENTRIES_AT, u16::MAX),
            JournalFault::Entries {
                found: u16::MAX,
                expected: 8,
            },
        ),
        (
            |part| {
                poke(part, USED_AT, BASE);
                poke(part, LAST_AT, 8);
            },
            head,
        ),
        (
            |part| {
                poke(part, USED_AT, BASE - 1);
                poke(part, HEAD_BYTES as usize + 6 * 16 + BEFORE_AT, 8);
                poke(part, LAST_AT, 6);
            },
            head,
        ),
        (|part| part.set_counter(1, u64::MAX), JournalFault::Counter),
    ];
    for (row, (spoil, expected)) in rows.into_iter().enumerate() {
        let mut guest = Guest::new();
        guest.offer(4);
        let mut vring = guest.serve(BASE);
        let taken = take_all(&mut vring);
        vring.push_used(taken[0], 1);
        vring.publish();
        drop(vring);
        spoil(&guest.region.journal(0).unwrap());
        let mut vring = guest.serve_again(Base::Used);
        let found = vring.take(&mut Chain::new());
        assert_eq!(found, Err(VringFault::Journal(expected)), "row {row}");
        let found = vring.take(&mut Chain::new());
        assert_eq!(found, Err(VringFault::Journal(expected)), "and stays one");
    }
}

/// With any bytes in the region a start ends, and no head comes twice.
#[test]
fn any_bytes_are_survived() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut resumed = 0;
    for round in 0..3000 {
        let mut guest = Guest::new();
        guest.offer(4);
        let part = guest.region.journal(0).unwrap();
        part.set_word(VERSION_AT, 1);
        part.set_word(ENTRIES_AT, SIZE);
        part.set_word(LAST_AT, (random() % 10) as u16);
        part.set_word(USED_AT, BASE.wrapping_sub((random() % 10) as u16));
        for head in 0..SIZE {
            part.set_in_flight(head, random() % 2 == 0);
            part.set_counter(head, random() % 3);
            let at = HEAD_BYTES as usize + usize::from(head) * 16 + BEFORE_AT;
            part.set_word(at, (random() % 9) as u16);
        }
        let mut vring = guest.serve_again(Base::Used);
        let mut heads = BTreeSet::new();
        let mut chain = Chain::new();
        while let Ok(Some(taken)) = vring.take(&mut chain) {
            if vring.again() > 0 {
                assert!(heads.insert(taken.head), "round {round}");
            }
        }
        resumed += usize::from(!heads.is_empty());
    }
    assert!(resumed > 100, "{resumed}");
}

#[test]
fn a_region_must_hold_its_vrings() {
    let layout = InflightLayout::new(4, 128);
    assert_eq!(layout.len_bytes, 4 * 2112, "parts begin at multiples of 64");
    let map = |layout| {
        let file = Inflight::create(InflightLayout::new(4, 128)).unwrap();
        Inflight::map(file, layout)
    };
    let whole = map(layout).unwrap();
    assert!(whole.journal(3).is_some() && whole.journal(4).is_none());
    let short = InflightLayout {
        len_bytes: 4 * 2112 - 1,
        ..layout
    };
    assert!(matches!(map(short), Err(InflightError::Short { .. })));
    let long = InflightLayout {
        vrings: 5,
        len_bytes: 5 * 2112,
        ..layout
    };
    assert!(
        matches!(map(long), Err(InflightError::Map(_))),
        "beyond its file"
    );
    let nothing = InflightLayout::new(0, 128);
    assert!(matches!(map(nothing), Err(InflightError::Short { .. })));
    assert!(matches!(
        map(InflightLayout::new(1, 96)),
        Err(InflightError::Size(96))
    ));
    let odd = InflightLayout {
        file_offset: 4,
        ..InflightLayout::new(1, 128)
    };
    assert!(matches!(map(odd), Err(InflightError::Align(4))));
}

/// QEMU names the size that it asked for and the length that it got.
#[test]
fn the_length_of_a_region_decides_how_large_its_parts_are() {
    let file = Inflight::create(InflightLayout::new(4, 1024)).unwrap();
    let entries = |len_bytes, vring_size| {
        let layout = InflightLayout {
            len_bytes,
            ..InflightLayout::new(4, vring_size)
        };
        let region = Inflight::map(file.try_clone().unwrap(), layout).unwrap();
        region.journal(3).unwrap().entries()
    };
    let rows = [
        (4 * 16448, 1024, 1024),
        (4 * 16448, 256, 1024),
        (4 * 16448, 128, 1024),
        (4 * 4160, 128, 256),
        // These parts are as large as those of twice the size.
        (4 * 64, 1, 1),
        // Rounded up to pages by the program that made it.
        (3 * 4096, 128, 128),
        (4 * 16448 - 64, 256, 256),
    ];
    for (len_bytes, vring_size, expected) in rows {
        assert_eq!(
            entries(len_bytes, vring_size),
            expected,
            "{len_bytes} {vring_size}"
        );
    }
}

/// Returns a region whose only part has fewer entries than the ring of [`Guest`], and the file that outlives every process that maps it.
fn small_region() -> Inflight {
    let layout = InflightLayout::new(1, SIZE / 2);
    Inflight::map(Inflight::create(layout).unwrap(), layout).unwrap()
}

impl Guest {
    fn with_small_region() -> Guest {
        Guest {
            region: small_region(),
            ..Guest::new()
        }
    }

    /// Begins a daemon. Returns the number of requests that it gives up, too.
    fn serve_unrecorded(&self, base: u16) -> (Vring, u16) {
        let memory = self.driver.memory.clone();
        let layout = self.driver.layout;
        let mut vring = Vring::new(memory, layout, feature::EVENT_IDX, base).unwrap();
        let lost = vring.keep(self.region.journal(0).unwrap());
        assert_eq!(vring.unrecorded(), Some(SIZE / 2));
        (vring, lost)
    }
}

/// After an orderly stop the next daemon starts where the frontend says. That is the used index of the ring, too.
#[test]
fn a_vring_larger_than_its_part_is_served_and_continues_after_an_orderly_stop() {
    let mut guest = Guest::with_small_region();
    let mut base = BASE;
    for _ in 0..3 {
        guest.offer(5);
        let (mut vring, lost) = guest.serve_unrecorded(base);
        assert_eq!(lost, 0);
        for head in take_all(&mut vring) {
            vring.push_used(head, 1);
        }
        vring.publish();
        vring.end();
        base = vring.base();
        guest.collect();
        assert!(guest.waiting.is_empty());
        // The guest continues while nobody serves it.
        guest.offer(2);
    }
}

/// Nobody knows which of them were taken, and which of the heads in the available ring are answered and in use again. A request
/// must not be answered twice, so none of them is taken; the guest's later ones are.
#[test]
fn requests_of_a_vring_larger_than_its_part_are_given_up_after_a_crash() {
    for base in [Base::Used, Base::Avail, Base::Junk] {
        let mut guest = Guest::with_small_region();
        guest.offer(5);
        let (mut vring, _) = guest.serve_unrecorded(BASE);
        // The third is answered first, and its head is used again.
        let taken = take_all(&mut vring);
        vring.push_used(taken[2], 1);
        vring.publish();
        drop(vring);
        guest.collect();
        guest.free = [taken[2]].into();
        guest.offer(1);
        let named = match base {
            Base::Used => guest.driver.used_index(),
            Base::Avail => guest.driver.avail,
            Base::Junk => 4711,
        };
        let (mut vring, lost) = guest.serve_unrecorded(named);
        assert_eq!(lost, 5, "{base:?}");
        assert_eq!(take_all(&mut vring), [0; 0]);
        guest.free = [5, 6].into();
        guest.offer(2);
        let taken = take_all(&mut vring);
        assert_eq!(taken, [5, 6]);
        for head in taken {
            vring.push_used(head, 1);
        }
        vring.publish();
        guest.collect();
        assert_eq!(guest.waiting.len(), 5, "they wait until the guest is reset");
    }
}

/// The part holds the list of a smaller ring, is then too small for a larger one, and is used by a small one again: neither
/// finds what the other left.
#[test]
fn rings_of_two_sizes_that_share_a_part_find_nothing_of_each_other() {
    let small_ring = |driver: &Driver, region: &Inflight, base| {
        let mut vring = Vring::new(driver.memory.clone(), driver.layout, 0, base).unwrap();
        assert_eq!(vring.keep(region.journal(0).unwrap()), 0);
        vring
    };
    for is_orderly in [false, true] {
        let mut guest = Guest::with_small_region();
        // A small ring, whose daemon dies with two requests in flight.
        let small = Driver::new(&guest.driver.memory, 0x4000, SIZE / 2, 0);
        for head in 0..SIZE / 2 {
            small.set(head, Desc(0x8_0000, 16, 0, 0));
        }
        let mut small = small;
        small.offer(1);
        small.offer(2);
        small.publish();
        let mut vring = small_ring(&small, &guest.region, 0);
        assert_eq!(take_all(&mut vring), [1, 2]);
        drop(vring);
        // The guest is reset meanwhile and makes a larger one.
        guest.offer(3);
        let (mut vring, lost) = guest.serve_unrecorded(BASE);
        assert_eq!((lost, vring.again()), (0, 0));
        for head in take_all(&mut vring) {
            vring.push_used(head, 1);
        }
        vring.publish();
        if is_orderly {
            vring.end();
        }
        drop(vring);
        // And a small one once more.
        let mut small = Driver::new(&guest.driver.memory, 0x4000, SIZE / 2, 0);
        small.offer(3);
        small.publish();
        let mut vring = small_ring(&small, &guest.region, 0);
        assert_eq!(vring.again(), 0);
        assert_eq!(take_all(&mut vring), [3]);
    }
}

#[test]
fn a_region_that_is_cut_costs_its_vring() {
    let _alone = crate::rig::alone();
    let guest = Guest::new();
    let layout = InflightLayout::new(1, SIZE);
    let file = crate::rig::file(layout.len_bytes);
    let region = Inflight::map(file.try_clone().unwrap(), layout).unwrap();
    rustix::fs::ftruncate(&file, 0).unwrap();
    let mut vring = guest.serve(BASE);
    vring.keep(region.journal(0).unwrap());
    let found = vring.take(&mut Chain::new());
    assert_eq!(found, Err(VringFault::Journal(JournalFault::Lost)));
    drop(vring);
    // Its pages are replaced together, because the process may have some 65 thousand mappings only.
    let layout = InflightLayout::new(1, 4096);
    let file = crate::rig::file(layout.len_bytes);
    let region = Inflight::map(file.try_clone().unwrap(), layout).unwrap();
    let part = region.journal(0).unwrap();
    rustix::fs::ftruncate(&file, 0).unwrap();
    for page in [1, 3, 5] {
        part.set_word(page * 4096, 0);
    }
    let start = region.mapping.start().addr();
    let within = start..start + layout.len_bytes as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let begins = |line: &str| usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
    let mappings = maps.lines().filter(|line| within.contains(&begins(line)));
    assert_eq!(mappings.count(), 1);
    // One that is made here cannot be.
    let ours = Inflight::create(layout).unwrap();
    assert!(rustix::fs::ftruncate(&ours, 0).is_err());
}
