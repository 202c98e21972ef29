//! Comparisons with other daemons and with the disk itself, interleaved in one run: a ratio of two things is measured
//! side by side, round by round, and quoted as the median of the rounds with its minimum and maximum.

mod bare;
mod cpus;
mod desk;
mod distance;
mod instructions;
mod load;
mod network;
mod options;
mod others;
mod pause;
mod rest;
mod subject;
mod suites;

use std::time::Instant;

use cleave_rig::Result;

use crate::equipment::Equipment;
use crate::pace::BenchPace;
use crate::report;
use cpus::Cpus;
use desk::Desk;
pub(crate) use desk::PROGRAMS;
pub(crate) use options::{BenchOptions, Suite};
use others::CpuUsage;

/// Measures, and leaves a folder with raw data, figures and a page.
pub(crate) fn run(equipment: &Equipment, options: &BenchOptions) -> Result {
    if options.named == [Suite::Instructions] {
        return instructions::run(equipment, &options.counting);
    }
    let mut desk = Desk::set_up(equipment, options)?;
    let folder = desk.run.folder().to_owned();
    let mut failed = Vec::new();
    for suite in options.suites() {
        if let Some(why) = desk.lacks_for(suite) {
            desk.run.warn(&suite.name(), &why)?;
        } else if !measure_one(suite, &mut desk)? {
            failed.push(suite.name());
        }
        report::draw(std::slice::from_ref(&folder))?;
    }
    let pace = desk.pace;
    if failed.is_empty() {
        desk.run.finish()?;
    }
    let page = report::draw(std::slice::from_ref(&folder))?;
    if pace != BenchPace::Smoke {
        report::print_verdicts(&folder)?;
    }
    println!("{}", page.display());
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("ended early: {}", failed.join(", "))),
    }
}

/// Returns where the driver and the daemon run, and the caveat of that if there is one.
pub(crate) fn placement() -> Result<(String, Option<String>)> {
    let cpus = Cpus::choose()?;
    let placement = format!(
        "driver on CPU {}, daemon on CPU {}",
        cpus.driver, cpus.daemon
    );
    Ok((placement, cpus.caveat))
}

/// Runs a suite; returns whether it came to its end, for one suite's failure says nothing about the others.
fn measure_one(suite: Suite, desk: &mut Desk) -> Result<bool> {
    let name = suite.name();
    println!("{name}");
    let (start, used) = (Instant::now(), CpuUsage::now());
    let done = measure(suite, desk);
    let is_judged = desk.pace != BenchPace::Smoke;
    if let Some(complaint) = used.complaint().filter(|_| is_judged) {
        desk.run.warn(&name, &complaint)?;
    }
    if let Err(why) = &done {
        desk.run.warn(&name, &format!("ended early: {why}"))?;
    }
    println!("{name} took {:.0} s", start.elapsed().as_secs_f64());
    Ok(done.is_ok())
}

fn measure(suite: Suite, desk: &mut Desk) -> Result {
    match suite {
        Suite::Transport => suites::transport(desk),
        Suite::Cpu => suites::cpu(desk),
        Suite::Tax => suites::tax(desk),
        Suite::Split => suites::split(desk),
        Suite::Pacing => suites::pacing(desk),
        Suite::Idle => rest::idle(desk),
        Suite::Scale => suites::scale(desk),
        Suite::Network => network::measure(desk),
        Suite::Start => rest::start(desk),
        Suite::Pause => pause::measure(desk),
        Suite::Instructions => rest::instructions(desk),
        Suite::Recording => suites::recording(desk),
        Suite::All => Ok(()),
    }
}
