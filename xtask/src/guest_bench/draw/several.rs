//! Study C, the second part: several disks of one guest, one of them slow; a thin one beside a filled one.

use super::super::lines::Lines;
use super::super::rounds::SLOW_IOPS;
use super::super::subject::Subject;
use super::ms;
use crate::report::chart::{Axis, Figure, Marks, Panel, Scale, Series};
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
        Panel {
            title: subject.title.to_owned(),
            x: Axis::new("disk", Scale::Linear),
            y: Axis::new("requests/s", Scale::Linear),
            marks: Marks::Bars {
                groups: groups.clone(),
                series: [
                    ("over-all", "one job over all disks"),
                    ("one-each", "a job for each disk"),
                ]
                .map(form)
                .into(),
            },
        }
    };
    Figure {
        name: "guest-job-forms".to_owned(),
        title: lines.title("One slow disk among four: one fio job over all, against a job for each"),
        subtitle: format!(
            "{}; 4 KiB random reads, 16 in flight over all or 4 for each; the slow disk answers {SLOW_IOPS}/s: behind \
             QEMU's throttle, for Cleave a modelled drive",
            lines.subtitle()
        ),
        columns: 3,
        panels: subjects.iter().map(panel).collect(),
        reads: "with one job all disks fall to the slow one's rate, for it holds the shared depth; with a job for each, \
                only the slow one is slow."
            .to_owned(),
        hides: "how fast a controller is: the comparison is between the two forms, not between panels.".to_owned(),
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
        Panel {
            title: title.to_owned(),
            x: Axis::new("controller", Scale::Linear),
            y: Axis::new(label, Scale::Linear),
            marks: Marks::Bars {
                groups: groups.clone(),
                series: [("filled", "filled disk"), ("thin", "never written disk")]
                    .map(of)
                    .into(),
            },
        }
    };
    Figure {
        name: "guest-thin".to_owned(),
        title: lines.title("A disk that was never written, against a filled one"),
        subtitle: format!(
            "{}; 4 KiB random reads, 8 in flight; of the thin disk every read found only zeroes, of the filled one none",
            lines.subtitle()
        ),
        columns: 2,
        panels: vec![
            panel("IOPS", "requests/s", "/iops", false),
            panel("mean response time", "ms", "/mean_us", true),
        ],
        reads: "where the thin disk looks faster, nothing was read from a drive; such a figure says nothing of one, and \
                all other figures here are of filled disks."
            .to_owned(),
        hides: "what a first write to a thin disk costs.".to_owned(),
    }
}
