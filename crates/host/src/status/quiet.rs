//! A disk that is quiesced: for a moment nothing is read or written, so that something below can take a snapshot of it.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cleave_api::{
    EventName, Flushed, ProblemKind, QuiesceRequest, Quiesced, QuietState, ResumeRequest, Resumed,
};
use cleave_disk::Backing;
use cleave_sandbox::Role;
use cleave_worker::Pending;
use serde_json::{Value, json};
use tokio::sync::{SemaphorePermit, oneshot};
use tokio::task::Id;

use super::{DiskStatus, Quiet};
use crate::problem::Refusal;

/// How long a disk stays quiesced if the operator does not say.
const SECONDS_DEFAULT: u64 = 10;
const SECONDS_MAX: u64 = QuiesceRequest::SECONDS_MAX;
/// How long a flush by itself may take.
const FLUSH_TIME: Duration = Duration::from_secs(30);
/// Pause between two looks at what is in flight.
const LOOK_PAUSE: Duration = Duration::from_millis(1);
/// Pause before all workers are asked to flush once more: each of them does it again.
const ASK_PAUSE: Duration = Duration::from_millis(100);

impl DiskStatus {
    /// Drains the disk and makes it durable. Then nothing is given to it until [`resume`](DiskStatus::resume), or until the
    /// time that the body asks for is over, counted from now.
    pub(crate) async fn quiesce(self: &Arc<DiskStatus>, body: &[u8]) -> Result<Quiesced, Refusal> {
        let seconds = seconds_of(body)?;
        let start = Instant::now();
        let until = start + Duration::from_secs(seconds);
        let (quiet, name) = self.begin_quiet(until)?;
        let status = self.clone();
        to_its_end(async move {
            let drained = status.drain_and_flush(quiet, until).await;
            if drained.is_err() {
                status.end_quiet(quiet);
            }
            drained
        })
        .await?;
        let took = start.elapsed();
        self.tell(EventName::Quiesced, json!({ "seconds": seconds }));
        tracing::info!(
            "{}: quiesced after {} ms, for at most {seconds} s",
            self.device.disk.name(),
            took.as_millis()
        );
        Ok(Quiesced {
            state: QuietState::Quiesced,
            quiet: name,
            seconds_left: self.quiet_left().unwrap_or_default().as_secs_f64(),
            took_ms: milliseconds(took),
        })
    }

    /// Makes everything durable that was written so far.
    pub(crate) async fn flush(&self) -> Result<Flushed, Refusal> {
        self.possession.refuse_away()?;
        let start = Instant::now();
        self.sync(start + FLUSH_TIME).await?;
        let took_ms = milliseconds(start.elapsed());
        Ok(Flushed { took_ms })
    }

    /// Ends the quiet, and has held requests done again, or one of these alone, as the body says. A disk whose guest has moved away
    /// meanwhile may have been written by the other host, so it does not count as quiesced.
    pub(crate) fn resume(&self, body: &[u8]) -> Result<Resumed, Refusal> {
        let bad = |why: String| Refusal(ProblemKind::InvalidRequest, why);
        let wanted: ResumeRequest = match body.trim_ascii() {
            [] => ResumeRequest::default(),
            body => serde_json::from_slice(body)
                .map_err(|error| bad(format!("the body: {error}: send {{}} or nothing")))?,
        };
        let (quiesced, requests) = match (wanted.quiet, wanted.held) {
            (None, false) => (self.go_on_if(|_| true), self.repeat_held()?),
            (Some(name), false) => (self.go_on_if(|quiet| quiet.name == name), 0),
            (None, true) => (false, self.repeat_held()?),
            (Some(_), true) => {
                let why = "quiet and held exclude each other: send one of them, or neither";
                return Err(bad(why.to_owned()));
            }
        };
        Ok(Resumed { requests, quiesced })
    }

    /// Ends this quiet, and none that an operator has begun after it.
    fn end_quiet(&self, id: Id) -> bool {
        self.go_on_if(|quiet| quiet.timer.id() == id)
    }

    fn go_on_if(&self, is_meant: impl FnOnce(&mut Quiet) -> bool) -> bool {
        let Some(quiet) = self.lock_quiet().take_if(is_meant) else {
            return false;
        };
        quiet.timer.abort();
        self.device.go_on();
        self.tell(EventName::Resumed, Value::Null);
        tracing::info!("{}: goes on", self.device.disk.name());
        quiet.departures == self.possession.departures()
    }

    /// The disk has ended, and so does the wait for the end of its quiet. A client that asked for one may still be sending its
    /// body, and gets none.
    pub(crate) fn forget_quiet(&self) {
        let mut quiet = self.lock_quiet();
        self.is_barred.store(true, Ordering::Relaxed);
        if let Some(quiet) = quiet.take() {
            quiet.timer.abort();
        }
    }

    /// Lets nobody begin a quiet while the disk changes hands, of which the other process would not know.
    pub(crate) fn bar_quiet(&self) {
        let _quiet = self.lock_quiet();
        self.is_barred.store(true, Ordering::Relaxed);
    }

