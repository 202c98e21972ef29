//! Links of the built book: each leads to a file that is there, and to a place in it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use cleave_rig::{At, Result, quietly};

use super::copy::resolved;

/// What is checked of one file.
#[derive(Default)]
struct Seen {
    links: Vec<String>,
    anchors: BTreeSet<String>,
}

/// Returns how many links there are, and those that are dead.
pub(super) fn dead(folder: &Path) -> Result<(usize, Vec<String>)> {
    let mut files = BTreeMap::new();
    for path in quietly(folder, "find . -type f -printf %P\\n", &[])?.lines() {
        let seen = match path.ends_with(".html") {
            true => look(&fs::read_to_string(folder.join(path)).at(path)?),
            false => Seen::default(),
        };
        files.insert(path.to_owned(), seen);
    }
    let links = files
        .iter()
        .flat_map(|(path, seen)| seen.links.iter().map(move |link| (path, link)));
    let inner: Vec<_> = links.filter(|(_, link)| !link.contains(':')).collect();
    let faults = inner.iter().filter_map(|(path, link)| {
        let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
        let target = match file {
            "" => (*path).clone(),
            file => resolved(path, file),
        };
        let is_there = files
            .get(&target)
            .is_some_and(|seen| anchor.is_empty() || seen.anchors.contains(anchor));
        (!is_there).then(|| format!("{path}: link to {link}, which is not in the book"))
    });
    Ok((inner.len(), faults.collect()))
}

fn look(html: &str) -> Seen {
    let mut seen = Seen::default();
    for tag in html.split('<').filter_map(|rest| rest.split('>').next()) {
        // The values of attributes stand between quotes, and their names before them.
        let parts: Vec<&str> = tag.split('"').collect();
        for [name, value] in parts.as_chunks::<2>().0 {
            match name.split_whitespace().last() {
                Some("id=") => seen.anchors.extend([(*value).to_owned()]),
                Some("href=" | "src=") => seen.links.push((*value).to_owned()),
                _ => {}
            }
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_link_is_found_by_its_file_or_its_anchor() {
        let folder = std::env::temp_dir().join(format!("xtask-html-{}", std::process::id()));
        fs::create_dir_all(folder.join("a")).unwrap();
        fs::write(folder.join("b.html"), "<h2 class=\"x\" id=\"here\">b</h2>").unwrap();
        let mut found = Vec::new();
        for link in [
            "../b.html",
            "../b.html#here",
            "#self",
            "https://b.c",
            "b.html",
            "../b.html#gone",
            "#none",
        ] {
            let text = format!(
                "<h1 id=\"self\"><a class=\"x\" href=\"{link}\">b</a></h1><img src=\"../b.html\">"
            );
            fs::write(folder.join("a/a.html"), text).unwrap();
            let (_, faults) = dead(&folder).unwrap();
            found.extend(faults.iter().map(|_| link));
        }
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, ["b.html", "../b.html#gone", "#none"]);
    }
}
