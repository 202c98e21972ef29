use std::os::unix::fs::FileExt;

use cleave_blk::spec::feature;
use rustix::fs::ftruncate;

use super::*;
use crate::rig::{Desc, Driver, INDIRECT, NEXT, WRITE, file, memory, region, write};
use crate::{Epoch, Inflight, InflightLayout, Vring};

/// Pages of the guest's memory. The rings begin at 0, and the used ring of every vring here is in page `USED`.
const PAGES: u64 = 512;
const SIZE: u16 = 8;
const USED: u64 = 0;
/// Addresses of an indirect table, a header, data and a status byte, each in a page of its own.
const TABLE: u64 = 0x10_0000;
const HEADER: u64 = 0x11_0000;
const DATA: u64 = 0x12_0000;
const STATUS: u64 = 0x13_0000;

const NONE: [u64; 0] = [];

fn page(addr: u64) -> u64 {
    addr / PAGE_BYTES
}

/// A log with a bit for each page of the memory, and its file.
struct Log {
    file: File,
    log: Arc<DirtyLog>,
}

impl Log {
    fn new() -> Log {
        Log::of(0, PAGES / 8)
    }

    fn of(file_offset: u64, len_bytes: u64) -> Log {
        let file = file(file_offset + len_bytes + 9);
        let log = DirtyLog::map(file.try_clone().unwrap(), file_offset, len_bytes).unwrap();
        Log { file, log }
    }

    /// Returns what a vring with the used ring at 0 marks there.
    fn vring(&self) -> Option<Box<VringLog>> {
        self.with(Some(0), true)
    }

    fn with(&self, used_addr: Option<u64>, answers: bool) -> Option<Box<VringLog>> {
        let log = VringLog::new(self.log.clone(), used_addr, answers);
        Some(Box::new(log))
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.file.metadata().unwrap().len() as usize];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Returns the marked pages of a log at the start of its file.
    fn pages(&self) -> Vec<u64> {
        let bytes = self.bytes();
        let is_marked = |page: &u64| bytes[(page / 8) as usize] & 1 << (page % 8) != 0;
        (0..8 * bytes.len() as u64).filter(is_marked).collect()
    }
}

/// A guest and its vring, whose ring the driver placed at `at`.
struct Pair {
    memory: Arc<Memory>,
    driver: Driver,
    vring: Vring,
    chain: Chain,
}

impl Pair {
    fn new(features: u64, base: u16) -> Pair {
        let memory = memory(PAGES * PAGE_BYTES);
        let driver = Driver::new(&memory, 0, SIZE, base);
        let vring = Vring::new(memory.clone(), driver.layout, features, base).unwrap();
        Pair {
            memory,
            driver,
            vring,
            chain: Chain::new(),
        }
    }

    /// Takes the chain of head 0 and adds its used entry.
    fn serve(&mut self) -> Option<crate::ChainFault> {
        self.driver.offer(0);
        self.driver.publish();
        let taken = self.vring.take(&mut self.chain).unwrap().unwrap();
        self.vring.push_used(taken.head, 1);
        taken.fault
    }

    fn direct(&self, chain: &[Desc]) {
        for (index, desc) in (0..).zip(chain) {
            self.driver.set(index, *desc);
        }
    }

    fn indirect(&self, chain: &[Desc]) {
        for (index, desc) in (0..).zip(chain) {
            write(&self.memory, TABLE + 16 * index, &desc.bytes());
        }
        let len = 16 * chain.len() as u32;
        self.driver.set(0, Desc(TABLE, len, INDIRECT, 0));
    }
}

/// A read into two pieces of data: bytes of two pages, and a whole page.
fn read_chain() -> [Desc; 4] {
    [
        Desc(HEADER, 16, NEXT, 1),
        Desc(DATA + 0x2ff0, 512, NEXT | WRITE, 2),
        Desc(DATA + 0x8000, 0x1000, NEXT | WRITE, 3),
        Desc(STATUS, 1, WRITE, 0),
    ]
}