    /// Ends that: the disk stays.
    pub(crate) fn admit_quiet(&self) {
        self.is_barred.store(false, Ordering::Relaxed);
    }

    /// Returns true while the disk is flushed or cloned for the operator. The result is this process's alone.
    pub(crate) fn is_syncing(&self) -> bool {
        self.aside.available_permits() == 0
    }

    /// Waits until such a flush has ended, at most for so long.
    pub(crate) async fn await_syncing(&self, time: Duration) {
        // If it takes longer, nobody learns how it ends.
        let ended = tokio::time::timeout(time, self.aside.acquire()).await;
        drop(ended);
    }

    /// How long the disk stays quiesced.
    pub(crate) fn quiet_left(&self) -> Option<Duration> {
        let quiet = self.lock_quiet();
        let until = quiet.as_ref().map(|quiet| quiet.until)?;
        Some(until.saturating_duration_since(Instant::now()))
    }

    /// Makes `to` a copy that shares its blocks with the disk's file: drains, flushes, clones and goes on. How long the guest
    /// waited.
    pub(crate) async fn snapshot(
        self: &Arc<DiskStatus>,
        to: File,
        within: Duration,
    ) -> Result<Duration, Refusal> {
        let start = Instant::now();
        let until = start + within;
        let (quiet, _) = self.begin_quiet(until)?;
        let status = self.clone();
        to_its_end(async move {
            let cloned = status.drain_and_clone(quiet, to, until).await;
            status.end_quiet(quiet);
            cloned.map(|()| start.elapsed())
        })
        .await
    }

    async fn drain_and_clone(&self, quiet: Id, to: File, until: Instant) -> Result<(), Refusal> {
        self.drain_and_flush(quiet, until).await?;
        let disk = self.device.disk.clone();
        let cloned = self.aside(until, move || disk.clone_to(&to)).await;
        // The file system of the disk cannot do it: the request is at fault, not the daemon.
        cloned.map_err(|Refusal(_, why)| Refusal(ProblemKind::CannotSnapshot, why))?;
        self.refuse_resumed(quiet)
    }

    /// Fails if this quiet has ended meanwhile, or the guest has moved to another host: then it may have written.
    fn refuse_resumed(&self, id: Id) -> Result<(), Refusal> {
        self.possession.refuse_away()?;
        let departures = self.possession.departures();
        let quiet = self.lock_quiet();
        let lasts = |quiet: &Quiet| quiet.timer.id() == id && quiet.departures == departures;
        match quiet.as_ref().is_some_and(lasts) {
            true => Ok(()),
            false => {
                let why = "the disk was resumed meanwhile: send the request again".to_owned();
                Err(Refusal(ProblemKind::QuietEnded, why))
            }
        }
    }

