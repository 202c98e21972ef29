//! The file of a disk: it is made as it is to be, and then whatever waits for that is answered.

use std::io;

use cleave_api::ProblemKind;

use super::phase::{KeptFile, LifePhase};
use super::{Life, answer};
use crate::hosted::disk::Placed;
use crate::hosted::disk_host::{DiskHost, Removal};
use crate::problem::Refusal;

impl<H: DiskHost> Life<H> {
    /// The file as it is to be.
    pub(super) fn wanted_file(&self) -> KeptFile {
        match &self.phase {
            LifePhase::Removing => KeptFile::Absent,
            _ if self.config.persistent.get().0 => KeptFile::Holds(Box::new(self.config.kept())),
            _ => KeptFile::Absent,
        }
    }

    /// Makes the file as it is to be; when it is, whatever waits for that is answered.
    pub(super) fn write(&mut self) {
        if self.writing.is_some() {
            return;
        }
        let (host, wanted) = (self.host.clone(), self.wanted_file());
        let group = self.config.limit_group();
        let due = group.filter(|group| self.host.is_group_due(group));
        let is_removing = matches!(self.phase, LifePhase::Removing);
        if wanted == self.file && (due.is_none() || is_removing) {
            return self.is_kept();
        }
        let work = match &wanted {
            _ if is_removing => host.remove(&self.id, group),
            KeptFile::Holds(config) => host.keep(&self.id, Some(config), due),
            KeptFile::Absent | KeptFile::Unknown => host.keep(&self.id, None, due),
        };
        self.writing = Some((wanted, work));
    }

    pub(super) fn kept(&mut self, result: io::Result<()>) {
        let Some((file, _)) = self.writing.take() else {
            return;
        };
        match result {
            Ok(()) => {
                self.file = file;
                // The disk may have been changed meanwhile.
                self.write();
            }
            Err(error) => {
                self.file = KeptFile::Unknown;
                match file == self.wanted_file() {
                    true => self.is_not_kept(&error),
                    false => self.write(),
                }
            }
        }
    }

    /// Answers what waited for the file.
    fn is_kept(&mut self) {
        match &self.phase {
            LifePhase::Removing => {
                self.vanish(Removal::Ended);
                for reply in self.deleting.drain(..) {
                    answer(reply, Ok(self.lost.clone()));
                }
            }
            // It may have failed since its file was begun, and is tried again.
            LifePhase::Opening { .. } | LifePhase::Failed(..) => {
                self.leave_before();
                for reply in self.putting.drain(..) {
                    answer(reply, Ok(Placed::Opening));
                }
                for reply in self.starting.drain(..) {
                    answer(reply, Ok(()));
                }
            }
            LifePhase::Serving(..) => {
                let mut placed = match self.leave_before() {
                    true => Placed::New,
                    false => Placed::There,
                };
                for reply in self.putting.drain(..) {
                    answer(reply, Ok(std::mem::replace(&mut placed, Placed::There)));
                }
                for reply in self.changing.drain(..).chain(self.starting.drain(..)) {
                    answer(reply, Ok(()));
                }
            }
            _ => {}
        }
    }

    fn is_not_kept(&mut self, error: &io::Error) {
        let refuse = |why| Refusal(ProblemKind::StateFolder, why);
        match &self.phase {
            LifePhase::Removing => {
                let why = format!(
                    "the disk has ended, but its file cannot be removed: {error}: see to the folder of --state, then remove the \
                     disk again"
                );
                self.enter(LifePhase::Left(why.clone()));
                for reply in self.deleting.drain(..) {
                    answer(reply, Err(refuse(why.clone())));
                }
            }
            _ if self.before.is_some() => {
                let why = format!(
                    "cannot write the file of the disk: {error}: see to the folder of --state"
                );
                self.undo(refuse(why));
            }
            LifePhase::Ending(..) => {}
            _ => {
                let why = format!(
                    "changed until the disk is opened again, but its file cannot be written: {error}: see to the folder of --state"
                );
                tracing::warn!("{}: {why}", self.id);
                self.answer_waiting(|| refuse(why.clone()));
            }
        }
    }
}
