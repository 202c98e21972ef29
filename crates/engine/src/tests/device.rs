//! Block devices.

use cleave_disk::{Disk, DiskSpec, OpenOptions};

use super::*;

/// A loop device over a file; `None` if none is available.
struct Loop {
    device: PathBuf,
    _dir: tempfile::TempDir,
}

impl Loop {
    fn new(block: u32) -> Option<Loop> {
        let dir = folder();
        let path = image(dir.path(), DISK_BYTES);
        let out = Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &block.to_string()])
            .arg(&path)
            .output();
        match out {
            Ok(out) if out.status.success() => {
                let device = String::from_utf8(out.stdout).unwrap().trim().into();
                Some(Loop { device, _dir: dir })
            }
            other => {
                cleave_tests::ignored(&format!("no loop device of {block}: {other:?}"));
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.device)
            .status();
    }
}

fn on_loop(block: u32, test: impl Fn(&Path, Direct)) {
    for direct in [Direct::Off, Direct::Auto] {
        if let Some(device) = Loop::new(block) {
            test(&device.device, direct);
        }
    }
}

#[test]
fn block_devices_match_the_model() {
    for block in [512, 4096] {
        on_loop(block, |device, direct| {
            let disk = Arc::new(open(device, direct));
            println!("{direct:?} {:?}", disk.limits());
            let guest = Guest::new();
            let mut engines = [engine(&disk, &guest), engine(&disk, &guest)];
            check_against_model(&mut engines, &guest, &disk, &MANY, seed());
        });
    }
}

/// The page cache orders zeroes that are written to a part of a page with writes to the rest of it, but not zeroing by the device.
#[test]
fn parts_of_pages_are_zeroed_by_writing_where_a_device_is_served_through_the_page_cache() {
    on_loop(512, |device, direct| {
        let disk = Arc::new(open(device, direct));
        let guest = Guest::new();
        let mut engine = engine(&disk, &guest);
        if disk.legs()[0].is_cached() {
            files(&mut engine).mangle(|_, entry, result| {
                let page = rustix::param::page_size() as u64;
                let window = entry.own.window;
                match entry.own.step {
                    Step::Range(_) if (window.start | window.len) % page != 0 => -libc::EPROTO,
                    _ => result,
                }
            });
        }
        let (segments, len) = ([segment(0, 1 << 20)], 1 << 20);
        for kind in [ZERO, UNMAP] {
            guest.put(&segments, &[7; 1 << 20]);
            assert_eq!(run(&mut engine, op(WRITE, 0, len, &segments)), Ok(()));
            let zero = op(kind, 512, len - 1024, &[]);
            assert_eq!(run(&mut engine, zero), Ok(()), "{direct:?}");
            assert_eq!(run(&mut engine, op(READ, 0, len, &segments)), Ok(()));
            let bytes = guest.get(&segments, len as usize);
            let (first, last) = (&bytes[..512], &bytes[len as usize - 512..]);
            assert!(first.iter().chain(last).all(|byte| *byte == 7));
            assert!(bytes[512..len as usize - 512].iter().all(|byte| *byte == 0));
        }
    });
}

#[test]
fn block_devices_discard_by_command_and_by_hole() {
    // Also if the guest has smaller blocks than the device.
    for block_bytes in [4096, 512] {
        discard_by_command_and_by_hole(block_bytes);
    }
}

fn discard_by_command_and_by_hole(block_bytes: u32) {
    on_loop(4096, |device, direct| {
        let options = OpenOptions {
            direct,
            block_bytes,
            ..OpenOptions::default()
        };
        let spec = DiskSpec::Path(device.to_owned());
        let disk = Arc::new(Disk::open(&spec, &options).unwrap());
        let guest = Guest::new();
        for command in [true, false] {
            let mut engine = engine(&disk, &guest);
            let AnyStore::Files(files) = engine.store() else {
                panic!("a file")
            };
            if !command {
                files.forget_command();
            }
            let segments = [segment(0, 1 << 20)];
            guest.put(&segments, &[7; 1 << 20]);
            assert_eq!(run(&mut engine, op(WRITE, 0, 1 << 20, &segments)), Ok(()));
            assert_eq!(
                run(&mut engine, op(OpKind::Discard, 512, (1 << 20) - 1024, &[])),
                Ok(())
            );
            assert_eq!(run(&mut engine, op(READ, 0, 1 << 20, &segments)), Ok(()));
            let bytes = guest.get(&segments, 1 << 20);
            assert!(
                bytes[..4096].iter().all(|byte| *byte == 7),
                "rounded inwards"
            );
            assert!(
                bytes[4096..(1 << 20) - 4096].iter().all(|byte| *byte == 0),
                "{command}"
            );
            assert!(bytes[(1 << 20) - 4096..].iter().all(|byte| *byte == 7));
        }
    });
}
