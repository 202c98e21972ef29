//! The result of a probe, and its text.

use std::fs;

use cleave_worker::DataDirection;
use serde::Serialize;

use crate::judge::{GAIN_MIN, Judgement, judge};
use crate::matrix::{KNOWN_ERROR_MAX, Matrix, word};
use crate::size::long;
use crate::{DiskIdentity, Extent, Pace};

/// Version of the JSON.
const VERSION: u32 = 1;

/// The machine that ran the probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostFacts {
    /// Kernel release.
    pub kernel: String,
    /// Model name of the CPU.
    pub cpu: String,
    /// Number of CPUs.
    pub cpus: usize,
}

impl HostFacts {
    /// Describes this machine.
    pub fn here() -> HostFacts {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == "model name").then(|| value.trim().to_owned())
        });
        HostFacts {
            kernel: rustix::system::uname()
                .release()
                .to_string_lossy()
                .into_owned(),
            cpu: model.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// One direction: measurements and judgement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Side {
    /// The measurements.
    #[serde(flatten)]
    pub matrix: Matrix,
    /// Their judgement.
    pub judgement: Judgement,
}

/// The result of a probe.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProbeReport {
    /// Version of this format.
    pub version: u32,
    /// Version of the program.
    pub cleave: String,
    /// The measured disk.
    pub device: DiskIdentity,
    /// The machine.
    pub host: HostFacts,
    /// The disk's rotational flag, which many virtual disks set too.
    pub rotational: bool,
    /// True if the timings are those of a model, not of a drive.
    pub modelled: bool,
    /// True if points are missing.
    pub partial: bool,
    /// Share of the disk that was ever written, if known.
    pub stored_share: Option<f64>,
    /// Time for all points together, in seconds. Each point ended when it was known to ±3 %.
    pub seconds_max: f64,
    /// Seed of the random offsets.
    pub seed: u64,
    /// Reads first.
    pub sides: Vec<Side>,
}

/// Parts of a report that are not in its matrices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Circumstances {
    /// See [`ProbeReport::rotational`].
    pub rotational: bool,
    /// Share of the disk that was written before the measurement.
    pub stored: Extent,
    /// Time for each point.
    pub pace: Pace,
    /// See [`ProbeReport::seed`].
    pub seed: u64,
    /// True if points are missing.
    pub partial: bool,
}

impl ProbeReport {
    /// Judges the measurements.
    pub fn new(device: DiskIdentity, matrices: Vec<Matrix>, around: &Circumstances) -> ProbeReport {
        ProbeReport {
            version: VERSION,
            cleave: env!("CARGO_PKG_VERSION").to_owned(),
            modelled: device.kind == "model",
            device,
            host: HostFacts::here(),
            rotational: around.rotational,
            partial: around.partial,
            stored_share: match around.stored {
                Extent::Share(share) => Some(share),
                Extent::Unknown => None,
            },
            seconds_max: around.pace.total.as_secs_f64(),
            seed: around.seed,
            sides: matrices
                .into_iter()
                .map(|matrix| Side {
                    judgement: judge(&matrix),
                    matrix,
                })
                .collect(),
        }
    }

