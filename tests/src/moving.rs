//! The steps of a guest that moves from one daemon to another.

use std::path::Path;

use cleave_client::message::protocol;
use cleave_client::{Client, DeviceOptions, Frontend, WriteLog};

use crate::{connect, outliving};

/// A guest that outlives its daemons and can leave them.
pub fn moving(queues: u16) -> DeviceOptions {
    let plain = outliving();
    DeviceOptions {
        queues,
        protocol_features: plain.protocol_features | protocol::LOG_SHMFD,
        ..plain
    }
}

/// Connects a VMM to a daemon, which has been told what kind of guest will come, and checks that the guest finds all that it has
/// negotiated.
pub fn prepared(socket: &Path, guest: &Client, options: &DeviceOptions) -> Client {
    let target = connect(|| {
        let frontend = Frontend::connect(socket, options.timeout)?;
        Client::handshake(frontend, guest.memory().clone(), options)
    });
    assert_eq!(target.features(), guest.features(), "the face of the disk");
    target
}

/// Stops a guest for a move, in which all that is written is marked. Returns the positions of its vrings.
pub fn leave(client: &Client) -> Vec<u16> {
    let log = WriteLog::new(client.memory()).unwrap();
    client.start_log(&log).unwrap();
    client.stop().unwrap()
}
