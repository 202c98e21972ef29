//! Groups of disks that share limits, by their names. A group is there as long as a disk of the node names it, and has a file of its
//! own, STATE/groups/NAME.toml, which keeps its limits.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleave_config::DiskConfig;
use cleave_worker::{LimitGroup, RateLimits};
use tokio::sync::{Mutex as FileMutex, OwnedMutexGuard};

use super::files::{KeptLimits, StateFiles};
use crate::hosted::aside::aside;

/// All groups.
#[derive(Debug, Default)]
pub(super) struct Groups(Mutex<BTreeMap<String, Group>>);

/// A group.
#[derive(Debug, Default)]
struct Group {
    /// Disks of the node that name it, and one more if others may name it that are not known yet.
    members: usize,
    /// What its disks share while they are served. A disk that was given up while it hangs may still hold that of an earlier group of
    /// this name.
    shared: LimitGroup,
    limits: RateLimits,
    /// Its file could not be read. Its limits are not known, so a disk that names none is not opened: without limits its guest could
    /// take the share of all others.
    is_unread: bool,
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
    pub(super) fn restore(&self, name: &str, kept: Option<&KeptLimits>, of_disk: RateLimits) {
        let mut groups = self.lock();
        let group = groups.entry(name.to_owned()).or_default();
        if let Some(Ok(kept)) = kept {
            group.has_read(*kept);
            return;
        }
        group.is_unread |= kept.is_some();
        if !group.limits.any() {
            group.limits = of_disk;
        }
    }

    /// Keeps a group, and its file, until the node ends: one of its disks may be in a file that could not be read.
    pub(super) fn hold(&self, name: &str, kept: &KeptLimits) {
        self.restore(name, Some(kept), RateLimits::default());
        if let Some(group) = self.lock().get_mut(name) {
            group.members += 1;
        }
    }

    /// Reads the file of the group of a disk if that could not be read before, unless the disk brings limits of its own. Fails if it
    /// cannot be read now either.
    pub(super) fn find(&self, files: &StateFiles, config: &DiskConfig) -> Result<(), String> {
        let Some(name) = self.missing(config) else {
            return Ok(());
        };
        let read = files.read_group(name);
        let kept =
            read.map_err(|why| format!("the limits of group {name} are not known: {why}"))?;
        let mut groups = self.lock();
        // They may have been set meanwhile.
        if let Some(group) = groups.get_mut(name).filter(|group| group.is_unread) {
            group.is_unread = false;
            if let Some(kept) = kept {
                group.has_read(kept);
            }
        }
        Ok(())
    }

