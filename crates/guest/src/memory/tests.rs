use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::thread;

use rustix::fs::ftruncate;

use super::*;
use crate::rig::{Driver, file, memory, read, region, segment, write};
use crate::{Chain, Vring};

#[test]
fn a_range_over_neighbouring_regions_is_served_in_pieces() {
    let memory = Memory::new(vec![region(0x3000, 0x1000), region(0x1000, 0x2000)]).unwrap();
    let bytes: Vec<u8> = (0..32).collect();
    write(&memory, 0x2ff0, &bytes);
    assert_eq!(read::<32>(&memory, 0x2ff0)[..], bytes[..]);
    let mut pieces = Vec::new();
    let both = segment(0x2ff0, 32);
    memory.resolve(both, |_, len| pieces.push(len)).unwrap();
    assert_eq!(pieces, [16, 16]);
}

#[test]
fn memory_that_was_found_sound_is_not_looked_at_again_until_more_is_lost() {
    let _alone = crate::rig::alone();
    let cut = |spec: RegionSpec| {
        let cut_file = spec.file.try_clone().unwrap();
        let memory = Memory::new(vec![spec]).unwrap();
        let touch = move |memory: &Memory| {
            ftruncate(&cut_file, 0).unwrap();
            memory.copy_in(&[segment(0, 1)], &mut [0]).unwrap_err();
        };
        (memory, touch)
    };
    let (lost, lose) = cut(region(0, 0x1000));
    let (memory, lose_this) = cut(region(0, 0x1000));
    lose(&lost);
    let is_known_sound = || memory.sound_at.load(Ordering::Relaxed) == sigbus::marks();
    assert!(!is_known_sound());
    assert!(Memory::any_is_lost() && !memory.is_lost());
    assert!(is_known_sound());
    // Further pages of what is lost already change nothing.
    assert!(lost.is_lost() && !memory.is_lost() && is_known_sound());
    lose_this(&memory);
    assert!(memory.is_lost() && !is_known_sound());
}

#[test]
fn a_partly_mapped_range_is_refused_at_its_first_unmapped_byte() {
    let table = vec![
        region(0x1000, 0x1000),
        region(0x2000, 0x1000),
        region(0x8000, 0x1000),
    ];
    let memory = Memory::new(table).unwrap();
    for (addr, len, mapped) in [
        (0x1000, 1, true),
        (0x2fff, 1, true),
        (0x1fff, 2, true),
        (0x1000, 0x2000, true),
        (0xfff, 1, false),
        (0xfff, 2, false),
        (0x3000, 1, false),
        (0x2fff, 2, false),
        (0x1000, 0x2001, false),
        (0x2000, 0x7000, false),
        (0x8fff, u32::MAX, false),
        (0, u32::MAX, false),
        (u64::MAX, 1, false),
        (u64::MAX, 2, false),
        (u64::MAX - 7, 16, false),
        (0x5000, 0, true),
        (u64::MAX, 0, true),
    ] {
        let mut bytes = 0;
        let found = memory.resolve(segment(addr, len), |_, len| bytes += len as u64);
        assert_eq!(found.is_ok(), mapped, "{addr:#x} {len:#x}");
        let whole = bytes == u64::from(len);
        assert_eq!(whole, mapped, "{addr:#x} {len:#x}: {bytes:#x}");
        assert_eq!(
            memory.covers(segment(addr, len)),
            mapped,
            "{addr:#x} {len:#x}"
        );
    }
}

