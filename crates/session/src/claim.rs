//! How a session gets the disk before its first vring starts, and what it does when its last one has stopped.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use cleave_worker::{Incident, Pending, Stopped, is_unsent};
use rustix::io::Errno;

use crate::MessageRefusal;
use crate::owner::{Claim, Unserved};
use crate::possession::Possession;
use crate::signals::Summons;
use crate::state::SessionState;

/// How often to ask for a disk that another host has.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// Longest wait for the size of a disk that another host has, and how often the session looks if it has to end meanwhile. Longer in
/// tests, whose machine may be late.
const LOOK_WITHIN: Duration = Duration::from_secs(if cfg!(test) { 8 } else { 2 });
const LOOK: Duration = Duration::from_millis(20);
/// Pause before workers are asked to flush once more.
const FLUSH_AGAIN: Duration = Duration::from_millis(100);

/// Why the store is flushed for a guest that sends no flush itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FlushCause {
    /// The guest has switched its cache off. Its frontend waits for the answer, but not for a server that is away.
    CacheOff,
    /// The guest moves. Its frontend waits for the answer, and the guest does not start elsewhere before that.
    Move,
    /// The guest has moved: its frontend has left, so it may run elsewhere already.
    HasMoved,
}

impl SessionState {
    /// Makes this session the owner of the disk. Called before a vring starts; does nothing while another one of it runs. Waits
    /// while another session serves vrings or another host has the disk, and so does the frontend's answer.
    pub(crate) fn own(&mut self) -> Result<(), MessageRefusal> {
        // The guest stays.
        self.is_leaving = false;
        if self.vrings.any_running() {
            return Ok(());
        }
        let claim = self.await_claim()?;
        // Its workers have ended, so it is known now.
        if self.device.is_lost() {
            return Err(MessageRefusal::lost(
                "a worker failed and left requests in flight, which could overtake newer ones; start the daemon again",
            ));
        }
        self.await_possession()?;
        self.tell_claim(claim);
        if !std::mem::replace(&mut self.has_owned, true) {
            self.device.begin_session();
        }
        self.retired_before = self.device.totals().retired;
        self.adopt_cache_mode();
        Ok(())
    }

    /// Puts the cache mode of this session in force: the one that it was told; or off, if the guest goes on which was seen to switch
    /// its cache off by an earlier process; or else the mode that the frontend has read.
    fn adopt_cache_mode(&mut self) {
        let was_off = self.device.take_cache_note();
        let told = self.cache_mode.take();
        if let Some(writeback) = told {
            self.device.set_writeback(writeback);
        } else if was_off && self.goes_on() {
            let name = self.device.disk.name();
            tracing::info!(
                "{name}: its guest goes on, which has switched its write cache off: a write is durable when it completes"
            );
            self.device.set_writeback(false);
        }
        self.is_cache_note_due = self.is_writeback();
    }

    /// Makes durable what the guest was answered before its cache was switched off: it sends no flush any more. If that fails, or the
    /// disk's server is away, later writes end with a flush, which vouches for all before it, or fails and so tells the guest.
    pub(crate) fn flush_cache(&self) -> Result<(), MessageRefusal> {
        if !self.device.owes_flush() {
            return Ok(());
        }
        match self.flush(FlushCause::CacheOff)? {
            Ok(()) => self.device.owe_no_flush(),
            // Such as one that goes on in another process after one of its writes has failed.
            Err(_) if self.device.disk.sync_failed() && !self.device.disk.is_loss_untold() => {
                self.device.owe_no_flush();
            }
            Err(errno) => {
                let name = self.device.disk.name();
                let error = io::Error::from_raw_os_error(errno);
                let line = |more: &str| {
                    tracing::warn!(
                        "{name}: its guest has switched its write cache off, but what was written before cannot be flushed now \
                         ({error}): its writes are flushed one by one, or fail{more}"
                    );
                };
                self.device.logs.owners.log(line);
            }
        }
        Ok(())
    }

    /// Returns true for a driver that may have met an earlier process. QEMU and Cloud Hypervisor read the configuration before the
    /// driver starts, and not again when they connect to another process.
    fn goes_on(&mut self) -> bool {
        let inflight = self.inflight.as_ref();
        let is_in_flight = |index| {
            let journal = inflight.and_then(|region| region.journal(index));
            journal.is_some_and(|journal| journal.has_requests())
        };
        let mut vrings = self.vrings.iter_mut();
        !self.has_read_config
            || vrings.any(|(index, entry)| entry.settings.base != 0 || is_in_flight(index))
    }

