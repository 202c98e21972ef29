//! Which file systems are trusted to keep writes out of the page cache that are to bypass it.

use cleave_disk::{Disk, DiskSpec, OpenOptions};
use cleave_tests::{Mount, Scratch, ignored, is_root};

#[test]
fn a_file_of_ext4_keeps_its_writes_out_of_the_page_cache_and_one_of_xfs_may_not() {
    type Make = fn(&Scratch, u64) -> Result<Mount, String>;
    if !is_root() {
        return ignored("needs root, to mount");
    }
    for (name, make, caches_writes) in [
        ("ext4", Mount::ext4 as Make, false),
        ("XFS", Mount::xfs, true),
    ] {
        let scratch = Scratch::in_memory();
        let mount = match make(&scratch, 512 << 20) {
            Ok(mount) => mount,
            Err(why) => return ignored(&format!("{name}: {why}")),
        };
        let path = mount.path().join("image");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let disk = Disk::open(&DiskSpec::Path(path), &OpenOptions::default()).unwrap();
        assert_eq!(disk.is_direct(), Some(true), "{name}");
        assert_eq!(disk.legs()[0].caches_writes(), caches_writes, "{name}");
    }
}
