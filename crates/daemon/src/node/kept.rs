//! A disk of a node as its requests see it: what it is to be, its state, and the inbox of the task that serves it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cleave_api::DiskState;
use cleave_config::DiskConfig;
use tokio::sync::{mpsc, watch};

use super::open_files::OpenFiles;
use crate::control::DiskStatus;
use crate::disk_server::Order;

/// Orders that may wait for a disk.
const ORDERS_MAX: usize = 64;

/// A disk of the node.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) id: String,
    file: Mutex<DiskConfig>,
    /// The content of its file in the state folder. `None`: the file has not been written yet.
    written: Mutex<Option<DiskConfig>>,
    /// Why the disk has ended and is still in the list: its file could not be removed.
    leftover: Mutex<Option<String>>,
    files: Mutex<OpenFiles>,
    /// The disk was in the state folder when the node started.
    pub(super) comes_back: bool,
    /// The disk has been opened, so a guest may have written its content, whatever that looks like.
    was_opened: AtomicBool,
    /// Descriptors that it may come to need.
    pub(super) descriptors: u64,
    /// Its file cannot be read: another content replaces it.
    pub(super) is_unread: bool,
    state: watch::Sender<State>,
    orders: mpsc::Sender<Order>,
}

/// The state of a disk.
#[derive(Debug, Clone)]
pub(super) enum State {
    Opening,
    Serving(Arc<DiskStatus>),
    /// It has been told to end.
    Ending,
    /// Why it cannot be served. It is tried again.
    Failed(String),
    /// The disk has ended. The text says which requests were left or lost, if any were.
    Ended(Option<String>),
}

impl State {
    pub(super) fn name(&self) -> DiskState {
        match self {
            State::Opening => DiskState::Opening,
            State::Serving(_) => DiskState::Serving,
            State::Ending => DiskState::Ending,
            State::Failed(_) => DiskState::Failed,
            State::Ended(_) => DiskState::Ended,
        }
    }
}

impl Kept {
    /// A disk that is about to be opened, and its orders. `written`: the content of its file, if there is one.
    pub(super) fn new(
        id: &str,
        file: DiskConfig,
        written: Option<DiskConfig>,
        descriptors: u64,
    ) -> (Arc<Kept>, mpsc::Receiver<Order>) {
        let (orders, taken) = mpsc::channel(ORDERS_MAX);
        let kept = Kept {
            id: id.to_owned(),
            file: Mutex::new(file),
            comes_back: written.is_some(),
            was_opened: AtomicBool::new(false),
            written: Mutex::new(written),
            leftover: Mutex::default(),
            files: Mutex::default(),
            descriptors,
            is_unread: false,
            state: watch::Sender::new(State::Opening),
            orders,
        };
        (Arc::new(kept), taken)
    }

    /// A disk whose file cannot be read.
    pub(super) fn unread(id: &str, why: String) -> Arc<Kept> {
        tracing::error!("{id}: not served: {why}");
        Arc::new(Kept {
            id: id.to_owned(),
            file: Mutex::default(),
            written: Mutex::default(),
            leftover: Mutex::default(),
            files: Mutex::default(),
            comes_back: false,
            was_opened: AtomicBool::new(false),
            descriptors: 0,
            is_unread: true,
            state: watch::Sender::new(State::Failed(why)),
            // Nobody takes them.
            orders: mpsc::channel(1).0,
        })
    }

    /// The files and devices that it had when it was opened.
    pub(super) fn files(&self) -> OpenFiles {
        let files = self.files.lock();
        files.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_files(&self, opened: OpenFiles) {
        let files = self.files.lock();
        *files.unwrap_or_else(PoisonError::into_inner) = opened;
    }

    /// The file that describes it.
    pub(super) fn file(&self) -> DiskConfig {
        self.lock_file().clone()
    }

    pub(super) fn set_file(&self, file: DiskConfig) {
        *self.lock_file() = file;
    }

    /// The content of its file in the state folder, if that has been written.
    pub(super) fn written(&self) -> Option<DiskConfig> {
        self.lock_written().clone()
    }

    pub(super) fn set_written(&self, file: DiskConfig) {
        *self.lock_written() = Some(file);
    }

    /// Returns true if the node has a file of it that brings it back with the next start.
    pub(super) fn has_file(&self) -> bool {
        let is_persistent = |file: DiskConfig| file.persistent.get().0;
        self.is_unread || self.written().is_some_and(is_persistent)
    }

    /// Returns true if it has been opened.
    pub(super) fn was_opened(&self) -> bool {
        self.was_opened.load(Ordering::Relaxed)
    }

    /// Notes that it has been opened.
    pub(super) fn set_opened(&self) {
        self.was_opened.store(true, Ordering::Relaxed);
    }

    /// Notes that its file has been removed.
    pub(super) fn forget_file(&self) {
        *self.lock_written() = None;
    }

    /// Why its file is left after its end, if it is.
    pub(super) fn leftover(&self) -> Option<String> {
        let leftover = self.leftover.lock();
        leftover.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_leftover(&self, why: String) {
        let leftover = self.leftover.lock();
        *leftover.unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    /// Returns true if another disk of its id may take its place: it has no content that can be read, or has ended.
    pub(super) fn is_replaceable(&self) -> bool {
        self.is_unread || matches!(&*self.state.borrow(), State::Ended(_))
    }

    fn lock_written(&self) -> MutexGuard<'_, Option<DiskConfig>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_file(&self) -> MutexGuard<'_, DiskConfig> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts it into another state.
    pub(super) fn enter(&self, state: State) {
        self.state.send_replace(state);
    }

    pub(super) fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Gives an order; whether anybody takes it. There is always room for one to stop, because nobody gives it again.
    pub(super) fn order(&self, order: Order) -> bool {
        let has_room = match order {
            Order::Stop(..) | Order::StopUnused(_) => true,
            Order::CheckSize(_) | Order::Start => self.orders.capacity() > ORDERS_MAX / 2,
        };
        has_room && self.orders.try_send(order).is_ok()
    }

    /// Tries at once to open it, if it has failed.
    pub(super) fn start_again(&self) {
        let has_failed = matches!(&*self.state.borrow(), State::Failed(_));
        if has_failed && self.order(Order::Start) {
            self.state.send_replace(State::Opening);
        }
    }

    /// Returns true while it is served.
    pub(super) fn is_serving(&self) -> bool {
        matches!(&*self.state.borrow(), State::Serving(_))
    }

    /// Whether it has been told to end.
    pub(super) fn is_leaving(&self) -> bool {
        matches!(&*self.state.borrow(), State::Ending | State::Ended(_))
    }

    /// Waits until it is served or is not; at most for so long.
    pub(super) async fn settled(&self, patience: Duration) -> State {
        let mut state = self.state.subscribe();
        let settled = state.wait_for(|state| !matches!(state, State::Opening | State::Ending));
        match tokio::time::timeout(patience, settled).await {
            Ok(Ok(state)) => state.clone(),
            Ok(Err(_)) | Err(_) => self.state(),
        }
    }

    /// Waits for its end, after an order to stop.
    pub(super) async fn ended(&self) -> State {
        if self.is_unread {
            return State::Ended(None);
        }
        let mut state = self.state.subscribe();
        let ended = state.wait_for(|state| matches!(state, State::Ended(_)));
        ended
            .await
            .map_or(State::Ended(None), |state| state.clone())
    }
}
