//! What the description of a disk says about its workers: the tuning that follows from it.

use std::num::NonZeroU32;

use cleave_config::{DiskConfig, Names, SplitOption};
use cleave_disk::{Disk, format_size};
use cleave_probe::{Profile, ProfileError};
use cleave_worker::{Coalesce, Prior, Split, Tuning};

use crate::failure::Failure;

/// The tuning of the workers of a disk that split large requests so.
pub(crate) fn tuning(config: &DiskConfig, split: Split) -> Tuning {
    Tuning {
        completion: config.completion.get().into(),
        spin_cpu_max: config.spin_cpu_max.get().get(),
        spin_cpu_total: config.spin_cpu_total.get().0.map(|total| total.get()),
        spin_rate_min: config.spin_rate_min.get().get(),
        spin_worth: config.spin_worth.get().get(),
        coalesce: Coalesce {
            us: config.coalesce_us.get().get(),
            max: config.coalesce_max.get().get(),
        },
        on_error: config.on_error.get().policy(),
        limits: config.limits.get().values,
        ..Tuning::new(split)
    }
}

/// The way in which the workers of this disk split large requests at start.
pub(crate) fn split_for(config: &DiskConfig, disk: &Disk, names: Names) -> Result<Split, Failure> {
    let limits = disk.limits();
    let path = match (config.split.get(), &config.profile) {
        (SplitOption::Off, _) => return Ok(Split::Off),
        (SplitOption::Fixed(chunk), _) => {
            return fixed(chunk, disk, names).map_err(Failure::input);
        }
        (SplitOption::Auto, None) => return Ok(Split::Auto(Prior::from_limits(limits))),
        (SplitOption::Auto, Some(path)) => path,
    };
    let profile = Profile::load(path, disk).map_err(|error| match &error {
        ProfileError::Unread(_, source) => Failure::unread(&error, source),
        ProfileError::Unfit(_) => Failure::input(&error),
    })?;
    let block = config.block_size.get();
    if block.bytes() > profile.device.block_bytes {
        return Err(Failure::input(format!(
            "profile {} was measured with blocks of {}, and {} is {block}: leave one of the two out",
            path.display(),
            format_size(profile.device.block_bytes.into()),
            names.of("block_size"),
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

/// Pieces of this size, if the disk can be asked for them.
pub(crate) fn fixed(chunk: NonZeroU32, disk: &Disk, names: Names) -> Result<Split, String> {
    let limits = disk.limits();
    let block_bytes = limits.block_bytes.max(limits.offset_align_bytes);
    if chunk.get() >= block_bytes {
        return Ok(Split::Fixed(chunk));
    }
    let block = format_size(block_bytes.into());
    Err(format!(
        "{}{} is below the block of disk {}; give {block} or more",
        names.about("split"),
        format_size(chunk.get().into()),
        disk.name()
    ))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use cleave_config::Size;
    use cleave_disk::OpenOptions;

    use super::*;

    fn disk(block_bytes: u32) -> Disk {
        let options = OpenOptions {
            block_bytes,
            ..OpenOptions::default()
        };
        Disk::open(&"ram:1M".parse().unwrap(), &options).unwrap()
    }

    fn split(how: &str, profile: Option<&str>, block_bytes: u32) -> Result<Split, Failure> {
        let config = DiskConfig {
            split: how.parse::<SplitOption>().unwrap().into(),
            profile: profile.map(PathBuf::from),
            ..DiskConfig::default()
        };
        split_for(&config, &disk(block_bytes), Names::Options)
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
        let split = |bytes: u32| {
            let block_size: Size<512, 65_536> = bytes.to_string().parse().unwrap();
            let config = DiskConfig {
                block_size: block_size.into(),
                profile: Some(path.clone()),
                ..DiskConfig::default()
            };
            split_for(&config, &disk(bytes), Names::Options)
        };
        assert!(split(512).is_ok());
        let failure = split(4096).unwrap_err();
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
        // The second may be there later.
        for (how, profile, part, code) in [
            ("4K", None, "below the block", 2),
            ("auto", Some("/none/p"), "/none/p", 1),
        ] {
            let failure = split(how, profile, 8192).unwrap_err();
            assert_eq!(failure.exit_code(), std::process::ExitCode::from(code));
            assert!(failure.to_string().contains(part), "{failure}");
        }
    }
}
