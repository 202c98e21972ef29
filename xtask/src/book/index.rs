//! The pages of the book: those that `docs/README.md` links to, in its order.

use std::fs;
use std::path::Path;

use cleave_rig::{At, Result};

use crate::markdown::{anchor, links, title};

/// The list of all pages, and the first of them.
pub(crate) const INDEX: &str = "docs/README.md";

/// One page of the book.
pub(crate) struct Chapter {
    /// The heading above the table that lists it.
    shelf: String,
    /// The text of its link in the index.
    title: String,
    /// File in the checkout.
    pub(crate) path: String,
    /// File in the book, and in the packages. Pages from outside of `docs` are called after their titles: a file system that
    /// does not know upper case from lower case holds SECURITY.md and security.md only in two folders.
    pub(crate) place: String,
}

/// Reads the index, which is the first page itself.
pub(crate) fn pages(root: &Path) -> Result<Vec<Chapter>> {
    let file = root.join(INDEX);
    Ok(listed(&fs::read_to_string(&file).at(&file)?))
}

pub(super) fn listed(index: &str) -> Vec<Chapter> {
    let itself = Chapter {
        shelf: String::new(),
        title: title(index).to_owned(),
        path: INDEX.to_owned(),
        place: "README.md".to_owned(),
    };
    let pages = links(index).into_iter().map(|link| {
        let above = index[..link.place.start].rsplit_once("\n## ");
        let shelf = above.map_or("", |(_, rest)| rest.lines().next().unwrap_or_default());
        let (shelf, title) = (shelf.to_owned(), link.text.to_owned());
        let (path, place) = match link.target.strip_prefix("../") {
            Some(outside) => (outside.to_owned(), anchor(&title) + ".md"),
            None => (format!("docs/{}", link.target), link.target.to_owned()),
        };
        Chapter {
            shelf,
            title,
            path,
            place,
        }
    });
    [itself].into_iter().chain(pages).collect()
}

/// Returns mdBook's list of chapters.
pub(super) fn summary(pages: &[Chapter]) -> String {
    let mut text = "# Summary\n\n".to_owned();
    let mut shelf = "";
    for page in pages {
        let (title, place) = (&page.title, &page.place);
        if page.shelf != shelf {
            shelf = &page.shelf;
            text += &format!("\n# {shelf}\n\n");
        }
        // Chapters before the first shelf are no items of a list.
        let mark = if shelf.is_empty() { "" } else { "- " };
        text += &format!("{mark}[{title}]({place})\n");
    }
    text
}

/// Returns the pages of `docs` that the index does not list once, and the links in it that do not say what their page is called.
pub(crate) fn faults(root: &Path, index: &str, files: &[&str]) -> Vec<String> {
    let pages = listed(index);
    let documents = files
        .iter()
        .filter(|file| file.starts_with("docs/") && file.ends_with(".md"));
    let miscounted = documents.filter_map(|file| {
        let count = pages.iter().filter(|page| page.path == **file).count();
        (count != 1)
            .then(|| format!("{INDEX}: it lists {file} {count} times; the book has each page once"))
    });
    let misnamed = pages.iter().filter_map(|page| {
        let text = fs::read_to_string(root.join(&page.path)).unwrap_or_default();
        let (listed, heading) = (&page.title, title(&text));
        let agrees = short(listed) == short(heading);
        (!agrees).then(|| {
            format!(
                "{INDEX}: it calls {} \"{listed}\", and its heading is \"{heading}\"",
                page.path
            )
        })
    });
    miscounted.chain(misnamed).collect()
}

/// Cuts off what explains a title: from its colon, its comma or its bracket on.
fn short(title: &str) -> &str {
    title.split([':', ',', '(']).next().unwrap_or(title).trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Documents\n\n## Use\n\n| [Nodes](node.md) | b |\n\n\
                        ## Inside\n\n| [Security policy](../SECURITY.md) | c |\n";

    #[test]
    fn the_tables_are_the_chapters() {
        let expected = "# Summary\n\n[Documents](README.md)\n\n# Use\n\n- [Nodes](node.md)\n\n# Inside\n\n\
                        - [Security policy](security-policy.md)\n";
        assert_eq!(summary(&listed(TEXT)), expected);
    }

    #[test]
    fn a_page_is_listed_once_and_by_its_title() {
        let root = std::env::temp_dir().join(format!("xtask-index-{}", std::process::id()));
        fs::create_dir_all(root.join("docs")).unwrap();
        for (path, text) in [
            (INDEX, TEXT),
            ("docs/node.md", "# Nodes: many disks"),
            ("docs/lost.md", "# Lost"),
            ("SECURITY.md", "# Safety"),
        ] {
            fs::write(root.join(path), text).unwrap();
        }
        let files = [
            INDEX,
            "docs/node.md",
            "docs/lost.md",
            "docs/a.json",
            "SECURITY.md",
        ];
        let found = faults(&root, TEXT, &files);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("docs/lost.md 0 times"), "{}", found[0]);
        assert!(found[1].contains("\"Safety\""), "{}", found[1]);
    }
}
