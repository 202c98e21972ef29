//! A disk with a volatile cache below the real kernel: files on a FUSE file system that records each write, discard
//! and fsync that reaches it. It holds several I/Os at a time and answers them in random order. Data may be stored
//! long before its I/O is answered.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cleave_states::{Log, Number, SECTOR};
use cleave_tests::fuse::opcode::{
    BATCH_FORGET, FALLOCATE, FORGET, FSYNC, GETATTR, INIT, INTERRUPT, LOOKUP, OPEN, OPENDIR, READ,
    RELEASE, RELEASEDIR, SETATTR, WRITE,
};
use cleave_tests::fuse::{self, FILE_NODE, Input, REQUEST_BYTES, flag};
use cleave_tests::{Random, Scratch};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::mount::{UnmountFlags, unmount};

/// Most I/Os that are held, and the longest time for which one is held.
const HELD_MAX: u64 = 6;
const HELD_FOR: Duration = Duration::from_micros(400);
/// Duration of most fsyncs: meanwhile writes are answered, and flushes requested, that the fsync does not cover.
const SYNC_FOR: Duration = Duration::from_millis(2);

/// How long the kernel may cache attributes: nothing but the data of the files changes.
const VALID_SECONDS: u64 = 3600;

const NO_SUCH: i32 = -2;
const INVALID: i32 = -22;
const UNKNOWN: i32 = -38;

/// Properties of the files.
#[derive(Debug, Clone, Copy)]
pub(super) struct FileOptions {
    pub(super) files: u64,
    pub(super) bytes: u64,
    /// Block size of direct I/O: an unaligned request is refused.
    pub(super) unit: u64,
    /// The kernel caches data that is written through the page cache until it is synced.
    pub(super) cached: bool,
    pub(super) seed: u64,
}

/// The mounted file system, unmounted when dropped.
pub(super) struct RecordedDisk {
    at: PathBuf,
    over: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
    log: Arc<Mutex<Option<Log>>>,
    options: FileOptions,
}

impl RecordedDisk {
    /// Mounts files of zeroes. Nothing is recorded until a log is set.
    pub(super) fn mount(scratch: &Scratch, options: FileOptions) -> RecordedDisk {
        let at = scratch.join("recorded");
        let device = fuse::mount_at(&at, "recorded").unwrap();
        rustix::fs::fcntl_setfl(&device, OFlags::NONBLOCK).unwrap();
        let (over, log) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
        let mut server = Server {
            device,
            options,
            images: vec![vec![0; options.bytes as usize]; options.files as usize],
            log: log.clone(),
            held: Vec::new(),
            random: Random::new(options.seed),
        };
        let seen = over.clone();
        let server = std::thread::spawn(move || server.serve(&seen));
        RecordedDisk {
            at,
            over,
            server: Some(server),
            log,
            options,
        }
    }

    /// Paths of the files.
    pub(super) fn paths(&self) -> Vec<String> {
        let path = |number: u64| self.at.join(number.to_string()).display().to_string();
        (0..self.options.files).map(path).collect()
    }

    /// Starts recording. The guest's part of the disk is zero at this moment.
    pub(super) fn record(&self, log: Log) {
        *self.log.lock().unwrap() = Some(log);
    }

    pub(super) fn log(&self) -> MutexGuard<'_, Option<Log>> {
        self.log.lock().unwrap()
    }
}

impl Drop for RecordedDisk {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        // Closing the device makes the kernel abort every waiting request.
        let ended = self.server.take().map(JoinHandle::join);
        let at: &Path = &self.at;
        let _ = unmount(at, UnmountFlags::DETACH);
        assert!(
            std::thread::panicking() || ended.is_some_and(|ended| ended.is_ok()),
            "the file system panicked"
        );
    }
}

/// An I/O that has arrived and has no reply yet.
struct Held {
    unique: u64,
    file: u64,
    what: Operation,
    /// Its number in the log.
    io: Option<Number>,
    since: Instant,
    applied: bool,
}

