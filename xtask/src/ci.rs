//! `cargo xtask ci`, `tidy` and `check`: checks in the order that finds the cheapest fault first.

use std::path::Path;

use cargo_metadata::Package;

use crate::step::{line, step};
use crate::tidy::{self, packages};

/// Everything that a commit has to pass, save its tests.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    run_tidy(root)?;
    clippy(root, "--workspace")?;
    step("documentation", "fix the named links and comments", || {
        let words = "cargo doc --workspace --no-deps --locked --quiet";
        cargo(root, words, &[("RUSTDOCFLAGS", "-D warnings")])
    })
}

/// The checks that need no compiler.
pub(crate) fn run_tidy(root: &Path) -> Result<(), String> {
    step("formatting", "cargo fmt --all", || {
        cargo(root, "cargo fmt --all --check", &[])
    })?;
    let rules = "see CONTRIBUTING.md for the rules and their reasons";
    let metadata = packages::load(root)?;
    step(
        "licences",
        "drop the dependency, or add its licence in xtask/src/tidy/packages.rs",
        || packages::check_licences(&metadata),
    )?;
    step("dependencies", rules, || packages::check_arrows(&metadata))?;
    step("house rules", rules, || tidy::check(root))
}

/// The checks and the unit tests of the packages that differ from the main branch. What depends on them is left to
/// `ci` and `test`, for this has to take seconds.
pub(crate) fn run_changed(root: &Path) -> Result<(), String> {
    run_tidy(root)?;
    let metadata = packages::load(root)?;
    let own = metadata.workspace_packages();
    let changed = changed(root, &own)?;
    if changed.is_empty() {
        println!("no package has changed");
        return Ok(());
    }
    let names = changed
        .iter()
        .map(|package| format!("--package {}", package.name));
    let names = names.collect::<Vec<_>>().join(" ");
    clippy(root, &names)?;
    // Cargo refuses --lib where no package has a library.
    let has_library = |package: &&Package| package.targets.iter().any(|target| target.is_lib());
    let library = if changed.iter().any(has_library) {
        " --lib"
    } else {
        ""
    };
    step("unit tests", "fix the code or its test", || {
        let words = format!("cargo test --locked --quiet {names} --bins{library}");
        cargo(root, &words, &[])?;
        Ok(names.replace("--package ", ""))
    })
}

/// Packages with a file that differs from the main branch, or that is not committed.
fn changed<'a>(root: &Path, own: &[&'a Package]) -> Result<Vec<&'a Package>, String> {
    let base = line(root, "git merge-base HEAD origin/main", &[]);
    let base = base.unwrap_or_else(|_| "HEAD".to_owned());
    let mut files = line(root, &format!("git diff --name-only {}", base.trim()), &[])?;
    files.push_str(&line(
        root,
        "git ls-files --others --exclude-standard",
        &[],
    )?);
    let owner = |file: &str| {
        let file = root.join(file);
        let holds = |package: &&&Package| {
            let folder = package.manifest_path.parent();
            folder.is_some_and(|folder| file.starts_with(folder))
        };
        // Of nested packages the inner one, which has the longer path.
        own.iter()
            .filter(holds)
            .max_by_key(|package| package.manifest_path.as_str().len())
    };
    let mut changed: Vec<&Package> = files.lines().filter_map(owner).copied().collect();
    changed.sort_by_key(|package| &package.name);
    changed.dedup_by_key(|package| &package.id);
    Ok(changed)
}

fn clippy(root: &Path, packages: &str) -> Result<(), String> {
    step(
        "clippy",
        "fix the code, or allow the lint with a reason",
        || {
            let words =
                format!("cargo clippy {packages} --all-targets --locked --quiet -- -D warnings");
            cargo(root, &words, &[])
        },
    )
}

fn cargo(root: &Path, words: &str, environment: &[(&str, &str)]) -> Result<String, String> {
    line(root, words, environment).map(|_| String::new())
}