/// Pages that an answer to it may touch.
fn read_pages() -> Vec<u64> {
    let data = page(DATA);
    vec![data + 2, data + 3, data + 8, page(STATUS)]
}

#[test]
fn exactly_the_pages_of_a_range_are_marked_as_far_as_they_are_in_the_log() {
    // Five bytes: 40 pages.
    for (addr, len_bytes, expected) in [
        (0, 0, 0..0),
        (0, 1, 0..1),
        (0xfff, 1, 0..1),
        (0xfff, 2, 0..2),
        (0x1000, 0x1000, 1..2),
        (0x3000, 0x3000, 3..6),
        (0x3001, 0x3000, 3..7),
        (0x6000, 0x3000, 6..9),
        (0x7000, 0x1000, 7..8),
        (0x7fff, 0x1_0002, 7..25),
        (0, 40 << 12, 0..40),
        (39 << 12, 1, 39..40),
        (39 << 12, u64::MAX, 39..40),
        (0x5000, u64::MAX, 5..40),
        (40 << 12, 1, 0..0),
        (1 << 40, 1 << 20, 0..0),
        (u64::MAX, 1, 0..0),
        (u64::MAX, u64::MAX, 0..0),
    ] {
        // In its file it begins at an odd place.
        let log = Log::of(4099, 5);
        log.log.mark(addr, len_bytes);
        let mut bytes = vec![0; 4099 + 5 + 9];
        for page in expected {
            bytes[4099 + page / 8] |= 1 << (page % 8);
        }
        assert!(log.bytes() == bytes, "{addr:#x} {len_bytes:#x}");
        log.log.mark(addr, len_bytes);
        assert!(log.bytes() == bytes, "{addr:#x} {len_bytes:#x}, again");
    }
}

#[test]
fn a_log_covers_memory_whose_last_page_has_a_bit() {
    let log = Log::of(0, 5).log;
    assert!(log.covers(&Memory::new(Vec::new()).unwrap()));
    for (guest_addr, len_bytes, covered) in [
        (0x2000, 38 << 12, true),
        (0x2000, (38 << 12) + 1, false),
        (39 << 12, 0x1000, true),
        (40 << 12, 1, false),
        (1 << 40, 0x1000, false),
    ] {
        let table = vec![region(guest_addr, len_bytes), region(0x1000, 1)];
        let memory = Memory::new(table).unwrap();
        assert_eq!(log.covers(&memory), covered, "{guest_addr:#x} {len_bytes}");
    }
}

#[test]
fn impossible_logs_are_refused() {
    for (file_offset, len_bytes) in [
        (0, 0),
        (0, 4097),
        (1, 4096),
        (4096, 1),
        (u64::MAX, 1),
        (u64::MAX - 7, 16),
        (0, u64::MAX),
        (4096, u64::MAX),
    ] {
        let map = DirtyLog::map(file(4096), file_offset, len_bytes);
        assert!(map.is_err(), "{file_offset} {len_bytes}");
    }
    let folder = File::open("/").unwrap();
    assert!(DirtyLog::map(folder, 0, 1).is_err());
    let zero = File::open("/dev/zero").unwrap();
    assert!(DirtyLog::map(zero, 0, 1).is_err());
}

