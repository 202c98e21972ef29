use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;
use crate::children;
use crate::superblock::SUPERBLOCK_BYTES;

const CHUNK: u32 = 64 << 10;
const LEG: u64 = 4 << 20;

/// Makes a file of zeroes.
fn leg(folder: &TempDir, name: &str, bytes: u64) -> DiskSpec {
    let path = folder.path().join(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    DiskSpec::Path(path)
}

fn at(leg: &DiskSpec) -> PathBuf {
    leg.path().unwrap().to_owned()
}

fn open(legs: &[&DiskSpec]) -> Result<Disk, OpenError> {
    let legs: Vec<_> = legs.iter().copied().cloned().collect();
    let options = OpenOptions::default();
    Disk::open_stripe(&legs, CHUNK, StripeKind::Superblocks, &options)
}

/// Checks for an error of one line that contains `wanted`.
fn says<T>(result: Result<T, OpenError>, wanted: &str) {
    let Err(error) = result else {
        panic!("there was no error; expected: {wanted}")
    };
    let why = error.to_string();
    assert!(why.contains(wanted) && !why.contains('\n'), "{why}");
}

#[test]
fn an_unservable_leg_is_refused_before_any_leg_is_written() {
    let folder = TempDir::new().unwrap();
    let good = leg(&folder, "good", LEG);
    for (odd_bytes, remedy) in [
        (
            1_000_100,
            "1000100 bytes, which is not a multiple of 512; round it up: truncate -s %512",
        ),
        (LEG + 1, "not a multiple of 512"),
    ] {
        let odd = leg(&folder, "odd", odd_bytes);
        let legs = [good.clone(), odd.clone()];
        for overwrite in [Overwrite::No, Overwrite::Yes] {
            says(create_stripe(&legs, CHUNK, overwrite), remedy);
        }
        for leg in &legs {
            let bytes = fs::read(at(leg)).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0), "{leg} was written");
        }
        let file = File::options().write(true).open(at(&odd)).unwrap();
        file.set_len(odd_bytes.next_multiple_of(512)).unwrap();
        create_stripe(&legs, CHUNK, Overwrite::Yes).unwrap();
        open(&[&good, &odd]).unwrap();
        leg(&folder, "good", LEG);
    }
}

#[test]
fn legs_of_no_stripe_are_refused_with_the_remedy() {
    let folder = TempDir::new().unwrap();
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| leg(&folder, name, LEG));
    create_stripe(&[a.clone(), b.clone()], CHUNK, Overwrite::No).unwrap();
    create_stripe(&[c.clone(), d.clone()], CHUNK, Overwrite::No).unwrap();
    let copy = DiskSpec::Path(folder.path().join("copy"));
    fs::copy(at(&a), at(&copy)).unwrap();
    open(&[&a, &b]).unwrap();
    let order = format!("the right order: --disk {a} --disk {b}");
    says(open(&[&b, &a]), &order);
    says(open(&[&a, &d]), "belongs to another stripe");
    says(open(&[&a, &copy]), "name one of them");
    says(open(&[&a, &b, &copy]), "name one of them");
    says(open(&[&a, &a]), "name each leg once");
    let again = create_stripe(&[a.clone(), c.clone()], CHUNK, Overwrite::No);
    says(again, "with --force");
    let file = File::options().write(true).open(at(&b)).unwrap();
    for (bytes, wanted) in [
        (LEG + 4096, "give it the size that it had"),
        (LEG - 4096, "give it the size that it had"),
        (LEG / 2, "was cut short"),
    ] {
        file.set_len(bytes).unwrap();
        says(open(&[&a, &b]), wanted);
    }
    // A new stripe over two old ones: the remaining legs of each are not a stripe.
    create_stripe(&[a.clone(), c.clone()], CHUNK, Overwrite::Yes).unwrap();
    open(&[&a, &c]).unwrap();
    says(open(&[&c, &d]), "belongs to another stripe");
    says(open(&[&copy, &c]), "belongs to another stripe");
}

/// The last block of a leg.
type Block = [u8; SUPERBLOCK_BYTES as usize];
const SMALL: u64 = 1 << 20;

fn last_block(leg: &DiskSpec) -> Block {
    let mut block = [0; SUPERBLOCK_BYTES as usize];
    let file = File::open(at(leg)).unwrap();
    file.read_exact_at(&mut block, SMALL - SUPERBLOCK_BYTES)
        .unwrap();
    block
}

fn set_last_block(leg: &DiskSpec, block: &Block) {
    let file = File::options().write(true).open(at(leg)).unwrap();
    file.write_all_at(block, SMALL - SUPERBLOCK_BYTES).unwrap();
}

/// Returns a block whose sectors in the mask are those of `new`, the others those of `old`.
fn torn(old: &Block, new: &Block, mask: u8) -> Block {
    let mut block = *old;
    for sector in (0..8).filter(|sector| mask >> sector & 1 == 1) {
        let bytes = sector * 512..(sector + 1) * 512;
        block[bytes.clone()].copy_from_slice(&new[bytes]);
    }
    block
}

