//! `bench instructions`: how many instructions an I/O costs in the worker, on a null disk, counted by
//! callgrind. The same program and input give the same count, so a change of a few per cent is not noise, and CI can judge
//! it. Time is not measured: instructions say nothing about caches, the kernel, or what waits for what.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use clap::Args;
use cleave_rig::built;
use cleave_rig::setup;
use cleave_rig::{At, Result, quietly};
use serde_json::{Value, json};

use crate::equipment::Equipment;
use crate::run_folder::{RecordedRun, Run, environment};

/// File of the reference counts; rewritten by `--accept`.
const REFERENCE: &str = "benches/instructions.toml";
/// A rise beyond this is a failure, a fall beyond it a reason to accept the new count.
const TOLERANCE: f64 = 0.02;

/// Counts inside of one function of the program.
const COUNT: &str = "valgrind --quiet --tool=callgrind --compress-strings=no --compress-pos=no \
--toggle-collect=*instructions::counted* --callgrind-out-file={} {} {}";

#[derive(Debug, Default, Clone, Args)]
#[command(next_help_heading = "Options of `bench instructions`")]
pub(crate) struct Counting {
    /// Make these counts the ones to judge by
    #[arg(long, conflicts_with = "case")]
    accept: bool,
    /// Show where they are: functions, and lines of the source
    #[arg(long)]
    annotate: bool,
    /// Count one case only
    #[arg(long, value_name = "NAME")]
    case: Option<String>,
}

/// Instructions per I/O of one case.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Count {
    /// In the program itself. Only these are judged.
    own: f64,
    /// In the C library, which fills the buffers of reads with zeroes, in a way that depends on the CPU.
    library: f64,
}

/// Counts by case.
type Known = BTreeMap<String, f64>;

/// Counts every case, leaves `target/bench/instructions`, prints the table; an error where a count rose.
pub(crate) fn run(equipment: &Equipment, options: &Counting) -> Result {
    let root = equipment.sources()?;
    setup::find("valgrind").ok_or("valgrind is missing; run: apt-get install valgrind")?;
    let folder = equipment.folder().join("bench/instructions");
    std::fs::create_dir_all(&folder).at(&folder)?;
    let program = built::instructions(root)?;
    let before = last_run(&folder);
    let reference = reference(&std::fs::read_to_string(root.join(REFERENCE)).unwrap_or_default())?;
    let names = quietly(root, "{}", &[&program.display()])?;
    let is_asked = |case: &&str| options.case.as_deref().is_none_or(|only| only == *case);
    let mut counts = BTreeMap::new();
    for case in names.lines().filter(is_asked) {
        let profile = folder.join(format!("{case}.callgrind"));
        counts.insert(case.to_owned(), count(&program, case, &profile)?);
        if options.annotate {
            let line = "callgrind_annotate --auto=yes {}";
            println!("{}", quietly(root, line, &[&profile.display()])?);
        }
    }
    if counts.is_empty() {
        let names = names.trim().replace('\n', ", ");
        return Err(format!("--case takes one of: {names}"));
    }
    print_table(&counts, &before, &reference);
    if options.case.is_none() {
        store(equipment, &folder, &program, [&before, &reference], &counts)?;
    }
    match options.accept {
        true => accept(root, &counts),
        false => judge(&counts, &reference, options.case.is_none()),
    }
}

fn count(program: &Path, case: &str, profile: &Path) -> Result<Count> {
    let values: [&dyn std::fmt::Display; 3] = [&profile.display(), &program.display(), &case];
    let said = quietly(Path::new("/"), COUNT, &values)?;
    let ios = said.trim().parse::<f64>().ok().filter(|ios| *ios > 0.0);
    let ios = ios.ok_or_else(|| format!("{case} said `{said}` instead of a number of I/Os"))?;
    let text = std::fs::read_to_string(profile).at(profile)?;
    let by_object = by_object(&text).at(case)?;
    let own = by_object.get(&*program.to_string_lossy());
    let own = own.copied().unwrap_or(0) as f64;
    let all = by_object.values().sum::<u64>() as f64;
    Ok(Count {
        own: own / ios,
        library: (all - own) / ios,
    })
}

