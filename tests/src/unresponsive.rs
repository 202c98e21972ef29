//! A file system of one file whose server can stop answering, like a network file system that loses its server.

use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{UnmountFlags, unmount};

use crate::fuse::opcode::{
    BATCH_FORGET, FORGET, FSYNC, GETATTR, INIT, INTERRUPT, LOOKUP, OPEN, OPENDIR, READ, RELEASE,
    RELEASEDIR, WRITE,
};
use crate::fuse::{self, FILE_NODE, Input, REQUEST_BYTES, flag};
use crate::{Scratch, wait_until};

/// Name of the file.
const NAME: &str = "disk";
/// The error of a flush that fails (EIO).
const IO_ERROR: i32 = -5;
/// How often the server checks whether it must exit or stop answering.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};

/// The server and its mount.
pub struct UnresponsiveFs {
    at: PathBuf,
    flags: Arc<Flags>,
    server: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Flags {
    silent: AtomicBool,
    /// The server has seen that.
    is_silent: AtomicBool,
    /// Reads, writes and flushes are queued, not answered.
    holds: AtomicBool,
    lets_go: AtomicBool,
    held: AtomicUsize,
    /// Flushes that were answered.
    syncs: AtomicUsize,
    /// The next flush is an I/O error.
    fails: AtomicBool,
    over: AtomicBool,
}

impl UnresponsiveFs {
    /// Mounts a file of so many bytes.
    pub fn mount(scratch: &Scratch, bytes: u64) -> Result<UnresponsiveFs, String> {
        // Valid for no time at all, so the kernel asks again each time.
        UnresponsiveFs::mount_as(scratch, bytes, (0, flag::ASYNC_DIO))
    }

    /// Mounts a file on which a thread that reads or writes waits in the kernel for the reply.
    pub fn mount_blocking(scratch: &Scratch, bytes: u64) -> Result<UnresponsiveFs, String> {
        UnresponsiveFs::mount_as(scratch, bytes, (0, 0))
    }

    /// Mounts a file that the kernel caches, so that it keeps what is written: a close waits until the server has it.
    pub fn mount_caching(scratch: &Scratch, bytes: u64) -> Result<UnresponsiveFs, String> {
        UnresponsiveFs::mount_as(
            scratch,
            bytes,
            (3600, flag::ASYNC_DIO | flag::WRITEBACK_CACHE),
        )
    }

    fn mount_as(
        scratch: &Scratch,
        bytes: u64,
        cached: (u64, u32),
    ) -> Result<UnresponsiveFs, String> {
        let at = scratch.join("mute");
        let device = fuse::mount_at(&at, "mute")?;
        let flags = Arc::new(Flags::default());
        let seen = flags.clone();
        let server = std::thread::spawn(move || serve(device, bytes, cached, &seen));
        let mute = UnresponsiveFs {
            at,
            flags,
            server: Some(server),
        };
        // After one close the file has no flush any more; otherwise a process that exits would wait for one.
        File::open(mute.file()).map_err(|error| error.to_string())?;
        Ok(mute)
    }

    /// Path of the file.
    pub fn file(&self) -> PathBuf {
        self.at.join(NAME)
    }

    /// Stops answering every request.
    pub fn stop_answering(&self) {
        self.flags.silent.store(true, Ordering::SeqCst);
        // A request that is being handled at this moment is still answered.
        assert!(wait_until(|| self.flags.is_silent.load(Ordering::SeqCst)));
    }

    /// Queues the reads, writes and flushes that arrive from now on, or stops doing so.
    pub fn hold(&self, holds: bool) {
        self.flags.holds.store(holds, Ordering::SeqCst);
    }

    /// Has the next flush fail. Nobody is told of that a second time.
    pub fn fail_flush(&self) {
        self.flags.fails.store(true, Ordering::SeqCst);
    }

    /// Completes the queued requests.
    pub fn let_go(&self) {
        self.flags.lets_go.store(true, Ordering::SeqCst);
    }

    /// Completes the queued requests, and queues no more.
    pub fn release(&self) {
        self.hold(false);
        self.let_go();
    }

    /// Number of flushes that were answered.
    pub fn syncs(&self) -> usize {
        self.flags.syncs.load(Ordering::SeqCst)
    }

