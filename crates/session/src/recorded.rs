//! What a session is handed over as.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use vhost::vhost_user::message::FrontendReq;

use crate::foreign::Foreign;
use crate::message::{Header, Message};
use crate::offload::Offload;

/// A message of a frontend, with its descriptors.
#[derive(Debug)]
pub struct RecordedMessage {
    /// Its number in the protocol.
    pub request: u32,
    /// What follows its header.
    pub payload: Vec<u8>,
    /// The descriptors that came with it.
    pub fds: Vec<OwnedFd>,
}

/// A session without its process: what another one needs to go on with it.
#[derive(Debug)]
pub struct Handover {
    /// The connection with the frontend.
    pub connection: UnixStream,
    /// True if the session owns the disk, or was the last to own it.
    pub owns: bool,
    /// True if the session owns the disk or has owned it. If another one does now, it has taken the disk over.
    pub has_owned: bool,
    /// True if a vring was retired since the last reset.
    pub needs_reset: bool,
    /// True if the cache is write-back, false if it is write-through. `None`: as the disk has it.
    pub writeback: Option<bool>,
    /// What the guest knows of its device, as a move to another host carries it.
    pub device: Vec<u8>,
    /// What the frontend would send to a new process.
    pub messages: Vec<RecordedMessage>,
}

impl RecordedMessage {
    /// Makes it the message that a connection brings. The frontend has had its answer.
    pub(crate) fn into_message(self, offload: &Offload) -> Message {
        let mut fds = Foreign::none(offload.clone());
        fds.extend(self.fds.into_iter());
        Message {
            header: Header {
                request: self.request,
                need_reply: false,
                payload_bytes: self.payload.len(),
            },
            payload: self.payload,
            fds,
        }
    }
}

/// Makes a message with copies of these descriptors.
pub(crate) fn record<'a, F>(
    request: FrontendReq,
    payload: Vec<u8>,
    fds: impl IntoIterator<Item = &'a F>,
) -> io::Result<RecordedMessage>
where
    F: AsFd + 'a,
{
    let copies = fds.into_iter().map(|fd| fd.as_fd().try_clone_to_owned());
    Ok(RecordedMessage {
        request: request.into(),
        payload,
        fds: copies.collect::<io::Result<_>>()?,
    })
}

/// Returns numbers as a payload has them.
pub(crate) fn longs<const COUNT: usize>(numbers: [u64; COUNT]) -> Vec<u8> {
    numbers.map(u64::to_ne_bytes).concat()
}

/// Returns numbers as a payload has them.
pub(crate) fn words<const COUNT: usize>(numbers: [u32; COUNT]) -> Vec<u8> {
    numbers.map(u32::to_ne_bytes).concat()
}
