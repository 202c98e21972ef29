//! The figure of a probe, from the JSON that `cleave probe --json` writes: throughput against request size, with a line for each
//! amount outstanding.

use std::path::{Path, PathBuf};

use cleave_chart::{Axis, Figure, Marks, Panel, Scale, Series, Spread, svg};
use cleave_rig::{At, Result};
use serde::Deserialize;

/// The amounts outstanding lie between these two; their lines are coloured by their place in between.
const OUTSTANDING_MIN: u64 = 512;
const OUTSTANDING_MAX: u64 = 4 << 20;
/// The row that the study discusses is drawn bold.
const ROW_OF_INTEREST: u64 = 512 << 10;

/// The fields of the JSON that are drawn.
#[derive(Deserialize)]
struct Probe {
    cleave: String,
    device: Device,
    host: Host,
    modelled: bool,
    partial: bool,
    seconds_max: f64,
    sides: Vec<Side>,
}

#[derive(Deserialize)]
struct Device {
    name: String,
}

#[derive(Deserialize)]
struct Host {
    kernel: String,
    cpu: String,
    cpus: usize,
}

/// One direction; the points are in the order of their bytes outstanding.
#[derive(Deserialize)]
struct Side {
    direction: Direction,
    measured: Vec<Measured>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Direction {
    Read,
    Write,
}

/// The measurement of one number of bytes outstanding, in `depth` requests of equal size.
#[derive(Deserialize)]
struct Measured {
    outstanding_bytes: u64,
    depth: u32,
    requests: u64,
    elapsed_ns: u64,
    /// Half the width of the confidence interval, as a share of the rate.
    error: f64,
}

/// Draws a probe's JSON beside it; the path of the figure.
pub(super) fn draw(file: &Path) -> Result<PathBuf> {
    let text = std::fs::read_to_string(file).at(file)?;
    let probe: Probe = serde_json::from_str(&text)
        .map_err(|error| format!("not the JSON of `cleave probe`: {error}"))
        .at(file)?;
    let figure = file.with_added_extension("svg");
    std::fs::write(&figure, svg(&probe.figure())).at(&figure)?;
    Ok(figure)
}

impl Probe {
    /// Returns a panel for each direction.
    fn figure(&self) -> Figure {
        let modelled = match self.modelled {
            true => " (modelled, not a drive)",
            false => "",
        };
        let partial = if self.partial { " (partial)" } else { "" };
        let Host { kernel, cpu, cpus } = &self.host;
        Figure {
            name: "probe".to_owned(),
            title: format!("Throughput of {}{modelled}{partial}", self.device.name),
            subtitle: format!(
                "cleave {}, Linux {kernel}, {cpus} × {cpu}; each point to ±3 %, or what {:.0} s in all allow",
                self.cleave, self.seconds_max
            ),
            columns: 1,
            panels: self.sides.iter().map(Side::panel).collect(),
            reads: "the legend gives the bytes outstanding on each line: as one request at its right end, as more and \
                    smaller requests to the left."
                .to_owned(),
            hides: "latency, and the CPU time of a request.".to_owned(),
        }
    }
}

impl Side {
    fn panel(&self) -> Panel {
        let verb = match self.direction {
            Direction::Read => "reads",
            Direction::Write => "writes",
        };
        let points = &self.measured;
        let rows = points.chunk_by(|one, other| one.outstanding_bytes == other.outstanding_bytes);
        Panel {
            title: format!("Random {verb}"),
            x: Axis::new("size of one request, bytes", Scale::Bytes),
            y: Axis::new("throughput, MB/s", Scale::Linear),
            marks: Marks::Lines(rows.map(line).collect()),
        }
    }
}

impl Measured {
    fn block_bytes(&self) -> u64 {
        self.outstanding_bytes / u64::from(self.depth.max(1))
    }

    fn iops(&self) -> f64 {
        self.requests as f64 * 1e9 / self.elapsed_ns.max(1) as f64
    }

    fn megabytes(&self) -> f64 {
        self.iops() * self.block_bytes() as f64 / 1e6
    }

    fn point(&self) -> (f64, Spread) {
        let median = self.megabytes();
        let [min, max] = [1.0 - self.error, 1.0 + self.error].map(|share| share.max(0.0) * median);
        let spread = Spread {
            median,
            min,
            max,
            count: 1,
        };
        (self.block_bytes() as f64, spread)
    }

    fn name(&self) -> String {
        format!("{} × {}", self.depth, size(self.block_bytes()))
    }

