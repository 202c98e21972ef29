//! Groups of disks that share limits, by their names. A group is there as long as a disk of the node names it, and has a file of its
//! own, STATE/groups/NAME.toml, which keeps its limits.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleave_config::DiskConfig;
use cleave_worker::{LimitGroup, RateLimits};
use tokio::sync::{Mutex as FileMutex, OwnedMutexGuard};

use super::files::StateFiles;
use crate::hosted::aside::aside;

/// All groups.
#[derive(Debug, Default)]
pub(super) struct Groups(Mutex<BTreeMap<String, Group>>);

/// A group.
#[derive(Debug, Default)]
struct Group {
    /// Disks of the node that name it.
    members: usize,
    /// What its disks share while they are served. A disk that was given up while it hangs may still hold that of an earlier group of
    /// this name.
    shared: LimitGroup,
    limits: RateLimits,
    /// The limits that its file has. `None`: that is not known, since an earlier group of this name may have left one.
    written: Option<RateLimits>,
    /// Held while its file is written.
    file: Arc<FileMutex<()>>,
}

impl Groups {
    /// Notes that a disk of this description is there. Limits that it names are put in force later, by [`set`](Groups::set).
    pub(super) fn join(&self, config: &DiskConfig) {
        if let Some(name) = config.limit_group() {
            self.lock().entry(name.to_owned()).or_default().members += 1;
        }
    }

    /// Notes that a disk of this description is gone. The limits of a group go with its last disk.
    pub(super) fn leave(&self, config: &DiskConfig) {
        let mut groups = self.lock();
        let Some(name) = config.limit_group() else {
            return;
        };
        if let Some(group) = groups.get_mut(name) {
            group.members = group.members.saturating_sub(1);
            if group.members == 0 {
                groups.remove(name);
            }
        }
    }

    /// Takes the limits of a group as its file has them, or else as the file of one of its disks does.
    pub(super) fn restore(&self, name: &str, kept: Option<RateLimits>, of_disk: RateLimits) {
        let mut groups = self.lock();
        let group = groups.entry(name.to_owned()).or_default();
        if let Some(kept) = kept {
            group.limits = kept;
            group.written = Some(kept);
        } else if !group.limits.any() {
            group.limits = of_disk;
        }
    }

    /// Returns true if a disk names this group.
    pub(super) fn has(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Makes the limits that a description names those of its group. Returns false if they are, or if it names no group.
    pub(super) fn set(&self, config: &DiskConfig) -> bool {
        let limits = config.limits.get().values;
        let mut groups = self.lock();
        let group = config.limit_group().and_then(|name| groups.get_mut(name));
        let Some(group) = group.filter(|group| group.limits != limits) else {
            return false;
        };
        group.limits = limits;
        group.shared.set(limits);
        true
    }

    /// Returns a description with the limits of its group.
    pub(super) fn in_force(&self, config: &DiskConfig) -> DiskConfig {
        let groups = self.lock();
        let group = config.limit_group().and_then(|name| groups.get(name));
        group.map_or_else(|| config.clone(), |group| config.with_limits(group.limits))
    }

    /// Returns what the disks of a group share.
    pub(super) fn shared(&self, name: &str) -> LimitGroup {
        self.lock()
            .entry(name.to_owned())
            .or_default()
            .shared
            .clone()
    }

    /// Returns true if the limits of a group are not what its file has.
    pub(super) fn is_due(&self, name: &str) -> bool {
        self.lock()
            .get(name)
            .is_some_and(|group| group.written != Some(group.limits))
    }

    /// Writes the file of a group.
    pub(super) async fn keep(&self, files: &StateFiles, name: &str) -> io::Result<()> {
        let _turn = self.turn(name).await;
        let limits = self.lock().get(name).map(|group| group.limits);
        let Some(limits) = limits else {
            return Ok(());
        };
        write(files, name, limits).await?;
        if let Some(group) = self.lock().get_mut(name) {
            group.written = Some(limits);
        }
        Ok(())
    }

    /// Removes the file of a group if its last disk is about to leave it.
    pub(super) async fn remove_with_last(&self, files: &StateFiles, name: &str) -> io::Result<()> {
        let _turn = self.turn(name).await;
        {
            let mut groups = self.lock();
            if let Some(group) = groups.get_mut(name) {
                if group.members > 1 {
                    return Ok(());
                }
                // From now on: a disk that joins meanwhile has the file written again.
                group.written = None;
            }
        }
        write(files, name, RateLimits::default()).await
    }

    /// Waits until no other disk of a group has its file written. The next one finds what the group has by then.
    async fn turn(&self, name: &str) -> OwnedMutexGuard<()> {
        let file = self.lock().get(name).map(|group| group.file.clone());
        file.unwrap_or_default().lock_owned().await
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Group>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn write(files: &StateFiles, name: &str, limits: RateLimits) -> io::Result<()> {
    let (files, name) = (files.clone(), name.to_owned());
    aside("state", move || files.keep_group(&name, limits)).await
}
