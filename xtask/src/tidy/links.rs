//! Relative links in Markdown files: the file is there, and so is the heading.

use std::fs::read_to_string;
use std::path::Path;

/// Faults in one Markdown file, which need not be there under its path.
pub(super) fn broken(root: &Path, path: &str, text: &str) -> Vec<String> {
    let folder = root.join(path).parent().unwrap_or(root).to_owned();
    let lacking = |target: &str| {
        let (file, heading) = target.split_once('#').unwrap_or((target, ""));
        let full = folder.join(file);
        let is_elsewhere = file.contains("://") || file.starts_with("mailto:");
        if is_elsewhere || target.is_empty() || !file.is_empty() && !full.exists() {
            return (!is_elsewhere && !target.is_empty()).then_some("file");
        }
        let is_text = file.is_empty() || file.ends_with(".md");
        let other = read_to_string(full).unwrap_or_default();
        let text = if file.is_empty() { text } else { &other };
        let is_known = heading.is_empty() || headings(text).any(|known| known == heading);
        (is_text && !is_known).then_some("heading")
    };
    let targets = prose(text).flat_map(|(number, line)| {
        let ends = line.split("](").skip(1);
        ends.map(move |rest| (number, rest.split([')', ' ']).next().unwrap_or_default()))
    });
    let fault = |(number, target)| {
        let what = lacking(target)?;
        Some(format!("{path}:{number}: link to {target}: no such {what}"))
    };
    targets.filter_map(fault).collect()
}

/// Lines outside of fenced code, numbered from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(number, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence).then_some((number + 1, line))
    })
}

/// Headings as the anchors that GitHub makes of them.
fn headings(text: &str) -> impl Iterator<Item = String> {
    let headings = prose(text).filter(|(_, line)| line.starts_with('#'));
    headings.map(|(_, line)| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let title = title.replace(' ', "-");
        title.replace(|c: char| !c.is_alphanumeric() && c != '-' && c != '_', "")
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
}
