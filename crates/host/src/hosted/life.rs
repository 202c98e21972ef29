//! The life of a disk: one task that has its inbox, and alone changes its description, its file and its state.
//!
//! ```text
//!        PUT                          opened                     DELETE, stop
//!  ─────────────────► Opening ──────────────────► Serving ──────────────────────► Ending ─────► Ended
//!                      ▲   │                                                        ▲            │
//!          start, time │   │ cannot be opened                 DELETE, stop          │            │ its file
//!                      │   ▼                                                        │            │ cannot be
//!                      Failed ──────────────────────────────────────────────────────┤            │ removed
//!                      ▲   PUT of another description: Opening                       │            ▼
//!  the file says       │                                                            │           Left
//!  no disk: Broken ────┴────────────────────────────────────────────────────────────┴──── PUT: Opening, DELETE: Ended
//! ```
//!
//! A disk whose file cannot be read at present has Failed too: the file is read again, and then the disk is opened.
//!
//! A disk that another process takes goes from Serving to Given. It is opened again if that process leaves before it has all disks,
//! and ends with the host otherwise.
//!
//! A disk is *new* until a PUT has been answered with success: if it cannot be opened, or its file cannot be written, it is undone,
//! and what was there before is back.
//!
//! Whatever waits (opening, serving, a write of the file, a pause) is a future in a field, and all of them are waited for in one
//! place, [`Life::event`]. A request is handled at once, without waiting, so no two meet; one whose effect has to be in the file first
//! waits in a list.

mod keeping;
mod phase;
mod reading;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use cleave_api::{DiskState, ProblemKind};
use cleave_config::{Change, DiskConfig, Unlike, VringModes, WrittenSpec};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::disk::{
    DeleteMode, DiskRequest, FutureReply, HostedDisk, HostedState, HostedStatus, Placed, Reply,
};
use super::disk_host::{DiskHost, FileFault, Past, Removal, ServerEnd, Work};
use super::open_files::OpenFiles;
use crate::disk_server::Order;
use crate::problem::Refusal;
use crate::status::DiskStatus;
use phase::{
    Before, Goal, KeptFile, LifeEvent, LifePhase, RunningServer, Was, progress, until, waited_for,
    written,
};

/// Pauses between two attempts to open a disk: the first, and the longest.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// A PUT or a start whose disk takes longer to open is answered before.
const OPEN_TIME: Duration = Duration::from_secs(10);
/// A hard end waits so long for a session that has nothing to wait for.
const HARD_TIME: Duration = Duration::from_millis(50);
/// Orders that may wait for the server of a disk. One place is for the end.
const ORDERS_MAX: usize = 64;

/// A disk, as its task has it.
struct Life<H: DiskHost> {
    host: Arc<H>,
    id: String,
    inbox: mpsc::Receiver<DiskRequest>,
    show: watch::Sender<HostedStatus>,
    phase: LifePhase<H>,
    /// The next pause before it is tried again.
    pause: Duration,
    /// The description, without the limits of its group once they are the group's.
    config: DiskConfig,
    /// The state that was told last.
    told: Option<DiskState>,
    file: KeptFile,
    /// The work that reads a file again which could not be read.
    reading: Option<Work<Result<DiskConfig, FileFault>>>,
    /// What the work on the file makes it, while there is any.
    writing: Option<(KeptFile, Work<io::Result<()>>)>,
    /// Some while the disk is new.
    before: Option<Before>,
    came_back: bool,
    /// What was open when the disk was opened last.
    was_open: Option<Vec<WrittenSpec>>,
    /// The fate of requests that did not end with the disk.
    lost: Option<String>,
    putting: Vec<Reply<Placed>>,
    changing: Vec<Reply<()>>,
    starting: Vec<Reply<()>>,
    deleting: Vec<Reply<Option<String>>>,
}

/// Starts the task of a new disk with the PUT that adds it, and returns where that will be answered. To be called inside the runtime.
pub(crate) fn begin<H: DiskHost>(
    host: &Arc<H>,
    id: &str,
    config: DiskConfig,
) -> (Arc<HostedDisk>, FutureReply<Placed>) {
    let (disk, mut life) = new(host, id, config, KeptFile::Absent);
    life.before = Some(Before {
        was: Was::Nothing,
        config: DiskConfig::default(),
        came_back: false,
        limits: None,
    });
    let (reply, answer) = oneshot::channel();
    life.putting.push(reply);
    life.open();
    spawn(life);
    (disk, answer)
}

