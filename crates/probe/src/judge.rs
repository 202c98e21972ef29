//! Judges a matrix: arithmetic only.

use cleave_blk::SPLIT_OPS_MAX;
use cleave_worker::splitter::{CHUNK_MAX_BYTES, CHUNK_MIN_BYTES, SPLIT_MIN_BYTES};
use serde::Serialize;

use crate::matrix::{Matrix, Measured, OUTSTANDING_MAX, Point};

/// With less gain a request is better left whole: its ops cost CPU time, and the gain may be noise.
pub(crate) const GAIN_MIN: f64 = 1.05;
/// Chunks whose rate is this close to the best one count as equal, and the largest of them is chosen because it
/// needs the fewest ops. Points are known to ±3 %.
const AS_GOOD: f64 = 0.97;
/// The useful depth is the one that reaches this share of the best rate.
const USEFUL: f64 = 0.95;

/// Recommended chunk for requests of one size class.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Recommendation {
    /// Minimum request size; the class extends to twice as much.
    pub request_bytes: u64,
    /// The chunk to split into; 0: leave whole.
    pub chunk_bytes: u32,
    /// Throughput with the best chunk over throughput of whole requests, at depth 1. Also given if it is too
    /// small to be worth it.
    pub gain: f64,
}

/// Findings of a matrix for its direction.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Judgement {
    /// By size class; only classes whose row was measured, and is known.
    pub chunks: Vec<Recommendation>,
    /// Number of size classes whose row was measured and is not known to ±10 %.
    pub unknown: usize,
    /// Number of in-flight ops beyond which the disk gets no faster. `None`: not measured.
    pub useful_depth: Option<u32>,
    /// True if some class gains from splitting.
    pub pays: bool,
}

impl Judgement {
    /// Returns the class with the largest gain.
    pub fn best(&self) -> Option<&Recommendation> {
        let split = self.chunks.iter().filter(|r| r.chunk_bytes > 0);
        split.max_by(|a, b| a.gain.total_cmp(&b.gain))
    }

    /// Returns the largest gain of all classes, whether it is worth splitting or not.
    pub(crate) fn gain_max(&self) -> Option<f64> {
        self.chunks.iter().map(|r| r.gain).max_by(f64::total_cmp)
    }
}

/// Judges a matrix. For a request of size S the row with S bytes outstanding shows how its pieces would
/// perform: the point of depth D is the same request as D pieces of S/D. Pieces of one request are adjacent and
/// those of the matrix are not; the splitter's own experiments correct for that.
///
/// Worked example, the row of 512 KiB of a drive with internal parallelism: 0.96 GB/s at depth 1, 1.30 at 2,
/// 1.70 at 8, 1.95 at 32 (16 KiB each), 1.97 at 64 (8 KiB). The best is 1.97. 16 KiB is within 3 % of it with
/// half the ops, so it is recommended, with a gain of 2.03.
pub fn judge(matrix: &Matrix) -> Judgement {
    let classes = std::iter::successors(Some(SPLIT_MIN_BYTES), |size| Some(size * 2))
        .take_while(|size| *size <= OUTSTANDING_MAX);
    let measured: Vec<u64> = classes
        .filter(|size| class(matrix, *size, |_| true).is_some())
        .collect();
    let known = measured.iter().filter_map(|size| recommend(matrix, *size));
    let chunks: Vec<_> = known.collect();
    Judgement {
        pays: chunks.iter().any(|r| r.chunk_bytes > 0),
        useful_depth: useful_depth(matrix),
        unknown: measured.len() - chunks.len(),
        chunks,
    }
}

/// Returns the points that a gain at one size between two sizes without one depends on. A disk rarely gains at one
/// size alone, so a disturbance while one of these points was measured is more likely.
pub(crate) fn doubtful(matrix: &Matrix) -> Vec<Point> {
    let chunks = judge(matrix).chunks;
    let alone = chunks.windows(3).filter_map(|sizes| match sizes {
        [smaller, size, larger] => {
            (smaller.chunk_bytes == 0 && size.chunk_bytes > 0 && larger.chunk_bytes == 0)
                .then_some(size.request_bytes)
        }
        _ => None,
    });
    alone
        .flat_map(|size| matrix.row(size).map(|m| m.point))
        .filter(|point| point.depth == 1 || is_split(*point))
        .collect()
}

