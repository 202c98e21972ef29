//! `cargo xtask bench instructions`: how many instructions an I/O costs in the worker, on a null disk, counted
//! by callgrind. The same program and input give the same count, so a change of a few per cent is no noise, and CI can
//! judge it. Time is not measured: instructions say nothing about caches, the kernel, or what waits for what.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Parser;
use serde_json::{Value, json};

use super::callgrind::{Place, Profile};
use crate::report::environment;
use crate::setup;
use crate::step::quietly;

/// File of the reference counts; rewritten by `--accept`.
const REFERENCE: &str = "benches/instructions.toml";
/// A rise beyond this is a failure, a fall beyond it a reason to accept the new count.
const TOLERANCE: f64 = 0.02;
/// The one function of the counted program inside of which callgrind counts.
const COUNTED: &str = "--toggle-collect=*instructions::counted*";
/// Lines of each table of a breakdown.
const SHOWN: usize = 25;

/// The arguments of `cargo xtask bench instructions`.
#[derive(Debug, Default, Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
pub(crate) struct Request {
    /// Keep the new counts; of all cases, never of one.
    #[arg(long, conflicts_with = "case")]
    accept: bool,
    #[arg(long)]
    annotate: bool,
    #[arg(long)]
    case: Option<String>,
}

impl Request {
    pub(crate) fn parse(words: &[&str]) -> Result<Request, String> {
        Request::try_parse_from(words).map_err(|error| error.to_string())
    }
}

/// Instructions per I/O of one case.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Count {
    /// In the program itself: what is judged.
    own: f64,
    /// In the C library, which fills the buffers of reads with zeroes: it chooses its ways by the CPU.
    library: f64,
}

/// Counts every case, leaves `target/bench/instructions`, prints the table; an error where a count rose.
pub(crate) fn run(root: &Path, request: &Request) -> Result<(), String> {
    setup::find("valgrind").ok_or("valgrind is missing; run: apt-get install valgrind")?;
    let folder = root.join("target/bench/instructions");
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let program = build(root)?;
    let results = folder.join("results.jsonl");
    let before = read_results(&std::fs::read_to_string(&results).unwrap_or_default());
    let reference = read_reference(root)?;
    let cases = quietly(root, &[&program.to_string_lossy()], &[])?;
    let is_asked = |case: &&str| request.case.as_deref().is_none_or(|only| only == *case);
    let names: Vec<&str> = cases.lines().collect();
    let cases: Vec<&str> = names.iter().copied().filter(is_asked).collect();
    if cases.is_empty() {
        return Err(format!("--case takes one of: {}", names.join(", ")));
    }
    let mut counts = BTreeMap::new();
    for case in cases {
        let (profile, ios) = count(&folder, &program, case)?;
        let count = summed(&profile, ios, &program);
        counts.insert(case.to_owned(), count);
        if request.annotate {
            annotate(root, case, &profile, ios);
        }
    }
    print_table(&counts, &before, &reference);
    if request.case.is_none() {
        store(root, &folder, &program, [&before, &reference], &counts)?;
        println!("raw data: {}", folder.display());
    }
    if request.accept {
        return accept(root, &counts);
    }
    judge(&counts, &reference, request.case.is_none())
}

/// Builds the program whose instructions are counted, as a release is built.
pub(crate) fn build(root: &Path) -> Result<PathBuf, String> {
    let target = root.join("target").to_string_lossy().into_owned();
    let line = "nice cargo build --release --locked --package cleave-benches --bin instructions";
    let words: Vec<&str> = line.split(' ').collect();
    // Clippy's compiler, which builds the tests in `.ci/run`, optimises less.
    let environment = [
        ("CARGO_TARGET_DIR", &*target),
        ("RUSTC_WORKSPACE_WRAPPER", ""),
    ];
    quietly(root, &words, &environment)?;
    Ok(root.join("target/release/instructions"))
}

/// A case's profile, and the number of I/Os that it is of.
fn count(folder: &Path, program: &Path, case: &str) -> Result<(Profile, f64), String> {
    let profile = folder.join(format!("{case}.callgrind"));
    let out = format!("--callgrind-out-file={}", profile.display());
    let program = program.to_string_lossy();
    let words = [
        "valgrind",
        "--quiet",
        "--tool=callgrind",
        "--compress-strings=no",
        "--compress-pos=no",
        COUNTED,
        &out,
        &program,
        case,
    ];
    let said = quietly(folder, &words, &[])?;
    let ios = said.trim().parse::<f64>().ok().filter(|ios| *ios > 0.0);
    let ios = ios.ok_or_else(|| format!("{case} said `{said}` instead of a number of I/Os"))?;
    let text = std::fs::read_to_string(&profile)
        .map_err(|error| format!("{}: {error}", profile.display()))?;
    let profile = Profile::parse(&text).map_err(|why| format!("{case}: {why}"))?;
    Ok((profile, ios))
}