#[test]
fn every_writable_byte_of_a_chain_is_marked_when_its_answer_is_published() {
    type Make = fn(&Pair, &[Desc]);
    let [direct, indirect]: [Make; 2] = [Pair::direct, Pair::indirect];
    let whole = read_chain();
    let late = [whole[0], whole[1], Desc(DATA, 16, NEXT, 3), whole[3]];
    let huge = |index| Desc(DATA, u32::MAX, NEXT | WRITE, index);
    for (what, make, chain, mut expected) in [
        ("a read", direct, &whole[..], read_pages()),
        ("an indirect read", indirect, &whole, read_pages()),
        (
            "a write or a flush",
            direct,
            &[Desc(HEADER, 16, NEXT, 1), Desc(STATUS, 1, WRITE, 0)],
            vec![page(STATUS)],
        ),
        (
            "a status at the end of the data",
            direct,
            &[Desc(HEADER, 16, NEXT, 1), Desc(DATA, 0x1001, WRITE, 0)],
            vec![page(DATA), page(DATA) + 1],
        ),
        (
            "empty descriptors",
            direct,
            &[Desc(DATA, 0, NEXT | WRITE, 1), Desc(STATUS, 1, WRITE, 0)],
            vec![page(STATUS)],
        ),
        ("no status", direct, &[Desc(HEADER, 16, 0, 0)], vec![]),
        (
            "beyond the log",
            direct,
            &[
                Desc(HEADER, 16, NEXT, 1),
                Desc(1 << 40, 512, NEXT | WRITE, 2),
                Desc(u64::MAX - 1, 512, NEXT | WRITE, 3),
                Desc(STATUS, 1, WRITE, 0),
            ],
            vec![page(STATUS)],
        ),
        // Refused: only the status byte is written.
        ("bad order", direct, &late, vec![page(STATUS)]),
        (
            "4 GiB and more",
            indirect,
            &[huge(1), huge(2), Desc(STATUS, 1, WRITE, 0)],
            vec![page(STATUS)],
        ),
        // Their status byte is not known.
        ("a loop", direct, &[Desc(DATA, 16, NEXT | WRITE, 0)], vec![]),
        (
            "an indirect table outside",
            direct,
            &[Desc(1 << 40, 32, INDIRECT, 0)],
            vec![],
        ),
    ] {
        let mut pair = Pair::new(0, 0);
        let log = Log::new();
        make(&pair, chain);
        pair.vring.set_log(log.vring());
        pair.serve();
        assert_eq!(log.pages(), NONE, "{what}: too early");
        pair.vring.publish();
        expected.insert(0, USED);
        assert_eq!(log.pages(), expected, "{what}");
        assert_eq!(pair.driver.reap(), Some((0, 1)), "{what}");
    }
}

#[test]
fn all_answers_of_a_batch_are_marked_across_the_wrap_of_the_ring() {
    let mut pair = Pair::new(0, 65534);
    let log = Log::new();
    pair.vring.set_log(log.vring());
    for head in 0..SIZE {
        let status = STATUS + PAGE_BYTES * u64::from(head);
        pair.driver.set(head, Desc(status, 1, WRITE, 0));
        pair.driver.offer(head);
    }
    pair.driver.publish();
    for head in 0..6 {
        pair.vring.take(&mut pair.chain).unwrap().unwrap();
        pair.vring.push_used(head, 1);
    }
    pair.vring.publish();
    let status = |count| (0..count).map(|head| page(STATUS) + head);
    let expected: Vec<u64> = [USED].into_iter().chain(status(6)).collect();
    assert_eq!(log.pages(), expected);
    // Nothing more is published, and nothing marked.
    let next = Log::new();
    pair.vring.set_log(next.vring());
    pair.vring.publish();
    assert_eq!(next.pages(), NONE);
    for head in [6, 7] {
        pair.vring.take(&mut pair.chain).unwrap().unwrap();
        pair.vring.push_used(head, 1);
    }
    pair.vring.publish();
    assert_eq!(next.pages(), [USED, page(STATUS) + 6, page(STATUS) + 7]);
}

