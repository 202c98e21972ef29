//! One vhost-user connection: features, memory table, vring life cycle, configuration, backend channel. This
//! crate forbids data-path calls, tokio and unsafe code.
//!
//! A message passes through `intake` (reads it whole, with its descriptors) and `filter` (decides who serves
//! it). Then `relay` and `handler` (the `vhost` crate parses and answers it) or `filter` itself apply it to
//! `state` and `control`.
#![forbid(unsafe_code)]

mod channel;
mod claim;
mod config;
mod control;
mod dirty;
mod fd;
mod filter;
mod foreign;
mod forward;
mod handler;
mod handover;
mod intake;
mod keeper;
mod kept;
mod legs;
mod message;
pub mod offload;
mod owner;
mod portable;
mod possession;
mod recorded;
mod refusal;
mod relay;
mod signals;
mod state;
mod transfer;
mod view;
mod vrings;
mod workers;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleave_guest::Allowance;
use cleave_worker::Device;
pub use cleave_worker::Quota;
pub use config::SessionConfig;
use rustix::event::{PollFd, PollFlags};

use fd::{is_readable, wait};
pub use handover::HandoverObstacle;
use intake::{Connection, Intake};
pub use keeper::Keeper;
use keeper::Keeping;
pub use kept::MEMORY_FILES_MAX;
use message::Message;
pub use offload::{Offload, Offloaded};
use owner::Claimant;
pub use owner::Owners;
pub use possession::Possession;
pub use recorded::{Handover, RecordedMessage};
use refusal::MessageRefusal;
use relay::{Relay, ServedMessage};
use signals::{SessionSignals, Summons};
use state::SessionState;
use vhost::vhost_user::message::FrontendReq;
pub use view::{SessionView, VringView};

/// A frontend that sends nothing is disconnected after this time. It is long because a correct one can be
/// silent at first: QEMU connects before it allocates guest memory, and touching all pages of a large guest
/// takes minutes. An acceptor that serves one frontend should wait until the socket is readable before it makes
/// a session, so that a silent frontend does not keep others out.
pub const FIRST_MESSAGE_WITHIN: Duration = Duration::from_secs(120);

/// How a session ended.
#[derive(Debug)]
pub enum Ending {
    /// The frontend closed the connection, or `SessionHandle::hang_up` was called.
    HungUp,
    /// The frontend broke the protocol in this way, or wanted a disk that another one had taken over from it.
    Refused(String),
    /// Guest memory was truncated, or a worker failed.
    Lost(String),
    /// Another process can go on with the session, or this one. The connection is open, and no vring runs.
    HandedOver(Box<Handover>),
}

/// A connection to one frontend. `run` serves it on the calling thread.
pub struct Session {
    connection: Connection,
    relay: Relay,
    shared: Arc<SessionShared>,
    /// When a frontend that has sent nothing is disconnected. `None` after its first message.
    silent_until: Option<Instant>,
    /// What makes it the session that another process has handed over.
    inherited: Option<Inherited>,
    keeper: Option<Box<dyn Keeper>>,
    keeping: Keeping,
}

/// What a session begins with that goes on with another.
struct Inherited {
    needs_reset: bool,
    device: Vec<u8>,
    messages: Vec<RecordedMessage>,
    /// Called when the messages are in force.
    resumed: Box<dyn FnOnce() + Send>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("connection", &self.connection)
            .finish_non_exhaustive()
    }
}

/// Controls a running session from another thread.
#[derive(Debug, Clone)]
pub struct SessionHandle {
    shared: Arc<SessionShared>,
}

/// State that a session shares with its remotes.
#[derive(Debug)]
struct SessionShared {
    signals: Arc<SessionSignals>,
    /// State after the latest message.
    view: Mutex<SessionView>,
    /// A keeper that the session has not seen yet.
    keeper: Mutex<Option<Box<dyn Keeper>>>,
}

