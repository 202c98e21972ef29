//! The right to the bytes of a disk, among the hosts that can reach its storage: whether this one has it, and how it comes and
//! goes.
//!
//! ```text
//!   started active                                 started inactive
//!         │          the guest moves away                  │
//!         ▼                                                ▼
//!       Active ───────────────────────► HandedOver      Inactive
//!         ▲                              │      ▲        │    ▲
//!         │                   a guest is │      │        │    │ its frontend
//!         │     the locks     to run     ▼      │        ▼    │ has left
//!         └─────────────────────────────────── Waiting ───────┘
//!               are had
//! ```
//!
//! If the locks are had at once, nobody sees that the disk was waited for.
//!
//! Locks are taken and released on threads of their own, because storage may take long to answer, and a session must not make
//! the calls that this needs. The size of a disk that another host has is looked at in the same way. At most one such thread takes
//! locks or looks. What it acquires for a session that does not ask any more, it releases.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleave_api::{PossessionState, ProblemKind};
use cleave_disk::{Disk, Locking, OpenError};
use cleave_session::{Possession, Quota};
use serde_json::{Value, json};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::problem::Refusal;

/// How long a session waits for locks that may be free. Storage that is well answers sooner, so a guest does not wait for the next
/// attempt.
const ANSWER_TIME: Duration = Duration::from_millis(20);

/// An attempt that takes longer is told of. Tests, whose machine may be late, say themselves which attempt does not end.
const SLOW: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 1 });

/// Most log lines about waits at once, and about moves; then one a second.
const WAITS_MAX: u32 = 5;
const MOVES_MAX: u32 = 10;

/// Work for a thread of its own.
pub(crate) type LockJob = Box<dyn FnOnce() + Send>;

/// The right of this host to read and write a disk.
pub(crate) struct DiskPossession {
    disk: Arc<Disk>,
    state: Mutex<Holding>,
    /// The attempt to acquire the disk. Locked before the state.
    attempt: Mutex<Option<Attempt>>,
    /// One permit, which an attempt or a look at the size has to its end.
    turn: Arc<Semaphore>,
    run: Box<dyn Fn(LockJob) + Send + Sync>,
    tell: Box<dyn Fn(Value) + Send + Sync>,
    acquired: Notify,
    waits: Mutex<Quota>,
    /// A frontend may stop and start its vrings as often as it likes.
    moves: Mutex<Quota>,
}

/// An attempt to acquire the disk.
#[derive(Debug)]
struct Attempt {
    since: Instant,
    /// The turn comes with it: if its thread dropped the turn only after this was received, the next attempt could find it taken.
    outcome: Receiver<(Result<(), OpenError>, OwnedSemaphorePermit)>,
}

/// The state, and what is told of it.
#[derive(Debug)]
struct Holding {
    state: PossessionState,
    /// The state to which a wait returns that is given up.
    absence: PossessionState,
    /// Why the locks are waited for, as it was told last.
    why: Option<String>,
    /// The disk could not be handed over with a guest that moved, and has no lock that keeps the guest from running elsewhere.
    is_doubtful: bool,
    /// How often a guest has moved to another host.
    departures: u64,
}

impl std::fmt::Debug for DiskPossession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.disk.name();
        let mut shown = f.debug_struct("DiskPossession");
        shown.field("disk", &name).field("state", &self.state());
        shown.finish_non_exhaustive()
    }
}

impl DiskPossession {
    /// Makes the possession of a disk that was opened with this locking. `run`: does a job on a thread that may take locks, or
    /// drops it. `tell`: tells of a change.
    pub(crate) fn new(
        disk: Arc<Disk>,
        locking: Locking,
        run: impl Fn(LockJob) + Send + Sync + 'static,
        tell: impl Fn(Value) + Send + Sync + 'static,
    ) -> DiskPossession {
        let state = match locking {
            Locking::AtOpen | Locking::Given => PossessionState::Active,
            Locking::Later => PossessionState::Inactive,
        };
        DiskPossession {
            disk,
            state: Mutex::new(Holding {
                state,
                absence: PossessionState::Inactive,
                why: None,
                is_doubtful: false,
                departures: 0,
            }),
            attempt: Mutex::default(),
            turn: Arc::new(Semaphore::new(1)),
            run: Box::new(run),
            tell: Box::new(tell),
            acquired: Notify::new(),
            waits: Mutex::new(Quota::new(WAITS_MAX)),
            moves: Mutex::new(Quota::new(MOVES_MAX)),
        }
    }

    pub(crate) fn state(&self) -> PossessionState {
        lock(&self.state).state
    }

    /// Returns how often the guest has moved away. In between the disk was this host's all the time.
    pub(crate) fn departures(&self) -> u64 {
        lock(&self.state).departures
    }

