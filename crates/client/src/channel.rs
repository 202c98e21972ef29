//! The backend channel: messages from the daemon to the frontend (vhost-user "Back-end message types").

use std::time::Duration;

use crate::wire::{FLAG_NEED_REPLY, FLAG_REPLY, VERSION, backend_request, message};
use crate::{Error, Socket};

/// The frontend's end of the backend channel.
#[derive(Debug)]
pub struct BackendChannel {
    socket: Socket,
}

impl BackendChannel {
    pub(crate) fn new(socket: Socket) -> BackendChannel {
        BackendChannel { socket }
    }

    /// The socket itself.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Waits for a CONFIG_CHANGE and acknowledges it where that is asked for; `false`: none came in time.
    pub fn config_change(&self, time: Duration) -> Result<bool, Error> {
        use std::os::fd::AsFd;
        if !crate::socket::readable(self.socket.stream().as_fd(), time) {
            return Ok(false);
        }
        let got = self.socket.recv()?;
        if got.flags & FLAG_NEED_REPLY != 0 {
            let ack = message(got.request, VERSION | FLAG_REPLY, &0u64.to_le_bytes());
            self.socket.send_raw(&ack, &[])?;
        }
        match got.request {
            backend_request::CONFIG_CHANGE_MSG => Ok(true),
            other => Err(Error::Protocol(format!("backend message {other}"))),
        }
    }
}
