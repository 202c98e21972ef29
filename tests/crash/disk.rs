//! A disk with a volatile cache behind the real kernel: files on a file system of our own (FUSE, protocol 7.31) that
//! notes each write, discard and fsync which reaches them. Several I/O are held at a time and answered in a random order, and
//! data may be there long before its answer.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cleave_states::{Log, Number, SECTOR};
use cleave_tests::{Random, Scratch};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

const ROOT_NODE: u64 = 1;
/// The first file's; the others follow.
const FILE_NODE: u64 = 2;
/// Longest request that is taken: a write of 128 KiB and its head.
const REQUEST_BYTES: usize = 256 << 10;
const MOVED_MAX: u32 = 128 << 10;
/// Most I/O that is held back, and how long the oldest one is.
const HELD_MAX: u64 = 6;
const HELD_FOR: Duration = Duration::from_micros(400);
/// Most fsyncs take this long: writes are answered meanwhile, and flushes asked for that they do not cover.
const SYNC_FOR: Duration = Duration::from_millis(2);

const NO_SUCH: i32 = -2;
const INVALID: i32 = -22;
const UNKNOWN: i32 = -38;

/// How the files are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) files: u64,
    pub(crate) bytes: u64,
    /// Unit of I/O past the page cache: what is not aligned to it is refused.
    pub(crate) unit: u64,
    /// The kernel keeps what is written through the page cache until it is synced.
    pub(crate) cached: bool,
    pub(crate) seed: u64,
}

/// The mounted file system; gone when dropped.
pub(crate) struct RecordedDisk {
    at: PathBuf,
    over: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
    log: Arc<Mutex<Option<Log>>>,
    plan: Plan,
}

impl RecordedDisk {
    /// Mounts files of zeroes. Nothing is noted until there is a log.
    pub(crate) fn mount(scratch: &Scratch, plan: Plan) -> RecordedDisk {
        let at = scratch.join("recorded");
        std::fs::create_dir_all(&at).unwrap();
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.unwrap();
        rustix::fs::fcntl_setfl(&device, OFlags::NONBLOCK).unwrap();
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            device.as_raw_fd()
        );
        let options = std::ffi::CString::new(options).unwrap();
        let flags = MountFlags::NODEV | MountFlags::NOSUID;
        mount("recorded", &at, "fuse", flags, options.as_c_str()).unwrap();
        let (over, log) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
        let mut server = Server {
            device,
            plan,
            images: vec![vec![0; plan.bytes as usize]; plan.files as usize],
            log: log.clone(),
            held: Vec::new(),
            random: Random::new(plan.seed),
        };
        let seen = over.clone();
        let server = std::thread::spawn(move || server.serve(&seen));
        RecordedDisk {
            at,
            over,
            server: Some(server),
            log,
            plan,
        }
    }

    /// The files.
    pub(crate) fn paths(&self) -> Vec<String> {
        let path = |number: u64| self.at.join(number.to_string()).display().to_string();
        (0..self.plan.files).map(path).collect()
    }

    /// Notes from here on what happens. The disk holds zeroes where the guest will look.
    pub(crate) fn record(&self, log: Log) {
        *self.log.lock().unwrap() = Some(log);
    }

    pub(crate) fn log(&self) -> MutexGuard<'_, Option<Log>> {
        self.log.lock().unwrap()
    }
}

impl Drop for RecordedDisk {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        // With its end the kernel gives up all that waits.
        let ended = self.server.take().map(JoinHandle::join);
        let at: &Path = &self.at;
        let _ = unmount(at, UnmountFlags::DETACH);
        assert!(
            std::thread::panicking() || ended.is_some_and(|ended| ended.is_ok()),
            "the file system panicked"
        );
    }
}

/// An I/O that has arrived and not been answered.
struct Held {
    unique: u64,
    file: u64,
    what: What,
    /// In the log.
    io: Option<Number>,
    since: Instant,
    applied: bool,
}

