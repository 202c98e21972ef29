use std::sync::atomic::Ordering::SeqCst;

use super::*;
use crate::RegionSpec;
use crate::rig::{Desc, Driver, INDIRECT, NEXT, WRITE, memory, read, segment, write};

const EVENT_IDX: u64 = feature::EVENT_IDX;

/// Returns a vring at 0 in 1 MiB, descriptor `n` being one readable byte-range at 0x80000 + 16 n.
fn pair(size: u16, base: u16, features: u64) -> (Driver, Vring, Chain) {
    let memory = memory(1 << 20);
    let driver = Driver::new(&memory, 0, size, base);
    for index in 0..size {
        driver.set(index, Desc(0x8_0000 + 16 * u64::from(index), 16, 0, 0));
    }
    let vring = Vring::new(memory, driver.layout, features, base).unwrap();
    (driver, vring, Chain::new())
}

#[test]
fn chains_come_in_order_and_go_back_across_the_index_wrap() {
    let (mut driver, mut vring, mut chain) = pair(8, 65530, 0);
    for round in 0..40u16 {
        for step in 0..=round % 8 {
            driver.offer((round + step) % 8);
        }
        driver.publish();
        for step in 0..=round % 8 {
            let head = (round + step) % 8;
            let taken = vring.take(&mut chain).unwrap().unwrap();
            assert_eq!(taken, TakenChain { head, fault: None });
            let expected = segment(0x8_0000 + 16 * u64::from(head), 16);
            assert_eq!(chain.readable(), [expected]);
            vring.push_used(head, u32::from(round));
        }
        assert_eq!(vring.take(&mut chain), Ok(None));
        assert_eq!(driver.reap(), None, "not visible before publish");
        vring.publish();
        for step in 0..=round % 8 {
            let head = u32::from((round + step) % 8);
            assert_eq!(driver.reap(), Some((head, u32::from(round))));
        }
        assert_eq!(vring.base(), driver.avail);
    }
}

#[test]
fn a_chain_is_taken_again_as_it_is_now_and_positions_stay() {
    let (mut driver, mut vring, mut chain) = pair(8, 65535, 0);
    driver.offer(3);
    driver.publish();
    let taken = vring.take(&mut chain).unwrap().unwrap();
    let before = (vring.base(), vring.seen());
    driver.set(3, Desc(0x9_0000, 32, 0, 0));
    chain.clear();
    assert_eq!(vring.retake(3, &mut chain), Ok(taken));
    assert_eq!(chain.readable(), [segment(0x9_0000, 32)]);
    assert_eq!((vring.base(), vring.seen()), before);
    driver.set(3, Desc(0x9_0000, 32, NEXT, 3));
    let fault = Some(crate::ChainFault::Endless);
    let endless = TakenChain { head: 3, fault };
    assert_eq!(vring.retake(3, &mut chain), Ok(endless));
    let beyond = VringFault::Head { head: 8, size: 8 };
    assert_eq!(vring.retake(8, &mut chain), Err(beyond));
    // It goes back once, and as many chains as before fit.
    vring.push_used(3, 1);
    vring.publish();
    assert_eq!(driver.reap(), Some((3, 1)));
    (0..8).for_each(|head| driver.offer(head));
    driver.publish();
    (0..8).for_each(|head| assert_eq!(vring.take(&mut chain).unwrap().unwrap().head, head));
    vring.detach();
    assert!(vring.retake(3, &mut chain).is_err());
}