    /// Number of queued reads, writes and flushes.
    pub fn held(&self) -> usize {
        self.flags.held.load(Ordering::SeqCst)
    }
}

impl Drop for UnresponsiveFs {
    fn drop(&mut self) {
        self.flags.over.store(true, Ordering::SeqCst);
        // Closing the device makes the kernel abort every waiting request.
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
        let at: &Path = &self.at;
        let _ = unmount(at, UnmountFlags::DETACH);
    }
}

fn serve(mut device: File, bytes: u64, cached: (u64, u32), flags: &Flags) {
    let mut request = vec![0; REQUEST_BYTES];
    let mut content = vec![0; bytes as usize];
    let mut held: Vec<Vec<u8>> = Vec::new();
    while !flags.over.load(Ordering::SeqCst) {
        if flags.silent.load(Ordering::SeqCst) {
            flags.is_silent.store(true, Ordering::SeqCst);
        }
        if flags.lets_go.swap(false, Ordering::SeqCst) {
            for request in held.drain(..) {
                if let Some(answer) = judged(Input(&request), &mut content, cached, flags) {
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
        if flags.is_silent.load(Ordering::SeqCst) {
            // A request that is still in the kernel's queue can be aborted by its waiter; one that we have read
            // cannot.
            std::thread::sleep(std::time::Duration::from_millis(5));
            continue;
        }
        let Ok(count) = device.read(&mut request) else {
            return;
        };
        let request = request.get(..count).unwrap_or_default();
        // As it is now, and not as it was before the wait.
        let holds = flags.holds.load(Ordering::SeqCst);
        if holds && matches!(Input(request).opcode(), READ | WRITE | FSYNC) {
            held.push(request.to_vec());
            flags.held.store(held.len(), Ordering::SeqCst);
            continue;
        }
        if let Some(answer) = judged(Input(request), &mut content, cached, flags) {
            let _ = device.write_all(&answer);
        }
    }
}

/// The reply to a request, or the error of a flush that is to fail.
fn judged(
    input: Input<'_>,
    content: &mut [u8],
    cached: (u64, u32),
    flags: &Flags,
) -> Option<Vec<u8>> {
    let is_sync = input.opcode() == FSYNC;
    if is_sync {
        flags.syncs.fetch_add(1, Ordering::SeqCst);
    }
    match is_sync && flags.fails.swap(false, Ordering::SeqCst) {
        true => Some(fuse::answer(input.unique(), Err(IO_ERROR))),
        false => answer(input, content, cached),
    }
}

/// The reply to a request; `None`: the request has no reply. `cached`: for how many seconds the kernel may believe what it knows,
/// and the flags of the file system.
fn answer(input: Input<'_>, content: &mut [u8], (seconds, flags): (u64, u32)) -> Option<Vec<u8>> {
    const NO_SUCH: i32 = -2;
    const UNKNOWN: i32 = -38;
    let bytes = content.len() as u64;
    let result = match input.opcode() {
        LOOKUP if input.name() == NAME => Ok(fuse::entry(FILE_NODE, bytes, seconds)),
        LOOKUP => Err(NO_SUCH),
        FORGET | BATCH_FORGET | INTERRUPT => return None,
        GETATTR => Ok(fuse::attr(input.node(), bytes, seconds)),
        OPEN | OPENDIR => Ok(fuse::longs(&[0, 0])),
        READ => Ok(content.get(moved(input, bytes))?.to_vec()),
        WRITE => {
            let there = content.get_mut(moved(input, bytes))?;
            there.copy_from_slice(input.0.get(80..)?.get(..there.len())?);
            Ok(fuse::words(&[there.len() as u32, 0]))
        }
        INIT => Ok(fuse::init(flags, 0)),
        FSYNC | RELEASE | RELEASEDIR => Ok(Vec::new()),
        _ => Err(UNKNOWN),
    };
    Some(fuse::answer(input.unique(), result))
}

/// The byte range of a read or write, cut at the end of the file.
fn moved(input: Input<'_>, bytes: u64) -> Range<usize> {
    let (offset, len) = (input.long(40 + 8), input.word(40 + 16));
    let end = offset.saturating_add(len.into()).min(bytes);
    offset.min(end) as usize..end as usize
}
