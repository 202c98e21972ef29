//! Finds loop devices that have a file of the disk attached. They take no lock on it, so the disk's own lock does not keep
//! them away.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use cleave_disk::{Backing, FileKind, Leg};

/// The loop device that has the file of this leg attached.
pub(crate) fn attached_to(leg: &Leg) -> Option<String> {
    match leg.backing() {
        Backing::File {
            file,
            kind: FileKind::Regular,
            ..
        } => find(file, Path::new("/sys/block")),
        _ => None,
    }
}

fn find(file: &File, devices: &Path) -> Option<String> {
    let ours = file.metadata().ok()?;
    fs::read_dir(devices).ok()?.flatten().find_map(|device| {
        let path = fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        let found = fs::metadata(path.trim_end_matches('\n')).ok()?;
        let is_ours = (found.dev(), found.ino()) == (ours.dev(), ours.ino());
        is_ours.then(|| format!("/dev/{}", device.file_name().display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_found_by_its_inode_under_any_name() {
        let folder = tempfile::tempdir().unwrap();
        let [image, other, link] = ["image", "other", "link"].map(|name| folder.path().join(name));
        fs::write(&image, "x").unwrap();
        fs::write(&other, "x").unwrap();
        fs::hard_link(&image, &link).unwrap();
        let devices = folder.path().join("devices");
        fs::create_dir_all(devices.join("sda")).unwrap();
        for (device, path) in [("loop0", &other), ("loop7", &link)] {
            let attached = devices.join(device).join("loop");
            fs::create_dir_all(&attached).unwrap();
            let line = format!("{}\n", path.display());
            fs::write(attached.join("backing_file"), line).unwrap();
        }
        let file = File::open(&image).unwrap();
        assert_eq!(find(&file, &devices).as_deref(), Some("/dev/loop7"));
        fs::remove_dir_all(devices.join("loop7")).unwrap();
        assert_eq!(find(&file, &devices), None);
    }
}
