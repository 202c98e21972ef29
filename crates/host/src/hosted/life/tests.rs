//! Lives of disks on invented storage, in invented time.

mod unread;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cleave_worker::RateLimits;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::sleep;

use super::*;
use crate::failure::Failure;
use crate::hosted::disk_host::OpenResult;
use crate::hosted::generation::Condition;
use crate::process::systemd::Manager;
use crate::status::{connect_for_tests, ram_for_tests};

/// Storage and files that do what a test says.
#[derive(Default)]
struct Invented {
    /// Why disks of this first spec cannot be opened.
    faults: Mutex<BTreeMap<String, String>>,
    /// Openings, and works on files, that may go on; the test gives them one by one.
    openings: Gate,
    works: Gate,
    /// Processes that have a disk, until they leave.
    others: Gate,
    /// The process before has left a frontend of the disk.
    is_awaited: Mutex<bool>,
    /// Works on files fail.
    is_full: Mutex<bool>,
    /// The files.
    files: Mutex<BTreeMap<String, DiskConfig>>,
    limits: Mutex<RateLimits>,
    /// Disks that name a group.
    members: Mutex<i32>,
    /// Why the file of the disk cannot be read.
    unread: Mutex<Option<FileFault>>,
    /// When disks were opened, and files read.
    tried: Mutex<Vec<Instant>>,
    /// What has happened, in order.
    told: Mutex<Vec<String>>,
}

/// Open, unless a test has closed it: then as many pass as it lets.
#[derive(Default)]
struct Gate(Mutex<Option<Arc<Semaphore>>>);

impl Gate {
    fn close(&self) {
        *lock(&self.0) = Some(Arc::new(Semaphore::new(0)));
    }

    fn let_pass(&self, count: usize) {
        if let Some(gate) = &*lock(&self.0) {
            gate.add_permits(count);
        }
    }

    fn pass(&self) -> impl Future<Output = ()> + Send + 'static {
        let gate = lock(&self.0).clone();
        async move {
            if let Some(gate) = gate {
                gate.acquire().await.unwrap().forget();
            }
        }
    }
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Invented {
    fn note(&self, what: impl Into<String>) {
        lock(&self.told).push(what.into());
    }

    /// What has happened since the last call.
    fn told(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.told))
    }

    fn break_disk(&self, spec: &str, why: &str) {
        lock(&self.faults).insert(spec.to_owned(), why.to_owned());
    }

    fn mend_disk(&self, spec: &str) {
        lock(&self.faults).remove(spec);
    }

    fn set_full(&self, is_full: bool) {
        *lock(&self.is_full) = is_full;
    }

    async fn work(
        self: Arc<Invented>,
        job: impl FnOnce(&mut BTreeMap<String, DiskConfig>),
    ) -> io::Result<()> {
        self.works.pass().await;
        if *lock(&self.is_full) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        job(&mut lock(&self.files));
        Ok(())
    }

    fn file(&self, id: &str) -> Option<DiskConfig> {
        lock(&self.files).get(id).cloned()
    }
}

impl DiskHost for Invented {
    type Opened = ();

    fn judge(&self, _: &str, config: &DiskConfig) -> Result<u64, String> {
        match config.pool.as_deref() {
            Some("none") => Err("pool: there is no \"none\"".to_owned()),
            _ => Ok(1),
        }
    }

    fn read(self: Arc<Invented>, id: &str) -> Work<Result<DiskConfig, FileFault>> {
        lock(&self.tried).push(Instant::now());
        let (id, gate) = (id.to_owned(), self.works.pass());
        Box::pin(async move {
            gate.await;
            match lock(&self.unread).clone() {
                Some(fault) => Err(fault),
                None => Ok(self.file(&id).unwrap()),
            }
        })
    }

    fn has_frontend_left(&self, _: &str) -> bool {
        *lock(&self.is_awaited)
    }

    fn leave(self: Arc<Invented>, id: &str, _: Arc<Manager>) -> Work<()> {
        self.note(format!("leave {id}"));
        let gate = self.works.pass();
        Box::pin(gate)
    }

