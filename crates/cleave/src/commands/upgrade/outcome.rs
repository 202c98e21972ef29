//! The outcome of a restart for the frontend of each disk.

use std::thread;
use std::time::{Duration, Instant};

use cleave_api::{ClientError, HttpClient};

use super::daemon::Fate;
use crate::commands::remote::clean;
use crate::commands::view::ask::{self, ReportedDisk};

/// How long a frontend may take to connect again.
pub(super) const AGAIN_WITHIN: Duration = Duration::from_secs(10);
/// A frontend that has been connected for so long has connected again, if the disk does not say that it was handed over.
const SETTLED_AFTER: Duration = Duration::from_secs(1);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// The outcome for the frontend of a disk.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum RestartOutcome {
    /// There was none.
    NoFrontend,
    /// The frontend was handed over; its guest waited for so many seconds.
    Paused(f64),
    /// The frontend was taken over from a process that had been killed.
    Recovered,
    /// The frontend has connected again, so long after the restart began.
    ConnectedAgain(Duration),
    /// The frontend has not connected again.
    Away,
    /// The disk is not served, as this says.
    NotServed(String),
}

impl RestartOutcome {
    /// Returns true if a guest waits for its disk.
    pub(super) fn is_bad(&self) -> bool {
        matches!(self, RestartOutcome::Away | RestartOutcome::NotServed(_))
    }
}

/// Waits until it is known what became of each disk, at most for as long as a frontend may take.
pub(super) fn outcomes(
    client: &HttpClient,
    before: &[(String, Fate)],
    begun: Instant,
) -> Vec<(String, RestartOutcome)> {
    let end = Instant::now() + AGAIN_WITHIN;
    let mut all: Vec<_> = before
        .iter()
        .map(|(id, fate)| Watched::new(id, fate, begun))
        .collect();
    loop {
        for one in all.iter_mut().filter(|one| !one.is_final) {
            let answer = ask::disk(client, one.id);
            one.look(answer, Instant::now());
        }
        if all.iter().all(|one| one.is_final) || Instant::now() >= end {
            let outcomes = all.into_iter();
            return outcomes
                .map(|one| (one.id.to_owned(), one.outcome))
                .collect();
        }
        thread::sleep(PAUSE);
    }
}

/// A disk of which it is not known yet what became of it.
struct Watched<'a> {
    id: &'a str,
    before: &'a Fate,
    /// The start of the restart.
    begun: Instant,
    /// The session that is connected, by its number, and since when it is seen.
    connected: Option<(u64, Instant)>,
    /// The outcome as of now.
    outcome: RestartOutcome,
    is_final: bool,
}

