//! `cargo xtask ci`: what every commit has to pass, in the order that finds the cheapest fault first.

use std::path::Path;

use crate::metadata::Metadata;
use crate::step::{quietly, step};
use crate::{licence, tidy};

const RUSTDOC_STRICT: (&str, &str) = ("RUSTDOCFLAGS", "-D warnings");

/// All checks; ends at the first that fails.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    run_tidy(root)?;
    lint(root)?;
    step(
        "documentation",
        "fix the links and comments that it names",
        || {
            let words = [
                "cargo",
                "doc",
                "--workspace",
                "--no-deps",
                "--locked",
                "--quiet",
            ];
            quietly(root, &words, &[RUSTDOC_STRICT])?;
            Ok(String::new())
        },
    )
}

/// The checks that need no compiler.
pub(crate) fn run_tidy(root: &Path) -> Result<(), String> {
    step("formatting", "cargo fmt --all", || {
        quietly(root, &["cargo", "fmt", "--all", "--check"], &[])?;
        Ok(String::new())
    })?;
    step(
        "licences",
        "drop the dependency, or add its licence in xtask/src/licence.rs",
        || licence::check(&Metadata::load(root)?),
    )?;
    step(
        "house rules",
        "see CONTRIBUTING.md for the rules and their reasons",
        || tidy::check(root, &Metadata::load(root)?),
    )
}

fn lint(root: &Path) -> Result<(), String> {
    step(
        "clippy",
        "fix what it says, or relax the lint beside a reason",
        || {
            let line = "cargo clippy --workspace --all-targets --locked --quiet -- -D warnings";
            let words: Vec<&str> = line.split(' ').collect();
            quietly(root, &words, &[])?;
            Ok(String::new())
        },
    )
}
