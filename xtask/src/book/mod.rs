//! `cargo xtask book`: the pages as HTML, built by mdBook from copies whose links lead to each other.

mod copy;
mod html;
pub(crate) mod index;

use std::fs;
use std::path::{Path, PathBuf};

use cleave_rig::{At, Result, empty_folder, quietly};

use crate::step::{step, unless};

pub(crate) use copy::copy;

/// The version of mdBook for which `docs/book.toml` and `docs/book.css` are written.
const MDBOOK: &str = "0.5.4";

#[derive(clap::Args)]
pub(crate) struct BookArgs {
    /// Write to this folder, which is emptied first [default: target/book/html]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Builds the book and prints where it is.
pub(crate) fn run(root: &Path, request: &BookArgs) -> Result {
    let out = request.out.clone();
    let out = out.unwrap_or_else(|| root.join("target/book/html"));
    let out = std::path::absolute(&out).at(&out)?;
    build(root, &out)?;
    println!("{}", out.join("index.html").display());
    Ok(())
}

/// Builds the book in a folder, which is emptied first.
pub(crate) fn build(root: &Path, out: &Path) -> Result {
    let folder = root.join("target/book");
    let remedy =
        "the list of pages is docs/README.md; a link leads to a page, or to a file that is there";
    step("pages", remedy, || {
        let pages = index::pages(root)?;
        let (copies, fonts) = (folder.join("src"), folder.join("theme/fonts"));
        for folder in [&copies, &fonts] {
            empty_folder(folder)?;
        }
        copy(root, &pages, &copies)?;
        let summary = copies.join("SUMMARY.md");
        fs::write(&summary, index::summary(&pages)).at(&summary)?;
        // Where there is a style of fonts, mdBook leaves its own fonts out: they take more room than the pages.
        for (file, place) in [
            ("book.toml", "book.toml"),
            ("book.css", "theme/fonts/fonts.css"),
        ] {
            fs::copy(root.join("docs").join(file), folder.join(place)).at(file)?;
        }
        Ok(format!("{} pages", pages.len()))
    })?;
    let remedy = "what cargo or mdbook says above";
    step("book", remedy, || {
        let program = mdbook(root)?;
        let line = "{} build {} --dest-dir {}";
        quietly(root, line, &[&program, &folder.display(), &out.display()])?;
        let (links, faults) = html::dead(out)?;
        unless(&faults, format!("{links} links"))
    })
}

/// Returns mdBook of the right version: the one of PATH, or else our own, which is installed first where it is missing.
fn mdbook(root: &Path) -> Result<String> {
    let tools = root.join("target/tools");
    let own = tools.join("bin/mdbook").display().to_string();
    let is_right = |program: &String| {
        let said = quietly(root, "{} --version", &[program]);
        said.is_ok_and(|said| said.trim() == format!("mdbook v{MDBOOK}"))
    };
    if let Some(found) = ["mdbook".to_owned(), own.clone()]
        .into_iter()
        .find(is_right)
    {
        return Ok(found);
    }
    println!("compiling mdbook {MDBOOK} in target/tools, once: it takes a minute or more");
    // An optimised one takes longer to build than it saves.
    let line = "cargo install --locked --debug --config profile.dev.debug=false --root {} --no-default-features \
                --features search mdbook@{}";
    quietly(root, line, &[&tools.display(), &MDBOOK])?;
    Ok(own)
}
