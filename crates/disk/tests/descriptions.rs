//! Each worker has its own open file description, so that the kernel reports a failed write-back to each.
#![allow(clippy::unwrap_used)] // helper functions of tests are outside of #[test] functions

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use cleave_disk::{Direct, Disk, DiskSpec, OpenOptions, SyncFailure};
use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// One test lowers the number of files that this process may open.
static LIMIT: Mutex<()> = Mutex::new(());

fn open(path: &Path, options: &OpenOptions) -> Disk {
    Disk::open(&DiskSpec::Path(path.to_owned()), options).unwrap()
}

fn workers(workers: u16) -> OpenOptions {
    OpenOptions {
        workers,
        ..OpenOptions::default()
    }
}

fn path_of(fd: &OwnedFd) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()).into()
}

fn memory_file(bytes: u64) -> OwnedFd {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    let fd = rustix::fs::memfd_create("disk", flags).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd
}

/// A loop device whose backing file accepts no writes after `cut` was called.
struct Failing {
    path: PathBuf,
    backing: OwnedFd,
}

impl Failing {
    fn attach() -> Option<Failing> {
        let backing = memory_file(1 << 20);
        let run = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(path_of(&backing))
            .output();
        match run {
            Ok(done) if done.status.success() => {
                let path = String::from_utf8(done.stdout).unwrap().trim().into();
                Some(Failing { path, backing })
            }
            other => {
                println!("not tested: no loop device: {other:?}");
                None
            }
        }
    }

    fn cut(&self) {
        rustix::fs::fcntl_add_seals(&self.backing, SealFlags::FUTURE_WRITE).unwrap();
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.path).status();
    }
}

#[test]
fn a_failed_write_back_is_reported_to_every_worker() {
    let _limit = LIMIT.lock().unwrap();
    let Some(device) = Failing::attach() else {
        return;
    };
    let options = OpenOptions {
        direct: Direct::Off,
        ..workers(3)
    };
    let disk = open(&device.path, &options);
    assert_eq!(disk.workers_max(), 3);
    let files = [0, 1, 2].map(|worker| disk.legs()[0].file_for(worker).unwrap());
    for file in files {
        rustix::fs::fsync(file).unwrap();
    }
    device.cut();
    assert_eq!(rustix::io::pwrite(files[1], &[7; 4096], 0), Ok(4096));
    let told = files.map(rustix::fs::fsync);
    assert_eq!(told, [Err(Errno::IO); 3]);
    // An earlier failure is not reported to a description that is opened later, so all are opened with the disk.
    let late = File::open(&device.path).unwrap();
    assert_eq!(rustix::fs::fsync(late), Ok(()));
}

/// If it did, a worker's flush at the same time would succeed, although writes were lost.
#[test]
fn a_sync_of_the_operator_takes_no_failure_away_from_a_worker() {
    let _limit = LIMIT.lock().unwrap();
    let Some(device) = Failing::attach() else {
        return;
    };
    let options = OpenOptions {
        direct: Direct::Off,
        ..workers(2)
    };
    let disk = open(&device.path, &options);
    let files = [0, 1].map(|worker| disk.legs()[0].file_for(worker).unwrap());
    disk.sync().unwrap();
    device.cut();
    assert_eq!(rustix::io::pwrite(files[1], &[7; 4096], 0), Ok(4096));
    assert!(disk.sync().is_err() && disk.sync_failed());
    assert_eq!(files.map(rustix::fs::fsync), [Err(Errno::IO); 2]);
}

/// The process before tells this one of the failure, because the kernel does not.
#[test]
fn a_failure_that_was_seen_is_not_reported_to_the_next_process() {
    let _limit = LIMIT.lock().unwrap();
    let Some(device) = Failing::attach() else {
        return;
    };
    let options = OpenOptions {
        direct: Direct::Off,
        ..workers(2)
    };
    let before = open(&device.path, &options);
    device.cut();
    let file = before.legs()[0].file_for(1).unwrap();
    assert_eq!(rustix::io::pwrite(file, &[7; 4096], 0), Ok(4096));
    assert!(before.sync().is_err());
    assert_eq!(before.sync_failure(), Some(SyncFailure::Untold));
    let given = before.held_files().map(|file| file.try_clone().unwrap());
    let spec = DiskSpec::Path(device.path.clone());
    let next = Disk::open_given(&spec, &options, given.collect()).unwrap();
    let file = next.legs()[0].file_for(1).unwrap();
    assert_eq!(rustix::fs::fsync(file), Ok(()));
    assert_eq!(next.sync_failure(), None);
    next.inherit_sync_failure(SyncFailure::Untold);
    assert!(next.sync_failed() && next.is_loss_untold());
    assert!(next.sync().is_err());
    next.mark_loss_told();
    assert_eq!(next.sync_failure(), Some(SyncFailure::Told));
}