/// Starts the task of a disk whose file is there when the host starts.
pub(crate) fn restore<H: DiskHost>(
    host: &Arc<H>,
    id: &str,
    file: Result<DiskConfig, FileFault>,
) -> Arc<HostedDisk> {
    match file {
        Ok(config) => {
            // The file of an earlier version has limits that are the group's now: it is written anew.
            let file = KeptFile::Holds(Box::new(config.clone()));
            let (disk, mut life) = new(host, id, config.kept(), file);
            life.came_back = true;
            life.open();
            spawn(life);
            disk
        }
        Err(fault) => {
            let (disk, mut life) = new(host, id, DiskConfig::default(), KeptFile::Unknown);
            life.not_read(fault);
            spawn(life);
            disk
        }
    }
}

/// Starts the task of a disk that is served already. `ended`: its server.
pub(crate) fn adopt<H: DiskHost>(
    host: &Arc<H>,
    id: &str,
    config: DiskConfig,
    status: Arc<DiskStatus>,
    serve: impl FnOnce(mpsc::Receiver<Order>) -> Work<ServerEnd>,
) -> Arc<HostedDisk> {
    let file = KeptFile::Holds(Box::new(config.clone()));
    let (disk, mut life) = new(host, id, config, file);
    let (orders, taken) = mpsc::channel(ORDERS_MAX);
    let ended = serve(taken);
    life.enter(LifePhase::Serving(status, RunningServer { orders, ended }));
    spawn(life);
    disk
}

fn new<H: DiskHost>(
    host: &Arc<H>,
    id: &str,
    config: DiskConfig,
    file: KeptFile,
) -> (Arc<HostedDisk>, Life<H>) {
    host.joins(&config);
    let shown = HostedStatus {
        state: HostedState::Opening,
        descriptors: host.judge(id, &config).unwrap_or_default(),
        config: config.clone(),
        files: OpenFiles::default(),
        is_awaited: false,
        is_settled: false,
    };
    let (disk, inbox, show) = HostedDisk::new(id, host.socket(id), shown);
    let life = Life {
        host: host.clone(),
        id: id.to_owned(),
        inbox,
        show,
        phase: LifePhase::Over(None),
        pause: PAUSE_MIN,
        config,
        told: None,
        file,
        reading: None,
        writing: None,
        before: None,
        came_back: false,
        was_open: None,
        lost: None,
        putting: Vec::new(),
        changing: Vec::new(),
        starting: Vec::new(),
        deleting: Vec::new(),
    };
    (disk, life)
}

fn spawn<H: DiskHost>(life: Life<H>) {
    let (id, show, host) = (life.id.clone(), life.show.clone(), life.host.clone());
    let task = tokio::spawn(life.run());
    tokio::spawn(async move {
        // A fault of our own is the end of this disk alone.
        if task.await.is_err() {
            let why = format!("{id}: internal fault, see the log");
            let state = HostedState::Ended(Some(why));
            show.send_modify(|shown| shown.enter(state.clone(), false));
            let config = show.borrow().config.clone();
            host.tell(&id, &state, &config);
        }
    });
}

impl<H: DiskHost> Life<H> {
    async fn run(mut self) {
        while !matches!(self.phase, LifePhase::Over(_)) {
            match self.event().await {
                LifeEvent::Asked(Some(request)) => self.take(request),
                // The host has dropped it.
                LifeEvent::Asked(None) => self.stop("the host ends".to_owned()),
                LifeEvent::Opened(Ok((opened, files))) => self.serve(opened, files),
                LifeEvent::Opened(Err(failure)) => self.fail(failure.to_string()),
                LifeEvent::Ended(end) => self.ended(end),
                LifeEvent::PassedBack => self.open_again(),
                LifeEvent::Read(file) => self.read(*file),
                LifeEvent::Kept(result) => self.kept(result),
                LifeEvent::Due => self.due(),
            }
        }
    }

    /// Waits for whatever happens next. Requests come first: whatever else has happened at the same time finds their effect.
    async fn event(&mut self) -> LifeEvent<H> {
        let due = self.due_at();
        let Life {
            inbox,
            phase,
            reading,
            writing,
            ..
        } = self;
        tokio::select! {
            biased;
            request = inbox.recv() => LifeEvent::Asked(request),
            event = progress(phase) => event,
            file = waited_for(reading) => LifeEvent::Read(Box::new(file)),
            kept = written(writing) => LifeEvent::Kept(kept),
            () = until(due), if due.is_some() => LifeEvent::Due,
        }
    }