impl Session {
    /// Takes a connected socket, blocking or not. `offload`: the threads of this disk for descriptors of frontends; `owners`: all
    /// sessions of this disk.
    pub fn new(
        stream: UnixStream,
        device: Arc<Device>,
        offload: Offload,
        owners: Arc<Owners>,
        config: SessionConfig,
    ) -> io::Result<(Session, SessionHandle)> {
        let signals = Arc::new(SessionSignals::new()?);
        let connection = Connection::new(stream, offload.clone())?;
        let claimant = Claimant::new(owners, signals.clone(), connection.socket());
        let state =
            SessionState::new(device, offload, &config, claimant).map_err(io::Error::other)?;
        let shared = Arc::new(SessionShared {
            signals,
            view: Mutex::default(),
            keeper: Mutex::default(),
        });
        let session = Session {
            connection,
            relay: Relay::new(state)?,
            shared: shared.clone(),
            silent_until: Some(Instant::now() + FIRST_MESSAGE_WITHIN),
            inherited: None,
            keeper: None,
            keeping: Keeping::Due,
        };
        Ok((session, SessionHandle { shared }))
    }

    /// Makes the session that another process has handed over. Of two, the one that owns the disk comes first. `resumed`: called
    /// when its vrings are served again.
    pub fn resume(
        handover: Handover,
        device: Arc<Device>,
        offload: Offload,
        owners: Arc<Owners>,
        config: SessionConfig,
        resumed: impl FnOnce() + Send + 'static,
    ) -> io::Result<(Session, SessionHandle)> {
        let connection = handover.connection.try_clone();
        let made = connection.and_then(|connection| {
            Session::new(connection, device, offload.clone(), owners, config)
        });
        let (mut session, handle) = match made {
            Ok(made) => made,
            Err(error) => {
                offload.close(handover);
                return Err(error);
            }
        };
        session.relay.state().take_over(&handover);
        session.inherited = Some(Inherited {
            needs_reset: handover.needs_reset,
            device: handover.device,
            messages: handover.messages,
            resumed: Box::new(resumed),
        });
        Ok((session, handle))
    }

    /// Serves the frontend until it leaves, then drains all vrings and releases everything.
    pub fn run(mut self) -> Ending {
        let refusal = match self.take_over() {
            Err(refusal) => refusal.of_take_over(),
            Ok(()) => loop {
                if let Err(refusal) = self.serve_next() {
                    break refusal;
                }
            },
        };
        self.forget();
        let ending = match refusal {
            MessageRefusal::Gone => Ending::HungUp,
            MessageRefusal::Message(why)
            | MessageRefusal::Vring(why)
            | MessageRefusal::Connection(why) => Ending::Refused(why),
            MessageRefusal::Lost(why) => Ending::Lost(why),
            MessageRefusal::HandOver => match self.hand_over() {
                Ok(handover) => return Ending::HandedOver(Box::new(handover)),
                Err(why) => Ending::Lost(why),
            },
        };
        self.relay.state().finish();
        legs::log_totals(&self.relay.state());
        drop(self.relay);
        // The frontend learns of the end only now, because until here its memory might have been written. By a
        // shutdown, since the acceptor may hold another descriptor of the connection.
        self.connection.close();
        ending
    }

    /// Stops the vrings and lets go of the disk. The frontend sees nothing of it.
    fn hand_over(&mut self) -> Result<Handover, String> {
        let connection = self.connection.hand_over();
        let connection =
            connection.map_err(|error| format!("cannot copy the connection: {error}"))?;
        let mut state = self.relay.state();
        let owns = self.shared.signals.owns();
        let writeback = match owns {
            true => Some(state.is_writeback()),
            false => state.cache_mode,
        };
        let needs_reset = state.needs_reset();
        let device = state.portable().to_bytes();
        let messages = state.hand_over();
        let messages = messages.map_err(|refusal| format!("{refusal:?}"))?;
        legs::log_totals(&state);
        Ok(Handover {
            connection,
            owns,
            has_owned: state.claimant.has_owned(),
            needs_reset,
            writeback,
            device,
            messages,
        })
    }

    /// Puts in force what another process has handed over. The frontend has had the answers.
    fn take_over(&mut self) -> Result<(), MessageRefusal> {
        let Some(inherited) = self.inherited.take() else {
            return Ok(());
        };
        self.relay.state().must_fit(&inherited.device)?;
        let offload = self.relay.state().offload.clone();
        for message in inherited.messages {
            self.silent_until = None;
            let message = message.into_message(&offload);
            filter::serve(&mut self.relay, message).outcome?;
        }
        self.relay.state().note_cache_on();
        self.relay.state().claimant.resumed();
        self.relay.state().allowance = Allowance::Share;
        // Now, because one of them may have reset the device.
        self.relay.state().has_retired |= inherited.needs_reset;
        self.show();
        (inherited.resumed)();
        Ok(())
    }

