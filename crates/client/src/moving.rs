//! A guest that moves from one daemon to another, in the order of QEMU's messages. Its memory is the same on both sides, so there is
//! nothing to copy.

use cleave_blk::spec::feature;

use crate::{Client, Error, WriteLog};

impl Client {
    /// Has the daemon mark all that it writes, as at the start of a migration.
    pub fn start_log(&self, log: &WriteLog) -> Result<(), Error> {
        self.frontend.set_log(log)?;
        self.log_features(feature::LOG_ALL)?;
        let mut vrings = 0..self.queues.len();
        vrings.try_for_each(|index| self.frontend.set_vring_addr(self.logged_vring_addr(index)?))
    }

    /// Ends the marking, as when a migration is cancelled or has failed.
    pub fn end_log(&self) -> Result<(), Error> {
        self.log_features(0)?;
        let mut vrings = 0..self.queues.len();
        vrings.try_for_each(|index| self.frontend.set_vring_addr(self.vring_addr(index)?))
    }

    fn log_features(&self, log: u64) -> Result<(), Error> {
        self.frontend.set_features(self.features | log)
    }

    /// Stops all vrings, and returns their positions.
    pub fn stop(&self) -> Result<Vec<u16>, Error> {
        let vrings = || self.queues.iter().map(|queue| u32::from(queue.index()));
        vrings().try_for_each(|index| self.frontend.set_vring_enable(index, false))?;
        // At most 2^16 - 1, as ever in a split vring.
        let position = |index| Ok(self.frontend.vring_base(index)? as u16);
        vrings().map(position).collect()
    }

    /// Takes the stopped vrings of another client, whose memory this one has too, and starts them at their positions.
    pub fn take_over(&mut self, from: &mut Client, positions: &[u16]) -> Result<(), Error> {
        self.queues = std::mem::take(&mut from.queues);
        if from.inflight.is_some() {
            // New: that of the source has nothing in flight.
            let size = self.queues.first().map_or(1, |queue| queue.ring.size());
            let vrings = self.queues.len() as u16;
            self.inflight = self.frontend.inflight(vrings, size)?;
        }
        self.go_on(positions)
    }

    /// Starts the stopped vrings again at their positions, as after a pause.
    pub fn go_on(&mut self, positions: &[u16]) -> Result<(), Error> {
        self.frontend.set_features(self.features)?;
        self.start_at(positions)
    }

    /// Starts the stopped vrings again when the migration has failed after the stop: QEMU still wants the log, and has freed it.
    pub fn roll_back(&mut self, positions: &[u16]) -> Result<(), Error> {
        self.log_features(feature::LOG_ALL)?;
        self.start_at(positions)?;
        let log = WriteLog::new(&self.memory)?;
        self.frontend.set_log(&log)?;
        self.end_log()
    }

    fn start_at(&mut self, positions: &[u16]) -> Result<(), Error> {
        if let Some(region) = &self.inflight {
            self.frontend.set_inflight(region)?;
        }
        self.send_memory()?;
        let mut vrings = self.queues.iter().zip(positions);
        vrings.try_for_each(|(queue, position)| {
            self.announce(&queue.vring, queue.ring.layout(), *position)
        })
    }
}
