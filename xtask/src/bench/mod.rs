//! Comparisons with other daemons and with the disk itself, interleaved in one run: a ratio of two things is
//! measured side by side, round by round, and quoted as the median of the rounds with its minimum and maximum.

mod callgrind;
mod counts;
mod cpu;
mod cpus;
mod desk;
mod draw;
mod fio;
mod idle;
pub(crate) mod image;
pub(crate) mod instructions;
mod interleave;
mod legs;
mod load;
mod matrix;
mod options;
mod others;
mod pacing;
mod recording;
mod scale;
mod spdk;
mod split;
mod start;
mod subject;
mod tax;
mod transport;

use std::path::Path;
use std::time::Instant;

use crate::report::{self, Draw};
use desk::Desk;
use options::{Options, Pace};
use others::Used;

/// A question, and what answers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Suite {
    Transport,
    Cpu,
    Tax,
    Split,
    Pacing,
    Idle,
    Scale,
    Start,
    Instructions,
    Recording,
}

/// The functions that draw the suites, in the order of the page.
pub(crate) const DRAWN: &[Draw] = &[
    transport::section,
    cpu::section,
    tax::section,
    split::section,
    pacing::section,
    idle::section,
    scale::section,
    start::section,
    counts::section,
    recording::section,
];

impl Suite {
    const ALL: &'static [Suite] = &[
        Suite::Transport,
        Suite::Cpu,
        Suite::Tax,
        Suite::Split,
        Suite::Pacing,
        Suite::Idle,
        Suite::Scale,
        Suite::Start,
        Suite::Instructions,
        Suite::Recording,
    ];

    /// As the command line and the raw lines call it.
    fn name(self) -> &'static str {
        match self {
            Suite::Transport => "transport",
            Suite::Cpu => "cpu",
            Suite::Tax => "tax",
            Suite::Split => "split",
            Suite::Pacing => "pacing",
            Suite::Idle => "idle",
            Suite::Scale => "scale",
            Suite::Start => "start",
            Suite::Instructions => "instructions",
            Suite::Recording => "recording",
        }
    }

    fn measure(self, desk: &mut Desk) -> Result<(), String> {
        match self {
            Suite::Transport => transport::measure(desk),
            Suite::Cpu => cpu::measure(desk),
            Suite::Tax => tax::measure(desk),
            Suite::Split => split::measure(desk),
            Suite::Pacing => pacing::measure(desk),
            Suite::Idle => idle::measure(desk),
            Suite::Scale => scale::measure(desk),
            Suite::Start => start::measure(desk),
            Suite::Instructions => counts::measure(desk),
            Suite::Recording => recording::measure(desk),
        }
    }
}

/// Measures what the words ask for and leaves a folder with raw data, figures and a page.
pub(crate) fn run(root: &Path, words: &[&str]) -> Result<(), String> {
    let options = Options::parse_words(words)?;
    let mut desk = Desk::set_up(root, &options, words)?;
    let folder = desk.run.folder().to_owned();
    println!(
        "driver on CPU {}, daemon on CPU {}; {} rounds of {} s; raw data: {}",
        desk.cpus.driver,
        desk.cpus.daemon,
        desk.effort.rounds,
        desk.effort.seconds,
        folder.display()
    );
    let mut failed = Vec::new();
    for suite in options.suites() {
        if !measure_one(suite, &mut desk)? {
            failed.push(suite.name());
        }
        report::draw(std::slice::from_ref(&folder), &folder)?;
    }
    if failed.is_empty() {
        desk.run.finish()?;
    }
    let page = report::draw(std::slice::from_ref(&folder), &folder)?;
    if desk.effort.pace != Pace::Smoke {
        report::print_verdicts(&folder)?;
    }
    println!("{}", page.display());
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("ended early: {}", failed.join(", "))),
    }
}

/// Whether it came to its end: one suite's failure says nothing of the others.
fn measure_one(suite: Suite, desk: &mut Desk) -> Result<bool, String> {
    let name = suite.name();
    println!("{name}");
    let (start, used) = (Instant::now(), Used::now());
    let done = suite.measure(desk);
    let is_judged = desk.effort.pace != Pace::Smoke;
    if let Some(complaint) = used.complaint().filter(|_| is_judged) {
        desk.run.warn(name, &complaint)?;
    }
    if let Err(why) = &done {
        desk.run.warn(name, &format!("ended early: {why}"))?;
    }
    println!("{name} took {:.0} s", start.elapsed().as_secs_f64());
    Ok(done.is_ok())
}
