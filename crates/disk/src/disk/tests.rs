use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, thread};

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use tempfile::TempDir;

use super::*;
use crate::{Direct, FileKind, Locking, children};

const OPTIONS: OpenOptions = OpenOptions {
    read_only: false,
    direct: Direct::Auto,
    block_bytes: 512,
    discard: true,
    workers: 1,
    content: ContentOrigin::Unknown,
    locking: Locking::AtOpen,
};

fn image(folder: &Path, name: &str, bytes: u64) -> PathBuf {
    let path = folder.join(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

fn open(path: &Path, options: &OpenOptions) -> Result<Disk, OpenError> {
    children::none_run();
    Disk::open(&DiskSpec::Path(path.to_owned()), options)
}

fn refusal(path: &Path, options: &OpenOptions) -> String {
    let why = open(path, options).unwrap_err().to_string();
    assert!(!why.contains('\n'), "one line: {why}");
    why
}

fn is_direct(disk: &Disk) -> bool {
    matches!(disk.legs()[0].backing(), Backing::File { direct: true, .. })
}

fn flags(disk: &Disk) -> OFlags {
    let Backing::File { file, .. } = disk.legs()[0].backing() else {
        panic!("no file")
    };
    rustix::fs::fcntl_getfl(file).unwrap()
}

#[test]
fn memory_has_no_page_cache_to_bypass() {
    for spec in ["ram:1M", "null:1M", "model:p3700"] {
        let parsed: DiskSpec = spec.parse().unwrap();
        let with = |direct| Disk::open(&parsed, &OpenOptions { direct, ..OPTIONS });
        for direct in [Direct::Auto, Direct::Off] {
            assert!(with(direct).is_ok(), "{spec} {direct:?}");
        }
        let why = with(Direct::On).unwrap_err().to_string();
        assert!(!why.contains('\n'), "one line: {why}");
        assert!(why.contains(spec) && why.contains("--direct"), "{why}");
    }
}

#[test]
fn files_of_other_kinds_are_refused_by_name() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    image(dir.path(), "empty", 0);
    image(dir.path(), "odd", 1000);
    image(dir.path(), "half", 256);
    rustix::fs::mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let _socket = UnixListener::bind(at("socket")).unwrap();
    symlink(at("nowhere"), at("dangling")).unwrap();
    for (path, wanted) in [
        (at("missing"), "does not exist"),
        (at("missing/below"), "does not exist"),
        (at("empty/below"), "does not exist"),
        (at("dangling"), "does not exist"),
        (dir.path().to_owned(), "is a directory"),
        ("/dev/null".into(), "is a character device"),
        (at("socket"), "is a socket"),
        (at("fifo"), "is a fifo"),
        (at("empty"), "has no bytes; give it a size: truncate -s"),
        (
            at("odd"),
            "1000 bytes, which is not a multiple of 512; round it up: truncate -s %512",
        ),
        (at("half"), "256 bytes, which is not a multiple of 512"),
    ] {
        for (read_only, direct) in [
            (false, Direct::Auto),
            (true, Direct::Auto),
            (false, Direct::Off),
            (false, Direct::On),
        ] {
            let why = refusal(
                &path,
                &OpenOptions {
                    read_only,
                    direct,
                    ..OPTIONS
                },
            );
            assert!(why.contains(wanted), "{why}");
            assert!(why.contains(&path.display().to_string()), "{why}");
        }
    }
    assert!(!at("missing").exists(), "nothing is created");
}

#[test]
fn no_permission_names_the_remedy() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 4096);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
    // Only this thread's. Without them, root is refused like any other user.
    let mut sets = capabilities(None).unwrap();
    sets.effective -= CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
    set_capabilities(None, sets).unwrap();
    let why = refusal(&path, &OPTIONS);
    assert!(
        why.contains("reading and writing") && why.contains("--read-only"),
        "{why}"
    );
    let read_only = OpenOptions {
        read_only: true,
        ..OPTIONS
    };
    open(&path, &read_only).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    let why = refusal(&path, &read_only);
    assert!(
        why.contains("for reading;") && !why.contains("--read-only"),
        "{why}"
    );
}

