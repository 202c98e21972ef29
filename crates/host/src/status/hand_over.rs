//! What a restart of the process would mean for the frontends of a disk, and what the last one meant.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cleave_api::{HandOverReport, LastHandOver};
use cleave_session::{HandoverObstacle, SessionView};

use super::DiskStatus;

impl DiskStatus {
    /// Returns why the frontends of this disk would have to connect again.
    pub(crate) fn obstacle(&self) -> Option<String> {
        let obstacles = self.obstacles();
        obstacles.first().map(|obstacle| obstacle.why.to_owned())
    }

    /// Returns all reasons for which they would have to.
    pub(crate) fn obstacles(&self) -> Vec<HandoverObstacle> {
        let views: Vec<_> = self.lock().iter().map(|one| one.remote.view()).collect();
        let are_held = !self.device.records.stalled().is_empty();
        let are_recorded = |view: &SessionView| view.vrings.iter().all(|vring| vring.recovery);
        let passing = [
            (
                !self.possession.is_active(),
                "another host has the disk, or may have it",
            ),
            (self.quiet_left().is_some(), "it is quiesced"),
            (
                self.terms.owners.waiting() > 0,
                "a frontend waits for the disk",
            ),
            (
                are_held && !views.iter().all(are_recorded),
                "requests are held that the frontend does not keep",
            ),
        ];
        let passing = passing.into_iter().filter(|(is_there, _)| *is_there);
        let passing = passing.map(|(_, why)| HandoverObstacle::passing(why));
        let lasting = self.terms.lasting.map(HandoverObstacle::lasting);
        let of_sessions = views.iter().filter_map(|view| view.obstacle);
        let all = lasting.into_iter().chain(passing).chain(of_sessions);
        all.collect()
    }

    /// Notes that the disk is served again after this pause; `None`: the process before had died. The first note counts.
    pub(crate) fn note_taken_over(&self, pause: Option<Duration>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let _ = self.last_hand_over.set(LastHandOver {
            pause_seconds: pause.map(|pause| pause.as_secs_f64()),
            at_seconds: now.unwrap_or_default().as_millis() as f64 / 1e3,
        });
    }

    /// Returns what the report says of hand-overs.
    pub(super) fn hand_over(&self) -> HandOverReport {
        HandOverReport {
            obstacle: self.obstacle(),
            last: self.last_hand_over.get().copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::metrics::tests::text_of;
    use crate::status::tests::ram;

    #[tokio::test]
    async fn a_disk_tells_what_a_restart_would_mean() {
        let status = ram("a");
        assert_eq!(status.report().hand_over, HandOverReport::default());
        let metrics = text_of(status.report());
        assert!(!metrics.contains("cleave_hand_over"), "{metrics}");
        status.quiesce(b"").await.unwrap();
        let obstacle = status.report().hand_over.obstacle;
        assert_eq!(obstacle.as_deref(), Some("it is quiesced"));
        status.resume(b"").unwrap();
        assert_eq!(status.obstacle(), None);
    }

    #[test]
    fn a_disk_tells_how_it_was_taken_over() {
        let status = ram("a");
        status.note_taken_over(Some(Duration::from_micros(6400)));
        status.note_taken_over(Some(Duration::from_secs(9)));
        let last = status.report().hand_over.last.unwrap();
        assert_eq!(last.pause_seconds, Some(0.0064));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        assert!((0.0..60.0).contains(&(now.as_secs_f64() - last.at_seconds)));
        let sample = "cleave_hand_over_pause_seconds{disk=\"a\"} 0.0064\n";
        assert!(text_of(status.report()).contains(sample));
        // Nobody knows when the process before died.
        let status = ram("a");
        status.note_taken_over(None);
        assert_eq!(status.hand_over().last.unwrap().pause_seconds, None);
        assert!(!text_of(status.report()).contains("cleave_hand_over"));
    }
}
