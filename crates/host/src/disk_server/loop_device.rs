//! Finds loop devices that have a file of the disk attached. They take no lock on it, so the disk's own lock does not keep
//! them away.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::path::Path;

use cleave_disk::{Backing, Disk, FileKind, Leg};

/// The legs whose files are attached to loop devices, and those devices.
pub(crate) fn attached_to_legs(disk: &Disk) -> Vec<(String, String)> {
    let legs = disk.legs().iter();
    legs.filter_map(|leg| Some((leg.name().to_owned(), attached_to(leg)?)))
        .collect()
}

/// The loop device that has the file of this leg attached.
fn attached_to(leg: &Leg) -> Option<String> {
    match leg.backing() {
        Backing::File {
            file,
            kind: FileKind::Regular,
            ..
        } => find(file, Path::new("/sys/block")),
        _ => None,
    }
}

/// Compares names as the kernel has them. The other files are not opened or examined, because one of them may lie on a
/// file system whose server does not answer. A file that is attached under another name is not found.
fn find(file: &File, devices: &Path) -> Option<String> {
    let ours = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    fs::read_dir(devices).ok()?.flatten().find_map(|device| {
        let path = fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        let is_ours = Path::new(path.trim_end_matches('\n')) == ours;
        is_ours.then(|| format!("/dev/{}", device.file_name().display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attached_file_is_found_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let folder_path = folder.path().canonicalize().unwrap();
        let [image, other] = ["image", "other"].map(|name| folder_path.join(name));
        fs::write(&image, "x").unwrap();
        fs::write(&other, "x").unwrap();
        let devices = folder.path().join("devices");
        fs::create_dir_all(devices.join("sda")).unwrap();
        for (device, path) in [("loop0", &other), ("loop7", &image)] {
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
