//! Bells: eventfds that the daemon writes to call the guest.
//!
//! They come from a frontend and may be any kind of file; a descriptor that cannot be written is ignored.
//! Their flags belong to the frontend and are not changed. Nothing here blocks a thread that several disks share, whatever the
//! frontend does to counter and flags: "poll, then write" would, because the counter can fill up between the two. A thread of one
//! disk can be blocked by that disk's own frontend, which fills the counter and changes its flag at the right moment.
//!
//! Unsafe because entries are pushed to a ring; the only memory that they point to is a static.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::register::Restriction;
use io_uring::squeue::Flags;
use io_uring::types::Fixed;
use io_uring::{IoUring, opcode, squeue};
use rustix::fs::OFlags;

use super::ring::{Ring, tag, while_short_of_memory};

/// The value that is written to a bell.
static ONE: u64 = 1;

/// One bell. `rung`: `ring` was called since the last enter.
#[derive(Debug, Default)]
enum Bell {
    #[default]
    None,
    /// Non-blocking: written by the reactor's ring, in the same system call as everything else.
    Written { rung: bool, queued: bool },
    /// Blocking, or of a shared thread: the reactor's ring would write a blocking one through a poll with retries (400 us measured)
    /// or in a kernel thread (20 us).
    Signalled {
        notify_ring: Box<NotifyRing>,
        rung: bool,
    },
}

/// A ring of one entry that signals an eventfd on completion. The kernel's own signal never blocks; it
/// accepts only eventfds.
struct NotifyRing {
    uring: IoUring,
}

impl std::fmt::Debug for NotifyRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NotifyRing").finish_non_exhaustive()
    }
}

impl NotifyRing {
    fn new(fd: &OwnedFd) -> io::Result<NotifyRing> {
        let build = || IoUring::builder().dontfork().setup_r_disabled().build(1);
        let uring = while_short_of_memory(build, std::thread::sleep)?;
        let submitter = uring.submitter();
        submitter.register_eventfd(fd.as_raw_fd())?;
        submitter.register_restrictions(&mut [Restriction::sqe_op(opcode::Nop::CODE)])?;
        submitter.register_enable_rings()?;
        Ok(NotifyRing { uring })
    }

    fn notify(&mut self) {
        // SAFETY: a no-op points to no memory.
        let _ = unsafe { self.uring.submission().push(&opcode::Nop::new().build()) };
        // After an error the entry stays queued for the next call. If the kernel lacks the memory to send a
        // signal, it is lost.
        let _ = self.uring.submit();
        self.uring.completion().for_each(drop);
    }
}

/// An eventfd for a bell, and what is needed to write it. A thread that hands it to a worker makes it, because a worker of a
/// confined daemon cannot set up rings.
#[derive(Debug)]
pub struct BellFd {
    fd: OwnedFd,
    way: Way,
}

/// How a bell will be written.
#[derive(Debug)]
enum Way {
    /// By the reactor's ring.
    Write,
    /// By a ring of its own.
    Notify(Box<NotifyRing>),
    /// Not at all.
    None,
}

impl BellFd {
    /// Prepares a ring for the descriptor if it is blocking now, or if several disks share the thread that will write it: before the
    /// kernel writes to a full counter it looks at the flag for a second time, so a frontend that changes the flag all the time has
    /// the writer sleep.
    pub fn new(fd: OwnedFd, is_shared: bool) -> BellFd {
        let flags = rustix::fs::fcntl_getfl(&fd);
        let way = if !is_shared && flags.is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)) {
            Way::Write
        } else {
            match NotifyRing::new(&fd) {
                Ok(notify_ring) => Way::Notify(Box::new(notify_ring)),
                Err(error) => {
                    report(&error);
                    Way::None
                }
            }
        };
        BellFd { fd, way }
    }
}

/// The bells of a ring; slot n is file `first` + n.
#[derive(Debug)]
pub(crate) struct Bells {
    first: u32,
    slots: Box<[Bell]>,
    /// Slots rung since the last enter.
    rung: Vec<u16>,
}

impl Bells {
    pub(crate) fn new(first: u32, count: u16) -> Bells {
        let slots = (0..count).map(|_| Bell::None).collect();
        Bells {
            first,
            slots,
            rung: Vec::with_capacity(usize::from(count)),
        }
    }

