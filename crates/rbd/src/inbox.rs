//! A list in which completions wait for the thread that submitted the I/O.
//!
//! librbd completes on its own threads. Each completion is put into its slot, and the slot into a list without locks, which the
//! owner takes as a whole. A slot is in the list at most once, so the list is bounded. The owner's eventfd is written once, by the
//! first completion after the owner said that it sleeps.
//!
//! Unsafe because the address of a slot goes through librbd. Each I/O that is under way holds a count of the `Arc` in which the
//! slot lies, so a callback that comes after its owner has gone finds it.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicPtr, AtomicU32, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};

/// The end of the list.
const END: u32 = u32::MAX;

/// The completions of one thread's I/O. Dropping it is safe while I/O is under way; the memory that the I/O was given is not
/// covered by that.
#[derive(Debug)]
pub struct Inbox {
    shared: Arc<InboxShared>,
    /// The rest of the list that was taken last.
    taken: u32,
}

#[derive(Debug)]
pub(crate) struct InboxShared {
    slots: Box<[IoSlot]>,
    head: AtomicU32,
    asleep: AtomicBool,
    bell: OwnedFd,
}

#[derive(Debug)]
pub(crate) struct IoSlot {
    /// Its number, and where it lies.
    number: u32,
    home: AtomicPtr<InboxShared>,
    busy: AtomicBool,
    next: AtomicU32,
    result: AtomicI64,
}

