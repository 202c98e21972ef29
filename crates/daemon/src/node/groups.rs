//! Groups of disks that share limits, by their names. A group is there as long as it has a disk.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cleave_worker::LimitGroup;

/// All groups.
#[derive(Debug, Default)]
pub(super) struct Groups(Mutex<BTreeMap<String, LimitGroup>>);

impl Groups {
    /// A new group of this name, which no disk of the node has. A disk that was given up while it hangs may still hold an old one.
    pub(super) fn begin(&self, name: &str) -> LimitGroup {
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let group = LimitGroup::default();
        groups.insert(name.to_owned(), group.clone());
        group
    }

    /// The group of this name. A disk is to join it before another asks: one without disks is forgotten, with its limits.
    pub(super) fn find(&self, name: &str) -> LimitGroup {
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|_, group| group.members() > 0);
        groups.entry(name.to_owned()).or_default().clone()
    }
}