    /// When it has something to do by itself.
    fn due_at(&self) -> Option<Instant> {
        match &self.phase {
            LifePhase::Failed(_, again) => self.reading.is_none().then_some(*again),
            LifePhase::Opening { patience, .. } => {
                let is_waited_for = !self.putting.is_empty() || !self.starting.is_empty();
                (is_waited_for && self.writing.is_none()).then_some(*patience)
            }
            _ => None,
        }
    }

    fn due(&mut self) {
        match &self.phase {
            LifePhase::Failed(..) => self.open(),
            // It is kept, and opened however long that takes.
            LifePhase::Opening { .. } => {
                self.share_limits();
                self.write();
            }
            _ => {}
        }
    }

    fn take(&mut self, request: DiskRequest) {
        match request {
            DiskRequest::Put(condition, config, reply) => match condition.check(&self.now()) {
                Ok(()) => self.put(*config, reply),
                Err(refusal) => answer(reply, Err(refusal)),
            },
            DiskRequest::Change(condition, change, reply) => match condition.check(&self.now()) {
                Ok(()) => self.change(&change, reply),
                Err(refusal) => answer(reply, Err(refusal)),
            },
            DiskRequest::Start(reply) => self.start(reply),
            DiskRequest::CheckSize(asker) => self.forward(Order::CheckSize(asker)),
            DiskRequest::Forward(order) => self.forward(order),
            DiskRequest::Delete(condition, mode, reply) => match condition.check(&self.now()) {
                Ok(()) => self.delete(mode, reply),
                Err(refusal) => answer(reply, Err(refusal)),
            },
            DiskRequest::Stop(why) => self.stop(why),
            DiskRequest::HandOver(why, manager) => {
                self.end(Order::HandOver(why, manager), Goal::Stop);
            }
        }
    }

    // Requests.

    fn put(&mut self, wanted: DiskConfig, reply: Reply<Placed>) {
        let now = self.now();
        match &self.phase {
            LifePhase::Broken(why) => {
                let was = Was::Broken(why.clone());
                self.replace(wanted, was, reply);
            }
            LifePhase::Left(why) => {
                let was = Was::Left(why.clone());
                self.replace(wanted, was, reply);
            }
            LifePhase::Failed(why, _) if now.turned_into(&wanted) != Ok(now.clone()) => {
                let was = Was::Failed(why.clone());
                self.replace(wanted, was, reply);
            }
            LifePhase::Opening { .. }
            | LifePhase::Serving(..)
            | LifePhase::Given(_)
            | LifePhase::Failed(..) => {
                if let Err(refusal) = self.become_as(&now, &wanted) {
                    return answer(reply, Err(refusal));
                }
                self.putting.push(reply);
                match &self.phase {
                    // Changes are refused while another process has it, so that has left.
                    LifePhase::Failed(..) | LifePhase::Given(_) => self.open_again(),
                    LifePhase::Serving(..) => self.write(),
                    _ => {}
                }
            }
            LifePhase::Ending(..) | LifePhase::Removing | LifePhase::Over(_) => {
                answer(reply, Err(self.removed()));
            }
        }
    }

    /// Has the disk be as a description says, if it need not be opened anew for that.
    fn become_as(&mut self, now: &DiskConfig, wanted: &DiskConfig) -> Result<(), Refusal> {
        if now == wanted {
            return Ok(());
        }
        let next = now.turned_into(wanted).map_err(|unlike| match unlike {
            Unlike::Fixed(fields) => {
                let fields = fields.join(", ");
                let why = format!(
                    "{fields}: disk {} has another value, which cannot change while it is served: remove the disk first",
                    self.id
                );
                Refusal(ProblemKind::FixedFields, why)
            }
            Unlike::Check(why) => Refusal(ProblemKind::InvalidRequest, why),
        })?;
        // Nothing changes for a group that is named alone.
        match next == *now {
            true => Ok(()),
            false => self.turn(next, &VringModes::default()),
        }
    }

