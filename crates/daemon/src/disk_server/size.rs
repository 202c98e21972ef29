//! Checks of a disk's size: ordered by the operator, or because the watch noticed a change.

use std::io;
use std::thread;

use cleave_disk::{Leg, Resized};
use cleave_sandbox::Role;
use serde_json::json;
use tokio::sync::oneshot;

use super::DiskServer;

/// Orders for a check that may wait for it; more are refused.
const ASKERS_MAX: usize = 64;

/// The one that ordered a check of the size.
#[derive(Debug)]
pub(crate) enum SizeAsker {
    /// SIGHUP: the result is for the log, also if nothing has changed.
    Signal,
    /// A request: it gets the reason why the size could not be checked, if there is one.
    Request(oneshot::Sender<Result<(), String>>),
}

/// The check under way, and the one after it.
#[derive(Debug, Default)]
pub(super) struct SizeChecks {
    /// The running check. It runs on a thread of its own, because it blocks if the server of a network file is lost.
    running: Option<oneshot::Receiver<io::Result<Resized>>>,
    /// Those that wait for the running check.
    askers: Vec<SizeAsker>,
    /// Another check must follow, because something happened after the running one began.
    is_due: bool,
    /// Those that wait for the check that must follow.
    next_askers: Vec<SizeAsker>,
    /// The leg that ends before what its guest was told, and where.
    short: Option<(u16, u64)>,
}

impl SizeChecks {
    /// Waits for the running check of the size; forever if there is none.
    pub(super) async fn checked(&mut self) -> io::Result<Resized> {
        match &mut self.running {
            Some(running) => running
                .await
                .unwrap_or_else(|failed| Err(io::Error::other(failed))),
            None => std::future::pending().await,
        }
    }

    /// Notes an order. It is for the next check, because the running one may have looked already.
    fn ask(&mut self, asker: SizeAsker) {
        self.next_askers
            .retain(|asker| !matches!(asker, SizeAsker::Request(waiting) if waiting.is_closed()));
        // A request that is dropped here learns that it was not taken.
        if self.next_askers.len() < ASKERS_MAX {
            self.next_askers.push(asker);
        }
    }
}

impl DiskServer {
    /// Checks the size of the disk by order, and tells the result to `asker`.
    pub(super) fn check_size_for(&mut self, asker: Option<SizeAsker>) {
        if let Some(asker) = asker {
            self.size.ask(asker);
        }
        self.check_size();
    }

    /// Checks the size of the disk, with the watch armed anew first, so that nothing is missed.
    pub(super) fn check_size(&mut self) {
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
        let is_signal = |asker: &SizeAsker| matches!(asker, SizeAsker::Signal);
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
        let short = match resized {
            Resized::Short(leg, bytes) => Some((leg, bytes)),
            Resized::Grown(_) | Resized::No => None,
        };
        let was = std::mem::replace(&mut self.size.short, short);
        let name = self.disk.name();
        let served = self.disk.capacity_bytes();
        match resized {
            Resized::Grown(bytes) => {
                tracing::info!("{name}: has grown to {bytes} bytes");
                if let Some(guest) = &self.guest {
                    guest.remote.config_changed();
                }
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
            "resized",
            json!({"size_bytes": served, "short_bytes": short_bytes}),
        );
        true
    }
}