    fn open(
        self: Arc<Invented>,
        _: &str,
        config: &DiskConfig,
        past: Past,
    ) -> Work<OpenResult<Invented>> {
        let spec = config.disk[0].to_string();
        self.note(format!("open {spec}, {past:?}"));
        lock(&self.tried).push(Instant::now());
        let gate = self.openings.pass();
        Box::pin(async move {
            gate.await;
            match lock(&self.faults).get(&spec) {
                Some(why) => Err(Failure::run(why)),
                None => Ok(((), OpenFiles::default())),
            }
        })
    }

    fn serve(
        self: Arc<Invented>,
        _: &str,
        (): (),
        mut orders: mpsc::Receiver<Order>,
    ) -> Result<(Arc<DiskStatus>, Work<ServerEnd>), Failure> {
        let ended = async move {
            loop {
                match orders.recv().await {
                    Some(Order::Stop(why, within)) => {
                        self.note(format!("stop: {why}, {within:?}"));
                        // It drains for a second, unless it is told not to.
                        let drained = sleep(Duration::from_secs(1));
                        tokio::select! {
                            () = drained => return ServerEnd::with(None),
                            Some(Order::Stop(_, Some(_))) = orders.recv() => {
                                return ServerEnd::with(Some("lost".to_owned()));
                            }
                        }
                    }
                    Some(Order::CheckSize(_)) => self.note("check size"),
                    Some(Order::HandOver(why, _)) => {
                        self.note(format!("hand over: {why}"));
                        return ServerEnd::with(None);
                    }
                    Some(Order::Yield(why)) => {
                        self.note(format!("yield: {why}"));
                        return ServerEnd {
                            lost: None,
                            back: Some(Box::pin(self.others.pass())),
                        };
                    }
                    Some(Order::Offer(_) | Order::Give(..)) => self.note("asked to hand over"),
                    None => return ServerEnd::with(None),
                }
            }
        };
        Ok((ram_for_tests("a"), Box::pin(ended)))
    }

    fn keep(
        self: Arc<Invented>,
        id: &str,
        file: Option<&DiskConfig>,
        _: Option<&str>,
    ) -> Work<io::Result<()>> {
        let (id, file) = (id.to_owned(), file.cloned());
        Box::pin(self.work(move |files| match file {
            Some(config) => drop(files.insert(id, config)),
            None => drop(files.remove(&id)),
        }))
    }

    fn remove(self: Arc<Invented>, id: &str, _: Option<&str>) -> Work<io::Result<()>> {
        let id = id.to_owned();
        Box::pin(self.work(move |files| drop(files.remove(&id))))
    }

    fn is_group_due(&self, _: &str) -> bool {
        false
    }

    fn joins(&self, config: &DiskConfig) {
        if config.limit_group().is_some() {
            *lock(&self.members) += 1;
        }
    }

    fn leaves(&self, config: &DiskConfig) {
        if config.limit_group().is_some() {
            *lock(&self.members) -= 1;
        }
    }

    fn with_group_limits(&self, config: &DiskConfig) -> DiskConfig {
        match config.limit_group() {
            Some(_) => config.with_limits(*lock(&self.limits)),
            None => config.clone(),
        }
    }

    fn tell_change(&self, _: &str, details: Value) {
        let tuned = details.get("tuning").map_or("", |_| ", tuned");
        self.note(format!("changed{tuned}"));
    }

    fn set_group_limits(&self, _: &str, config: &DiskConfig) {
        if config.limit_group().is_some() {
            *lock(&self.limits) = config.limits.get().values;
        }
    }

    fn take_limits_back(self: Arc<Invented>, id: &str, config: &DiskConfig) {
        self.set_group_limits(id, config);
    }

    fn socket(&self, id: &str) -> String {
        format!("/run/{id}")
    }

    fn tell(&self, _: &str, state: &HostedState, _: &DiskConfig) {
        self.note(state.word().name());
    }

    fn forget(&self, _: &str, _: Removal) {
        self.note("forgotten");
    }
}

