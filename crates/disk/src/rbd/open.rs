//! Opens an image, and finds the limits of the disk.

use cleave_blk::Limits;
use cleave_rbd::{Image, ImageAccess};

use super::RbdSpec;
use crate::detect::{RemoteProperties, probe_remote};
use crate::{Locking, OpenError, OpenOptions};

/// Opens an image; for writing, with its exclusive lock if that is due.
pub(crate) fn open(
    spec: &RbdSpec,
    name: &str,
    read_only: bool,
    locking: Locking,
) -> Result<Image, OpenError> {
    let access = match (read_only, locking) {
        (true, _) => ImageAccess::Read,
        (false, _) if spec.place.snapshot.is_some() => {
            return Err(OpenError::Snapshot(name.to_owned()));
        }
        (false, Locking::AtOpen | Locking::Given) => ImageAccess::Write,
        (false, Locking::Later) => ImageAccess::WriteOnceLocked,
    };
    Image::open(&spec.place, access)
        .map_err(|error| OpenError::Rbd(name.to_owned(), Box::new(error)))
}

/// Returns the limits of a disk that is this image.
pub(crate) fn probe(image: &Image, name: &str, options: &OpenOptions) -> Result<Limits, OpenError> {
    let remote = RemoteProperties {
        size_bytes: image.size_bytes(),
        can_discard: true,
        rotational: false,
        remedy: "give it (rbd resize)",
    };
    probe_remote(name, &remote, options)
}
