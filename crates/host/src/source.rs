//! Opening what a disk consists of.

use std::fs::File;

use cleave_config::Storage;
use cleave_disk::{Disk, OpenError, OpenOptions};

/// Opens, locks and probes the storage of a disk. `given`: files of another process that are used in place of opening them, or none.
pub fn open_storage(
    storage: &Storage,
    options: &OpenOptions,
    given: Vec<File>,
) -> Result<Disk, OpenError> {
    match storage {
        Storage::One(spec) => Disk::open_given(spec, options, given),
        Storage::Stripe {
            legs,
            chunk_bytes,
            kind,
        } => Disk::open_stripe_given(legs, *chunk_bytes, *kind, options, given),
    }
}

/// A warning for the log that the storage takes long to open. A cluster or a file server that does not answer is waited for without
/// end.
pub(crate) fn slow(storage: &Storage) -> String {
    let names = storage.line();
    format!("still waiting for {names} to open: see whether its storage answers")
}