fn config(body: &Value) -> DiskConfig {
    DiskConfig::from_json(body.to_string().as_bytes()).unwrap()
}

fn disk(spec: &str) -> DiskConfig {
    config(&json!({ "disk": [spec] }))
}

/// A disk and its host.
struct Scene {
    host: Arc<Invented>,
    disk: Arc<HostedDisk>,
}

impl Scene {
    /// One that is being added.
    fn adding(
        prepare: impl FnOnce(&Invented),
        described: &DiskConfig,
    ) -> (Scene, FutureReply<Placed>) {
        let host = Arc::new(Invented::default());
        prepare(&host);
        let (disk, answer) = begin(&host, "d1", described.clone());
        (Scene { host, disk }, answer)
    }

    /// One that has been added.
    async fn added(described: &DiskConfig) -> Scene {
        let (scene, answer) = Scene::adding(|_| (), described);
        assert_eq!(told(answer.await.ok()), Ok(Placed::New));
        scene
    }

    /// One whose file cannot be read at present.
    fn unread(prepare: impl FnOnce(&Invented)) -> Scene {
        let fault = FileFault::Passing("d1.toml: I/O error".to_owned());
        let prepare = |host: &Invented| {
            *lock(&host.unread) = Some(fault.clone());
            lock(&host.files).insert("d1".to_owned(), disk("ram:1M"));
            prepare(host);
        };
        Scene::kept(prepare, Err(fault.clone()))
    }

    /// One that was in the state folder.
    fn kept(prepare: impl FnOnce(&Invented), file: Result<DiskConfig, FileFault>) -> Scene {
        let host = Arc::new(Invented::default());
        if let Ok(config) = &file {
            lock(&host.files).insert("d1".to_owned(), config.clone());
        }
        prepare(&host);
        let disk = restore(&host, "d1", file);
        Scene { host, disk }
    }

    fn put(
        &self,
        described: &DiskConfig,
    ) -> tokio::task::JoinHandle<Result<Placed, (u16, String)>> {
        let (disk, described) = (self.disk.clone(), Box::new(described.clone()));
        tokio::spawn(async move {
            let put = disk.ask(|reply| DiskRequest::Put(Condition::default(), described, reply));
            told(put.await)
        })
    }

    async fn change(&self, body: &Value) -> Result<(), (u16, String)> {
        let change = Box::new(Change::from_json(body.to_string().as_bytes()).unwrap());
        told(
            self.disk
                .ask(|reply| DiskRequest::Change(Condition::default(), change, reply))
                .await,
        )
    }

    fn delete(
        &self,
        mode: DeleteMode,
    ) -> tokio::task::JoinHandle<Result<Option<String>, (u16, String)>> {
        let disk = self.disk.clone();
        tokio::spawn(async move {
            told(
                disk.ask(|reply| DiskRequest::Delete(Condition::default(), mode, reply))
                    .await,
            )
        })
    }

    async fn reaches(&self, name: &str) {
        let state = self.disk.reaches(|state| state.word().name() == name).await;
        assert_eq!(state.word().name(), name);
    }

    fn state(&self) -> &'static str {
        self.disk.state().word().name()
    }

    /// A safe deletion is refused, because the frontend would lose the disk.
    async fn keeps_its_frontend(&self) {
        let refused = self.delete(DeleteMode::Safe).await.unwrap();
        let (code, why) = refused.unwrap_err();
        assert!(
            code == 409 && why.contains("a frontend is connected"),
            "{why}"
        );
    }

    /// Seconds from this moment to each opening and reading since the last call.
    fn tries(&self, since: Instant) -> Vec<u64> {
        let tried = std::mem::take(&mut *lock(&self.host.tried));
        let tried = tried.into_iter();
        tried.map(|at| at.duration_since(since).as_secs()).collect()
    }
}

/// An answer with what a client sees of a refusal. The end of the task is 404.
fn told<T>(answer: Option<Result<T, Refusal>>) -> Result<T, (u16, String)> {
    let gone = || Refusal(ProblemKind::NoSuchDisk, String::new());
    let answer = answer.unwrap_or_else(|| Err(gone()));
    answer.map_err(|Refusal(kind, why)| (kind.status(), why))
}

