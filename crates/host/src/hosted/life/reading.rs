//! The file of a disk that was there when the host started and could not be read: it is read again until it can be, and what the
//! process before has left of the disk waits for that.

use cleave_api::ProblemKind;
use cleave_config::DiskConfig;

use super::Life;
use super::phase::{Goal, KeptFile, LifePhase, RunningServer};
use crate::disk_server::Order;
use crate::hosted::disk_host::{DiskHost, FileFault, OpenResult, Work};
use crate::problem::Refusal;

impl<H: DiskHost> Life<H> {
    /// Returns true if nothing is known of the disk but its name.
    pub(super) fn is_unread(&self) -> bool {
        self.file == KeptFile::Unknown && self.config.disk.is_empty()
    }

    /// Begins to read the file, unless that is under way.
    pub(super) fn begin_reading(&mut self) {
        if self.reading.is_none() {
            self.reading = Some(self.host.clone().read(&self.id));
        }
    }

    pub(super) fn read(&mut self, file: Result<DiskConfig, FileFault>) {
        self.reading = None;
        match file {
            Ok(config) => {
                self.file = KeptFile::Holds(Box::new(config.clone()));
                self.came_back = true;
                self.describe(config.kept());
                self.open_again();
            }
            Err(fault) => self.not_read(fault),
        }
    }

    /// Notes why the file could not be read.
    pub(super) fn not_read(&mut self, fault: FileFault) {
        match fault {
            FileFault::Passing(why) => self.fail(why),
            FileFault::Lasting(why) => {
                tracing::error!("{}: not served: {why}", self.id);
                self.answer_waiting(|| Refusal(ProblemKind::CannotOpen, why.clone()));
                self.enter(LifePhase::Broken(why));
            }
        }
    }

    /// Ends a disk that is not open, of which the process before may have left a frontend.
    pub(super) fn end_unopened(
        &mut self,
        opened: Option<Work<OpenResult<H>>>,
        order: Order,
        goal: Goal,
    ) {
        match order {
            Order::HandOver(_, manager) => {
                // In this order: a frontend that was left sees its end with the opening.
                let left = self.host.clone().leave(&self.id, manager);
                drop(opened);
                self.enter(LifePhase::Ending(RunningServer::until(left), goal));
            }
            _ => self.follow(goal),
        }
    }
}
