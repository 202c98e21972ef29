//! What Debian and rpm are told about the packages: the folder `debian` and the spec, filled in from the templates in `dist`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cleave_rig::{At, Result, empty_folder, quietly};

pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Files of the folder `debian`, and the templates that they are made from.
const DEBIAN: &str = "\
dist/debian/changelog changelog
dist/debian/control control
dist/debian/cleave-lab.lintian-overrides cleave-lab.lintian-overrides
dist/debian/cleave.lintian-overrides cleave.lintian-overrides
dist/debian/rules rules
dist/debian/source/format source/format
dist/debian/source/lintian-overrides source/lintian-overrides
dist/copyright copyright
dist/postinst postinst
dist/postrm postrm
dist/prerm prerm";

/// The sources, and their time.
pub(super) struct Recipe {
    root: PathBuf,
    /// Seconds since 1970: the time of all files, so that the same sources give the same packages.
    pub(super) epoch: String,
    /// The time as Debian writes it.
    date: String,
}

/// Returns the time of the sources: what the build of a source package sets, or that of the last commit.
pub(super) fn epoch(root: &Path) -> Result<String> {
    let epoch = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(epoch) => epoch,
        Err(_) => quietly(root, "git log -1 --format=%ct", &[])?,
    };
    Ok(epoch.trim().to_owned())
}

impl Recipe {
    /// Takes the templates of `root`.
    pub(super) fn new(root: &Path, epoch: String) -> Result<Recipe> {
        let date = quietly(root, "date --utc --rfc-email --date=@{}", &[&epoch])?;
        Ok(Recipe {
            root: root.to_path_buf(),
            date: date.trim().to_owned(),
            epoch,
        })
    }

    /// Makes the folder `debian`.
    pub(super) fn write_debian(&self, folder: &Path) -> Result {
        empty_folder(folder)?;
        let mut files = DEBIAN.lines().filter_map(|line| line.split_once(' '));
        files.try_for_each(|(from, to)| {
            let (text, to) = (self.filled(from)?, folder.join(to));
            let parent = to.parent().unwrap_or(folder);
            fs::create_dir_all(parent).at(parent)?;
            fs::write(&to, &text).at(&to)?;
            let mode = if text.starts_with("#!") { 0o755 } else { 0o644 };
            fs::set_permissions(&to, fs::Permissions::from_mode(mode)).at(&to)
        })?;
        // Folders too are packed with their modes, which the umask has chosen.
        quietly(folder, "chmod -R u=rwX,go=rX .", &[]).map(drop)
    }

    /// Makes the spec.
    pub(super) fn write_spec(&self, file: &Path) -> Result {
        let mut text = self.filled("dist/cleave.spec")?;
        for script in ["postinst", "prerm"] {
            let lines = self.filled(&format!("dist/{script}"))?;
            text = text.replace(&format!("@{script}@"), &lines);
        }
        fs::write(file, text).at(file)
    }

    fn filled(&self, template: &str) -> Result<String> {
        let file = self.root.join(template);
        let text = fs::read_to_string(&file).at(&file)?;
        let values = [
            ("@version@", VERSION),
            ("@rust@", env!("CARGO_PKG_RUST_VERSION")),
            ("@epoch@", &self.epoch),
            ("@date@", &self.date),
        ];
        Ok(values
            .iter()
            .fold(text, |text, (name, value)| text.replace(name, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What both kinds of packages do about units that had failed, before their files are removed.
    const FORGOTTEN: &str =
        "\nsystemctl reset-failed 'cleave@*' cleave.service 2>/dev/null || true\n";

    #[test]
    fn every_blank_of_the_templates_is_filled() {
        let folder = std::env::temp_dir().join(format!("cleave-recipe-{}", std::process::id()));
        let recipe = Recipe::new(&cleave_rig::root(), "86400".to_owned()).unwrap();
        recipe.write_debian(&folder).unwrap();
        let spec = folder.join("cleave.spec");
        recipe.write_spec(&spec).unwrap();
        let text = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
        let rust = env!("CARGO_PKG_RUST_VERSION");
        for (name, line) in [
            ("changelog", format!("cleave ({VERSION}-1) ")),
            (
                "changelog",
                "  Fri, 02 Jan 1970 00:00:00 +0000\n".to_owned(),
            ),
            ("control", format!("rustc (>= {rust})\n")),
            ("control", "\nPackage: cleave-lab\n".to_owned()),
            ("cleave.spec", format!("\nVersion: {VERSION}\n")),
            ("cleave.spec", "SOURCE_DATE_EPOCH=86400 ".to_owned()),
            ("cleave.spec", "\n%post\n#!/bin/sh\n".to_owned()),
            ("cleave.spec", FORGOTTEN.to_owned()),
            ("prerm", FORGOTTEN.to_owned()),
        ] {
            assert!(text(name).contains(&line), "{name}: {line:?}");
            let blanks = [
                "@version@",
                "@rust@",
                "@epoch@",
                "@date@",
                "@postinst@",
                "@prerm@",
            ];
            assert!(
                !blanks.iter().any(|blank| text(name).contains(blank)),
                "{name}"
            );
        }
        let mode = fs::metadata(folder.join("rules")).unwrap().permissions();
        assert_eq!(mode.mode() & 0o777, 0o755);
        fs::remove_dir_all(folder).unwrap();
    }
}
