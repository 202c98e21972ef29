//! The command lines that the pages show: in `sh` blocks, after the prompts of `console` blocks, among the examples of help texts,
//! and of our own programs also in sentences.

use std::collections::BTreeMap;
use std::fs::{read_dir, read_to_string};
use std::mem::take;
use std::path::Path;

/// Programs of this workspace. Their own tests parse each line of theirs that a page shows.
pub const OWN: [&str; 3] = ["cleave", "cleave-lab", "cargo xtask"];

/// Commands of `cargo xtask` that the lab parses.
const LABS: [&str; 3] = ["bench", "guest-bench", "report"];

/// The prompt of QEMU's monitor, whose commands count as one program.
const MONITOR: &str = "(qemu)";

/// Words of the shell that may stand before a program.
const SHELL: [&str; 8] = ["do", "done", "until", "if", "then", "else", "fi", "sudo"];

/// Where a page shows a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shown {
    /// In an `sh` block, which a reader pastes.
    Script,
    /// After a prompt, or as an example.
    Session,
    /// In a sentence, which may name only the beginning of a line.
    Sentence,
}

/// One program with its words. A line of one of [`OWN`] begins with that name, whatever runs it: `cargo run --`, a container.
pub struct PageCommand {
    /// Path of the page from the top folder.
    pub page: String,
    /// Number of its line there.
    pub line: usize,
    /// Where it is shown.
    pub shown: Shown,
    /// The program and its arguments.
    pub words: Vec<String>,
}

impl PageCommand {
    /// Returns its first word.
    pub fn program(&self) -> &str {
        self.words.first().map_or("", String::as_str)
    }

    /// Returns its place, and itself.
    pub fn at(&self) -> String {
        format!("{}:{}: {}", self.page, self.line, self.words.join(" "))
    }
}

/// Returns the commands of one of our programs on all pages of a checkout. The changelog has those of former releases.
pub fn commands_of(root: &Path, program: &str) -> Vec<PageCommand> {
    let folders_of_pages = ["docs", "examples", "benchmarks"];
    let (mut folders, mut found) = (vec![root.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy();
            if path.is_dir() && folders_of_pages.iter().any(|top| name.starts_with(top)) {
                folders.push(path);
            } else if name.ends_with(".md") && name != "CHANGELOG.md" {
                found.extend(commands(&name, &read_to_string(&path).unwrap_or_default()));
            }
        }
    }
    found.retain(|command| command.program() == program);
    found
}

/// Returns the commands of a page.
pub fn commands(page: &str, text: &str) -> Vec<PageCommand> {
    let (mut commands, mut variables) = (Vec::new(), BTreeMap::new());
    let mut add = |line, shown, text: &str| {
        let all = simple(text, &mut variables).into_iter();
        commands.extend(all.map(|words| PageCommand {
            page: page.to_owned(),
            line,
            shown,
            words,
        }));
    };
    let (mut language, mut has_examples) = (None, false);
    let (mut first, mut pending, mut prose) = (0, String::new(), String::new());
    for (line, text) in (1..).zip(text.lines()) {
        prose.push('\n');
        if let Some(word) = text.strip_prefix("```") {
            language = language.xor(Some(word));
            has_examples = false;
            continue;
        }
        has_examples |= text == "Examples:";
        let is_continued = !pending.is_empty();
        let (shown, part) = match language {
            None => {
                prose += text;
                continue;
            }
            Some("sh") => (Shown::Script, Some(text)),
            Some(_) if is_continued => (Shown::Session, Some(text)),
            Some("console") => (Shown::Session, prompted(text)),
            Some(_) if has_examples => (Shown::Session, text.strip_prefix("      ")),
            Some(_) => continue,
        };
        first = if is_continued { first } else { line };
        pending += part.unwrap_or_default();
        match pending.strip_suffix('\\') {
            Some(begun) => pending = begun.to_owned(),
            None => add(first, shown, &take(&mut pending)),
        }
    }
    let mut line = 0;
    for (at, span) in prose.split('`').enumerate() {
        let text = span.replace('\n', " ");
        let mut own = ["cleave ", "cleave-lab ", "cargo xtask ", "cargo run "].iter();
        if at % 2 == 1 && own.any(|own| text.starts_with(own)) {
            add(line, Shown::Sentence, &text);
        }
        line += span.matches('\n').count();
    }
    commands
}

/// Returns what is typed after a prompt: `$`, `#`, `host$`, or that of QEMU's monitor.
fn prompted(line: &str) -> Option<&str> {
    if let Some(at) = line.find(MONITOR) {
        return line.get(at..);
    }
    let (host, typed) = line.split_once(['$', '#'])?;
    let is_prompt = host.chars().all(char::is_alphanumeric);
    typed.strip_prefix(' ').filter(|_| is_prompt)
}

