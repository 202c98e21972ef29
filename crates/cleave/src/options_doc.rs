//! `docs/options.md`, written from the parser's own definitions so that the two cannot disagree.

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Command};

const HEAD: &str = "# Options\n\n\
    Written by `cleave --help-markdown` from the definitions that the parser uses; a test compares the \
    two. Do not edit.\n";

/// Every visible command with its options and examples.
pub(crate) fn markdown(mut program: Command) -> String {
    program.build();
    let mut text = HEAD.to_owned();
    command(&mut text, &program, program.get_name());
    subcommands(&mut text, &program, program.get_name());
    text
}

fn subcommands(text: &mut String, parent: &Command, name: &str) {
    for sub in parent
        .get_subcommands()
        .filter(|sub| !sub.is_hide_set() && sub.get_name() != "help")
    {
        let name = format!("{name} {}", sub.get_name());
        command(text, sub, &name);
        subcommands(text, sub, &name);
    }
}

// Writing to a `String` cannot fail, so results of `write!` are dropped below.
fn command(text: &mut String, command: &Command, name: &str) {
    let about = command.get_long_about().or(command.get_about());
    let about = about.map(ToString::to_string).unwrap_or_default();
    let _ = write!(text, "\n## `{name}`\n\n{about}\n");
    let args = || command.get_arguments().filter(|arg| !arg.is_hide_set());
    if args().next().is_some() {
        let _ = write!(text, "\n| Option | Default | Meaning |\n|---|---|---|\n");
    }
    for arg in args() {
        option(text, arg);
    }
    if let Some(examples) = command.get_after_long_help() {
        let _ = write!(text, "\n```text\n{examples}\n```\n");
    }
}

fn option(text: &mut String, arg: &Arg) {
    let _ = writeln!(
        text,
        "| `{}` | {} | {} |",
        usage(arg),
        default(arg),
        meaning(arg)
    );
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

/// Help on one line, and the values where they are a closed list.
fn meaning(arg: &Arg) -> String {
    let help = arg.get_long_help().or(arg.get_help());
    let help = help.map(ToString::to_string).unwrap_or_default();
    let mut line = help
        .split("\n\n")
        .map(sentence)
        .collect::<Vec<_>>()
        .join(" ");
    let values: Vec<_> = match arg.get_action().takes_values() {
        true => arg.get_possible_values(),
        false => Vec::new(),
    };
    if !values.is_empty() {
        let names: Vec<_> = values
            .iter()
            .map(|value| format!("`{}`", value.get_name()))
            .collect();
        let _ = write!(line, " ({})", names.join(", "));
    }
    line.replace('|', "\\|")
}

/// A paragraph on one line; the first of a help text has no full stop of its own.
fn sentence(paragraph: &str) -> String {
    let line = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.ends_with('.') {
        true => line,
        false => format!("{line}."),
    }
}