    /// Returns the report as JSON, with the fields of [`ProbeReport`].
    pub fn json(&self) -> String {
        // Maps with string keys and finite numbers can always be serialized.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Reasons to doubt the figures, one per line.
    pub fn doubts(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        if self.partial {
            doubts.push(
                "The result is partial: the probe was interrupted before all points were measured."
                    .to_owned(),
            );
        }
        if self.modelled {
            doubts.push(
                "The disk is a model: the figures are those of its arithmetic, not of a drive."
                    .to_owned(),
            );
        }
        if !self.device.direct {
            doubts.push("The page cache was not bypassed: the figures are those of memory as much as of the disk.".to_owned());
        }
        if let Some(share) = self.stored_share.filter(|share| *share < 0.999) {
            doubts.push(format!(
                "Only {:.0} % of the disk was ever written; reads of the rest do not reach the device.",
                share * 100.0
            ));
        }
        let all = || self.sides.iter().flat_map(|side| &side.matrix.measured);
        let vague = all().filter(|m| !m.is_known()).count();
        if vague > 0 {
            doubts.push(format!(
                "{vague} of {} points are known to no better than ±{:.0} %: allow more time, or use a quieter host.",
                all().count(),
                KNOWN_ERROR_MAX * 100.0
            ));
        }
        for side in &self.sides {
            let Some(share) = side.matrix.zero_share().filter(|share| *share > 0.05) else {
                continue;
            };
            if !matches!(self.device.kind.as_str(), "null" | "model") {
                doubts.push(format!(
                    "{:.0} % of the {} reads checked found only zeroes: the disk has areas that were never written.",
                    share * 100.0,
                    side.matrix.looked_at
                ));
            }
        }
        doubts
    }
}

/// Returns a judgement in sentences.
pub(crate) fn sentences(judged: &Judgement, direction: DataDirection) -> Vec<String> {
    let way = word(direction);
    let mut sentences = Vec::new();
    let known = judged.chunks.len();
    if judged.unknown > 0 {
        sentences.push(format!(
            "Only at {known} of {} sizes are {way}s known to ±{:.0} %: allow more time (--seconds), or use a quieter host.",
            known + judged.unknown,
            KNOWN_ERROR_MAX * 100.0
        ));
    }
    sentences.push(match (judged.best(), judged.gain_max()) {
        (Some(best), _) => format!(
            "Splitting {way}s pays: at depth 1 a request of {} gains most, {:.2}×, as pieces of {}.",
            long(best.request_bytes),
            best.gain,
            long(u64::from(best.chunk_bytes)),
        ),
        (None, Some(gain)) if known >= judged.unknown => match gain < GAIN_MIN {
            true => format!(
                "Splitting {way}s does not pay: the best gain is {:.2}×, and less than {GAIN_MIN}× counts as none.",
                // Not rounded to what would count.
                gain.min(GAIN_MIN - 0.01)
            ),
            false => format!(
                "Splitting {way}s does not pay: the best gain, {gain:.2}×, is within the error of its points."
            ),
        },
        _ if judged.unknown > 0 => format!("That is too little to say whether splitting {way}s pays."),
        _ => format!("Too little was measured to say whether splitting {way}s pays."),
    });
    // Adjacent classes with the same chunk share a sentence.
    let runs = judged
        .chunks
        .chunk_by(|a, b| a.chunk_bytes == b.chunk_bytes && b.request_bytes == 2 * a.request_bytes);
    for run in runs.filter(|_| judged.pays) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else {
            continue;
        };
        let which = match first.request_bytes == last.request_bytes {
            true => format!("{way}s of {}", long(first.request_bytes)),
            false => format!(
                "{way}s of {} to {}",
                long(first.request_bytes),
                long(last.request_bytes)
            ),
        };
        sentences.push(match first.chunk_bytes {
            0 => format!("Leave {which} whole."),
            chunk => format!(
                "Split {which} into {}: {} at depth 1.",
                long(u64::from(chunk)),
                gains(first.gain, last.gain, run.len()),
            ),
        });
    }
    if let Some(depth) = judged.useful_depth {
        sentences.push(match depth {
            1 => format!("The disk serves one {way} at a time; more in flight gain nothing."),
            _ => format!("More than {depth} {way}s in flight gain nothing."),
        });
    }
    sentences
}

