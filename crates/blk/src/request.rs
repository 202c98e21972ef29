//! Parsing a request from bytes that were copied out of guest memory.

use crate::spec::{
    HEADER_BYTES, ID_BYTES, RANGE_BYTES, RANGE_FLAG_UNMAP, SECTOR_BYTES, feature, request_type,
};
use crate::{Config, Limits, Status};

/// A contiguous range of guest-physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Segment {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
}

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Device to memory.
    Read,
    /// Memory to device.
    Write,
    /// Make completed writes durable.
    Flush,
    /// Return the serial.
    GetId,
    /// Deallocate space; the contents are undefined afterwards.
    Discard,
    /// Contents read as zero afterwards.
    WriteZeroes {
        /// The guest allows deallocation.
        unmap: bool,
    },
}

/// Bytes of a chain in each direction, summed over its descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Device-readable bytes, header included.
    pub readable_bytes: u64,
    /// Device-writable bytes, status byte included.
    pub writable_bytes: u64,
}

impl Shape {
    /// Returns false for a chain of 4 GiB and more, which is refused: a chain may not be longer than 2^32 bytes (virtio 1.3
    /// §2.7.5), and its used length must fit 32 bits.
    #[inline]
    pub fn is_served(self) -> bool {
        let total_bytes = self.readable_bytes.checked_add(self.writable_bytes);
        total_bytes.is_some_and(|bytes| bytes <= u64::from(u32::MAX))
    }
}

/// The limits for requests at this moment: the disk's, and the features that the guest acknowledged.
#[derive(Debug, Clone, Copy)]
pub struct Gate<'a> {
    /// The disk.
    pub limits: &'a Limits,
    /// Current capacity (a disk may have grown since it was opened).
    pub capacity_bytes: u64,
    /// Feature bits that the guest acknowledged.
    pub features: u64,
}

/// A complete, checked request: its range is inside the disk, and direction and lengths are right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The operation.
    pub verb: Verb,
    /// Disk offset in bytes; 0 for flush and get-id.
    pub offset_bytes: u64,
    /// Length in bytes: of the data for read and write, of the disk range for discard and write-zeroes, of
    /// the answer for get-id (at most 20); 0 for flush.
    pub len_bytes: u64,
}

impl Request {
    /// Parses the first readable bytes of a chain (`head`: up to 32 of them, header plus one range). `Err` is
    /// the status that completes the request without touching the disk. If the chain has no writable byte,
    /// there is no place for a status, and the caller uses the chain with length 0.
    ///
    /// Header, data and status are byte streams: the header is the first 16 readable bytes, the status is the
    /// last writable byte, the data is everything between, however it is cut into descriptors (virtio 1.3
    /// §2.7.4). The specification leaves these cases open; their handling is stable:
    ///
    /// - A read, write, discard or write-zeroes of no sectors succeeds and does nothing, anywhere up to the
    ///   end of the disk.
    /// - Data of the wrong direction is an I/O error: readable data of a read or get-id; a write that has no
    ///   readable data but writable bytes beside the status. Writable bytes before the status of a write with
    ///   data are a wide status and left unchanged.
    /// - A flush ignores data and sector, and is served whether FLUSH was negotiated or not.
    /// - UNSUPP takes precedence over a range error: a range with a reserved flag is UNSUPP wherever it lies
    ///   (virtio 1.3 §5.2.6.2). On a read-only disk every change is an I/O error, whatever else is wrong with
    ///   it.
    // Always inlined, as are the steps below: returning a request through memory in pieces costs more than
    // parsing it.
    #[inline(always)]
    pub fn parse(head: &[u8], shape: Shape, gate: Gate<'_>) -> Result<Request, Status> {
        let data = Data::of(shape)?;
        let (header, rest) = head.split_first_chunk().ok_or(Status::IoErr)?;
        let header = Header::parse(header);
        match header.request_type {
            request_type::IN => Request::read(header.sector, data, gate),
            request_type::OUT => Request::write(header.sector, data, gate),
            request_type::FLUSH => Ok(Request::flush()),
            request_type::GET_ID => Request::get_id(data),
            request_type::DISCARD => Request::discard(rest, data, gate),
            request_type::WRITE_ZEROES => Request::write_zeroes(rest, data, gate),
            // Including SCSI commands and the legacy barrier bit, which are never served.
            _ => Err(Status::Unsupp),
        }
    }

