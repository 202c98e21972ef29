//! Finds out whether a disk holds something or is in use, so that no measurement writes over it by mistake.

use std::fs::{OpenOptions, read_dir, read_to_string};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use cleave_rig::{At, Result, quietly, setup};
use itertools::Itertools;

use crate::filled;

/// Linux refuses to open a block device so while it is mounted anywhere, swapped to, or part of another device.
const O_EXCL: i32 = 0o200;

/// Returns an error if a disk is in use, or if it holds something and `overwrite` does not name it too.
pub(crate) fn refuse(disk: &Path, overwrite: Option<&Path>) -> Result {
    let path = disk.canonicalize().at(disk)?;
    let shown = disk.display();
    if let Some(user) = user(&path)? {
        return Err(format!(
            "{shown} is not written to: {user}. Release it first; --overwrite does not change that"
        ));
    }
    if let Some(named) = overwrite {
        return match named.canonicalize().at(named)? == path {
            true => Ok(()),
            false => Err(format!(
                "--overwrite names {}, which is not the disk {shown}",
                named.display()
            )),
        };
    }
    // Not everything has a signature: plain encryption, a raw database.
    let found = match signatures(&path)? {
        known if !known.is_empty() => known,
        _ if filled::holds_bytes(&path)? => "bytes that are not zero".to_owned(),
        _ => return Ok(()),
    };
    Err(format!(
        "{shown} is not written to: it holds {found}. `--overwrite {shown}` writes over that, and nothing brings it back"
    ))
}

/// Returns the kinds of everything that is known by a signature: file systems, partition tables, LVM, RAID, swap, LUKS.
fn signatures(path: &Path) -> Result<String> {
    if setup::find("wipefs").is_none() {
        let path = path.display();
        return Err(format!(
            "wipefs is missing (package util-linux): it tells whether {path} holds something"
        ));
    }
    let line = "wipefs --no-act --noheadings --output TYPE {}";
    let said = quietly(Path::new("/"), line, &[&path.display()])?;
    Ok(said.lines().map(str::trim).unique().join(", "))
}

/// Returns who uses a disk, as the rest of a sentence.
fn user(path: &Path) -> Result<Option<String>> {
    let meta = path.metadata().at(path)?;
    if meta.is_file() {
        return Ok(backed(path).map(|name| format!("/dev/{name} is made of it")));
    }
    if !meta.file_type().is_block_device() {
        return Err(format!(
            "{} is neither a file nor a block device",
            path.display()
        ));
    }
    let own = number(meta.rdev());
    let sys = Path::new("/sys/dev/block").join(&own);
    let mut numbers = vec![own];
    numbers.extend(partitions(&sys));
    let read = |path: &str| read_to_string(path).at(path);
    let mountinfo = read("/proc/self/mountinfo")?;
    if let Some(place) = mounted(&mountinfo, &numbers) {
        return Ok(Some(format!("it is mounted on {place}")));
    }
    if swaps(&read("/proc/swaps")?).any(|swap| Path::new(swap) == path) {
        return Ok(Some("it is swapped to".to_owned()));
    }
    for number in &numbers {
        let holders = Path::new("/sys/dev/block").join(number).join("holders");
        if let Some(holder) = entries(&holders).first() {
            return Ok(Some(format!("/dev/{holder} is made of it")));
        }
    }
    // This sees what is mounted in other namespaces too, and programs that keep the disk to themselves.
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(O_EXCL)
        .open(path);
    match opened {
        Ok(_) => Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
            let why =
                "the kernel says that it is in use, perhaps in a container or by another program";
            Ok(Some(why.to_owned()))
        }
        Err(error) => Err(error).at(path),
    }
}

/// `major:minor`
fn number(device: u64) -> String {
    let major = (device >> 8) & 0xfff | (device >> 32) & 0xffff_f000;
    let minor = device & 0xff | (device >> 12) & 0xffff_ff00;
    format!("{major}:{minor}")
}

/// Returns the numbers of the partitions of a disk.
fn partitions(sys: &Path) -> Vec<String> {
    let folders = entries(sys).into_iter().map(|name| sys.join(name));
    let partitions = folders.filter(|folder| folder.join("partition").exists());
    let numbers = partitions.filter_map(|folder| read_to_string(folder.join("dev")).ok());
    numbers.map(|number| number.trim().to_owned()).collect()
}

/// Returns the names in a folder of the kernel's. One that is not there has none.
fn entries(folder: &Path) -> Vec<String> {
    let entries = read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.sorted().collect()
}

/// Returns the place on which one of the devices is mounted. The third field is the device, the fifth the place.
fn mounted<'a>(mountinfo: &'a str, numbers: &[String]) -> Option<&'a str> {
    let mut lines = mountinfo.lines().map(|line| line.split(' '));
    lines.find_map(|mut fields| {
        let device = fields.nth(2)?;
        let place = fields.nth(1)?;
        numbers
            .iter()
            .any(|number| number == device)
            .then_some(place)
    })
}

