//! `--write-pages DIR`: man pages and shell completions for packages, written from the parser's own definitions.

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

use clap::Command;
use clap_complete::{Shell, generate_to};
use clap_mangen::Man;
use cleave_host::Failure;

const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// The first line of a command's examples, which is their heading on a page.
const EXAMPLES: &str = "Examples:";

/// Where the packages have the documents, which the texts of the options call docs/NAME.md.
const DOCUMENTS: &str = "\
.SH SEE ALSO
.nf
/usr/share/doc/cleave/README.md        all documents: docs/NAME.md is NAME.md there
/usr/share/doc/cleave/html/index.html  the same as a book, in the packages of a release
.fi
";

/// Writes `cleave.1`, a page for each subcommand, and a completion for each shell.
pub(crate) fn write(mut program: Command, folder: &Path) -> Result<(), Failure> {
    let failed = |error: io::Error| {
        Failure::run(format!(
            "cannot write pages to {}: {error}",
            folder.display()
        ))
    };
    for shell in SHELLS {
        generate_to(shell, &mut program.clone(), "cleave", folder).map_err(failed)?;
    }
    // `cleave help` prints the pages of the others, and needs none of its own.
    program = program.disable_help_subcommand(true);
    program.build();
    pages(&program, folder).map_err(failed)
}

/// The page of a command, and those of its subcommands.
fn pages(command: &Command, folder: &Path) -> io::Result<()> {
    let subcommands = command.get_subcommands();
    for subcommand in subcommands.filter(|subcommand| !subcommand.is_hide_set()) {
        pages(subcommand, folder)?;
    }
    let version = concat!("cleave ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).source(version).manual("Cleave");
    let mut page = fs::File::create(folder.join(man.get_filename()))?;
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if command.get_arguments().any(|arg| !arg.is_hide_set()) {
        man.render_options_section(&mut page)?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(examples) = command.get_after_long_help() {
        page.write_all(verbatim(&examples.to_string()).as_bytes())?;
    }
    page.write_all(DOCUMENTS.as_bytes())
}

/// Examples, line by line: they hold commands, which must not be filled.
fn verbatim(examples: &str) -> String {
    let lines = examples.strip_prefix(EXAMPLES).unwrap_or(examples);
    let lines = lines.trim_start_matches('\n').lines().map(|line| {
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        // A dot or an apostrophe at the start would be a request of roff.
        match line.starts_with(['.', '\'']) {
            true => format!("\\&{line}\n"),
            false => line + "\n",
        }
    });
    format!(".SH EXAMPLES\n.nf\n{}.fi\n", lines.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_keep_their_lines() {
        let page = verbatim("Examples:\n  A disk:\n      cleave serve \\\n          --disk a\n.x");
        let lines = "  A disk:\n      cleave serve \\e\n          \\-\\-disk a\n\\&.x\n";
        assert_eq!(page, format!(".SH EXAMPLES\n.nf\n{lines}.fi\n"));
    }
}