fn summed(profile: &Profile, ios: f64, program: &Path) -> Count {
    let is_own = |place: &Place| Path::new(&place.object) == program;
    Count {
        own: profile.total(is_own) as f64 / ios,
        library: profile.total(|place| !is_own(place)) as f64 / ios,
    }
}

/// Prints the places of a case's instructions.
fn annotate(root: &Path, case: &str, profile: &Profile, ios: f64) {
    let tables = [
        (
            "function (with what is inlined into it)",
            profile.by(|place| place.function.clone()),
        ),
        (
            "source file (also where inlined)",
            profile.by(|place| shortened(root, &place.file)),
        ),
        (
            "line",
            profile.by(|place| format!("{}:{}", shortened(root, &place.file), place.line)),
        ),
    ];
    for (name, sums) in tables {
        println!("\n{case}: instructions per I/O by {name}");
        for (name, cost) in sums.iter().take(SHOWN) {
            println!("{:>10.1}  {name}", *cost as f64 / ios);
        }
    }
}

/// A path without what all paths begin with: this checkout, the standard library, the registry.
fn shortened(root: &Path, file: &str) -> String {
    if let Ok(own) = Path::new(file).strip_prefix(root) {
        return own.display().to_string();
    }
    let foreign = ["/library/", "/registry/src/"];
    let cut = foreign.iter().find_map(|part| file.split_once(part));
    cut.map_or(file, |(_, rest)| rest).to_owned()
}

fn print_table(
    counts: &BTreeMap<String, Count>,
    before: &BTreeMap<String, f64>,
    reference: &BTreeMap<String, f64>,
) {
    println!(
        "\ninstructions per I/O: 4 KiB reads of a null disk, one vring, driver and kernel not counted"
    );
    println!(
        "{:<20} {:>8} {:>12} {:>10} {:>16} {:>10}",
        "case", "own", "C library", "reference", "to reference", "last run"
    );
    for (case, count) in counts {
        let change = |base: Option<&f64>| {
            base.map_or_else(
                || "–".to_owned(),
                |base| format!("{:+.2} %", (count.own / base - 1.0) * 100.0),
            )
        };
        let known = reference.get(case);
        println!(
            "{case:<20} {:>8.1} {:>12.1} {:>10} {:>16} {:>10}",
            count.own,
            count.library,
            known.map_or_else(|| "–".to_owned(), |known| format!("{known:.1}")),
            change(known),
            change(before.get(case)),
        );
    }
}

/// Fails where a count is above its reference, or has none.
fn judge(
    counts: &BTreeMap<String, Count>,
    reference: &BTreeMap<String, f64>,
    are_all: bool,
) -> Result<(), String> {
    let mut faults = Vec::new();
    for (case, count) in counts {
        match reference.get(case) {
            None => faults.push(format!("{case} has no line in {REFERENCE}")),
            Some(known) if count.own > known * (1.0 + TOLERANCE) => faults.push(format!(
                "{case}: {:.1} instructions per I/O, {known:.1} are known",
                count.own
            )),
            Some(known) if count.own < known * (1.0 - TOLERANCE) => {
                println!("{case} fell; keep that: cargo xtask bench instructions --accept");
            }
            Some(_) => {}
        }
    }
    if are_all {
        let gone = reference.keys().filter(|case| !counts.contains_key(*case));
        faults.extend(gone.map(|case| format!("{REFERENCE} has `{case}`, which is no case")));
    }
    match faults.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{}\nfind them with --annotate; where they are worth it, --accept and say why in the commit",
            faults.join("\n")
        )),
    }
}

