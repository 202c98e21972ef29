//! The disk that is measured: filled with bytes that no store can compress or leave out, and looked at before.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use cleave_rig::{At, Result};
use itertools::Itertools;

/// Blocks that are looked at, evenly over the disk.
const SAMPLES: u64 = 512;
const SAMPLE_BYTES: u64 = 4096;
/// Bytes at the beginning and at the end that are looked at too: there most formats begin.
const END_BYTES: u64 = 1 << 20;
/// Smaller files are filled too quickly to be worth a message.
const QUIET_BYTES: u64 = 128 << 20;
/// In bits a byte; random bytes reach 7.999 in so many samples.
const ENTROPY_MIN: f64 = 7.95;

/// Makes a file of random bytes; one that is there already and full is kept.
pub(crate) fn random_file(path: &Path, bytes: u64) -> Result<PathBuf> {
    let is_there = std::fs::metadata(path).is_ok_and(|found| found.len() == bytes);
    if is_there && check(path).is_ok() {
        return Ok(path.to_owned());
    }
    if bytes > QUIET_BYTES {
        let mib = bytes >> 20;
        println!("filling {} with {mib} MiB of random bytes", path.display());
    }
    // The first run in a checkout has no such folder yet.
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).at(folder)?;
    }
    let file = File::create(path).at(path)?;
    let filled = write_random(file, bytes);
    if filled.is_err() {
        // A part of a file would only keep the disk full.
        let _ = std::fs::remove_file(path);
    }
    filled.at(path)?;
    check(path).map(|()| path.to_owned())
}

/// Fills a disk as large as it is with random bytes.
pub(crate) fn fill(path: &Path) -> Result {
    let mut file = OpenOptions::new().write(true).open(path).at(path)?;
    let bytes = file.seek(SeekFrom::End(0)).at(path)?;
    file.rewind().at(path)?;
    let (shown, mib) = (path.display(), bytes >> 20);
    println!("filling {shown} with {mib} MiB of random bytes");
    write_random(file, bytes).at(path)?;
    check(path)
}

fn write_random(mut file: File, bytes: u64) -> std::io::Result<()> {
    let mut source = File::open("/dev/urandom")?.take(bytes);
    std::io::copy(&mut source, &mut file)?;
    file.flush().and_then(|()| file.sync_all())
}

/// Checks that a disk holds data everywhere. Areas that were never written are answered without the device.
pub(crate) fn check(path: &Path) -> Result {
    let mut file = File::open(path).at(path)?;
    let meta = file.metadata().at(path)?;
    if meta.is_file() && meta.blocks() * 512 < meta.len() {
        let (held, all) = (meta.blocks() >> 11, meta.len() >> 20);
        let path = path.display();
        return Err(format!(
            "{path} is thin: {held} of its {all} MiB are on the disk"
        ));
    }
    // The end of a block device is its size too.
    let bytes = file.seek(SeekFrom::End(0)).at(path)?;
    let blocks = sample(&file, bytes).at(path)?;
    judge(&blocks).map_err(|why| format!("{} {why}", path.display()))
}

/// Returns true if a disk holds a byte other than zero at its beginning, at its end, or in the blocks that are looked at.
pub(crate) fn holds_bytes(path: &Path) -> Result<bool> {
    let mut file = File::open(path).at(path)?;
    let bytes = file.seek(SeekFrom::End(0)).at(path)?;
    let mut blocks = sample(&file, bytes).at(path)?;
    let end = bytes.min(END_BYTES);
    for offset in [0, bytes - end] {
        let mut block = vec![0; end as usize];
        file.read_exact_at(&mut block, offset).at(path)?;
        blocks.push(block);
    }
    Ok(blocks.iter().flatten().any(|byte| *byte != 0))
}

