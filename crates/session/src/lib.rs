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
mod intake;
mod legs;
mod message;
pub mod offload;
mod owner;
mod portable;
mod possession;
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

use cleave_worker::Device;
pub use cleave_worker::Quota;
pub use config::SessionConfig;
use rustix::event::{PollFd, PollFlags};

use fd::wait;
use intake::{Connection, Intake};
use message::Message;
pub use offload::Offload;
use owner::Claimant;
pub use owner::Owners;
pub use possession::Possession;
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
}

/// A connection to one frontend. `run` serves it on the calling thread.
pub struct Session {
    connection: Connection,
    relay: Relay,
    shared: Arc<SessionShared>,
    /// When a frontend that has sent nothing is disconnected. `None` after its first message.
    silent_until: Option<Instant>,
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
        let connection = Connection::new(stream, offload.clone());
        let claimant = Claimant::new(owners, signals.clone(), connection.socket());
        let state =
            SessionState::new(device, offload, &config, claimant).map_err(io::Error::other)?;
        let shared = Arc::new(SessionShared {
            signals,
            view: Mutex::default(),
        });
        let session = Session {
            connection,
            relay: Relay::new(state)?,
            shared: shared.clone(),
            silent_until: Some(Instant::now() + FIRST_MESSAGE_WITHIN),
        };
        Ok((session, SessionHandle { shared }))
    }

    /// Serves the frontend until it leaves, then drains all vrings and releases everything.
    pub fn run(mut self) -> Ending {
        let ending = loop {
            if let Err(refusal) = self.serve_next() {
                break ending_of(refusal);
            }
        };
        self.relay.state().finish();
        legs::log_totals(&self.relay.state());
        drop(self.relay);
        // The frontend learns of the end only now, because until here its memory might have been written. By a
        // shutdown, since the acceptor may hold another descriptor of the connection.
        self.connection.close();
        ending
    }

    /// Serves one message, or sleeps until there may be one.
    fn serve_next(&mut self) -> Result<(), MessageRefusal> {
        self.handle_requests()?;
        match self.connection.read()? {
            Intake::Message(message) => {
                self.silent_until = None;
                self.serve(message)
            }
            Intake::Gone => Err(MessageRefusal::Gone),
            Intake::Wanting => self.sleep(),
        }
    }

    /// Handles requests from other threads and alarms from workers.
    fn handle_requests(&mut self) -> Result<(), MessageRefusal> {
        match self.shared.signals.check() {
            None => {}
            Some(Summons::HangUp) => return Err(MessageRefusal::Gone),
            Some(Summons::Alarm) => return Err(self.relay.state().loss()),
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

    /// Sleeps until the frontend, a worker or another thread acts. There is a time-out only while a message is
    /// incomplete or the first one has not arrived.
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
        let view = self.relay.state().view();
        *self.shared.lock_view() = view;
        if may_bring_our_end {
            self.connection.probe()?;
        }
        let has_reply = !reply.is_empty();
        let signals = &self.shared.signals;
        self.connection
            .write(&reply, fd, &signals.wake, || signals.is_hung_up())?;
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

fn ending_of(refusal: MessageRefusal) -> Ending {
    match refusal {
        MessageRefusal::Gone => Ending::HungUp,
        MessageRefusal::Message(why)
        | MessageRefusal::Vring(why)
        | MessageRefusal::Connection(why) => Ending::Refused(why),
        MessageRefusal::Lost(why) => Ending::Lost(why),
    }
}

impl SessionShared {
    fn lock_view(&self) -> MutexGuard<'_, SessionView> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SessionHandle {
    /// Returns the settings that the frontend has agreed with the device so far.
    pub fn view(&self) -> SessionView {
        self.shared.lock_view().clone()
    }

    /// Ends the session: `run` drains and returns.
    pub fn hang_up(&self) {
        self.shared.signals.hang_up();
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