    /// Returns true if the disk may be read and written here.
    pub(crate) fn is_active(&self) -> bool {
        self.state() == PossessionState::Active
    }

    /// Refuses what reads or writes the disk and is not for its guest, while the disk is another host's, or may be.
    pub(crate) fn refuse_away(&self) -> Result<(), Refusal> {
        let name = self.disk.name();
        let held = lock(&self.state);
        let why = match held.state {
            PossessionState::Active if held.is_doubtful => {
                "could not be handed over with its guest, which may run on another host: start the guest here first, or remove the disk"
            }
            PossessionState::Active => return Ok(()),
            PossessionState::Inactive => {
                "is inactive until a guest runs here: ask the host that has it"
            }
            PossessionState::HandedOver => {
                "was handed over with its guest: ask the host that has it"
            }
            PossessionState::Waiting => "waits for its locks: ask the host that has it",
        };
        let why = format!("disk {name} {why}");
        Err(Refusal(ProblemKind::NotActive, why))
    }

    /// Waits until the disk has been acquired. Another host may have changed its size.
    pub(crate) async fn acquired(&self) {
        self.acquired.notified().await;
    }

    /// Gives up a wait, because the frontend has left for which it was.
    pub(crate) fn stop_waiting(&self) {
        let mut attempt = lock(&self.attempt);
        // Its thread finds nobody to take the result, and releases what it gets.
        *attempt = None;
        let mut held = lock(&self.state);
        if held.state == PossessionState::Waiting {
            held.state = held.absence;
            self.tell_of(&held);
        }
    }

    /// Begins to acquire the disk. `None`: an attempt that was given up is still under way.
    fn begin(&self) -> Option<Attempt> {
        let turn = self.turn.clone().try_acquire_owned().ok()?;
        // Without room for it, so that a result is either taken or comes back.
        let (reply, outcome) = sync_channel(0);
        let disk = self.disk.clone();
        (self.run)(Box::new(move || {
            if let Err(SendError((Ok(()), _turn))) = reply.send((disk.acquire(), turn)) {
                release(&disk);
            }
        }));
        let since = Instant::now();
        Some(Attempt { since, outcome })
    }

    /// Notes that the locks cannot be had yet, and tells if that, or the reason, is new.
    fn wait(&self, why: &str, holder: Option<&str>) {
        let mut held = lock(&self.state);
        if held.state == PossessionState::Waiting && held.why.as_deref() == Some(why) {
            return;
        }
        held.state = PossessionState::Waiting;
        held.why = Some(why.to_owned());
        (self.tell)(json!({"possession": held.state, "holder": holder}));
        let name = self.disk.name();
        lock(&self.waits).log(|more| {
            tracing::warn!(
                "{name}: its guest waits until the disk can be locked here: {why}{more}"
            );
        });
    }

    /// Notes that an attempt takes long. What is known of an earlier one says more.
    fn wait_for_storage(&self) {
        if self.state() != PossessionState::Waiting {
            self.wait("its storage does not answer", None);
        }
    }

    fn tell_of(&self, held: &Holding) {
        (self.tell)(json!({ "possession": held.state }));
    }
}

impl Possession for DiskPossession {
    fn is_here(&self) -> bool {
        self.is_active()
    }

    fn hand_over(&self) {
        {
            let mut held = lock(&self.state);
            if held.state != PossessionState::Active {
                return;
            }
            // Before the locks are released: from now on the operator is refused.
            held.state = PossessionState::HandedOver;
            held.absence = PossessionState::HandedOver;
            held.departures += 1;
        }
        let (reply, released) = sync_channel(1);
        let disk = self.disk.clone();
        (self.run)(Box::new(move || {
            release(&disk);
            let _ = reply.send(());
        }));
        let name = self.disk.name();
        let released = released.recv();
        lock(&self.moves).log(|more| match released {
            Ok(()) => {
                tracing::info!("{name}: the guest moves: the disk was flushed and handed over{more}")
            }
            Err(_) => tracing::error!(
                "{name}: no thread could be started that releases its locks: end this daemon, or the other host waits for them{more}"
            ),
        });
        self.tell_of(&lock(&self.state));
    }

    fn hand_over_failed(&self) {
        // Locks keep the guest from starting elsewhere.
        if self.disk.reconnects() {
            let mut held = lock(&self.state);
            held.is_doubtful = true;
            held.departures += 1;
        }
    }