/// Instructions of each program and library, from a profile with one event and nothing compressed.
fn by_object(text: &str) -> Result<BTreeMap<String, u64>> {
    let (mut sums, mut object, mut summary) = (BTreeMap::new(), "", None);
    let mut is_callees = false;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("ob=") {
            object = name;
        } else if let Some(sum) = line.strip_prefix("summary: ") {
            summary = sum.trim().parse::<u64>().ok();
        } else if line.starts_with(|first: char| first.is_ascii_digit()) && !is_callees {
            let cost = line.split_once(' ').map_or("", |(_, cost)| cost);
            let cost: u64 = cost.parse().at(format!("callgrind wrote `{line}`"))?;
            *sums.entry(object.to_owned()).or_default() += cost;
        }
        // The line below is the cost of the callee, which stands at its own place too.
        is_callees = line.starts_with("calls=");
    }
    match (summary, sums.values().sum::<u64>()) {
        (Some(sum), total) if sum == total && sum > 0 => Ok(sums),
        (sum, total) => Err(format!(
            "callgrind's sum is {sum:?}, that of its lines {total}"
        )),
    }
}

fn print_table(counts: &BTreeMap<String, Count>, before: &Known, reference: &Known) {
    println!(
        "\ninstructions per I/O: 4 KiB reads of a null disk, one vring, driver and kernel not counted"
    );
    let row = |case: &str, [own, library, known, change, last]: [&str; 5]| {
        println!("{case:<20} {own:>8} {library:>12} {known:>10} {change:>16} {last:>10}");
    };
    row(
        "case",
        ["own", "C library", "reference", "to reference", "last run"],
    );
    for (case, Count { own, library }) in counts {
        let change = |base: &f64| format!("{:+.2} %", (own / base - 1.0) * 100.0);
        let or_none = |text: Option<String>| text.unwrap_or("–".to_owned());
        let (known, last) = (reference.get(case), before.get(case));
        let [own, library] = [own, library].map(|count| format!("{count:.1}"));
        let known_count = or_none(known.map(|known| format!("{known:.1}")));
        let [known, last] = [known, last].map(|base| or_none(base.map(change)));
        row(case, [&own, &library, &known_count, &known, &last]);
    }
}

/// Fails where a count is above its reference, or has none.
fn judge(counts: &BTreeMap<String, Count>, reference: &Known, are_all: bool) -> Result {
    let mut faults = Vec::new();
    for (case, Count { own, .. }) in counts {
        match reference.get(case) {
            None => faults.push(format!("{case} has no line in {REFERENCE}")),
            Some(known) if *own > known * (1.0 + TOLERANCE) => {
                let fault = format!("{case}: {own:.1} instructions per I/O, {known:.1} are known");
                faults.push(fault);
            }
            Some(known) if *own < known * (1.0 - TOLERANCE) => {
                println!("{case} fell; keep that: cargo xtask bench instructions --accept");
            }
            Some(_) => {}
        }
    }
    if are_all {
        let gone = reference.keys().filter(|case| !counts.contains_key(*case));
        faults.extend(gone.map(|case| format!("{REFERENCE} has `{case}`, which is not a case")));
    }
    let remedy =
        "find them with --annotate; where they are worth it, --accept and say why in the commit";
    match faults.is_empty() {
        true => Ok(()),
        false => Err(format!("{}\n{remedy}", faults.join("\n"))),
    }
}

