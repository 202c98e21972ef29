//! Which request an op needs next: arithmetic without a connection.

use cleave_blk::OpKind;
use cleave_nbd::Export;
use cleave_nbd::wire::{export, request};

use super::flight::{Flight, Part, Payload};
use crate::ops::table::Entry;

/// Most bytes of zeroes in one request, where the server cannot zero by itself.
pub(super) const ZEROES_BYTES: u64 = 1 << 20;
/// Most bytes of one discard.
const TRIM_MAX: u64 = 1 << 30;

/// The next step of an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextRequest {
    Done,
    Send(Part),
}

/// Returns true if an op is durable when it ends.
pub(super) fn is_durable(kind: OpKind) -> bool {
    matches!(
        kind,
        OpKind::Write { durable: true } | OpKind::Zero { durable: true, .. }
    )
}

/// The next request of `entry`, whose bytes up to `pos` are finished.
pub(super) fn next(entry: &Entry<Flight>, server: &Export) -> NextRequest {
    let ((offset, left), flushed) = (entry.rest(), entry.own.flushed);
    let part = |kind, flags, most: u64, payload| {
        NextRequest::Send(Part {
            kind,
            flags,
            offset,
            len: left.min(most),
            payload,
        })
    };
    let durable = is_durable(entry.kind);
    let has_fua = server.has(export::FUA);
    let fua = if durable && has_fua { request::FUA } else { 0 };
    let payload_max = u64::from(server.payload_max);
    match entry.kind {
        // A server without FLUSH has nothing that is not durable, or cannot make it so.
        OpKind::Sync if flushed || !server.has(export::FLUSH) => NextRequest::Done,
        OpKind::Sync => NextRequest::Send(Part::FLUSH),
        _ if left == 0 && durable && !has_fua && !flushed && server.has(export::FLUSH) => {
            NextRequest::Send(Part::FLUSH)
        }
        _ if left == 0 => NextRequest::Done,
        OpKind::Read => part(request::READ, 0, payload_max, Payload::Nothing),
        OpKind::Write { .. } => part(request::WRITE, fua, payload_max, Payload::Guest),
        OpKind::Discard if server.has(export::TRIM) => {
            part(request::TRIM, 0, TRIM_MAX, Payload::Nothing)
        }
        // A hint, which this server does not take.
        OpKind::Discard => NextRequest::Done,
        OpKind::Zero { unmap, .. } if server.has(export::WRITE_ZEROES) && !entry.own.written => {
            let hole = if unmap { 0 } else { request::NO_HOLE };
            part(
                request::WRITE_ZEROES,
                fua | hole,
                payload_max,
                Payload::Nothing,
            )
        }
        OpKind::Zero { .. } => part(
            request::WRITE,
            fua,
            payload_max.min(ZEROES_BYTES),
            Payload::Zeroes,
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn server(flags: u16) -> Export {
        Export {
            size_bytes: 1 << 40,
            flags,
            block_min: 1,
            payload_max: 1 << 20,
            structured: true,
        }
    }

    fn entry(kind: OpKind, offset: u64, len: u64) -> Entry<Flight> {
        Entry::new(0, kind, offset, len, Flight::on(0, Instant::now()))
    }

    fn parts(kind: OpKind, len: u64, flags: u16) -> Vec<(u16, u16, u64, u64)> {
        let mut entry = entry(kind, 4096, len);
        let mut out = Vec::new();
        while let NextRequest::Send(part) = next(&entry, &server(flags)) {
            out.push((part.kind, part.flags, part.offset, part.len));
            match part.kind {
                request::FLUSH => entry.own.flushed = true,
                _ => entry.pos += part.len,
            }
        }
        out
    }

    #[test]
    fn ops_are_cut_at_the_largest_payload() {
        const MB: u64 = 1 << 20;
        let cut = [
            (request::READ, 0, 4096, MB),
            (request::READ, 0, 4096 + MB, MB),
            (request::READ, 0, 4096 + 2 * MB, 512),
        ];
        assert_eq!(parts(OpKind::Read, 2 * MB + 512, 0), cut);
        let trims = parts(OpKind::Discard, 3 << 29, export::TRIM);
        assert_eq!(trims.len(), 2);
        assert_eq!(parts(OpKind::Discard, 4096, 0), []);
    }

    #[test]
    fn durable_writes_use_fua_or_end_with_a_flush() {
        let write = OpKind::Write { durable: true };
        let both = export::FUA | export::FLUSH;
        let with_fua = [(request::WRITE, request::FUA, 4096, 512)];
        assert_eq!(parts(write, 512, both), with_fua);
        let with_flush = [(request::WRITE, 0, 4096, 512), (request::FLUSH, 0, 0, 0)];
        assert_eq!(parts(write, 512, export::FLUSH), with_flush);
        assert_eq!(parts(write, 512, 0).len(), 1);
        assert_eq!(parts(OpKind::Write { durable: false }, 512, both).len(), 1);
        assert_eq!(parts(OpKind::Sync, 0, both), [(request::FLUSH, 0, 0, 0)]);
        assert_eq!(parts(OpKind::Sync, 0, 0), []);
    }

    #[test]
    fn zeroes_are_written_where_the_server_cannot_zero() {
        let zero = |unmap| OpKind::Zero {
            unmap,
            durable: false,
        };
        let able = export::WRITE_ZEROES;
        let kept = [(request::WRITE_ZEROES, request::NO_HOLE, 4096, 512)];
        assert_eq!(parts(zero(false), 512, able), kept);
        let freed = [(request::WRITE_ZEROES, 0, 4096, 512)];
        assert_eq!(parts(zero(true), 512, able), freed);
        assert_eq!(parts(zero(true), 3 << 19, 0).len(), 2);
        let mut refused = entry(zero(true), 0, 512);
        refused.own.written = true;
        let written = next(&refused, &server(able));
        assert!(matches!(written, NextRequest::Send(part) if part.payload == Payload::Zeroes));
    }
}
