//! Links and headings of Markdown pages, outside of code.

use std::fs::read_to_string;
use std::iter::repeat_n;
use std::ops::Range;
use std::path::Path;

/// A link or a picture: `[text](target)`.
pub(crate) struct MarkdownLink<'a> {
    /// Bytes of the page from the first bracket to the last.
    pub(crate) place: Range<usize>,
    pub(crate) text: &'a str,
    /// File and heading, without a title.
    pub(crate) target: &'a str,
    pub(crate) is_picture: bool,
}

impl MarkdownLink<'_> {
    /// Returns true if it leads out of this checkout.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.target.contains("://") || self.target.starts_with("mailto:")
    }

    /// Returns the file, which is empty for the page itself, and the heading.
    pub(crate) fn file_and_heading(&self) -> (&str, &str) {
        self.target.split_once('#').unwrap_or((self.target, ""))
    }
}

/// Returns the links of a page in their order.
pub(crate) fn links(text: &str) -> Vec<MarkdownLink<'_>> {
    let (mut links, mut opened) = (Vec::new(), Vec::new());
    let prose = without_code(text);
    for (at, byte) in prose.bytes().enumerate() {
        let start = match byte {
            b'[' => {
                opened.push(at);
                continue;
            }
            b']' => opened.pop(),
            _ => continue,
        };
        let target = prose.get(at..).and_then(|rest| rest.strip_prefix("]("));
        let length = target.and_then(|target| target.find(')'));
        if let (Some(start), Some(length)) = (start, length) {
            let target = &text[at + 2..][..length];
            links.push(MarkdownLink {
                place: start..at + 3 + length,
                text: &text[start + 1..at],
                target: target.split(' ').next().unwrap_or_default(),
                is_picture: prose[..start].ends_with('!'),
            });
        }
    }
    links
}

/// Returns a page of the same length whose code is blank.
fn without_code(text: &str) -> String {
    let mut prose = String::with_capacity(text.len());
    for (is_code, line) in lines(text) {
        match is_code {
            true => prose.extend(repeat_n(' ', line.len() - 1).chain(['\n'])),
            false => prose += line,
        }
    }
    let mut at = 0;
    while let Some(start) = prose[at..].find('`').map(|found| at + found) {
        let rest = &prose[start..];
        let ticks = rest.len() - rest.trim_start_matches('`').len();
        // A span ends with as many ticks as it begins with, in its paragraph.
        let paragraph = rest.split("\n\n").next().unwrap_or(rest);
        let runs = paragraph.match_indices(&rest[..ticks]);
        let end = runs.map(|(end, _)| end).find(|&end| {
            let after = &paragraph[end + ticks..];
            end >= ticks && !paragraph[..end].ends_with('`') && !after.starts_with('`')
        });
        let length = match end {
            Some(end) => end + ticks,
            None => ticks,
        };
        if end.is_some() {
            prose.replace_range(start..start + length, &" ".repeat(length));
        }
        at = start + length;
    }
    prose
}

/// Returns the faults of the links in one Markdown file, which need not be there under its path: the file is missing, or the
/// heading in it.
pub(crate) fn broken(root: &Path, path: &str, text: &str) -> Vec<String> {
    let folder = root.join(path).parent().unwrap_or(root).to_owned();
    let lacking = |link: &MarkdownLink<'_>| {
        let (file, heading) = link.file_and_heading();
        let full = folder.join(file);
        if link.is_elsewhere() || link.target.is_empty() {
            return None;
        }
        if !file.is_empty() && !full.exists() {
            return Some("file");
        }
        let is_text = file.is_empty() || file.ends_with(".md");
        let other = read_to_string(full).unwrap_or_default();
        let text = if file.is_empty() { text } else { &other };
        let is_known = heading.is_empty() || headings(text).any(|known| known == heading);
        (is_text && !is_known).then_some("heading")
    };
    let links = links(text);
    let faults = links.iter().filter_map(|link| {
        let (what, target) = (lacking(link)?, link.target);
        let number = text[..link.place.end].matches('\n').count() + 1;
        Some(format!("{path}:{number}: link to {target}: no such {what}"))
    });
    faults.collect()
}

/// Returns the title of a page.
pub(crate) fn title(text: &str) -> &str {
    let first = text.lines().next().unwrap_or_default();
    first.trim_start_matches('#').trim()
}

/// Returns the anchor that GitHub and mdBook make of a heading.
pub(crate) fn anchor(heading: &str) -> String {
    let anchor = heading.to_lowercase().replace(' ', "-");
    anchor.replace(|c: char| !c.is_alphanumeric() && c != '-' && c != '_', "")
}

fn headings(text: &str) -> impl Iterator<Item = String> {
    let prose = lines(text).filter(|(is_code, line)| !is_code && line.starts_with('#'));
    prose.map(|(_, line)| anchor(line.trim_start_matches('#').trim()))
}

/// Lines with their ends; true for those of fenced code.
fn lines(text: &str) -> impl Iterator<Item = (bool, &str)> {
    let mut fenced = false;
    text.split_inclusive('\n').map(move |line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (fenced || fence, line)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_resolve_from_the_folder_of_their_file_and_to_a_heading() {
        for (text, count) in [
            ("[a](ARCHITECTURE.md)", 0),
            ("[b](./qemu.md), [up](../README.md), [all](../docs)", 0),
            ("[gone](gone.md)", 1),
            ("[wrong folder](CHANGELOG.md)", 1),
            ("[web](https://example.org/gone.md)", 0),
            ("```\n[gone](gone.md)\n```", 0),
            ("[a](../CONTRIBUTING.md#what-cargo-xtask-ci-checks)", 0),
            ("[a](../CONTRIBUTING.md#none)", 1),
            ("## Here, `it` is\n[self](#here-it-is)", 0),
            ("```\n# here\n```\n[self](#here)", 1),
        ] {
            let faults = broken(&cleave_rig::root(), "docs/a.md", text);
            assert_eq!(faults.len(), count, "{text}: {faults:?}");
        }
    }

    #[test]
    fn a_link_has_its_text_in_brackets_and_is_not_in_code() {
        let found = |text| {
            let links = links(text);
            let links = links.iter().map(|link| {
                let mark = if link.is_picture { "!" } else { "" };
                format!(
                    "{mark}{}={}@{}",
                    link.text,
                    link.target,
                    &text[link.place.clone()]
                )
            });
            links.collect::<Vec<_>>().join(" ")
        };
        for (text, expected) in [
            ("a [b\nc](d#e) f", "b\nc=d#e@[b\nc](d#e)"),
            ("([`b`](d))", "`b`=d@[`b`](d)"),
            ("ä [[b]](d)", "[b]=d@[[b]](d)"),
            ("![b](d.svg \"title\")", "!b=d.svg@[b](d.svg \"title\")"),
            ("`[b](d)` [e](f)", "e=f@[e](f)"),
            ("``[`b`](d)`` [e](f)", "e=f@[e](f)"),
            ("a tick ` and\n\n[e](f) another `", "e=f@[e](f)"),
            ("a[0] (b)", ""),
        ] {
            assert_eq!(found(text), expected, "{text}");
        }
    }
}