#[test]
fn an_indirect_table_after_a_direct_descriptor_is_one_chain() {
    let (mut driver, mut vring, mut chain) = pair(8, 0, 0);
    write(
        &driver.memory,
        0x9_0001,
        &Desc(0x1000, 512, WRITE | NEXT, 1).bytes(),
    );
    write(&driver.memory, 0x9_0011, &Desc(0x2000, 1, WRITE, 0).bytes());
    driver.set(3, Desc(0x8_0000, 16, NEXT, 5));
    driver.set(5, Desc(0x9_0001, 32, INDIRECT | WRITE, 0));
    driver.offer(3);
    driver.publish();
    let taken = vring.take(&mut chain).unwrap().unwrap();
    assert_eq!(
        taken,
        TakenChain {
            head: 3,
            fault: None
        }
    );
    assert_eq!(chain.readable(), [segment(0x8_0000, 16)]);
    assert_eq!(chain.writable(), [segment(0x1000, 512), segment(0x2000, 1)]);
    assert_eq!(chain.status_addr(), Some(0x2000));
}

#[test]
fn a_head_beyond_the_table_is_a_fault_of_the_vring() {
    let (mut driver, mut vring, mut chain) = pair(8, 0, 0);
    driver.offer(8);
    driver.publish();
    let fault = VringFault::Head { head: 8, size: 8 };
    assert_eq!(vring.take(&mut chain), Err(fault));
    assert_eq!(vring.take(&mut chain), Err(fault), "the fault stays");
    assert_eq!(vring.base(), 0);
}

#[test]
fn an_available_index_more_than_the_size_ahead_is_a_fault() {
    for (ahead, sound) in [(8, true), (9, false), (32768, false), (65535, false)] {
        let (driver, mut vring, mut chain) = pair(8, 100, 0);
        let index = driver.index(driver.layout.avail_addr + 2);
        index.store(100u16.wrapping_add(ahead), SeqCst);
        assert_eq!(vring.take(&mut chain).is_ok(), sound, "{ahead}");
    }
}

#[test]
fn a_guest_that_never_waits_is_caught() {
    let (mut driver, mut vring, mut chain) = pair(4, 0, 0);
    for head in 0..4 {
        driver.offer(head);
    }
    driver.publish();
    while vring.take(&mut chain).unwrap().is_some() {}
    driver.offer(0);
    driver.publish();
    assert!(matches!(
        vring.take(&mut chain),
        Err(VringFault::AvailIndex {
            found: 5,
            next: 4,
            size: 4
        })
    ));
}

#[test]
fn event_index_decides_calls_as_the_specification_says() {
    let (mut driver, mut vring, mut chain) = pair(4, 65533, EVENT_IDX);
    let mut serve = |count: u16, used_event: u16| {
        driver.used_event().store(used_event, SeqCst);
        for _ in 0..count {
            driver.offer(0);
        }
        driver.publish();
        for _ in 0..count {
            vring.take(&mut chain).unwrap().unwrap();
            vring.push_used(0, 0);
        }
        (vring.publish(), vring.publish())
    };
    // (entries added, used_event, call): used goes 65533 → …
    assert_eq!(
        serve(1, 1234),
        (true, false),
        "the first one is always called for"
    );
    assert_eq!(serve(1, 65534), (true, false), "to 65535, passes 65534");
    assert_eq!(serve(1, 65534), (false, false), "to 0, 65534 is behind");
    assert_eq!(serve(3, 3), (false, false), "to 3, 3 is ahead");
    assert_eq!(serve(2, 3), (true, false), "to 5, passes 3");
    assert_eq!(serve(4, 4), (false, false), "to 9, 4 is behind");
    assert_eq!(serve(4, 12), (true, false), "to 13, passes the last");
}

#[test]
fn without_event_index_the_flag_decides_calls() {
    let (mut driver, mut vring, mut chain) = pair(4, 0, 0);
    for (flags, call) in [(1, false), (0, true), (3, false), (2, true)] {
        driver.avail_flags().store(flags, SeqCst);
        driver.offer(0);
        driver.publish();
        vring.take(&mut chain).unwrap().unwrap();
        assert!(!vring.publish(), "nothing was added");
        vring.push_used(0, 0);
        assert_eq!(vring.publish(), call, "{flags}");
    }
}

