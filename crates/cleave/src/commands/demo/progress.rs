//! Progress of the demonstration: a line that moves where stderr is a terminal, and in any
//! case a line for each step that is done.

use std::time::Duration;

use super::measure::{DemoStep, SoFar, StepResult};
use crate::progress::{bar, draw, note};

/// Time between two pictures of the moving line.
pub(super) const PAUSE: Duration = Duration::from_millis(200);

const BAR_CELLS: usize = 24;

/// Draws the moving line.
pub(super) fn show(step: &DemoStep, so_far: &SoFar) {
    draw(&line(step, so_far));
}

/// Says that a step is done.
pub(super) fn done(step: &DemoStep, row: &StepResult) {
    let seconds = row.tally.elapsed.as_secs_f64();
    note(&format!("{:<42} {seconds:5.1} s   no error", title(step)));
}

fn title(step: &DemoStep) -> String {
    let size = match step.block_bytes {
        bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        bytes => format!("{} KiB", bytes >> 10),
    };
    format!("{}, {size}, depth {}", step.name, step.depth)
}

fn line(step: &DemoStep, so_far: &SoFar) -> String {
    let share = step.share(so_far);
    let full = (share * BAR_CELLS as f64) as usize;
    let seconds = so_far.elapsed.as_secs_f64().max(1e-3);
    let iops = so_far.requests as f64 / seconds;
    format!("{:<42} {} {iops:>8.0}/s", title(step), bar(full, BAR_CELLS),)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_fits_eighty_columns() {
        for step in super::super::measure::steps(1 << 40, Duration::from_secs(100)) {
            for requests in [0, 1 << 10, 12_345_678] {
                let so_far = SoFar {
                    requests,
                    elapsed: Duration::from_secs(1),
                };
                let text = line(&step, &so_far);
                assert!(text.len() < 80 && text.is_ascii(), "{text}");
            }
        }
    }
}