#[test]
fn an_image_in_use_is_refused_and_readers_share() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 4096);
    let read_only = OpenOptions {
        read_only: true,
        ..OPTIONS
    };
    let writer = open(&path, &OPTIONS).unwrap();
    for options in [&OPTIONS, &read_only] {
        assert!(matches!(open(&path, options), Err(OpenError::InUse { .. })));
    }
    drop(writer);
    let readers = [
        open(&path, &read_only).unwrap(),
        open(&path, &read_only).unwrap(),
    ];
    let why = refusal(&path, &OPTIONS);
    assert!(why.contains("in use by another cleave"), "{why}");
    drop(readers);
    open(&path, &OPTIONS).unwrap();
}

#[test]
fn limits_of_a_file_are_correct() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 1 << 20);
    let disk = open(
        &path,
        &OpenOptions {
            direct: Direct::Off,
            ..OPTIONS
        },
    )
    .unwrap();
    let limits = disk.limits();
    assert!(!is_direct(&disk));
    assert_eq!(
        (limits.capacity_bytes, disk.capacity_bytes()),
        (1 << 20, 1 << 20)
    );
    assert_eq!(
        (limits.offset_align_bytes, limits.memory_align_bytes),
        (1, 1)
    );
    assert_eq!(limits.block_bytes, 512);
    assert!(limits.discard && !limits.read_only);
    assert_eq!(disk.name(), path.display().to_string());
    let flags = flags(&disk);
    assert!(
        !flags.intersects(OFlags::NONBLOCK | OFlags::DIRECT),
        "{flags:?}"
    );
    let Backing::File { file, .. } = disk.legs()[0].backing() else {
        panic!("no file")
    };
    let descriptor = rustix::io::fcntl_getfd(file).unwrap();
    assert!(descriptor.contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn read_only_cannot_write() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 4096);
    let disk = open(
        &path,
        &OpenOptions {
            read_only: true,
            ..OPTIONS
        },
    )
    .unwrap();
    assert!(disk.limits().read_only && !disk.limits().discard);
    let Backing::File { file, .. } = disk.legs()[0].backing() else {
        panic!("no file")
    };
    assert!(file.write_at(&[0; 512], 0).is_err());
}

#[test]
fn discard_depends_on_the_option() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 4096);
    let disk = open(
        &path,
        &OpenOptions {
            discard: false,
            ..OPTIONS
        },
    )
    .unwrap();
    assert!(!disk.limits().discard);
}

/// On the file systems of the temporary folder and of /dev/shm.
#[test]
fn direct_io_works_as_probed_or_is_not_used() {
    for folder in [std::env::temp_dir(), PathBuf::from("/dev/shm")] {
        let dir = TempDir::new_in(&folder).unwrap();
        let path = image(dir.path(), "image", 1 << 20);
        let disk = open(&path, &OPTIONS).unwrap();
        println!(
            "{}: direct {}, {:?}",
            folder.display(),
            is_direct(&disk),
            disk.limits()
        );
        assert_eq!(flags(&disk).contains(OFlags::DIRECT), is_direct(&disk));
        let leg = &disk.legs()[0];
        assert_eq!(leg.is_cached(), !is_direct(&disk));
        assert!(leg.caches_writes() || is_direct(&disk) && folder != Path::new("/dev/shm"));
        assert!(!flags(&disk).contains(OFlags::NONBLOCK));
        let limits = disk.limits().clone();
        assert_eq!(limits.block_bytes, 512, "whatever the file system needs");
        if is_direct(&disk) {
            let align = limits.memory_align_bytes as usize;
            let len = limits.offset_align_bytes as usize;
            let mut buffer = vec![7_u8; len + 2 * align];
            let start = buffer.as_ptr().align_offset(align);
            let Backing::File { file, .. } = disk.legs()[0].backing() else {
                panic!("no file")
            };
            let at = limits.offset_align_bytes.into();
            assert_eq!(file.write_at(&buffer[start..start + len], at).unwrap(), len);
            buffer.fill(0);
            assert_eq!(
                file.read_at(&mut buffer[start..start + len], at).unwrap(),
                len
            );
            assert!(buffer[start..start + len].iter().all(|byte| *byte == 7));
        }
        let auto_direct = is_direct(&disk);
        drop(disk);
        let on = open(
            &path,
            &OpenOptions {
                direct: Direct::On,
                ..OPTIONS
            },
        );
        match (auto_direct, on) {
            (true, Ok(disk)) => assert!(is_direct(&disk)),
            (false, Err(OpenError::NoDirect { .. })) => {}
            (auto, on) => panic!("auto {auto}, on {on:?}"),
        }
    }
}