#[test]
fn arming_asks_for_kicks_and_finds_new_entries() {
    for features in [0, EVENT_IDX] {
        let (mut driver, mut vring, mut chain) = pair(4, 7, features);
        assert_eq!(driver.used_flags().load(SeqCst), 0, "starts armed");
        vring.disarm();
        assert_eq!(driver.used_flags().load(SeqCst), u16::from(features == 0));
        driver.offer(0);
        assert!(!vring.arm());
        assert_eq!(driver.used_flags().load(SeqCst), 0);
        driver.publish();
        assert!(vring.arm());
        vring.take(&mut chain).unwrap().unwrap();
        assert!(!vring.arm());
        if features != 0 {
            assert_eq!(driver.avail_event().load(SeqCst), 8);
            vring.disarm();
            // The next entry is 8, for which the guest would have kicked.
            assert_eq!(driver.avail_event().load(SeqCst), 7);
        }
    }
}

#[test]
fn a_start_resets_the_announcements_of_an_earlier_daemon() {
    let memory = memory(1 << 20);
    let mut driver = Driver::new(&memory, 0, 4, 9);
    driver.used_flags().store(1, SeqCst);
    driver.avail_event().store(4711, SeqCst);
    let mut vring = Vring::new(memory, driver.layout, EVENT_IDX, 9).unwrap();
    assert_eq!(driver.used_flags().load(SeqCst), 0);
    assert_eq!(driver.avail_event().load(SeqCst), 9);
    driver.offer(2);
    driver.publish();
    vring.take(&mut Chain::new()).unwrap().unwrap();
    vring.push_used(2, 5);
    assert!(vring.publish());
    assert_eq!(
        driver.reap(),
        Some((2, 5)),
        "the entry is where the guest expects it"
    );
}

/// The frontend passes the kick descriptor first; the driver zeroes the ring later.
#[test]
fn a_ring_that_is_initialised_after_its_start_keeps_its_used_position() {
    let memory = memory(1 << 20);
    let mut driver = Driver::new(&memory, 0, 4, 77);
    let mut vring = Vring::new(memory.clone(), driver.layout, 0, 0).unwrap();
    let mut chain = Chain::new();
    // The old index in that memory means nothing yet.
    write(&memory, driver.layout.avail_addr + 2, &0u16.to_le_bytes());
    assert_eq!(vring.take(&mut chain), Ok(None));
    driver = Driver::new(&memory, 0, 4, 0);
    driver.set(0, Desc(0x8_0000, 16, 0, 0));
    driver.offer(0);
    driver.publish();
    assert!(vring.take(&mut chain).unwrap().is_some());
    vring.push_used(0, 5);
    assert!(vring.publish());
    assert_eq!(driver.reap(), Some((0, 5)));
}

#[test]
fn impossible_layouts_are_refused() {
    let memory = memory(0x1_0000);
    let good = Driver::new(&memory, 0, 8, 0).layout;
    let at = |size, desc_addr, avail_addr, used_addr| VringLayout {
        size,
        desc_addr,
        avail_addr,
        used_addr,
    };
    assert!(Vring::new(memory.clone(), good, 0, 0).is_ok());
    for (layout, error) in [
        (VringLayout { size: 0, ..good }, VringError::Size(0)),
        (VringLayout { size: 3, ..good }, VringError::Size(3)),
        (
            VringLayout {
                size: 65535,
                ..good
            },
            VringError::Size(65535),
        ),
        (at(8, 8, 0x200, 0x400), VringError::Align(8)),
        (at(8, 0, 0x201, 0x400), VringError::Align(0x201)),
        (at(8, 0, 0x200, 0x402), VringError::Align(0x402)),
        (at(8, 0xff90, 0x200, 0x400), VringError::Unmapped(0xff90)),
        (at(8, 0, 0xffec, 0x400), VringError::Unmapped(0xffec)),
        (at(8, 0, 0x200, 0xffbc), VringError::Unmapped(0xffbc)),
        (at(8, 0, 0x200, 1 << 32), VringError::Unmapped(1 << 32)),
        (
            at(8, u64::MAX - 15, 0x200, 0x400),
            VringError::Unmapped(u64::MAX - 15),
        ),
    ] {
        let refused = Vring::new(memory.clone(), layout, 0, 0).map(|vring| vring.size());
        assert_eq!(refused, Err(error), "{layout:?}");
    }
    // The last locations that fit.
    assert!(Vring::new(memory.clone(), at(8, 0xff80, 0xffea, 0xffb8), 0, 0).is_ok());
}

