//! Checks of a disk's size: ordered by the operator, or because the watch noticed a change.

use std::io;
use std::thread;

use cleave_api::EventName;
use cleave_disk::{Leg, Resized};
use cleave_sandbox::Role;
use serde_json::json;
use tokio::sync::oneshot;

use super::DiskServer;
use super::size_checks::SizeAsker;

impl DiskServer {
    /// Checks the size of the disk by order, and tells the result to `asker`.
    pub(super) fn check_size_for(&mut self, asker: Option<SizeAsker>) {
        if let Some(asker) = asker {
            self.size.ask(asker);
        }
        self.check_size();
    }

    /// Checks the size of the disk, with the watch armed anew first, so that nothing is missed. What becomes of a disk that
    /// another host has is told when it is acquired again.
    pub(super) fn check_size(&mut self) {
        if !self.possession.is_active() {
            // A request learns that it was not taken.
            let askers = std::mem::take(&mut self.size.next_askers);
            if askers.iter().any(is_signal) {
                let name = self.disk.name();
                tracing::info!("{name}: its size is not checked, because it is not active here");
            }
            return;
        }
        if self.size.running.is_some() {
            self.size.is_due = true;
            return;
        }
        self.size.askers = std::mem::take(&mut self.size.next_askers);
        let disk = self.disk.clone();
        let (reply, resized) = oneshot::channel();
        let confinement = self.confinement.clone();
        let checker = thread::Builder::new().name("size".to_owned());
        let arm = self.watch.arm();
        let check = move || {
            confinement.thread(Role::Disk);
            arm();
            reply.send(disk.refresh())
        };
        match checker.spawn(check) {
            Ok(_) => self.size.running = Some(resized),
            Err(error) => self.report_size(Err(error)),
        }
    }

    /// Handles the result of a check: the guest learns that the disk grew. That it shrank, or is as large as before again, is
    /// logged once. Whoever ordered the check is answered when all this can be seen.
    pub(super) fn report_size(&mut self, resized: io::Result<Resized>) {
        self.size.running = None;
        let askers = std::mem::take(&mut self.size.askers);
        let outcome = match resized {
            Ok(resized) => Ok(self.take_size(resized)),
            Err(error) => {
                let name = self.disk.name();
                let why = format!("{name}: cannot look at its size: {error}");
                self.faults.log(|more| tracing::warn!("{why}{more}"));
                Err(why)
            }
        };
        if outcome == Ok(false) && askers.iter().any(is_signal) {
            self.tell_unchanged();
        }
        for asker in askers {
            if let SizeAsker::Request(reply) = asker {
                // The client may have left.
                let _ = reply.send(outcome.clone().map(|_| ()));
            }
        }
        if std::mem::take(&mut self.size.is_due) {
            self.check_size();
        }
    }

    /// Answers a SIGHUP after which the size is what it was.
    fn tell_unchanged(&self) {
        match self.size.short {
            Some((leg, _)) => tracing::warn!(
                "{}: SIGHUP received: {} bytes are still missing at its end, and reads and writes there fail",
                self.leg_name(leg),
                self.disk.short_bytes()
            ),
            None => tracing::info!(
                "{}: SIGHUP received: its size has not changed ({} bytes)",
                self.disk.name(),
                self.disk.capacity_bytes()
            ),
        }
    }

    /// Returns the name of a leg, which is the disk's if it is the only one.
    fn leg_name(&self, leg: u16) -> &str {
        let found = self.disk.legs().get(usize::from(leg));
        found.map_or(self.disk.name(), Leg::name)
    }

    /// Takes a size that was found. Returns true if it differs from the last one.
    fn take_size(&mut self, resized: Resized) -> bool {
        let served = self.disk.capacity_bytes();
        let resized = self.size.news(resized, served);
        let short = match resized {
            Resized::Short(leg, bytes) => Some((leg, bytes)),
            Resized::Grown(_) | Resized::No => None,
        };
        let was = std::mem::replace(&mut self.size.short, short);
        let name = self.disk.name();
        match resized {
            Resized::Grown(bytes) => {
                tracing::info!("{name}: has grown to {bytes} bytes");
                let guests = self.guests.iter();
                guests.for_each(|guest| guest.remote.config_changed());
            }
            Resized::Short(leg, bytes) if short != was => {
                let leg = self.leg_name(leg);
                tracing::warn!(
                    "{leg}: has shrunk to {bytes} bytes; its guest still sees a disk of {served}, and reads and writes \
                     beyond the end fail until it is as large as before"
                );
            }
            Resized::No if was.is_some() => tracing::info!(
                "{name}: is as large as before again: reads and writes of all its {served} bytes are served; what was cut off is lost"
            ),
            Resized::Short(..) | Resized::No => return false,
        }
        let short_bytes = self.disk.short_bytes();
        self.status.tell(
            EventName::Resized,
            json!({"size_bytes": served, "short_bytes": short_bytes}),
        );
        true
    }
}

fn is_signal(asker: &SizeAsker) -> bool {
    matches!(asker, SizeAsker::Signal)
}
