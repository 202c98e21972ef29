//! The turn to flush. A server may report a failed write-back only once, as a kernel does for each open file: of two flushes at the
//! same time, the one that is answered first could vouch for lost data. So at most one flush of a disk is under way, and all who ask
//! before it is sent share it with its result. The connection does not matter: there are several only if a flush on one covers all.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};

use crate::bell::ring;
use crate::lock::lock;

/// The flushes of a disk.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    /// Somebody has the turn.
    is_taken: bool,
    /// Its flush was sent, or is being sent.
    is_out: bool,
    /// Number of the last flush that was sent.
    sent: u64,
    /// Number of the last one that was answered.
    answered: u64,
    /// Bells that ring when the turn is free.
    waiting: Vec<Weak<OwnedFd>>,
}

impl Flushes {
    /// Returns the number of the next flush that is sent, which whoever asks now may share.
    pub(crate) fn next_number(&self) -> u64 {
        self.sent + 1
    }

    /// Returns the number of the last flush that was answered. It covers the requests of those before it.
    pub(crate) fn answered(&self) -> u64 {
        self.answered
    }

    /// Returns true if a flush is under way: the server may tell that one alone of lost data.
    pub(crate) fn is_out(&self) -> bool {
        self.is_out
    }

    /// Takes the turn. Returns false if it is taken; the bell rings when it is free.
    fn take(&mut self, bell: &Arc<OwnedFd>) -> bool {
        if !self.is_taken {
            self.is_taken = true;
            return true;
        }
        let bell = Arc::downgrade(bell);
        if !self.waiting.iter().any(|other| other.ptr_eq(&bell)) {
            self.waiting.push(bell);
        }
        false
    }
}

/// The turn to flush, which is free again when this is dropped.
#[derive(Debug)]
pub struct FlushTurn(Arc<Mutex<Flushes>>);

impl FlushTurn {
    /// Takes the turn. `None`: it is taken, and the bell rings when it is free.
    pub(crate) fn take(flushes: &Arc<Mutex<Flushes>>, bell: &Arc<OwnedFd>) -> Option<FlushTurn> {
        let is_ours = lock(flushes).take(bell);
        is_ours.then(|| FlushTurn(Arc::clone(flushes)))
    }

    /// Records that the flush is about to be sent: whoever asks from now on needs the next one.
    pub fn begin(&self) {
        let mut flushes = lock(&self.0);
        flushes.sent += 1;
        flushes.is_out = true;
    }

    /// Records that the flush was answered. If it failed, the disk has to show that by now, because those that share it look there.
    pub fn end(self) {
        let mut flushes = lock(&self.0);
        flushes.answered = flushes.sent;
    }
}

impl Drop for FlushTurn {
    fn drop(&mut self) {
        let mut flushes = lock(&self.0);
        (flushes.is_taken, flushes.is_out) = (false, false);
        let waiting = std::mem::take(&mut flushes.waiting);
        drop(flushes);
        for bell in waiting.iter().filter_map(Weak::upgrade) {
            ring(&bell);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bell::{is_ready, new_bell};

    #[test]
    fn a_turn_is_one_at_a_time_and_tells_those_that_wait() {
        let flushes = Arc::new(Mutex::new(Flushes::default()));
        let bells = [(); 2].map(|()| Arc::new(new_bell().unwrap()));
        let turn = FlushTurn::take(&flushes, &bells[0]).unwrap();
        let asked = lock(&flushes).next_number();
        assert!(!lock(&flushes).is_out());
        turn.begin();
        assert!(lock(&flushes).is_out());
        let asked_later = lock(&flushes).next_number();
        for _ in 0..2 {
            assert!(FlushTurn::take(&flushes, &bells[1]).is_none());
        }
        assert_eq!(lock(&flushes).waiting.len(), 1);
        turn.end();
        assert!(!lock(&flushes).is_out());
        let answered = lock(&flushes).answered();
        assert!(asked <= answered && answered < asked_later);
        assert_eq!(bells.each_ref().map(|bell| is_ready(bell)), [false, true]);
        // One that is not answered, as on a lost connection, covers nothing.
        let turn = FlushTurn::take(&flushes, &bells[1]).unwrap();
        turn.begin();
        drop(turn);
        assert!(!lock(&flushes).is_out());
        assert!(lock(&flushes).answered() < asked_later);
        assert!(FlushTurn::take(&flushes, &bells[0]).is_some());
    }
}
