//! The points of study A, and the measurement at each.

use cleave_worker::DataDirection;
use serde::{Serialize, Serializer};

/// Minimum and maximum number of bytes outstanding.
pub(crate) const OUTSTANDING_MIN: u64 = 512;
pub(crate) const OUTSTANDING_MAX: u64 = 4 << 20;
/// The row that the study discusses, which is measured first.
pub(crate) const ROW_OF_INTEREST: u64 = 512 << 10;

/// Largest error of a point whose rate is known. Others are shown, and nothing is concluded from them: their rate may be many times as
/// large.
pub(crate) const KNOWN_ERROR_MAX: f64 = 0.1;

/// A number of bytes outstanding, in requests of equal size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Point {
    /// Sum over all requests.
    pub outstanding_bytes: u64,
    /// Requests in flight.
    pub depth: u32,
}

impl Point {
    /// Returns the size of one request.
    pub fn block_bytes(&self) -> u64 {
        self.outstanding_bytes / u64::from(self.depth.max(1))
    }
}

/// The measurement at a point.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Measured {
    /// The point.
    #[serde(flatten)]
    pub point: Point,
    /// Requests that completed in the measured time.
    pub requests: u64,
    /// The measured time.
    pub elapsed_ns: u64,
    /// Half the width of the 95 % confidence interval of the mean rate, as a share of the rate.
    pub error: f64,
}

impl Measured {
    /// Returns the throughput.
    pub fn bytes_per_second(&self) -> f64 {
        self.requests_per_second() * self.point.block_bytes() as f64
    }

    /// Returns the requests a second.
    pub fn requests_per_second(&self) -> f64 {
        self.requests as f64 * 1e9 / self.elapsed_ns.max(1) as f64
    }

    /// Returns true if its rate is known well enough to conclude anything from it.
    pub(crate) fn is_known(&self) -> bool {
        self.error <= KNOWN_ERROR_MAX
    }

    /// Returns the mean time of one request, by Little's law, since `depth` requests were always in flight.
    pub fn latency_us(&self) -> f64 {
        f64::from(self.point.depth) * 1e6 / self.requests_per_second().max(1e-9)
    }
}

/// All measured points of one direction, by outstanding bytes and depth.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Matrix {
    /// The direction.
    #[serde(serialize_with = "as_word")]
    pub direction: DataDirection,
    /// The points, in order.
    pub measured: Vec<Measured>,
    /// Number of reads whose data was checked.
    pub looked_at: u64,
    /// Number of checked reads that found only zeroes.
    pub only_zeroes: u64,
}

impl Matrix {
    /// Makes a matrix without points.
    pub fn new(direction: DataDirection) -> Matrix {
        Matrix {
            direction,
            measured: Vec::new(),
            looked_at: 0,
            only_zeroes: 0,
        }
    }

    /// Adds a point in order, or replaces its earlier measurement.
    pub fn add(&mut self, measured: Measured) {
        let key = |m: &Measured| (m.point.outstanding_bytes, m.point.depth);
        let at = self.measured.partition_point(|m| key(m) < key(&measured));
        match self.measured.get_mut(at) {
            Some(earlier) if key(earlier) == key(&measured) => *earlier = measured,
            _ => self.measured.insert(at, measured),
        }
    }

    /// Returns the points with this many bytes outstanding, by depth.
    pub fn row(&self, outstanding_bytes: u64) -> impl Iterator<Item = &Measured> {
        let is_in = move |m: &&Measured| m.point.outstanding_bytes == outstanding_bytes;
        self.measured.iter().filter(is_in)
    }

    /// Returns the share of the checked reads that found only zeroes. `None`: none was checked.
    pub fn zero_share(&self) -> Option<f64> {
        (self.looked_at > 0).then(|| self.only_zeroes as f64 / self.looked_at as f64)
    }
}

/// Returns the name of a direction in tables and files.
pub(crate) fn word(direction: DataDirection) -> &'static str {
    match direction {
        DataDirection::Read => "read",
        DataDirection::Write => "write",
    }
}

fn as_word<S: Serializer>(direction: &DataDirection, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(word(*direction))
}

/// Returns the points for a disk: from 512 B to 4 MiB outstanding, each with all depths 1, 2, 4 … whose requests are at least a
/// block and at most the disk. The row of 512 KiB is first and its neighbours follow, so that a probe that is interrupted has
/// answered the main question.
pub fn points(block_bytes: u32, capacity_bytes: u64) -> Vec<Point> {
    let least = u64::from(block_bytes)
        .max(OUTSTANDING_MIN)
        .next_power_of_two();
    let mut sizes: Vec<u64> = std::iter::successors(Some(OUTSTANDING_MIN), |size| Some(size * 2))
        .take_while(|size| *size <= OUTSTANDING_MAX)
        .filter(|size| *size >= least)
        .collect();
    sizes.sort_by_key(|size| size.ilog2().abs_diff(ROW_OF_INTEREST.ilog2()));
    let mut all = Vec::new();
    for outstanding_bytes in sizes {
        let depths = std::iter::successors(Some(1_u32), |depth| depth.checked_mul(2));
        all.extend(
            depths
                .map(|depth| Point {
                    outstanding_bytes,
                    depth,
                })
                .take_while(|point| point.block_bytes() >= least)
                .filter(|point| point.block_bytes() <= capacity_bytes),
        );
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrix_is_that_of_the_study() {
        let all = points(512, 1 << 30);
        assert_eq!(all.len(), 105, "1 + 2 + … + 14");
        let first = all[0];
        assert_eq!((first.outstanding_bytes, first.depth), (512 << 10, 1));
        for point in &all {
            assert!(point.block_bytes() >= 512 && point.outstanding_bytes <= 4 << 20);
            assert_eq!(
                point.block_bytes() * u64::from(point.depth),
                point.outstanding_bytes
            );
        }
        assert!(all.iter().any(|p| p.depth == 8192), "4 MiB of 512 B");
        assert!(
            all.iter()
                .any(|p| (p.outstanding_bytes, p.depth) == (512, 1))
        );
    }

    #[test]
    fn no_request_is_below_the_block_or_above_the_disk() {
        let all = points(4096, 1 << 20);
        assert!(!all.is_empty());
        assert!(
            all.iter()
                .all(|p| (4096..=1 << 20).contains(&p.block_bytes()))
        );
        assert!(points(4096, 2048).is_empty());
    }

    #[test]
    fn points_are_kept_in_order() {
        let mut matrix = Matrix::new(DataDirection::Read);
        for (outstanding_bytes, depth) in [(1024, 2), (512, 1), (1024, 1)] {
            matrix.add(Measured {
                point: Point {
                    outstanding_bytes,
                    depth,
                },
                requests: 1,
                elapsed_ns: 1000,
                error: 0.0,
            });
        }
        let order: Vec<_> = matrix
            .measured
            .iter()
            .map(|m| (m.point.outstanding_bytes, m.point.depth))
            .collect();
        assert_eq!(order, [(512, 1), (1024, 1), (1024, 2)]);
        assert_eq!(matrix.row(1024).count(), 2);
        assert_eq!(matrix.zero_share(), None);
    }

    #[test]
    fn rates_and_latency_follow_from_the_count() {
        let measured = Measured {
            point: Point {
                outstanding_bytes: 8192,
                depth: 2,
            },
            requests: 10_000,
            elapsed_ns: 1_000_000_000,
            error: 0.01,
        };
        assert_eq!(measured.requests_per_second(), 10_000.0);
        assert_eq!(measured.bytes_per_second(), 4096e4);
        assert!((measured.latency_us() - 200.0).abs() < 1e-9);
    }
}