enum Operation {
    Read {
        at: usize,
        len: usize,
    },
    Write {
        at: usize,
        bytes: Vec<u8>,
        fua: bool,
    },
    Zero {
        at: usize,
        len: usize,
    },
    Discard {
        at: usize,
        len: usize,
    },
    Sync,
}

struct Server {
    device: File,
    options: FileOptions,
    images: Vec<Vec<u8>>,
    log: Arc<Mutex<Option<Log>>>,
    held: Vec<Held>,
    random: Random,
}

impl Server {
    fn serve(&mut self, over: &AtomicBool) {
        let mut request = vec![0; REQUEST_BYTES];
        while !over.load(Ordering::SeqCst) {
            // Read everything that has been submitted before the next reply: an fsync covers only the I/O that was
            // answered when it was submitted.
            while let Ok(count) = self.device.read(&mut request) {
                self.take(&Input(&request[..count]));
            }
            let oldest = self.held.iter().map(|held| held.since.elapsed()).max();
            let is_due = self.held.len() as u64 > self.random.below(HELD_MAX)
                || oldest.is_some_and(|oldest| oldest > HELD_FOR);
            match is_due && !self.held.is_empty() {
                true => self.work(),
                false => self.wait(),
            }
        }
    }

    fn wait(&self) {
        let pause = if self.held.is_empty() {
            5_000_000
        } else {
            100_000
        };
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: pause,
        };
        let _ = poll(
            &mut [PollFd::new(&self.device, PollFlags::IN)],
            Some(&pause),
        );
    }

    /// Advances one held I/O: its data moves, or it is answered, or both.
    fn work(&mut self) {
        let nth = self.random.below(self.held.len() as u64) as usize;
        let is_sync = matches!(self.held[nth].what, Operation::Sync);
        if is_sync && self.held[nth].since.elapsed() < SYNC_FOR && self.random.below(4) > 0 {
            return self.wait();
        }
        if !self.held[nth].applied {
            self.apply(nth);
            if self.random.below(3) == 0 {
                return;
            }
        }
        let held = self.held.swap_remove(nth);
        let body = match &held.what {
            Operation::Read { at, len } => {
                self.images[held.file as usize][*at..*at + *len].to_vec()
            }
            Operation::Write { bytes, .. } => fuse::words(&[bytes.len() as u32, 0]),
            Operation::Zero { .. } | Operation::Discard { .. } | Operation::Sync => Vec::new(),
        };
        // Recorded before the reply goes out, because the daemon may rely on it immediately.
        if let (Some(io), Some(log)) = (held.io, &mut *self.log.lock().unwrap()) {
            log.complete_io(io);
        }
        self.reply(held.unique, Ok(body));
    }

    fn apply(&mut self, nth: usize) {
        let held = &mut self.held[nth];
        held.applied = true;
        let image = &mut self.images[held.file as usize];
        match &held.what {
            Operation::Write { at, bytes, .. } => {
                image[*at..*at + bytes.len()].copy_from_slice(bytes)
            }
            Operation::Zero { at, len } | Operation::Discard { at, len } => {
                image[*at..*at + *len].fill(0);
            }
            Operation::Read { .. } | Operation::Sync => return,
        }
        if let (Some(io), Some(log)) = (held.io, &mut *self.log.lock().unwrap()) {
            log.apply(io);
        }
    }

    fn take(&mut self, input: &Input<'_>) {
        let (unique, node) = (input.unique(), input.node());
        let file = node.wrapping_sub(FILE_NODE);
        let answer = match input.opcode() {
            FORGET | BATCH_FORGET | INTERRUPT => return,
            LOOKUP => self.lookup(input),
            // Only times are set here, and nothing reads them.
            GETATTR | SETATTR => Ok(fuse::attr(node, self.options.bytes, VALID_SECONDS)),
            OPEN | OPENDIR => Ok(fuse::longs(&[0, 0])),
            RELEASE | RELEASEDIR => Ok(Vec::new()),
            INIT => Ok(self.init()),
            READ | WRITE | FSYNC | FALLOCATE => match self.io(input) {
                Ok(what) => return self.hold(unique, file, what),
                Err(error) => Err(error),
            },
            _ => Err(UNKNOWN),
        };
        self.reply(unique, answer);
    }

    /// Reads and direct I/O are asynchronous, with many in flight.
    fn init(&self) -> Vec<u8> {
        let cache = match self.options.cached {
            true => flag::WRITEBACK_CACHE,
            false => 0,
        };
        fuse::init(flag::ASYNC_READ | flag::ASYNC_DIO | cache, 64)
    }

    fn lookup(&self, input: &Input<'_>) -> Result<Vec<u8>, i32> {
        let number: u64 = input.name().parse().map_err(|_| NO_SUCH)?;
        if number >= self.options.files {
            return Err(NO_SUCH);
        }
        Ok(fuse::entry(
            FILE_NODE + number,
            self.options.bytes,
            VALID_SECONDS,
        ))
    }

    /// The bytes that a read asks for, if the file has them.
    fn io(&self, input: &Input<'_>) -> Result<Operation, i32> {
        if input.opcode() == FSYNC {
            return Ok(Operation::Sync);
        }
        let (at, size) = (input.long(48), u64::from(input.word(56)));
        Ok(match input.opcode() {
            READ => {
                self.refuse_odd(input.word(72), at, size)?;
                // A read beyond the end of the file returns nothing.
                let at = at.min(self.options.bytes) as usize;
                let len = (size as usize).min(self.options.bytes as usize - at);
                Operation::Read { at, len }
            }
            WRITE => {
                self.refuse_odd(input.word(72), at, size)?;
                let bytes = input.0[80..][..size as usize].to_vec();
                let (at, fua) = (at as usize, input.word(72) & DSYNC != 0);
                Operation::Write { at, bytes, fua }
            }
            _ => {
                let (len, mode) = (input.long(56), input.word(64));
                assert!(
                    at + len <= self.options.bytes,
                    "{at}+{len} is beyond the end"
                );
                let (at, len) = (at as usize, len as usize);
                match mode & !KEEP_SIZE {
                    PUNCH_HOLE => Operation::Discard { at, len },
                    ZERO_RANGE => Operation::Zero { at, len },
                    _ => return Err(INVALID),
                }
            }
        })
    }

    /// Direct I/O must be aligned.
    fn refuse_odd(&self, flags: u32, at: u64, size: u64) -> Result<(), i32> {
        let is_direct = OFlags::from_bits_retain(flags).contains(OFlags::DIRECT);
        match is_direct && (at | size) & (self.options.unit - 1) != 0 {
            true => Err(INVALID),
            false => Ok(()),
        }
    }

    fn hold(&mut self, unique: u64, file: u64, what: Operation) {
        let first = file * self.options.bytes;
        let sector = |at: usize| {
            assert_eq!(at % SECTOR, 0, "the daemon writes whole sectors");
            (first + at as u64) / SECTOR as u64
        };
        let io = self.log.lock().unwrap().as_mut().and_then(|log| {
            Some(match &what {
                Operation::Read { .. } => return None,
                Operation::Write { at, bytes, fua } => log.start_write(sector(*at), bytes, *fua),
                Operation::Zero { at, len } => log.start_write(sector(*at), &vec![0; *len], false),
                Operation::Discard { at, len } => {
                    log.start_discard(sector(*at), (*len / SECTOR) as u64)
                }
                Operation::Sync => log.start_flush(file),
            })
        });
        self.held.push(Held {
            unique,
            file,
            what,
            io,
            since: Instant::now(),
            applied: false,
        });
    }

    fn reply(&mut self, unique: u64, answer: Result<Vec<u8>, i32>) {
        // The kernel may have aborted this request meanwhile; the error is harmless.
        let _ = self.device.write_all(&fuse::answer(unique, answer));
    }
}

/// O_DSYNC of open(2). It stands for RWF_DSYNC here; rustix uses another bit under that name.
const DSYNC: u32 = 0o10_000;
const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 16;