    /// Puts a description in force that differs in what can change at any time.
    fn turn(&mut self, next: DiskConfig, vrings: &VringModes) -> Result<(), Refusal> {
        let judged = self.host.judge(&self.id, &next);
        judged.map_err(|why| Refusal(ProblemKind::InvalidRequest, why))?;
        let mut is_other = next != self.now();
        if let LifePhase::Serving(status, _) = &self.phase {
            is_other |= status.tune(&next, vrings)?;
        }
        // The limits of a disk that is new are given to its group when it has been opened.
        if self.before.is_some() && !matches!(self.phase, LifePhase::Serving(..)) {
            self.describe(next);
        } else {
            self.host.set_group_limits(&self.id, &next);
            self.describe(next.kept());
        }
        if is_other {
            let details = self.state().change_details(&self.now());
            self.host.tell_change(&self.id, details);
        }
        Ok(())
    }

    /// Opens a disk of another description in the place of one that is not served.
    fn replace(&mut self, wanted: DiskConfig, was: Was, reply: Reply<Placed>) {
        if let Err(why) = self.host.judge(&self.id, &wanted) {
            return answer(reply, Err(Refusal(ProblemKind::InvalidRequest, why)));
        }
        self.reading = None;
        let came_back = self.came_back;
        self.came_back &= wanted.disk == self.config.disk;
        self.host.joins(&wanted);
        let config = std::mem::replace(&mut self.config, wanted);
        self.before = Some(Before {
            was,
            config,
            came_back,
            limits: None,
        });
        self.show_description();
        self.putting.push(reply);
        self.open_again();
    }

    fn change(&mut self, change: &Change, reply: Reply<()>) {
        let bad = |why| Refusal(ProblemKind::InvalidRequest, why);
        let next = match &self.phase {
            LifePhase::Serving(..) => self.now().with(change).map_err(bad),
            _ => Err(self.not_served()),
        };
        let changed = next.and_then(|next| self.turn(next, &change.vrings));
        match changed {
            Ok(()) => {
                self.changing.push(reply);
                self.write();
            }
            Err(refusal) => answer(reply, Err(refusal)),
        }
    }

    fn start(&mut self, reply: Reply<()>) {
        match &self.phase {
            LifePhase::Failed(..) => {
                self.starting.push(reply);
                self.open_again();
            }
            LifePhase::Opening { .. } => self.starting.push(reply),
            LifePhase::Serving(..) => answer(reply, Ok(())),
            LifePhase::Broken(why) => {
                let refusal = Refusal(ProblemKind::CannotOpen, why.clone());
                answer(reply, Err(refusal));
            }
            _ => answer(reply, Err(self.not_served())),
        }
    }

    fn forward(&mut self, order: Order) {
        if let LifePhase::Serving(_, server) = &self.phase
            && server.orders.capacity() > 1
        {
            // One that is not taken drops the asker, which learns from it.
            let _ = server.orders.try_send(order);
        }
    }

    fn delete(&mut self, mode: DeleteMode, reply: Reply<Option<String>>) {
        let why = "it is deleted".to_owned();
        let within = (mode == DeleteMode::Hard).then_some(HARD_TIME);
        let has_frontend = match &self.phase {
            LifePhase::Serving(status, _) => status.has_frontend(),
            // Its connection would end with the disk.
            LifePhase::Opening { .. } | LifePhase::Failed(..) => self.show.borrow().is_awaited,
            _ => false,
        };
        if mode == DeleteMode::Safe && has_frontend {
            let why = format!(
                "a frontend is connected to disk {}: unplug the disk first, or remove it with mode=drain",
                self.id
            );
            return answer(reply, Err(Refusal(ProblemKind::FrontendConnected, why)));
        }
        self.deleting.push(reply);
        self.refuse_waiting();
        self.end(Order::Stop(why, within), Goal::Delete);
    }

    fn stop(&mut self, why: String) {
        self.end(Order::Stop(why, None), Goal::Stop);
    }

    // What happens by itself.

    /// Opens the disk without a pause, and begins to count the pauses anew.
    fn open_again(&mut self) {
        self.lost = None;
        self.pause = PAUSE_MIN;
        self.open();
    }

    fn open(&mut self) {
        if self.is_unread() {
            return self.begin_reading();
        }
        let config = self.now();
        let past = match &self.was_open {
            Some(disk) if *disk == config.disk => Past::WasOpen,
            _ if self.came_back => Past::CameBack,
            _ => Past::Unknown,
        };
        let opened = self.host.clone().open(&self.id, &config, past);
        let patience = Instant::now() + OPEN_TIME;
        self.enter(LifePhase::Opening { opened, patience });
    }