#[test]
fn descriptions_have_the_access_and_the_cache_mode_of_the_first() {
    let _limit = LIMIT.lock().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    for direct in [Direct::Off, Direct::Auto] {
        for read_only in [false, true] {
            let options = OpenOptions {
                direct,
                read_only,
                ..workers(4)
            };
            let disk = open(&path, &options);
            let leg = &disk.legs()[0];
            let flags = |worker| {
                let file = leg.file_for(worker).unwrap();
                let descriptor = rustix::io::fcntl_getfd(file).unwrap();
                assert!(descriptor.contains(rustix::io::FdFlags::CLOEXEC));
                rustix::fs::fcntl_getfl(file).unwrap() & (OFlags::ACCMODE | OFlags::DIRECT)
            };
            let numbers: Vec<_> = (0..4)
                .map(|worker| leg.file_for(worker).unwrap().as_raw_fd())
                .collect();
            assert!(numbers.windows(2).all(|pair| pair[0] != pair[1]));
            assert!((1..4).all(|worker| flags(worker) == flags(0)), "{direct:?}");
            assert!(leg.file_for(4).is_none());
            // The first description holds the lock, once.
            if !read_only {
                let second = Disk::open(&DiskSpec::Path(path.clone()), &options);
                assert!(second.unwrap_err().to_string().contains("in use"));
            }
        }
    }
    let ram = Disk::open(&"ram:1M".parse().unwrap(), &workers(4)).unwrap();
    assert!(ram.legs()[0].file_for(0).is_none());
    assert_eq!(ram.workers_max(), u16::MAX);
}

#[test]
fn deleted_files_are_opened_for_every_worker() {
    let _limit = LIMIT.lock().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let deleted: OwnedFd = File::create_new(&path).unwrap().into();
    rustix::fs::ftruncate(&deleted, 1 << 20).unwrap();
    std::fs::remove_file(&path).unwrap();
    for fd in [deleted, memory_file(1 << 20)] {
        let disk = open(&path_of(&fd), &workers(2));
        assert_eq!(disk.workers_max(), 2, "{:?}", disk.reopen_error());
        let files = [0, 1].map(|worker| disk.legs()[0].file_for(worker).unwrap());
        let inode = |fd| rustix::fs::fstat(fd).unwrap().st_ino;
        assert_eq!(inode(files[0]), inode(files[1]));
    }
}

#[test]
fn a_file_that_cannot_be_opened_again_gets_one_worker() {
    let _limit = LIMIT.lock().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let legs = ["a", "b"].map(|name| folder.path().join(name));
    for leg in &legs {
        File::create(leg).unwrap().set_len(1 << 20).unwrap();
    }
    let before = getrlimit(Resource::Nofile);
    let free = u64::try_from(File::open("/dev/null").unwrap().as_raw_fd()).unwrap();
    let few = Rlimit {
        // Both legs, the second description of the first, and no more.
        current: Some(free + 3),
        ..before
    };
    let specs = legs.clone().map(DiskSpec::Path);
    setrlimit(Resource::Nofile, few).unwrap();
    let disk = Disk::open_stripe(&specs, 4096, cleave_disk::StripeKind::Raw, &workers(2));
    setrlimit(Resource::Nofile, before).unwrap();
    let disk = disk.unwrap();
    assert_eq!(disk.workers_max(), 1);
    let error = disk.reopen_error().map(io::Error::raw_os_error);
    assert_eq!(error, Some(Some(Errno::MFILE.raw_os_error())));
    for leg in disk.legs() {
        assert!(leg.file_for(0).is_some() && leg.file_for(1).is_none());
    }
}
