//! The checks of a disk's size that are under way, and those that wait for their results.

use std::io;

use cleave_disk::Resized;
use tokio::sync::oneshot;

/// Orders for a check that may wait for it; more are refused.
const ASKERS_MAX: usize = 64;

/// The one that ordered a check of the size.
#[derive(Debug)]
pub(crate) enum SizeAsker {
    /// SIGHUP: the result is for the log, also if nothing has changed.
    Signal,
    /// A request: it gets the reason why the size could not be checked, if there is one.
    Request(oneshot::Sender<Result<(), String>>),
}

/// The check under way, the one after it, and what was told last.
#[derive(Debug)]
pub(super) struct SizeChecks {
    /// The running check. It runs on a thread of its own, because it blocks if the server of a network file is lost.
    pub(super) running: Option<oneshot::Receiver<io::Result<Resized>>>,
    /// Those that wait for the running check.
    pub(super) askers: Vec<SizeAsker>,
    /// Another check must follow, because something happened after the running one began.
    pub(super) is_due: bool,
    /// Those that wait for the check that must follow.
    pub(super) next_askers: Vec<SizeAsker>,
    /// The size that was told last.
    pub(super) known_bytes: u64,
    /// The leg that ends before what its guest was told, and where.
    pub(super) short: Option<(u16, u64)>,
}

impl SizeChecks {
    /// Makes the checks of a disk that was opened with this size.
    pub(super) fn new(known_bytes: u64) -> SizeChecks {
        SizeChecks {
            running: None,
            askers: Vec::new(),
            is_due: false,
            next_askers: Vec::new(),
            known_bytes,
            short: None,
        }
    }

    /// Notes the size that is served. Returns what there is to tell: a disk may have grown at another host, which was found when it
    /// was acquired, and so not by the check that found this.
    pub(super) fn news(&mut self, found: Resized, served_bytes: u64) -> Resized {
        let known_bytes = std::mem::replace(&mut self.known_bytes, served_bytes);
        match found {
            Resized::No if served_bytes > known_bytes => Resized::Grown(served_bytes),
            found => found,
        }
    }

    /// Waits for the running check of the size; forever if there is none.
    pub(super) async fn checked(&mut self) -> io::Result<Resized> {
        match &mut self.running {
            Some(running) => running
                .await
                .unwrap_or_else(|failed| Err(io::Error::other(failed))),
            None => std::future::pending().await,
        }
    }

    /// Notes an order. It is for the next check, because the running one may have looked already.
    pub(super) fn ask(&mut self, asker: SizeAsker) {
        self.next_askers
            .retain(|asker| !matches!(asker, SizeAsker::Request(waiting) if waiting.is_closed()));
        // A request that is dropped here learns that it was not taken.
        if self.next_askers.len() < ASKERS_MAX {
            self.next_askers.push(asker);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_told_once_whoever_has_found_it() {
        let mut size = SizeChecks::new(10);
        for (found, served_bytes, news) in [
            (Resized::No, 10, Resized::No),
            // By the check itself.
            (Resized::Grown(20), 20, Resized::Grown(20)),
            (Resized::No, 20, Resized::No),
            // When the disk was acquired.
            (Resized::No, 30, Resized::Grown(30)),
            (Resized::No, 30, Resized::No),
            (Resized::Short(0, 5), 30, Resized::Short(0, 5)),
            (Resized::No, 30, Resized::No),
        ] {
            assert_eq!(size.news(found, served_bytes), news);
        }
    }
}