/// Files of sysfs have a size and refuse O_DIRECT on every kernel.
#[test]
fn a_file_system_without_direct_is_read_through_the_page_cache_or_refused() {
    let path = Path::new("/sys/kernel/uevent_seqnum");
    let with = |direct| OpenOptions {
        direct,
        read_only: true,
        ..OPTIONS
    };
    let disk = open(path, &with(Direct::Auto)).unwrap();
    assert!(!is_direct(&disk) && !flags(&disk).contains(OFlags::DIRECT));
    let why = refusal(path, &with(Direct::On));
    assert!(why.contains("use --direct auto or --direct off"), "{why}");
}

#[test]
fn a_block_size_is_checked_and_used() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 3 * 4096 + 512);
    let with = |block_bytes| OpenOptions {
        block_bytes,
        ..OPTIONS
    };
    for asked in [0, 1, 256, 511, 513, 768, 131_072, u32::MAX] {
        let why = refusal(&path, &with(asked));
        assert!(why.contains("power of two from 512 to 65536"), "{why}");
    }
    let why = refusal(&path, &with(4096));
    assert!(
        why.contains("multiple of 4096; round it up: truncate -s %4096"),
        "{why}"
    );
    assert_eq!(open(&path, &with(512)).unwrap().limits().block_bytes, 512);
    let path = image(dir.path(), "whole", 1 << 20);
    for asked in [512, 1024, 4096, 65536] {
        let disk = open(&path, &with(asked)).unwrap();
        assert_eq!(disk.limits().block_bytes, asked);
    }
    let ram = Disk::open(&DiskSpec::Ram(4096 + 512), &with(4096))
        .unwrap_err()
        .to_string();
    assert!(
        ram.contains("ram:4608 has 4608 bytes") && ram.contains("write another size"),
        "{ram}"
    );
}

/// A disk that was made with blocks of 4096 bytes keeps them. One that its guest has written to is served as it is.
#[test]
fn partitions_in_other_blocks_are_refused_with_the_remedy() {
    let dir = TempDir::new().unwrap();
    for (at, other) in [(4096, 512), (512, 4096)] {
        let path = image(dir.path(), "image", 1 << 20);
        let file = File::options().write(true).open(&path).unwrap();
        file.write_at(b"EFI PART", at).unwrap();
        let with = |block_bytes| OpenOptions {
            block_bytes,
            ..OPTIONS
        };
        let why = refusal(&path, &with(other));
        assert!(why.ends_with(&format!("--block-size {at}")), "{why}");
        for served in [
            with(u32::try_from(at).unwrap()),
            OpenOptions {
                read_only: true,
                ..with(other)
            },
            OpenOptions {
                content: ContentOrigin::Guest,
                ..with(other)
            },
        ] {
            drop(open(&path, &served).unwrap());
        }
        let raw = DiskSpec::Raw(path);
        drop(Disk::open(&raw, &with(other)).unwrap());
    }
}

#[test]
fn growth_is_detected_and_a_disk_that_shrinks_keeps_its_size() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 1 << 20);
    let options = OpenOptions {
        block_bytes: 4096,
        ..OPTIONS
    };
    let disk = open(&path, &options).unwrap();
    let outside = File::options().write(true).open(&path).unwrap();
    for (size, seen, capacity) in [
        (1 << 20, Resized::No, 1 << 20),
        ((1 << 20) + 4095, Resized::No, 1 << 20),
        (
            (1 << 20) + 8191,
            Resized::Grown((1 << 20) + 4096),
            (1 << 20) + 4096,
        ),
        (5000, Resized::Short(0, 5000), (1 << 20) + 4096),
        (0, Resized::Short(0, 0), (1 << 20) + 4096),
        ((1 << 20) + 4096, Resized::No, (1 << 20) + 4096),
        (1 << 30, Resized::Grown(1 << 30), 1 << 30),
    ] {
        outside.set_len(size).unwrap();
        assert_eq!(disk.refresh().unwrap(), seen, "{size}");
        assert_eq!(disk.capacity_bytes(), capacity, "{size}");
        let whole = size - size % 4096;
        assert_eq!(disk.legs()[0].served_bytes(), whole.min(capacity), "{size}");
        assert_eq!(disk.limits().capacity_bytes, 1 << 20);
    }
}

#[test]
fn growth_is_reported_to_one_of_many_callers() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 4096);
    let disk = open(&path, &OPTIONS).unwrap();
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let told = thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| disk.refresh().unwrap()))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .filter(|resized| *resized == Resized::Grown(1 << 20))
            .count()
    });
    assert_eq!(told, 1);
}