#[test]
fn a_look_up_ends_where_its_receiver_breaks_off() {
    let table = (0..Memory::REGIONS_MAX as u64).map(|at| region(at * 0x1000, 0x1000));
    let memory = Memory::new(table.collect()).unwrap();
    let all = segment(0x800, (Memory::REGIONS_MAX as u32 - 1) * 0x1000);
    for most in [1, 2, 300, 509, 510] {
        let mut pieces = 0;
        let found = memory.resolve_until(all, |_, _| {
            pieces += 1;
            match pieces < most {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        });
        assert_eq!((pieces, found.is_ok()), (most.min(509), most > 509));
    }
}

#[test]
fn a_region_may_end_at_the_end_of_the_address_space() {
    let mut spec = region(0, 0x1000);
    spec.guest_addr = u64::MAX - 0xfff;
    let memory = Memory::new(vec![spec]).unwrap();
    assert!(memory.covers(segment(u64::MAX, 1)));
    assert!(!memory.covers(segment(u64::MAX, 2)));
}

#[test]
fn copies_stop_at_the_shorter_of_stream_and_bytes() {
    let memory = memory(0x1000);
    let stream = [segment(0, 2), segment(9, 0), segment(0x100, 3)];
    assert_eq!(memory.copy_out(&stream, b"abcdefgh"), Ok(5));
    assert_eq!(read::<2>(&memory, 0), *b"ab");
    assert_eq!(read::<4>(&memory, 0x100), *b"cde\0");
    let mut out = *b"........";
    assert_eq!(memory.copy_in(&stream, &mut out), Ok(5));
    assert_eq!(&out, b"abcde...");
    let mut three = *b"...";
    assert_eq!(memory.copy_in(&stream, &mut three), Ok(3));
    assert_eq!(&three, b"abc");
}

#[test]
fn a_copy_out_that_is_refused_writes_nothing() {
    let memory = memory(0x1000);
    let stream = [segment(0, 2), segment(0x5000, 2)];
    assert_eq!(memory.copy_out(&stream, b"abcd"), Err(Unmapped));
    assert_eq!(read::<2>(&memory, 0), [0, 0]);
    assert_eq!(
        memory.copy_out(&stream, b"ab"),
        Ok(2),
        "the rest is not read"
    );
    memory.spot(0xfff).unwrap().store(7);
    assert_eq!(read::<1>(&memory, 0xfff), [7]);
    assert!(memory.spot(0x1000).is_none());
}

#[test]
fn sixteen_bytes_are_copied_where_they_lie_in_one_piece() {
    let memory = memory(0x1000);
    write(&memory, 0xff0, b"0123456789abcdef");
    let whole = memory.copy_16(&[segment(0xff0, 16), segment(0x5000, 1)]);
    assert_eq!(whole.as_ref(), Some(b"0123456789abcdef"));
    assert_eq!(
        memory.copy_16(&[segment(0xfef, 17)]).map(|b| b[1]),
        Some(b'0')
    );
    for scattered in [
        &[segment(0xff0, 8), segment(0xff8, 8)][..],
        &[segment(0xff1, 16)],
        &[segment(u64::MAX - 4, 16)],
        &[],
    ] {
        assert_eq!(memory.copy_16(scattered), None, "{scattered:?}");
    }
}

#[test]
fn impossible_tables_are_refused() {
    let with = |change: &dyn Fn(&mut RegionSpec)| {
        let mut spec = region(0x10_0000, 0x4000);
        change(&mut spec);
        Memory::new(vec![region(0, 0x10_0000), spec]).map(|_| ())
    };
    assert!(with(&|_| ()).is_ok());
    let length = |change: &dyn Fn(&mut RegionSpec)| {
        assert!(matches!(with(change), Err(MapError::Length { .. })));
    };
    length(&|spec| spec.len_bytes = 0);
    length(&|spec| spec.guest_addr = u64::MAX - 0x3ffe);
    length(&|spec| spec.user_addr = u64::MAX - 0x3ffe);
    length(&|spec| spec.file_offset = u64::MAX - 5);
    let short = |change: &dyn Fn(&mut RegionSpec)| {
        assert!(matches!(with(change), Err(MapError::Short { .. })));
    };
    short(&|spec| spec.file_offset = 1);
    short(&|spec| spec.len_bytes = 0x4001);
    short(&|spec| spec.len_bytes = 1 << 62);
    short(&|spec| spec.file = file(0x3fff));
    let overlap = |change: &dyn Fn(&mut RegionSpec)| {
        assert!(matches!(with(change), Err(MapError::Overlap { .. })));
    };
    overlap(&|spec| spec.guest_addr = 0xf_ffff);
    overlap(&|spec| spec.guest_addr = 0);
    overlap(&|spec| spec.user_addr -= 1);
    let refused = |change: &dyn Fn(&mut RegionSpec)| {
        assert!(matches!(with(change), Err(MapError::Map { .. })));
    };
    refused(&|spec| spec.file = File::open("/").unwrap());
    refused(&|spec| spec.file = File::open("/dev/zero").unwrap());
    refused(&|spec| spec.file = File::open("/proc/self/exe").unwrap());
}

#[test]
fn user_addresses_may_overlap_where_the_memory_is_the_same() {
    let first = region(0, 0x4000);
    let alias = RegionSpec {
        guest_addr: 0x10_0000,
        user_addr: first.user_addr + 0x1000,
        len_bytes: 0x1000,
        file_offset: 0x1000,
        file: first.file.try_clone().unwrap(),
    };
    let user_addr = first.user_addr;
    let memory = Memory::new(vec![alias, first]).unwrap();
    write(&memory, 0x10_0010, b"x");
    assert_eq!(read::<1>(&memory, 0x1010), *b"x");
    assert_eq!(memory.guest_addr(user_addr + 0x3fff), Some(0x3fff));
    assert_eq!(memory.guest_addr(user_addr + 0x4000), None);
    assert_eq!(memory.guest_addr(user_addr - 1), None);
}

#[test]
fn a_file_offset_inside_a_page_is_kept() {
    let mut spec = region(0x1000, 0x3000);
    spec.len_bytes = 0x2000 - 0x123;
    spec.file_offset = 0x1123;
    let file = spec.file.try_clone().unwrap();
    let memory = Memory::new(vec![spec]).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"here", 0x1123).unwrap();
    assert_eq!(read::<4>(&memory, 0x1000), *b"here");
}