    /// Returns the bytes that move between disk and guest memory; 0 for requests without data.
    #[inline]
    pub(crate) fn data_bytes(&self) -> u64 {
        match self.verb {
            Verb::Read | Verb::Write => self.len_bytes,
            Verb::Flush | Verb::GetId | Verb::Discard | Verb::WriteZeroes { .. } => 0,
        }
    }

    #[inline(always)]
    fn read(sector: u64, data: Data, gate: Gate<'_>) -> Result<Request, Status> {
        if data.readable_bytes != 0 {
            return Err(Status::IoErr);
        }
        Request::transfer(Verb::Read, sector, data.writable_bytes, gate)
    }

    #[inline(always)]
    fn write(sector: u64, data: Data, gate: Gate<'_>) -> Result<Request, Status> {
        if gate.limits.read_only || (data.readable_bytes == 0 && data.writable_bytes != 0) {
            return Err(Status::IoErr);
        }
        Request::transfer(Verb::Write, sector, data.readable_bytes, gate)
    }

    #[inline(always)]
    fn transfer(
        verb: Verb,
        sector: u64,
        len_bytes: u64,
        gate: Gate<'_>,
    ) -> Result<Request, Status> {
        if !len_bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(Status::IoErr);
        }
        Request::within(verb, sector, len_bytes, gate)
    }

    /// Makes every request with a range: the range is inside the disk, and nothing wraps. Sector 2^55 is byte 2^64: a shift would
    /// turn it into sector 0, which may hold a partition table.
    #[inline(always)]
    fn within(verb: Verb, sector: u64, len_bytes: u64, gate: Gate<'_>) -> Result<Request, Status> {
        let offset_bytes = sector.checked_mul(SECTOR_BYTES).ok_or(Status::IoErr)?;
        let end_bytes = offset_bytes.checked_add(len_bytes).ok_or(Status::IoErr)?;
        if end_bytes > gate.capacity_bytes {
            return Err(Status::IoErr);
        }
        Ok(Request {
            verb,
            offset_bytes,
            len_bytes,
        })
    }

    fn flush() -> Request {
        Request {
            verb: Verb::Flush,
            offset_bytes: 0,
            len_bytes: 0,
        }
    }

    /// Makes the request for the serial. A driver asks for exactly 20 bytes; with less room it gets the beginning.
    fn get_id(data: Data) -> Result<Request, Status> {
        if data.readable_bytes != 0 {
            return Err(Status::IoErr);
        }
        Ok(Request {
            verb: Verb::GetId,
            offset_bytes: 0,
            len_bytes: data.writable_bytes.min(ID_BYTES as u64),
        })
    }

    fn discard(rest: &[u8], data: Data, gate: Gate<'_>) -> Result<Request, Status> {
        if gate.limits.read_only {
            return Err(Status::IoErr);
        }
        if gate.features & feature::DISCARD == 0 {
            return Err(Status::Unsupp);
        }
        let range = Range::parse(rest, data)?;
        // UNMAP is a flag of write-zeroes only (virtio 1.3 §5.2.6.2).
        if range.flags != 0 {
            return Err(Status::Unsupp);
        }
        let request = range.request(Verb::Discard, Config::DISCARD_SECTORS_MAX, gate)?;
        // The device may ignore a discard (virtio 1.3 §5.2.6.2). Where no space can be given back, no byte is left to do.
        let len_bytes = if gate.limits.discard {
            request.len_bytes
        } else {
            0
        };
        Ok(Request {
            len_bytes,
            ..request
        })
    }

    fn write_zeroes(rest: &[u8], data: Data, gate: Gate<'_>) -> Result<Request, Status> {
        if gate.limits.read_only {
            return Err(Status::IoErr);
        }
        if gate.features & feature::WRITE_ZEROES == 0 {
            return Err(Status::Unsupp);
        }
        let range = Range::parse(rest, data)?;
        if range.flags & !RANGE_FLAG_UNMAP != 0 {
            return Err(Status::Unsupp);
        }
        // UNMAP only permits deallocation, so an operator's choice to keep space allocated takes precedence.
        let unmap = range.flags & RANGE_FLAG_UNMAP != 0 && gate.limits.discard;
        range.request(Verb::WriteZeroes { unmap }, Config::ZERO_SECTORS_MAX, gate)
    }
}

/// Data bytes of a chain in each direction, without header and status.
#[derive(Debug, Clone, Copy)]
struct Data {
    readable_bytes: u64,
    writable_bytes: u64,
}

