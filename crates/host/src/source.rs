//! Opening what a disk consists of.

use std::fs::File;
use std::path::Path;

use cleave_config::Storage;
use cleave_disk::{ContentOrigin, Disk, DiskSpec, Locking, OpenError, OpenOptions};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

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

/// Says which file of the storage is not there, if one is not.
pub(crate) fn missing_file(storage: &Storage) -> Option<String> {
    let mut paths = storage.specs().iter().filter_map(DiskSpec::path);
    paths.find_map(|path| {
        let error = path.metadata().err()?;
        Some(format!("{} cannot be found: {error}", path.display()))
    })
}

/// Refuses storage that no other process could serve with these options, while one serves it: that one is not to end. Neither its locks
/// nor its claim are tried, and the servers of other storage than files and devices are not asked.
pub(crate) fn judge_served(
    storage: &Storage,
    options: &OpenOptions,
    content: ContentOrigin,
) -> Result<(), String> {
    if let Some(missing) = missing_file(storage) {
        return Err(missing);
    }
    let specs = storage.specs();
    let paths: Vec<&Path> = specs.iter().filter_map(DiskSpec::path).collect();
    if paths.len() < specs.len() {
        return Ok(());
    }
    // Opened for writing, a device would be claimed, and a file's close would be noticed by whoever watches it.
    let look = OpenOptions {
        read_only: true,
        locking: Locking::Later,
        content,
        ..options.clone()
    };
    open_storage(storage, &look, Vec::new()).map_err(|error| error.to_string())?;
    match options.read_only {
        true => Ok(()),
        false => paths.into_iter().try_for_each(may_write),
    }
}

/// Refuses a file that this process may not write to.
fn may_write(path: &Path) -> Result<(), String> {
    match accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS) {
        Err(error @ (Errno::ACCESS | Errno::PERM | Errno::ROFS)) => Err(format!(
            "{} cannot be written to: {error}: give this user access",
            path.display()
        )),
        _ => Ok(()),
    }
}

/// A warning for the log that the storage takes long to open. A cluster or a file server that does not answer is waited for without
/// end.
pub(crate) fn slow(storage: &Storage) -> String {
    let names = storage.line();
    format!("still waiting for {names} to open: see whether its storage answers")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_that_no_other_process_could_serve_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let storage = Storage::One(DiskSpec::Path(path.clone()));
        let options = OpenOptions::default();
        let judge = |content| judge_served(&storage, &options, content);
        let missing = judge(ContentOrigin::Guest).unwrap_err();
        assert!(missing.contains("image cannot be found"), "{missing}");
        std::fs::write(&path, "").unwrap();
        let empty = judge(ContentOrigin::Guest).unwrap_err();
        assert!(empty.contains("has no bytes"), "{empty}");
        let mut image = b"QFI\xfb\0\0\0\x03".to_vec();
        image.resize(1 << 20, 0);
        std::fs::write(&path, image).unwrap();
        let format = judge(ContentOrigin::Unknown).unwrap_err();
        assert!(format.contains("is a qcow2 image"), "{format}");
        // The process that serves it has its locks.
        let served = OpenOptions {
            content: ContentOrigin::Guest,
            ..options.clone()
        };
        let _served = open_storage(&storage, &served, Vec::new()).unwrap();
        assert_eq!(judge(ContentOrigin::Guest), Ok(()));
    }
}