impl Inbox {
    /// Makes an inbox for so many I/Os at once, each in a slot of its own.
    pub fn new(slots: u16) -> io::Result<Inbox> {
        let slot = |number| IoSlot {
            number,
            home: AtomicPtr::default(),
            busy: AtomicBool::new(false),
            next: AtomicU32::new(END),
            result: AtomicI64::new(0),
        };
        let shared = Arc::new(InboxShared {
            slots: (0..u32::from(slots)).map(slot).collect(),
            head: AtomicU32::new(END),
            asleep: AtomicBool::new(false),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        for slot in &shared.slots {
            let home = Arc::as_ptr(&shared).cast_mut();
            slot.home.store(home, Ordering::Relaxed);
        }
        Ok(Inbox { shared, taken: END })
    }

    /// Takes a completion: its slot, and librbd's result.
    #[inline]
    pub fn take(&mut self) -> Option<(u16, i64)> {
        if self.taken == END {
            if !self.has_any() {
                return None;
            }
            // Acquire: the results, and what was read into the guest's memory.
            self.taken = self.shared.head.swap(END, Ordering::Acquire);
        }
        let slot = self.shared.slots.get(self.taken as usize)?;
        self.taken = slot.next.load(Ordering::Relaxed);
        let result = slot.result.load(Ordering::Relaxed);
        slot.busy.store(false, Ordering::Relaxed);
        Some((slot.number as u16, result))
    }

    /// Returns true if `take` would return one.
    #[inline]
    pub fn has_any(&self) -> bool {
        self.taken != END || self.shared.head.load(Ordering::Relaxed) != END
    }

    /// Says that the owner is about to sleep: the next completion rings the bell. `false`: there is one already.
    #[inline]
    pub fn sleep(&self) -> bool {
        self.shared.asleep.store(true, Ordering::Relaxed);
        // Either the completion that is put in now sees `asleep`, or it is seen here.
        fence(Ordering::SeqCst);
        !self.has_any()
    }

    /// Says that the owner is awake and looks by itself.
    #[inline]
    pub fn awake(&self) {
        if self.shared.asleep.load(Ordering::Relaxed) {
            self.shared.asleep.store(false, Ordering::Relaxed);
        }
    }

    /// Returns a descriptor that is readable when the bell rang.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }

    /// Silences the bell after it rang.
    pub fn hush(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.shared.bell, &mut count);
    }

    /// Rings the bell, to end a watch of it.
    pub fn ring(&self) {
        self.shared.ring();
    }

    /// Reserves a slot for an I/O and returns the callback's argument. The I/O has a count of the inbox from now on.
    ///
    /// Panics if the slot is in use: two I/Os in one slot would be one completion.
    pub(crate) fn begin(&self, slot: u16) -> *mut c_void {
        let slot = &self.shared.slots[usize::from(slot)];
        let was_busy = slot.busy.swap(true, Ordering::Relaxed);
        assert!(!was_busy, "two I/Os in one slot");
        let _ = Arc::into_raw(Arc::clone(&self.shared));
        std::ptr::from_ref(slot).cast_mut().cast()
    }

    /// Takes back what `begin` gave: there will be no callback.
    pub(crate) fn cancel(&self, slot: u16) {
        self.shared.slots[usize::from(slot)]
            .busy
            .store(false, Ordering::Relaxed);
        // SAFETY: the count is the one of `begin`.
        unsafe { Arc::decrement_strong_count(Arc::as_ptr(&self.shared)) };
    }
}

impl InboxShared {
    fn ring(&self) {
        // A full counter rings as well.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    fn put(&self, slot: &IoSlot, result: i64) {
        slot.result.store(result, Ordering::Relaxed);
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            slot.next.store(head, Ordering::Relaxed);
            // Release: the result, and what librbd wrote. The list is only ever taken as a whole, so its head cannot have been
            // taken and put back in between.
            let put = self.head.compare_exchange_weak(
                head,
                slot.number,
                Ordering::Release,
                Ordering::Relaxed,
            );
            match put {
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
        // See `sleep`.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            self.ring();
        }
    }
}

/// Puts the result of an I/O into its inbox.
///
/// # Safety
///
/// `arg` is what `begin` returned for this I/O, and this is called once.
pub(crate) unsafe fn complete(arg: *mut c_void, result: i64) {
    // SAFETY: the slot lies in the inbox, of which the I/O has a count until the end of this function.
    let slot = unsafe { &*arg.cast::<IoSlot>() };
    // SAFETY: the count is the one of `begin`.
    let shared = unsafe { Arc::from_raw(slot.home.load(Ordering::Relaxed).cast_const()) };
    shared.put(slot, result);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(inbox: &Inbox) -> bool {
        let mut count = [0; 8];
        rustix::io::read(inbox.bell(), &mut count).is_ok()
    }

    #[test]
    fn the_bell_rings_once_for_a_batch_and_only_for_a_sleeper() {
        let mut inbox = Inbox::new(3).unwrap();
        let args = [0, 1, 2].map(|slot| inbox.begin(slot));
        // SAFETY: each is completed once.
        unsafe { complete(args[0], 5) };
        assert!(!readable(&inbox), "nobody slept");
        assert!(!inbox.sleep(), "there is one");
        inbox.awake();
        assert_eq!(inbox.take(), Some((0, 5)));
        assert!(inbox.sleep());
        // SAFETY: as above.
        unsafe {
            complete(args[1], -108);
            complete(args[2], 0);
        }
        let mut count = [0; 8];
        rustix::io::read(inbox.bell(), &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1, "one write for the batch");
        let mut both = [inbox.take().unwrap(), inbox.take().unwrap()];
        both.sort_unstable();
        assert_eq!(both, [(1, -108), (2, 0)]);
        assert_eq!(inbox.take(), None);
    }

    #[test]
    fn a_completion_that_comes_after_its_owner_has_gone_does_no_harm() {
        let inbox = Inbox::new(1).unwrap();
        let weak = Arc::downgrade(&inbox.shared);
        let arg = inbox.begin(0) as usize;
        drop(inbox);
        assert!(weak.upgrade().is_some(), "the I/O keeps it");
        // SAFETY: completed once.
        let late = std::thread::spawn(move || unsafe { complete(arg as *mut c_void, 0) });
        late.join().unwrap();
        assert!(weak.upgrade().is_none());
    }

    #[test]
    #[should_panic(expected = "two I/Os in one slot")]
    fn a_slot_has_one_io() {
        let inbox = Inbox::new(1).unwrap();
        inbox.begin(0);
        inbox.begin(0);
    }

    #[test]
    fn no_completion_is_lost_between_threads_and_a_sleeper() {
        const SLOTS: u16 = 16;
        const ROUNDS: u64 = 4000;
        let mut inbox = Inbox::new(SLOTS).unwrap();
        let (to, from) = std::sync::mpsc::channel::<(usize, i64)>();
        let from = Arc::new(std::sync::Mutex::new(from));
        let threads = [(); 3].map(|()| {
            let from = Arc::clone(&from);
            std::thread::spawn(move || {
                loop {
                    let Ok((arg, result)) = from.lock().unwrap().recv() else {
                        return;
                    };
                    // SAFETY: each is sent once.
                    unsafe { complete(arg as *mut c_void, result) };
                }
            })
        });
        let mut free: Vec<u16> = (0..SLOTS).collect();
        let (mut sent, mut got) = (0_u64, 0_u64);
        while got < ROUNDS {
            while let (true, Some(slot)) = (sent < ROUNDS, free.pop()) {
                to.send((inbox.begin(slot) as usize, i64::from(slot)))
                    .unwrap();
                sent += 1;
            }
            while let Some((slot, result)) = inbox.take() {
                assert_eq!(i64::from(slot), result);
                free.push(slot);
                got += 1;
            }
            if got < sent && inbox.sleep() {
                let mut polled = [rustix::event::PollFd::new(
                    &inbox.shared.bell,
                    rustix::event::PollFlags::IN,
                )];
                let most = rustix::event::Timespec {
                    tv_sec: 20,
                    tv_nsec: 0,
                };
                let rang = rustix::event::poll(&mut polled, Some(&most)).unwrap();
                assert_eq!(rang, 1, "a completion without a bell");
                inbox.hush();
            }
            inbox.awake();
        }
        drop(to);
        for thread in threads {
            thread.join().unwrap();
        }
    }
}
