//! Passes whole messages to the `vhost` crate and takes its answers, over a socket pair of our own.
//!
//! The crate needs a socket that it alone reads and writes. A whole message is in this one before the crate
//! reads, and there is always room for its answer, so neither can block. No message with a descriptor is passed
//! this way: the crate never stops retrying if descriptors do not fit, and leaves them open across `exec`.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::MessageRefusal;
use crate::message::Message;
use crate::state::SessionState;

/// Result of serving a message, and its answer.
#[derive(Debug)]
pub(crate) struct ServedMessage {
    /// Empty if the message is not answered.
    pub(crate) reply: Vec<u8>,
    /// Sent with the answer.
    pub(crate) fd: Option<OwnedFd>,
    pub(crate) outcome: Result<(), MessageRefusal>,
}

impl ServedMessage {
    /// Makes an answer without a descriptor.
    pub(crate) fn with(reply: Vec<u8>, outcome: Result<(), MessageRefusal>) -> ServedMessage {
        ServedMessage {
            reply,
            fd: None,
            outcome,
        }
    }
}

pub(crate) struct Relay {
    ours: UnixStream,
    handler: BackendReqHandler<Mutex<SessionState>>,
    state: Arc<Mutex<SessionState>>,
}

impl Relay {
    pub(crate) fn new(state: SessionState) -> std::io::Result<Relay> {
        let (ours, theirs) = UnixStream::pair()?;
        let state = Arc::new(Mutex::new(state));
        Ok(Relay {
            ours,
            handler: BackendReqHandler::from_stream(theirs, state.clone()),
            state,
        })
    }

    /// Locks the state. A session has one thread, so this never waits. A poisoned lock means that this thread has panicked, which
    /// ends it.
    pub(crate) fn state(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the crate serve a message without descriptors.
    pub(crate) fn pass(&mut self, message: &Message) -> ServedMessage {
        let outcome = self.hand_over(message).and_then(|()| {
            let handled = self.handler.handle_request();
            let refusal = self.state().refusal.take();
            match (handled, refusal) {
                (Ok(()), _) => Ok(()),
                (Err(_), Some(refusal)) => Err(refusal),
                (Err(error), None) => Err(refusal_of(message, &error)),
            }
        });
        ServedMessage::with(self.answer(), outcome)
    }

    fn hand_over(&self, message: &Message) -> Result<(), MessageRefusal> {
        let bytes = [&message.header.bytes()[..], &message.payload].concat();
        match send(
            &self.ours,
            &bytes,
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        ) {
            Ok(count) if count == bytes.len() => Ok(()),
            // The pair is empty before each message, and has room for many.
            Ok(_) => Err(MessageRefusal::lost(
                "a message did not fit our own socket pair",
            )),
            Err(error) => Err(MessageRefusal::lost(format!(
                "our own socket pair: {error}"
            ))),
        }
    }

    fn answer(&self) -> Vec<u8> {
        let mut answer = Vec::new();
        let mut piece = [0u8; 512];
        loop {
            match recv(&self.ours, &mut piece, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return answer,
                Ok((count, _)) => answer.extend_from_slice(piece.get(..count).unwrap_or_default()),
                Err(Errno::INTR) => {}
                Err(_) => return answer,
            }
        }
    }
}

/// Messages that the crate itself refuses are malformed or were sent in the wrong state.
fn refusal_of(message: &Message, error: &Error) -> MessageRefusal {
    match error {
        // These errors can only concern our own socket pair.
        Error::SocketBroken(_) | Error::SocketError(_) | Error::SocketRetry(_) => {
            MessageRefusal::lost(format!("our own socket pair: {error}"))
        }
        _ => MessageRefusal::connection(format!("{}: {error}", message.name())),
    }
}