/// Leaves the counts as a run that can be drawn.
fn store(
    equipment: &Equipment,
    folder: &Path,
    program: &Path,
    [before, reference]: [&Known; 2],
    counts: &BTreeMap<String, Count>,
) -> Result {
    let version = quietly(folder, "valgrind --version", &[])?;
    // The counted program is not the daemon, and has no version.
    let facts = json!({ "cleave": Value::Null, "valgrind": version.trim() });
    let mut run = Run::create(folder, &environment(equipment, program, &facts), json!({}))?;
    for (case, count) in counts {
        let result = json!({
            "own_per_io": count.own, "library_per_io": count.library,
            "own_per_io_before": before.get(case), "own_per_io_reference": reference.get(case),
        });
        let line = json!({ "round": 1, "point": case, "subject": "worker", "result": result });
        run.note("instructions", &line)?;
    }
    println!("raw data: {}", run.finish()?.display());
    Ok(())
}

/// Returns the counts of an earlier run, as far as its lines can be read.
fn last_run(folder: &Path) -> Known {
    let run = RecordedRun::read(folder).unwrap_or_default();
    let lines = run.of("instructions").into_iter();
    let read = |line: &Value| {
        let count = line["result"]["own_per_io"].as_f64()?;
        Some((line["point"].as_str()?.to_owned(), count))
    };
    lines.filter_map(read).collect()
}

/// Returns the committed counts; none where the file is not there.
fn reference(text: &str) -> Result<Known> {
    let known: Known = toml::from_str(text).at(REFERENCE)?;
    match known.iter().find(|(_, count)| **count <= 0.0) {
        Some((case, count)) => Err(format!("{REFERENCE}: {case} = {count} is not a count")),
        None => Ok(known),
    }
}

fn accept(root: &Path, counts: &BTreeMap<String, Count>) -> Result {
    let mut text = "\
# Instructions per I/O in the worker, counted by callgrind: `cargo xtask bench instructions` fails when one rises by
# more than 2 %, and rewrites this file with `--accept`. What they are counts of stands in `instructions.rs`.
"
    .to_owned();
    for (case, count) in counts {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{case} = {:.1}", count.own);
    }
    std::fs::write(root.join(REFERENCE), text).at(REFERENCE)?;
    println!("{REFERENCE} is rewritten");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rise_beyond_the_tolerance_fails_and_nothing_else_of_a_known_case() {
        let counts = |own| [("case".to_owned(), Count { own, library: 1e9 })].into();
        let known = reference("# counts\n\ncase = 1000.0\n").unwrap();
        for (own, is_fine) in [(1019.0, true), (1021.0, false), (500.0, true)] {
            assert_eq!(judge(&counts(own), &known, true).is_ok(), is_fine, "{own}");
        }
        assert!(judge(&counts(1.0), &Known::new(), true).is_err());
        let stale = reference("case = 1000.0\ngone = 1.0").unwrap();
        assert!(judge(&counts(1000.0), &stale, true).is_err());
        assert!(judge(&counts(1000.0), &stale, false).is_ok());
    }

    #[test]
    fn a_reference_that_cannot_be_read_is_no_reference() {
        for text in ["case", "case = ", "case = 0.0", "case = fast", "[table]"] {
            assert!(reference(text).is_err(), "{text}");
        }
    }

    const TEXT: &str = "\
events: Ir
summary: 130

ob=/bin/program
fn=main
3 10
cob=/lib/c.so
calls=2 7
4 100
8 15
5 5

ob=/lib/c.so
fn=copy
7 60
8 40
";

    #[test]
    fn costs_are_an_objects_own_and_add_up() {
        let sums = by_object(TEXT).unwrap();
        assert_eq!((sums["/bin/program"], sums["/lib/c.so"]), (30, 100));
        for (from, to) in [
            ("summary: 130", "summary: 131"),
            ("summary: 130", ""),
            ("8 40", "8 40 1"),
            ("8 40", "8 x"),
            ("calls=2 7", ""),
        ] {
            assert!(
                by_object(&TEXT.replace(from, to)).is_err(),
                "{from:?} became {to:?}"
            );
        }
        assert!(by_object("summary: 0\n").is_err());
    }
}