/// Returns true if the splitter could split a request into pieces like this.
fn is_split(point: Point) -> bool {
    point.depth > 1
        && point.depth as usize <= SPLIT_OPS_MAX
        && (u64::from(CHUNK_MIN_BYTES)..=u64::from(CHUNK_MAX_BYTES)).contains(&point.block_bytes())
}

/// Returns the points of a size class that `counts` accepts: that of a whole request, and those of its pieces, by depth.
fn class(
    matrix: &Matrix,
    request_bytes: u64,
    counts: fn(&Measured) -> bool,
) -> Option<(&Measured, Vec<&Measured>)> {
    let row: Vec<&Measured> = matrix.row(request_bytes).filter(|m| counts(m)).collect();
    let whole = *row.iter().find(|m| m.point.depth == 1)?;
    let split: Vec<_> = row.into_iter().filter(|m| is_split(m.point)).collect();
    (!split.is_empty()).then_some((whole, split))
}

fn recommend(matrix: &Matrix, request_bytes: u64) -> Option<Recommendation> {
    let (whole, split) = class(matrix, request_bytes, Measured::is_known)?;
    let best = split
        .iter()
        .map(|m| m.bytes_per_second())
        .max_by(f64::total_cmp)?;
    // In order of depth, so the first that is good enough has the fewest ops.
    let chosen = split
        .iter()
        .find(|m| m.bytes_per_second() >= best * AS_GOOD)?;
    let gain = chosen.bytes_per_second() / whole.bytes_per_second().max(1.0);
    // The difference of two imprecise rates may be noise.
    let doubt = chosen.error.hypot(whole.error);
    Some(Recommendation {
        request_bytes,
        chunk_bytes: if gain >= GAIN_MIN.max(1.0 + doubt) {
            chosen.point.block_bytes() as u32
        } else {
            0
        },
        gain,
    })
}

/// Returns the smallest depth that reaches nearly the best rate, for the smallest requests that can be a chunk. Larger requests
/// reach the disk's bandwidth at a smaller depth and would hide its parallelism.
fn useful_depth(matrix: &Matrix) -> Option<u32> {
    let sizes = matrix.measured.iter().map(|m| m.point.block_bytes());
    let block_bytes = sizes
        .filter(|size| *size >= u64::from(CHUNK_MIN_BYTES))
        .min()?;
    let column: Vec<&Measured> = matrix
        .measured
        .iter()
        .filter(|m| m.point.block_bytes() == block_bytes)
        .collect();
    let known = || column.iter().filter(|m| m.is_known());
    // A shorter column may end before the rate stops growing, and so may one whose deepest point is not known.
    if known().count() < 4 || !column.last()?.is_known() {
        return None;
    }
    let best = known()
        .map(|m| m.requests_per_second())
        .max_by(f64::total_cmp)?;
    let reaches = |m: &&Measured| m.is_known() && m.requests_per_second() >= best * USEFUL;
    let at = column.iter().position(reaches)?;
    // One before it that is not known may reach the rate too.
    let before = column.get(at.wrapping_sub(1));
    if before.is_some_and(|m| !m.is_known()) {
        return None;
    }
    column.get(at).map(|m| m.point.depth)
}

#[cfg(test)]
pub(crate) mod tests {
    use cleave_worker::DataDirection;

    use super::*;
    use crate::matrix::{Point, points};