    /// Sets or removes the eventfd of `slot`. Calls made before go to the old one.
    pub(crate) fn set(&mut self, ring: &mut Ring, slot: u16, made: Option<BellFd>) {
        let file = self.first + u32::from(slot);
        let Some(bell) = self.slots.get_mut(usize::from(slot)) else {
            return;
        };
        match bell {
            Bell::None => {}
            Bell::Written { rung, .. } => {
                // The entry refers to the slot, not to the file, so it must be submitted before the file is replaced.
                if *rung {
                    let _ = ring.submit();
                }
                let _ = ring.set_file(file, None);
            }
            Bell::Signalled { notify_ring, rung } => {
                if *rung {
                    notify_ring.notify();
                }
            }
        }
        self.rung.retain(|rung| *rung != slot);
        *bell = made.map_or(Bell::None, |made| choose(ring, file, made));
    }

    /// Rings the bell in `slot`. Its entry is queued at once, ahead of ops that are pushed later, so that the
    /// guest is called before the kernel starts those.
    #[inline]
    pub(crate) fn ring(&mut self, ring: &mut Ring, slot: u16) {
        match self.slots.get_mut(usize::from(slot)) {
            Some(Bell::Written { rung, queued }) if !*rung => {
                *rung = true;
                // If the queue is full, `flush` tries again.
                *queued = push(ring, self.first + u32::from(slot));
                self.rung.push(slot);
            }
            Some(Bell::Signalled { rung, .. }) if !*rung => {
                *rung = true;
                self.rung.push(slot);
            }
            _ => {}
        }
    }

    /// Runs before an enter: signals the bells that the reactor's ring does not write, and resets `rung`.
    #[inline]
    pub(crate) fn flush(&mut self, ring: &mut Ring) {
        if !self.rung.is_empty() {
            self.flush_rung(ring);
        }
    }

    fn flush_rung(&mut self, ring: &mut Ring) {
        let mut waiting = 0;
        for at in 0..self.rung.len() {
            let slot = self.rung[at];
            let sent = match self.slots.get_mut(usize::from(slot)) {
                Some(Bell::Written { rung, queued }) => {
                    let sent = *queued || push(ring, self.first + u32::from(slot));
                    *queued = false;
                    *rung = !sent;
                    sent
                }
                Some(Bell::Signalled { notify_ring, rung }) => {
                    *rung = false;
                    notify_ring.notify();
                    true
                }
                _ => true,
            };
            if !sent {
                self.rung[waiting] = slot;
                waiting += 1;
            }
        }
        self.rung.truncate(waiting);
    }

    /// Returns true if a bell is still waiting for room in the queue.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.rung.is_empty()
    }
}

fn choose(ring: &Ring, file: u32, made: BellFd) -> Bell {
    let BellFd { fd, way } = made;
    match way {
        Way::Write => {
            // Short of memory the kernel may refuse the file, and without a bell its guest would never wake up.
            let set = || ring.set_file(file, Some(fd.as_raw_fd()));
            match while_short_of_memory(set, std::thread::sleep) {
                Ok(()) => Bell::Written {
                    rung: false,
                    queued: false,
                },
                Err(error) => {
                    report(&error);
                    Bell::None
                }
            }
        }
        Way::Notify(notify_ring) => Bell::Signalled {
            notify_ring,
            rung: false,
        },
        Way::None => Bell::None,
    }
}

/// Reports a lack of memory or descriptors. Any other error is the frontend's own fault and not worth a log line.
fn report(error: &io::Error) {
    if matches!(
        error.raw_os_error(),
        Some(libc::ENOMEM | libc::EMFILE | libc::ENFILE)
    ) {
        tracing::error!(%error, "cannot notify the guest of completions; its I/O may hang");
    }
}

/// NOWAIT as well as the descriptor's own flag, because the frontend may clear that flag. The kernel would
/// then keep every write to a full eventfd pending, without limit.
fn push(ring: &mut Ring, file: u32) -> bool {
    let entry: squeue::Entry = opcode::Write::new(Fixed(file), (&raw const ONE).cast(), 8)
        .rw_flags(libc::RWF_NOWAIT)
        .build()
        .flags(Flags::SKIP_SUCCESS)
        .user_data(tag::IGNORED);
    // SAFETY: the entry points to a static.
    unsafe { ring.push(&entry) }
}
