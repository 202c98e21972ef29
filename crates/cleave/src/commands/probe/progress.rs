//! Progress of a probe: a line that moves where stderr is a terminal, and else a
//! line for every tenth of the way.

use std::time::Duration;

use cleave_probe::ProbeProgress;

use crate::output::size;
use crate::progress::{bar, draw, note};

const BAR_CELLS: usize = 30;
const TENTHS: usize = 10;

/// The lines about the progress of a probe.
#[derive(Debug, Default)]
pub(super) struct ProgressLines {
    /// Tenths that a line was written about, where stderr is not a terminal.
    tenths_shown: usize,
}

impl ProgressLines {
    /// Draws the moving line, or tells of another tenth.
    pub(super) fn show(&mut self, progress: &ProbeProgress) {
        if draw(&line(progress)) {
            return;
        }
        let tenth = progress.done * TENTHS / progress.total.max(1);
        if tenth > self.tenths_shown {
            self.tenths_shown = tenth;
            let (done, total, left) = (progress.done, progress.total, clock(progress.left));
            note(&format!("{done} of {total} points, {left} left"));
        }
    }
}

fn line(progress: &ProbeProgress) -> String {
    let full = progress.done * BAR_CELLS / progress.total.max(1);
    let (direction, point) = progress.now;
    format!(
        "{} {}/{}  {:>5} left  {:?} {} x {}",
        bar(full, BAR_CELLS),
        progress.done,
        progress.total,
        clock(progress.left),
        direction,
        point.depth,
        size(point.block_bytes()),
    )
}

/// Minutes and seconds.
pub(super) fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    format!("{}:{:02}", seconds / 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use cleave_probe::{DataDirection, Point};

    use super::*;

    #[test]
    fn the_line_fits_eighty_columns() {
        for (done, depth) in [(0, 1), (209, 8192)] {
            let text = line(&ProbeProgress {
                done,
                total: 210,
                now: (
                    DataDirection::Write,
                    Point {
                        outstanding_bytes: 4 << 20,
                        depth,
                    },
                ),
                left: Duration::from_secs(86_399),
            });
            assert!(text.len() < 80 && text.is_ascii(), "{text}");
        }
    }

    #[test]
    fn time_reads_as_a_clock() {
        assert_eq!(clock(Duration::from_millis(61_900)), "1:01");
        assert_eq!(clock(Duration::ZERO), "0:00");
    }
}