    fn serve(&mut self, opened: H::Opened, files: OpenFiles) {
        self.was_open = Some(self.config.disk.clone());
        let (orders, taken) = mpsc::channel(ORDERS_MAX);
        match self.host.clone().serve(&self.id, opened, taken) {
            Ok((status, ended)) => {
                self.share_limits();
                // The description may have changed while the disk was opened.
                if let Err(Refusal(_, why)) = status.tune(&self.now(), &VringModes::default()) {
                    tracing::warn!("{}: {why}", self.id);
                }
                self.show.send_modify(|shown| shown.files = files);
                self.enter(LifePhase::Serving(status, RunningServer { orders, ended }));
                self.write();
            }
            Err(failure) => self.fail(failure.to_string()),
        }
    }

    /// Gives its group the limits that a new description names.
    fn share_limits(&mut self) {
        if self.config.limit_group().is_some() && self.config.limits.get().values.any() {
            if let Some(before) = &mut self.before {
                before.limits = Some(self.host.with_group_limits(&self.config));
            }
            self.host.set_group_limits(&self.id, &self.config);
            self.describe(self.config.kept());
        }
    }

    /// Notes that the disk could not be opened, for this reason.
    fn fail(&mut self, why: String) {
        let refusal = || Refusal(ProblemKind::CannotOpen, why.clone());
        match (&self.before, &self.writing) {
            (Some(_), None) => return self.undo(refusal()),
            // It is being kept: what waits for that is answered then.
            (Some(_), Some(_)) => {}
            (None, _) => self.answer_waiting(refusal),
        }
        tracing::warn!("{}: not served, to be tried again: {why}", self.id);
        let again = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        self.enter(LifePhase::Failed(why, again));
    }

    /// Ends the disk for this purpose, or goes on to what follows if it is not served.
    fn end(&mut self, order: Order, goal: Goal) {
        self.reading = None;
        match std::mem::replace(&mut self.phase, LifePhase::Over(None)) {
            LifePhase::Serving(_, server) => {
                // There is room: the last place is for this order.
                let _ = server.orders.try_send(order);
                self.enter(LifePhase::Ending(server, goal));
            }
            LifePhase::Ending(server, before) => {
                let _ = server.orders.try_send(order);
                // A disk that is deleted is not kept because the host ends.
                let goal = match (before, goal) {
                    (Goal::Delete, _) | (_, Goal::Delete) => Goal::Delete,
                    (Goal::Stop, _) => Goal::Stop,
                    (Goal::Undo(refusal), Goal::Undo(_)) => Goal::Undo(refusal),
                    (Goal::Undo(_), goal) => goal,
                };
                self.phase = LifePhase::Ending(server, goal);
            }
            LifePhase::Opening { opened, .. } => self.end_unopened(Some(opened), order, goal),
            LifePhase::Failed(..) if self.show.borrow().is_awaited => {
                self.end_unopened(None, order, goal);
            }
            LifePhase::Removing => self.phase = LifePhase::Removing,
            _ => self.follow(goal),
        }
    }

    fn ended(&mut self, end: ServerEnd) {
        self.lost = end.lost;
        self.show
            .send_modify(|shown| shown.files = OpenFiles::default());
        let phase = std::mem::replace(&mut self.phase, LifePhase::Over(None));
        match (phase, end.back) {
            (LifePhase::Ending(_, goal), _) => self.follow(goal),
            (_, Some(back)) => self.enter(LifePhase::Given(back)),
            // By itself: it stays in the list, with what it left.
            (_, None) => self.follow(Goal::Stop),
        }
    }

    /// Does what follows when nothing is served any more.
    fn follow(&mut self, goal: Goal) {
        match goal {
            Goal::Stop => self.enter(LifePhase::Over(self.lost.clone())),
            Goal::Delete => {
                self.enter(LifePhase::Removing);
                self.write();
            }
            Goal::Undo(refusal) => self.undone(refusal),
        }
    }

    /// Takes back a disk that is new.
    fn undo(&mut self, refusal: Refusal) {
        let why = "it could not be added".to_owned();
        self.end(Order::Stop(why, None), Goal::Undo(refusal));
    }