/// Splits a line of a shell into simple commands. Knows as much of a shell as the pages use.
fn simple(line: &str, variables: &mut BTreeMap<String, String>) -> Vec<Vec<String>> {
    if line.starts_with(MONITOR) {
        return vec![vec![MONITOR.to_owned()]];
    }
    let (mut commands, mut words) = (Vec::new(), Vec::new());
    let (mut word, mut quote) = (None::<String>, None);
    for c in line.chars().chain([';']) {
        match c {
            _ if quote == Some(c) => quote = None,
            _ if quote.is_some() => word.get_or_insert_default().push(c),
            '\'' | '"' => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            '#' if word.is_none() => break,
            ' ' => words.extend(word.take()),
            ';' | '|' | '&' | '(' | ')' => {
                words.extend(word.take());
                commands.push(take(&mut words));
            }
            _ => word.get_or_insert_default().push(c),
        }
    }
    commands.push(words);
    let expanded = commands.into_iter().flat_map(|words| {
        let words = words.iter().flat_map(|word| {
            let mut text = word.clone();
            for (name, value) in &*variables {
                text = text.replace(&format!("${name}"), value);
            }
            match word.starts_with('$') {
                true => text.split(' ').map(str::to_owned).collect(),
                false => vec![text],
            }
        });
        own(stripped(words.collect(), variables))
    });
    expanded.filter(|words| !words.is_empty()).collect()
}

/// Takes the assignments, the words of the shell and the redirection off a simple command.
fn stripped(words: Vec<String>, variables: &mut BTreeMap<String, String>) -> Vec<String> {
    if let [each, name, _, value, ..] = &*words
        && each == "for"
    {
        variables.insert(name.clone(), value.clone());
        return Vec::new();
    }
    let mut is_before = |word: &String| match word.split_once('=') {
        Some((name, value)) if name.chars().all(|c| c.is_alphanumeric() || c == '_') => {
            variables.insert(name.to_owned(), value.to_owned());
            true
        }
        _ => SHELL.contains(&word.as_str()),
    };
    let rest = words.into_iter().skip_while(|word| is_before(word));
    rest.take_while(|word| word != ">").collect()
}

/// Names one of our programs as such, and adds the line of one that runs in a container.
fn own(words: Vec<String>) -> Vec<Vec<String>> {
    let texts: Vec<&str> = words.iter().map(String::as_str).collect();
    let line = |program: &[&str], rest: &[&str]| {
        let words = program.iter().chain(rest);
        words.map(|word| (*word).to_owned()).collect()
    };
    match &*texts {
        ["cargo", "run", rest @ ..] if rest.contains(&"--") => {
            let end = rest.iter().position(|word| *word == "--");
            vec![line(&["cleave"], &rest[end.map_or(0, |end| end + 1)..])]
        }
        ["cargo", "xtask", task, rest @ ..] if LABS.contains(task) => {
            vec![line(&["cleave-lab", task], rest)]
        }
        ["cargo", "xtask", rest @ ..] => vec![line(&["cargo xtask"], rest)],
        ["podman" | "kubectl", rest @ ..] => {
            // The image's entrypoint is the program.
            let is_image = |word: &&str| !word.starts_with('/') && word.contains("/cleave:");
            let image = rest.iter().position(is_image);
            let mut pairs = rest.windows(2);
            let inner = pairs.position(|pair| pair == ["--", "cleave"]);
            let start = image.or(inner.map(|at| at + 1)).map(|at| at + 1);
            let inside = start.map(|start| line(&["cleave"], &rest[start..]));
            [words.clone()].into_iter().chain(inside).collect()
        }
        _ => vec![words],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_commands_that_a_reader_would_type() {
        for (text, found) in [
            (
                "```sh\na b  # c\nd 'e; f' \\\n  g && h\n```",
                "Script 2 a b, Script 3 d e; f g, Script 3 h",
            ),
            (
                "```console\n$ a\nsaid $ b\nhost1# b | c\nsource (qemu) quit\n```",
                "Session 2 a, Session 4 b, Session 4 c, Session 5 (qemu)",
            ),
            (
                "```text\n      cleave a\nExamples:\n  Say:\n      cleave b \\\n          c\n```",
                "Session 5 cleave b c",
            ),
            (
                "`cleave a\nb`, `ls` and\n`cargo xtask tidy`",
                "Sentence 1 cleave a b, Sentence 3 cargo xtask tidy",
            ),
            (
                "```sh\napi=\"curl -s x\"\n$api/d -d '$api'\n```",
                "Script 3 curl -s x/d -d curl -s x",
            ),
            (
                "```sh\nfor d in e f; do a $d.img; done\nuntil L=C sudo v | g -q; do sleep 1; done\n```",
                "Script 2 a e.img, Script 3 v, Script 3 g -q, Script 3 sleep 1",
            ),
            (
                "```sh\npod=$(kubectl -n cleave get)\nkubectl exec $pod -- cleave top\n```",
                "Script 2 kubectl -n cleave get, Script 3 kubectl exec $ -- cleave top, Script 3 cleave top",
            ),
            (
                "```sh\npodman run -v /a/cleave:/a localhost/cleave:1 serve\n```",
                "Script 2 podman run -v /a/cleave:/a localhost/cleave:1 serve, Script 2 cleave serve",
            ),
            (
                "```sh\ncargo run --release -- demo > a\ncargo xtask bench cpu\n```",
                "Script 2 cleave demo, Script 3 cleave-lab bench cpu",
            ),
            ("```xml\n$ a\n```\n$ b", ""),
        ] {
            let shown = commands("a.md", text);
            let shown = shown
                .iter()
                .map(|it| format!("{:?} {} {}", it.shown, it.line, it.words.join(" ")));
            assert_eq!(shown.collect::<Vec<_>>().join(", "), found, "{text}");
        }
    }
}
