//! The text of `GET /metrics`, which is made once for all that wait for it, and a disk at a time.
//!
//! Often everybody may read the metrics, and a node may have a thousand disks. So a text must not take the only thread of the runtime for
//! itself while it is made, and must not lie in memory once for each client that does not read its answer.

use std::sync::{Arc, Weak};
use std::time::Instant;

use axum::body::Bytes;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::task::yield_now;

use crate::hosted::disk::{HostedDisk, HostedState};
use crate::status::{DiskMetrics, MetricsText};

/// Most texts of a socket in memory. Another one is made when all clients that were sent the same one have read it, or were let go.
const TEXTS_MAX: usize = 3;

/// The texts that are being made and sent.
#[derive(Debug)]
pub(crate) struct Scrapes {
    /// When the last text was begun, and that text while it is being sent. Locked while the next one is made.
    last: Mutex<Option<(Instant, Weak<Scrape>)>>,
    /// One for each text that may be in memory.
    room: Arc<Semaphore>,
}

/// A text that several clients are sent.
#[derive(Debug)]
struct Scrape {
    text: String,
    _room: Option<OwnedSemaphorePermit>,
}

/// The share of one client in a text.
struct ScrapeShare(Arc<Scrape>);

impl AsRef<[u8]> for ScrapeShare {
    fn as_ref(&self) -> &[u8] {
        self.0.text.as_bytes()
    }
}

impl Default for Scrapes {
    fn default() -> Scrapes {
        Scrapes {
            last: Mutex::default(),
            room: Arc::new(Semaphore::new(TEXTS_MAX)),
        }
    }
}

impl Scrapes {
    /// Returns a text that was begun after this call. `all`: lists the disks.
    pub(crate) async fn text(&self, all: impl Fn() -> Vec<Arc<HostedDisk>>) -> Bytes {
        let asked = Instant::now();
        let mut last = self.last.lock().await;
        // One that is older would lack what the client may have done before it asked.
        let young = last.as_ref().filter(|(begun, _)| *begun > asked);
        if let Some(scrape) = young.and_then(|(_, scrape)| scrape.upgrade()) {
            return Bytes::from_owner(ScrapeShare(scrape));
        }
        // The semaphore is never closed.
        let room = self.room.clone().acquire_owned().await.ok();
        let begun = Instant::now();
        let mut text = MetricsText::new();
        for disk in all() {
            text.add(&metrics_of(&disk));
            yield_now().await;
        }
        let scrape = Arc::new(Scrape {
            text: text.finish(),
            _room: room,
        });
        *last = Some((begun, Arc::downgrade(&scrape)));
        Bytes::from_owner(ScrapeShare(scrape))
    }
}

fn metrics_of(disk: &HostedDisk) -> DiskMetrics {
    let shown = disk.shown();
    DiskMetrics {
        id: disk.id.clone(),
        state: shown.state.word(),
        descriptors: shown.descriptors,
        served: match &shown.state {
            HostedState::Serving(status) => Some(status.metrics()),
            _ => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::time::Duration;

    use cleave_config::DiskConfig;
    use tokio::time::timeout;

    use super::*;
    use crate::hosted::disk::HostedStatus;
    use crate::hosted::open_files::OpenFiles;

    fn disk(id: &str) -> Arc<HostedDisk> {
        let shown = HostedStatus {
            state: HostedState::Opening,
            config: DiskConfig::default(),
            files: OpenFiles::default(),
            descriptors: 0,
            is_awaited: false,
            is_settled: false,
        };
        let (disk, _, _) = HostedDisk::new(id, String::new(), shown);
        disk
    }

    #[tokio::test]
    async fn clients_that_wait_share_the_next_text() {
        let scrapes = Arc::new(Scrapes::default());
        let busy = scrapes.last.lock().await;
        let ask = |_| {
            let scrapes = scrapes.clone();
            tokio::spawn(async move { scrapes.text(Vec::new).await })
        };
        let asked: Vec<_> = (0..8).map(ask).collect();
        // Until all of them wait for the lock.
        for _ in 0..50 {
            yield_now().await;
        }
        drop(busy);
        let mut texts = Vec::new();
        for text in asked {
            texts.push(text.await.unwrap());
        }
        assert!(texts[0].starts_with(b"# HELP "));
        let first = texts[0].as_ptr();
        assert!(texts.iter().all(|text| text.as_ptr() == first));
        // A client that asks later may have changed something before.
        assert_ne!(scrapes.text(Vec::new).await.as_ptr(), first);
    }

    #[tokio::test(start_paused = true)]
    async fn texts_that_nobody_reads_are_few() {
        const LONG: Duration = Duration::from_secs(3600);
        let scrapes = Scrapes::default();
        let mut unread = Vec::new();
        while let Ok(text) = timeout(LONG, scrapes.text(Vec::new)).await {
            unread.push(text);
            assert!(unread.len() <= TEXTS_MAX);
        }
        assert_eq!(unread.len(), TEXTS_MAX);
        unread.pop();
        timeout(LONG, scrapes.text(Vec::new)).await.unwrap();
    }

    #[tokio::test]
    async fn other_tasks_have_their_turn_after_each_disk() {
        let disks = ["a", "b"].map(disk);
        let scrapes = Scrapes::default();
        let mut making = pin!(scrapes.text(|| disks.to_vec()));
        let mut turns = 0;
        let text = loop {
            tokio::select! {
                biased;
                text = making.as_mut() => break text,
                () = std::future::ready(()) => turns += 1,
            }
        };
        assert_eq!(turns, disks.len());
        let text = String::from_utf8(text.to_vec()).unwrap();
        for id in ["a", "b"] {
            let state = format!("cleave_disk_state{{disk=\"{id}\",state=\"opening\"}} 1\n");
            assert!(text.contains(&state), "{text}");
        }
    }
}