fn sample(file: &File, bytes: u64) -> std::io::Result<Vec<Vec<u8>>> {
    let count = SAMPLES.min(bytes / SAMPLE_BYTES);
    let step = (bytes / count.max(1)) / SAMPLE_BYTES * SAMPLE_BYTES;
    let read = |number: u64| {
        let mut block = vec![0; SAMPLE_BYTES as usize];
        file.read_exact_at(&mut block, number * step)?;
        Ok(block)
    };
    (0..count).map(read).collect()
}

/// Zeroes, repetition and order are all something that a store below may leave out.
fn judge(blocks: &[Vec<u8>]) -> Result {
    let zeroes = blocks
        .iter()
        .filter(|block| block.iter().all(|byte| *byte == 0));
    let (zeroes, all) = (zeroes.count(), blocks.len());
    let entropy = entropy(blocks);
    Err(match () {
        () if all == 0 => "is empty".to_owned(),
        () if zeroes > 0 => format!("is not filled: {zeroes} of {all} blocks looked at are zeroes"),
        () if !blocks.iter().all_unique() => {
            "repeats itself, which a store below may know".to_owned()
        }
        () if entropy < ENTROPY_MIN => format!("can be compressed: {entropy:.2} bits a byte"),
        () => return Ok(()),
    })
}

/// Bits a byte, by how often each byte occurs.
fn entropy(blocks: &[Vec<u8>]) -> f64 {
    let mut counts = [0_u64; 256];
    for byte in blocks.iter().flatten() {
        counts[usize::from(*byte)] += 1;
    }
    let all = counts.iter().sum::<u64>() as f64;
    let shares = counts.iter().filter(|count| **count > 0);
    let shares = shares.map(|count| *count as f64 / all);
    shares.map(|share| -share * share.log2()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// xorshift64, seed 1.
    fn random(count: usize) -> Vec<Vec<u8>> {
        let mut state = 1u64;
        let mut byte = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        (0..count)
            .map(|_| (0..4096).map(|_| byte()).collect())
            .collect()
    }

    #[test]
    fn a_file_is_made_where_there_is_no_folder_yet_and_kept() {
        let dir = std::env::temp_dir().join(format!("cleave-image-{}", std::process::id()));
        let path = dir.join("not/yet/disk.img");
        let bytes = 4 << 20;
        assert_eq!(random_file(&path, bytes), Ok(path.clone()));
        let made = std::fs::read(&path).unwrap();
        assert_eq!(random_file(&path, bytes), Ok(path.clone()));
        assert!(std::fs::read(&path).unwrap() == made, "filled once");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_disk_is_filled_to_its_end() {
        let path = std::env::temp_dir().join(format!("cleave-fill-{}", std::process::id()));
        File::create(&path).unwrap().set_len(4 << 20).unwrap();
        assert_eq!(fill(&path), Ok(()));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 4 << 20);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn only_random_bytes_fill_a_disk() {
        assert_eq!(judge(&random(64)), Ok(()));
        let mut thin = random(64);
        thin[7] = vec![0; 4096];
        let mut repeated = random(64);
        repeated[7] = repeated[8].clone();
        let text = vec![(0..4096).map(|at| b"abcd"[at % 4]).collect()];
        for (blocks, why) in [
            (thin, "1 of 64"),
            (repeated, "repeats"),
            (text, "compressed"),
            (Vec::new(), "empty"),
        ] {
            let said = judge(&blocks).unwrap_err();
            assert!(said.contains(why), "{said}");
        }
    }

    #[test]
    fn a_file_with_holes_is_refused_and_a_filled_one_is_kept() {
        let path = std::env::temp_dir().join(format!("xtask-image-{}", std::process::id()));
        File::create(&path).unwrap().set_len(4 << 20).unwrap();
        assert!(check(&path).unwrap_err().contains("thin"));
        random_file(&path, 4 << 20).unwrap();
        let before = std::fs::metadata(&path).unwrap().modified().unwrap();
        random_file(&path, 4 << 20).unwrap();
        let after = std::fs::metadata(&path).unwrap().modified().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(before, after);
    }
}