#[test]
fn a_replaced_file_is_still_served() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 4096);
    let disk = open(
        &path,
        &OpenOptions {
            direct: Direct::Off,
            ..OPTIONS
        },
    )
    .unwrap();
    let other = image(dir.path(), "other", 1 << 20);
    fs::rename(&other, &path).unwrap();
    assert_eq!(disk.refresh().unwrap(), Resized::No);
    fs::remove_file(&path).unwrap();
    let Backing::File { file, .. } = disk.legs()[0].backing() else {
        panic!("no file")
    };
    assert_eq!(file.write_at(&[1; 512], 0).unwrap(), 512);
}

#[test]
fn limits_of_memory_and_null_are_correct() {
    for (spec, serial) in [
        (DiskSpec::Ram(1 << 20), "cleave-ram"),
        (DiskSpec::Null(1 << 50), "cleave-null"),
    ] {
        let disk = Disk::open(&spec, &OPTIONS).unwrap();
        let limits = disk.limits();
        assert_eq!(
            (limits.offset_align_bytes, limits.memory_align_bytes),
            (1, 1)
        );
        assert!(limits.discard && !limits.rotational);
        assert_eq!(disk.name(), spec.to_string());
        assert_eq!(disk.refresh().unwrap(), Resized::No);
        assert!(disk.serial().starts_with(serial.as_bytes()));
        let read_only = OpenOptions {
            read_only: true,
            ..OPTIONS
        };
        let disk = Disk::open(&spec, &read_only).unwrap();
        assert!(disk.limits().read_only && !disk.limits().discard);
    }
    let disk = Disk::open(&DiskSpec::Ram(1536), &OPTIONS).unwrap();
    let Backing::Ram(region) = disk.legs()[0].backing() else {
        panic!("no memory")
    };
    assert_eq!(region.size(), 1536);
}

#[test]
fn impossible_sizes_of_memory_are_refused() {
    for (spec, wanted) in [
        (DiskSpec::Ram(0), "has no bytes; give it a size: ram:1G"),
        (DiskSpec::Null(0), "has no bytes; give it a size: null:1G"),
        (DiskSpec::Ram(1000), "not a multiple of 512"),
        (DiskSpec::Null(1 << 63), "not below 2^63"),
        (DiskSpec::Ram(1 << 62), "use a smaller size"),
    ] {
        let why = Disk::open(&spec, &OPTIONS).unwrap_err().to_string();
        assert!(why.contains(wanted) && !why.contains('\n'), "{why}");
    }
}

#[test]
fn a_failed_sync_is_permanent() {
    let disk = Disk::open(&DiskSpec::Null(4096), &OPTIONS).unwrap();
    assert!(!disk.sync_failed());
    disk.mark_sync_failed();
    assert!(disk.sync_failed() && disk.sync_failed());
}

#[test]
fn a_serial_belongs_to_the_file_not_to_its_spelling() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 4096);
    symlink(&path, dir.path().join("link")).unwrap();
    let serial = open(&path, &OPTIONS).unwrap().serial();
    for spelling in [dir.path().join("link"), dir.path().join("./image")] {
        assert_eq!(open(&spelling, &OPTIONS).unwrap().serial(), serial);
    }
    assert!(
        serial[..18].iter().all(u8::is_ascii_alphanumeric),
        "{serial:?}"
    );
    assert_eq!(serial[18..], [0, 0]);
    let other = image(dir.path(), "other", 4096);
    assert_ne!(open(&other, &OPTIONS).unwrap().serial(), serial);
    // Never change this: guests find their disks by it.
    assert_eq!(
        &path_serial(Path::new("/nowhere/at all"))[..18],
        b"cl4c205694d3de53d3"
    );
}

#[test]
fn alignment_can_only_be_made_stricter() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 5 * 4096 + 512);
    let disk = open(&path, &OPTIONS).unwrap().with_alignment(4096, 64);
    assert_eq!(disk.limits().offset_align_bytes, 4096);
    assert!(disk.limits().memory_align_bytes >= 64);
    assert_eq!(disk.limits().block_bytes, 512);
    assert_eq!(
        (disk.limits().capacity_bytes, disk.capacity_bytes()),
        (5 * 4096, 5 * 4096)
    );
    assert_eq!(disk.with_alignment(1, 1).limits().offset_align_bytes, 4096);
}

