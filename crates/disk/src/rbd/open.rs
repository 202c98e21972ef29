//! Opens an image, and finds the limits of the disk.

use cleave_blk::Limits;
use cleave_rbd::{Image, ImageAccess};

use super::RbdSpec;
use crate::detect::{RemoteProperties, probe_remote};
use crate::{OpenError, OpenOptions};

/// The unit in which librbd gives space back (`rbd_discard_granularity_bytes`).
const DISCARD_BYTES: u64 = 64 << 10;
/// A block of the cluster's stores (`bluestore_min_alloc_size`).
const BLOCK_BYTES: u32 = 4096;

/// Opens an image; for writing, with its exclusive lock.
pub(crate) fn open(spec: &RbdSpec, name: &str, read_only: bool) -> Result<Image, OpenError> {
    let access = match read_only {
        true => ImageAccess::Read,
        false if spec.place.snapshot.is_some() => {
            return Err(OpenError::Snapshot(name.to_owned()));
        }
        false => ImageAccess::Write,
    };
    Image::open(&spec.place, access)
        .map_err(|error| OpenError::Rbd(name.to_owned(), Box::new(error)))
}

/// Returns the limits of a disk that is this image.
pub(crate) fn probe(image: &Image, name: &str, options: &OpenOptions) -> Result<Limits, OpenError> {
    let object_bytes = image.object_bytes();
    let remote = RemoteProperties {
        size_bytes: image.size_bytes(),
        physical_bytes: BLOCK_BYTES,
        optimal_bytes: u32::try_from(object_bytes).unwrap_or(0),
        discard_bytes: DISCARD_BYTES.min(object_bytes) as u32,
        can_discard: true,
        rotational: false,
        remedy: "give it (rbd resize)",
    };
    probe_remote(name, &remote, options)
}
