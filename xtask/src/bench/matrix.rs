//! Study A: the same bytes outstanding, in one request or in ever more and smaller ones.

use std::path::Path;

use serde_json::{Value, json};

use super::desk::Desk;
use super::draw;
use super::load::{Load, Wait};
use super::split::{AUTO, Disk, OFF, serve};
use crate::report::chart::{Axis, Figure, Marks, Panel, Scale, Series};
use crate::report::{Recorded, Rounds, Spread};
use crate::step::quietly;

const SUITE: &str = "study-a";
/// Measured by `cleave probe`: the same engine without a ring, a driver or a guest.
const BARE: &str = "bare";
/// The row that the study looks at.
const ROW_BYTES: u64 = 512 << 10;

/// The outstanding bytes, and the number of requests that they are divided into.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Cell {
    outstanding_bytes: u64,
    depth: u32,
}

impl Cell {
    fn block_bytes(self) -> u64 {
        self.outstanding_bytes / u64::from(self.depth)
    }

    /// All that the pace asks for.
    fn all(outstanding: &[u64], depths: &[u32]) -> Vec<Cell> {
        let mut cells = Vec::new();
        for outstanding_bytes in outstanding {
            cells.extend(depths.iter().map(|depth| Cell {
                outstanding_bytes: *outstanding_bytes,
                depth: *depth,
            }));
        }
        // Smaller ones are a question for the probe.
        cells.retain(|cell| cell.block_bytes() >= 4096);
        cells
    }
}

/// The bare disk by the probe, then `off` and `auto` in turn at every cell.
pub(super) fn measure(desk: &mut Desk, disk: Disk, real: &Path) -> Result<(), String> {
    let pace = desk.effort.pace;
    let all: Vec<u64> = (12..=22).map(|power| 1 << power).collect();
    let outstanding = pace.pick(&all[..], &[64 << 10, ROW_BYTES, 4 << 20], &[ROW_BYTES]);
    let depths: &[u32] = pace.pick(
        &[1, 2, 4, 8, 16, 32, 64, 128],
        &[1, 2, 4, 8, 16, 32, 64, 128],
        &[1, 64],
    );
    let cells = Cell::all(outstanding, depths);
    let spec = disk.spec(real);
    let profile = probe(desk, disk, &spec, pace.pick(60, 12, 2), &cells)?;
    let mut served = Vec::new();
    for way in [OFF, AUTO] {
        let socket = desk
            .run
            .folder()
            .join(format!("{}.sock", way.replace(' ', "-")));
        let mut command = serve(desk, way, &spec, &socket);
        if way == AUTO {
            command.extend(["--profile".to_owned(), profile.clone()]);
        }
        served.push((way, desk.start(&command, &socket)?, socket));
    }
    let seconds = pace.pick(0.3, 0.12, 0.02);
    for round in 1..=pace.pick(3, 1, 1) {
        for cell in &cells {
            let load = Load {
                block_bytes: u32::try_from(cell.block_bytes())
                    .map_err(|error| error.to_string())?,
                ..Load::reads(cell.depth, Wait::Poll, seconds)
            };
            for (way, _, socket) in &served {
                let mut result = desk.drive(socket, &load.words())?;
                result["mb_s"] = json!(result["mib_s"].as_f64().unwrap_or(0.0) * 1.048_576);
                note(desk, disk, way, round, (*cell, &result))?;
            }
        }
    }
    served
        .into_iter()
        .try_for_each(|(_, daemon, _)| daemon.stop())
}

fn note(
    desk: &mut Desk,
    disk: Disk,
    way: &str,
    round: u32,
    (cell, result): (Cell, &Value),
) -> Result<(), String> {
    let line = json!({
        "round": round, "subject": way, "disk": disk.name(), "is_modelled": disk != Disk::Real,
        "point": format!("{}/{}/{}", disk.name(), cell.outstanding_bytes, cell.depth),
        "outstanding_bytes": cell.outstanding_bytes, "depth": cell.depth, "result": result,
    });
    desk.run.note(SUITE, &line)
}

/// Measures the bare disk; where the profile lies that `auto` starts from.
fn probe(
    desk: &mut Desk,
    disk: Disk,
    spec: &str,
    seconds: u32,
    cells: &[Cell],
) -> Result<String, String> {
    let profile = desk.run.folder().join("profile.toml");
    // One of an earlier run would be kept where the probe finds no reason to write.
    let _ = std::fs::remove_file(&profile);
    let profile = profile.to_string_lossy().into_owned();
    let (cleave, seconds) = (
        desk.cleave.to_string_lossy().into_owned(),
        seconds.to_string(),
    );
    let mut words = vec![
        "taskset",
        "--cpu-list",
        &desk.cpus.daemon,
        &cleave,
        "probe",
        spec,
    ];
    words.extend(["--seconds", &seconds, "--json", "-", "--profile", &profile]);
    if disk == Disk::Real {
        // Whether a thin disk is welcome was decided before.
        words.push("--allow-thin");
    }
    let said = quietly(desk.run.folder(), &words, &[])?;
    let report: Value = serde_json::from_str(&said)
        .map_err(|error| format!("cleave probe said {said}: {error}"))?;
    for measured in report["sides"][0]["measured"]
        .as_array()
        .into_iter()
        .flatten()
    {
        let number = |name: &str| measured[name].as_f64();
        let found = number("outstanding_bytes").zip(number("depth"));
        let is_found =
            |cell: &&Cell| found == Some((cell.outstanding_bytes as f64, f64::from(cell.depth)));
        let rate = number("requests").zip(number("elapsed_ns"));
        if let (Some(cell), Some((requests, ns))) = (cells.iter().find(is_found), rate) {
            let result = json!({ "mb_s": requests * cell.block_bytes() as f64 / ns * 1e3 });
            note(desk, disk, BARE, 1, (*cell, &result))?;
        }
    }
    Ok(profile)
}

