//! `cargo xtask ci`, `tidy` and `check`: checks in the order that finds the cheapest fault first.

use std::path::Path;

use cargo_metadata::Package;
use cleave_rig::{Result, quietly};
use itertools::Itertools;

use crate::step::step;
use crate::tidy::{self, packages};

/// The processor for which Cleave is built besides that of most hosts.
const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// Everything that a commit has to pass, save its tests.
pub(crate) fn run(root: &Path) -> Result {
    run_tidy(root)?;
    clippy(root, "--workspace")?;
    step("aarch64", "fix what does not compile there", || {
        aarch64(root)
    })?;
    step("fuzz targets", "fix what does not compile", || {
        let line = "cargo check --quiet --locked --manifest-path fuzz/Cargo.toml --target-dir {}";
        quietly(root, line, &[&root.join("target/fuzz/check").display()])
    })?;
    step("documentation", "fix the named links and comments", || {
        let line = "env RUSTDOCFLAGS={} cargo doc --workspace --no-deps --locked --quiet";
        quietly(root, line, &[&"-D warnings"])
    })
}

/// The checks that need no compiler.
pub(crate) fn run_tidy(root: &Path) -> Result {
    step("formatting", "cargo fmt --all", || {
        quietly(root, "cargo fmt --all --check", &[])
    })?;
    let rules = "see CONTRIBUTING.md for the rules and their reasons";
    let metadata = packages::load(root)?;
    let remedy = "drop the dependency, or add its licence in xtask/src/tidy/packages.rs";
    step("licences", remedy, || packages::check_licences(&metadata))?;
    step("dependencies", rules, || packages::check_arrows(&metadata))?;
    let remedy = "cargo update --workspace --manifest-path fuzz/Cargo.toml";
    step("fuzz lock", remedy, || {
        let line = "cargo update --quiet --workspace --locked --manifest-path fuzz/Cargo.toml";
        quietly(root, line, &[])
    })?;
    step("house rules", rules, || tidy::check(root))
}

/// The checks and the unit tests of the packages that differ from the main branch. The packages that depend on
/// them are left to `ci` and `test`, because this has to take seconds.
pub(crate) fn run_changed(root: &Path) -> Result {
    run_tidy(root)?;
    let metadata = packages::load(root)?;
    let changed = changed(root, &metadata.workspace_packages())?;
    if changed.is_empty() {
        println!("no package has changed");
        return Ok(());
    }
    let mut names = changed.iter().map(|package| &package.name);
    let names = names.join(" --package ");
    clippy(root, &format!("--package {names}"))?;
    // Cargo refuses --lib where no package has a library.
    let mut targets = changed.iter().flat_map(|package| &package.targets);
    let kinds = match targets.any(|target| target.is_lib()) {
        true => "--bins --lib",
        false => "--bins",
    };
    step("unit tests", "fix the code or its test", || {
        let words = format!("cargo test --locked --quiet --package {names} {kinds}");
        quietly(root, &words, &[])?;
        Ok(names.replace("--package ", ""))
    })
}

/// Packages with a file that differs from the main branch, or that is not committed.
fn changed<'a>(root: &Path, own: &[&'a Package]) -> Result<Vec<&'a Package>> {
    let base = quietly(root, "git merge-base HEAD origin/main", &[]);
    let base = base.unwrap_or_else(|_| "HEAD".to_owned());
    let mut files = quietly(root, "git diff --name-only {}", &[&base.trim()])?;
    files += &quietly(root, "git ls-files --others --exclude-standard", &[])?;
    let in_folder = |folder: &Path| {
        let manifest = folder.join("Cargo.toml");
        own.iter().find(|package| package.manifest_path == manifest)
    };
    // A file belongs to the innermost of nested packages.
    let owner = |file: &str| root.join(file).ancestors().find_map(in_folder);
    let changed = files.lines().filter_map(owner).copied();
    Ok(changed.unique_by(|package| &package.id).collect())
}

/// Checks that the daemon compiles for aarch64, where the standard library for it is installed.
fn aarch64(root: &Path) -> Result<String> {
    let folder = quietly(root, "rustc --print target-libdir --target {}", &[&AARCH64])?;
    if !Path::new(folder.trim()).is_dir() {
        return Ok(format!("left out; it needs: rustup target add {AARCH64}"));
    }
    let line = "cargo check --quiet --locked --package cleave --target {} --target-dir {}";
    let to = root.join("target/aarch64");
    quietly(root, line, &[&AARCH64, &to.display()])
}

fn clippy(root: &Path, packages: &str) -> Result {
    let remedy = "fix the code, or allow the lint with a reason";
    let words = format!("cargo clippy {packages} --all-targets --locked --quiet -- -D warnings");
    step("clippy", remedy, || quietly(root, &words, &[]))
}