    fn take(&self) -> Result<bool, String> {
        let mut attempt = lock(&self.attempt);
        if self.is_active() {
            lock(&self.state).is_doubtful = false;
            return Ok(true);
        }
        if attempt.is_none() {
            *attempt = self.begin();
        }
        let outcome = match &*attempt {
            Some(attempt) => match attempt.outcome.recv_timeout(ANSWER_TIME) {
                Err(RecvTimeoutError::Timeout) if attempt.since.elapsed() < SLOW => {
                    return Ok(false);
                }
                outcome => outcome.map(|(result, _)| result),
            },
            None => Err(RecvTimeoutError::Timeout),
        };
        if !matches!(outcome, Err(RecvTimeoutError::Timeout)) {
            *attempt = None;
        }
        match outcome {
            Ok(Ok(())) => {
                let mut held = lock(&self.state);
                held.state = PossessionState::Active;
                held.is_doubtful = false;
                self.tell_of(&held);
                drop(held);
                let name = self.disk.name();
                lock(&self.moves).log(|more| {
                    tracing::info!("{name}: taken over: its guest runs here from now on{more}");
                });
                self.acquired.notify_one();
                return Ok(true);
            }
            Ok(Err(error)) if error.needs_reopening() => return Err(error.to_string()),
            Ok(Err(error)) => match error.holder() {
                Some(holder) => self.wait(&format!("{holder} has it"), Some(holder)),
                None => self.wait(&error.to_string(), None),
            },
            Err(RecvTimeoutError::Timeout) => self.wait_for_storage(),
            Err(RecvTimeoutError::Disconnected) => self.wait("no thread can be started", None),
        }
        Ok(false)
    }

    fn look(&self) -> Option<Receiver<()>> {
        if self.is_active() {
            return None;
        }
        let turn = self.turn.clone().try_acquire_owned().ok()?;
        let (looks, look) = sync_channel(0);
        let disk = self.disk.clone();
        (self.run)(Box::new(move || {
            // An error comes again when the disk is acquired.
            let _ = disk.refresh();
            drop((turn, looks));
        }));
        Some(look)
    }
}

