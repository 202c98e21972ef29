//! `docs/options.md`, written from the parser's own definitions so that the two cannot disagree. What several commands take is
//! told once.

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Args as _, Command};
use cleave_config::{Change, DiskConfig};

const HEAD: &str = "# Options\n\n\
    Every command and its options. Written by `cleave --help-markdown` from the definitions that the parser uses; a test \
    compares the two. Do not edit. Every command also has `--help`; `-h` is its summary.\n";

const OF_A_DISK: &str = "\n## Options of a disk\n\n\
    `cleave serve` and `cleave disk add` take all of these. `cleave disk set` takes the *live* ones, which can change \
    while the disk is served. Each is also a field of the [disk configuration file](disk-file.md).\n\n\
    | Option | Default | Live | Meaning |\n|---|---|---|---|\n";

const OF_SEVERAL: &str =
    "\n## Options of several commands\n\n| Option | Default | Meaning |\n|---|---|---|\n";

/// Least number of commands that have an option which is told apart from them.
const SEVERAL: usize = 3;

/// Most paragraphs of a help text that fit into a cell of a table.
const PARAGRAPHS_MAX: usize = 3;

/// A visible command.
struct CommandPage<'a> {
    name: String,
    command: &'a Command,
    rows: Vec<OptionRow>,
}

/// An option as a row of a table.
struct OptionRow {
    long: Option<String>,
    usage: String,
    default: String,
    meaning: String,
    /// The help text after its first paragraph, if it does not fit into a cell.
    full_text: Option<String>,
}

/// Every visible command with its options and examples.
pub(crate) fn markdown(mut program: Command) -> String {
    program.build();
    let mut pages = Vec::new();
    add_pages(&mut pages, &program, program.get_name().to_owned());

    let fields = DiskConfig::augment_args(Command::new("fields"));
    let serve = pages.iter().find(|page| page.name == "cleave serve");
    let of_serve = serve.into_iter().flat_map(|page| &page.rows);
    let of_disk: Vec<&OptionRow> = of_serve.filter(|row| row.is_in(&fields)).collect();
    let of_several = of_several(&pages, &of_disk);

    let mut text = HEAD.to_owned() + OF_A_DISK;
    let live = Change::augment_args(Command::new("live"));
    for row in &of_disk {
        let live = if row.is_in(&live) { "live" } else { "" };
        let _ = writeln!(
            text,
            "| `{}` | {} | {live} | {} |",
            row.usage, row.default, row.meaning
        );
    }
    full_texts(&mut text, &of_disk);
    text += OF_SEVERAL;
    of_several.iter().for_each(|row| line(&mut text, row));
    for page in &pages {
        section(&mut text, page, &of_disk, &of_several);
    }
    text
}

/// Adds a command and its subcommands.
fn add_pages<'a>(pages: &mut Vec<CommandPage<'a>>, command: &'a Command, name: String) {
    let args = command.get_arguments();
    let args = args.filter(|arg| !arg.is_hide_set() && arg.get_id() != "help");
    pages.push(CommandPage {
        name: name.clone(),
        command,
        rows: args.map(OptionRow::of).collect(),
    });
    for sub in command.get_subcommands() {
        if !sub.is_hide_set() && sub.get_name() != "help" {
            add_pages(pages, sub, format!("{name} {}", sub.get_name()));
        }
    }
}