    /// One snapshot at a time: the threads of those whose folder does not answer would become ever more.
    pub(crate) fn begin_snapshot(&self) -> Result<SemaphorePermit<'_>, Refusal> {
        self.copying.try_acquire().map_err(|_| {
            let why = "a snapshot of this disk is under way already: see why it takes so long";
            Refusal(ProblemKind::Busy, why.to_owned())
        })
    }

    /// Why no snapshot can be taken of it.
    pub(crate) fn refuse_snapshot(&self) -> Result<(), String> {
        match self.device.disk.why_not_cloned() {
            Some(why) => Err(why.to_owned()),
            None => Ok(()),
        }
    }

    fn begin_quiet(self: &Arc<DiskStatus>, until: Instant) -> Result<(Id, String), Refusal> {
        self.possession.refuse_away()?;
        let mut quiet = self.lock_quiet();
        if self.is_barred.load(Ordering::Relaxed) {
            return Err(has_ended());
        }
        if quiet.is_some() {
            let why = "it is quiesced already: wait, or resume it first".to_owned();
            return Err(Refusal(ProblemKind::AlreadyQuiesced, why));
        }
        let status = self.clone();
        let timer = tokio::spawn(async move {
            tokio::time::sleep_until(until.into()).await;
            status.end_quiet(tokio::task::id());
        });
        let id = timer.id();
        // Unlike any other, also of a daemon that was started again since.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let name = format!("{:x}", now.unwrap_or_default().as_nanos());
        *quiet = Some(Quiet {
            name: name.clone(),
            until,
            departures: self.possession.departures(),
            timer: timer.abort_handle(),
        });
        self.device.quiesce();
        Ok((id, name))
    }

    async fn drain_and_flush(&self, quiet: Id, until: Instant) -> Result<(), Refusal> {
        while !self.device.is_still() {
            self.refuse_lost()?;
            let unsettled = self.device.unsettled_for();
            if Instant::now() + unsettled.unwrap_or_default() >= until {
                return Err(Refusal(ProblemKind::StorageSlow, not_still(unsettled)));
            }
            self.refuse_resumed(quiet)?;
            tokio::time::sleep(LOOK_PAUSE).await;
        }
        self.sync(until).await?;
        // A worker may have failed meanwhile.
        self.refuse_lost()?;
        self.refuse_resumed(quiet)
    }

    /// Fails if a worker has left requests in flight, of which nobody learns the end.
    fn refuse_lost(&self) -> Result<(), Refusal> {
        match self.device.is_lost() {
            true => Err(Refusal(ProblemKind::InternalFault, WORKER_LOST.to_owned())),
            false => Ok(()),
        }
    }

    async fn sync(&self, until: Instant) -> Result<(), Refusal> {
        let disk = self.device.disk.clone();
        let is_nbd = matches!(disk.backing(), Backing::Nbd(_));
        let ask = || is_nbd.then(|| self.device.sync());
        while let Some(flushes) = ask().filter(|flushes| !flushes.is_empty()) {
            if self.await_workers(flushes, until).await? {
                return Ok(());
            }
            tokio::time::sleep(ASK_PAUSE).await;
        }
        self.aside(until, move || disk.sync()).await
    }

    /// Waits for a flush through the connections of the workers. `false`: a worker ended before it had flushed, because its guest
    /// left, and the others have to be asked again.
    async fn await_workers(
        &self,
        mut flushes: Vec<Pending<Result<(), i32>>>,
        until: Instant,
    ) -> Result<bool, Refusal> {
        while let Some(flush) = flushes.pop() {
            match flush.wait_for(Duration::ZERO) {
                Ok(Some(Ok(()))) => {}
                Ok(Some(Err(_))) => return Err(failed(rustix::io::Errno::IO.into())),
                _ if Instant::now() >= until => return Err(late()),
                Ok(None) => return Ok(false),
                Err(again) => {
                    // The others first: one of them may fail.
                    flushes.insert(0, again);
                    tokio::time::sleep(LOOK_PAUSE).await;
                }
            }
        }
        Ok(true)
    }

    /// Does on a thread of its own what may block: one such thread at a time.
    async fn aside(
        &self,
        until: Instant,
        job: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Result<(), Refusal> {
        if self.is_barred.load(Ordering::Relaxed) {
            return Err(has_ended());
        }
        let (aside, confinement) = (self.aside.clone(), self.confinement.clone());
        let Ok(aside) = aside.try_acquire_owned() else {
            let why = "a flush of this disk is under way already: see why it takes so long";
            return Err(Refusal(ProblemKind::Busy, why.to_owned()));
        };
        let (reply, done) = oneshot::channel();
        let spawned = thread::Builder::new()
            .name("flush".to_owned())
            .spawn(move || {
                confinement.thread(Role::Disk);
                let done = job();
                drop(aside);
                // The client may have left.
                let _ = reply.send(done);
            });
        spawned.map_err(failed)?;
        match tokio::time::timeout_at(until.into(), done).await {
            Ok(Ok(result)) => result.map_err(failed),
            Ok(Err(lost)) => Err(failed(io::Error::other(lost))),
            Err(_) => Err(late()),
        }
    }

    fn lock_quiet(&self) -> std::sync::MutexGuard<'_, Option<Quiet>> {
        self.quiet
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn has_ended() -> Refusal {
    let why = "the disk has ended or changes hands: see the list of disks".to_owned();
    Refusal(ProblemKind::NotServed, why)
}

fn failed(error: io::Error) -> Refusal {
    Refusal(ProblemKind::StorageFailed, format!("the disk: {error}"))
}

/// Why a disk never becomes still.
const WORKER_LOST: &str = "a worker failed twice and left requests in flight, which may still be done at any time, so the disk is not \
                           still: start the daemon again";

/// Says why a disk did not become still in time. `unsettled`: for how long an earlier daemon's requests may still be under way.
fn not_still(unsettled: Option<Duration>) -> String {
    match unsettled {
        Some(left) => format!(
            "the daemon before this one did not end in order, and for {} s the server may still do what that daemon sent, so \
             the disk goes on: try again then, or give more seconds",
            left.as_secs() + 1
        ),
        None => "requests are still in flight, so the disk goes on: see why it is so slow, or give more seconds".to_owned(),
    }
}

fn late() -> Refusal {
    let why = "the disk did not flush in time: see why it is so slow".to_owned();
    Refusal(ProblemKind::StorageSlow, why)
}

/// Runs a step that has to end although the client leaves, because the guest waits for its end.
async fn to_its_end<T: Send + 'static>(
    step: impl Future<Output = Result<T, Refusal>> + Send + 'static,
) -> Result<T, Refusal> {
    let ended = tokio::spawn(step).await;
    ended.unwrap_or_else(|lost| Err(Refusal(ProblemKind::InternalFault, lost.to_string())))
}

fn seconds_of(body: &[u8]) -> Result<u64, Refusal> {
    let bad = |why: String| Refusal(ProblemKind::InvalidRequest, why);
    let wanted: QuiesceRequest = match body.trim_ascii() {
        [] => QuiesceRequest::default(),
        body => serde_json::from_slice(body)
            .map_err(|error| bad(format!("the body: {error}: send {{\"seconds\": 10}}")))?,
    };
    let seconds = wanted.seconds.unwrap_or(SECONDS_DEFAULT);
    match (1..=SECONDS_MAX).contains(&seconds) {
        true => Ok(seconds),
        false => Err(bad(format!("seconds: {seconds} is not 1 to {SECONDS_MAX}"))),
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}
