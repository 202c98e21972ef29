//! Copies of all pages in one folder, each link in them leading to a copy.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use cleave_rig::{At, Result};

use super::index::Chapter;
use crate::markdown::{MarkdownLink, broken, links};

/// Folders of the sources, whose files no reader of the pages has.
const SOURCES: [&str; 3] = ["crates/", "tests/", "benchmarks/"];

/// Copies the pages, and other files that they link to, into a folder. Fails if a link leads nowhere there.
pub(crate) fn copy(root: &Path, pages: &[Chapter], folder: &Path) -> Result {
    let mut others = BTreeSet::new();
    for page in pages {
        let file = root.join(&page.path);
        let text = fs::read_to_string(&file).at(&file)?;
        let text = rewritten(pages, page, &text, &mut others);
        write(&folder.join(&page.place), text.as_bytes())?;
    }
    for path in others {
        let bytes = fs::read(root.join(&path)).at(&path)?;
        write(&folder.join(place(&path)), &bytes)?;
    }
    let mut faults = Vec::new();
    for page in pages {
        let file = folder.join(&page.place);
        let text = fs::read_to_string(&file).at(&file)?;
        faults.extend(broken(folder, &page.place, &text));
    }
    match faults.is_empty() {
        true => Ok(()),
        false => Err(faults.join("\n")),
    }
}

fn write(file: &Path, bytes: &[u8]) -> Result {
    let folder = file.parent().unwrap_or(file);
    fs::create_dir_all(folder).at(folder)?;
    fs::write(file, bytes).at(file)
}

/// Returns the text of a page with the links of its copy; adds the files that are no pages and are linked to.
fn rewritten(
    pages: &[Chapter],
    page: &Chapter,
    text: &str,
    others: &mut BTreeSet<String>,
) -> String {
    let (mut copy, mut done) = (String::new(), 0);
    for link in links(text) {
        let (file, heading) = link.file_and_heading();
        if file.is_empty() || link.is_elsewhere() {
            continue;
        }
        let path = resolved(&page.path, file);
        let place = match pages.iter().find(|other| other.path == path) {
            Some(other) => Some(other.place.clone()),
            None if link.is_picture || !SOURCES.iter().any(|folder| path.starts_with(folder)) => {
                let place = place(&path).to_owned();
                others.insert(path.clone());
                Some(place)
            }
            None => None,
        };
        let replacement = match place {
            Some(place) => {
                let mark = if heading.is_empty() { "" } else { "#" };
                let target = relative(&page.place, &place);
                format!("[{}]({target}{mark}{heading})", link.text)
            }
            None => plain(&link, &path),
        };
        copy += &text[done..link.place.start];
        copy += &replacement;
        done = link.place.end;
    }
    copy + &text[done..]
}

/// Returns where a file that is not a page is copied to.
fn place(path: &str) -> &str {
    path.strip_prefix("docs/").unwrap_or(path)
}

/// Names a file of the sources: by its path alone where the text of the link is the end of it.
fn plain(link: &MarkdownLink<'_>, path: &str) -> String {
    match path.ends_with(link.text.trim_matches('`')) {
        true => format!("`{path}`"),
        false => format!("{} [`{path}`]", link.text),
    }
}

/// Returns the path from the root of what `file` means in the page `page`.
pub(super) fn resolved(page: &str, file: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in file.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

/// Returns how the page `page` names `file`, both paths from one root.
fn relative(page: &str, file: &str) -> String {
    let (mut from, mut to) = (page, file);
    while let (Some((mine, rest)), Some((other, remainder))) =
        (from.split_once('/'), to.split_once('/'))
        && mine == other
    {
        (from, to) = (rest, remainder);
    }
    "../".repeat(from.matches('/').count()) + to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_leads_to_the_copy_of_its_page_or_names_the_source() {
        let index = "# D\n\n[Node](node.md) [Spinning](design/spin.md) [Spin C](design/c.md) [Security policy](../SECURITY.md)";
        let pages = super::super::index::listed(index);
        let mut others = BTreeSet::new();
        for (path, text, expected) in [
            (
                "docs/design/spin.md",
                "[a](../node.md#b)",
                "[a](../node.md#b)",
            ),
            ("docs/design/spin.md", "[a](c.md)", "[a](c.md)"),
            ("docs/design/spin.md", "[a](#b)", "[a](#b)"),
            (
                "docs/node.md",
                "x [a\nb](../SECURITY.md) y",
                "x [a\nb](security-policy.md) y",
            ),
            (
                "SECURITY.md",
                "[a](docs/design/spin.md)",
                "[a](design/spin.md)",
            ),
            ("SECURITY.md", "[a](https://b.c/d)", "[a](https://b.c/d)"),
            (
                "docs/node.md",
                "[`unit`](../dist/unit)",
                "[`unit`](dist/unit)",
            ),
            ("docs/node.md", "[`a.rs`](../crates/a.rs)", "`crates/a.rs`"),
            (
                "docs/node.md",
                "([raw](../benchmarks/a.json))",
                "(raw [`benchmarks/a.json`])",
            ),
            (
                "docs/design/spin.md",
                "![a](../../benchmarks/a.svg)",
                "![a](../benchmarks/a.svg)",
            ),
        ] {
            let page = pages.iter().find(|page| page.path == path).unwrap();
            assert_eq!(
                rewritten(&pages, page, text, &mut others),
                expected,
                "{text}"
            );
        }
        assert_eq!(
            others.into_iter().collect::<Vec<_>>(),
            ["benchmarks/a.svg", "dist/unit"]
        );
    }
}