#[test]
fn a_detached_vring_does_nothing_and_continues_at_its_position() {
    for features in [0, EVENT_IDX] {
        let (mut driver, mut vring, mut chain) = pair(4, 7, features);
        driver.offer(1);
        driver.publish();
        vring.take(&mut chain).unwrap().unwrap();
        vring.push_used(1, 3);
        assert!(vring.publish());
        driver.offer(2);
        driver.publish();
        assert!(vring.arm(), "seen, not taken");
        let epoch = Epoch::from(driver.memory.clone());
        vring.detach();
        assert!(vring.is_detached() && !vring.is_in(&epoch));
        assert_eq!(vring.take(&mut chain), Ok(None));
        vring.push_used(1, 3);
        assert!(!vring.publish() && !vring.arm());
        vring.disarm();
        // An earlier daemon left these.
        driver.used_flags().store(1, SeqCst);
        driver.avail_event().store(4711, SeqCst);
        vring.attach(&epoch).unwrap();
        assert_eq!(driver.used_flags().load(SeqCst), 0);
        assert_eq!(
            driver.avail_event().load(SeqCst),
            if features == 0 { 4711 } else { 8 }
        );
        assert_eq!(
            vring.take(&mut chain).unwrap().map(|taken| taken.head),
            Some(2)
        );
        vring.push_used(2, 4);
        vring.publish();
        assert_eq!(
            (driver.reap(), driver.reap(), driver.reap()),
            (Some((1, 3)), Some((2, 4)), None)
        );
    }
}

#[test]
fn a_vring_is_in_tables_that_have_the_same_bytes() {
    let spec = crate::rig::region(0, 0x1_0000);
    let again = |file_offset| RegionSpec {
        file: spec.file.try_clone().unwrap(),
        file_offset,
        len_bytes: 0x1_0000 - file_offset,
        ..crate::rig::region(0, 0x1000)
    };
    let (same, shifted) = (again(0), again(0x1000));
    let memory = Memory::new(vec![spec]).unwrap();
    let layout = Driver::new(&memory, 0, 8, 0).layout;
    let vring = Vring::new(memory.clone(), layout, 0, 0).unwrap();
    let is_in = |regions| vring.is_in(&Epoch::from(Memory::new(regions).unwrap()));
    assert!(vring.is_in(&Epoch::from(memory)));
    assert!(is_in(vec![same]), "mapped again");
    assert!(!is_in(vec![shifted]), "other bytes of the file");
    assert!(
        !is_in(vec![crate::rig::region(0, 0x1_0000)]),
        "another file"
    );
    assert!(!is_in(vec![]));
}

#[test]
fn moving_to_another_table_keeps_positions() {
    let (mut driver, mut vring, mut chain) = pair(4, 0, 0);
    driver.offer(1);
    driver.publish();
    vring.take(&mut chain).unwrap().unwrap();
    let bigger = driver
        .memory
        .with(crate::rig::region(1 << 30, 4096))
        .unwrap();
    vring.attach(&bigger.into()).unwrap();
    vring.push_used(1, 3);
    assert!(vring.publish());
    assert_eq!(driver.reap(), Some((1, 3)));
    assert_eq!(vring.base(), 1);
    let nothing = Memory::new(vec![]).unwrap();
    assert_eq!(vring.attach(&nothing.into()), Err(VringError::Unmapped(0)));
    let _: [u8; 1] = read(&driver.memory, 0);
}
