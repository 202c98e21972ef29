//! `cleave-lab guest-bench`: the same disk in guests, attached in every way there is, at the same offered load. Whatever
//! cannot be measured is named with its reason.

mod guest;
mod jobs;
mod kit;
mod options;
mod rounds;
mod stages;
mod subject;

use std::collections::BTreeMap;
use std::time::Instant;

use cleave_rig::guest::{Accelerator, QEMU};
use cleave_rig::{Result, quietly};
use serde_json::json;

use crate::equipment::Equipment;
use crate::report;
use crate::run_folder::{Run, environment};
use guest::{GUEST_CPU, SERVER_CPU};
use kit::GuestKit;
pub(crate) use kit::PROGRAMS;
pub(crate) use options::{GuestBenchOptions, KernelOptions};
use rounds::{GuestRun, SUITE};

/// Fewer rounds say nothing about the spread.
const ROUNDS_MIN: u32 = 5;

/// Measures, and leaves raw data and a page in `bench/guest` of the equipment's folder, or where it was told.
pub(crate) fn run(equipment: &Equipment, options: &GuestBenchOptions) -> Result {
    let kit = GuestKit::set_up(equipment, options)?;
    let out = options.out.clone();
    let out = out.unwrap_or_else(|| equipment.folder().join("bench/guest"));
    let (release, accelerator) = (&kit.kernel.release, kit.accelerator.name());
    println!(
        "guest: Linux {release}, accelerator {accelerator}; its CPU on CPU {GUEST_CPU}, all that serves it on CPU {SERVER_CPU}"
    );
    let version = quietly(&kit.folder, "{} --version", &[&QEMU])?;
    let facts = json!({
        "pinning": { "guest_cpu": GUEST_CPU, "server_cpu": SERVER_CPU }, "accelerator": accelerator,
        "guest_cpu": match kit.accelerator { Accelerator::Kvm => "KVM", Accelerator::Tcg => "emulated CPU" },
        "guest_kernel": release, "qemu": version.lines().next(),
    });
    let environment = environment(equipment, &kit.cleave, &facts);
    let effort = options.effort();
    let asked = json!({
        "rounds": effort.rounds, "seconds": effort.seconds, "disk_bytes": effort.disk_bytes,
        "accelerator": accelerator,
    });
    let mut run = Run::create(&out, &environment, asked)?;
    let start = Instant::now();
    let measured = measure(&kit, options, &mut run);
    // The results so far are shown even if a full disk ended the run.
    let finished = measured.and_then(|gaps| run.finish().map(|_| gaps));
    let page = report::draw(std::slice::from_ref(&out))?;
    let seconds = start.elapsed().as_secs();
    println!("measured for {seconds} s; {}", page.display());
    match finished? {
        // A report with a gap says so and is worth reading; a check that the harness works must not have one.
        gaps if gaps > 0 && options.pace.smoke => Err(format!(
            "{gaps} gaps in what was to be measured; the warnings above name them"
        )),
        _ => Ok(()),
    }
}

/// Measures, and returns how many controllers or turns are missing.
fn measure(kit: &GuestKit, options: &GuestBenchOptions, run: &mut Run) -> Result<usize> {
    let effort = options.effort();
    if effort.rounds < ROUNDS_MIN && !options.pace.smoke {
        let rounds = effort.rounds;
        let text = format!(
            "{rounds} rounds tell little of the spread; a figure to be quoted needs {ROUNDS_MIN}"
        );
        run.warn(SUITE, &text)?;
    }
    if kit.accelerator == Accelerator::Tcg {
        run.warn(
            SUITE,
            "the guest's CPU is emulated (TCG): it is several times slower than this machine's, it limits most figures here, and \
             a register access costs no VM exit. So emulated controllers look better than they do with KVM, most at depth 1, \
             and absolute figures mean nothing",
        )?;
    }
    let mut subjects = Vec::new();
    let asked = options.subjects();
    for subject in &asked {
        match kit.lacks(subject) {
            None => subjects.push(*subject),
            Some(why) => run.warn(SUITE, &format!("{} is not measured: {why}", subject.title))?,
        }
    }
    let missing = asked.len() - subjects.len();
    let mut rounds = GuestRun {
        kit,
        effort: &effort,
        subjects,
        run,
        troubles: BTreeMap::new(),
    };
    rounds.measure()?;
    Ok(missing + rounds.troubles.values().sum::<usize>())
}