impl Watched<'_> {
    fn new<'a>(id: &'a str, before: &'a Fate, begun: Instant) -> Watched<'a> {
        Watched {
            id,
            before,
            begun,
            connected: None,
            outcome: RestartOutcome::Away,
            is_final: false,
        }
    }

    /// Takes in what is answered about the disk now.
    fn look(&mut self, answer: Result<Option<ReportedDisk>, ClientError>, now: Instant) {
        (self.outcome, self.is_final) = match answer {
            Ok(Some(ReportedDisk::Served(report))) => {
                let session = &report.session;
                let current = session.connected.then_some(session.count);
                let last = report.hand_over.last;
                self.served(current, last.map(|last| last.pause_seconds), now)
            }
            Ok(Some(ReportedDisk::Away(away))) => {
                let is_opening = away.state == "opening";
                (RestartOutcome::NotServed(away.words()), !is_opening)
            }
            Ok(None) => {
                let why = "the new process does not have it".to_owned();
                (RestartOutcome::NotServed(why), true)
            }
            Err(error) => (RestartOutcome::NotServed(clean(&error.to_string())), false),
        };
    }

    /// Takes in how a served disk is: the number of the session that is connected, and the pause of the last hand-over, if there
    /// was one. A session that was handed over is connected a moment before it says so, and ends if it cannot go on.
    fn served(
        &mut self,
        current: Option<u64>,
        last: Option<Option<f64>>,
        now: Instant,
    ) -> (RestartOutcome, bool) {
        if matches!(self.before, Fate::NoFrontend | Fate::NotServed(_)) {
            return (RestartOutcome::NoFrontend, true);
        }
        if let Some(pause) = last {
            let outcome = pause.map_or(RestartOutcome::Recovered, RestartOutcome::Paused);
            return (outcome, true);
        }
        let since = match (self.connected, current) {
            (Some((before, since)), Some(number)) if before == number => since,
            _ => now,
        };
        self.connected = current.map(|number| (number, since));
        match current {
            None => (RestartOutcome::Away, false),
            Some(_) => (
                RestartOutcome::ConnectedAgain(since.saturating_duration_since(self.begun)),
                now.saturating_duration_since(since) >= SETTLED_AFTER,
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Milliseconds after the restart began, the number of the session that is connected then, and the pause if it was handed over.
    type Look = (u64, Option<u64>, Option<Option<f64>>);

    /// Looks at a disk that had a frontend. Returns the outcome and true if it is final.
    fn watch(looks: &[Look]) -> (RestartOutcome, bool) {
        let begun = Instant::now();
        let before = Fate::HandedOver;
        let mut watched = Watched::new("a", &before, begun);
        let mut last = (RestartOutcome::Away, false);
        for (ms, current, pause) in looks {
            assert!(!last.1, "nobody looks any more after {last:?}");
            last = watched.served(*current, *pause, begun + Duration::from_millis(*ms));
        }
        last
    }

    #[test]
    fn a_session_that_was_handed_over_is_told_from_one_that_connected_again() {
        let paused = (RestartOutcome::Paused(0.0064), true);
        assert_eq!(watch(&[(5, Some(1), Some(Some(0.0064)))]), paused);
        // Connected, and in force a moment later.
        let looks = [(5, Some(1), None), (15, Some(1), Some(Some(0.0064)))];
        assert_eq!(watch(&looks), paused);
        let looks = [(5, None, None), (15, Some(1), Some(None))];
        assert_eq!(watch(&looks), (RestartOutcome::Recovered, true));
        let again = |ms| RestartOutcome::ConnectedAgain(Duration::from_millis(ms));
        let looks = [
            (5, None, None),
            (21, Some(1), None),
            (900, Some(1), None),
            (1021, Some(1), None),
        ];
        assert_eq!(watch(&looks), (again(21), true));
        assert_eq!(watch(&looks[..3]), (again(21), false));
        // It could not go on, and another one has come.
        let looks = [
            (5, Some(1), None),
            (40, Some(2), None),
            (1005, Some(2), None),
            (1041, Some(2), None),
        ];
        assert_eq!(watch(&looks), (again(40), true));
        let looks = [(5, Some(1), None), (900, None, None)];
        assert_eq!(watch(&looks), (RestartOutcome::Away, false));
    }

    #[test]
    fn a_disk_without_a_frontend_is_not_waited_for() {
        for before in [
            Fate::NoFrontend,
            Fate::NotServed("failed: no file".to_owned()),
        ] {
            let now = Instant::now();
            let mut watched = Watched::new("a", &before, now);
            let outcome = watched.served(None, None, now);
            assert_eq!(outcome, (RestartOutcome::NoFrontend, true));
        }
        let before = Fate::HandedOver;
        let mut watched = Watched::new("a", &before, Instant::now());
        watched.look(Ok(None), Instant::now());
        assert!(watched.is_final && watched.outcome.is_bad());
        watched.look(Err(ClientError::NoListener), Instant::now());
        let silent = RestartOutcome::NotServed("nobody listens".to_owned());
        assert_eq!((watched.outcome, watched.is_final), (silent, false));
    }
}
