//! Study D in guests: ever more threads, each with one request in flight.

use super::super::job::threads_name;
use super::super::lines::Lines;
use super::super::subject::{BASE, Subject};
use super::ms;
use crate::report::chart::{Axis, Figure, Marks, Panel, Scale, Series};
use crate::report::{Section, Spread};

pub(super) fn add(lines: &Lines<'_>, section: &mut Section) {
    let counts = lines.numbers_of("threads-");
    let Some(first) = counts.first() else {
        return;
    };
    let subjects = lines.subjects(&threads_name(*first));
    section.figures.push(figure(lines, &subjects, &counts));
}

fn figure(lines: &Lines<'_>, subjects: &[&Subject], counts: &[u32]) -> Figure {
    let panel = |title: &str, label: &str, value: &dyn Fn(&str, &Subject) -> Option<Spread>| {
        let line_of = |one: &&Subject| {
            let at = |count: &u32| Some((f64::from(*count), value(&threads_name(*count), one)?));
            Series::new(one.title, counts.iter().filter_map(at).collect())
        };
        Panel {
            title: title.to_owned(),
            x: Axis::new("threads", Scale::Linear),
            y: Axis::new(label, Scale::Linear),
            marks: Marks::Lines(subjects.iter().map(line_of).collect()),
        }
    };
    let iops = |point: &str, one: &Subject| lines.spread(point, one.name, "/iops");
    let mean = |point: &str, one: &Subject| lines.spread(point, one.name, "/mean_us").map(ms);
    let tax = |point: &str, one: &Subject| {
        let ratio = lines.ratio(point, one.name, BASE, "/mean_us")?;
        Some(ratio.times(100.0))
    };
    let panels = vec![
        panel("IOPS", "requests/s", &iops),
        panel("mean response time", "ms", &mean),
        panel("response time ÷ in-process virtio-blk", "%", &tax),
    ];
    let figure = super::figure(
        lines,
        (
            "guest-threads",
            "Threads in a guest: IOPS and response time, 60 % reads of 4 KiB",
            "each thread has one request in flight (pread, pwrite)",
        ),
        panels,
        (
            "100 % on the right is the response time of virtio-blk in QEMU in the same round; below it is faster",
            "a guest of several CPUs, and bare metal, which has no guest",
        ),
    );
    Figure {
        columns: 3,
        ..figure
    }
}