/// For each disk a figure of all rows, and of the row of 512 KiB alone.
pub(super) fn figures(run: &Recorded) -> Vec<Figure> {
    let Some(rounds) = Rounds::of(run, SUITE) else {
        return Vec::new();
    };
    let mut disks: Vec<String> = Vec::new();
    for line in rounds.lines() {
        let disk = line["disk"].as_str().unwrap_or_default().to_owned();
        if !disks.contains(&disk) {
            disks.push(disk);
        }
    }
    let two = disks.iter().enumerate().map(|(number, disk)| {
        let here = rounds.only(|line| line["disk"] == *disk);
        [
            all_rows(run, &here, disk, number),
            one_row(run, &here, disk, number),
        ]
    });
    two.flatten().collect()
}

fn megabytes(result: &Value) -> Option<f64> {
    result["mb_s"].as_f64()
}

fn all_rows(run: &Recorded, rounds: &Rounds<'_>, disk: &str, number: usize) -> Figure {
    let fastest = rounds
        .lines()
        .iter()
        .filter_map(|line| megabytes(&line["result"]));
    let fastest = fastest.fold(0.0, f64::max);
    let panels = [BARE, OFF, AUTO].map(|who| Panel {
        title: who.to_owned(),
        x: Axis::new("size of one request, bytes", Scale::Bytes),
        y: Axis::new("throughput, MB/s", Scale::Linear).up_to(fastest),
        marks: Marks::Lines(rows(rounds, who)),
    });
    let mut figure = draw::figure(
        run,
        &format!("a-matrix-{number}"),
        &format!("Study A: throughput against request size, {disk}"),
        panels.into(),
        (
            "on a line the same bytes are outstanding: as one request at its right end, as ever more and smaller ones to the \
             left; where splitting works, the right ends of the last panel are as high as their lines' tops in the first",
            "latency, and what a request costs in CPU; \"bare\" was measured by `cleave probe` just before, not in turn with the others",
        ),
    );
    figure.columns = 3;
    figure
}

fn rows(rounds: &Rounds<'_>, who: &str) -> Vec<Series<(f64, Spread)>> {
    let mut sizes: Vec<u64> = rounds
        .lines()
        .iter()
        .filter_map(|line| line["outstanding_bytes"].as_u64())
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    let row = |size: &u64| {
        let here = rounds.only(|line| line["outstanding_bytes"] == *size);
        let points = depths(&here).into_iter().filter_map(|(depth, point)| {
            let spread = here.spread(&point, who, megabytes)?;
            Some(((*size / depth) as f64, spread))
        });
        Series::new(format!("{} KiB outstanding", size >> 10), points.collect())
    };
    sizes.iter().map(row).collect()
}

/// Depths of a row, least first, with the names of their points.
fn depths(row: &Rounds<'_>) -> Vec<(u64, String)> {
    let pair = |line: &&Value| Some((line["depth"].as_u64()?, line["point"].as_str()?.to_owned()));
    let mut depths: Vec<(u64, String)> = row.lines().iter().filter_map(pair).collect();
    depths.sort_unstable();
    depths.dedup();
    depths
}

fn one_row(run: &Recorded, rounds: &Rounds<'_>, disk: &str, number: usize) -> Figure {
    let row = rounds.only(|line| line["outstanding_bytes"] == ROW_BYTES);
    let depths = depths(&row);
    let named = |depth: u64| format!("{depth} × {} KiB", (ROW_BYTES / depth) >> 10);
    let series = [BARE, OFF, AUTO].map(|who| {
        let values = depths
            .iter()
            .map(|(_, point)| row.spread(point, who, megabytes));
        Series::new(who, values.collect())
    });
    let panel = Panel {
        title: "512 KiB outstanding".to_owned(),
        x: Axis::new("requests in flight × size of one", Scale::Linear),
        y: Axis::new("throughput, MB/s", Scale::Linear),
        marks: Marks::Bars {
            groups: depths.iter().map(|(depth, _)| named(*depth)).collect(),
            series: series.into(),
        },
    };
    draw::figure(
        run,
        &format!("a-row-{number}"),
        &format!("Study A: 512 KiB outstanding, {disk}"),
        vec![panel],
        (
            "the first group is one request of 512 KiB, the last the same bytes as 4 KiB requests; where `split auto` stands \
             above `split off` in the first group, splitting pays",
            "requests of other sizes; \"bare\" was measured by `cleave probe` just before, not in turn with the others",
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_holds_the_same_bytes_down_to_4_kib() {
        let cells = Cell::all(&[16 << 10, 4 << 20], &[1, 4, 64]);
        let sizes: Vec<u64> = cells.iter().map(|cell| cell.block_bytes() >> 10).collect();
        assert_eq!(sizes, [16, 4, 4096, 1024, 64]);
    }
}