    /// Returns the group whose limits a disk needs and which are not known.
    pub(super) fn missing<'a>(&self, config: &'a DiskConfig) -> Option<&'a str> {
        let name = config.limit_group()?;
        let is_unread = self.lock().get(name).is_some_and(|group| group.is_unread);
        (is_unread && !config.limits.get().values.any()).then_some(name)
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
        let is_other = |group: &Group| match group.is_unread {
            true => limits.any(),
            false => group.limits != limits,
        };
        let Some(group) = group.filter(|group| is_other(group)) else {
            return false;
        };
        group.is_unread = false;
        group.limits = limits;
        group.shared.set(limits);
        true
    }

    /// Returns a description with the limits of its group, if they are known.
    pub(super) fn in_force(&self, config: &DiskConfig) -> DiskConfig {
        let groups = self.lock();
        let group = config.limit_group().and_then(|name| groups.get(name));
        let group = group.filter(|group| !group.is_unread);
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

    /// Returns true if the limits of a group are not what its file has. One that could not be read stays as it is.
    pub(super) fn is_due(&self, name: &str) -> bool {
        self.lock()
            .get(name)
            .is_some_and(|group| !group.is_unread && group.written != Some(group.limits))
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

impl Group {
    fn has_read(&mut self, kept: RateLimits) {
        self.limits = kept;
        self.written = Some(kept);
    }
}

async fn write(files: &StateFiles, name: &str, limits: RateLimits) -> io::Result<()> {
    let (files, name) = (files.clone(), name.to_owned());
    aside("state", move || files.keep_group(&name, limits)).await
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use serde_json::json;

    use super::*;

    fn disk(limits: &serde_json::Value) -> DiskConfig {
        let body = json!({"disk": ["ram:1M"], "limits": limits});
        DiskConfig::from_json(body.to_string().as_bytes()).unwrap()
    }

    /// A disk of it would take what the others are to have.
    #[tokio::test]
    async fn a_group_whose_file_cannot_be_understood_is_not_without_limits() {
        let folder = tempfile::tempdir().unwrap();
        let files = StateFiles::open(folder.path()).unwrap();
        let path = folder.path().join("groups/g.toml");
        let groups = Groups::default();
        // That of a later version.
        fs::write(&path, "iops-total = 700\nx-new = 1\n").unwrap();
        let kept = files.load_groups().unwrap();
        groups.restore("g", kept.get("g"), RateLimits::default());
        let alone = disk(&json!({"group": "g"}));
        groups.join(&alone);
        let refused = groups.find(&files, &alone).unwrap_err();
        assert!(
            refused.contains("g.toml") && refused.contains("x-new"),
            "{refused}"
        );
        // The file stays as it is, whatever is written of its disks.
        assert!(!groups.is_due("g") && !groups.set(&alone));
        // A name that leads nowhere is not a file that somebody has removed.
        fs::rename(&path, folder.path().join("kept")).unwrap();
        symlink(folder.path().join("none"), &path).unwrap();
        groups.find(&files, &alone).unwrap_err();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "iops-total = 700\n").unwrap();
        groups.find(&files, &alone).unwrap();
        assert_eq!(
            groups.in_force(&alone),
            disk(&json!({"group": "g", "iops-total": 700}))
        );
        assert!(!groups.is_due("g"));
    }

    /// Otherwise that one would have no limits when its file can be read again.
    #[tokio::test]
    async fn a_group_with_a_disk_that_is_not_known_yet_outlives_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let files = StateFiles::open(folder.path()).unwrap();
        fs::write(folder.path().join("groups/g.toml"), "iops-total = 5\n").unwrap();
        let groups = Groups::default();
        groups.hold("g", &files.load_groups().unwrap()["g"]);
        let [alone, limited] = [
            json!({"group": "g"}),
            json!({"group": "g", "iops-total": 5}),
        ];
        let (alone, limited) = (disk(&alone), disk(&limited));
        groups.join(&alone);
        assert_eq!(groups.in_force(&alone), limited);
        groups.remove_with_last(&files, "g").await.unwrap();
        groups.leave(&alone);
        assert_eq!(groups.in_force(&alone), limited);
        assert_eq!(
            files.read_group("g").unwrap(),
            Some(limited.limits.get().values)
        );
    }

    #[tokio::test]
    async fn the_limits_of_a_group_whose_file_cannot_be_read_can_be_set_or_taken_away() {
        let folder = tempfile::tempdir().unwrap();
        let files = StateFiles::open(folder.path()).unwrap();
        let path = folder.path().join("groups/g.toml");
        let alone = disk(&json!({"group": "g"}));
        let unread = || {
            fs::write(&path, "iops-").unwrap();
            let groups = Groups::default();
            let kept = files.load_groups().unwrap();
            groups.restore("g", kept.get("g"), RateLimits::default());
            groups.join(&alone);
            groups.find(&files, &alone).unwrap_err();
            groups
        };
        let groups = unread();
        let limited = disk(&json!({"group": "g", "iops-total": 5}));
        groups.find(&files, &limited).unwrap();
        assert_eq!(groups.in_force(&limited), limited);
        groups.find(&files, &alone).unwrap_err();
        assert!(groups.set(&limited) && groups.is_due("g"));
        groups.find(&files, &alone).unwrap();
        assert_eq!(groups.in_force(&alone), limited);
        groups.keep(&files, "g").await.unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "iops-total = 5\n");
        let groups = unread();
        fs::remove_file(&path).unwrap();
        groups.find(&files, &alone).unwrap();
        assert_eq!(groups.in_force(&alone), alone);
    }
}