enum What {
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
    plan: Plan,
    images: Vec<Vec<u8>>,
    log: Arc<Mutex<Option<Log>>>,
    held: Vec<Held>,
    random: Random,
}

impl Server {
    fn serve(&mut self, over: &AtomicBool) {
        let mut request = vec![0; REQUEST_BYTES];
        while !over.load(Ordering::SeqCst) {
            // Everything submitted by now is read before more is answered: an fsync covers only what had been
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

    /// One of those that are held makes a step: its data moves, or it is answered, or both.
    fn work(&mut self) {
        let nth = self.random.below(self.held.len() as u64) as usize;
        let is_sync = matches!(self.held[nth].what, What::Sync);
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
            What::Read { at, len } => self.images[held.file as usize][*at..*at + *len].to_vec(),
            What::Write { bytes, .. } => words(&[bytes.len() as u32, 0]),
            What::Zero { .. } | What::Discard { .. } | What::Sync => Vec::new(),
        };
        // Before the answer goes out: the daemon may build upon it at once.
        if let (Some(io), Some(log)) = (held.io, &mut *self.log.lock().unwrap()) {
            log.ended(io);
        }
        self.reply(held.unique, Ok(body));
    }

    fn apply(&mut self, nth: usize) {
        let held = &mut self.held[nth];
        held.applied = true;
        let image = &mut self.images[held.file as usize];
        match &held.what {
            What::Write { at, bytes, .. } => image[*at..*at + bytes.len()].copy_from_slice(bytes),
            What::Zero { at, len } | What::Discard { at, len } => {
                image[*at..*at + *len].fill(0);
            }
            What::Read { .. } | What::Sync => return,
        }
        if let (Some(io), Some(log)) = (held.io, &mut *self.log.lock().unwrap()) {
            log.applied(io);
        }
    }

    fn take(&mut self, input: &Input<'_>) {
        let (unique, node) = (input.long(8), input.long(16));
        let file = node.wrapping_sub(FILE_NODE);
        let answer = match input.word(4) {
            FORGET | BATCH_FORGET | INTERRUPT => return,
            LOOKUP => self.lookup(input),
            // Times alone are set here, and nobody asks for them.
            GETATTR | SETATTR => Ok([longs(&[3600, 0]), self.attributes(node)].concat()),
            OPEN | OPENDIR => Ok(longs(&[0, 0])),
            RELEASE | RELEASEDIR => Ok(Vec::new()),
            INIT => Ok(init(self.plan.cached)),
            READ | WRITE | FSYNC | FALLOCATE => match self.io(input) {
                Ok(what) => return self.hold(unique, file, what),
                Err(error) => Err(error),
            },
            _ => Err(UNKNOWN),
        };
        self.reply(unique, answer);
    }

    fn lookup(&self, input: &Input<'_>) -> Result<Vec<u8>, i32> {
        let name = input.0[40..].split(|byte| *byte == 0).next();
        let name = std::str::from_utf8(name.unwrap_or_default()).unwrap_or_default();
        let number: u64 = name.parse().map_err(|_| NO_SUCH)?;
        if number >= self.plan.files {
            return Err(NO_SUCH);
        }
        let node = FILE_NODE + number;
        Ok([longs(&[node, 0, 3600, 3600, 0]), self.attributes(node)].concat())
    }

    /// What a request wants, where it can be had.
    fn io(&self, input: &Input<'_>) -> Result<What, i32> {
        if input.word(4) == FSYNC {
            return Ok(What::Sync);
        }
        let (at, size) = (input.long(48), u64::from(input.word(56)));
        Ok(match input.word(4) {
            READ => {
                self.refuse_odd(input.word(72), at, size)?;
                // Behind the end there is nothing.
                let at = at.min(self.plan.bytes) as usize;
                let len = (size as usize).min(self.plan.bytes as usize - at);
                What::Read { at, len }
            }
            WRITE => {
                self.refuse_odd(input.word(72), at, size)?;
                let bytes = input.0[80..][..size as usize].to_vec();
                let (at, fua) = (at as usize, input.word(72) & DSYNC != 0);
                What::Write { at, bytes, fua }
            }
            _ => {
                let (len, mode) = (input.long(56), input.word(64));
                assert!(at + len <= self.plan.bytes, "{at}+{len} is beyond the end");
                let (at, len) = (at as usize, len as usize);
                match mode & !KEEP_SIZE {
                    PUNCH_HOLE => What::Discard { at, len },
                    ZERO_RANGE => What::Zero { at, len },
                    _ => return Err(INVALID),
                }
            }
        })
    }

    /// Past the page cache everything has to be aligned.
    fn refuse_odd(&self, flags: u32, at: u64, size: u64) -> Result<(), i32> {
        let is_direct = OFlags::from_bits_retain(flags).contains(OFlags::DIRECT);
        match is_direct && (at | size) & (self.plan.unit - 1) != 0 {
            true => Err(INVALID),
            false => Ok(()),
        }
    }

    fn hold(&mut self, unique: u64, file: u64, what: What) {
        let first = file * self.plan.bytes;
        let sector = |at: usize| {
            assert_eq!(at % SECTOR, 0, "the daemon writes whole sectors");
            (first + at as u64) / SECTOR as u64
        };
        let io = self.log.lock().unwrap().as_mut().and_then(|log| {
            Some(match &what {
                What::Read { .. } => return None,
                What::Write { at, bytes, fua } => log.write_begins(sector(*at), bytes, *fua),
                What::Zero { at, len } => log.write_begins(sector(*at), &vec![0; *len], false),
                What::Discard { at, len } => {
                    log.discard_begins(sector(*at), (*len / SECTOR) as u64)
                }
                What::Sync => log.flush_begins(file),
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
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(error) => (error, Vec::new()),
        };
        let length = (16 + body.len()) as u32;
        let head = [length.to_ne_bytes(), error.to_ne_bytes()].concat();
        // One that was given up meanwhile is not missed.
        let _ = self
            .device
            .write_all(&[&head[..], &unique.to_ne_bytes(), &body].concat());
    }

    /// struct fuse_attr.
    fn attributes(&self, node: u64) -> Vec<u8> {
        let (mode, size) = match node {
            ROOT_NODE => (0o040_755, 0),
            _ => (0o100_644, self.plan.bytes),
        };
        let longs = longs(&[node, size, size / 512, 0, 0, 0]);
        let words = words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]);
        [longs, words].concat()
    }
}

/// A request: struct fuse_in_header, and what follows.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn word(&self, at: usize) -> u32 {
        u32::from_ne_bytes(*self.0[at..].first_chunk().unwrap())
    }

