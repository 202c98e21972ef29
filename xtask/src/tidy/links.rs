//! Relative links in Markdown files: the file is there, and so is the heading.

/// Faults in one Markdown file; `read` gives the text of what stands at a path from the top folder.
pub(super) fn broken(path: &str, text: &str, read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut faults = Vec::new();
    for (line, target) in links(text) {
        let (file, heading) = target.split_once('#').unwrap_or((&target, ""));
        let full = if file.is_empty() {
            path.to_owned()
        } else {
            beside(path, file)
        };
        match read(&full) {
            None => faults.push(format!("{path}:{line}: link to {target}: no such file")),
            Some(there) => {
                let is_known = heading.is_empty()
                    || !full.ends_with(".md")
                    || headings(&there).iter().any(|known| known == heading);
                if !is_known {
                    faults.push(format!("{path}:{line}: link to {target}: no such heading"));
                }
            }
        }
    }
    faults
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

/// Targets of links and images that lie in this repository.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        for (at, _) in line.match_indices("](") {
            let rest = &line[at + 2..];
            let target = rest.split([')', ' ']).next().unwrap_or_default();
            let is_elsewhere = target.contains("://") || target.starts_with("mailto:");
            if !is_elsewhere && !target.is_empty() {
                found.push((number, target.to_owned()));
            }
        }
    }
    found
}

/// A path relative to the folder of `path`, seen from the top folder.
fn beside(path: &str, target: &str) -> String {
    let mut parts: Vec<&str> = path.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "." | "" => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

/// Headings as the anchors that GitHub makes of them.
fn headings(text: &str) -> Vec<String> {
    prose(text)
        .filter(|(_, line)| line.starts_with('#'))
        .map(|(_, line)| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let is_kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
            title
                .chars()
                .filter(is_kept)
                .map(|c| if c == ' ' { '-' } else { c })
                .collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str) -> usize {
        broken("docs/a.md", text, |path| match path {
            "docs/a.md" => Some(text.to_owned()),
            "docs/b.md" => Some("# The `first`, of two\n```\n# none\n```\n".to_owned()),
            "README.md" | "docs/pictures/c.svg" => Some(String::new()),
            _ => None,
        })
        .len()
    }

    #[test]
    fn links_resolve_from_the_folder_of_their_file() {
        let table = [
            ("[b](b.md)", 0),
            ("[b](./b.md) and [up](../README.md)", 0),
            ("![c](pictures/c.svg \"title\")", 0),
            ("[gone](gone.md)", 1),
            ("[wrong folder](README.md)", 1),
            ("[web](https://example.org/gone.md)", 0),
            ("```\n[gone](gone.md)\n```", 0),
        ];
        for (text, count) in table {
            assert_eq!(faults(text), count, "{text}");
        }
    }

    #[test]
    fn links_to_headings_need_the_heading() {
        assert_eq!(faults("[b](b.md#the-first-of-two)"), 0);
        assert_eq!(faults("[b](b.md#none)"), 1);
        assert_eq!(faults("## Here\n[self](#here)"), 0);
        assert_eq!(faults("[self](#here)"), 1);
    }
}
