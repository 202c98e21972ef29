//! Relative links in Markdown files: the file is there, and so is the heading.

/// Faults in one Markdown file; `read` gives the text of the file at a path from the top folder.
pub(super) fn broken(path: &str, text: &str, read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let fault = |(line, target): (usize, &str)| {
        let (file, heading) = target.split_once('#').unwrap_or((target, ""));
        let full = match file {
            "" => path.to_owned(),
            _ => beside(path, file),
        };
        let is_known = |text: &str| headings(text).any(|known| known == heading);
        let lacking = match read(&full) {
            None => "file",
            Some(text) if full.ends_with(".md") && !heading.is_empty() && !is_known(&text) => {
                "heading"
            }
            Some(_) => return None,
        };
        Some(format!(
            "{path}:{line}: link to {target}: no such {lacking}"
        ))
    };
    links(text).filter_map(fault).collect()
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

/// Targets of links and images that lie in this repository, with their lines.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let targets = prose(text).flat_map(|(number, line)| {
        let ends = line.split("](").skip(1);
        ends.map(move |rest| (number, rest.split([')', ' ']).next().unwrap_or_default()))
    });
    targets.filter(|(_, target)| {
        !target.contains("://") && !target.starts_with("mailto:") && !target.is_empty()
    })
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
    fn links_resolve_from_the_folder_of_their_file_and_to_a_heading() {
        let table = [
            ("[b](b.md)", 0),
            ("[b](./b.md) and [up](../README.md)", 0),
            ("![c](pictures/c.svg \"title\")", 0),
            ("[gone](gone.md)", 1),
            ("[wrong folder](README.md)", 1),
            ("[web](https://example.org/gone.md)", 0),
            ("```\n[gone](gone.md)\n```", 0),
            ("[b](b.md#the-first-of-two)", 0),
            ("[b](b.md#none)", 1),
            ("## Here\n[self](#here)", 0),
            ("[self](#here)", 1),
        ];
        for (text, count) in table {
            assert_eq!(faults(text), count, "{text}");
        }
    }
}