/// Releases a disk. One that cannot be released may keep another host waiting, but harms nobody.
fn release(disk: &Disk) {
    if let Err(error) = disk.release() {
        tracing::error!(
            "{}: cannot release its locks: {error}: end this daemon, or the other host waits for them",
            disk.name()
        );
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;
    use std::sync::mpsc::{Sender, channel};
    use std::thread;

    use cleave_disk::{DiskSpec, OpenOptions};
    use tempfile::TempDir;

    use super::*;

    type Told = Arc<Mutex<Vec<Value>>>;

    fn disk(path: &Path, locking: Locking) -> Arc<Disk> {
        let options = OpenOptions {
            locking,
            ..OpenOptions::default()
        };
        Arc::new(Disk::open(&DiskSpec::Path(path.to_owned()), &options).unwrap())
    }

    fn of(
        path: &Path,
        locking: Locking,
        run: impl Fn(LockJob) + Send + Sync + 'static,
    ) -> (DiskPossession, Told) {
        let told = Told::default();
        let to = told.clone();
        let tell = move |more| lock(&to).push(more);
        let possession = DiskPossession::new(disk(path, locking), locking, run, tell);
        (possession, told)
    }

    fn on_a_thread(job: LockJob) {
        thread::spawn(job);
    }

    /// Takes the jobs and does none.
    fn kept(jobs: &Sender<LockJob>) -> impl Fn(LockJob) + Send + Sync + use<> {
        let jobs = Mutex::new(jobs.clone());
        move |job| lock(&jobs).send(job).unwrap()
    }

    fn image(folder: &TempDir) -> std::path::PathBuf {
        let path = folder.path().join("image");
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        path
    }

    /// Asks until the locks are had, or another program has them.
    fn takes(possession: &DiskPossession) -> bool {
        loop {
            let has = possession.take().unwrap();
            if has || possession.state() == PossessionState::Waiting {
                return has;
            }
        }
    }

    /// Asks until the locks are had, which nobody has.
    fn until_taken(possession: &DiskPossession) {
        let start = Instant::now();
        while !possession.take().unwrap() {
            assert!(start.elapsed() < Duration::from_secs(30), "{possession:?}");
        }
    }

    fn told(told: &Told) -> Vec<Value> {
        std::mem::take(&mut *lock(told))
    }

    /// Two hosts that have one file, as two open file descriptions.
    #[test]
    fn a_disk_is_one_hosts_at_a_time_and_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = image(&folder);
        let (source, at_source) = of(&path, Locking::AtOpen, on_a_thread);
        let (target, at_target) = of(&path, Locking::Later, on_a_thread);
        assert_eq!(source.state(), PossessionState::Active);
        assert_eq!(target.state(), PossessionState::Inactive);
        assert!(takes(&source));
        assert!(!takes(&target));
        assert!(!takes(&target));
        let waiting = json!({"possession": "waiting", "holder": "another cleave"});
        assert_eq!(told(&at_target), std::slice::from_ref(&waiting));
        for (from, at_from, to, at_to) in [
            (&source, &at_source, &target, &at_target),
            (&target, &at_target, &source, &at_source),
        ] {
            from.hand_over();
            assert_eq!(from.state(), PossessionState::HandedOver);
            until_taken(to);
            assert_eq!(to.state(), PossessionState::Active);
            assert!(!takes(from));
            let away = json!({"possession": "handed-over"});
            assert_eq!(told(at_from), [away.clone(), waiting.clone()]);
            assert_eq!(told(at_to), [json!({"possession": "active"})]);
            from.stop_waiting();
            assert_eq!(told(at_from), [away]);
        }
        // It has nothing to hand over.
        target.hand_over();
        assert!(told(&at_target).is_empty());
    }

    #[test]
    fn a_wait_that_is_given_up_leaves_the_disk_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = image(&folder);
        let other = disk(&path, Locking::AtOpen);
        let (possession, at) = of(&path, Locking::Later, on_a_thread);
        assert!(!takes(&possession));
        possession.stop_waiting();
        possession.stop_waiting();
        let states: Vec<_> = told(&at)
            .iter()
            .map(|more| more["possession"].clone())
            .collect();
        assert_eq!(states, ["waiting", "inactive"]);
        other.release().unwrap();
        assert!(takes(&possession));
    }

    /// Otherwise the locks would be held for nobody.
    #[test]
    fn an_attempt_that_nobody_waits_for_keeps_no_locks() {
        let folder = tempfile::tempdir().unwrap();
        let path = image(&folder);
        let (jobs, taken) = channel();
        let (possession, at) = of(&path, Locking::Later, kept(&jobs));
        assert_eq!(possession.take(), Ok(false));
        assert_eq!(possession.take(), Ok(false));
        possession.stop_waiting();
        // The first attempt is still under way, so there is no second.
        assert_eq!(possession.take(), Ok(false));
        assert_eq!(
            told(&at),
            [json!({"possession": "waiting", "holder": null})]
        );
        let attempt = taken.try_recv().unwrap();
        assert!(taken.try_recv().is_err());
        attempt();
        drop(disk(&path, Locking::AtOpen));
        let outcome = thread::scope(|scope| {
            let done = scope.spawn(move || {
                let attempt: LockJob = taken.recv().unwrap();
                attempt();
            });
            while !done.is_finished() && possession.take() == Ok(false) {}
            possession.state()
        });
        assert_eq!(outcome, PossessionState::Active);
    }

    /// Its guest's state has the size that the disk has there.
    #[test]
    fn the_size_is_looked_at_while_the_disk_is_another_hosts() {
        let folder = tempfile::tempdir().unwrap();
        let path = image(&folder);
        let (active, _) = of(&path, Locking::AtOpen, on_a_thread);
        assert!(active.look().is_none(), "its size is watched");
        let (jobs, taken) = channel();
        let (possession, _) = of(&path, Locking::Later, kept(&jobs));
        let look = possession.look().unwrap();
        assert!(possession.look().is_none(), "one is under way");
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(2 << 20).unwrap();
        taken.try_recv().unwrap()();
        assert!(look.recv().is_err());
        assert_eq!(possession.disk.capacity_bytes(), 2 << 20);
        assert!(possession.look().is_some());
        // It does not keep the disk from being acquired.
        taken.try_recv().unwrap()();
        active.hand_over();
        assert_eq!(possession.take(), Ok(false));
        assert!(taken.try_recv().is_ok());
    }

    #[test]
    fn a_thread_that_cannot_be_started_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = image(&folder);
        let starts = Mutex::new(0);
        let every_second = move |job: LockJob| {
            *lock(&starts) += 1;
            if *lock(&starts) % 2 == 0 {
                on_a_thread(job);
            }
        };
        let (possession, at) = of(&path, Locking::Later, every_second);
        assert_eq!(possession.take(), Ok(false));
        assert_eq!(told(&at)[0]["possession"], "waiting");
        until_taken(&possession);
        // A disk that is not released is another host's all the same.
        possession.hand_over();
        assert_eq!(possession.state(), PossessionState::HandedOver);
    }

    #[test]
    fn an_operator_is_refused_while_the_disk_is_another_hosts() {
        let folder = tempfile::tempdir().unwrap();
        let path = image(&folder);
        let (possession, _) = of(&path, Locking::AtOpen, on_a_thread);
        assert!(possession.refuse_away().is_ok());
        possession.hand_over();
        let Refusal(kind, why) = possession.refuse_away().unwrap_err();
        assert_eq!(kind, ProblemKind::NotActive);
        assert!(
            why.contains("handed over") && why.contains("image"),
            "{why}"
        );
        until_taken(&possession);
        assert!(possession.refuse_away().is_ok());
    }
}
