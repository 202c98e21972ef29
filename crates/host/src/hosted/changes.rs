//! Changes of disks, and the process that takes the disks over meanwhile: it has read how they are to be.

use std::sync::Arc;
use std::time::Duration;

use cleave_api::ProblemKind;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tokio::time::timeout;

use crate::problem::Refusal;

/// Longest wait for changes that have begun.
const CHANGE_TIME: Duration = Duration::from_secs(2);

/// Held by requests that change a disk, and alone while another process takes the disks over.
#[derive(Debug, Clone, Default)]
pub(crate) struct Changes(Arc<RwLock<()>>);

/// Held while another process takes disks over from this one, so that it is the only one.
pub(crate) type PassingOn = OwnedRwLockWriteGuard<()>;

impl Changes {
    /// Begins a change of a disk, which ends with the guard.
    pub(crate) fn begin(&self) -> Result<OwnedRwLockReadGuard<()>, Refusal> {
        let begun = self.0.clone().try_read_owned();
        begun.map_err(|_| {
            let why = "another process takes the disks of this one over: send the request again when it has them";
            Refusal(ProblemKind::Busy, why.to_owned())
        })
    }

    /// Begins to give disks to another process, which ends with the guard. Changes that have begun are waited for.
    pub(crate) async fn pass_on(&self) -> Result<PassingOn, Refusal> {
        let begun = timeout(CHANGE_TIME, self.0.clone().write_owned()).await;
        begun.map_err(|_| {
            let why = "a disk is being changed, or another process takes over already";
            Refusal(ProblemKind::Busy, why.to_owned())
        })
    }

    /// Waits until no other process takes disks over. One that has taken all of them never ends that.
    pub(crate) async fn passed_back(self) {
        drop(self.0.read().await);
    }

    /// Returns true while another process takes disks over.
    pub(crate) fn are_passed_on(&self) -> bool {
        self.0.try_read().is_err()
    }
}
