//! `cargo xtask guest-bench`: the same disk in guests, attached in every way there is, at the same offered
//! load. Whatever cannot be measured is named with its reason.

pub(crate) mod draw;
mod fio;
mod job;
mod lab;
mod lines;
mod options;
mod rounds;
mod stages;
mod subject;
mod turn;

use std::path::Path;
use std::time::Instant;

use serde_json::json;

use crate::guest::machine::QEMU;
use crate::report::{self, Run};
use crate::step::quietly;
use lab::Lab;
pub(crate) use lab::fetch_kernel;
use options::{Effort, Options};
use rounds::{Rounds, SUITE};
use turn::{GUEST_CPU, SERVER_CPU};

/// Fewer rounds say nothing about the spread.
const ROUNDS_MIN: u32 = 5;

/// Measures, and leaves raw data and a page in `target/bench/guest` or where it was told.
pub(crate) fn run(root: &Path, words: &[&str]) -> Result<(), String> {
    let options = Options::parse_words(words)?;
    let plan = options.plan();
    let lab = Lab::set_up(root, &options)?;
    let out = options
        .out
        .clone()
        .unwrap_or_else(|| root.join("target/bench/guest"));
    let accelerator = lab.accelerator.name();
    println!(
        "guest: Linux {}, accelerator {accelerator}; its CPU on CPU {GUEST_CPU}, all that serves it on CPU {SERVER_CPU}",
        lab.kernel.release
    );
    let pinning = json!({ "guest_cpu": GUEST_CPU, "server_cpu": SERVER_CPU });
    let mut environment = report::environment::describe(root, &lab.cleave, &pinning);
    if let Some(environment) = environment.as_object_mut() {
        environment.insert("accelerator".to_owned(), json!(accelerator));
        let version = |program: &str| {
            let said = quietly(root, &[program, "--version"], &[]).unwrap_or_default();
            json!(said.lines().next().unwrap_or_default())
        };
        environment.insert("qemu".to_owned(), version(QEMU));
        environment.insert("fio".to_owned(), version("fio"));
        environment.insert("guest_kernel".to_owned(), json!(lab.kernel.release));
    }
    let asked = json!({
        "command": format!("guest-bench {}", words.join(" ")), "rounds": plan.rounds, "seconds": plan.seconds,
        "disk_bytes": plan.disk_bytes, "accelerator": accelerator,
    });
    let mut run = Run::create(&out, &environment, &asked)?;
    let start = Instant::now();
    let measured = measure(&lab, &options, &mut run);
    // The results so far are shown even if a full disk ended the run.
    let finished = measured.and_then(|gaps| run.finish().map(|_| gaps));
    let page = report::draw(std::slice::from_ref(&out), &out)?;
    println!(
        "measured for {} s; {}",
        start.elapsed().as_secs(),
        page.display()
    );
    match finished? {
        // A report with a gap says so and is worth reading; a check that the harness works must not have one.
        gaps if gaps > 0 && options.effort() == Effort::Smoke => Err(format!(
            "{gaps} gaps in what was to be measured; the warnings above name them"
        )),
        _ => Ok(()),
    }
}

/// How many controllers or turns are missing.
fn measure(lab: &Lab, options: &Options, run: &mut Run) -> Result<usize, String> {
    let plan = options.plan();
    if plan.rounds < ROUNDS_MIN && options.effort() != Effort::Smoke {
        run.warn(
            SUITE,
            &format!(
                "{} rounds tell little of the spread; a figure to be quoted needs {ROUNDS_MIN}",
                plan.rounds
            ),
        )?;
    }
    let mut subjects = Vec::new();
    let asked = options.subjects();
    for subject in &asked {
        match lab.lacks(subject) {
            None => subjects.push(*subject),
            Some(why) => {
                run.note(
                    SUITE,
                    &json!({ "point": "missing", "subject": subject.name, "why": why }),
                )?;
                run.warn(SUITE, &format!("{} is not measured: {why}", subject.name))?;
            }
        }
    }
    let missing = asked.len() - subjects.len();
    let mut rounds = Rounds::new(lab, &plan, subjects, run);
    rounds.measure()?;
    Ok(missing + rounds.troubles())
}