fn store(
    root: &Path,
    folder: &Path,
    program: &Path,
    [before, reference]: [&BTreeMap<String, f64>; 2],
    counts: &BTreeMap<String, Count>,
) -> Result<(), String> {
    let write = |name: &str, text: &str| {
        std::fs::write(folder.join(name), text).map_err(|error| format!("{name}: {error}"))
    };
    let mut environment = environment::describe(root, program, &Value::Null);
    // The counted program is not the daemon, and has no version.
    environment["cleave"] = Value::Null;
    environment["valgrind"] = quietly(root, &["valgrind", "--version"], &[])?
        .trim()
        .into();
    write("environment.json", &format!("{environment:#}\n"))?;
    let line = |(case, count): (&String, &Count)| {
        let line = json!({
            "suite": "instructions", "case": case,
            "own_per_io": count.own, "library_per_io": count.library,
            "own_per_io_before": before.get(case), "own_per_io_reference": reference.get(case),
        });
        format!("{line}\n")
    };
    write(
        "results.jsonl",
        &counts.iter().map(line).collect::<String>(),
    )
}

/// The counts of an earlier run, as far as its lines can be read.
fn read_results(text: &str) -> BTreeMap<String, f64> {
    let read = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        Some((
            line["case"].as_str()?.to_owned(),
            line["own_per_io"].as_f64()?,
        ))
    };
    text.lines().filter_map(read).collect()
}

/// The committed counts; none where the file is not there.
fn read_reference(root: &Path) -> Result<BTreeMap<String, f64>, String> {
    let text = std::fs::read_to_string(root.join(REFERENCE)).unwrap_or_default();
    parse_reference(&text)
}

/// `name = number` lines, comments, empty lines: what `accept` writes, a piece of TOML.
fn parse_reference(text: &str) -> Result<BTreeMap<String, f64>, String> {
    let lines = text.lines().map(str::trim);
    lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let pair = line.split_once('=').and_then(|(name, number)| {
                let number = number.trim().parse::<f64>().ok()?;
                (number > 0.0).then(|| (name.trim().to_owned(), number))
            });
            pair.ok_or(format!("{REFERENCE}: `{line}` is no count"))
        })
        .collect()
}

fn accept(root: &Path, counts: &BTreeMap<String, Count>) -> Result<(), String> {
    let mut text = "\
# Instructions per I/O in the worker, counted by callgrind: `cargo xtask bench instructions` fails when one rises by
# more than 2 %, and rewrites this file with `--accept`. What they are counts of stands in `instructions.rs`.
"
    .to_owned();
    for (case, count) in counts {
        text.push_str(&format!("{case} = {:.1}\n", count.own));
    }
    std::fs::write(root.join(REFERENCE), text).map_err(|error| format!("{REFERENCE}: {error}"))?;
    println!("{REFERENCE} is rewritten");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read() {
        let all = Request::parse(&["--annotate", "--case", "poll-1-direct"]).unwrap();
        assert!(all.annotate && !all.accept);
        assert_eq!(all.case.as_deref(), Some("poll-1-direct"));
        for words in [
            &["--case"][..],
            &["--all"],
            &["--accept", "--case", "poll-1-direct"],
        ] {
            assert!(Request::parse(words).is_err(), "{words:?}");
        }
    }

    fn counts(own: f64) -> BTreeMap<String, Count> {
        let count = Count { own, library: 1e9 };
        [("case".to_owned(), count)].into()
    }

    #[test]
    fn a_rise_beyond_the_tolerance_fails_and_nothing_else_of_a_known_case() {
        let reference = parse_reference("# counts\n\ncase = 1000.0\n").unwrap();
        for (own, is_fine) in [(1019.0, true), (1021.0, false), (500.0, true)] {
            assert_eq!(
                judge(&counts(own), &reference, true).is_ok(),
                is_fine,
                "{own}"
            );
        }
        assert!(judge(&counts(1.0), &BTreeMap::new(), true).is_err());
        let stale = parse_reference("case = 1000.0\ngone = 1.0").unwrap();
        assert!(judge(&counts(1000.0), &stale, true).is_err());
        assert!(judge(&counts(1000.0), &stale, false).is_ok());
    }

    #[test]
    fn a_reference_that_cannot_be_read_is_no_reference() {
        for text in ["case", "case = ", "case = 0", "case = fast", "[table]"] {
            assert!(parse_reference(text).is_err(), "{text}");
        }
    }

    #[test]
    fn paths_lose_what_they_all_begin_with() {
        let root = Path::new("/somewhere/cleave");
        let table = [
            (
                "/somewhere/cleave/crates/blk/src/plan.rs",
                "crates/blk/src/plan.rs",
            ),
            (
                "/rustc/5980/library/core/src/option.rs",
                "core/src/option.rs",
            ),
            ("./string/memset.S", "./string/memset.S"),
        ];
        for (path, short) in table {
            assert_eq!(shortened(root, path), short);
        }
    }
}