    /// Returns a matrix of a disk with this many bytes per second at each point.
    pub(crate) fn recorded(direction: DataDirection, rate: impl Fn(Point) -> f64) -> Matrix {
        let mut matrix = Matrix::new(direction);
        for point in points(512, 1 << 40) {
            let requests = 1000;
            let seconds = (requests * point.block_bytes()) as f64 / rate(point);
            matrix.add(Measured {
                point,
                requests,
                elapsed_ns: (seconds * 1e9) as u64,
                error: 0.02,
            });
        }
        matrix
    }

    /// Returns the bytes a second of the P3700 of study A: with 512 KiB outstanding 0.96 GB/s whole and 1.97 as 64 × 8 KiB. A 4
    /// KiB request takes 85 µs alone, and many reach 460 k/s.
    pub(crate) fn p3700(point: Point) -> f64 {
        let block = point.block_bytes() as f64;
        let pages = (block / 4096.0).max(1.0);
        let alone = 85e-6 + (pages - 1.0) * 3.6e-6;
        (f64::from(point.depth) * block / alone)
            .min(460e3 * block)
            .min(1.97e9)
    }

    #[test]
    fn a_drive_with_internal_parallelism_is_split() {
        let judged = judge(&recorded(DataDirection::Read, p3700));
        assert!(judged.pays);
        let row = judged
            .chunks
            .iter()
            .find(|r| r.request_bytes == 512 << 10)
            .unwrap();
        assert!(
            row.chunk_bytes > 0 && row.chunk_bytes <= 128 << 10,
            "{row:?}"
        );
        assert!((1.9..2.3).contains(&row.gain), "{row:?}");
        let depth = judged.useful_depth.unwrap();
        assert!((32..=128).contains(&depth), "{depth}");
        assert_eq!(judged.chunks.len(), 8, "32 KiB … 4 MiB");
    }

    #[test]
    fn a_disk_with_one_channel_is_left_whole() {
        // Time is proportional to size at any depth.
        let judged = judge(&recorded(DataDirection::Read, |_| 5e8));
        assert!(!judged.pays);
        assert!(judged.chunks.iter().all(|r| r.chunk_bytes == 0));
        assert_eq!(judged.useful_depth, Some(1));
        assert_eq!(judged.best(), None);
    }

    /// The gain of two pieces over one, and the decision.
    #[test]
    fn a_gain_within_the_noise_is_ignored() {
        for (gain, splits) in [
            (0.8, false),
            (1.0, false),
            (1.04, false),
            (1.06, true),
            (2.0, true),
        ] {
            let judged = judge(&recorded(DataDirection::Write, |p| {
                if p.depth == 1 { 1e9 } else { gain * 1e9 }
            }));
            assert_eq!(judged.pays, splits, "{gain}");
            let row = judged.chunks[0];
            assert!((row.gain - gain).abs() < 0.01, "{row:?}");
            // As good as the others, with the fewest ops.
            assert_eq!(row.chunk_bytes, if splits { 16 << 10 } else { 0 });
        }
    }

    #[test]
    fn a_gain_within_the_error_is_ignored() {
        for (error, splits) in [(0.03, true), (0.06, true), (0.08, false), (0.1, false)] {
            let rate = |p: Point| if p.depth == 1 { 1e9 } else { 1.1e9 };
            let mut matrix = recorded(DataDirection::Read, rate);
            for m in &mut matrix.measured {
                m.error = error;
            }
            let judged = judge(&matrix);
            assert_eq!((judged.pays, judged.unknown), (splits, 0), "{error}");
        }
    }

