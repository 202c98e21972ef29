//! Effects of a SIGBUS, in separate processes and threads.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use cleave_blk::Segment;
use cleave_guest::{Memory, RegionSpec, Unmapped};
use vm_memory::{FileOffset, MmapRegion};

const CHILD: &str = "CLEAVE_GUEST_TEST_CHILD";

fn spec(len_bytes: u64) -> std::io::Result<RegionSpec> {
    let file = tempfile::tempfile()?;
    file.set_len(len_bytes)?;
    Ok(RegionSpec {
        guest_addr: 0,
        user_addr: 0,
        len_bytes,
        file_offset: 0,
        file,
    })
}

#[test]
fn a_fault_elsewhere_still_ends_the_process() {
    if std::env::var_os(CHILD).is_some() {
        let _handler_installed = Memory::new(vec![spec(0x1000).unwrap()]).unwrap();
        let foreign = tempfile::tempfile().unwrap();
        foreign.set_len(0x1000).unwrap();
        let offset = FileOffset::new(foreign.try_clone().unwrap(), 0);
        let mapped: MmapRegion = MmapRegion::from_file(offset, 0x1000).unwrap();
        foreign.set_len(0).unwrap();
        // SAFETY: mapped. The file has no page there, which is what this tests.
        let byte = unsafe { mapped.as_ptr().read_volatile() };
        unreachable!("read {byte}");
    }
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_fault_elsewhere_still_ends_the_process"])
        .env(CHILD, "1")
        // Under AddressSanitizer the previous handler would be the sanitizer's, which reports and exits.
        .env("ASAN_OPTIONS", "handle_sigbus=0")
        .output()
        .unwrap()
        .status;
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
fn memories_are_mapped_and_unmapped_while_others_are_cut() {
    let page = rustix::param::page_size();
    let len = 8 * page;
    let threads: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(move || {
                for round in 0..500u64 {
                    let spec = spec(len as u64).unwrap();
                    let file = spec.file.try_clone().unwrap();
                    let memory = Memory::new(vec![spec]).unwrap();
                    let whole = [Segment {
                        addr: 0,
                        len: len as u32,
                    }];
                    let mut bytes = vec![0; len];
                    assert_eq!(memory.copy_out(&whole, &vec![7; len]), Ok(len));
                    let cut = round % 3 > 0;
                    if cut {
                        file.set_len(page as u64 * (round % 8)).unwrap();
                    }
                    let copied = memory.copy_in(&whole, &mut bytes);
                    assert_eq!(copied, if cut { Err(Unmapped) } else { Ok(len) });
                    assert_eq!(memory.is_lost(), cut);
                    assert!(cut || bytes.iter().all(|&byte| byte == 7));
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}