    /// Shows the state to other threads.
    fn show(&self) {
        let view = self.relay.state().view();
        *self.shared.lock_view() = SessionView {
            kept: self.keeping == Keeping::Kept,
            ..view
        };
    }

    /// Serves one message, or sleeps until there may be one.
    fn serve_next(&mut self) -> Result<(), MessageRefusal> {
        self.handle_requests()?;
        if self.keeping == Keeping::Kept {
            match is_readable(&self.connection) {
                true => self.forget(),
                false => return self.sleep(),
            }
        }
        match self.connection.read()? {
            Intake::Message(message) => {
                self.silent_until = None;
                self.keeping = Keeping::Due;
                self.serve(message)
            }
            Intake::Gone => Err(MessageRefusal::Gone),
            Intake::Wanting => {
                self.keep();
                self.sleep()
            }
        }
    }

    /// Has the session kept, if another process can go on with it whenever this one dies. Without it the frontend has to connect again
    /// then, so an attempt that fails is repeated.
    fn keep(&mut self) {
        let Some(keeper) = &mut self.keeper else {
            return;
        };
        let mut state = self.relay.state();
        if self.connection.deadline().is_some() || !state.can_be_kept() {
            // Nothing is tried, so nothing may wake the session for it.
            self.keeping = Keeping::Due;
            return;
        }
        let now = Instant::now();
        if !self.keeping.is_due(now) {
            return;
        }
        let mut keep = || {
            keeper.keep(Handover {
                connection: self.connection.hand_over()?,
                owns: self.shared.signals.owns(),
                has_owned: true,
                needs_reset: state.needs_reset(),
                writeback: Some(state.is_writeback()),
                device: state.portable().to_bytes(),
                messages: state.messages_now()?,
            })
        };
        let Err(error) = keep() else {
            self.keeping = Keeping::Kept;
            self.shared.lock_view().kept = true;
            return;
        };
        self.keeping = self.keeping.failed(now);
        if self.keeping == Keeping::GivenUp {
            let name = state.device.disk.name();
            tracing::warn!(
                "{name}: its frontend has to connect again if this daemon is killed: the service manager does not keep its \
                 connection: {error}"
            );
        }
    }

    fn forget(&mut self) {
        if std::mem::take(&mut self.keeping) == Keeping::Kept {
            self.shared.lock_view().kept = false;
            self.keeper.iter_mut().for_each(|keeper| keeper.forget());
        }
    }

    /// Handles requests from other threads and alarms from workers.
    fn handle_requests(&mut self) -> Result<(), MessageRefusal> {
        match self.shared.signals.check() {
            None => {}
            Some(Summons::HangUp) => return Err(MessageRefusal::Gone),
            Some(Summons::HandOver) if !self.awaits_message() => {
                return Err(MessageRefusal::HandOver);
            }
            Some(Summons::HandOver) if self.shared.signals.is_hurried() => {
                return Err(MessageRefusal::Gone);
            }
            Some(Summons::HandOver) => {}
            Some(Summons::Alarm) => return Err(self.relay.state().loss()),
        }
        let keeper = self.shared.lock_keeper().take();
        if let Some(keeper) = keeper {
            self.forget();
            (self.keeper, self.keeping) = (Some(keeper), Keeping::Due);
        }
        self.relay.state().yield_if_wanted();
        // While the device is suspended or the frontend has not read earlier requests, the flag is kept and
        // checked again after the next message.
        let signals = &self.shared.signals;
        if signals.take_config_changed() && !self.relay.state().notify_config_changed() {
            signals.set_config_changed();
        }
        Ok(())
    }

    /// Returns true if nobody else could go on before the frontend's next message: the bytes of one that has begun would be lost, and a
    /// ring that was taken out of memory is about to come back.
    fn awaits_message(&self) -> bool {
        let state = self.relay.state();
        self.connection.deadline().is_some() || !state.vrings.are_within(&state.memory)
    }