/// Lets all tasks go on until each waits.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// A host is ready although a disk fails again and again.
#[tokio::test(start_paused = true)]
async fn the_first_attempt_to_open_a_disk_is_told_from_those_that_follow() {
    let prepare = |host: &Invented| {
        host.openings.close();
        host.break_disk("ram:1M", "no memory");
    };
    let scene = Scene::kept(prepare, Ok(disk("ram:1M")));
    let is_settled = || scene.disk.shown().is_settled;
    settle().await;
    assert!(!is_settled());
    scene.host.openings.let_pass(1);
    scene.reaches("failed").await;
    assert!(is_settled());
    scene.reaches("opening").await;
    assert!(is_settled());
}

#[tokio::test(start_paused = true)]
async fn a_put_is_answered_when_the_disk_is_served_and_kept() {
    let (scene, mut first) = Scene::adding(|host| host.works.close(), &disk("ram:1M"));
    let second = scene.put(&disk("ram:1M"));
    scene.reaches("serving").await;
    settle().await;
    assert!(first.try_recv().is_err() && !second.is_finished());
    scene.host.works.let_pass(1);
    assert_eq!(told(first.await.ok()), Ok(Placed::New));
    assert_eq!(second.await.unwrap(), Ok(Placed::There));
    assert_eq!(scene.host.file("d1"), Some(disk("ram:1M")));
    assert_eq!(
        scene.host.told(),
        ["open ram:1M, Unknown", "opening", "serving"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_cannot_be_opened_is_not_added() {
    let break_it = |host: &Invented| host.break_disk("ram:1M", "no memory");
    let (scene, put) = Scene::adding(break_it, &disk("ram:1M"));
    assert_eq!(told(put.await.ok()), Err((422, "no memory".to_owned())));
    settle().await;
    assert!(scene.disk.is_gone());
    assert_eq!(scene.host.file("d1"), None);
    assert!(scene.host.told().contains(&"forgotten".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_disk_whose_file_cannot_be_written_is_not_added() {
    let (scene, put) = Scene::adding(|host| host.set_full(true), &disk("ram:1M"));
    let (status, why) = told(put.await.ok()).unwrap_err();
    assert!(
        status == 500 && why.contains("cannot write the file"),
        "{why}"
    );
    let told = scene.host.told();
    let stopped = "stop: it could not be added, None".to_owned();
    assert!(told.contains(&stopped), "{told:?}");
    // A part of the file may be there, which the next node would find.
    settle().await;
    assert!(
        matches!(scene.disk.state(), HostedState::Ended(Some(why)) if why.contains("cannot be removed"))
    );
    scene.host.set_full(false);
    assert_eq!(scene.delete(DeleteMode::Safe).await.unwrap(), Ok(None));
    assert!(scene.disk.is_gone());
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_takes_long_to_open_is_kept_before_it_is_served() {
    let (scene, put) = Scene::adding(|host| host.openings.close(), &disk("ram:1M"));
    assert_eq!(told(put.await.ok()), Ok(Placed::Opening));
    assert_eq!(scene.host.file("d1"), Some(disk("ram:1M")));
    assert_eq!(scene.state(), "opening");
    // It has been added: a failure is not the end of it.
    scene.host.break_disk("ram:1M", "no memory");
    scene.host.openings.let_pass(1);
    scene.reaches("failed").await;
    scene.host.mend_disk("ram:1M");
    scene.host.openings.let_pass(1);
    scene.reaches("serving").await;
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_another_process_has_comes_back_or_ends_with_the_host() {
    let scene = Scene::added(&disk("ram:1M")).await;
    scene.host.others.close();
    let hand_over = || async {
        scene.host.told();
        let order = Order::Yield("it is wanted".to_owned());
        scene.disk.order(DiskRequest::Forward(order)).await;
        scene.reaches("ended").await;
        settle().await;
        assert!(!scene.disk.is_gone());
    };
    hand_over().await;
    // That process has it.
    let started = scene.disk.ask(DiskRequest::Start).await;
    assert_eq!(told(started).unwrap_err().0, 409);
    scene.host.others.let_pass(1);
    scene.reaches("serving").await;
    assert_eq!(
        scene.host.told(),
        [
            "yield: it is wanted",
            "ended",
            "open ram:1M, WasOpen",
            "opening",
            "serving"
        ]
    );
    hand_over().await;
    scene
        .disk
        .order(DiskRequest::Stop("the host ends".to_owned()))
        .await;
    scene.disk.gone().await;
    assert_eq!(scene.state(), "ended");
    assert_eq!(scene.host.told(), ["yield: it is wanted", "ended"]);
    assert_eq!(scene.host.file("d1"), Some(disk("ram:1M")));
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_is_kept_is_tried_again_after_longer_and_longer_pauses() {
    let scene = Scene::kept(|host| host.break_disk("ram:1M", "away"), Ok(disk("ram:1M")));
    let start = Instant::now();
    sleep(Duration::from_secs(100)).await;
    assert_eq!(scene.tries(start), [0, 1, 3, 7, 15, 31, 61, 91]);
    // An order to start does not wait, and the pauses begin anew.
    scene.reaches("failed").await;
    let asked = Instant::now();
    let started = told(scene.disk.ask(DiskRequest::Start).await);
    assert_eq!(started, Err((422, "away".to_owned())));
    sleep(Duration::from_secs(2)).await;
    assert_eq!(scene.tries(asked), [0, 1]);
    scene.host.mend_disk("ram:1M");
    scene.reaches("serving").await;
    assert_eq!(asked.elapsed().as_secs(), 3);
    assert!(
        scene
            .host
            .told()
            .contains(&"open ram:1M, CameBack".to_owned())
    );
}

#[tokio::test(start_paused = true)]
async fn a_put_of_other_settings_changes_those_that_can_change_and_refuses_all_others() {
    let scene = Scene::added(&disk("ram:1M")).await;
    let other = config(&json!({"disk": ["ram:1M"], "completion": "poll", "spin_worth": 7}));
    assert_eq!(scene.put(&other).await.unwrap(), Ok(Placed::There));
    assert_eq!(scene.disk.shown().config, other);
    assert_eq!(scene.host.file("d1"), Some(other.clone()));
    assert!(scene.host.told().contains(&"changed, tuned".to_owned()));
    // A change that workers do not notice is told too.
    scene
        .change(&json!({"labels": {"owner": "web"}}))
        .await
        .unwrap();
    assert_eq!(scene.host.told(), ["changed, tuned"]);
    scene
        .change(&json!({"labels": {"owner": "web"}}))
        .await
        .unwrap();
    assert_eq!(scene.host.told(), [""; 0]);
    let other = config(
        &json!({"disk": ["ram:1M"], "completion": "poll", "spin_worth": 7, "labels": {"owner": "web"}}),
    );
    let fixed = config(&json!({"disk": ["ram:2M"], "queues": 3, "completion": "interrupt"}));
    let (status, why) = scene.put(&fixed).await.unwrap().unwrap_err();
    assert!(
        status == 409 && why.starts_with("disk, queues: disk d1 has another value"),
        "{why}"
    );
    assert_eq!(scene.disk.shown().config, other);
}

#[tokio::test(start_paused = true)]
async fn a_put_replaces_a_disk_that_has_failed_unless_the_new_one_fails_too() {
    let scene = Scene::kept(|host| host.break_disk("ram:1M", "away"), Ok(disk("ram:1M")));
    scene.reaches("failed").await;
    scene.host.break_disk("ram:2M", "away too");
    let refused = scene.put(&disk("ram:2M")).await.unwrap();
    assert_eq!(refused, Err((422, "away too".to_owned())));
    assert_eq!(scene.disk.shown().config, disk("ram:1M"));
    assert!(matches!(scene.disk.state(), HostedState::Failed(why) if why == "away"));
    assert_eq!(scene.put(&disk("ram:3M")).await.unwrap(), Ok(Placed::New));
    assert_eq!(scene.host.file("d1"), Some(disk("ram:3M")));
    let told = scene.host.told();
    // Nothing is known of what the other storage holds, and the folder of the socket stays.
    assert!(
        told.contains(&"open ram:3M, Unknown".to_owned()),
        "{told:?}"
    );
    assert!(!told.contains(&"forgotten".to_owned()), "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn a_file_that_cannot_be_read_is_replaced_by_a_put_that_succeeds_and_by_no_other() {
    let scene = Scene::kept(
        |_| (),
        Err(FileFault::Lasting("d1.toml: line 1".to_owned())),
    );
    scene.host.break_disk("ram:1M", "away");
    let is_broken =
        || matches!(scene.disk.state(), HostedState::Failed(why) if why == "d1.toml: line 1");
    assert!(is_broken());
    assert_eq!(
        scene.put(&disk("ram:1M")).await.unwrap().unwrap_err().0,
        422
    );
    assert!(is_broken());
    scene.host.set_full(true);
    assert_eq!(
        scene.put(&disk("ram:2M")).await.unwrap().unwrap_err().0,
        500
    );
    assert!(is_broken());
    scene.host.set_full(false);
    assert_eq!(scene.put(&disk("ram:2M")).await.unwrap(), Ok(Placed::New));
    assert_eq!(scene.host.file("d1"), Some(disk("ram:2M")));
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_is_deleted_while_it_is_added_is_gone() {
    let (scene, put) = Scene::adding(|host| host.works.close(), &disk("ram:1M"));
    scene.reaches("serving").await;
    let gone = scene.delete(DeleteMode::Hard);
    assert_eq!(told(put.await.ok()).unwrap_err().0, 409);
    // Its file is being written: it ends meanwhile, and the file is removed afterwards.
    scene.reaches("ended").await;
    let third = scene.put(&disk("ram:1M")).await.unwrap();
    assert_eq!(third.unwrap_err().0, 409);
    scene.host.works.let_pass(2);
    assert_eq!(gone.await.unwrap(), Ok(None));
    assert_eq!(scene.host.file("d1"), None);
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_is_deleted_while_it_is_opened_is_gone() {
    let (scene, put) = Scene::adding(|host| host.openings.close(), &disk("ram:1M"));
    settle().await;
    assert_eq!(scene.delete(DeleteMode::Safe).await.unwrap(), Ok(None));
    assert_eq!(told(put.await.ok()).unwrap_err().0, 409);
    settle().await;
    assert!(scene.disk.is_gone());
}

/// A VMM that has ended does not count as a frontend, although its session drains for a moment.
#[tokio::test(start_paused = true)]
async fn a_disk_in_use_is_not_deleted_safely_until_its_frontend_has_hung_up() {
    let scene = Scene::added(&disk("ram:1M")).await;
    let HostedState::Serving(status) = scene.disk.state() else {
        panic!("{}", scene.state());
    };
    let (frontend, _session) = connect_for_tests(&status);
    scene.keeps_its_frontend().await;
    drop(frontend);
    assert!(status.is_connected(), "its session has not ended");
    assert_eq!(scene.delete(DeleteMode::Safe).await.unwrap(), Ok(None));
    assert!(scene.disk.is_gone());
}

/// A VMM that the process before has left waits while the storage is slow, and cannot connect again if its disk goes.
#[tokio::test(start_paused = true)]
async fn a_disk_whose_frontend_waits_for_it_is_not_deleted_safely() {
    let prepare = |host: &Invented| {
        host.openings.close();
        *lock(&host.is_awaited) = true;
    };
    let scene = Scene::kept(prepare, Ok(disk("ram:1M")));
    settle().await;
    assert_eq!(scene.state(), "opening");
    assert!(scene.disk.shown().is_awaited);
    scene.keeps_its_frontend().await;
    assert_eq!(scene.state(), "opening");
    assert_eq!(scene.delete(DeleteMode::Drain).await.unwrap(), Ok(None));
    assert!(scene.disk.is_gone());
}

/// The next process goes on with its frontend. This one must not be over before the manager has it.
#[tokio::test(start_paused = true)]
async fn a_disk_that_is_not_open_yet_is_left_to_the_next_process() {
    let prepare = |host: &Invented| {
        host.openings.close();
        host.works.close();
    };
    let scene = Scene::kept(prepare, Ok(disk("ram:1M")));
    settle().await;
    scene.host.told();
    let manager = Arc::new(Manager::from_environment());
    let order = DiskRequest::HandOver("the host ends".to_owned(), manager);
    scene.disk.order(order).await;
    settle().await;
    assert_eq!(scene.host.told(), ["leave d1", "ending"]);
    assert!(!scene.disk.is_gone());
    scene.host.works.let_pass(1);
    settle().await;
    assert_eq!(scene.host.told(), ["ended"]);
    assert!(scene.disk.is_gone());
}

#[tokio::test(start_paused = true)]
async fn a_drain_can_be_ended_at_once_and_all_who_deleted_the_disk_are_answered() {
    let scene = Scene::added(&disk("ram:1M")).await;
    let drained = scene.delete(DeleteMode::Drain);
    scene.reaches("ending").await;
    let ended = scene.delete(DeleteMode::Hard);
    for answer in [drained, ended] {
        assert_eq!(answer.await.unwrap(), Ok(Some("lost".to_owned())));
    }
    assert_eq!(
        told(scene.disk.ask(DiskRequest::Start).await)
            .unwrap_err()
            .0,
        404
    );
}

#[tokio::test(start_paused = true)]
async fn a_disk_whose_file_cannot_be_removed_stays_until_it_can() {
    let scene = Scene::added(&disk("ram:1M")).await;
    scene.host.set_full(true);
    for _ in 0..2 {
        let (status, why) = scene.delete(DeleteMode::Safe).await.unwrap().unwrap_err();
        assert!(status == 500 && why.contains("cannot be removed"), "{why}");
        assert!(matches!(scene.disk.state(), HostedState::Ended(Some(said)) if said == why));
    }
    scene.host.break_disk("ram:2M", "away");
    assert_eq!(
        scene.put(&disk("ram:2M")).await.unwrap().unwrap_err().0,
        422
    );
    assert_eq!(scene.state(), "ended");
    scene.host.set_full(false);
    assert_eq!(scene.put(&disk("ram:3M")).await.unwrap(), Ok(Placed::New));
    assert_eq!(scene.delete(DeleteMode::Safe).await.unwrap(), Ok(None));
    assert_eq!(scene.host.file("d1"), None);
}

#[tokio::test(start_paused = true)]
async fn a_change_that_could_not_be_kept_is_in_force_and_kept_by_the_next_try() {
    let scene = Scene::added(&disk("ram:1M")).await;
    scene.host.set_full(true);
    let change = json!({"spin_worth": 7});
    let (status, why) = scene.change(&change).await.unwrap_err();
    assert!(status == 500 && why.starts_with("changed until"), "{why}");
    let changed = config(&json!({"disk": ["ram:1M"], "spin_worth": 7}));
    assert_eq!(scene.disk.shown().config, changed);
    assert_eq!(scene.host.file("d1"), Some(disk("ram:1M")));
    scene.host.set_full(false);
    assert_eq!(scene.change(&change).await, Ok(()));
    assert_eq!(scene.host.file("d1"), Some(changed));
}

#[tokio::test(start_paused = true)]
async fn a_slow_state_folder_does_not_keep_a_disk_from_its_end() {
    let scene = Scene::added(&disk("ram:1M")).await;
    scene.host.works.close();
    let body = json!({"spin_worth": 7});
    let change = scene.change(&body);
    let deleted = async {
        settle().await;
        let gone = scene.delete(DeleteMode::Hard);
        scene.reaches("ended").await;
        scene.host.works.let_pass(2);
        gone.await.unwrap()
    };
    let (changed, gone) = tokio::join!(change, deleted);
    assert_eq!((changed.unwrap_err().0, gone), (409, Ok(None)));
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_is_stopped_keeps_its_file() {
    let scene = Scene::added(&disk("ram:1M")).await;
    scene
        .disk
        .order(DiskRequest::Stop("SIGTERM received".to_owned()))
        .await;
    scene.reaches("ended").await;
    assert_eq!(scene.host.file("d1"), Some(disk("ram:1M")));
    assert!(!scene.host.told().contains(&"forgotten".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_group_has_the_limits_of_the_disk_that_came_or_changed_last() {
    let of = |limits: Value| config(&json!({"disk": ["ram:1M"], "limits": limits}));
    let scene = Scene::added(&of(json!({"group": "g", "iops-total": 5}))).await;
    let alone = of(json!({"group": "g"}));
    // The file of the disk names its group alone.
    assert_eq!(scene.host.file("d1"), Some(alone.clone()));
    assert_eq!(scene.put(&alone).await.unwrap(), Ok(Placed::There));
    let in_force = || {
        lock(&scene.host.limits)
            .settings()
            .into_iter()
            .collect::<Vec<_>>()
    };
    assert_eq!(in_force(), [("iops-total".to_owned(), 5)]);
    scene
        .change(&json!({"limits": {"iops-total": 0}}))
        .await
        .unwrap();
    assert_eq!(in_force(), []);
    scene
        .put(&of(json!({"group": "g", "iops-total": 9})))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(in_force(), [("iops-total".to_owned(), 9)]);
}

#[tokio::test(start_paused = true)]
async fn a_put_that_is_refused_leaves_all_as_it_was() {
    let of = |spec: &str, limits: Value| config(&json!({"disk": [spec], "limits": limits}));
    let kept = of("ram:1M", json!({"group": "g"}));
    let scene = Scene::kept(|host| host.break_disk("ram:1M", "away"), Ok(kept.clone()));
    let members = || *lock(&scene.host.members);
    let in_force = || lock(&scene.host.limits).settings().len();
    scene.reaches("failed").await;
    scene.host.break_disk("ram:2M", "away too");
    scene.host.openings.close();
    let put = scene.put(&of("ram:2M", json!({})));
    scene.reaches("opening").await;
    // The disk before it may be back, and is in its group until then.
    assert_eq!(members(), 1);
    let disk = scene.disk.clone();
    let started = tokio::spawn(async move { told(disk.ask(DiskRequest::Start).await) });
    settle().await;
    scene.host.openings.let_pass(1);
    assert_eq!(put.await.unwrap().unwrap_err().0, 422);
    assert_eq!(started.await.unwrap().unwrap_err().0, 422);
    assert_eq!((members(), &scene.disk.shown().config), (1, &kept));
    // One whose file cannot be written had brought limits into its group.
    scene.host.set_full(true);
    scene.host.openings.let_pass(1);
    let put = scene.put(&of("ram:3M", json!({"group": "g", "iops-total": 5})));
    assert_eq!(put.await.unwrap().unwrap_err().0, 500);
    assert_eq!((members(), in_force()), (1, 0));
    // The content of the first disk is still known to be the guest's.
    scene.host.told();
    scene.host.mend_disk("ram:1M");
    scene.host.openings.let_pass(1);
    scene.reaches("serving").await;
    assert!(
        scene
            .host
            .told()
            .contains(&"open ram:1M, CameBack".to_owned())
    );
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_is_replaced_leaves_its_group() {
    let grouped = config(&json!({"disk": ["ram:1M"], "limits": {"group": "g"}}));
    let scene = Scene::kept(|host| host.break_disk("ram:1M", "away"), Ok(grouped));
    scene.reaches("failed").await;
    assert_eq!(scene.put(&disk("ram:2M")).await.unwrap(), Ok(Placed::New));
    assert_eq!(*lock(&scene.host.members), 0);
    assert_eq!(scene.delete(DeleteMode::Safe).await.unwrap(), Ok(None));
    assert_eq!(*lock(&scene.host.members), 0);
}