/// A loop device, detached on drop.
struct Loop(PathBuf);

impl Loop {
    fn attach(image: &Path, arguments: &[&str]) -> Option<Loop> {
        let mut losetup = Command::new("losetup");
        losetup
            .args(["--find", "--show"])
            .args(arguments)
            .arg(image);
        match children::run(&mut losetup) {
            Ok(done) if done.status.success() => {
                Some(Loop(String::from_utf8(done.stdout).unwrap().trim().into()))
            }
            Ok(done) => {
                cleave_tests::ignored(String::from_utf8_lossy(&done.stderr).trim());
                None
            }
            Err(error) => {
                cleave_tests::ignored(&format!("losetup: {error}"));
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
fn limits_of_a_block_device_are_correct() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 1 << 20);
    let Some(device) = Loop::attach(&path, &["--sector-size", "4096"]) else {
        return;
    };
    for direct in [Direct::Auto, Direct::Off] {
        let disk = open(&device.0, &OpenOptions { direct, ..OPTIONS }).unwrap();
        println!("{direct:?}: {:?}", disk.limits());
        let kind = FileKind::BlockDevice;
        assert!(
            matches!(disk.legs()[0].backing(), Backing::File { kind: found, .. } if *found == kind)
        );
        assert_eq!(disk.limits().capacity_bytes, 1 << 20);
        assert_eq!(disk.limits().block_bytes, 512);
        assert!(disk.limits().discard);
        assert_eq!(disk.legs()[0].caches_writes(), !is_direct(&disk));
        let align = if is_direct(&disk) { 4096 } else { 1 };
        assert_eq!(disk.limits().offset_align_bytes, align);
        let second = refusal(&device.0, &OPTIONS);
        assert!(second.contains("in use by"), "{second}");
    }
    let large = open(
        &device.0,
        &OpenOptions {
            block_bytes: 4096,
            ..OPTIONS
        },
    )
    .unwrap();
    assert_eq!(large.limits().block_bytes, 4096);
    drop(large);
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(2 << 20)
        .unwrap();
    let disk = open(&device.0, &OPTIONS).unwrap();
    let mut losetup = Command::new("losetup");
    let looks_again = children::run(losetup.arg("-c").arg(&device.0));
    assert!(looks_again.unwrap().status.success());
    assert_eq!(disk.refresh().unwrap(), Resized::Grown(2 << 20));
}

#[test]
fn a_write_protected_block_device_asks_for_read_only() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 1 << 20);
    let Some(device) = Loop::attach(&path, &["--read-only"]) else {
        return;
    };
    let why = refusal(&device.0, &OPTIONS);
    assert!(why.contains("--read-only"), "{why}");
    let read_only = OpenOptions {
        read_only: true,
        ..OPTIONS
    };
    let disks = [
        open(&device.0, &read_only).unwrap(),
        open(&device.0, &read_only).unwrap(),
    ];
    assert!(
        disks
            .iter()
            .all(|disk| disk.limits().read_only && !disk.limits().discard)
    );
}

/// Options of a disk that another program may have at first.
const LATER: OpenOptions = OpenOptions {
    locking: Locking::Later,
    ..OPTIONS
};

fn holder(disk: &Disk) -> Option<String> {
    let refused = disk.acquire().unwrap_err();
    assert!(!refused.needs_reopening(), "{refused}");
    refused.holder().map(str::to_owned)
}

/// Two hosts that have one file, as two open file descriptions.
#[test]
fn a_disk_that_is_released_can_be_acquired_by_another_and_comes_back() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 1 << 20);
    let source = open(&path, &OPTIONS).unwrap();
    let target = open(&path, &LATER).unwrap();
    assert_eq!(holder(&target).as_deref(), Some("another cleave"));
    source.release().unwrap();
    target.acquire().unwrap();
    assert_eq!(holder(&source).as_deref(), Some("another cleave"));
    // It would be if a refused attempt had left a lock of QEMU's behind.
    target.release().unwrap();
    source.acquire().unwrap();
    let third = refusal(&path, &OPTIONS);
    assert!(third.contains("in use by another cleave"), "{third}");
}

#[test]
fn readers_share_what_they_acquire() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 1 << 20);
    let read_only = OpenOptions {
        read_only: true,
        ..LATER
    };
    let readers = [0, 1].map(|_| open(&path, &read_only).unwrap());
    for reader in &readers {
        reader.acquire().unwrap();
    }
    let writer = open(&path, &LATER).unwrap();
    assert!(holder(&writer).is_some());
    readers.iter().for_each(|reader| reader.release().unwrap());
    writer.acquire().unwrap();
    assert!(holder(&readers[0]).is_some());
}