fn gains(first: f64, last: f64, count: usize) -> String {
    match count {
        1 => format!("{first:.2}×"),
        _ => format!("{first:.2}× to {last:.2}×"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::judge::tests::{p3700, recorded};

    pub(crate) fn identity(kind: &str) -> DiskIdentity {
        DiskIdentity {
            name: "/dev/nvme0n1".to_owned(),
            serial: "cl0123456789abcdef".to_owned(),
            kind: kind.to_owned(),
            size_bytes: 400 << 30,
            block_bytes: 512,
            direct: true,
        }
    }

    pub(crate) fn report(matrices: Vec<Matrix>) -> ProbeReport {
        let around = Circumstances {
            rotational: false,
            stored: Extent::Unknown,
            pace: Pace::quick(),
            seed: 1,
            partial: false,
        };
        ProbeReport::new(identity("device"), matrices, &around)
    }

    #[test]
    fn findings_are_sentences() {
        let sentences = |rate: &dyn Fn(crate::Point) -> f64| {
            let report = report(vec![recorded(DataDirection::Read, rate)]);
            sentences(&report.sides[0].judgement, DataDirection::Read)
        };
        let split = sentences(&p3700);
        assert!(split[0].starts_with("Splitting reads pays: "), "{split:?}");
        assert!(
            split
                .last()
                .unwrap()
                .contains("More than 64 reads in flight"),
            "{split:?}"
        );
        let flat = sentences(&|_| 5e8);
        assert_eq!(
            flat,
            [
                "Splitting reads does not pay: the best gain is 1.00×, and less than 1.05× counts as none.",
                "The disk serves one read at a time; more in flight gain nothing."
            ]
        );
        let nearly = sentences(&|p| if p.depth == 1 { 1e9 } else { 1.047e9 });
        assert!(nearly[0].contains("the best gain is 1.04×"), "{nearly:?}");
        for line in split.iter().chain(&flat) {
            assert!(line.chars().count() <= 100, "{line}");
        }
    }

    #[test]
    fn what_is_not_known_is_said_first_and_nothing_is_concluded_from_it() {
        // All points of these sizes are off by as much.
        let sentences = |sizes: &[u64], error: f64, rate: &dyn Fn(crate::Point) -> f64| {
            let mut matrix = recorded(DataDirection::Read, rate);
            for m in &mut matrix.measured {
                if sizes.contains(&m.point.outstanding_bytes) {
                    m.error = error;
                }
            }
            let report = report(vec![matrix]);
            let told = sentences(&report.sides[0].judgement, DataDirection::Read);
            for line in &told {
                assert!(line.chars().count() <= 100, "{line}");
            }
            told
        };
        let classes: Vec<u64> = (15..=22).map(|log| 1 << log).collect();
        let remedy =
            "sizes are reads known to ±10 %: allow more time (--seconds), or use a quieter host.";
        // A whole request of 32 KiB seems to take fifty times as long as its pieces.
        let slow = |p: crate::Point| match (p.outstanding_bytes, p.depth) {
            (32_768, 1) => 1e7,
            _ => 5e8,
        };
        let told = sentences(&classes[..1], 1.0, &slow);
        assert_eq!(told[0], format!("Only at 7 of 8 {remedy}"));
        assert!(
            told[1].starts_with("Splitting reads does not pay: "),
            "{told:?}"
        );
        let told = sentences(&classes[..5], 0.5, &|_| 5e8);
        assert_eq!(told[0], format!("Only at 3 of 8 {remedy}"));
        assert_eq!(
            told[1],
            "That is too little to say whether splitting reads pays."
        );
        let told = sentences(&classes, 0.2, &p3700);
        assert_eq!(
            told,
            [
                &*format!("Only at 0 of 8 {remedy}"),
                "That is too little to say whether splitting reads pays."
            ]
        );
        // A gain at the sizes that are known is one.
        let told = sentences(&classes[..6], 0.5, &p3700);
        assert_eq!(told[0], format!("Only at 2 of 8 {remedy}"));
        assert!(told[1].starts_with("Splitting reads pays: "), "{told:?}");
        // Sizes on both sides of one that is not known are named apart.
        let told = sentences(&classes[1..2], 0.5, &|p| match (p.block_bytes(), p.depth) {
            (16_384, 2..) => 2e9,
            _ => 1e9,
        });
        for (at, says) in [
            (2, "Split reads of 32 KiB into 16 KiB: "),
            (3, "Split reads of 128 KiB to 1 MiB into 16 KiB: "),
        ] {
            assert!(told[at].starts_with(says), "{told:?}");
        }
        // Known, but not well enough for so small a gain.
        let told = sentences(&classes, 0.1, &|p| if p.depth == 1 { 1e9 } else { 1.1e9 });
        assert_eq!(
            told[0],
            "Splitting reads does not pay: the best gain, 1.10×, is within the error of its points."
        );
    }

    #[test]
    fn doubts_are_reported() {
        let mut matrix = recorded(DataDirection::Read, p3700);
        (matrix.looked_at, matrix.only_zeroes) = (100, 60);
        let mut report = report(vec![matrix]);
        assert_eq!(report.doubts().len(), 1);
        report.sides[0].matrix.measured[0].error = 0.5;
        report.partial = true;
        report.modelled = true;
        report.device.direct = false;
        report.stored_share = Some(0.4);
        let doubts = report.doubts();
        assert_eq!(doubts.len(), 6, "{doubts:?}");
        assert!(
            doubts.iter().all(|line| line.chars().count() <= 110),
            "{doubts:?}"
        );
    }

    #[test]
    fn json_names_what_it_holds() {
        let text = report(vec![recorded(DataDirection::Write, p3700)]).json();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["version"], 1);
        assert_eq!(value["device"]["kind"], "device");
        let side = &value["sides"][0];
        assert_eq!(side["direction"], "write");
        assert_eq!(side["measured"].as_array().unwrap().len(), 105);
        assert_eq!(side["measured"][0]["outstanding_bytes"], 512);
        assert_eq!(side["judgement"]["pays"], true);
    }
}