/// Returns the devices that are swapped to: the first field of all lines but the heading.
fn swaps(text: &str) -> impl Iterator<Item = &str> {
    let lines = text.lines().skip(1);
    lines.filter_map(|line| line.split_whitespace().next())
}

/// Returns the loop device that a file backs.
fn backed(path: &Path) -> Option<String> {
    let devices = entries(Path::new("/sys/block")).into_iter();
    devices
        .filter(|name| name.starts_with("loop"))
        .find(|name| {
            let file = format!("/sys/block/{name}/loop/backing_file");
            read_to_string(file).is_ok_and(|backing| Path::new(backing.trim_end()) == path)
        })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;

    use super::*;

    /// An empty disk of 8 MiB.
    fn disk(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("cleave-lab-{name}-{}", std::process::id()));
        File::create(&path).unwrap().set_len(8 << 20).unwrap();
        path
    }

    fn write(path: &Path, bytes: &[u8], offset: u64) {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(bytes, offset).unwrap();
    }

    /// The label of a physical volume in the second sector. LVM counts this checksum over the rest of the sector.
    fn lvm_label() -> Vec<u8> {
        let mut sector = vec![0; 512];
        sector[..8].copy_from_slice(b"LABELONE");
        sector[8] = 1;
        sector[20] = 32;
        sector[24..32].copy_from_slice(b"LVM2 001");
        sector[32..64].copy_from_slice(b"0123456789abcdefghijklmnopqrstuv");
        let mut crc = 0xf597_a6cf_u32;
        for byte in &sector[20..] {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = crc >> 1 ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
            }
        }
        sector[16..20].copy_from_slice(&crc.to_le_bytes());
        sector
    }

    #[test]
    fn a_disk_that_holds_something_is_refused_until_it_is_named_again() {
        let path = disk("signatures");
        let other = disk("other");
        assert_eq!(refuse(&path, None), Ok(()), "an empty one");
        let mut table = vec![0; 512];
        // One Linux partition from sector 2048 on, and the end of a boot sector.
        table[446..462].copy_from_slice(&[0, 0, 33, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 16, 0, 0]);
        table[510..].copy_from_slice(&[0x55, 0xaa]);
        // Version 1 and the last page, and the signature at the end of the first page.
        let mut swap = vec![0; 3072];
        swap[..8].copy_from_slice(&[1, 0, 0, 0, 0xff, 7, 0, 0]);
        swap[3062..].copy_from_slice(b"SWAPSPACE2");
        let luks = [&b"LUKS\xba\xbe"[..], &[0, 1]].concat();
        for (what, bytes, offset) in [
            ("dos", table, 0),
            ("LVM2_member", lvm_label(), 512),
            ("swap", swap, 1024),
            ("crypto_LUKS", luks, 0),
            // The magic number and the revision of a superblock.
            ("bytes that are not zero", vec![1], 2 << 20),
            ("bytes that are not zero", vec![1], (8 << 20) - 1),
            ("ext", vec![0x53, 0xef, 1, 0, 0, 0, 0, 0], 1024 + 56),
        ] {
            File::create(&path).unwrap().set_len(8 << 20).unwrap();
            write(&path, &bytes, offset);
            let why = refuse(&path, None).unwrap_err();
            assert!(
                why.contains(&format!("it holds {what}")) && why.contains("--overwrite"),
                "{why}"
            );
            assert_eq!(refuse(&path, Some(&path)), Ok(()), "{what}");
            let why = refuse(&path, Some(&other)).unwrap_err();
            assert!(why.contains("is not the disk"), "{why}");
        }
        std::fs::remove_file(path).unwrap();
        std::fs::remove_file(other).unwrap();
    }

    #[test]
    fn users_of_a_disk_are_found_in_the_kernels_lists() {
        let mountinfo = "22 27 0:21 / /proc rw - proc proc rw\n46 27 259:3 / /srv rw shared:1 - ext4 /dev/nvme0n1p3 rw\n";
        let of = |numbers: &[&str]| {
            let numbers = numbers.iter().map(|number| (*number).to_owned());
            mounted(mountinfo, &numbers.collect_vec())
        };
        assert_eq!(of(&["259:0", "259:3"]), Some("/srv"));
        assert_eq!(of(&["259:0", "59:3"]), None);
        let swaps = swaps("Filename Type Size\n/dev/sda2 partition 1 0 -2\n");
        assert_eq!(swaps.collect_vec(), ["/dev/sda2"]);
        // makedev(259, 3), and a minor number that does not fit into a byte.
        assert_eq!(number(0x1_0303), "259:3");
        assert_eq!(number(0x10_0800), "8:256");
    }
}
