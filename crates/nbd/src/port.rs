//! The places of a store's connections.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::NbdError;
use crate::bell::new_bell;
use crate::disconnect::Disconnect;
use crate::flushes::FlushTurn;
use crate::link::Link;
use crate::lock::lock;
use crate::mailbox::{Attachment, ConnectionCount, DiallerOrder, Mailbox, Want};
use crate::shared::Shared;
use crate::traffic::Traffic;
use crate::unflushed::{CHANGE_BYTES, Change};

/// The log tells of lost and of new connections at most this often.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// The place of one connection of a store. Used on the store's thread, which it never blocks.
#[derive(Debug)]
pub struct Port {
    mailbox: Arc<Mailbox>,
    shared: Arc<Shared>,
    orders: Sender<DiallerOrder>,
    holding: Holding,
    traffic: Arc<Traffic>,
}

#[derive(Debug)]
enum Holding {
    Nothing,
    /// `again`: it had one, and lost it.
    Waits {
        again: bool,
    },
    Connection(Attachment),
    /// One that is lost and not given up yet: its requests may wait until the server cannot apply them any more.
    Lost(#[expect(dead_code, reason = "held until the connection is given up")] Attachment),
}

/// The list of kept changes after one was added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// The number of the next change.
    pub end: u64,
    /// So much is kept that a flush is due.
    pub is_much: bool,
}

