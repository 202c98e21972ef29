//! The options for splitting large requests, and the initial setting of a worker that follows from them.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;

use cleave_disk::{Disk, format_size, parse_size};
use cleave_probe::Profile;
use cleave_worker::splitter::{CHUNK_MAX_BYTES, CHUNK_MIN_BYTES};
use cleave_worker::{Prior, Split};

use crate::failure::Failure;

/// `--split` and `--profile`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitArgs {
    pub(crate) split: SplitOption,
    pub(crate) profile: Option<PathBuf>,
}

/// `--split`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SplitOption {
    Off,
    Auto,
    Fixed(NonZeroU32),
}

impl FromStr for SplitOption {
    type Err = String;

    fn from_str(text: &str) -> Result<SplitOption, String> {
        match text {
            "off" => return Ok(SplitOption::Off),
            "auto" => return Ok(SplitOption::Auto),
            _ => {}
        }
        let bytes = parse_size(text).map_err(|why| format!("write off, auto or a size ({why})"))?;
        u32::try_from(bytes)
            .ok()
            .filter(|bytes| bytes.is_power_of_two())
            .filter(|bytes| (CHUNK_MIN_BYTES..=CHUNK_MAX_BYTES).contains(bytes))
            .and_then(NonZeroU32::new)
            .map(SplitOption::Fixed)
            .ok_or_else(|| "a piece is a power of two from 4K to 4M".to_owned())
    }
}

/// The way in which the workers of this disk split large requests at start.
///
/// `block_bytes`: the operator's `--block-size`.
pub(crate) fn split_for(
    args: &SplitArgs,
    disk: &Disk,
    block_bytes: Option<u32>,
) -> Result<Split, Failure> {
    let limits = disk.limits();
    match (args.split, &args.profile) {
        (SplitOption::Off | SplitOption::Fixed(_), Some(profile)) => Err(Failure::input(format!(
            "--profile {} is for --split auto; leave one of the two out",
            profile.display()
        ))),
        (SplitOption::Off, None) => Ok(Split::Off),
        (SplitOption::Fixed(chunk), None) => match check_chunk(chunk, disk) {
            Ok(()) => Ok(Split::Fixed(chunk)),
            Err(why) => Err(Failure::input(format!("--split {why}"))),
        },
        (SplitOption::Auto, None) => Ok(Split::Auto(Prior::from_limits(limits))),
        (SplitOption::Auto, Some(path)) => {
            let profile = Profile::load(path, disk).map_err(Failure::input)?;
            if let Some(bytes) = block_bytes.filter(|bytes| *bytes > profile.device.block_bytes) {
                return Err(Failure::input(format!(
                    "profile {} was measured with blocks of {}, and --block-size is {}: leave one of the two options out",
                    path.display(),
                    format_size(profile.device.block_bytes.into()),
                    format_size(bytes.into()),
                )));
            }
            if profile.partial {
                tracing::warn!(
                    profile = %path.display(),
                    "the profile is partial; what it lacks is learnt while serving"
                );
            }
            Ok(Split::Auto(profile.prior(limits)))
        }
    }
}

/// Whether pieces of this size can be had of a disk.
pub(crate) fn check_chunk(chunk: NonZeroU32, disk: &Disk) -> Result<(), String> {
    let limits = disk.limits();
    let block_bytes = limits.block_bytes.max(limits.offset_align_bytes);
    if chunk.get() >= block_bytes {
        return Ok(());
    }
    let block = format_size(block_bytes.into());
    Err(format!(
        "{} is below the block of disk {}; give {block} or more",
        format_size(chunk.get().into()),
        disk.name()
    ))
}

#[cfg(test)]
mod tests {
    use cleave_disk::OpenOptions;

    use super::*;

    fn disk(block_bytes: u32) -> Disk {
        let options = OpenOptions {
            block_bytes: Some(block_bytes),
            ..OpenOptions::default()
        };
        Disk::open(&"ram:1M".parse().unwrap(), &options).unwrap()
    }

    fn split(how: &str, profile: Option<&str>, block_bytes: u32) -> Result<Split, Failure> {
        let args = SplitArgs {
            split: how.parse().unwrap(),
            profile: profile.map(PathBuf::from),
        };
        split_for(&args, &disk(block_bytes), None)
    }

    #[test]
    fn options_read_as_written() {
        for (text, chunk) in [
            ("4K", 4 << 10),
            ("64k", 64 << 10),
            ("4M", 4 << 20),
            ("8192", 8192),
        ] {
            assert_eq!(
                text.parse(),
                Ok(SplitOption::Fixed(NonZeroU32::new(chunk).unwrap()))
            );
        }
        for text in ["", "on", "0", "2K", "6K", "8M", "4T", "-4K", "OFF"] {
            let why = text.parse::<SplitOption>().unwrap_err();
            assert!(!why.contains('\n') && why.len() < 120, "{why}");
        }
    }

    #[test]
    fn a_profile_for_smaller_blocks_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile");
        let serial = String::from_utf8_lossy(&disk(512).serial())
            .trim_end_matches('\0')
            .to_owned();
        let text = format!(
            "version = 1\npartial = false\nnever = false\n[device]\nname = \"ram:1M\"\nserial = \"{serial}\"\n\
             kind = \"ram\"\nsize_bytes = 1048576\nblock_bytes = 512\ndirect = true\n"
        );
        std::fs::write(&path, text).unwrap();
        let args = SplitArgs {
            split: SplitOption::Auto,
            profile: Some(path),
        };
        assert!(split_for(&args, &disk(512), None).is_ok());
        assert!(split_for(&args, &disk(512), Some(512)).is_ok());
        let failure = split_for(&args, &disk(4096), Some(4096)).unwrap_err();
        assert!(
            failure
                .to_string()
                .contains("measured with blocks of 512, and --block-size is 4K"),
            "{failure}"
        );
    }

    #[test]
    fn a_worker_starts_with_the_split_of_the_options() {
        assert_eq!(split("off", None, 512).unwrap(), Split::Off);
        assert_eq!(
            split("16K", None, 512).unwrap(),
            Split::Fixed(NonZeroU32::new(16 << 10).unwrap())
        );
        let Split::Auto(prior) = split("auto", None, 8192).unwrap() else {
            panic!("not auto")
        };
        assert_eq!((prior.chunk_min_bytes, prior.never), (8192, false));
        for (how, profile, part) in [
            ("4K", None, "below the block"),
            ("off", Some("/p"), "leave one"),
            ("16K", Some("/p"), "leave one"),
            ("auto", Some("/none/p"), "/none/p"),
        ] {
            let failure = split(how, profile, 8192).unwrap_err();
            assert_eq!(failure.exit_code(), std::process::ExitCode::from(2));
            assert!(failure.to_string().contains(part), "{failure}");
        }
    }
}
