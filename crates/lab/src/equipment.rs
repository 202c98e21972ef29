//! The programs that measure and are measured, and the folder of all files that a run leaves: those of the checkout, which cargo
//! builds first, or those of the package, which are installed beside this program.

use std::path::{Path, PathBuf};

use cleave_rig::setup::{self, MissingProgram};
use cleave_rig::{At, Result, built, quietly};
use serde_json::{Value, json};

use crate::pace::BenchPace;

/// The driver, seen from the folder above that of this program. It tells an installed program from one in a target folder.
const INSTALLED_DRIVE: &str = "libexec/cleave-lab/drive";

/// Programs, and where files go.
#[derive(Clone)]
pub(crate) struct Equipment {
    origin: Origin,
    /// Holds results below `bench`, disks, kernels and sockets.
    folder: PathBuf,
}

/// Source of the daemon and of the driver.
#[derive(Clone, Debug, PartialEq)]
enum Origin {
    /// The top folder of a checkout.
    Checkout(PathBuf),
    /// The folder of `bin` and `libexec`: `/usr`.
    Package(PathBuf),
}

impl Equipment {
    /// Finds the equipment by the place of this program. Files go below the checkout's target folder, or below
    /// `cleave-lab` in the current folder.
    pub(crate) fn find() -> Result<Equipment> {
        let program = std::env::current_exe().at("/proc/self/exe")?;
        let origin = Origin::of(&program, &cleave_rig::root());
        let folder = match &origin {
            Origin::Checkout(root) => root.join("target"),
            Origin::Package(_) => std::path::absolute("cleave-lab").at("cleave-lab")?,
        };
        Ok(Equipment { origin, folder })
    }

    /// Returns the equipment with another folder of all files.
    pub(crate) fn leaving_files_in(self, folder: &Path) -> Result<Equipment> {
        let folder = std::path::absolute(folder).at(folder)?;
        Ok(Equipment { folder, ..self })
    }

    /// Returns what the daemon says of itself; one that is still to be built says nothing.
    pub(crate) fn daemon(&self) -> Result<String> {
        let Origin::Package(_) = &self.origin else {
            return Ok("built from this checkout when a run begins".to_owned());
        };
        let [cleave, _] = self.programs(BenchPace::Full)?;
        let said = quietly(Path::new("/"), "{} --version", &[&cleave.display()])?;
        Ok(format!("{} ({})", said.trim(), cleave.display()))
    }

    /// Returns the folder of all files.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the top folder of the sources.
    pub(crate) fn sources(&self) -> Result<&Path> {
        match &self.origin {
            Origin::Checkout(root) => Ok(root),
            Origin::Package(_) => Err("it needs the sources of cleave and a compiler".to_owned()),
        }
    }

    /// Returns the daemon and the driver.
    pub(crate) fn programs(&self, pace: BenchPace) -> Result<[PathBuf; 2]> {
        match (&self.origin, pace) {
            // The tests have built these already.
            (Origin::Checkout(root), BenchPace::Smoke) => built::programs(root),
            (Origin::Checkout(root), _) => built::for_release(root),
            (Origin::Package(folder), _) => {
                let cleave = folder.join("bin/cleave");
                match cleave.is_file() {
                    true => Ok([cleave, folder.join(INSTALLED_DRIVE)]),
                    false => Err(format!(
                        "there is no {}; install the package cleave",
                        cleave.display()
                    )),
                }
            }
        }
    }

    /// Describes how those programs were built.
    pub(crate) fn built_for(&self, pace: BenchPace) -> &'static str {
        match (&self.origin, pace) {
            (Origin::Package(_), _) => "release (the installed package)",
            (_, BenchPace::Smoke) => "tests: its figures say nothing",
            _ => "release",
        }
    }

    /// Returns which of the programs of others are missing. In a checkout they are installed first, and the error is why
    /// that failed.
    pub(crate) fn provide(&self, programs: &[&str]) -> Result<Vec<MissingProgram>> {
        match &self.origin {
            Origin::Checkout(root) => setup::provide_programs(root, programs).map(|()| Vec::new()),
            Origin::Package(_) => Ok(setup::missing(programs)),
        }
    }

    /// Returns the facts that tell these programs from those of another run.
    pub(crate) fn revision(&self) -> Value {
        let Origin::Checkout(root) = &self.origin else {
            return json!({ "revision": format!("package {}", env!("CARGO_PKG_VERSION")) });
        };
        let said = |line: &str| {
            let text = quietly(root, line, &[]);
            text.unwrap_or_else(|why| format!("unknown: {why}"))
                .lines()
                .next()
                .unwrap_or_default()
                .to_owned()
        };
        let changes = quietly(root, "git status --porcelain", &[]);
        json!({
            "revision": said("git rev-parse HEAD"),
            "has_uncommitted_changes": changes.map_or(Value::Null, |text| json!(!text.is_empty())),
            "rustc": said("rustc --version"),
        })
    }
}

impl Origin {
    fn of(program: &Path, checkout: &Path) -> Origin {
        let installed = program.ancestors().nth(2);
        let installed = installed.filter(|folder| folder.join(INSTALLED_DRIVE).is_file());
        installed.map_or(Origin::Checkout(checkout.to_owned()), |folder| {
            Origin::Package(folder.to_owned())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_installed_program_takes_the_programs_beside_it() {
        let usr = std::env::temp_dir().join(format!("cleave-lab-usr-{}", std::process::id()));
        let program = usr.join("bin/cleave-lab");
        let checkout = Path::new("/checkout");
        let before = Origin::of(&program, checkout);
        assert_eq!(before, Origin::Checkout(checkout.to_owned()));
        let drive = usr.join(INSTALLED_DRIVE);
        std::fs::create_dir_all(drive.parent().unwrap()).unwrap();
        std::fs::write(&drive, "").unwrap();
        let equipment = Equipment {
            origin: Origin::of(&program, checkout),
            folder: usr.clone(),
        };
        assert_eq!(equipment.origin, Origin::Package(usr.clone()));
        assert!(equipment.sources().is_err());
        let why = equipment.programs(BenchPace::Full).unwrap_err();
        assert!(why.contains("install the package cleave"), "{why}");
        let cleave = usr.join("bin/cleave");
        std::fs::create_dir_all(cleave.parent().unwrap()).unwrap();
        std::fs::write(&cleave, "").unwrap();
        assert_eq!(equipment.programs(BenchPace::Full), Ok([cleave, drive]));
        std::fs::remove_dir_all(usr).unwrap();
    }
}