#[test]
fn a_disk_that_qemu_has_is_not_acquired_and_nothing_stays_locked() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 1 << 20);
    let qemu = File::open(&path).unwrap();
    let disk = open(&path, &LATER).unwrap();
    crate::qemu_lock::lock(&qemu, true).unwrap();
    let owner = holder(&disk);
    assert_eq!(owner.as_deref(), Some("QEMU or one of its tools"));
    // The refused attempt has released its other lock.
    let operation = rustix::fs::FlockOperation::NonBlockingLockExclusive;
    rustix::fs::flock(&qemu, operation).unwrap();
    assert_eq!(holder(&disk).as_deref(), Some("another cleave"));
    crate::open::unlock(&qemu).unwrap();
    disk.acquire().unwrap();
    assert_eq!(
        crate::qemu_lock::lock(&qemu, false),
        Err(rustix::io::Errno::WOULDBLOCK)
    );
}

/// Another host may have made it larger, or cut it short.
#[test]
fn a_disk_that_is_acquired_has_the_size_that_it_has_by_then() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 1 << 20);
    let disk = open(&path, &LATER).unwrap();
    let other = File::options().write(true).open(&path).unwrap();
    for (size, capacity, short) in [(2 << 20, 2 << 20, 0), (1 << 20, 2 << 20, 1 << 20)] {
        other.set_len(size).unwrap();
        disk.acquire().unwrap();
        assert_eq!(
            (disk.capacity_bytes(), disk.short_bytes()),
            (capacity, short)
        );
        disk.release().unwrap();
    }
}

/// After the locks were acquired, this host's page cache must not answer with old contents. A file system in memory is itself
/// that cache, and is left out.
#[test]
fn a_disk_that_is_acquired_has_no_pages_in_the_cache() {
    let dir = TempDir::new_in(".").unwrap();
    let path = image(dir.path(), "image", 1 << 20);
    if rustix::fs::statfs(&path).unwrap().f_type == 0x0102_1994 {
        return cleave_tests::ignored("tmpfs has no page cache to drop");
    }
    let buffered = OpenOptions {
        direct: Direct::Off,
        ..LATER
    };
    let disk = open(&path, &buffered).unwrap();
    let Backing::File { file, .. } = disk.legs()[0].backing() else {
        panic!("no file")
    };
    file.write_all_at(&[7; 64 << 10], 0).unwrap();
    let is_cached = || {
        use rustix::io::{Errno, ReadWriteFlags};
        let mut bytes = [0; 4096];
        let read = &mut [std::io::IoSliceMut::new(&mut bytes)];
        match rustix::io::preadv2(file, read, 4096, ReadWriteFlags::NOWAIT) {
            Ok(4096) => Some(true),
            Err(Errno::AGAIN) => Some(false),
            other => {
                cleave_tests::ignored(&format!("the cache cannot be looked into: {other:?}"));
                None
            }
        }
    };
    let end = Instant::now() + Duration::from_secs(60);
    while is_cached() == Some(true) {
        // A page stays that the kernel itself has in its hands at that moment, as at the end of its writing.
        assert!(Instant::now() < end, "the pages stay");
        disk.acquire().unwrap();
    }
}

#[test]
fn a_disk_without_locks_is_acquired_at_once() {
    for spec in ["ram:1M", "null:1M", "model:p3700,size=1M"] {
        let disk = Disk::open(&spec.parse().unwrap(), &LATER).unwrap();
        disk.acquire().unwrap();
        disk.release().unwrap();
    }
}

#[test]
fn a_block_device_is_acquired() {
    let dir = TempDir::new().unwrap();
    let path = image(dir.path(), "image", 1 << 20);
    let Some(device) = Loop::attach(&path, &[]) else {
        return;
    };
    for direct in [Direct::Auto, Direct::Off] {
        let disk = open(&device.0, &OpenOptions { direct, ..LATER }).unwrap();
        let other = File::open(&device.0).unwrap();
        crate::qemu_lock::lock(&other, true).unwrap();
        assert!(holder(&disk).is_some());
        drop(other);
        children::none_run();
        disk.acquire().unwrap();
        disk.release().unwrap();
    }
}
