use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;

const CHUNK: u32 = 64 << 10;
const LEG: u64 = 4 << 20;

/// A file of zeroes.
fn leg(folder: &TempDir, name: &str, bytes: u64) -> DiskSpec {
    let path = folder.path().join(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    DiskSpec::Path(path)
}

fn at(leg: &DiskSpec) -> PathBuf {
    path(leg).unwrap().to_owned()
}

fn open(legs: &[&DiskSpec]) -> Result<Disk, OpenError> {
    let legs: Vec<_> = legs.iter().copied().cloned().collect();
    let options = OpenOptions::default();
    Disk::open_stripe(&legs, CHUNK, StripeKind::Superblocks, &options)
}

/// One line that names the remedy.
fn says<T>(result: Result<T, OpenError>, wanted: &str) {
    let Err(error) = result else {
        panic!("nothing was refused, and not: {wanted}")
    };
    let why = error.to_string();
    assert!(why.contains(wanted) && !why.contains('\n'), "{why}");
}

#[test]
fn what_could_not_be_served_is_no_leg_and_no_leg_is_written() {
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
fn legs_that_are_no_stripe_are_refused_with_the_remedy() {
    let folder = TempDir::new().unwrap();
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| leg(&folder, name, LEG));
    create_stripe(&[a.clone(), b.clone()], CHUNK, Overwrite::No).unwrap();
    create_stripe(&[c.clone(), d.clone()], CHUNK, Overwrite::No).unwrap();
    let copy = DiskSpec::Path(folder.path().join("copy"));
    fs::copy(at(&a), at(&copy)).unwrap();
    open(&[&a, &b]).unwrap();
    let order = format!("the right order: --disk {a} --disk {b}");
    says(open(&[&b, &a]), &order);
    says(open(&[&a, &d]), "is of another stripe");
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
    // A new stripe over two old ones: what remains of either is no stripe.
    create_stripe(&[a.clone(), c.clone()], CHUNK, Overwrite::Yes).unwrap();
    open(&[&a, &c]).unwrap();
    says(open(&[&c, &d]), "is of another stripe");
    says(open(&[&copy, &c]), "is of another stripe");
}