/// A crash may leave any set of sectors of the superblocks written. The legs then form the old stripe, the
/// new one or none: legs of different stripes are never served together, nor in a wrong order.
#[test]
fn a_crash_during_creation_leaves_the_old_stripe_or_the_new_one_or_none() {
    let folder = TempDir::new().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| leg(&folder, name, SMALL));
    let legs = [&a, &b, &c];
    let make = |legs: [&DiskSpec; 3], chunk| {
        create_stripe(&legs.map(DiskSpec::clone), chunk, Overwrite::Yes).unwrap();
    };
    let serial = |legs: [&DiskSpec; 3]| open(&legs).map(|disk| disk.serial()).ok();
    let (mut states, mut served) = (0, [0; 3]);
    let befores: [&dyn Fn(); 4] = [
        &|| legs.iter().for_each(|leg| set_last_block(leg, &[0; 4096])),
        &|| {
            legs.iter()
                .for_each(|leg| set_last_block(leg, &[0xa5; 4096]))
        },
        &|| make([&a, &b, &c], CHUNK),
        &|| make([&b, &a, &c], CHUNK),
    ];
    for before in befores {
        before();
        let old = legs.map(last_block);
        let was = [serial(legs), serial([&b, &a, &c])];
        make(legs, CHUNK);
        let new = legs.map(last_block);
        let is = serial(legs);
        assert!(is.is_some() && is != was[0] && is != was[1]);
        // All superblocks in all states of their first sector, which identifies them, each torn in several ways.
        for heads in 0..8_u8 {
            for tear in [0x00, 0xfe, 0x02, 0x80, 0x54, 0xaa] {
                let masks: [u8; 3] = std::array::from_fn(|leg| heads >> leg & 1 | tail(tear, leg));
                for (nth, leg) in legs.iter().enumerate() {
                    set_last_block(leg, &torn(&old[nth], &new[nth], masks[nth]));
                }
                let found = [serial(legs), serial([&b, &a, &c])];
                let right = match heads {
                    0 => was,
                    7 => [is, None],
                    _ => [None, None],
                };
                assert_eq!(found, right, "{masks:02x?}");
                states += 1;
                served[0] += usize::from(heads == 0 && found != [None, None]);
                served[1] += usize::from(heads == 7 && found != [None, None]);
                served[2] += usize::from(found == [None, None]);
            }
        }
    }
    // Two of the four are stripes before, and all are one afterwards.
    assert_eq!((states, served), (4 * 48, [2 * 6, 4 * 6, 2 * 6 + 4 * 36]));
}

/// Returns the sectors after the first one that are written; different on each leg.
fn tail(tear: u8, leg: usize) -> u8 {
    tear.rotate_left(leg as u32) & !1
}

/// With --stripe-raw, one superblock is enough for an error that the guest would overwrite it.
#[test]
fn raw_legs_after_a_crash_during_creation_are_refused() {
    let folder = TempDir::new().unwrap();
    let legs = ["a", "b", "c"].map(|name| leg(&folder, name, SMALL));
    create_stripe(&legs, CHUNK, Overwrite::No).unwrap();
    let new = legs.each_ref().map(last_block);
    for heads in 0..8_u8 {
        for (nth, leg) in legs.iter().enumerate() {
            let mask = if heads >> nth & 1 == 1 { 0xff } else { 0 };
            set_last_block(leg, &torn(&[0; 4096], &new[nth], mask));
        }
        let options = OpenOptions::default();
        let raw = Disk::open_stripe(&legs, CHUNK, StripeKind::Raw, &options);
        assert_eq!(raw.is_ok(), heads == 0, "{heads:b}");
    }
}

/// Opens a stripe whose legs another program may have at first.
fn open_later(legs: &[DiskSpec]) -> Disk {
    let options = OpenOptions {
        locking: Locking::Later,
        ..OpenOptions::default()
    };
    Disk::open_stripe(legs, CHUNK, StripeKind::Superblocks, &options).unwrap()
}

#[test]
fn all_legs_are_acquired_or_none() {
    let folder = TempDir::new().unwrap();
    let legs = ["a", "b", "c"].map(|name| leg(&folder, name, LEG));
    create_stripe(&legs, CHUNK, Overwrite::No).unwrap();
    let target = open_later(&legs);
    let source = open_later(&legs);
    source.acquire().unwrap();
    assert!(target.acquire().is_err());
    source.release().unwrap();
    for held in &legs {
        let other = Disk::open(
            held,
            &OpenOptions {
                read_only: true,
                ..OpenOptions::default()
            },
        );
        let other = other.unwrap();
        let refused = target.acquire().unwrap_err();
        assert!(refused.to_string().contains(&held.to_string()), "{refused}");
        // Whatever comes before that leg is free again.
        drop(other);
        children::none_run();
        source.acquire().unwrap();
        source.release().unwrap();
    }
    target.acquire().unwrap();
}

#[test]
fn a_stripe_is_acquired_only_with_the_legs_that_were_opened() {
    let folder = TempDir::new().unwrap();
    let legs = ["a", "b"].map(|name| leg(&folder, name, SMALL));
    create_stripe(&legs, CHUNK, Overwrite::No).unwrap();
    let before = legs.each_ref().map(last_block);
    let stripe = open_later(&legs);
    // A leg that grew has its superblock where it was.
    let second = File::options().write(true).open(at(&legs[1])).unwrap();
    second.set_len(2 * SMALL).unwrap();
    stripe.acquire().unwrap();
    stripe.release().unwrap();
    second.set_len(SMALL).unwrap();
    create_stripe(&legs, CHUNK, Overwrite::Yes).unwrap();
    says(stripe.acquire(), "belongs to another stripe by now");
    assert!(stripe.acquire().unwrap_err().needs_reopening());
    legs.iter()
        .zip(&before)
        .for_each(|(leg, block)| set_last_block(leg, block));
    stripe.acquire().unwrap();
    stripe.release().unwrap();
    second.set_len(SMALL / 2).unwrap();
    says(stripe.acquire(), "was cut short");
    // The other leg is free.
    let options = OpenOptions::default();
    let other = DiskSpec::Raw(at(&legs[0]));
    Disk::open(&other, &options).unwrap();
}
