//! Rounds: every point and every subject once in each, forth and back, so that whatever drifts meets each
//! as often early as late.

use serde_json::json;

use super::desk::Desk;
use super::load::Load;
use super::options::Pace;
use super::subject::{Store, Subject};

/// A load, its disk, and the subjects that it is measured on.
pub(super) struct Point {
    pub(super) name: String,
    pub(super) store: Store,
    pub(super) load: Load,
    pub(super) subjects: Vec<Subject>,
}

/// Measures all points; the first round is the warm-up and marked so.
pub(super) fn rounds(desk: &mut Desk, suite: &str, points: &[Point]) -> Result<(), String> {
    let effort = desk.effort;
    let first = effort.pace.pick(0, 0, 1);
    for round in first..=effort.rounds {
        for point in points {
            let mut order = point.subjects.clone();
            if round % 2 == 0 {
                order.reverse();
            }
            for subject in order {
                measure(desk, suite, point, subject, round)?;
            }
        }
        if effort.pace != Pace::Smoke {
            println!("{suite}: round {round} of {} done", effort.rounds);
        }
    }
    Ok(())
}

fn measure(
    desk: &mut Desk,
    suite: &str,
    point: &Point,
    subject: Subject,
    round: u32,
) -> Result<(), String> {
    let (command, result) = desk.measure(subject, &point.store, &point.load)?;
    let load = &point.load;
    desk.run.note(
        suite,
        &json!({
            "round": round, "is_warm_up": round == 0, "point": point.name, "subject": subject.name(),
            "store": format!("{:?}", point.store), "depth": load.depth, "queues": load.queues,
            "block_bytes": load.block_bytes, "read_percent": load.read_percent, "wait": format!("{:?}", load.wait),
            "command": command, "driver": load.words(), "result": result,
        }),
    )
}
