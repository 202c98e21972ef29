//! Both processes are this one here: what matters is that they share open file descriptions.

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::process::Command;

use rustix::fs::{FlockOperation, Mode};
use tempfile::TempDir;

use super::*;
use crate::{Direct, Disk, OpenOptions, Overwrite, StripeKind, children, create_stripe, qemu_lock};

const CHUNK: u32 = 64 << 10;

fn image(folder: &TempDir, name: &str, bytes: u64) -> PathBuf {
    let path = folder.path().join(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

fn open(path: &Path, options: &OpenOptions) -> Disk {
    children::none_run();
    Disk::open(&DiskSpec::Path(path.to_owned()), options).unwrap()
}

fn open_given(path: &Path, options: &OpenOptions, given: Vec<File>) -> Result<Disk, OpenError> {
    Disk::open_given(&DiskSpec::Path(path.to_owned()), options, given)
}

/// Duplicates the files that another process would be given.
fn given_by(disk: &Disk) -> Vec<File> {
    disk.held_files()
        .map(|file| file.try_clone().unwrap())
        .collect()
}

fn read_only() -> OpenOptions {
    OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    }
}

fn with(direct: Direct) -> OpenOptions {
    OpenOptions {
        direct,
        ..OpenOptions::default()
    }
}

fn flags(disk: &Disk) -> OFlags {
    let file = disk.held_files().next().unwrap();
    rustix::fs::fcntl_getfl(file).unwrap()
}

/// Returns true for the lock of flock, and for those of QEMU, if anybody has them.
fn locks(path: &Path) -> [bool; 2] {
    children::none_run();
    let other = File::options().read(true).write(true).open(path).unwrap();
    let flock = rustix::fs::flock(&other, FlockOperation::NonBlockingLockExclusive);
    [flock, qemu_lock::lock(&other, false)].map(|taken| match taken {
        Ok(()) => false,
        Err(errno) => errno == Errno::WOULDBLOCK || panic!("{errno}"),
    })
}

#[track_caller]
fn refused(result: Result<Disk, OpenError>, wanted: &str) {
    let why = result.unwrap_err().to_string();
    assert!(why.contains(wanted) && !why.contains('\n'), "{why}");
}

#[test]
fn a_disk_changes_hands_and_is_locked_all_the_time() {
    let folder = TempDir::new().unwrap();
    let path = image(&folder, "image", 1 << 20);
    let first = open(&path, &OpenOptions::default());
    refused(
        open_given(&path, &OpenOptions::default(), Vec::new()),
        "in use by another cleave",
    );
    let options = OpenOptions {
        workers: 2,
        ..OpenOptions::default()
    };
    let second = open_given(&path, &options, given_by(&first)).unwrap();
    assert_eq!(flags(&second), flags(&first));
    drop(first);
    assert_eq!(locks(&path), [true; 2]);
    // The further worker has a description of its own, of the same file.
    let leg = &second.legs()[0];
    let files = [0, 1]
        .map(|worker| File::from(leg.file_for(worker).unwrap().try_clone_to_owned().unwrap()));
    let inodes = files.each_ref().map(|file| file.metadata().unwrap().ino());
    assert_eq!(inodes, [fs::metadata(&path).unwrap().ino(); 2]);
    drop(files);
    refused(
        open_given(&path, &OpenOptions::default(), Vec::new()),
        "in use by another cleave",
    );
    drop(second);
    assert_eq!(locks(&path), [false; 2]);
}

#[test]
fn a_disk_that_is_only_read_changes_hands() {
    let folder = TempDir::new().unwrap();
    let path = image(&folder, "image", 1 << 20);
    let first = open(&path, &read_only());
    let second = open_given(&path, &read_only(), given_by(&first)).unwrap();
    drop(first);
    assert_eq!(locks(&path), [true; 2]);
    let reader = open(&path, &read_only());
    drop((second, reader));
    assert_eq!(locks(&path), [false; 2]);
}

/// A loop device, detached on drop.
struct Loop(PathBuf);

impl Loop {
    fn attach(image: &Path) -> Option<Loop> {
        let mut losetup = Command::new("losetup");
        match children::run(losetup.args(["--find", "--show"]).arg(image)) {
            Ok(done) if done.status.success() => {
                Some(Loop(String::from_utf8(done.stdout).unwrap().trim().into()))
            }
            other => {
                cleave_tests::ignored(&format!("no loop device: {other:?}"));
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let mut losetup = Command::new("losetup");
        let _ = children::run(losetup.arg("--detach").arg(&self.0));
    }
}

#[test]
fn a_block_device_is_claimed_all_the_time() {
    let folder = TempDir::new().unwrap();
    let Some(device) = Loop::attach(&image(&folder, "image", 1 << 20)) else {
        return;
    };
    let claim = || {
        children::none_run();
        let flags = OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::open(&device.0, flags, Mode::empty()).map(drop)
    };
    for direct in [Direct::Auto, Direct::Off] {
        let first = open(&device.0, &with(direct));
        let second = open_given(&device.0, &with(direct), given_by(&first)).unwrap();
        assert_eq!(flags(&second), flags(&first));
        drop(first);
        assert_eq!(claim(), Err(Errno::BUSY));
        assert_eq!(locks(&device.0), [true; 2]);
        drop(second);
        assert_eq!(claim(), Ok(()));
        assert_eq!(locks(&device.0), [false; 2]);
    }
}

#[test]
fn files_that_are_not_those_of_the_disk_are_refused() {
    let folder = TempDir::new().unwrap();
    let path = image(&folder, "image", 1 << 20);
    let first = open(&path, &OpenOptions::default());
    let options = OpenOptions::default();
    let twice = given_by(&first).into_iter().chain(given_by(&first));
    let twice = twice.collect();
    for (given, spec) in [
        (twice, DiskSpec::Path(path.clone())),
        (given_by(&first), "ram:1M".parse().unwrap()),
    ] {
        let result = Disk::open_given(&spec, &options, given);
        refused(result, "more or fewer files");
    }
    refused(
        open_given(&path, &read_only(), given_by(&first)),
        "the running daemon may write to it",
    );
    let other = image(&folder, "other", 1 << 20);
    refused(
        open_given(&other, &options, given_by(&first)),
        "serves another file",
    );
    assert_eq!(locks(&other), [false; 2]);
    assert_eq!(locks(&path), [true; 2]);
    fs::rename(&other, &path).unwrap();
    refused(
        open_given(&path, &options, given_by(&first)),
        "serves another file",
    );
    assert_eq!(locks(&path), [false; 2]);
    fs::remove_file(&path).unwrap();
    refused(
        open_given(&path, &options, given_by(&first)),
        "does not exist",
    );
    let reader = image(&folder, "reader", 1 << 20);
    let first = open(&reader, &read_only());
    refused(
        open_given(&reader, &options, given_by(&first)),
        "the running daemon serves it read-only",
    );
    assert_eq!(locks(&reader), [true; 2]);
}

#[test]
fn the_use_of_the_page_cache_stays() {
    let folder = TempDir::new().unwrap();
    let path = image(&folder, "image", 1 << 20);
    if open(&path, &with(Direct::Auto)).is_direct() != Some(true) {
        return cleave_tests::ignored("no O_DIRECT in the temporary folder");
    }
    for (first, second, wanted) in [
        (Direct::Auto, Direct::On, None),
        (Direct::Off, Direct::Off, None),
        (Direct::On, Direct::Off, Some("without the page cache")),
        (Direct::Off, Direct::On, Some("with the page cache")),
        (Direct::Off, Direct::Auto, Some("with the page cache")),
    ] {
        let first = open(&path, &with(first));
        let before = flags(&first);
        let result = open_given(&path, &with(second), given_by(&first));
        match wanted {
            Some(wanted) => refused(result, wanted),
            None => assert_eq!(result.unwrap().is_direct(), first.is_direct()),
        }
        assert_eq!(flags(&first), before, "{second:?} {wanted:?}");
        assert_eq!(locks(&path), [true; 2]);
    }
}

/// The disk is refused after its locks were taken.
#[test]
fn a_disk_that_cannot_be_opened_stays_locked() {
    let folder = TempDir::new().unwrap();
    let path = image(&folder, "image", 3 * 4096 + 512);
    let first = open(&path, &OpenOptions::default());
    let before = flags(&first);
    let is_refused = |block_bytes, wanted| {
        let options = OpenOptions {
            block_bytes,
            ..OpenOptions::default()
        };
        refused(open_given(&path, &options, given_by(&first)), wanted);
        assert_eq!((flags(&first), locks(&path)), (before, [true; 2]));
    };
    is_refused(4096, "not a multiple of 4096");
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(b"QFI\xfb\0\0\0\x03", 0).unwrap();
    is_refused(512, "qcow2");
    file.set_len(0).unwrap();
    is_refused(512, "has no bytes");
}

/// QEMU locks bytes before it checks whether it may.
#[test]
fn an_attempt_of_qemu_costs_no_lock() {
    let folder = TempDir::new().unwrap();
    let path = image(&folder, "image", 1 << 20);
    let first = open(&path, &OpenOptions::default());
    let qemu = File::open(&path).unwrap();
    let attempt = qemu_lock::lock_given(&qemu, false);
    assert_eq!(attempt, Err(Errno::WOULDBLOCK));
    refused(
        open_given(&path, &OpenOptions::default(), given_by(&first)),
        "in use by QEMU",
    );
    drop(qemu);
    assert_eq!(locks(&path), [true; 2]);
}

/// The process that serves it releases it when its guest leaves for another host, which may be while the next one gets ready.
#[test]
fn a_disk_that_is_released_meanwhile_is_not_locked_again() {
    let folder = TempDir::new().unwrap();
    let path = image(&folder, "image", 1 << 20);
    let given = OpenOptions {
        locking: Locking::Given,
        ..OpenOptions::default()
    };
    let first = open(&path, &OpenOptions::default());
    // Without its files the disk is opened like any other.
    refused(
        open_given(&path, &given, Vec::new()),
        "in use by another cleave",
    );
    let second = open_given(&path, &given, given_by(&first)).unwrap();
    assert_eq!(locks(&path), [true; 2]);
    first.release().unwrap();
    assert_eq!(locks(&path), [false; 2]);
    let third = open_given(&path, &given, given_by(&first)).unwrap();
    assert_eq!(locks(&path), [false; 2]);
    // If the process that served it has died, it is acquired, unless the other host was faster.
    let other = open(&path, &OpenOptions::default());
    drop((first, second));
    assert!(third.acquire().unwrap_err().holder().is_some());
    drop(other);
    third.acquire().unwrap();
    assert_eq!(locks(&path), [true; 2]);
}

#[test]
fn a_released_disk_changes_hands_and_is_acquired() {
    let folder = TempDir::new().unwrap();
    let path = image(&folder, "image", 1 << 20);
    let later = OpenOptions {
        locking: Locking::Later,
        ..OpenOptions::default()
    };
    let first = open(&path, &later);
    let second = open_given(&path, &later, given_by(&first)).unwrap();
    drop(first);
    assert_eq!(locks(&path), [false; 2]);
    let other = open(&path, &OpenOptions::default());
    assert!(second.acquire().unwrap_err().holder().is_some());
    drop(other);
    children::none_run();
    second.acquire().unwrap();
    assert_eq!(locks(&path), [true; 2]);
    second.release().unwrap();
    assert_eq!(locks(&path), [false; 2]);
}

#[test]
fn the_legs_of_a_stripe_change_hands_in_order() {
    let folder = TempDir::new().unwrap();
    let paths = ["a", "b"].map(|name| image(&folder, name, 4 << 20));
    let legs = paths.clone().map(DiskSpec::Path);
    create_stripe(&legs, CHUNK, Overwrite::No).unwrap();
    let open = |legs: &[DiskSpec], given| {
        let (kind, options) = (StripeKind::Superblocks, OpenOptions::default());
        Disk::open_stripe_given(legs, CHUNK, kind, &options, given)
    };
    let are_locked = || paths.iter().all(|path| locks(path) == [true; 2]);
    let first = open(&legs, Vec::new()).unwrap();
    let inode = |file: &File| file.metadata().unwrap().ino();
    let held: Vec<_> = first.held_files().map(inode).collect();
    assert_eq!(
        held,
        paths
            .each_ref()
            .map(|path| fs::metadata(path).unwrap().ino())
    );

    let mut swapped = given_by(&first);
    swapped.reverse();
    refused(open(&legs, swapped), "serves another file");
    let mut few = given_by(&first);
    few.pop();
    refused(open(&legs, few), "more or fewer files");
    // The second leg is refused after the first was locked.
    let place = (4 << 20) - 4096;
    let leg = File::options()
        .read(true)
        .write(true)
        .open(&paths[1])
        .unwrap();
    let mut superblock = [0; 4096];
    leg.read_exact_at(&mut superblock, place).unwrap();
    leg.write_all_at(&[0; 4096], place).unwrap();
    refused(open(&legs, given_by(&first)), "superblock");
    assert!(are_locked());
    leg.write_all_at(&superblock, place).unwrap();

    let second = open(&legs, given_by(&first)).unwrap();
    assert_eq!(second.held_files().map(inode).collect::<Vec<_>>(), held);
    assert_eq!(second.is_direct(), first.is_direct());
    drop(first);
    assert!(are_locked());
    drop(second);
    assert!(paths.iter().all(|path| locks(path) == [false; 2]));
}

#[test]
fn a_disk_without_files_has_none_to_give() {
    for spec in ["ram:1M", "null:1M", "model:p3700,size=1M"] {
        let disk = Disk::open(&spec.parse().unwrap(), &OpenOptions::default()).unwrap();
        assert_eq!(disk.held_files().count(), 0, "{spec}");
    }
}