/// A ring whose used part covers several pages: 2^10 entries of 8 bytes, logged from page 100 on.
#[test]
fn the_pages_of_the_used_ring_are_marked_where_the_log_has_it() {
    const ENTRIES: u16 = 1024;
    const AT: u64 = 100 * PAGE_BYTES;
    for features in [0, feature::EVENT_IDX] {
        let memory = memory(PAGES * PAGE_BYTES);
        let mut driver = Driver::new(&memory, 0, ENTRIES, 0);
        driver.set(0, Desc(STATUS, 1, WRITE, 0));
        let mut vring = Vring::new(memory.clone(), driver.layout, features, 0).unwrap();
        let mut chain = Chain::new();
        let mut serve = |vring: &mut Vring, count: u16| {
            for _ in 0..count {
                driver.offer(0);
                driver.publish();
                let taken = vring.take(&mut chain).unwrap().unwrap();
                vring.push_used(taken.head, 1);
            }
            vring.publish();
        };
        // The index is in the first page. Entry 511 begins in it and ends in the next one.
        let mut seen = 0;
        for (until, expected) in [
            (511, &[100][..]),
            (512, &[100, 101]),
            (1023, &[100, 101]),
            (1024, &[100, 101, 102]),
            // The first entry again.
            (1025, &[100]),
        ] {
            let log = Log::new();
            vring.set_log(log.with(Some(AT), false));
            serve(&mut vring, until - seen);
            seen = until;
            assert_eq!(log.pages(), expected, "{until}");
        }
        // Kicks: the flags are in the first page, the event field is in the last.
        for ask in [Vring::ask, Vring::disarm] {
            let log = Log::new();
            vring.set_log(log.with(Some(AT), false));
            ask(&mut vring);
            assert_eq!(log.pages(), [100, 102]);
        }
        let log = Log::new();
        vring.set_log(log.with(Some(AT), false));
        vring.log_ring();
        assert_eq!(log.pages(), [100, 101, 102]);
        // Partly and wholly outside of the log, at no place, and at the end of the address space.
        for (used_addr, answers, expected) in [
            (Some((PAGES - 1) * PAGE_BYTES), false, vec![PAGES - 1]),
            (Some(PAGES * PAGE_BYTES), true, vec![page(STATUS)]),
            (Some(u64::MAX), true, vec![page(STATUS)]),
            (None, true, vec![page(STATUS)]),
            (None, false, vec![]),
        ] {
            let log = Log::new();
            vring.set_log(log.with(used_addr, answers));
            serve(&mut vring, 600);
            vring.ask();
            assert_eq!(log.pages(), expected, "{used_addr:?} {answers}");
        }
    }
}

#[test]
fn after_the_swap_the_old_log_is_left_alone_and_answers_under_way_go_to_the_new() {
    let mut pair = Pair::new(0, 0);
    let [old, new] = [Log::new(), Log::new()];
    pair.direct(&read_chain());
    pair.vring.set_log(old.vring());
    pair.serve();
    pair.vring.set_log(new.vring());
    pair.vring.publish();
    pair.vring.ask();
    assert_eq!(old.pages(), NONE);
    let expected: Vec<u64> = [USED].into_iter().chain(read_pages()).collect();
    assert_eq!(new.pages(), expected);
    pair.vring.set_log(None);
    let unmapped = Arc::downgrade(&new.log);
    drop(new);
    assert!(unmapped.upgrade().is_none(), "the vring has let go of it");
    pair.serve();
    pair.vring.publish();
    assert_eq!(old.pages(), NONE);
}

/// The frontend moves the border of a region: for a moment the table is without the memory of a request in flight.
#[test]
fn an_answer_in_an_earlier_table_is_marked_although_its_indirect_table_is_away() {
    // The table changes before the request ends, or after that and before the guest is shown the answer.
    for ends_before in [false, true] {
        let both = [region(0, 0x1000), region(TABLE, 0x10_0000)];
        let first = Memory::new(both.into()).unwrap();
        let mut driver = Driver::new(&first, 0, SIZE, 0);
        for (index, desc) in (0..).zip(read_chain()) {
            write(&first, TABLE + 16 * index, &desc.bytes());
        }
        driver.set(0, Desc(TABLE, 64, INDIRECT, 0));
        driver.offer(0);
        driver.publish();
        let epoch = Epoch::from(first.clone());
        let mut vring = Vring::new(epoch.clone(), driver.layout, 0, 0).unwrap();
        let log = Log::new();
        vring.set_log(log.vring());
        vring.take(&mut Chain::new()).unwrap().unwrap();
        let end = |vring: &mut Vring| {
            vring.log_answer(&epoch);
            vring.push_used(0, 1);
        };
        if ends_before {
            end(&mut vring);
        }
        let user_addr = 0x7f00_0000_0000 + TABLE;
        let second = Epoch::from(first.without(TABLE, user_addr, 0x10_0000).unwrap());
        assert!(vring.is_in(&second));
        vring.attach(&second).unwrap();
        if !ends_before {
            end(&mut vring);
        }
        assert_eq!(log.pages(), NONE, "it is marked when it is published");
        vring.publish();
        let expected: Vec<u64> = [USED].into_iter().chain(read_pages()).collect();
        assert_eq!(log.pages(), expected, "{ends_before}");
    }
}

