//! Commands of the pages. A test runs each, or parses it, or the table of [`TABLE`] says why not.

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::path::Path;

use cleave_rig::pages::{OWN, Shown, commands};

/// The page with the table.
pub(super) const TABLE: &str = "docs/testing.md";

/// Tests that paste the `sh` blocks of the pages that they name.
const PASTING: [&str; 2] = [PACKAGES, "tests/node/put.rs"];

/// The one of the packages, in which `left_out=` has the programs that it does not run.
const PACKAGES: &str = "xtask/src/dist/pages.sh";

/// Returns a fault for each command that is neither tested nor in the table, for each entry of the table that is not needed, and
/// for each block that does not say whether it has commands.
pub(super) fn faults(root: &Path, table: &str, paths: &[&str]) -> Vec<String> {
    let read = |path: &str| read_to_string(root.join(path)).unwrap_or_default();
    let pasting = PASTING.map(read).join("\n");
    // The words of the lines that name pages, or programs.
    let named = |marks: &[&str]| {
        let lines = pasting.lines();
        let lines = lines.filter(|line| marks.iter().any(|mark| line.contains(mark)));
        let words = lines.flat_map(|line| line.split([' ', ';', '"']));
        words.map(|word| word.trim_start_matches("../")).collect()
    };
    let pasted: Vec<&str> = named(&["for page in ", "include_str!("]);
    let left_out: Vec<&str> = named(&["left_out="]);
    let (mut rows, mut faults) = (rows(table), Vec::new());
    let is_page = |path: &&&str| path.ends_with(".md") && **path != "CHANGELOG.md";
    for path in paths.iter().filter(is_page) {
        let text = read(path);
        let mut listed = rows.remove(*path).unwrap_or_default();
        for command in commands(path, &text) {
            let program = command.program();
            let is_run = command.shown == Shown::Script
                && pasted.contains(path)
                && !left_out.contains(&program);
            match listed.iter_mut().find(|(known, _)| *known == program) {
                Some((_, is_needed)) => *is_needed |= !is_run,
                None if is_run || OWN.contains(&program) => {}
                None => faults.push(format!(
                    "{path}:{}: no test runs this `{program}`: have {PACKAGES} paste its block, or list it in {TABLE} with the reason",
                    command.line
                )),
            }
        }
        let stale = listed.iter().filter(|(_, is_needed)| !is_needed);
        faults.extend(
            stale.map(|(program, _)| {
                format!("{TABLE}: {path} has no `{program}` that no test runs")
            }),
        );
        faults.extend(unmarked(path, &text));
    }
    faults.extend(
        rows.keys()
            .map(|path| format!("{TABLE}: there is no page {path}")),
    );
    faults
}

/// Returns the programs of the table by page, none of them needed so far.
fn rows(table: &str) -> BTreeMap<&str, Vec<(&str, bool)>> {
    let rows = table.lines().filter_map(|line| {
        let (page, rest) = line.strip_prefix("| ")?.split_once(" | ")?;
        // A link, or only its text: the book has no README.
        let page = page.trim_start_matches('[').split(']').next()?;
        let programs = rest.split(" | ").next()?.split('`').skip(1).step_by(2);
        let programs = programs.map(|program| (program, false)).collect();
        page.ends_with(".md").then_some((page, programs))
    });
    rows.collect()
}

/// Returns the blocks whose language does not say whether commands are in it.
fn unmarked<'a>(path: &'a str, text: &'a str) -> impl Iterator<Item = String> + 'a {
    let fences = (1..)
        .zip(text.lines())
        .filter_map(|(line, text)| Some((line, text.trim_start().strip_prefix("```")?)));
    let opening = fences
        .step_by(2)
        .filter(|(_, language)| ["", "bash", "shell"].contains(language));
    opening.map(move |(line, _)| format!("{path}:{line}: name what is in the block: sh, console (commands after a prompt), text, …"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_tested_or_in_the_table_but_not_both() {
        let root = std::env::temp_dir().join(format!("xtask-pages-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            PACKAGES,
            "left_out=\"cargo apt\"\nfor page in README.md docs/a.md; do\n",
        );
        write(PASTING[1], "include_str!(\"../../docs/b.md\")");
        let ls = "```sh\nls\n```";
        for (path, text, row, fault) in [
            ("docs/a.md", ls, "", ""),
            ("docs/b.md", ls, "", ""),
            ("docs/c.md", ls, "", "docs/c.md:2: no test runs this `ls`"),
            (
                "docs/c.md",
                ls,
                "| [docs/c.md](c.md) | `cp`, `ls` | it is slow |",
                "docs/c.md has no `cp`",
            ),
            (
                "docs/a.md",
                ls,
                "| [docs/a.md](a.md) | `ls` | it is slow |",
                "docs/a.md has no `ls`",
            ),
            (
                "docs/a.md",
                "```console\n$ ls\n```",
                "",
                "docs/a.md:2: no test runs this `ls`",
            ),
            (
                "docs/a.md",
                "```console\n$ ls\n```\n```sh\nls\n```",
                "| [docs/a.md](a.md) | `ls` | it is slow |",
                "",
            ),
            (
                "README.md",
                "```sh\nls\nsudo apt install\n```",
                "",
                "README.md:3: no test runs this `apt`",
            ),
            (
                "README.md",
                "```sh\ncargo run -- demo\n```\n`cleave serve`",
                "",
                "",
            ),
            (
                "docs/c.md",
                "",
                "| [docs/d.md](d.md) | `ls` | it is slow |",
                "no page docs/d.md",
            ),
            ("docs/c.md", "```\nls\n```", "", "docs/c.md:1: name what"),
            ("CHANGELOG.md", ls, "", ""),
        ] {
            write(path, text);
            let found = faults(&root, row, &[path]).join("\n");
            assert!(
                found.contains(fault) && found.is_empty() == fault.is_empty(),
                "{text} {row}: {found}"
            );
        }
        std::fs::remove_dir_all(&root).unwrap();
    }
}
