//! The disk that is measured: filled with bytes that no store can compress or leave out, and looked at before.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Blocks that are looked at, evenly over the disk.
const SAMPLES: u64 = 512;
const SAMPLE_BYTES: u64 = 4096;
/// Smaller files are filled too quickly to be worth a message.
const QUIET_BYTES: u64 = 128 << 20;
/// Of eight bits a byte; random bytes reach 7.999 in so many samples.
const ENTROPY_MIN: f64 = 7.95;

/// A file of random bytes; one that is there already and full is kept.
pub(crate) fn random_file(path: &Path, bytes: u64) -> Result<PathBuf, String> {
    let told = |error: std::io::Error| format!("{}: {error}", path.display());
    let is_there = std::fs::metadata(path).is_ok_and(|found| found.len() == bytes);
    if is_there && check(path).is_ok() {
        return Ok(path.to_owned());
    }
    if bytes > QUIET_BYTES {
        println!(
            "filling {} with {} MiB of random bytes",
            path.display(),
            bytes >> 20
        );
    }
    // With --out elsewhere nobody has made it.
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(told)?;
    }
    let mut source = File::open("/dev/urandom").map_err(told)?.take(bytes);
    let mut file = File::create(path).map_err(told)?;
    let filled = std::io::copy(&mut source, &mut file)
        .and_then(|_| file.flush())
        .and_then(|()| file.sync_all());
    if let Err(error) = filled {
        // A part of a file would only keep the disk full.
        let _ = std::fs::remove_file(path);
        return Err(told(error));
    }
    check(path).map(|()| path.to_owned())
}

/// Whether a disk holds data everywhere. Areas that were never written are answered without the device.
pub(super) fn check(path: &Path) -> Result<(), String> {
    let told = |error: std::io::Error| format!("{}: {error}", path.display());
    let file = File::open(path).map_err(told)?;
    let meta = file.metadata().map_err(told)?;
    let bytes = match meta.file_type().is_block_device() {
        true => device_bytes(&meta)?,
        false if meta.blocks() * 512 < meta.len() => {
            return Err(format!(
                "{} is thin: {} of its {} MiB are on the disk",
                path.display(),
                meta.blocks() >> 11,
                meta.len() >> 20
            ));
        }
        false => meta.len(),
    };
    let blocks = sample(&file, bytes).map_err(told)?;
    judge(&blocks).map_err(|why| format!("{} {why}", path.display()))
}

/// A block device's size, as the kernel lists it in sectors.
fn device_bytes(meta: &std::fs::Metadata) -> Result<u64, String> {
    let number = meta.rdev();
    // The split of a device number into major and minor, as glibc has it.
    let major = (number >> 8) & 0xfff | (number >> 32) & !0xfff;
    let minor = number & 0xff | (number >> 12) & !0xff;
    let path = format!("/sys/dev/block/{major}:{minor}/size");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let sectors: u64 = text.trim().parse().map_err(|_| format!("{path}: {text}"))?;
    Ok(sectors * 512)
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
fn judge(blocks: &[Vec<u8>]) -> Result<(), String> {
    if blocks.is_empty() {
        return Err("is empty".to_owned());
    }
    let zeroes = blocks
        .iter()
        .filter(|block| block.iter().all(|byte| *byte == 0));
    let zeroes = zeroes.count();
    if zeroes > 0 {
        return Err(format!(
            "is not filled: {zeroes} of {} blocks looked at are zeroes",
            blocks.len()
        ));
    }
    let distinct: BTreeSet<&Vec<u8>> = blocks.iter().collect();
    if distinct.len() < blocks.len() {
        return Err("repeats itself, which a store below may know".to_owned());
    }
    let entropy = entropy(blocks);
    match entropy >= ENTROPY_MIN {
        true => Ok(()),
        false => Err(format!("can be compressed: {entropy:.2} bits a byte")),
    }
}

/// Bits a byte, by how often each byte occurs.
fn entropy(blocks: &[Vec<u8>]) -> f64 {
    let mut counts = [0u64; 256];
    for byte in blocks.iter().flatten() {
        counts[usize::from(*byte)] += 1;
    }
    let all = counts.iter().sum::<u64>() as f64;
    let shares = counts
        .iter()
        .filter(|count| **count > 0)
        .map(|count| *count as f64 / all);
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