impl Data {
    /// Refuses a chain without a whole header or a status, or of 4 GiB and more.
    #[inline]
    fn of(shape: Shape) -> Result<Data, Status> {
        if !shape.is_served() {
            return Err(Status::IoErr);
        }
        Ok(Data {
            readable_bytes: shape
                .readable_bytes
                .checked_sub(HEADER_BYTES as u64)
                .ok_or(Status::IoErr)?,
            writable_bytes: shape.writable_bytes.checked_sub(1).ok_or(Status::IoErr)?,
        })
    }
}

/// struct virtio_blk_req up to its data (virtio 1.3 §5.2.6).
#[derive(Debug, Clone, Copy)]
struct Header {
    request_type: u32,
    sector: u64,
}

impl Header {
    /// Reads the type and the sector. The second word is reserved and ignored.
    #[inline]
    fn parse(bytes: &[u8; HEADER_BYTES]) -> Header {
        let [a, b, c, d, _, _, _, _, sector @ ..] = *bytes;
        Header {
            request_type: u32::from_le_bytes([a, b, c, d]),
            sector: u64::from_le_bytes(sector),
        }
    }
}

/// struct virtio_blk_discard_write_zeroes (virtio 1.3 §5.2.6).
#[derive(Debug, Clone, Copy)]
struct Range {
    sector: u64,
    sectors: u32,
    flags: u32,
}

impl Range {
    /// Returns the one range that a request may have. No range, or a partial one, is malformed; several exceed the configuration
    /// space, so they are unsupported.
    fn parse(rest: &[u8], data: Data) -> Result<Range, Status> {
        const ONE: u64 = RANGE_BYTES as u64;
        match data.readable_bytes {
            0 => return Err(Status::IoErr),
            ONE => {}
            bytes if bytes.is_multiple_of(ONE) => return Err(Status::Unsupp),
            _ => return Err(Status::IoErr),
        }
        let (bytes, _) = rest
            .split_first_chunk::<RANGE_BYTES>()
            .ok_or(Status::IoErr)?;
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = *bytes;
        Ok(Range {
            sector: u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
            sectors: u32::from_le_bytes([n0, n1, n2, n3]),
            flags: u32::from_le_bytes(flags),
        })
    }