    fn long(&self, at: usize) -> u64 {
        u64::from_ne_bytes(*self.0[at..].first_chunk().unwrap())
    }
}

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
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
const FALLOCATE: u32 = 43;

/// O_DSYNC of open(2), which stands for RWF_DSYNC here; rustix has another bit by that name.
const DSYNC: u32 = 0o10_000;
const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 16;

/// struct fuse_init_out: asynchronous reads and direct I/O, many of them at a time.
fn init(cached: bool) -> Vec<u8> {
    const ASYNC_READ: u32 = 1;
    const ASYNC_DIO: u32 = 1 << 15;
    const BACKGROUND: u32 = 64 << 16 | 64;
    const WRITEBACK_CACHE: u32 = 1 << 16;
    let cache = if cached { WRITEBACK_CACHE } else { 0 };
    let flags = ASYNC_READ | ASYNC_DIO | cache;
    let mut fields = vec![7, 31, 0, flags, BACKGROUND, MOVED_MAX, 1];
    fields.resize(16, 0);
    words(&fields)
}

fn longs(values: &[u64]) -> Vec<u8> {
    let bytes = values.iter().flat_map(|value| value.to_ne_bytes());
    bytes.collect()
}

fn words(values: &[u32]) -> Vec<u8> {
    let bytes = values.iter().flat_map(|value| value.to_ne_bytes());
    bytes.collect()
}