#[test]
fn tables_change_by_one_region_and_share_the_others() {
    let spec = region(0x1000, 0x1000);
    let (user_addr, first) = (spec.user_addr, Memory::new(vec![spec]).unwrap());
    let second = first.with(region(0x8000, 0x1000)).unwrap();
    let third = second.without(0x1000, user_addr, 0x1000).unwrap();
    drop(second);
    write(&first, 0x1000, b"a");
    assert!(!third.covers(segment(0x1000, 1)) && third.covers(segment(0x8000, 1)));
    assert!(matches!(
        third.with(region(0x8800, 16)),
        Err(MapError::Overlap { .. })
    ));
    for (guest_addr, user_addr, len_bytes) in [
        (0x1000, user_addr, 0xfff),
        (0x1000, 0, 0x1000),
        (0, user_addr, 0x1000),
    ] {
        let named = first.without(guest_addr, user_addr, len_bytes);
        assert!(matches!(named, Err(MapError::Unknown { .. })));
    }
    let nothing = first.without(0x1000, user_addr, 0x1000).unwrap();
    assert!(!nothing.covers(segment(0x1000, 1)) && nothing.covers(segment(0, 0)));
}

#[test]
fn a_region_has_departed_when_its_last_holder_lets_go() {
    let now = Duration::ZERO;
    let spec = region(0x1000, 0x1000);
    let user_addr = spec.user_addr;
    let first = Memory::new(vec![spec]).unwrap();
    let second = first.with(region(0x8000, 0x1000)).unwrap();
    assert!(
        first.departing(&second).is_over_within(now),
        "nothing leaves"
    );
    let third = second.without(0x1000, user_addr, 0x1000).unwrap();
    let departure = second.departing(&third);
    let holder = Epoch::from(first);
    let other = holder.clone();
    drop((second, holder));
    assert!(!departure.is_over_within(now), "an epoch holds it");
    drop(other);
    assert!(departure.is_over_within(now));
    assert!(third.covers(segment(0x8000, 1)));
}

#[test]
fn a_region_is_unmapped_by_the_thread_that_waits_for_that() {
    let spec = region(0x1000, 0x1000);
    let inode = spec.file.metadata().unwrap().ino();
    let is_mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.contains(&format!(" {inode} "))
    };
    let memory = Memory::new(vec![spec]).unwrap();
    let departure = memory.departing(&Memory::new(Vec::new()).unwrap());
    thread::spawn(|| drop(Epoch::from(memory))).join().unwrap();
    assert!(is_mapped(), "a worker's thread has unmapped a guest");
    assert!(departure.is_over_within(Duration::ZERO));
    assert!(!is_mapped());
}

