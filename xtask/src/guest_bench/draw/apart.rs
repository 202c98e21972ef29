//! Study B: IOPS, and where the CPU time of a request goes.

use super::super::lines::Lines;
use super::super::subject::Subject;
use super::{bars, said};
use crate::report::chart::{Axis, Figure, Marks, Panel, Scale, Series};
use crate::report::{Section, Table};

/// Points of this study, and how they are said.
const POINTS: [(&str, &str, &str); 2] = [
    ("reads-1", "kicks-1", "depth 1"),
    ("reads-32", "kicks-32", "depth 32"),
];

const STAGES: [(&str, &str); 4] = [
    ("/cpu_per_io/guest_us", "guest"),
    ("/cpu_per_io/vmm_us", "VMM"),
    ("/cpu_per_io/backend_user_us", "backend, user"),
    ("/cpu_per_io/backend_kernel_us", "backend, kernel"),
];

pub(super) fn add(lines: &Lines<'_>, section: &mut Section) {
    if lines.subjects("reads-32").is_empty() {
        return;
    }
    section.tables.push(table(lines));
    section.figures.push(figure(lines));
}

/// A bar for each subject, its stages one above the other; medians.
pub(super) fn cpu_panel(
    lines: &Lines<'_>,
    point: &str,
    subjects: &[&Subject],
    title: &str,
) -> Panel {
    let part = |(path, name): &(&str, &str)| {
        let value = |one: &&Subject| {
            lines
                .spread(point, one.name, path)
                .map_or(0.0, |s| s.median)
        };
        Series::new(*name, subjects.iter().map(value).collect())
    };
    Panel {
        title: title.to_owned(),
        x: Axis::new("controller", Scale::Linear),
        y: Axis::new("µs of CPU per request", Scale::Linear),
        marks: Marks::Stacked {
            bars: subjects.iter().map(|one| one.title.to_owned()).collect(),
            parts: STAGES.iter().map(part).collect(),
        },
    }
}

fn table(lines: &Lines<'_>) -> Table {
    let mut head = vec!["4 KiB random reads".to_owned(), "IOPS".to_owned()];
    head.extend(STAGES.iter().map(|(_, name)| format!("{name}, µs")));
    head.extend(["interrupts per I/O", "kicks per I/O"].map(str::to_owned));
    let mut rows = Vec::new();
    for (point, kicks, name) in POINTS {
        for subject in lines.subjects(point) {
            let mut row = vec![format!("{}, {name}", subject.title)];
            row.push(said(lines.spread(point, subject.name, "/iops")));
            row.extend(
                STAGES
                    .iter()
                    .map(|(path, _)| said(lines.spread(point, subject.name, path))),
            );
            row.push(said(lines.spread(
                point,
                subject.name,
                "/interrupts_per_io",
            )));
            row.push(said(lines.spread(kicks, subject.name, "/kicks_per_io")));
            rows.push(row);
        }
    }
    Table {
        title: format!(
            "CPU time per request by stage, interrupts and kicks ({})",
            stages(lines)
        ),
        head,
        rows,
    }
}

fn figure(lines: &Lines<'_>) -> Figure {
    let mut panels = Vec::new();
    for (point, _, name) in POINTS {
        let subjects = lines.subjects(point);
        let iops = subjects
            .iter()
            .map(|one| lines.spread(point, one.name, "/iops"));
        let groups: Vec<String> = subjects.iter().map(|one| one.title.to_owned()).collect();
        // The series has the panel's name, so that it needs no legend.
        let title = format!("IOPS, {name}");
        let series = vec![Series::new(&title, iops.collect())];
        panels.push(bars(&title, ("disk", "requests/s"), &groups, series));
        panels.push(cpu_panel(
            lines,
            point,
            &subjects,
            &format!("CPU time per request, {name}"),
        ));
    }
    super::figure(
        lines,
        (
            "guest-cpu-by-stage",
            "4 KiB random reads: IOPS, and CPU time per request by stage",
            stages(lines),
        ),
        panels,
        (
            "taller is better on the left, lower on the right; a daemon that polls also counts what it spins",
            "kernel work done in interrupts of the host, which belongs to nobody's clock here; and in translated guests \
             what the guest's own instructions cost on a real CPU",
        ),
    )
}

/// The caption of the stages: where each is counted.
fn stages(lines: &Lines<'_>) -> &'static str {
    match lines.is_translated() {
        true => {
            "guest: its CPU's thread in user mode, translated code and the devices' registers in one; VMM: the rest \
             of QEMU; backend: QEMU's I/O thread or the daemon"
        }
        false => {
            "guest: what its CPU ran of the guest; VMM: the rest of QEMU; backend: QEMU's I/O thread or the daemon"
        }
    }
}