/// Returns the options that many commands have with the same meaning.
fn of_several<'a>(pages: &'a [CommandPage<'_>], of_disk: &[&OptionRow]) -> Vec<&'a OptionRow> {
    let mut several: Vec<&OptionRow> = Vec::new();
    for row in pages.iter().flat_map(|page| &page.rows) {
        let count = pages.iter().filter(|page| row.is_among(&page.rows)).count();
        let is_told =
            row.is_among(of_disk.iter().copied()) || row.is_among(several.iter().copied());
        if count >= SEVERAL && row.long.is_some() && !is_told {
            several.push(row);
        }
    }
    several
}

// Writing to a `String` cannot fail, so results of `write!` are dropped below.
fn section(
    text: &mut String,
    page: &CommandPage<'_>,
    of_disk: &[&OptionRow],
    of_several: &[&OptionRow],
) {
    let about = page.command.get_long_about().or(page.command.get_about());
    let about = about.map(ToString::to_string).unwrap_or_default();
    let _ = write!(text, "\n## `{}`\n\n{about}\n", page.name);
    let is_own = |row: &&OptionRow| {
        !row.is_among(of_disk.iter().copied()) && !row.is_among(of_several.iter().copied())
    };
    let own: Vec<&OptionRow> = page.rows.iter().filter(is_own).collect();
    if !own.is_empty() {
        let _ = write!(text, "\n| Option | Default | Meaning |\n|---|---|---|\n");
    }
    own.iter().for_each(|row| line(text, row));
    full_texts(text, &own);
    elsewhere(
        text,
        page,
        of_disk,
        "[Options of a disk](#options-of-a-disk)",
    );
    elsewhere(
        text,
        page,
        of_several,
        "[Options of several commands](#options-of-several-commands)",
    );
    if let Some(examples) = page.command.get_after_long_help() {
        let _ = write!(text, "\n```text\n{examples}\n```\n");
    }
}

fn line(text: &mut String, row: &OptionRow) {
    let _ = writeln!(
        text,
        "| `{}` | {} | {} |",
        row.usage, row.default, row.meaning
    );
}

/// Writes the help texts that are too long for the table above.
fn full_texts(text: &mut String, rows: &[&OptionRow]) {
    for row in rows {
        if let (Some(long), Some(full_text)) = (&row.long, &row.full_text) {
            let _ = write!(text, "\n### `--{long}`\n\n{full_text}\n");
        }
    }
}

/// Names the options of a command that are told elsewhere.
fn elsewhere(text: &mut String, page: &CommandPage<'_>, told: &[&OptionRow], place: &str) {
    let rows = page.rows.iter();
    let rows = rows.filter(|row| row.is_among(told.iter().copied()));
    let names: Vec<String> = rows
        .filter_map(|row| Some(format!("`--{}`", row.long.as_ref()?)))
        .collect();
    if !names.is_empty() {
        let _ = write!(text, "\n{place}: {}.\n", names.join(", "));
    }
}

impl OptionRow {
    fn of(arg: &Arg) -> OptionRow {
        let help = arg.get_long_help().or(arg.get_help());
        let help = help.map(ToString::to_string).unwrap_or_default();
        let paragraphs: Vec<String> = help.split("\n\n").map(sentence).collect();
        let long = arg.get_long().map(str::to_owned);
        let is_long = paragraphs.len() > PARAGRAPHS_MAX && long.is_some();
        let full_text = is_long.then(|| paragraphs[1..].join("\n\n"));
        let mut meaning = match (&long, is_long) {
            (Some(long), true) => format!("{} [More](#--{long})", paragraphs[0]),
            _ => paragraphs.join(" "),
        };
        meaning += &values(arg);
        OptionRow {
            usage: usage(arg),
            default: default(arg),
            meaning: meaning.replace('|', "\\|"),
            long,
            full_text,
        }
    }

    fn is_in(&self, command: &Command) -> bool {
        let mut args = command.get_arguments();
        args.any(|arg| arg.get_long() == self.long.as_deref())
    }

    /// Returns true if one of these says the same; its default may be another one.
    fn is_among<'a>(&self, rows: impl IntoIterator<Item = &'a OptionRow>) -> bool {
        let mut rows = rows.into_iter();
        rows.any(|row| row.usage == self.usage && row.meaning == self.meaning)
    }
}

/// `--cache MODE`.
fn usage(arg: &Arg) -> String {
    let long = arg
        .get_long()
        .map(|long| format!("--{long}"))
        .unwrap_or_default();
    match arg.get_value_names() {
        Some([value, ..]) if long.is_empty() => match arg.get_action() {
            ArgAction::Append => format!("{value}..."),
            _ => value.to_string(),
        },
        Some([value, ..]) if arg.get_action().takes_values() => format!("{long} {value}"),
        _ => long,
    }
}

fn default(arg: &Arg) -> String {
    let defaults = arg.get_default_values();
    if defaults.is_empty() || arg.is_hide_default_value_set() || !arg.get_action().takes_values() {
        return String::new();
    }
    let shown: Vec<_> = defaults
        .iter()
        .map(|value| value.to_string_lossy())
        .collect();
    format!("`{}`", shown.join(","))
}

/// Lists the values where they are few.
fn values(arg: &Arg) -> String {
    let values: Vec<_> = match arg.get_action().takes_values() {
        true => arg.get_possible_values(),
        false => Vec::new(),
    };
    if values.is_empty() {
        return String::new();
    }
    let names: Vec<_> = values
        .iter()
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    format!(" ({})", names.join(", "))
}

/// A paragraph on one line; the first of a help text has no full stop of its own.
fn sentence(paragraph: &str) -> String {
    let line = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.ends_with('.') {
        true => line,
        false => format!("{line}."),
    }
}