    fn hover(&self) -> String {
        format!(
            "{} outstanding as {}: {:.1} MB/s, {:.0} IOPS, ±{:.1} %",
            size(self.outstanding_bytes),
            self.name(),
            self.megabytes(),
            self.iops(),
            self.error * 100.0,
        )
    }
}

/// Returns the line of the points with the same bytes outstanding.
fn line(row: &[Measured]) -> Series<(f64, Spread)> {
    let outstanding = row.first().map_or(0, |m| m.outstanding_bytes);
    let series = Series::new(size(outstanding), row.iter().map(Measured::point).collect());
    let series = series.with_hover(row.iter().map(Measured::hover).collect());
    let length = f64::from((OUTSTANDING_MAX / OUTSTANDING_MIN).ilog2());
    let rank = f64::from((outstanding / OUTSTANDING_MIN).max(1).ilog2()) / length;
    match outstanding == ROW_OF_INTEREST {
        true => series.emphasised(notes(row)),
        false => series.ranked(rank),
    }
}

/// Returns the notes at one request and, where it lies apart, at the best that the row reaches.
fn notes(row: &[Measured]) -> Vec<(usize, String)> {
    let all = || row.iter().enumerate();
    let whole = all().find(|(_, m)| m.depth == 1);
    let best = all().max_by(|a, b| a.1.megabytes().total_cmp(&b.1.megabytes()));
    let best = best.filter(|(_, m)| m.depth >= 8);
    let noted = whole.into_iter().chain(best);
    noted
        .map(|(at, m)| (at, format!("{}: {:.0} MB/s", m.name(), m.megabytes())))
        .collect()
}

/// `512 B`, `4 KiB`, `2 MiB`.
fn size(bytes: u64) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use cleave_probe::{
        Circumstances, DiskIdentity, Extent, Matrix, Measured as Found, Pace, ProbeReport, points,
    };
    use cleave_worker::DataDirection;

    use super::*;

    /// Returns the JSON that the probe itself makes of a disk which gains from more requests, up to 64.
    fn json(directions: &[DataDirection], points_max: usize) -> String {
        let matrix = |direction: &DataDirection| {
            let mut matrix = Matrix::new(*direction);
            for point in points(512, 1 << 40) {
                matrix.add(Found {
                    point,
                    requests: 1000,
                    elapsed_ns: 2 * point.block_bytes() / u64::from(point.depth.min(64)) + 1,
                    error: 0.02,
                });
            }
            matrix.measured.truncate(points_max);
            matrix
        };
        let device = DiskIdentity {
            name: "/dev/<a & \"b\">".to_owned(),
            serial: "cl0123456789abcdef".to_owned(),
            kind: "model".to_owned(),
            size_bytes: 1 << 40,
            block_bytes: 512,
            direct: true,
        };
        let around = Circumstances {
            rotational: false,
            stored: Extent::Unknown,
            pace: Pace::quick(),
            seed: 1,
            partial: false,
        };
        ProbeReport::new(device, directions.iter().map(matrix).collect(), &around).json()
    }

    fn drawn(json: &str) -> String {
        let probe: Probe = serde_json::from_str(json).unwrap();
        svg(&probe.figure())
    }

    #[test]
    fn a_figure_has_all_points_of_the_probes_json_and_names_a_model() {
        let text = drawn(&json(
            &[DataDirection::Read, DataDirection::Write],
            usize::MAX,
        ));
        assert_eq!(text.matches("<title>").count(), 1 + 210);
        assert!(text.contains("modelled") && text.contains("&lt;a &amp; &quot;b&quot;&gt;"));
        assert!(text.contains("1 × 512 KiB: ") && text.contains("Random writes"));
    }

    #[test]
    fn little_or_nothing_measured_is_still_a_figure() {
        for (directions, points) in [(&[][..], 0), (&[DataDirection::Read], 1)] {
            let text = drawn(&json(directions, points));
            assert_eq!(text.matches("<title>").count(), 1 + points);
        }
    }

    #[test]
    fn a_figure_lies_beside_its_json_and_other_files_are_refused() {
        let name = format!("xtask-probe-{}.json", std::process::id());
        let file = std::env::temp_dir().join(name);
        for (text, is_drawn) in [(&*json(&[DataDirection::Read], 9), true), ("{}", false)] {
            std::fs::write(&file, text).unwrap();
            match draw(&file) {
                Ok(figure) => {
                    let svg = std::fs::read_to_string(&figure).unwrap();
                    assert!(is_drawn && svg.ends_with("</svg>\n"));
                    assert_eq!(figure, file.with_added_extension("svg"));
                    std::fs::remove_file(figure).unwrap();
                }
                Err(why) => assert!(!is_drawn && why.contains("`cleave probe`"), "{why}"),
            }
        }
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn sizes_have_the_usual_units() {
        for (bytes, said) in [
            (512, "512 B"),
            (1536, "1536 B"),
            (44 << 10, "44 KiB"),
            (4 << 20, "4 MiB"),
        ] {
            assert_eq!(size(bytes), said);
        }
    }
}
