//! The files for the result: refused before anything is measured if it cannot be written there, and
//! written so that a file is either the old one or a whole new one.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use cleave_disk::DiskSpec;
use cleave_host::Failure;
use cleave_probe::ProbeReport;

use super::settings::Probe;
use crate::output::print;
use crate::progress::note;

/// Stands for stdout.
const STDOUT: &str = "-";
/// Most names that are tried for a file beside another.
const NAMES_MAX: u32 = 100;

/// The files asked for, checked.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outputs {
    profile: Option<PathBuf>,
    json: Option<PathBuf>,
    /// In place of the table.
    json_to_stdout: bool,
}

impl Outputs {
    /// Checks that each can be written and is not the disk.
    pub(super) fn new(probe: &Probe) -> Result<Outputs, Failure> {
        let json_to_stdout = probe.json.as_deref() == Some(Path::new(STDOUT));
        let json = probe.json.clone().filter(|_| !json_to_stdout);
        let named = [("--profile", &probe.profile), ("--json", &json)];
        let mut seen: Vec<&Path> = Vec::new();
        for (option, path) in named {
            let Some(path) = path else { continue };
            check(option, path, probe.disk.specs())?;
            if seen.contains(&path.as_path()) {
                return Err(Failure::input(format!("{} is named twice", path.display())));
            }
            seen.push(path);
        }
        Ok(Outputs {
            profile: probe.profile.clone(),
            json,
            json_to_stdout,
        })
    }

    /// Prints and writes all.
    pub(super) fn write(&self, report: &ProbeReport) -> Result<(), Failure> {
        // The files first: stdout may be a pipe that nobody reads.
        for (path, text) in [
            (
                &self.profile,
                ProbeReport::profile as fn(&ProbeReport) -> String,
            ),
            (&self.json, ProbeReport::json),
        ] {
            if let Some(path) = path {
                replace(path, &text(report)).map_err(|error| {
                    Failure::run(format!("cannot write {}: {error}", path.display()))
                })?;
                note(&format!("wrote {}", path.display()));
            }
        }
        print(&match self.json_to_stdout {
            true => report.json(),
            false => cleave_probe::table(report),
        })
    }
}

fn check(option: &str, path: &Path, disks: &[DiskSpec]) -> Result<(), Failure> {
    let refuse = |why: &str| {
        Err(Failure::input(format!(
            "{option} {}: {why}",
            path.display()
        )))
    };
    let is = |disk: &DiskSpec, found: &Path| {
        let path = disk.path().and_then(|path| path.canonicalize().ok());
        path.is_some_and(|path| path == found)
    };
    if path
        .canonicalize()
        .is_ok_and(|found| disks.iter().any(|disk| is(disk, &found)))
    {
        return refuse("that is the disk itself; name another file");
    }
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return refuse("it is there and no file; name another");
    }
    if path.file_name().is_none() || !folder(path).is_dir() {
        return refuse("there is no such folder; make it, or name another file");
    }
    Ok(())
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Writes through a file beside it, so that nobody ever reads half of one.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let (beside, mut file) = create_beside(path)?;
    let written = file.write_all(text.as_bytes());
    let written = written.and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

/// Creates a file beside another. One that is there already is never opened: in a folder of another user it may be a link to a file
/// that only this user may write.
fn create_beside(path: &Path) -> io::Result<(PathBuf, File)> {
    let mut number = 0;
    loop {
        let mut name = std::ffi::OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(format!(".{}.{number}", std::process::id()));
        let beside = folder(path).join(name);
        match File::create_new(&beside) {
            Ok(file) => return Ok((beside, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < NAMES_MAX => {
                number += 1;
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_is_never_the_disk_nor_out_of_reach() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        fs::write(&disk, [0; 512]).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&disk, &link).unwrap();
        let spec = [DiskSpec::Path(disk.clone())];
        for (path, part) in [
            (disk.as_path(), "the disk itself"),
            (&link, "the disk itself"),
            (folder.path(), "no file"),
            (Path::new("/dev/null"), "no file"),
            (Path::new("/none/x"), "no such folder"),
        ] {
            let told = check("--json", path, &spec).unwrap_err().to_string();
            assert!(told.contains(part) && told.starts_with("--json"), "{told}");
        }
        check("--json", &folder.path().join("new"), &spec).unwrap();
        check("--json", Path::new("new.json"), &spec).unwrap();
    }

    #[test]
    fn a_file_is_replaced_whole_and_nothing_lies_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        for text in ["one", "two"] {
            replace(&path, text).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(replace(Path::new("/none/x"), "").is_err());
    }

    #[test]
    fn a_link_that_waits_beside_a_file_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["out", "other"].map(|name| folder.path().join(name));
        fs::write(&other, "theirs").unwrap();
        let pid = std::process::id();
        for name in [format!(".out.{pid}"), format!(".out.{pid}.0")] {
            std::os::unix::fs::symlink(&other, folder.path().join(name)).unwrap();
        }
        replace(&path, "ours").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "ours");
        assert_eq!(fs::read_to_string(&other).unwrap(), "theirs");
    }
}