    fn await_claim(&self) -> Result<Claim, MessageRefusal> {
        if let Some(claim) = self.claimant.claim()? {
            return Ok(claim);
        }
        let name = self.device.disk.name();
        self.device.logs.owners.log(|more| {
            tracing::info!(
                "{name}: the parked frontend wants to start: it waits until the other has stopped its vrings{more}"
            );
        });
        loop {
            self.pause(None)?;
            if let Some(claim) = self.claimant.claim()? {
                return Ok(claim);
            }
        }
    }

    /// Waits until no other host has the disk.
    fn await_possession(&self) -> Result<(), MessageRefusal> {
        let Some(possession) = self.claimant.possession() else {
            return Ok(());
        };
        while !possession.take().map_err(MessageRefusal::lost)? {
            self.pause(Some(Instant::now() + ASK_AGAIN))?;
        }
        Ok(())
    }

    /// Waits until the size is known of a disk that another host has. Storage that does not answer is not waited for: the size
    /// that was known may be right, and if not, the disk is of no use now.
    pub(crate) fn await_size(&self) -> Result<(), MessageRefusal> {
        let look = self.claimant.possession().and_then(Possession::look);
        let until = Instant::now() + LOOK_WITHIN;
        let goes_on =
            |look: &Receiver<()>| look.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout);
        while look.as_ref().is_some_and(goes_on) && Instant::now() < until {
            self.pause(Some(Instant::now()))?;
        }
        Ok(())
    }

    /// Sleeps until the session is woken or `until`. Fails if the session must end.
    fn pause(&self, until: Option<Instant>) -> Result<(), MessageRefusal> {
        match self.claimant.pause(until) {
            Ok(None) => Ok(()),
            // In the middle of a message no other process can go on.
            Ok(Some(Summons::HangUp | Summons::HandOver)) => Err(MessageRefusal::Gone),
            Ok(Some(Summons::Alarm)) => Err(self.loss()),
            Err(error) => Err(MessageRefusal::lost(format!("cannot wait: {error}"))),
        }
    }

    fn tell_claim(&self, claim: Claim) {
        let name = self.device.disk.name();
        let what = match claim {
            Claim::First => return,
            Claim::TakenOver => {
                self.device.tell(Incident::TakenOver);
                "the parked frontend has taken over: the guest goes on there"
            }
            Claim::Defended => {
                "the frontend has started its vrings again, so the parked one, which has not taken over, is disconnected"
            }
        };
        let line = |more: &str| tracing::info!("{name}: {what}{more}");
        self.device.logs.owners.log(line);
    }

    /// Notes that vrings have stopped. After the last one another session may have the disk; so may another host, if the frontend
    /// logged what was written.
    pub(crate) fn after_stop(&mut self) -> Result<(), MessageRefusal> {
        self.log.check_kept()?;
        self.is_leaving |= self.is_logged();
        if self.vrings.any_running() {
            return Ok(());
        }
        self.has_retired |= self.device.totals().retired != self.retired_before;
        let was_leaving = self.is_leaving;
        if self.leaves() {
            self.hand_disk_over(FlushCause::Move)?;
        } else if was_leaving {
            self.settle_unlocked()?;
        }
        self.claimant.stopped();
        Ok(())
    }

    /// Stops all vrings when the connection has ended. If none ran, the guest may have moved nevertheless, from its firmware or
    /// with a driver that was reset: then this is all that tells of it.
    pub(crate) fn finish(&mut self) {
        if self.vrings.any_running() {
            // A worker that is gone has nothing left to drain.
            let _ = self.drain();
        } else if let Err(MessageRefusal::Lost(why)) = self.leave() {
            let name = self.device.disk.name();
            let line = |more: &str| tracing::warn!("{name}: its guest has moved: {why}{more}");
            self.device.logs.owners.log(line);
        }
    }

    /// Hands the disk over while no vring runs, if the guest has left and no other session has the disk.
    fn leave(&mut self) -> Result<(), MessageRefusal> {
        if !self.leaves() || self.device.is_lost() || !self.claimant.claim_last() {
            return Ok(());
        }
        self.log.check_kept()?;
        let mut possession = self.claimant.possession().into_iter();
        if !possession.any(Possession::is_here) {
            return Ok(());
        }
        // There may be no worker yet, and an earlier session may have ended without a flush.
        self.workers.start(0, &self.device, &self.memory)?;
        self.hand_disk_over(FlushCause::HasMoved)
    }

    /// Returns true once if the guest leaves and nothing keeps the disk here.
    fn leaves(&mut self) -> bool {
        // Requests that are left make the disk no other host's: they are repeated here.
        std::mem::take(&mut self.is_leaving) && !self.vrings.have_left()
    }

    fn hand_disk_over(&self, cause: FlushCause) -> Result<(), MessageRefusal> {
        self.settle(cause)?;
        if let Some(possession) = self.claimant.possession() {
            possession.hand_over();
        }
        Ok(())
    }

    /// Makes what a guest that moves was answered durable although it leaves requests behind, and the disk is not handed over. Only
    /// for a disk without locks: they would keep the guest from starting elsewhere. No vring runs any more after this.
    pub(crate) fn settle_unlocked(&mut self) -> Result<(), MessageRefusal> {
        if !self.device.disk.reconnects() {
            return Ok(());
        }
        self.drain()?;
        self.settle(FlushCause::Move)
    }

    /// Makes all that this host has written durable, and waits until nothing else can come of it.
    fn settle(&self, cause: FlushCause) -> Result<(), MessageRefusal> {
        let settled = self.await_settled().and_then(|()| self.flush(cause));
        let settled = settled.and_then(|flushed| flushed.map_err(unflushed));
        if let (Err(_), Some(possession)) = (&settled, self.claimant.possession()) {
            possession.hand_over_failed();
        }
        settled
    }

    /// Notes that a dirty log has come into force: the guest is about to move.
    pub(crate) fn begin_move(&mut self) -> Result<(), MessageRefusal> {
        if !self.vrings.any_running() {
            self.is_leaving = true;
            self.settle_at_rest()?;
        }
        let disk = &self.device.disk;
        if self.device.has_cache() && !self.is_writeback() {
            let name = disk.name();
            let line = |more: &str| {
                tracing::warn!(
                    "{name}: its guest begins to move, and has switched its write cache off, which QEMU does not tell the other host: \
                     serve the disk there with --cache writethrough{more}"
                );
            };
            self.device.logs.owners.log(line);
        }
        if disk.is_direct() == Some(false) && !disk.limits().read_only {
            let name = disk.name();
            let line = |more: &str| {
                tracing::warn!(
                    "{name}: its guest begins to move, and this host writes through its page cache: if this daemon is killed \
                     before the guest has left, the other host may read old data; bypass the page cache (direct on), or use a \
                     network file system whose caches are coherent{more}"
                );
            };
            self.device.logs.owners.log(line);
        }
        Ok(())
    }

    /// Makes what a guest was answered before its vrings stopped durable when it begins to move: no later message makes the frontend
    /// wait. Only for a disk without locks, as in `settle_unlocked`: a server that was lost while the guest runs elsewhere would be sent
    /// old changes again.
    fn settle_at_rest(&mut self) -> Result<(), MessageRefusal> {
        let is_here = |possession: &dyn Possession| possession.is_here();
        if !self.claimant.possession().is_some_and(is_here) || !self.device.disk.reconnects() {
            return Ok(());
        }
        if self.workers.have_started() {
            return self.settle(FlushCause::Move);
        }
        // Workers that have ended had their store flushed, unless its server was away. Then the next one sends it the changes again.
        loop {
            match self.claimant.claim_unserved() {
                Unserved::Taken => break,
                Unserved::Ending => self.pause(Some(Instant::now() + ASK_AGAIN))?,
                Unserved::Owned => return Ok(()),
            }
        }
        if self.device.disk.has_unflushed() && !self.device.is_lost() {
            self.workers.start(0, &self.device, &self.memory)?;
            self.settle(FlushCause::Move)?;
            self.workers.end();
        }
        self.claimant.release();
        Ok(())
    }

    /// Waits until the disk's server has ended what a killed daemon sent it, which would overtake what the other host writes.
    fn await_settled(&self) -> Result<(), MessageRefusal> {
        while let Some(left) = self.device.unsettled_for() {
            self.pause(Some(Instant::now() + left))?;
        }
        Ok(())
    }

    /// Has the store flushed by the workers, for a guest that sends no flush itself: it moves, also if its cache is write-back, or has
    /// switched its cache off. Returns the errno of a flush that failed. A server that is away is waited for if the guest moves and the
    /// frontend waits: it may have lost what it answered, no lock keeps the guest from starting elsewhere, and a flush there would
    /// succeed.
    fn flush(&self, cause: FlushCause) -> Result<Result<(), i32>, MessageRefusal> {
        let waits = cause == FlushCause::Move && self.device.disk.reconnects();
        let mut is_told = false;
        loop {
            let flushes = self.device.sync();
            if flushes.is_empty() || self.workers.have_failed() {
                return Err(MessageRefusal::worker_gone());
            }
            let mut are_done = true;
            for flush in flushes {
                match self.await_flush(flush, cause)? {
                    Some(Ok(())) => {}
                    Some(Err(errno)) if waits && is_unsent(errno) => {
                        are_done = false;
                        if !std::mem::replace(&mut is_told, true) {
                            self.tell_of_wait();
                        }
                    }
                    Some(Err(errno)) => return Ok(Err(errno)),
                    // It had no room for the command.
                    None => are_done = false,
                }
            }
            if are_done {
                return Ok(Ok(()));
            }
            self.pause(Some(Instant::now() + FLUSH_AGAIN))?;
        }
    }

    /// Waits for a worker's flush; `None`: it does none. If the server is away, that takes as long as requests wait for it, so the
    /// session looks meanwhile if it has to end.
    fn await_flush(
        &self,
        mut flush: Pending<Result<(), i32>>,
        cause: FlushCause,
    ) -> Result<Option<Result<(), i32>>, MessageRefusal> {
        loop {
            flush = match flush.wait_for(LOOK) {
                Ok(flushed) => return Ok(flushed),
                Err(waiting) => waiting,
            };
            match cause {
                FlushCause::CacheOff if self.device.disk.is_cut_off() => {
                    return Ok(Some(Err(Errno::NOTCONN.raw_os_error())));
                }
                FlushCause::Move if self.device.disk.is_cut_off() => {
                    self.pause(Some(Instant::now()))?
                }
                FlushCause::CacheOff | FlushCause::Move | FlushCause::HasMoved => {}
            }
        }
    }

    /// Waits for a vring that stops because the guest moves. A VMM may go on without the position, by a guess that loses requests, so
    /// those that the disk failed end first. While one of them waits, the session looks if it has to end.
    pub(crate) fn await_stop(&self, stopping: Pending<Stopped>) -> Result<Stopped, MessageRefusal> {
        let stopped = self.await_stalled(stopping);
        self.claimant.set_awaits_stalled(false);
        if let (Err(_), Some(possession)) = (&stopped, self.claimant.possession()) {
            possession.hand_over_failed();
        }
        stopped
    }

    fn await_stalled(&self, mut stopping: Pending<Stopped>) -> Result<Stopped, MessageRefusal> {
        let mut is_told = false;
        loop {
            stopping = match stopping.wait_for(LOOK) {
                Ok(stopped) => return stopped.ok_or_else(MessageRefusal::worker_gone),
                Err(stopping) => stopping,
            };
            if self.device.may_hold_back() {
                is_told = is_told || self.tell_of_stalled();
                self.claimant.set_awaits_stalled(is_told);
                // The worker's answer ends this.
                self.pause(None)?;
            }
        }
    }

    /// Logs that the move waits for stalled requests. Returns false if there are none.
    fn tell_of_stalled(&self) -> bool {
        let stalled = self.device.records.stalled();
        let Some((_, first)) = stalled.first() else {
            return false;
        };
        let counts = stalled.iter().map(|(_, one)| one.held + one.retrying);
        let requests: u32 = counts.sum();
        let name = self.device.disk.name();
        let error = io::Error::from_raw_os_error(first.errno);
        let until = match is_unsent(first.errno) && self.device.disk.reconnects() {
            true => "the move waits until the server is back",
            false => {
                "the move waits until they have ended. When the disk works again, run `cleave disk resume --held`"
            }
        };
        let line = |more: &str| {
            tracing::warn!(
                "{name}: its guest is to move, and {requests} requests that the disk failed are held or wait for a retry ({error}): \
                 {until}; to pass the errors on to the guest, `cleave disk fail`{more}"
            );
        };
        self.device.logs.owners.log(line);
        true
    }

    fn tell_of_wait(&self) {
        let name = self.device.disk.name();
        let line = |more: &str| {
            tracing::warn!(
                "{name}: its guest is to move, but the disk's server is away and may have lost what it had not flushed: the move \
                 waits until the server is back{more}"
            );
        };
        self.device.logs.owners.log(line);
    }

    /// Gives the disk to another session that waits for it, if no vring of this one runs.
    pub(crate) fn yield_if_wanted(&mut self) {
        if self.claimant.must_yield() {
            self.workers.end();
            self.claimant.give_up();
        }
    }
}

fn unflushed(errno: i32) -> MessageRefusal {
    let error = io::Error::from_raw_os_error(errno);
    MessageRefusal::lost(format!(
        "the disk cannot be flushed, so it is not handed over to another host: {error}"
    ))
}