/// A vring that comes back to memory asks for kicks there, which is a write to be marked.
#[test]
fn a_vring_that_is_attached_again_marks_what_it_announces() {
    let mut pair = Pair::new(feature::EVENT_IDX, 0);
    let log = Log::new();
    pair.vring.set_log(log.vring());
    pair.vring.detach();
    assert_eq!(log.pages(), NONE);
    pair.vring
        .attach(&Epoch::from(pair.memory.clone()))
        .unwrap();
    assert_eq!(log.pages(), [USED]);
}

#[test]
fn an_answer_whose_pages_were_told_is_marked_without_reading_its_chain_again() {
    const TOLD: [Segment; 1] = [Segment {
        addr: DATA + 0x5000,
        len: 4096,
    }];
    let across = [Segment {
        addr: TOLD[0].addr + 1,
        ..TOLD[0]
    }];
    let told = vec![page(TOLD[0].addr), page(STATUS)];
    let mut pair = Pair::new(0, 0);
    pair.direct(&read_chain());
    for (what, answers, mut expected) in [
        ("one", vec![&TOLD[..]], told.clone()),
        ("two", vec![&TOLD, &TOLD], told.clone()),
        ("none", vec![], vec![]),
        ("no data", vec![&[]], vec![page(STATUS)]),
        ("data of two pages", vec![&across], read_pages()),
        ("two segments", vec![&[TOLD[0]; 2]], read_pages()),
        (
            "one of two",
            vec![&TOLD, &across],
            [told, read_pages()].concat(),
        ),
    ] {
        let log = Log::new();
        pair.vring.set_log(log.vring());
        for data in &answers {
            pair.vring.log_written(data, STATUS);
            pair.serve();
        }
        assert_eq!(log.pages(), NONE, "{what}: not published");
        pair.vring.publish();
        expected.extend((!answers.is_empty()).then_some(USED));
        expected.sort_unstable();
        expected.dedup();
        assert_eq!(log.pages(), expected, "{what}");
    }
    // Answers that are lost take what was told of them along: the next ones are not marked by it.
    let log = Log::new();
    pair.vring.set_log(log.vring());
    pair.vring.log_written(&TOLD, STATUS);
    pair.serve();
    pair.vring.detach();
    let epoch = Epoch::from(pair.memory.clone());
    pair.vring.attach(&epoch).unwrap();
    pair.serve();
    pair.vring.publish();
    assert!(log.pages().contains(&page(DATA + 0x8000)));
    // It is told the pages of one batch only.
    let log = Log::new();
    pair.vring.set_log(log.vring());
    pair.vring.log_written(&TOLD, STATUS);
    for _ in 0..2 {
        pair.serve();
        pair.vring.publish();
    }
    assert!(log.pages().contains(&page(DATA + 0x8000)));
}

#[test]
fn more_answers_than_there_is_room_to_tell_are_all_marked() {
    let mut pair = Pair::new(0, 0);
    let log = Log::new();
    pair.vring.set_log(log.vring());
    for index in 0..=TOLD_MAX as u64 {
        let addr = DATA + index * PAGE_BYTES;
        pair.vring.log_written(&[Segment { addr, len: 1 }], STATUS);
    }
    pair.direct(&read_chain());
    pair.serve();
    pair.vring.publish();
    let pages = log.pages();
    let told = (0..TOLD_MAX as u64).map(|index| page(DATA) + index);
    assert!(told.chain(read_pages()).all(|page| pages.contains(&page)));
}

