//! The frontend's memory table as it was sent, with the descriptors that would otherwise be closed once they are mapped. Another
//! process needs them to go on with the session.

use std::fs::File;
use std::io;
use std::sync::Arc;

use cleave_guest::RegionSpec;
use rustix::fs::fstat;
use vhost::vhost_user::message::FrontendReq;

use crate::recorded::{RecordedMessage, longs, record, words};

/// Most files of memory that a session keeps. A guest has one or two; more would let a frontend use up the process's
/// descriptors.
pub const MEMORY_FILES_MAX: usize = 32;

/// A region of the frontend's table, and its file.
#[derive(Debug, Clone)]
struct KeptRegion {
    guest_addr: u64,
    user_addr: u64,
    len_bytes: u64,
    file_offset: u64,
    /// Regions of the same file share a descriptor.
    file: Arc<File>,
}

/// The frontend's memory table as it was sent.
#[derive(Debug, Clone)]
pub(crate) struct KeptMemory(Option<Vec<KeptRegion>>);

impl Default for KeptMemory {
    fn default() -> KeptMemory {
        KeptMemory(Some(Vec::new()))
    }
}

impl KeptMemory {
    /// Returns true if every file of the table is kept.
    pub(crate) fn is_whole(&self) -> bool {
        self.0.is_some()
    }

    /// Returns this table with another region. It keeps nothing if there are too many files, or no descriptor is left.
    pub(crate) fn with(&self, spec: &RegionSpec) -> KeptMemory {
        let added = self.0.clone().and_then(|mut regions| {
            let file = shared(&regions, &spec.file)?;
            regions.push(KeptRegion {
                guest_addr: spec.guest_addr,
                user_addr: spec.user_addr,
                len_bytes: spec.len_bytes,
                file_offset: spec.file_offset,
                file,
            });
            Some(regions)
        });
        KeptMemory(added)
    }

    /// Forgets a region that the frontend has removed.
    pub(crate) fn remove(&mut self, guest_addr: u64, user_addr: u64, len_bytes: u64) {
        let removed = (guest_addr, user_addr, len_bytes);
        if let Some(regions) = &mut self.0 {
            regions.retain(|one| (one.guest_addr, one.user_addr, one.len_bytes) != removed);
        }
    }

    /// Returns the messages that make the table: as many as it has regions, if the frontend can send those.
    pub(crate) fn messages(&self, by_slot: bool) -> io::Result<Vec<RecordedMessage>> {
        let regions = self.0.as_deref().unwrap_or_default();
        let region = |one: &KeptRegion| {
            longs([
                one.guest_addr,
                one.len_bytes,
                one.user_addr,
                one.file_offset,
            ])
        };
        if by_slot {
            let one = |kept: &KeptRegion| {
                let payload = [longs([0]), region(kept)].concat();
                record(FrontendReq::ADD_MEM_REG, payload, [&*kept.file])
            };
            return regions.iter().map(one).collect();
        }
        if regions.is_empty() {
            return Ok(Vec::new());
        }
        let count = words([regions.len() as u32, 0]);
        let payload = std::iter::once(count).chain(regions.iter().map(region));
        let payload = payload.collect::<Vec<_>>().concat();
        let files = regions.iter().map(|one| &*one.file);
        Ok(vec![record(FrontendReq::SET_MEM_TABLE, payload, files)?])
    }
}

/// Returns a descriptor of the file: the one that another region has, or a new one.
fn shared(regions: &[KeptRegion], file: &File) -> Option<Arc<File>> {
    let identity = |file: &File| fstat(file).map(|found| (found.st_dev, found.st_ino)).ok();
    let wanted = identity(file)?;
    let mut files: Vec<_> = regions.iter().map(|one| &one.file).collect();
    files.dedup_by(|one, other| Arc::ptr_eq(one, other));
    let same = files.iter().find(|one| identity(one) == Some(wanted));
    match same {
        Some(same) => Some(Arc::clone(same)),
        None if files.len() < MEMORY_FILES_MAX => file.try_clone().ok().map(Arc::new),
        None => None,
    }
}