    /// Sleeps until the frontend, a worker or another thread acts. There is a time-out only while a message is
    /// incomplete, the first one has not arrived, or the session is to be kept and could not be.
    fn sleep(&mut self) -> Result<(), MessageRefusal> {
        let (until, why) = match self.connection.deadline() {
            Some(until) => (
                Some(until),
                "the frontend sent part of a message and then nothing",
            ),
            None => (self.silent_until, "the frontend connected and sent nothing"),
        };
        if until.is_some_and(|until| Instant::now() >= until) {
            return Err(MessageRefusal::connection(why));
        }
        let mut fds = [
            PollFd::new(&self.connection, PollFlags::IN),
            PollFd::new(&self.shared.signals.wake, PollFlags::IN),
            PollFd::new(&self.shared.signals.alarm, PollFlags::IN),
        ];
        let until = until.into_iter().chain(self.keeping.again_at()).min();
        wait(&mut fds, until).map_err(|error| MessageRefusal::lost(format!("cannot wait: {error}")))
    }

    fn serve(&mut self, message: Message) -> Result<(), MessageRefusal> {
        let may_bring_our_end = matches!(
            message.request(),
            Some(
                FrontendReq::SET_BACKEND_REQ_FD
                    | FrontendReq::SET_VRING_CALL
                    | FrontendReq::SET_VRING_ERR
            )
        );
        let ServedMessage { reply, fd, outcome } = filter::serve(&mut self.relay, message);
        // Before the answer, so that a frontend with the answer finds its effect in the view.
        self.show();
        if may_bring_our_end {
            self.connection.probe()?;
        }
        let has_reply = !reply.is_empty();
        let signals = &self.shared.signals;
        self.connection
            .write(&reply, fd, &signals.wake, || signals.is_hurried())?;
        self.relay.state().note_cache_on();
        let why = match outcome {
            Err(MessageRefusal::Message(why)) if has_reply => why,
            Err(MessageRefusal::Vring(why)) => why,
            outcome => return outcome,
        };
        let state = self.relay.state();
        let name = state.device.disk.name();
        let refused = |more: &str| tracing::warn!("{name}: refused: {why}{more}");
        state.device.logs.refused.log(refused);
        Ok(())
    }
}

impl SessionShared {
    fn lock_view(&self) -> MutexGuard<'_, SessionView> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_keeper(&self) -> MutexGuard<'_, Option<Box<dyn Keeper>>> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SessionHandle {
    /// Returns the settings that the frontend has agreed with the device so far.
    pub fn view(&self) -> SessionView {
        let view = self.shared.lock_view().clone();
        // Then a message has no answer yet, and without one some frontends go on at the other host, without the requests.
        let waits = self.shared.signals.awaits_stalled();
        let obstacle = HandoverObstacle::passing("its guest moves and waits for held requests");
        SessionView {
            obstacle: waits.then_some(obstacle).or(view.obstacle),
            ..view
        }
    }

    /// Ends the session: `run` drains and returns.
    pub fn hang_up(&self) {
        self.shared.signals.hang_up();
    }

    /// Ends the session in such a way that another process can go on with it: `run` drains, keeps the connection open and returns
    /// [`Ending::HandedOver`]. If the frontend's message waits for something meanwhile, the session hangs up instead.
    pub fn hand_over(&self) {
        self.shared.signals.hand_over();
    }

    /// Has a session that is to end hang up where it waits for its frontend: for the rest of a message, for memory of a ring that was
    /// taken away, or for room for an answer. What the session itself has to do it finishes, however long that takes.
    pub fn hurry(&self) {
        self.shared.signals.hurry();
    }

    /// Takes [`hand_over`](SessionHandle::hand_over) back. A session that has begun with it still ends so.
    pub fn stay(&self) {
        self.shared.signals.stay();
    }

    /// Has the session kept for the next process, from now on and for as long as its frontend knows what is in flight. A session that
    /// waits for its frontend is kept at once.
    pub fn keep_with(&self, keeper: Box<dyn Keeper>) {
        *self.shared.lock_keeper() = Some(keeper);
        self.shared.signals.ring();
    }

    /// Returns true if the session owns the disk or was the last to own it: then the guest is the one behind its frontend. Still true
    /// after its end.
    pub fn owns(&self) -> bool {
        self.shared.signals.owns()
    }

    /// Notifies the guest that the configuration (its size) has changed, if the frontend gave a backend
    /// channel. If the device is suspended, this is done when it is resumed. Never waits.
    pub fn config_changed(&self) {
        self.shared.signals.set_config_changed();
        self.shared.signals.ring();
    }
}

#[cfg(test)]
mod tests;
