//! A file system of one file that answers, and later does not: as a network's does when its server is lost.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{UnmountFlags, unmount};

use crate::Scratch;
use crate::fuse::opcode::{
    BATCH_FORGET, FORGET, GETATTR, INIT, INTERRUPT, LOOKUP, OPEN, OPENDIR, READ, RELEASE,
    RELEASEDIR,
};
use crate::fuse::{self, FILE_NODE, Input, REQUEST_BYTES};

/// Name of the file.
const NAME: &str = "disk";
/// How often the server looks whether it is to end or be silent.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};

/// The server and its mount. Nothing on it can be written.
pub struct Mute {
    at: PathBuf,
    flags: Arc<Flags>,
    server: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Flags {
    silent: AtomicBool,
    over: AtomicBool,
}

impl Mute {
    /// Mounts a file of so many bytes.
    pub fn mount(scratch: &Scratch, bytes: u64) -> Result<Mute, String> {
        let at = scratch.join("mute");
        let device = fuse::mount_at(&at, "mute")?;
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
    while !flags.over.load(Ordering::SeqCst) {
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
        if let Some(answer) = answer(Input(request), bytes) {
            let _ = device.write_all(&answer);
        }
    }
}

/// The answer to a request; `None`: there is none.
fn answer(input: Input<'_>, bytes: u64) -> Option<Vec<u8>> {
    const NO_SUCH: i32 = -2;
    const UNKNOWN: i32 = -38;
    let told = match input.opcode() {
        // Valid for no time at all: the kernel asks again whenever it wants to know.
        LOOKUP if input.name() == NAME => Ok(fuse::entry(FILE_NODE, bytes, 0)),
        LOOKUP => Err(NO_SUCH),
        FORGET | BATCH_FORGET | INTERRUPT => return None,
        GETATTR => Ok(fuse::attr(input.node(), bytes, 0)),
        OPEN | OPENDIR => Ok(fuse::longs(&[0, 0])),
        READ => Ok(vec![0; input.word(40 + 16) as usize]),
        INIT => Ok(fuse::init(0, 0)),
        RELEASE | RELEASEDIR => Ok(Vec::new()),
        _ => Err(UNKNOWN),
    };
    Some(fuse::answer(input.unique(), told))
}