/// Requests of almost 4 GiB, of which two are marked in a turn. The daemon may die after each turn.
#[test]
fn answers_are_marked_and_shown_in_as_many_turns_as_it_takes() {
    const ENTRIES: u16 = 16;
    /// Each answer has one page after this that no other has.
    const OWN: u64 = 1 << 32;
    let heads: Vec<u16> = (0..7).map(|number| 2 * number).collect();
    for turns in 1..=4 {
        let memory = memory(PAGES * PAGE_BYTES);
        let mut driver = Driver::new(&memory, 0, ENTRIES, 0);
        for head in heads.iter().copied() {
            let own = OWN + PAGE_BYTES * u64::from(head);
            driver.set(head, Desc(own, 1, NEXT | WRITE, head + 1));
            driver.set(head + 1, Desc(0, 0xffff_0000, WRITE, 0));
            driver.offer(head);
        }
        driver.publish();
        let layout = InflightLayout::new(1, ENTRIES);
        let region = Inflight::map(Inflight::create(layout).unwrap(), layout).unwrap();
        let ring = driver.layout;
        let start = || {
            let mut vring = Vring::new(memory.clone(), ring, 0, 0).unwrap();
            vring.keep(region.journal(0).unwrap());
            vring
        };
        let taken = |vring: &mut Vring| {
            let mut chain = Chain::new();
            let taken = std::iter::from_fn(|| vring.take(&mut chain).unwrap());
            taken.map(|taken| taken.head).collect::<Vec<u16>>()
        };
        let log = Log::of(0, page(OWN) / 8 + 2);
        let mut vring = start();
        vring.set_log(log.with(None, true));
        assert_eq!(taken(&mut vring), heads);
        heads.iter().for_each(|head| vring.push_used(*head, 1));
        let mut shown = 0;
        for turn in 1..=turns {
            vring.publish_within(&mut MarkingBudget::of_a_turn());
            while let Some((head, _)) = driver.reap() {
                assert_eq!(head, u32::from(heads[shown]));
                shown += 1;
            }
            assert_eq!(shown, (2 * turn).min(heads.len()));
            let marked = log.pages().into_iter().filter(|at| *at >= page(OWN));
            let own = heads[..shown]
                .iter()
                .map(|head| page(OWN) + u64::from(*head));
            assert!(marked.eq(own), "turn {turn}");
        }
        assert_eq!(usize::from(vring.added()), heads.len() - shown);
        drop(vring);
        assert_eq!(taken(&mut start()), heads[shown..], "{turns}");
    }
}

#[test]
fn a_log_that_is_cut_harms_nobody_else() {
    let _alone = crate::rig::alone();
    let mut pair = Pair::new(0, 0);
    let log = Log::new();
    pair.direct(&read_chain());
    pair.vring.set_log(log.vring());
    ftruncate(&log.file, 0).unwrap();
    assert!(!log.log.is_lost(), "not accessed yet");
    pair.serve();
    pair.vring.publish();
    assert!(log.log.is_lost());
    assert!(!pair.memory.is_lost());
    assert_eq!(pair.driver.reap(), Some((0, 1)));
}

/// Else a guest, by marking one page in two of a log that its VMM has cut, uses up the mappings that a process may have.
#[test]
fn a_log_that_is_cut_costs_no_mappings() {
    const LOG_PAGES: u64 = 64;
    let log = Log::of(0, LOG_PAGES * PAGE_BYTES);
    let start = log.log.mapping.start().addr();
    let end = start + (LOG_PAGES * PAGE_BYTES) as usize;
    ftruncate(&log.file, 0).unwrap();
    for place in (0..LOG_PAGES).step_by(2) {
        // A page of the log has the bits of so many.
        log.log.mark(place * 8 * PAGE_BYTES * PAGE_BYTES, 1);
    }
    assert!(log.log.is_lost());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let begins_in_it = |line: &&str| {
        let begin = line.split('-').next().unwrap();
        (start..end).contains(&usize::from_str_radix(begin, 16).unwrap())
    };
    let mappings = maps.lines().filter(begins_in_it).count();
    assert!(mappings <= 2, "{mappings}");
}
