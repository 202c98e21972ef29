//! Source packages for Debian and rpm: the files of the commit, and the crates that the programs and `xtask` are built from. They
//! build without network, because `dist/offline.sh` has cargo take the crates from there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use cleave_rig::{At, Result, empty_folder, execute, quietly, setup, words};
use serde_json::Value;

use super::recipe::{self, Recipe, VERSION};
use crate::step::step;

/// List what is compiled: the programs, and the one that packs them; the driver, an example, which gets what tests get.
const COMPILED: [&str; 2] = [
    "cargo tree --locked --package cleave --package cleave-lab --package xtask --edges normal,build --prefix none",
    "cargo tree --locked --package cleave-client --edges normal,build,dev --prefix none",
];

/// The packages are built on either.
const PLATFORMS: &str = "--target x86_64-unknown-linux-gnu --target aarch64-unknown-linux-gnu";

/// The source of a crate that is not compiled. Its manifest stays, because cargo reads those of the whole lock file.
const LEFT_OUT: &str = "// The source is left out: nothing of the package is built from it.\n";

/// Packs a folder so that the archive is the same everywhere: one thread, one order, one owner, one time.
const PACK: &str = "env XZ_OPT=-T1 tar --format=gnu --sort=name --owner=0 --group=0 --numeric-owner --mode=go=rX,u+rw \
--mtime=@{} -C {} -cJf {} {}";

/// Source packages in the making.
struct SourcePackages<'a> {
    out: &'a Path,
    /// The unpacked sources, in a folder with the name that they have in the archive.
    unpacked: PathBuf,
    recipe: Recipe,
}

/// Makes the packages and `SHA256SUMS` of the last commit.
pub(super) fn run(root: &Path, out: &Path) -> Result {
    setup::provide_programs(root, &["dpkg-source", "rpmbuild", "xz"])?;
    empty_folder(out)?;
    let unpacked = out.join(format!("cleave-{VERSION}"));
    fs::create_dir(&unpacked).at(&unpacked)?;
    let line = "git archive HEAD | tar -xC \"$0\"";
    quietly(root, "sh -c {} {}", &[&line, &unpacked.display()])?;
    let sources = SourcePackages {
        recipe: Recipe::new(&unpacked, recipe::epoch(root)?)?,
        unpacked,
        out,
    };
    step("sources", "see above", || sources.commit())?;
    step("crates", "see above", || sources.crates())?;
    step("dsc", "see above", || sources.dsc())?;
    step("source rpm", "see above", || sources.rpm())?;
    step("sums", "see above", || sources.sums())?;
    fs::remove_dir_all(&sources.unpacked).at(&sources.unpacked)
}

impl SourcePackages<'_> {
    fn commit(&self) -> Result<String> {
        let name = format!("cleave-{VERSION}");
        self.pack("orig", self.out, &name)
    }

    /// Adds the crates in the folder `vendor`, and packs them by themselves.
    fn crates(&self) -> Result<String> {
        let vendor = self.unpacked.join("vendor");
        let compiled = self.compiled("")?;
        quietly(
            &self.unpacked,
            "cargo vendor --locked --versioned-dirs {}",
            &[&vendor.display()],
        )?;
        let (mut kept, mut left_out) = (0, 0);
        for folder in fs::read_dir(&vendor).at(&vendor)?.flatten() {
            if compiled.contains(&*folder.file_name().to_string_lossy()) {
                leave_tests_out(&folder.path())?;
                kept += 1;
            } else {
                leave_out(&folder.path())?;
                left_out += 1;
            }
        }
        let packed = self.pack("orig-vendor", &self.unpacked, "vendor")?;
        // It has to resolve to the same crates where nothing else is.
        if self.compiled("sh dist/offline.sh ")? != compiled {
            return Err("cargo takes other crates offline".to_owned());
        }
        let target = self.unpacked.join("target");
        fs::remove_dir_all(&target).at(&target)?;
        Ok(format!("{packed}: {kept}, and the manifests of {left_out}"))
    }

    /// Returns the folders in `vendor` of what is compiled, and the names of our own packages.
    fn compiled(&self, wrapper: &str) -> Result<BTreeSet<String>> {
        let lists = COMPILED.map(|list| {
            let line = format!("{wrapper}{list} {PLATFORMS}");
            quietly(&self.unpacked, &line, &[])
        });
        let listed = lists.into_iter().collect::<Result<String>>()?;
        let names = listed.lines().filter_map(|line| {
            let (name, rest) = line.split_once(" v")?;
            let version = rest.split(' ').next()?;
            Some(format!("{name}-{version}"))
        });
        Ok(names.collect())
    }

    fn dsc(&self) -> Result<String> {
        self.recipe.write_debian(&self.unpacked.join("debian"))?;
        let line = "env SOURCE_DATE_EPOCH={} dpkg-source --build {}";
        let folder = self.unpacked.display();
        quietly(self.out, line, &[&self.recipe.epoch, &folder])?;
        Ok(format!("cleave_{VERSION}-1.dsc"))
    }

    fn rpm(&self) -> Result<String> {
        let spec = self.out.join("cleave.spec");
        self.recipe.write_spec(&spec)?;
        let epoch = &self.recipe.epoch;
        // The package has the times and modes of these files.
        let level =
            format!("touch --date=@{epoch} $0 cleave*.orig*.xz && chmod 644 $0 cleave*.orig*.xz");
        quietly(self.out, "sh -c {} cleave.spec", &[&level])?;
        let mut line = words("env SOURCE_DATE_EPOCH={} rpmbuild -bs --nodeps", &[epoch]);
        // It also tells when, where and in which folders it was made.
        let told = [
            "use_source_date_epoch_as_buildtime 1",
            "_buildhost localhost",
            "_topdir rpm",
            "_sourcedir .",
            "_srcrpmdir .",
        ];
        line.extend(told.map(|definition| format!("--define={definition}")));
        line.push("cleave.spec".to_owned());
        execute(self.out, &line)?;
        fs::remove_dir_all(self.out.join("rpm")).at("rpm")?;
        fs::remove_file(&spec).at(&spec)?;
        Ok(format!("cleave-{VERSION}-1.src.rpm"))
    }

    fn sums(&self) -> Result<String> {
        let sum = "sha256sum *.tar.xz *.dsc *.src.rpm > SHA256SUMS";
        quietly(self.out, "sh -c {}", &[&sum])?;
        Ok(self.out.join("SHA256SUMS").display().to_string())
    }

    /// Packs a folder inside another.
    fn pack(&self, kind: &str, inside: &Path, folder: &str) -> Result<String> {
        let name = format!("cleave_{VERSION}.{kind}.tar.xz");
        let (inside, file) = (inside.display(), self.out.join(&name));
        let epoch = &self.recipe.epoch;
        quietly(self.out, PACK, &[epoch, &inside, &file.display(), &folder])?;
        let bytes = fs::metadata(&file).at(&file)?.len();
        Ok(format!("{name}, {} KiB", bytes / 1024))
    }
}

