//! Disks that an NBD server exports: opening. Their connections are those of `cleave_nbd`, the I/O of requests is the engine's.

use cleave_blk::Limits;
use cleave_nbd::wire::export;
pub use cleave_nbd::{Address, NbdSpec};
use cleave_nbd::{Export, NbdClient};

use crate::detect::{RemoteProperties, probe_remote};
use crate::{OpenError, OpenOptions};

/// Connects to the server, which tells the limits of the export.
pub(crate) fn open(
    spec: &NbdSpec,
    name: &str,
    options: &OpenOptions,
) -> Result<(NbdClient, Limits), OpenError> {
    let failed = |error| OpenError::Nbd(name.to_owned(), error);
    let nbd = NbdClient::open(spec, name, options.read_only, options.workers).map_err(failed)?;
    let promised: &Export = nbd.export();
    if promised.has(export::READ_ONLY) && !options.read_only {
        return Err(OpenError::ReadOnlyExport(name.to_owned()));
    }
    if promised.block_min > options.block_bytes {
        return Err(OpenError::LargeBlock(name.to_owned(), promised.block_min));
    }
    let remote = RemoteProperties {
        size_bytes: promised.size_bytes,
        can_discard: promised.has(export::TRIM),
        rotational: promised.has(export::ROTATIONAL),
        remedy: "let the server export",
    };
    let limits = probe_remote(name, &remote, options)?;
    Ok((nbd, limits))
}