impl Port {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        orders: &Sender<DiallerOrder>,
        store: &Arc<ConnectionCount>,
    ) -> Result<Port, NbdError> {
        let bell = lock(&shared.bells).pop();
        let bell = bell.map_or_else(|| new_bell().map(Arc::new), Ok)?;
        let traffic = Arc::new(Traffic::default());
        lock(&shared.traffic).ports.push(traffic.clone());
        Ok(Port {
            mailbox: Arc::new(Mailbox {
                link: Mutex::new(None),
                bell,
                store: Arc::clone(store),
            }),
            traffic,
            shared: Arc::clone(shared),
            orders: orders.clone(),
            holding: Holding::Nothing,
        })
    }

    /// Asks for a connection. The bell rings when there is one, or when the disk is given up; the attempts do not end before.
    pub fn request(&mut self) {
        if matches!(self.holding, Holding::Nothing) {
            self.wait(Want::First);
        }
    }

    /// The connection is given up, and another one is wanted. `was_used`: the server answered a request on it.
    pub fn replace(&mut self, was_used: bool) {
        if matches!(self.holding, Holding::Connection(_) | Holding::Lost(_)) {
            self.wait(if was_used { Want::Next } else { Want::Better });
        }
    }

    fn wait(&mut self, want: Want) {
        let again = want != Want::First;
        if !self.give_up(Holding::Waits { again }) {
            self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        }
        let mailbox = Arc::downgrade(&self.mailbox);
        let _ = self.orders.send(DiallerOrder::Dial(mailbox, want));
    }

    /// Gives up what it holds, for something else. Returns true if that was a lost connection, in whose place one is missing already.
    fn give_up(&mut self, next: Holding) -> bool {
        let before = std::mem::replace(&mut self.holding, next);
        let was_lost = matches!(before, Holding::Lost(_));
        drop(before);
        if was_lost {
            self.shared.ending.fetch_sub(1, Ordering::Relaxed);
        }
        was_lost
    }

    /// Counts and logs that the connection was lost. The other connections of the disk end too, if changes may have to be written
    /// again. Nothing of it is repeated or failed before `fence_at`.
    pub fn lost(&mut self, why: &str, fence_at: Option<Instant>) {
        self.holding = match std::mem::replace(&mut self.holding, Holding::Nothing) {
            Holding::Connection(attachment) => {
                self.shared.waiting.fetch_add(1, Ordering::Relaxed);
                self.shared.ending.fetch_add(1, Ordering::Relaxed);
                Holding::Lost(attachment)
            }
            other => other,
        };
        self.shared.lost.fetch_add(1, Ordering::Relaxed);
        if self.may_tell(0) {
            tracing::warn!(
                "{}: the connection to the NBD server is lost ({why}); its requests wait for a new one",
                self.shared.name
            );
        }
        if let Some(until) = fence_at {
            lock(&self.shared.fences).add(until, Instant::now());
        }
        if self.shared.mark_lossy() {
            let _ = self.orders.send(DiallerOrder::Look);
        }
    }

    /// Returns when the last fence of a lost connection of this disk ends, if that is later than `time`.
    pub fn fenced(&self, time: Instant) -> Instant {
        lock(&self.shared.fences)
            .last()
            .map_or(time, |until| until.max(time))
    }

    /// Returns the longest sleep until the fence of a lost connection is over, or may be; `None`: it is over. It is shortened when
    /// the server's process, by its pidfd, has ended.
    pub fn fence_left(
        &self,
        fence_at: &mut Instant,
        server: &mut Option<OwnedFd>,
    ) -> Option<Duration> {
        lock(&self.shared.fences).left(fence_at, server, Instant::now())
    }

    /// Begins the fence of a lost connection now, on which something was sent until now.
    pub fn begin_fence(&self, fence_at: &mut Instant) {
        let until = Instant::now() + self.shared.spec.fence;
        lock(&self.shared.fences).put_off(fence_at, until);
    }

    /// Takes leave of the server on a connection of this port, whose end is not a loss then. Only for one on which nothing is under way.
    pub fn part(&self, link: &Link) {
        lock(&self.shared.attached).forget(&link.socket);
        link.part();
    }

    /// Has the socket of a lost connection disconnected, which drops what it has not sent. A unix socket needs no more than to be shut
    /// down: the server has what was sent. Nothing may be under way on the socket.
    pub fn disconnect(&self, socket: Arc<OwnedFd>) -> Disconnect {
        let disconnect = Disconnect::default();
        if self.shared.is_unix() {
            disconnect.set_done();
        } else {
            let order = DiallerOrder::Disconnect(socket, disconnect.clone());
            let _ = self.orders.send(order);
        }
        disconnect
    }

    fn may_tell(&self, what: usize) -> bool {
        let Some(told) = self.shared.told.get(what) else {
            return false;
        };
        let mut told = lock(told);
        let is_due = told.is_none_or(|at| at.elapsed() >= TELL_EVERY);
        if is_due {
            *told = Some(Instant::now());
        }
        is_due
    }

    /// Warns of changes that outlive the guest: if it goes on elsewhere and comes back, they replace what it wrote there.
    fn tell_owed(&self) {
        let owed_bytes = self.shared.owed_bytes();
        if owed_bytes > 0 && !self.is_abandoned() && self.may_tell(2) {
            tracing::warn!(
                "{}: no guest is left, and the NBD server is away, or was until now; {owed_bytes} bytes of its writes that the \
                 server had not flushed are kept and sent to it again when the next guest connects; if the guest goes on elsewhere, \
                 remove the disk here, or stop this daemon, before the server is back",
                self.shared.name
            );
        }
    }

    /// Returns memory for a copy of this length.
    pub fn copy_room(&self, len: usize) -> Vec<u8> {
        let spare = lock(&self.shared.unflushed).spare(len);
        spare.map_or_else(
            || Vec::with_capacity(len),
            |spare| {
                let mut room = spare.into_vec();
                room.clear();
                room
            },
        )
    }

    /// Returns true if memory is held for copies to come.
    pub fn has_copy_room(&self) -> bool {
        lock(&self.shared.unflushed).has_spares()
    }

    /// Frees that memory.
    pub fn forget_copy_room(&self) {
        let unneeded = lock(&self.shared.unflushed).forget_spares();
        // Freed without the lock.
        drop(unneeded);
    }

    /// Keeps a change that was answered until it is flushed. `change` is called if that is of use.
    pub fn keep(&self, change: impl FnOnce() -> Option<Change>) -> Option<Kept> {
        if !self.shared.keeps_changes() {
            return None;
        }
        // The copy is made without the lock.
        let change = change()?;
        let bytes_max = self.shared.spec.replay_bytes;
        let mut unflushed = lock(&self.shared.unflushed);
        let unneeded = unflushed.add(change, bytes_max);
        let kept = Kept {
            end: unflushed.end(),
            is_much: unflushed.bytes() * 2 >= bytes_max,
        };
        drop(unflushed);
        // Freed without the lock.
        drop(unneeded);
        Some(kept)
    }

    /// Reserves room among the kept changes for one with so much data that is to be sent. Returns how much that is; `None`: all
    /// that is kept or reserved would be too much. A store that has reserved nothing and of which nothing is kept is never refused,
    /// because nothing of its own would end its wait: `alone` is the number after its last kept change, if it has reserved nothing.
    pub fn reserve(&self, data_bytes: u64, alone: Option<u64>) -> Option<u64> {
        if !self.shared.keeps_changes() {
            return Some(0);
        }
        let bytes = data_bytes + CHANGE_BYTES;
        let unflushed = lock(&self.shared.unflushed);
        let reserved = &self.shared.reserved_bytes;
        let all = unflushed.bytes() + reserved.load(Ordering::Relaxed) + bytes;
        let may_exceed = alone.is_some_and(|end| end <= unflushed.start());
        if all > self.shared.spec.replay_bytes && !may_exceed {
            return None;
        }
        reserved.fetch_add(bytes, Ordering::Relaxed);
        Some(bytes)
    }

    /// Gives back what was reserved for a change that is kept now, or never will be.
    pub fn release(&self, bytes: u64) {
        self.shared
            .reserved_bytes
            .fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Returns true if changes were answered and not flushed.
    pub fn has_unflushed(&self) -> bool {
        self.shared.has_unflushed()
    }

    /// Returns the number of the next change that is kept: a flush that is sent now covers those before it.
    pub fn answered(&self) -> u64 {
        lock(&self.shared.unflushed).end()
    }

    /// Takes the turn to flush. `None`: it is taken, and the bell rings when it is free; or a connection of the disk was lost, so this one
    /// ends too.
    pub fn take_turn(&self) -> Option<FlushTurn> {
        let turn = FlushTurn::take(&self.shared.flushes, &self.mailbox.bell)?;
        // The flush whose answer was lost may have been the one that was told of lost data. The copies must stay. A store that loses its
        // connection marks that before it gives the turn up, so this is looked at with the turn.
        let is_lossy = lock(&self.shared.attached).is_lossy();
        (!is_lossy).then_some(turn)
    }

    /// Returns the number of the next flush of the disk that is sent, which whoever asks now may share.
    pub fn next_flush(&self) -> u64 {
        lock(&self.shared.flushes).next_number()
    }

    /// Returns the number of the last flush of the disk that was answered.
    pub fn last_flush(&self) -> u64 {
        lock(&self.shared.flushes).answered()
    }

    /// Drops the changes before number `end`. The memory of large ones is held for copies to come.
    pub fn flushed(&self, end: u64) {
        let unneeded = lock(&self.shared.unflushed).flushed(end);
        // Freed without the lock.
        drop(unneeded);
    }

    /// Counts bytes that went to the server.
    #[inline]
    pub fn count_sent(&self, bytes: u64) {
        bump(&self.traffic.sent, bytes);
    }

    /// Counts bytes that came from it.
    #[inline]
    pub fn count_received(&self, bytes: u64) {
        bump(&self.traffic.received, bytes);
    }

    /// Says how many requests wait for a connection.
    #[inline]
    pub fn set_held(&self, requests: usize) {
        self.traffic.held.store(requests as u64, Ordering::Relaxed);
    }

    /// Takes the connection that was made.
    pub fn take(&mut self) -> Option<Link> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.mailbox.bell, &mut count);
        let (link, mut attachment) = lock(&self.mailbox.link).take()?;
        let Holding::Waits { again } = self.holding else {
            return None;
        };
        if self.is_abandoned() {
            return None;
        }
        attachment.begin_use();
        self.holding = Holding::Connection(attachment);
        self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
        if again {
            self.shared.reconnects.fetch_add(1, Ordering::Relaxed);
            if self.may_tell(1) {
                tracing::info!("{}: connected to the NBD server again", self.shared.name);
            }
        }
        Some(link)
    }

    /// The disk is given up: no connection comes any more, and nothing is to be sent.
    #[inline]
    pub fn is_abandoned(&self) -> bool {
        self.shared.is_abandoned()
    }

    /// Readable when `take` may find a connection, or the disk is given up.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.mailbox.bell.as_fd()
    }

    pub(crate) fn bell_fd(&self) -> &OwnedFd {
        &self.mailbox.bell
    }

    /// Rings the bell, to end a watch of it.
    pub fn wake(&self) {
        self.mailbox.ring();
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        if let Holding::Waits { .. } | Holding::Lost(_) = self.holding {
            self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        self.give_up(Holding::Nothing);
        if let Some((link, _)) = lock(&self.mailbox.link).take() {
            self.part(&link);
        }
        // Others may wait until the last connection is given up.
        let _ = self.orders.send(DiallerOrder::Look);
        // If the dialler still rings it, its next user finds nothing.
        lock(&self.shared.bells).push(self.mailbox.bell.clone());
        let mut ledger = lock(&self.shared.traffic);
        let [sent, received, _] = self.traffic.read();
        ledger.past[0] += sent;
        ledger.past[1] += received;
        ledger
            .ports
            .retain(|port| !Arc::ptr_eq(port, &self.traffic));
        let is_last = ledger.ports.is_empty();
        drop(ledger);
        if is_last {
            self.tell_owed();
        }
    }
}

/// Adds to a counter that no other thread writes.
#[inline]
fn bump(counter: &AtomicU64, count: u64) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(count);
    counter.store(sum, Ordering::Relaxed);
}