/// Reduces a crate to its manifest.
fn leave_out(folder: &Path) -> Result {
    let manifest = folder.join("Cargo.toml");
    let text = fs::read(&manifest).at(&manifest)?;
    forget(folder, |_| true)?;
    let source = folder.join("src/lib.rs");
    empty_folder(&folder.join("src"))?;
    fs::write(&source, LEFT_OUT).at(&source)?;
    fs::write(&manifest, text).at(&manifest)
}

/// Removes the tests of a crate, which may hold programs that nobody can build again.
fn leave_tests_out(folder: &Path) -> Result {
    forget(folder, |file| file.starts_with("tests/"))
}

/// Removes files of a crate, and their checksums, which cargo compares.
fn forget(folder: &Path, is_forgotten: impl Fn(&str) -> bool) -> Result {
    let list = folder.join(".cargo-checksum.json");
    let text = fs::read(&list).at(&list)?;
    let mut sums: Value = serde_json::from_slice(&text).at(&list)?;
    let files = sums.get_mut("files").and_then(Value::as_object_mut);
    let files = files.ok_or("a crate without checksums")?;
    for file in files.keys().filter(|file| is_forgotten(file)) {
        fs::remove_file(folder.join(file)).at(folder.join(file))?;
    }
    files.retain(|file, _| !is_forgotten(file));
    fs::write(&list, sums.to_string()).at(&list)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUMS: &str =
        r#"{"files":{"Cargo.toml":"1","src/lib.rs":"2","tests/a.dll":"3"},"package":"4"}"#;

    /// Makes a crate as `cargo vendor` does, and returns its files and checksums after `change`.
    fn changed(name: &str, change: fn(&Path) -> Result) -> (Vec<&'static str>, String) {
        let root = std::env::temp_dir().join(format!("cleave-{name}-{}", std::process::id()));
        let files = ["Cargo.toml", "src/lib.rs", "tests/a.dll"];
        for file in files {
            let file = root.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "as published").unwrap();
        }
        let sums = root.join(".cargo-checksum.json");
        fs::write(&sums, SUMS).unwrap();
        change(&root).unwrap();
        let is_kept =
            |file: &&str| fs::read(root.join(file)).is_ok_and(|text| text == b"as published");
        let kept = files.into_iter().filter(is_kept).collect();
        let sums = fs::read_to_string(sums).unwrap();
        fs::remove_dir_all(root).unwrap();
        (kept, sums)
    }

    #[test]
    fn a_crate_that_is_compiled_loses_its_tests_and_any_other_all_but_its_manifest() {
        let (kept, sums) = changed("compiled", leave_tests_out);
        assert_eq!(kept, ["Cargo.toml", "src/lib.rs"]);
        assert_eq!(sums, SUMS.replace(r#","tests/a.dll":"3""#, ""));
        let (kept, sums) = changed("left-out", leave_out);
        assert_eq!(kept, ["Cargo.toml"]);
        assert_eq!(sums, r#"{"files":{},"package":"4"}"#);
    }
}