    /// Makes the request of a range. Alignment to the discard granularity is a hint to the guest and not required.
    fn request(self, verb: Verb, sectors_max: u32, gate: Gate<'_>) -> Result<Request, Status> {
        if self.sectors > sectors_max {
            return Err(Status::IoErr);
        }
        // Widened before the multiplication: the bytes of 2^23 sectors need more than 32 bits.
        let len_bytes = u64::from(self.sectors) * SECTOR_BYTES;
        Request::within(verb, self.sector, len_bytes, gate)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spec::feature::{DISCARD, WRITE_ZEROES};

    const CAPACITY: u64 = 1 << 40;
    const SECTORS: u64 = CAPACITY / SECTOR_BYTES;
    const OFFERED: u64 = DISCARD | WRITE_ZEROES;
    const MAX: u64 = u32::MAX as u64;
    /// Legacy types, which are never served.
    const SCSI: u32 = 2;
    const BARRIER: u32 = 1 << 31;

    fn limits() -> Limits {
        Limits {
            capacity_bytes: CAPACITY,
            block_bytes: 512,
            offset_align_bytes: 512,
            memory_align_bytes: 512,
            read_only: false,
            discard: true,
            discard_align_bytes: 512,
            rotational: false,
        }
    }

    fn header(request_type: u32, sector: u64) -> Vec<u8> {
        let mut head = request_type.to_le_bytes().to_vec();
        // Reserved: any value is accepted.
        head.extend(0xdead_beef_u32.to_le_bytes());
        head.extend(sector.to_le_bytes());
        head
    }

    fn with_range(request_type: u32, sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
        let mut head = header(request_type, 7);
        head.extend(sector.to_le_bytes());
        head.extend(sectors.to_le_bytes());
        head.extend(flags.to_le_bytes());
        head
    }

    fn shape(readable_bytes: u64, writable_bytes: u64) -> Shape {
        Shape {
            readable_bytes,
            writable_bytes,
        }
    }

    fn parse_on(
        limits: &Limits,
        features: u64,
        head: &[u8],
        readable_bytes: u64,
        writable_bytes: u64,
    ) -> Result<Request, Status> {
        let gate = Gate {
            limits,
            capacity_bytes: limits.capacity_bytes,
            features,
        };
        Request::parse(head, shape(readable_bytes, writable_bytes), gate)
    }

    fn parse(head: &[u8], readable_bytes: u64, writable_bytes: u64) -> Result<Request, Status> {
        parse_on(&limits(), OFFERED, head, readable_bytes, writable_bytes)
    }

    fn parse_range(head: &[u8]) -> Result<Request, Status> {
        parse(head, 32, 1)
    }

    fn ok(verb: Verb, sector: u64, len_bytes: u64) -> Result<Request, Status> {
        Ok(Request {
            verb,
            offset_bytes: sector * SECTOR_BYTES,
            len_bytes,
        })
    }

    const IOERR: Result<Request, Status> = Err(Status::IoErr);
    const UNSUPP: Result<Request, Status> = Err(Status::Unsupp);

    #[test]
    fn header_must_be_whole_and_a_status_there() {
        let head = header(request_type::IN, 0);
        // name, head bytes copied, readable, writable, refused
        let table = [
            ("header of 0 bytes", 0, 0, 513, true),
            ("header of 15 bytes", 15, 15, 513, true),
            ("header of 16 bytes", 16, 16, 513, false),
            ("fewer copied than promised", 15, 16, 513, true),
            ("no status", 16, 16, 0, true),
            ("nothing at all", 0, 0, 0, true),
        ];
        for (name, copied, readable, writable, refused) in table {
            let found = parse(&head[..copied], readable, writable);
            let expected = if refused {
                IOERR
            } else {
                ok(Verb::Read, 0, 512)
            };
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    #[allow(clippy::too_many_lines)] // a table
    fn reads_and_writes_take_what_lies_inside_the_disk() {
        const IN: u32 = request_type::IN;
        const OUT: u32 = request_type::OUT;
        let read = |sector, len| ok(Verb::Read, sector, len);
        let write = |sector, len| ok(Verb::Write, sector, len);
        // name, type, sector, readable data, writable data, expected
        let table = [
            ("read 4 KiB", IN, 8, 0, 4096, read(8, 4096)),
            (
                "read last sector",
                IN,
                SECTORS - 1,
                0,
                512,
                read(SECTORS - 1, 512),
            ),
            ("read 2 at last sector", IN, SECTORS - 1, 0, 1024, IOERR),
            ("read at the end", IN, SECTORS, 0, 512, IOERR),
            ("read 2^64-1", IN, u64::MAX, 0, 512, IOERR),
            ("read 2^55 wraps to 0", IN, 1 << 55, 0, 512, IOERR),
            (
                "read 2^55-1: the end wraps",
                IN,
                (1 << 55) - 1,
                0,
                512,
                IOERR,
            ),
            ("read nothing", IN, 3, 0, 0, read(3, 0)),
            (
                "read nothing at the end",
                IN,
                SECTORS,
                0,
                0,
                read(SECTORS, 0),
            ),
            ("read nothing beyond", IN, SECTORS + 1, 0, 0, IOERR),
            ("read nothing at 2^55", IN, 1 << 55, 0, 0, IOERR),
            ("read 1 byte", IN, 0, 0, 1, IOERR),
            ("read 513 bytes", IN, 0, 0, 513, IOERR),
            ("read with readable data", IN, 0, 512, 0, IOERR),
            ("read with a header of 17", IN, 0, 1, 512, IOERR),
            ("read 4 GiB", IN, 0, 0, MAX + 1, IOERR),
            ("read largest", IN, 0, 0, 0xffff_fe00, read(0, 0xffff_fe00)),
            ("write 4 KiB", OUT, 8, 4096, 0, write(8, 4096)),
            (
                "write last sector",
                OUT,
                SECTORS - 1,
                512,
                0,
                write(SECTORS - 1, 512),
            ),
            ("write 2 at last sector", OUT, SECTORS - 1, 1024, 0, IOERR),
            ("write 2^55 wraps to 0", OUT, 1 << 55, 512, 0, IOERR),
            ("write 2^64-1", OUT, u64::MAX, 512, 0, IOERR),
            ("write nothing", OUT, 3, 0, 0, write(3, 0)),
            ("write 1 byte", OUT, 0, 1, 0, IOERR),
            ("write 513 bytes", OUT, 0, 513, 0, IOERR),
            ("write with writable data", OUT, 0, 0, 512, IOERR),
            ("write with status of 2", OUT, 0, 512, 1, write(0, 512)),
            (
                "write with status of 4096",
                OUT,
                0,
                512,
                4095,
                write(0, 512),
            ),
        ];
        for (name, kind, sector, readable, writable, expected) in table {
            let found = parse(&header(kind, sector), 16 + readable, 1 + writable);
            assert_eq!(found, expected, "{name}");
        }
    }

    /// virtio 1.3 §2.7.5: no chain is longer than 2^32 bytes; ours must be shorter.
    #[test]
    fn chains_of_4_gib_are_refused() {
        let table = [
            ("2^32 - 1", 16, MAX - 16, true),
            ("2^32", 16, MAX - 15, false),
            ("readable half", MAX - 1, 2, false),
            ("sum wraps", u64::MAX, 1, false),
            ("both huge", u64::MAX, u64::MAX, false),
        ];
        for (name, readable, writable, taken) in table {
            let found = parse(&header(request_type::FLUSH, 0), readable, writable);
            let expected = if taken { ok(Verb::Flush, 0, 0) } else { IOERR };
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn flush_ignores_data_and_sector() {
        for (sector, readable, writable) in
            [(0, 16, 1), (u64::MAX, 16, 1), (0, 17, 1), (0, 16, 513)]
        {
            let found = parse_on(
                &limits(),
                0,
                &header(request_type::FLUSH, sector),
                readable,
                writable,
            );
            assert_eq!(found, ok(Verb::Flush, 0, 0));
        }
    }

    #[test]
    fn get_id_is_at_most_20_bytes() {
        for (room, len) in [(0, 0), (1, 1), (19, 19), (20, 20), (21, 20), (4096, 20)] {
            let found = parse(&header(request_type::GET_ID, 99), 16, room + 1);
            assert_eq!(found, ok(Verb::GetId, 0, len), "room {room}");
        }
        let wrong_direction = parse(&header(request_type::GET_ID, 0), 36, 1);
        assert_eq!(wrong_direction, IOERR);
    }

    #[test]
    fn unknown_types_are_unsupp() {
        let known = [0, 1, 4, 8, 11, 13];
        let others = (0..64)
            .filter(|request_type| !known.contains(request_type))
            .chain([SCSI | BARRIER, BARRIER, 1 | BARRIER, 13 | BARRIER, u32::MAX]);
        for request_type in others {
            for (readable, writable) in [(16, 1), (16, 513), (528, 1), (32, 1)] {
                let found = parse(&with_range(request_type, 0, 1, 0), readable, writable);
                assert_eq!(found, UNSUPP, "type {request_type:#x}");
            }
        }
    }

    /// virtio 1.3 §5.2.6.2.
    #[test]
    fn discard_and_write_zeroes_take_one_range() {
        const D: u32 = request_type::DISCARD;
        const Z: u32 = request_type::WRITE_ZEROES;
        let discard = |sector, sectors| ok(Verb::Discard, sector, sectors * 512);
        let zero = |sector, sectors, unmap| ok(Verb::WriteZeroes { unmap }, sector, sectors * 512);
        let d_max = Config::DISCARD_SECTORS_MAX;
        let z_max = Config::ZERO_SECTORS_MAX;
        // name, type, sector, sectors, flags, expected
        let table = [
            ("discard", D, 8, 16, 0, discard(8, 16)),
            ("discard, not aligned", D, 3, 5, 0, discard(3, 5)),
            ("discard nothing", D, 3, 0, 0, discard(3, 0)),
            ("discard nothing beyond", D, SECTORS + 1, 0, 0, IOERR),
            ("discard most", D, 0, d_max, 0, discard(0, u64::from(d_max))),
            ("discard too much", D, 0, d_max + 1, 0, IOERR),
            ("discard 2^32-1", D, 0, u32::MAX, 0, IOERR),
            (
                "discard last",
                D,
                SECTORS - 1,
                1,
                0,
                discard(SECTORS - 1, 1),
            ),
            ("discard beyond", D, SECTORS - 1, 2, 0, IOERR),
            ("discard 2^55", D, 1 << 55, 1, 0, IOERR),
            ("discard 2^64-1", D, u64::MAX, 1, 0, IOERR),
            ("discard with unmap", D, 0, 1, 1, UNSUPP),
            ("discard, reserved flag", D, 0, 1, 2, UNSUPP),
            ("discard, top flag", D, 0, 1, 1 << 31, UNSUPP),
            ("discard, flag and beyond", D, u64::MAX, 1, 2, UNSUPP),
            ("discard, flag and too much", D, 0, u32::MAX, 2, UNSUPP),
            ("zero", Z, 8, 16, 0, zero(8, 16, false)),
            ("zero with unmap", Z, 8, 16, 1, zero(8, 16, true)),
            ("zero nothing", Z, 8, 0, 0, zero(8, 0, false)),
            (
                "zero most",
                Z,
                0,
                z_max,
                0,
                zero(0, u64::from(z_max), false),
            ),
            ("zero too much", Z, 0, z_max + 1, 0, IOERR),
            ("zero 2^23: bytes need 33 bits", Z, 0, 1 << 23, 0, IOERR),
            ("zero beyond", Z, SECTORS - 1, 2, 1, IOERR),
            ("zero 2^55", Z, 1 << 55, 1, 0, IOERR),
            ("zero, reserved flag", Z, 0, 1, 2, UNSUPP),
            ("zero, unmap and reserved", Z, 0, 1, 3, UNSUPP),
            ("zero, flag and beyond", Z, u64::MAX, 1, 1 << 31, UNSUPP),
        ];
        for (name, kind, sector, sectors, flags, expected) in table {
            let found = parse_range(&with_range(kind, sector, sectors, flags));
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn ranges_must_be_whole_and_alone() {
        for kind in [request_type::DISCARD, request_type::WRITE_ZEROES] {
            let head = with_range(kind, 0, 8, 0);
            // payload, copied, taken
            let table = [
                (0, 16, IOERR),
                (1, 17, IOERR),
                (15, 31, IOERR),
                (16, 32, parse_range(&head)),
                (16, 31, IOERR),
                (17, 32, IOERR),
                (32, 32, UNSUPP),
                (33, 32, IOERR),
                (256 * 16, 32, UNSUPP),
            ];
            assert!(parse_range(&head).is_ok());
            for (payload, copied, expected) in table {
                let found = parse(&head[..copied], 16 + payload, 1);
                assert_eq!(
                    found, expected,
                    "type {kind}, {payload} bytes, {copied} copied"
                );
            }
            // A wide status is not data.
            assert_eq!(parse(&head, 32, 4096), parse_range(&head));
        }
    }

    #[test]
    fn discard_and_write_zeroes_need_their_feature_and_do_what_the_disk_can() {
        let discard = with_range(request_type::DISCARD, 0, 8, 0);
        let zero = with_range(request_type::WRITE_ZEROES, 0, 8, 1);
        let zeroed = |unmap| ok(Verb::WriteZeroes { unmap }, 0, 4096);
        // limits.discard, features; of a discard, of a write-zeroes with unmap
        let table = [
            (true, OFFERED, ok(Verb::Discard, 0, 4096), zeroed(true)),
            (true, DISCARD, ok(Verb::Discard, 0, 4096), UNSUPP),
            (true, WRITE_ZEROES, UNSUPP, zeroed(true)),
            (true, 0, UNSUPP, UNSUPP),
            (false, OFFERED, ok(Verb::Discard, 0, 0), zeroed(false)),
            (false, DISCARD, ok(Verb::Discard, 0, 0), UNSUPP),
            (false, WRITE_ZEROES, UNSUPP, zeroed(false)),
        ];
        for (can, features, of_discard, of_zero) in table {
            let limits = Limits {
                discard: can,
                ..limits()
            };
            let found = parse_on(&limits, features, &discard, 32, 1);
            assert_eq!(found, of_discard, "{can} {features:#x}");
            let found = parse_on(&limits, features, &zero, 32, 1);
            assert_eq!(found, of_zero, "{can} {features:#x}");
        }
    }

    /// virtio 1.3 §5.2.6.2: IOERR, and nothing is written.
    #[test]
    fn a_read_only_disk_is_only_read() {
        let limits = Limits {
            read_only: true,
            ..limits()
        };
        let parse =
            |head: &[u8], readable, writable| parse_on(&limits, OFFERED, head, readable, writable);
        assert_eq!(parse(&header(request_type::OUT, 0), 528, 1), IOERR);
        assert_eq!(parse(&header(request_type::OUT, 0), 16, 1), IOERR);
        for kind in [request_type::DISCARD, request_type::WRITE_ZEROES] {
            for flags in [0, 1, 2] {
                assert_eq!(parse(&with_range(kind, 0, 8, flags), 32, 1), IOERR);
            }
        }
        let read = parse(&header(request_type::IN, 1), 16, 513);
        assert_eq!(read, ok(Verb::Read, 1, 512));
        let flush = parse(&header(request_type::FLUSH, 0), 16, 1);
        assert_eq!(flush, ok(Verb::Flush, 0, 0));
        let id = parse(&header(request_type::GET_ID, 0), 16, 21);
        assert_eq!(id, ok(Verb::GetId, 0, 20));
    }

    #[test]
    fn capacity_is_that_of_the_gate() {
        let limits = Limits {
            capacity_bytes: 512,
            ..limits()
        };
        for (capacity_bytes, expected) in
            [(1024, ok(Verb::Read, 1, 512)), (1023, IOERR), (0, IOERR)]
        {
            let gate = Gate {
                limits: &limits,
                capacity_bytes,
                features: 0,
            };
            let found = Request::parse(&header(request_type::IN, 1), shape(16, 513), gate);
            assert_eq!(found, expected, "{capacity_bytes}");
        }
    }

    /// Values near limits, and any others.
    fn edgy() -> impl Strategy<Value = u64> {
        prop_oneof![
            0..40u64,
            (0..64u32, -2i64..3).prop_map(|(bit, by)| (1u64 << bit).wrapping_add_signed(by)),
            (-2i64..3).prop_map(|by| SECTORS.wrapping_add_signed(by)),
            any::<u64>(),
        ]
    }

    proptest! {
        /// Any input: no panic, and an accepted request satisfies every rule that the rest of the daemon relies on.
        #[test]
        fn a_request_is_whole_or_refused(
            request_type in prop_oneof![0..16u32, any::<u32>()],
            sector in edgy(),
            range in (edgy(), edgy(), edgy()),
            head_bytes in 0..=32usize,
            readable in prop_oneof![0..64u64, (0..40u64).prop_map(|n| 16 + n * 512), edgy()],
            writable in prop_oneof![0..64u64, (0..40u64).prop_map(|n| 1 + n * 512), edgy()],
            (read_only, discard) in any::<(bool, bool)>(),
            features in any::<u64>(),
            capacity_bytes in edgy(),
        ) {
            let mut head = header(request_type, sector);
            head.extend(range.0.to_le_bytes());
            head.extend((range.1 as u32).to_le_bytes());
            head.extend((range.2 as u32).to_le_bytes());
            head.truncate(head_bytes);
            let limits = Limits { read_only, discard, ..limits() };
            let gate = Gate { limits: &limits, capacity_bytes, features };
            let Ok(request) = Request::parse(&head, shape(readable, writable), gate) else {
                return Ok(());
            };
            prop_assert!(readable >= 16 && writable >= 1 && head_bytes >= 16);
            prop_assert!(request.len_bytes < u64::from(u32::MAX));
            let reads = matches!(request.verb, Verb::Read | Verb::Flush | Verb::GetId);
            prop_assert!(reads || !read_only);
            match request.verb {
                Verb::Flush => prop_assert_eq!((request.offset_bytes, request.len_bytes), (0, 0)),
                Verb::GetId => prop_assert!(request.len_bytes <= 20 && request.len_bytes < writable),
                Verb::Read => prop_assert_eq!(request.len_bytes, writable - 1),
                Verb::Write => prop_assert_eq!(request.len_bytes, readable - 16),
                Verb::Discard => prop_assert!(features & DISCARD != 0 && (discard || request.len_bytes == 0)),
                Verb::WriteZeroes { unmap } => {
                    prop_assert!(features & WRITE_ZEROES != 0 && (discard || !unmap));
                }
            }
            if !matches!(request.verb, Verb::Flush | Verb::GetId) {
                prop_assert_eq!(request.offset_bytes % SECTOR_BYTES, 0);
                prop_assert_eq!(request.len_bytes % SECTOR_BYTES, 0);
                let end = u128::from(request.offset_bytes) + u128::from(request.len_bytes);
                prop_assert!(end <= u128::from(capacity_bytes));
                let first = if request.data_bytes() > 0 { sector } else { request.offset_bytes / 512 };
                prop_assert_eq!(u128::from(request.offset_bytes), u128::from(first) * 512);
            }
        }
    }
}
