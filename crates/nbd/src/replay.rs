//! What is said on a connection before a store gets it, or without one: changes that are written again, and a flush.

use std::time::Duration;

use crate::dial::{Call, NbdError};
use crate::handshake::Export;
use crate::unflushed::Change;
use crate::wire::{self, WireRequest, chunk, export, request};

/// Most changes that wait for their replies at a time, and most bytes of them. So many replies fit into any socket, so the server
/// never waits for us while we wait for it.
const BATCH_MAX: usize = 64;
const BATCH_BYTES: u64 = 1 << 20;
/// Most bytes of zeroes in one request, where the server cannot zero by itself.
const ZEROES_BYTES: u64 = 1 << 20;

/// Result of writing changes again.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Replayed {
    /// The bytes that they changed.
    pub(crate) bytes: u64,
    /// Those of them that the server refused.
    pub(crate) refused_bytes: u64,
}

/// Sends changes again, in order. Two that overlap are never under way at the same time, because a server may do requests in any
/// order. `time`: how long the next reply may take. `is_over`: asked before each request and each reply.
pub(crate) fn replay<'a>(
    call: &mut Call,
    export: &Export,
    changes: impl Iterator<Item = &'a Change>,
    time: Duration,
    is_over: impl Fn() -> bool,
) -> Result<Replayed, NbdError> {
    let wait = |call: &mut Call| {
        call.allow(time);
        match is_over() {
            true => Err(NbdError::Closed),
            false => Ok(()),
        }
    };
    let mut batch = Batch::default();
    let mut replayed = Replayed::default();
    for change in changes {
        let is_full = batch.changes.len() >= BATCH_MAX || batch.bytes >= BATCH_BYTES;
        if is_full || batch.changes.iter().any(|sent| sent.overlaps(change)) {
            batch.await_replies(call, &mut replayed, wait)?;
        }
        wait(call)?;
        batch.send(call, export, change)?;
    }
    batch.await_replies(call, &mut replayed, wait)?;
    Ok(replayed)
}

/// The changes that are under way.
#[derive(Debug, Default)]
struct Batch<'a> {
    changes: Vec<&'a Change>,
    /// The change of each request whose reply has not come. The first one has the cookie `first`.
    due: Vec<Option<&'a Change>>,
    first: u64,
    bytes: u64,
}

impl<'a> Batch<'a> {
    fn send(
        &mut self,
        call: &mut Call,
        server: &Export,
        change: &'a Change,
    ) -> Result<(), NbdError> {
        let lacks = |flag| !server.has(flag);
        let mut flags = change.flags;
        if lacks(export::FUA) {
            flags &= !request::FUA;
        }
        let (kind, most) = match change.kind {
            // The guest may read anything there.
            request::TRIM if lacks(export::TRIM) => return Ok(()),
            request::WRITE_ZEROES if lacks(export::WRITE_ZEROES) => {
                flags &= request::FUA;
                (request::WRITE, ZEROES_BYTES)
            }
            request::WRITE if change.data.is_empty() => (request::WRITE, ZEROES_BYTES),
            kind => (kind, u64::MAX),
        };
        let most = match kind {
            request::WRITE => most.min(server.payload_max.into()),
            _ => most,
        };
        let mut at = 0;
        while at < change.len {
            let len = most.min(change.len - at);
            let cookie = self.first + self.due.len() as u64;
            let request = WireRequest {
                flags,
                kind,
                cookie,
                offset: change.offset + at,
                // A change was one request before.
                len: len as u32,
            };
            call.write(&request.bytes())?;
            if kind == request::WRITE {
                let data = change.data.get(at as usize..(at + len) as usize);
                match data {
                    Some(data) => call.write(data)?,
                    None => call.write(&vec![0; len as usize])?,
                }
                self.bytes += len;
            }
            self.due.push(Some(change));
            at += len;
        }
        self.changes.push(change);
        Ok(())
    }

    /// `wait` is called before each reply.
    fn await_replies(
        &mut self,
        call: &mut Call,
        replayed: &mut Replayed,
        wait: impl Fn(&mut Call) -> Result<(), NbdError>,
    ) -> Result<(), NbdError> {
        let mut refused: Vec<&Change> = Vec::new();
        for _ in 0..self.due.len() {
            wait(call)?;
            let (cookie, error) = reply(call)?;
            let place = cookie.checked_sub(self.first);
            let due = place.and_then(|at| self.due.get_mut(at as usize));
            let change = due
                .and_then(Option::take)
                .ok_or(NbdError::Breach("it answered a request that was not asked"))?;
            match error {
                wire::SHUTS_DOWN => return Err(NbdError::ShutsDown(String::new())),
                // A hint.
                _ if change.kind == request::TRIM => {}
                0 => {}
                // One change may be several requests.
                _ if refused.iter().any(|other| std::ptr::eq(*other, change)) => {}
                _ => refused.push(change),
            }
        }
        replayed.refused_bytes += refused.iter().map(|change| change.len).sum::<u64>();
        replayed.bytes += self.changes.iter().map(|change| change.len).sum::<u64>();
        self.first += self.due.len() as u64;
        self.due.clear();
        self.changes.clear();
        self.bytes = 0;
        Ok(())
    }
}

/// Has the server flush. Returns its error, or 0.
pub(crate) fn flush(call: &mut Call) -> Result<u32, NbdError> {
    let request = WireRequest {
        kind: request::FLUSH,
        ..WireRequest::DISCONNECT
    };
    call.write(&request.bytes())?;
    match reply(call)? {
        (0, error) => Ok(error),
        _ => Err(NbdError::Breach("it answered a request that was not asked")),
    }
}

/// Reads the reply to a request that returns no data: its cookie, and the server's error or 0.
fn reply(call: &mut Call) -> Result<(u64, u32), NbdError> {
    let magic = u32::from_be_bytes(call.array()?);
    let error = u32::from_be_bytes(call.array()?);
    let cookie = u64::from_be_bytes(call.array()?);
    // In a chunk, flags and type are where a simple reply has the error.
    let (flags, kind) = ((error >> 16) as u16, error as u16);
    match magic {
        wire::SIMPLE_REPLY => Ok((cookie, error)),
        wire::STRUCTURED_REPLY if flags & chunk::DONE != 0 => {
            let len = u32::from_be_bytes(call.array()?) as usize;
            match kind {
                chunk::NONE if len == 0 => Ok((cookie, 0)),
                _ if kind & chunk::ERROR != 0 && (6..=wire::TEXT_MAX + 14).contains(&len) => {
                    let error = u32::from_be_bytes(call.array()?);
                    call.read(&mut vec![0; len - 4])?;
                    Ok((cookie, error.max(1)))
                }
                _ => Err(NbdError::Breach(
                    "a chunk of a reply has an impossible type",
                )),
            }
        }
        _ => Err(NbdError::Breach("a reply has another magic")),
    }
}