    /// Few requests were made, in a slow moment, so that pieces seem to be fifty times as fast.
    #[test]
    fn nothing_is_concluded_from_points_that_are_not_known() {
        let is_whole = |p: Point| (p.outstanding_bytes, p.depth) == (32 << 10, 1);
        let rate = |p: Point| if is_whole(p) { 1e7 } else { 5e8 };
        let mut matrix = recorded(DataDirection::Read, rate);
        assert!(judge(&matrix).best().unwrap().gain > 40.0);
        for m in &mut matrix.measured {
            if is_whole(m.point) {
                m.error = 1.0;
            }
        }
        let judged = judge(&matrix);
        assert_eq!((judged.chunks.len(), judged.unknown), (7, 1));
        assert!(!judged.pays, "{judged:?}");
        // Pieces of 8 KiB seem to be ten times as fast as they are.
        let known = judge(&recorded(DataDirection::Read, p3700));
        let rate = |p: Point| match p.block_bytes() {
            8192 => 10.0 * p3700(p),
            _ => p3700(p),
        };
        let mut matrix = recorded(DataDirection::Read, rate);
        for m in &mut matrix.measured {
            if m.point.block_bytes() == 8 << 10 {
                m.error = 0.5;
            }
        }
        let judged = judge(&matrix);
        assert_eq!((judged.chunks.len(), judged.unknown), (8, 0));
        assert!(judged.chunks.iter().all(|r| r.chunk_bytes != 8 << 10));
        assert_eq!(judged.useful_depth, known.useful_depth);
        for m in &mut matrix.measured {
            m.error = 0.11;
        }
        let judged = judge(&matrix);
        assert_eq!((judged.chunks.len(), judged.unknown), (0, 8));
        assert_eq!(judged.useful_depth, None);
    }

    /// 64 reads of 4 KiB in flight are as fast as any number beyond.
    #[test]
    fn a_useful_depth_is_known_with_its_neighbours_only() {
        let none: &[u32] = &[];
        for (unknown, wanted) in [
            (none, Some(64)),
            (&[4, 128], Some(64)),
            (&[32], None),
            (&[64], None),
            (&[1024], None),
        ] {
            let mut matrix = recorded(DataDirection::Read, p3700);
            for m in &mut matrix.measured {
                if m.point.block_bytes() == 4096 && unknown.contains(&m.point.depth) {
                    m.error = 0.5;
                }
            }
            assert_eq!(judge(&matrix).useful_depth, wanted, "{unknown:?}");
        }
    }

    /// The worked example of `judge`.
    #[test]
    fn the_largest_chunk_that_is_as_good_is_taken() {
        let rates = [
            (1, 0.96),
            (2, 1.3),
            (4, 1.5),
            (8, 1.7),
            (16, 1.85),
            (32, 1.95),
            (64, 1.97),
            (128, 3.0),
        ];
        let rate = |p: Point| {
            let found = rates.iter().find(|(depth, _)| *depth == p.depth);
            found.map_or(1e9, |(_, rate)| rate * 1e9)
        };
        let judged = judge(&recorded(DataDirection::Read, rate));
        let row = judged
            .chunks
            .iter()
            .find(|r| r.request_bytes == 512 << 10)
            .unwrap();
        assert_eq!(row.chunk_bytes, 16 << 10, "and never more than 64 ops");
        assert!((row.gain - 1.95 / 0.96).abs() < 0.01);
        // Nothing below 4 KiB is a chunk, so the row of 32 KiB ends at 8 pieces.
        let small = judged.chunks[0];
        assert_eq!(
            (small.request_bytes, small.chunk_bytes),
            (32 << 10, 4 << 10)
        );
    }

    #[test]
    fn missing_measurements_are_not_judged() {
        let mut matrix = recorded(DataDirection::Read, p3700);
        matrix
            .measured
            .retain(|m| m.point.outstanding_bytes == 512 << 10);
        let judged = judge(&matrix);
        assert_eq!(judged.chunks.len(), 1);
        assert_eq!(
            judged.useful_depth, None,
            "one point of the column says nothing"
        );
        let judged = judge(&Matrix::new(DataDirection::Read));
        assert_eq!((judged.chunks.len(), judged.pays), (0, false));
    }

    #[test]
    fn a_large_block_is_respected() {
        let mut matrix = recorded(DataDirection::Read, p3700);
        matrix
            .measured
            .retain(|m| m.point.block_bytes() >= 64 << 10);
        let judged = judge(&matrix);
        assert!(
            judged
                .chunks
                .iter()
                .all(|r| r.chunk_bytes == 0 || r.chunk_bytes >= 64 << 10)
        );
    }
}