    fn undone(&mut self, refusal: Refusal) {
        let removal = match self.was_open {
            Some(_) => Removal::Ended,
            None => Removal::Refused,
        };
        if let Some(before) = self.before.take() {
            if let Some(limits) = &before.limits {
                self.host.clone().take_limits_back(&self.id, limits);
            }
            self.host.leaves(&self.config);
            self.config = before.config;
            self.came_back = before.came_back;
            self.show_description();
            match before.was {
                Was::Nothing if self.file == KeptFile::Absent => self.vanish(removal),
                // There may be a file of it although it could not be written whole.
                Was::Nothing => {
                    self.enter(LifePhase::Removing);
                    self.write();
                }
                Was::Broken(why) => self.enter(LifePhase::Broken(why)),
                Was::Left(why) => self.enter(LifePhase::Left(why)),
                Was::Failed(why) => {
                    self.enter(LifePhase::Failed(why, Instant::now() + self.pause));
                }
            }
        } else {
            self.vanish(removal);
        }
        self.answer_waiting(|| refusal.clone());
    }

    /// Has the description before the PUT leave its group: the PUT has succeeded, or the disk is to be deleted.
    fn leave_before(&mut self) -> bool {
        let before = self.before.take();
        before.is_some_and(|before| {
            self.host.leaves(&before.config);
            true
        })
    }

    /// Leaves the list, and ends.
    fn vanish(&mut self, removal: Removal) {
        self.host.leaves(&self.config);
        self.enter(LifePhase::Over(self.lost.clone()));
        self.host.forget(&self.id, removal);
    }

    // Answers.

    /// Refuses all that waits, except to delete it.
    fn answer_waiting(&mut self, refusal: impl Fn() -> Refusal) {
        for reply in self.putting.drain(..) {
            answer(reply, Err(refusal()));
        }
        for reply in self.changing.drain(..).chain(self.starting.drain(..)) {
            answer(reply, Err(refusal()));
        }
    }

    /// Refuses what waits for a disk that is to be deleted.
    fn refuse_waiting(&mut self) {
        self.leave_before();
        let why = self.removed().1;
        self.answer_waiting(|| Refusal(ProblemKind::BeingRemoved, why.clone()));
    }

    fn removed(&self) -> Refusal {
        let why = format!(
            "disk {} is being removed: send the request again when it has ended",
            self.id
        );
        Refusal(ProblemKind::BeingRemoved, why)
    }

    fn not_served(&self) -> Refusal {
        let state = self.state().word();
        let why = format!("disk {} is not served, it is {state}", self.id);
        Refusal(ProblemKind::NotServed, why)
    }

    // What is shown.

    /// The description in force.
    fn now(&self) -> DiskConfig {
        self.host.with_group_limits(&self.config)
    }

    fn enter(&mut self, phase: LifePhase<H>) {
        self.phase = phase;
        let state = self.state();
        let is_awaited = self.host.has_frontend_left(&self.id);
        self.show
            .send_modify(|shown| shown.enter(state.clone(), is_awaited));
        if self.told.replace(state.word()) != Some(state.word()) {
            self.host.tell(&self.id, &state, &self.config);
        }
    }

    /// Takes another description.
    fn describe(&mut self, config: DiskConfig) {
        // In this order: a group would end with its last disk.
        self.host.joins(&config);
        self.host.leaves(&self.config);
        self.config = config;
        self.show_description();
    }

    fn show_description(&self) {
        let config = self.config.clone();
        let descriptors = self.host.judge(&self.id, &config).unwrap_or_default();
        self.show.send_modify(|shown| {
            shown.config = config;
            shown.descriptors = descriptors;
        });
    }

    fn state(&self) -> HostedState {
        match &self.phase {
            LifePhase::Opening { .. } => HostedState::Opening,
            LifePhase::Serving(status, _) => HostedState::Serving(status.clone()),
            LifePhase::Ending(..) => HostedState::Ending,
            LifePhase::Failed(why, _) | LifePhase::Broken(why) => HostedState::Failed(why.clone()),
            LifePhase::Given(_) | LifePhase::Removing => HostedState::Ended(self.lost.clone()),
            LifePhase::Left(why) => HostedState::Ended(Some(why.clone())),
            LifePhase::Over(lost) => HostedState::Ended(lost.clone()),
        }
    }
}

/// Answers a request. Its client may have left.
fn answer<T>(reply: Reply<T>, result: Result<T, Refusal>) {
    let _ = reply.send(result);
}
