//! The log lines with which the server of a disk begins.

use cleave_blk::Stripe;
use cleave_disk::{Backing, Leg};

use super::DiskServer;

impl DiskServer {
    /// Logs what is served, where, and what an operator should know of it.
    pub(super) fn announce(&self, is_locked: bool, loops: &[(String, String)]) {
        let limits = self.disk.limits();
        tracing::info!(
            "serving {} ({} bytes{}{}{}{}) at {}",
            self.disk.name(),
            self.disk.capacity_bytes(),
            // A model is named, because its figures are not those of a drive and its memory is not stable storage.
            match self.disk.backing() {
                Backing::Model { .. } => ", modelled in memory",
                Backing::File { .. }
                | Backing::Ram(_)
                | Backing::Null { .. }
                | Backing::Nbd(_)
                | Backing::Rbd(_) => "",
            },
            match self.disk.is_direct() {
                Some(true) => ", O_DIRECT",
                Some(false) => ", through the page cache",
                None => "",
            },
            if limits.read_only { ", read-only" } else { "" },
            if self.disk.is_polled() {
                ", polled"
            } else {
                ""
            },
            self.endpoint,
        );
        if !self.possession.is_active() {
            tracing::info!(
                "{}: it is inactive: nothing is written to it, and its locks are taken before a guest uses it",
                self.disk.name()
            );
        }
        if !is_locked {
            tracing::warn!(
                "{}.lock cannot be made or locked: if this daemon is killed, the next one will not wait for its I/O; remove \
                 that file, or use a folder whose file system has locks",
                self.endpoint
            );
        }
        for (leg, device) in loops {
            tracing::warn!(
                "{leg}: {device} has this file attached too, and writes through one are not seen by the other: detach it \
                 (losetup -d {device}) before the guest starts"
            );
        }
        if let Some(error) = self.disk.reopen_error() {
            tracing::warn!(
                "{}: cannot open it once for each worker ({error}): one worker serves all vrings, which \
                 is slower; give this user access to the file, and mount /proc",
                self.disk.name()
            );
        }
        if let Some(profile) = &self.service.config.profile {
            tracing::info!(
                "{}: profile {} is in force: large requests are split as it says, until the load of the guest shows otherwise",
                self.disk.name(),
                profile.display()
            );
        }
        if let Some(stripe) = self.disk.stripe() {
            self.announce_legs(stripe);
        }
    }

    /// Logs the legs of a stripe and the space that it leaves unused.
    fn announce_legs(&self, stripe: Stripe) {
        let name = self.disk.name();
        tracing::info!(
            "{name}: {} legs in chunks of {} bytes; it does not grow with them",
            stripe.legs(),
            stripe.chunk_bytes()
        );
        let unused = || self.disk.legs().iter().map(Leg::unused_bytes);
        if unused().max() == unused().min() {
            return;
        }
        let bytes = self.disk.capacity_bytes() / u64::from(stripe.legs());
        tracing::warn!(
            "{name}: its legs are of unequal size: {bytes} bytes of each are used, as much as the \
             smallest has, and {} bytes of the others are not",
            unused().sum::<u64>()
        );
    }
}
