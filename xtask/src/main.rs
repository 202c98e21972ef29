//! Checks, tests and set-up of the workspace, run as `cargo xtask COMMAND`. This program forbids
//! downloads at build time and heavy dependencies: it has to compile in seconds on a fresh machine.
#![forbid(unsafe_code)]

mod bench;
mod built;
mod ci;
mod conform;
mod daemon;
mod fuzz;
mod guest;
mod guest_bench;
mod kill;
mod licence;
mod metadata;
mod pool;
mod report;
mod sanitize;
mod setup;
mod step;
mod suite;
mod test;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use test::Selection;

const USAGE: &str = "\
cargo xtask COMMAND

  ci      what every commit has to pass: tidy, clippy, documentation
  tidy    what of it needs no compiler: formatting, licences, house rules (sizes, crate prohibitions, links)
  test    sets the machine up (as root), then runs all tests
          [unit | integration | benches | guest [CASE]]  only these
          [--quick]                            all but guests and measurements: two minutes after the build
          [--keep]                             leave the guests' logs and images below target/guest
          [--against qemu-storage-daemon]      guest tests with QEMU's daemon instead of cleave
  kill    kills the daemon at random moments, and holds the next one to every answer and every byte
          [--times N] [--seed N]               200 times, and another seed each time
  conform runs the hostile, life cycle and recovery tables against any vhost-user-blk back-end; prints a Markdown table
          --daemon 'COMMAND {socket} {disk} {queues}'
          [--only TEXT]                        only rows whose names contain the text
  sanitize
          the integration tests against a daemon that AddressSanitizer watches
  fuzz    feeds what outsiders write (chains, requests, messages, superblocks, profiles, bodies) with inputs that
          libFuzzer makes; keeps what breaks something in target/fuzz/finds
          [--minutes N]                        for each target, instead of one
          [TARGET ...]                         only these
  bench   measures against qemu-storage-daemon and the bare disk; leaves raw data, figures and report.html
          [transport | cpu | tax | split | pacing | idle | scale | start | instructions
           | recording | all]
          [--quick]                            fewer points and rounds: all suites within ten minutes
          [--smoke]                            one short round: shows that the suites work
          [--disk PATH]                        a filled file or device, instead of a file below target
          [--allow-thin]                       although it was never filled
          [--destructive]                      let suites that write do so on --disk
          [--out DIR]                          instead of a folder below target/bench
          [--rounds N] [--seconds S]           more of each
  bench instructions
          instructions per I/O in the worker, counted by callgrind; fails when they rise by 2 %
          [--annotate]                         also where they are: functions, files, lines
          [--case NAME]                        one case only
          [--accept]                           makes the counts those to be judged by
  guest-bench
          the same disk in guests, attached in every way that QEMU knows, at the same offered load
          [--quick | --smoke]                  ten minutes instead of an hour; or only whether it works
          [--accel auto|kvm|tcg] [--only NAME,...] [--kernel IMAGE --modules DIR] [--rounds N] [--out DIR]
  report DIR...
          draws figures and report.html of a run again from its raw data; several runs side by side
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["help"] => say(USAGE),
        asked if asked.iter().any(|word| matches!(*word, "--help" | "-h")) => {
            say(&usage_of(asked.first().copied().unwrap_or_default()))
        }
        ["ci"] => ci::run(&root()),
        ["tidy"] => ci::run_tidy(&root()),
        ["test", rest @ ..] => Selection::parse(rest).and_then(|what| test::run(&root(), &what)),
        ["kill", rest @ ..] => kill::run(&root(), rest),
        ["conform", rest @ ..] => conform::run(&root(), rest),
        ["sanitize"] => sanitize::run(&root()),
        ["fuzz", rest @ ..] => {
            fuzz::Request::parse(rest).and_then(|request| fuzz::run(&root(), &request))
        }
        ["bench", "instructions", rest @ ..] => bench::instructions::Request::parse(rest)
            .and_then(|request| bench::instructions::run(&root(), &request)),
        ["bench", rest @ ..] => bench::run(&root(), rest),
        ["report", rest @ ..] => report::again(rest),
        ["guest-bench", rest @ ..] => guest_bench::run(&root(), rest),
        [] => Err(USAGE.to_owned()),
        [command @ ("ci" | "tidy" | "sanitize"), word, ..] => {
            Err(format!("{command} takes no `{word}`"))
        }
        [word, ..] => Err(format!("`{word}` is no command; see cargo xtask --help")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{}", why.trim_end());
            ExitCode::FAILURE
        }
    }
}

fn say(text: &str) -> Result<(), String> {
    print!("{text}");
    Ok(())
}

/// What the usage says of one command; all of it where it says nothing.
fn usage_of(command: &str) -> String {
    let mut lines = String::new();
    let mut is_its = false;
    for line in USAGE.lines() {
        // A command begins a line that is indented by two, what belongs to it by more.
        if let Some(head) = line
            .strip_prefix("  ")
            .filter(|rest| !rest.starts_with(' '))
        {
            is_its = head.split_whitespace().next() == Some(command);
        }
        if is_its {
            lines.push_str(line);
            lines.push('\n');
        }
    }
    match lines.is_empty() {
        true => USAGE.to_owned(),
        false => format!("cargo xtask COMMAND\n\n{lines}"),
    }
}

/// The workspace's top folder; xtask is always run by cargo from its own checkout.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_of_a_command_is_its_part_of_the_usage() {
        for command in [
            "ci",
            "tidy",
            "test",
            "sanitize",
            "fuzz",
            "bench",
            "guest-bench",
            "report",
        ] {
            let text = usage_of(command);
            let heads: Vec<&str> = text
                .lines()
                .filter_map(|line| line.strip_prefix("  "))
                .filter(|rest| !rest.starts_with(' '))
                .filter_map(|rest| rest.split_whitespace().next())
                .collect();
            assert!(
                !heads.is_empty() && heads.iter().all(|head| *head == command),
                "{text}"
            );
        }
        let bench = usage_of("bench");
        assert!(
            bench.contains("--quick") && bench.contains("--annotate"),
            "{bench}"
        );
        assert_eq!(usage_of("--help"), USAGE);
    }
}
