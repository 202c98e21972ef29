//! Study C, the second part: several disks of one guest, one of them slow; a thin one beside a filled one.

use super::super::lines::Lines;
use super::super::rounds::SLOW_IOPS;
use super::super::subject::Subject;
use super::{bars, figure, ms};
use crate::report::chart::{Figure, Series};
use crate::report::{Section, Spread};

const DISKS: usize = 4;

pub(super) fn add(lines: &Lines<'_>, section: &mut Section) {
    let subjects = lines.subjects("over-all");
    if subjects.is_empty() {
        return;
    }
    section.figures.push(forms(lines, &subjects));
    section.figures.push(thin(lines, &lines.subjects("thin")));
}

fn forms(lines: &Lines<'_>, subjects: &[&Subject]) -> Figure {
    let names = (1..DISKS).map(|number| format!("disk {number}"));
    let groups: Vec<String> = names.chain(["slow disk".to_owned()]).collect();
    let panel = |subject: &&Subject| {
        let form = |(point, name): (&str, &str)| {
            let of = |disk: usize| disk_spread(lines, point, subject.name, disk);
            Series::new(name, (0..DISKS).map(of).collect())
        };
        let series = [
            ("over-all", "one job over all disks"),
            ("one-each", "a job for each disk"),
        ];
        let series = series.map(form).into();
        bars(subject.title, ("disk", "requests/s"), &groups, series)
    };
    let detail = format!(
        "4 KiB random reads, 16 in flight over all or 4 for each; the slow disk answers {SLOW_IOPS}/s: behind QEMU's \
         throttle, for Cleave a modelled drive"
    );
    let figure = figure(
        lines,
        (
            "guest-job-forms",
            "One slow disk among four: one fio job over all, against a job for each",
            &detail,
        ),
        subjects.iter().map(panel).collect(),
        (
            "with one job all disks fall to the rate of the slow one, because it holds the shared depth; with a job for \
             each, only the slow one is slow",
            "how fast a controller is: the comparison is between the two forms, not between panels",
        ),
    );
    Figure {
        columns: 3,
        ..figure
    }
}

/// A disk's rate, by round.
fn disk_spread(lines: &Lines<'_>, point: &str, subject: &str, disk: usize) -> Option<Spread> {
    let own = lines
        .at(point)
        .filter(|line| line["subject"] == subject && line["disk"] == disk);
    let values: Vec<f64> = own.filter_map(|line| line["iops"].as_f64()).collect();
    Spread::of(&values)
}

fn thin(lines: &Lines<'_>, subjects: &[&Subject]) -> Figure {
    let groups: Vec<String> = subjects.iter().map(|one| one.title.to_owned()).collect();
    let panel = |title: &str, label: &str, path: &str, is_time: bool| {
        let of = |(point, name): (&str, &str)| {
            let value = |one: &&Subject| {
                let spread = lines.spread(point, one.name, path)?;
                Some(if is_time { ms(spread) } else { spread })
            };
            Series::new(name, subjects.iter().map(value).collect())
        };
        let series = [("filled", "filled disk"), ("thin", "never written disk")];
        let series = series.map(of).into();
        bars(title, ("controller", label), &groups, series)
    };
    figure(
        lines,
        (
            "guest-thin",
            "A disk that was never written, against a filled one",
            "4 KiB random reads, 8 in flight; of the thin disk every read found only zeroes, of the filled one none",
        ),
        vec![
            panel("IOPS", "requests/s", "/iops", false),
            panel("mean response time", "ms", "/mean_us", true),
        ],
        (
            "where the thin disk looks faster, nothing was read from a drive; all other figures here are of filled disks",
            "what a first write to a thin disk costs",
        ),
    )
}