#[test]
fn tables_hold_at_most_regions_max_regions() {
    let file = file(0x1000);
    let spec = |index: usize| RegionSpec {
        guest_addr: 0x1000 * index as u64,
        user_addr: 0x1000 * index as u64,
        len_bytes: 0x1000,
        file_offset: 0,
        file: file.try_clone().unwrap(),
    };
    let full = Memory::new((0..Memory::REGIONS_MAX).map(spec).collect()).unwrap();
    assert!(matches!(
        full.with(spec(Memory::REGIONS_MAX)),
        Err(MapError::TooMany(509))
    ));
    let over = Memory::new((0..=Memory::REGIONS_MAX).map(spec).collect());
    assert!(matches!(over, Err(MapError::TooMany(509))));
}

/// Sparse files cost the frontend nothing, and all guests of the process share its address space.
#[test]
fn a_table_is_refused_more_than_its_share_of_the_address_space() {
    const TIB: u64 = 1 << 40;
    let refused = |table: Result<Arc<Memory>, MapError>| {
        assert!(matches!(table, Err(MapError::NoRoom { .. })), "{table:?}");
    };
    refused(Memory::new(vec![region(0, 64 * TIB)]));
    let parts = |count: u64| (0..count).map(|at| region(at * TIB, TIB)).collect();
    refused(Memory::new(parts(9)));
    for _ in 0..2 {
        // A table that is dropped gives its room back.
        let memory = Memory::new(parts(6)).unwrap();
        refused(memory.with(region(6 * TIB, 3 * TIB)));
        memory.with(region(6 * TIB, TIB)).unwrap();
    }
}

#[test]
fn memory_that_is_cut_is_lost_and_the_process_survives() {
    let _alone = crate::rig::alone();
    // The end in the middle of a page leaves that page, whatever its size up to 64 KiB.
    for left_bytes in [0, 0x1_8000] {
        let spec = region(0, 0x10_0000);
        let file = spec.file.try_clone().unwrap();
        let memory = Memory::new(vec![spec]).unwrap();
        let other = crate::rig::memory(0x1000);
        write(&memory, 0x2_0000, b"data");
        ftruncate(&file, left_bytes).unwrap();
        assert!(!memory.is_lost(), "not accessed yet");
        let mut out = [1; 4];
        assert_eq!(
            memory.copy_in(&[segment(0x2_0000, 4)], &mut out),
            Err(Unmapped)
        );
        assert_eq!(out, [0; 4], "zeroes instead of the page");
        assert!(memory.is_lost());
        assert_eq!(
            memory.copy_out(&[segment(0x8_0000, 1)], &[1]),
            Err(Unmapped)
        );
        assert!(memory.spot(0x9_0000).is_none());
        assert_eq!(memory.copy_16(&[segment(0x9_0000, 16)]), None);
        assert!(!memory.covers(segment(0, 1)));
        assert!(!other.is_lost(), "other memory is unaffected");
        write(&other, 0, b"fine");
    }
}

#[test]
fn a_vring_whose_memory_is_cut_continues_in_zeroes() {
    let _alone = crate::rig::alone();
    let spec = region(0, 0x10_0000);
    let file = spec.file.try_clone().unwrap();
    let memory = Memory::new(vec![spec]).unwrap();
    let mut driver = Driver::new(&memory, 0x4_0000, 256, 0);
    let mut vring = Vring::new(memory.clone(), driver.layout, 0, 0).unwrap();
    let mut chain = Chain::new();
    driver.offer(3);
    driver.publish();
    vring.take(&mut chain).unwrap().unwrap();
    ftruncate(&file, 0x4_0000).unwrap();
    vring.push_used(3, 0);
    vring.publish();
    let _ = vring.take(&mut chain);
    let _ = vring.arm();
    vring.disarm();
    assert!(memory.is_lost());
    drop(driver);
}
