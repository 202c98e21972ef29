//! Checks, tests and set-up of the workspace, run as `cargo xtask COMMAND`. This program forbids
//! downloads at build time and heavy dependencies: it has to compile in seconds on a fresh machine.
#![forbid(unsafe_code)]

mod bench;
mod ci;
mod daemon;
mod guest;
mod licence;
mod metadata;
mod setup;
mod step;
mod test;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bench::Effort;
use test::Selection;

const USAGE: &str = "\
cargo xtask COMMAND

  ci      formatting, clippy, tidy, documentation, dependency licences
  tidy    only the house rules: sizes, crate prohibitions, leftovers, links
  test    sets the machine up (as root), then runs all tests
          [unit | integration | guest]         only these
          [--keep]                             leave the guests' logs and images below target/guest
          [--against qemu-storage-daemon]      guest tests with QEMU's daemon instead of cleave
  bench ring
          the cost of the ring alone, beside qemu-storage-daemon, interleaved in one run
          [--rounds N] [--seconds S]           at least 5 rounds, 1.5 s each unless told
  bench split
          large requests with `--split auto` beside `--split off`, on modelled drives and on a file
          [--rounds N] [--seconds S]           as above
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["ci"] => ci::run(&root()),
        ["tidy"] => ci::run_tidy(&root()),
        ["test", rest @ ..] => Selection::parse(rest).and_then(|what| test::run(&root(), &what)),
        ["bench", "ring", rest @ ..] => {
            Effort::parse(rest).and_then(|effort| bench::ring(&root(), &effort))
        }
        ["bench", "split", rest @ ..] => {
            Effort::parse(rest).and_then(|effort| bench::split(&root(), &effort))
        }
        ["help" | "--help" | "-h"] => {
            print!("{USAGE}");
            Ok(())
        }
        _ => Err(format!("unknown command {words:?}\n\n{USAGE}")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{}", why.trim_end());
            ExitCode::FAILURE
        }
    }
}

/// The workspace's top folder; xtask is always run by cargo from its own checkout.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}
