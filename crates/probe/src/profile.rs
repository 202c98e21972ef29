//! The result of a probe for a later `serve`: a small TOML file that names its disk.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use cleave_blk::Limits;
use cleave_disk::Disk;
use cleave_worker::splitter::{CHUNK_MAX_BYTES, CHUNK_MIN_BYTES};
use cleave_worker::{DataDirection, Prior};
use serde::Deserialize;

use crate::device::DiskIdentity;
use crate::judge::Judgement;
use crate::report::ProbeReport;

/// Version of the file. An unknown version is refused.
const VERSION: i64 = 1;
/// Maximum size of a file that is read. A profile has one or two KiB.
const LEN_MAX: u64 = 64 << 10;
/// Minimum useful depth, whatever was measured: otherwise a disk that has become faster could never show it.
const USEFUL_DEPTH_MIN: u32 = 16;
/// Maximum number of in-flight ops of a worker.
const USEFUL_DEPTH_MAX: u32 = 1 << 16;

/// Why a profile is refused: a line that names the file and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("cannot read profile {0}: {1}")]
    Unread(String, #[source] io::Error),
    /// The file is not a profile, or not of the disk; a whole line.
    #[error("{0}")]
    Unfit(String),
}

/// A profile, read and checked.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    #[allow(dead_code, reason = "checked before the rest is read")]
    version: i64,
    /// True if points are missing.
    pub partial: bool,
    /// True if this disk must never be split.
    pub never: bool,
    /// The measured disk.
    pub device: DiskIdentity,
    read: Option<ProfileSide>,
    write: Option<ProfileSide>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileSide {
    useful_depth: Option<u32>,
    #[serde(default)]
    chunk: Vec<Chunk>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Chunk {
    request_bytes: u64,
    chunk_bytes: u32,
    #[allow(dead_code, reason = "for the reader of the file")]
    gain: f64,
}

/// The part that determines how to read the rest.
#[derive(Deserialize)]
struct Head {
    version: i64,
}

impl Profile {
    /// Reads the profile, and checks that it is for `disk`.
    pub fn load(path: &Path, disk: &Disk) -> Result<Profile, ProfileError> {
        let shown = path.display();
        let text = read(path).map_err(|error| ProfileError::Unread(shown.to_string(), error))?;
        let profile = Profile::parse(path, &text)?;
        match profile.device.difference(&DiskIdentity::of(disk)) {
            None => Ok(profile),
            Some(difference) => Err(ProfileError::Unfit(format!(
                "profile {shown} is not of disk {}: {difference}; measure again: cleave probe, and open the \
                 disk the same way",
                disk.name()
            ))),
        }
    }

    fn parse(path: &Path, text: &str) -> Result<Profile, ProfileError> {
        let shown = path.display();
        let garbage = |why: String| {
            ProfileError::Unfit(format!(
                "{shown} is not a profile ({why}); give the file that `cleave probe --profile` wrote"
            ))
        };
        let wrong = |error: toml::de::Error| {
            // The first line of the message has the cause; the others show the place.
            let line = error.span().map(|span| {
                text.get(..span.start)
                    .unwrap_or(text)
                    .lines()
                    .count()
                    .max(1)
            });
            let at = line
                .map(|line| format!("line {line}: "))
                .unwrap_or_default();
            garbage(format!(
                "{at}{}",
                error.message().lines().next().unwrap_or("no TOML")
            ))
        };
        let head: Head = toml::from_str(text).map_err(wrong)?;
        if head.version != VERSION {
            return Err(ProfileError::Unfit(format!(
                "profile {shown} has version {}, this cleave knows {VERSION}; measure again: cleave probe",
                head.version
            )));
        }
        let profile: Profile = toml::from_str(text).map_err(wrong)?;
        match profile.fault() {
            None => Ok(profile),
            Some(why) => Err(garbage(why)),
        }
    }

    /// Describes a value that no probe writes, if there is one.
    fn fault(&self) -> Option<String> {
        for side in self.read.iter().chain(&self.write) {
            if let Some(depth) = side.useful_depth
                && !(1..=USEFUL_DEPTH_MAX).contains(&depth)
            {
                return Some(format!("useful_depth = {depth} is out of range"));
            }
            for Chunk {
                request_bytes,
                chunk_bytes,
                ..
            } in &side.chunk
            {
                let is_size = chunk_bytes.is_power_of_two()
                    && (CHUNK_MIN_BYTES..=CHUNK_MAX_BYTES).contains(chunk_bytes)
                    && u64::from(*chunk_bytes) < *request_bytes;
                if !request_bytes.is_power_of_two() || (*chunk_bytes != 0 && !is_size) {
                    return Some(format!(
                        "request_bytes = {request_bytes} with chunk_bytes = {chunk_bytes} is impossible"
                    ));
                }
            }
        }
        None
    }

    /// Returns the splitter's prior knowledge.
    pub fn prior(&self, limits: &Limits) -> Prior {
        let mut prior = Prior::from_limits(limits);
        prior.never = self.never;
        let mut useful_depth = None;
        for (way, side) in [
            (DataDirection::Read, &self.read),
            (DataDirection::Write, &self.write),
        ] {
            let Some(side) = side else { continue };
            useful_depth = useful_depth.max(side.useful_depth);
            let rows = side.chunk.iter();
            let rows = rows.map(|chunk| (way, chunk.request_bytes, chunk.chunk_bytes));
            prior.measured.extend(rows);
        }
        if let Some(depth) = useful_depth {
            prior.useful_depth = depth.max(USEFUL_DEPTH_MIN);
        }
        prior
    }
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?
        .take(LEN_MAX + 1)
        .read_to_string(&mut text)?;
    match text.len() as u64 > LEN_MAX {
        true => Err(io::Error::other("it is too long for a profile")),
        false => Ok(text),
    }
}

impl ProbeReport {
    /// Returns it as a profile for a later `serve`; see [`Profile`].
    pub fn profile(&self) -> String {
        write(self)
    }
}

fn write(report: &ProbeReport) -> String {
    // Writing to a `String` cannot fail, so results of `write!` are dropped.
    let mut text = String::new();
    let device = &report.device;
    let _ = write!(
        text,
        "\
# Performance of this disk, measured by `cleave probe` (cleave {}, Linux {}).
# For `cleave serve --profile FILE`: its splitter starts from these figures and continues to learn.
# Measure again when the disk, its driver or the machine has changed.

version = {VERSION}
# true: the measurement was interrupted; the splitter learns the rest while serving.
partial = {}
# true: never split. Set if the disk is rotational and no size gained from splitting.
never = {}

# The profile is refused for a disk that differs in any of these, except its name. A larger size is allowed.
[device]
name = {}
serial = {}
kind = {}
size_bytes = {}
block_bytes = {}
direct = {}
",
        report.cleave,
        report.host.kernel,
        report.partial,
        is_never(report),
        quoted(&device.name),
        quoted(&device.serial),
        quoted(&device.kind),
        device.size_bytes,
        device.block_bytes,
        device.direct,
    );
    for side in &report.sides {
        let way = crate::matrix::word(side.matrix.direction);
        let _ = write!(text, "\n[{way}]\n");
        if let Some(depth) = side.judgement.useful_depth {
            let _ = write!(
                text,
                "# Number of ops in flight beyond which the disk gets no faster.\nuseful_depth = {depth}\n"
            );
        }
        if !side.judgement.chunks.is_empty() {
            let _ = write!(
                text,
                "\n# {way}s of request_bytes up to twice that: split into chunk_bytes (0: leave whole).\n\
                 # gain: throughput of the best chunk over that of whole requests, at depth 1.\n"
            );
        }
        if side.judgement.unknown > 0 {
            let _ = writeln!(
                text,
                "# Sizes that are not listed are not known to ±10 %; the splitter learns them while serving."
            );
        }
        for chunk in &side.judgement.chunks {
            let _ = write!(
                text,
                "[[{way}.chunk]]\nrequest_bytes = {}\nchunk_bytes = {}\ngain = {:.3}\n",
                chunk.request_bytes, chunk.chunk_bytes, chunk.gain
            );
        }
    }
    text
}

/// Returns true if splitting is ruled out. Requires that the rotational flag agrees with the measurement, because virtual disks
/// and loop devices set it too, and that the measurement is complete and known.
fn is_never(report: &ProbeReport) -> bool {
    let gains_nothing = |judged: &Judgement| !judged.pays && judged.unknown == 0;
    let mut sides = report.sides.iter();
    report.rotational && !report.partial && sides.all(|side| gains_nothing(&side.judgement))
}

/// Returns a TOML basic string.
fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04X}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use cleave_disk::OpenOptions;

    use super::*;
    use crate::judge::tests::{p3700, recorded};
    use crate::report::tests::report;

    fn disk(spec: &str) -> Disk {
        let options = OpenOptions::default();
        Disk::open(&spec.parse().unwrap(), &options).unwrap()
    }

    fn written_for(disk: &Disk) -> String {
        let mut report = report(vec![
            recorded(DataDirection::Read, p3700),
            recorded(DataDirection::Write, |_| 5e8),
        ]);
        report.device = DiskIdentity::of(disk);
        write(&report)
    }

    fn load(text: &str, disk: &Disk) -> Result<Profile, ProfileError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile.toml");
        std::fs::write(&path, text).unwrap();
        Profile::load(&path, disk)
    }

    #[test]
    fn a_written_profile_is_read_back() {
        let disk = disk("ram:1M");
        let profile = load(&written_for(&disk), &disk).unwrap();
        assert!(!profile.partial && !profile.never);
        let prior = profile.prior(disk.limits());
        assert_eq!(prior.useful_depth, 64, "the larger of 64 and 1");
        assert_eq!(prior.measured.len(), 16);
        assert!(
            prior
                .measured
                .contains(&(DataDirection::Write, 512 << 10, 0))
        );
        let read = prior
            .measured
            .iter()
            .find(|m| (m.0, m.1) == (DataDirection::Read, 512 << 10));
        assert!(read.unwrap().2 > 0);
    }

    #[test]
    fn strange_names_survive() {
        let ram = disk("ram:1M");
        let name = "a\"b\\c\nd\u{7f}é'#";
        let mut report = report(vec![]);
        report.device = DiskIdentity {
            name: name.to_owned(),
            ..DiskIdentity::of(&ram)
        };
        assert_eq!(load(&write(&report), &ram).unwrap().device.name, name);
    }

    #[test]
    fn another_version_is_refused_even_with_fields_unknown_here() {
        let ram = disk("ram:1M");
        let text = written_for(&ram).replace("version = 1", "version = 2\nnews = \"x\"");
        let error = load(&text, &ram).unwrap_err().to_string();
        assert!(
            error.contains("version 2") && error.contains("cleave probe"),
            "{error}"
        );
    }

    #[test]
    fn another_disk_is_refused_and_a_grown_one_is_not() {
        let small = disk("ram:1M");
        let text = written_for(&small);
        assert!(load(&text, &disk("ram:2M")).is_ok());
        for (other, part) in [("ram:512K", "size"), ("null:1M", "kind")] {
            let error = load(&text, &disk(other)).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(other), "{error}");
            assert!(!error.contains('\n'));
        }
        for (from, to, part) in [
            ("serial = \"cleave-ram\"", "serial = \"other\"", "the disk"),
            ("block_bytes = 512", "block_bytes = 4096", "smallest op"),
            ("direct = true", "direct = false", "page cache"),
        ] {
            let error = load(&text.replace(from, to), &small)
                .unwrap_err()
                .to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn the_same_file_by_another_path_is_the_same_disk() {
        let folder = tempfile::tempdir().unwrap();
        let (image, link) = (folder.path().join("image"), folder.path().join("link"));
        File::create(&image).unwrap().set_len(1 << 20).unwrap();
        std::os::unix::fs::symlink(&image, &link).unwrap();
        let text = written_for(&disk(image.to_str().unwrap()));
        assert!(load(&text, &disk(link.to_str().unwrap())).is_ok());
    }

    #[test]
    fn garbage_is_reported_in_one_line() {
        let ram = disk("ram:1M");
        let good = written_for(&ram);
        let is_split = |line: &&str| line.starts_with("chunk_bytes") && !line.ends_with(" 0");
        let chunk = good.lines().find(is_split).unwrap();
        let with = |from: &str, to: &str| {
            assert!(good.contains(from), "{from}");
            good.replacen(from, to, 1)
        };
        for text in [
            String::new(),
            "\0\u{1}".to_owned(),
            "{}".to_owned(),
            "version = \"1\"".to_owned(),
            "version = 1".to_owned(),
            with("useful_depth = 64", "useful_depth = 0"),
            with("useful_depth = 64", "useful_depth = -1"),
            with("request_bytes = 32768", "request_bytes = 32769"),
            with(chunk, "chunk_bytes = 8193"),
            with(chunk, "chunk_bytes = 4194304"),
            with(chunk, "chunk_bytes = 8388608"),
            with(chunk, "chunk_bytes = 512"),
            with("partial = false", "partial = 0"),
            with("partial = false", "partial = false\nmore = 1"),
        ] {
            let error = load(&text, &ram).unwrap_err().to_string();
            assert!(error.contains("is not a profile"), "{error}");
            assert!(!error.contains('\n') && error.len() < 300, "{error}");
        }
        let missing = Profile::load(Path::new("/none/p"), &ram)
            .unwrap_err()
            .to_string();
        assert!(missing.contains("/none/p"), "{missing}");
        let long = "#".repeat(LEN_MAX as usize + 1);
        assert!(
            load(&long, &ram)
                .unwrap_err()
                .to_string()
                .contains("too long")
        );
    }

    #[test]
    fn never_needs_a_rotational_disk_without_gain() {
        for (rotational, partial, rate, never) in [
            (false, false, 0.0, false),
            (true, false, 0.0, true),
            (true, true, 0.0, false),
            (true, false, 1.0, false),
        ] {
            let flat = |p: crate::Point| if rate > 0.0 { p3700(p) } else { 5e8 };
            let mut report = report(vec![recorded(DataDirection::Read, flat)]);
            (report.rotational, report.partial) = (rotational, partial);
            assert_eq!(is_never(&report), never);
        }
        // A size that is not known rules nothing out.
        let mut matrix = recorded(DataDirection::Read, |_| 5e8);
        for m in &mut matrix.measured {
            m.error = 0.5;
        }
        let mut report = report(vec![matrix]);
        report.rotational = true;
        assert!(!is_never(&report));
    }
}
