//! A profile file holds what the input says.
#![no_main]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::LazyLock;

use cleave_disk::{Disk, DiskSpec, OpenOptions};
use cleave_probe::Profile;
use libfuzzer_sys::fuzz_target;
use rustix::fs::{MemfdFlags, memfd_create};

struct Things {
    disk: Disk,
    file: File,
}

static THINGS: LazyLock<Things> = LazyLock::new(|| Things {
    disk: Disk::open(&DiskSpec::Ram(1 << 20), &OpenOptions::default()).unwrap(),
    file: memfd_create("profile", MemfdFlags::CLOEXEC).unwrap().into(),
});

fn run(input: &[u8]) {
    let Things { disk, file } = &*THINGS;
    file.set_len(0).unwrap();
    file.write_all_at(input, 0).unwrap();
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    match Profile::load(&path, disk) {
        Ok(profile) => {
            let prior = profile.prior(disk.limits());
            assert!(prior.useful_depth > 0, "{prior:?}");
        }
        // A line for the operator.
        Err(error) => {
            let line = error.to_string();
            assert!(!line.contains('\n'), "{line}");
        }
    }
}

fuzz_target!(|input: &[u8]| run(input));
