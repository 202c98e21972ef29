//! A file system of one file that answers, and later does not: as a network's does when its server is lost.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::Scratch;

/// Name of the file.
const NAME: &str = "disk";
const ROOT_NODE: u64 = 1;
const FILE_NODE: u64 = 2;
/// How often the server looks whether it is to end or be silent.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};
/// Longest request that is taken; the kernel wants room for this much at least.
const REQUEST_BYTES: usize = 256 << 10;

/// The server and its mount (FUSE, protocol 7.31).
pub struct Mute {
    at: PathBuf,
    flags: Arc<Flags>,
    server: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Flags {
    silent: AtomicBool,
    /// Reads and writes are taken, and not done yet.
    holds: AtomicBool,
    lets_go: AtomicBool,
    held: AtomicUsize,
    over: AtomicBool,
}

impl Mute {
    /// Mounts a file of so many bytes.
    pub fn mount(scratch: &Scratch, bytes: u64) -> Result<Mute, String> {
        let at = scratch.join("mute");
        std::fs::create_dir_all(&at).map_err(|error| error.to_string())?;
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.map_err(|error| format!("/dev/fuse: {error}"))?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            device.as_raw_fd()
        );
        let options = std::ffi::CString::new(options).map_err(|error| error.to_string())?;
        mount(
            "mute",
            &at,
            "fuse",
            MountFlags::NODEV | MountFlags::NOSUID,
            options.as_c_str(),
        )
        .map_err(|error| format!("mount: {error}"))?;
        let flags = Arc::new(Flags::default());
        let seen = flags.clone();
        let server = std::thread::spawn(move || serve(device, bytes, &seen));
        let mute = Mute {
            at,
            flags,
            server: Some(server),
        };
        // Closed once, it has no flush any more: the end of a process would wait for one.
        File::open(mute.file()).map_err(|error| error.to_string())?;
        Ok(mute)
    }

    /// The file.
    pub fn file(&self) -> PathBuf {
        self.at.join(NAME)
    }

    /// From now on nothing is answered.
    pub fn fall_silent(&self) {
        self.flags.silent.store(true, Ordering::SeqCst);
        // A request that was on its way is answered still.
        std::thread::sleep(std::time::Duration::from_millis(50));
    }

    /// Whether the reads and writes that come from now on are kept.
    pub fn hold(&self, holds: bool) {
        self.flags.holds.store(holds, Ordering::SeqCst);
    }

    /// Those that were kept are done now.
    pub fn let_go(&self) {
        self.flags.lets_go.store(true, Ordering::SeqCst);
    }

    /// Reads and writes that it keeps.
    pub fn held(&self) -> usize {
        self.flags.held.load(Ordering::SeqCst)
    }
}

impl Drop for Mute {
    fn drop(&mut self) {
        self.flags.over.store(true, Ordering::SeqCst);
        // With its end the kernel gives up all that waits.
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
        let at: &Path = &self.at;
        let _ = unmount(at, UnmountFlags::DETACH);
    }
}

fn serve(mut device: File, bytes: u64, flags: &Flags) {
    let mut request = vec![0; REQUEST_BYTES];
    let mut content = vec![0; bytes as usize];
    let mut held: Vec<Vec<u8>> = Vec::new();
    while !flags.over.load(Ordering::SeqCst) {
        let holds = flags.holds.load(Ordering::SeqCst);
        if flags.lets_go.swap(false, Ordering::SeqCst) {
            for request in held.drain(..) {
                if let Some(answer) = answer(&request, &mut content) {
                    let _ = device.write_all(&answer);
                }
            }
            flags.held.store(0, Ordering::SeqCst);
        }
        let mut fds = [PollFd::new(&device, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&TICK)).is_ok_and(|ready| ready > 0);
        if !ready {
            continue;
        }
        if flags.silent.load(Ordering::SeqCst) {
            // What is not taken can be given up by whoever waits for it.
            std::thread::sleep(std::time::Duration::from_millis(5));
            continue;
        }
        let Ok(count) = device.read(&mut request) else {
            return;
        };
        let request = request.get(..count).unwrap_or_default();
        let opcode = request.get(4..8).and_then(|bytes| bytes.try_into().ok());
        if holds && matches!(opcode.map(u32::from_ne_bytes), Some(READ | WRITE)) {
            held.push(request.to_vec());
            flags.held.store(held.len(), Ordering::SeqCst);
            continue;
        }
        if let Some(answer) = answer(request, &mut content) {
            let _ = device.write_all(&answer);
        }
    }
}

/// The answer to a request; `None`: there is none.
fn answer(request: &[u8], content: &mut [u8]) -> Option<Vec<u8>> {
    let bytes = content.len() as u64;
    let word = |at: usize| Some(u32::from_ne_bytes(*request.get(at..)?.first_chunk()?));
    let long = |at: usize| Some(u64::from_ne_bytes(*request.get(at..)?.first_chunk()?));
    let (opcode, unique, node) = (word(4)?, long(8)?, long(16)?);
    const NO_SUCH: i32 = -2;
    const UNKNOWN: i32 = -38;
    let told: Result<Vec<u8>, i32> = match opcode {
        LOOKUP => match request.get(40..)?.starts_with(NAME.as_bytes()) {
            // Valid for no time at all: who wants to know asks.
            true => Ok([
                &longs(&[FILE_NODE, 0, 0, 0, 0])[..],
                &attributes(FILE_NODE, bytes),
            ]
            .concat()),
            false => Err(NO_SUCH),
        },
        FORGET | BATCH_FORGET | INTERRUPT => return None,
        GETATTR => Ok([&longs(&[0, 0])[..], &attributes(node, bytes)].concat()),
        OPEN | OPENDIR => Ok(longs(&[0, 0])),
        READ | WRITE => {
            let (offset, len) = (long(40 + 8)? as usize, word(40 + 16)? as usize);
            let range = offset..offset.saturating_add(len).min(content.len());
            let there = content.get_mut(range)?;
            if opcode == READ {
                Ok(there.to_vec())
            } else {
                there.copy_from_slice(request.get(80..)?.get(..there.len())?);
                Ok(words(&[len as u32, 0]))
            }
        }
        FSYNC => Ok(Vec::new()),
        INIT => Ok(words(&[
            7,
            31,
            0,
            // Direct I/O does not wait in the kernel for its answer.
            ASYNC_DIO,
            0,
            128 << 10,
            1,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        ])),
        RELEASE | RELEASEDIR => Ok(Vec::new()),
        _ => Err(UNKNOWN),
    };
    let (error, body) = match told {
        Ok(body) => (0, body),
        Err(error) => (error, Vec::new()),
    };
    let length = u32::try_from(16 + body.len()).ok()?;
    let head = [length.to_ne_bytes(), error.to_ne_bytes()].concat();
    Some([&head[..], &unique.to_ne_bytes(), &body].concat())
}

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const RELEASEDIR: u32 = 29;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// A flag of FUSE_INIT.
const ASYNC_DIO: u32 = 1 << 15;

/// struct fuse_attr.
fn attributes(node: u64, bytes: u64) -> Vec<u8> {
    let (mode, size) = match node {
        ROOT_NODE => (0o040_755, 0),
        _ => (0o100_644, bytes),
    };
    let longs = longs(&[node, size, size / 512, 0, 0, 0]);
    let words = words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]);
    [longs, words].concat()
}

fn longs(values: &[u64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

fn words(values: &[u32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}
