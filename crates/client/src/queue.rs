//! One vring as a driver uses it: requests one at a time.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_blk::spec::{HEADER_BYTES, ID_BYTES, SECTOR_BYTES, request_type, status};
use rustix::event::{EventfdFlags, eventfd};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::socket::readable;
use crate::{Buffer, DriverRing, Error, GuestMemory, Used};

/// Filler for guest memory before a read, so that bytes which the read leaves alone are noticed.
const UNREAD: u8 = 0xee;

/// How to wait for completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReapWait {
    /// Sleep on the call descriptor.
    Sleep,
    /// Poll the used ring.
    Poll,
}

/// How to make a kick or call descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notifier {
    /// A non-blocking eventfd, as QEMU makes them. The flag belongs to the open file, so it applies to the daemon
    /// too.
    NonBlocking,
    /// A blocking eventfd, as other frontends make them.
    Blocking,
    /// A pipe. User-mode Linux takes one for its calls, because eventfds raise no SIGIO.
    Pipe,
    /// None: the other side polls.
    Absent,
}

/// A descriptor that one side writes and the other reads.
#[derive(Debug)]
pub(crate) struct Ends {
    pub(crate) reader: OwnedFd,
    /// `None` if both ends are one descriptor.
    writer: Option<OwnedFd>,
}

impl Ends {
    pub(crate) fn writer(&self) -> &OwnedFd {
        self.writer.as_ref().unwrap_or(&self.reader)
    }
}

impl Notifier {
    pub(crate) fn make(self) -> Result<Option<Ends>, Error> {
        let event = |flags| {
            eventfd(0, flags | EventfdFlags::CLOEXEC).map(|reader| Ends {
                reader,
                writer: None,
            })
        };
        let made = match self {
            Notifier::NonBlocking => event(EventfdFlags::NONBLOCK),
            Notifier::Blocking => event(EventfdFlags::empty()),
            Notifier::Pipe => pipe_with(PipeFlags::CLOEXEC).map(|(reader, writer)| Ends {
                reader,
                writer: Some(writer),
            }),
            Notifier::Absent => return Ok(None),
        };
        made.map(Some)
            .map_err(|error| Error::io("make an eventfd or a pipe")(error.into()))
    }
}

/// A request with its data range in guest memory.
#[derive(Debug, Clone, Copy)]
pub struct DriverRequest {
    /// Type (virtio 1.3 §5.2.6).
    pub kind: u32,
    /// First sector.
    pub sector: u64,
    /// Data in guest memory: address and length.
    pub data: (u64, u32),
    /// True if the device writes the data.
    pub writable: bool,
}

/// Result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestResult {
    /// Status byte; 0xff where the device wrote none.
    pub status: u8,
    /// Bytes that the device reports as written.
    pub used_bytes: u32,
}

/// Guest memory of a queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arena {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    /// One block of [`CONTROL_BYTES`] per ring entry: header, status, indirect table.
    pub(crate) control: u64,
}

/// Bytes of control block per ring entry: a cache line for header and status, one for an indirect table.
pub(crate) const CONTROL_BYTES: u64 = 128;
/// Offset of the status byte in a control block.
pub(crate) const STATUS_AT: u64 = 16;
/// Offset of the indirect table in a control block.
pub(crate) const TABLE_AT: u64 = 64;

/// The number and the descriptors of a vring, of which a daemon is told. The addresses are those of its ring.
#[derive(Debug)]
pub(crate) struct VringSetup {
    pub(crate) index: u16,
    pub(crate) kick: Option<Ends>,
    pub(crate) call: Option<Ends>,
    pub(crate) err: OwnedFd,
}

/// One vring, its kick and its call. The methods here run one request at a time; `run` keeps several in flight.
#[derive(Debug)]
pub struct Queue {
    /// Shared with whoever connects again while the vring is driven.
    pub(crate) vring: Arc<VringSetup>,
    pub(crate) ring: DriverRing,
    pub(crate) wait: ReapWait,
    pub(crate) timeout: Duration,
    pub(crate) arena: Arena,
    pub(crate) indirect: bool,
}

impl Queue {
    /// Returns its number.
    pub fn index(&self) -> u16 {
        self.vring.index
    }

    /// Returns the ring, for chains by hand.
    pub fn ring(&mut self) -> &mut DriverRing {
        &mut self.ring
    }

    /// Returns the guest's memory.
    pub fn memory(&self) -> Arc<GuestMemory> {
        Arc::clone(self.ring.memory())
    }

    /// Returns guest address and length of this queue's data area; the requests here use its start.
    pub fn data_area(&self) -> (u64, u64) {
        (self.arena.addr, self.arena.len)
    }

    /// Returns a duplicate of the daemon's end of the kick.
    pub fn kick_descriptor(&self) -> Option<OwnedFd> {
        self.vring.kick.as_ref()?.reader.try_clone().ok()
    }

    /// Returns a duplicate of the daemon's end of the call.
    pub fn call_descriptor(&self) -> Option<OwnedFd> {
        self.vring.call.as_ref()?.writer().try_clone().ok()
    }

    /// Sets the time limit for a completion.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Reads into `out`. Checks status and used length. Guest memory is filled with `UNREAD` first, so that data of
    /// an earlier write is not mistaken for the result.
    pub fn read(&mut self, offset_bytes: u64, out: &mut [u8]) -> Result<(), Error> {
        let step = self.step_bytes();
        for (index, part) in out.chunks_mut(step).enumerate() {
            let sector = (offset_bytes + (index * step) as u64) / SECTOR_BYTES;
            self.ring.memory().fill(self.arena.addr, part.len(), UNREAD);
            self.transfer(request_type::IN, sector, part.len(), true)?;
            self.ring.memory().read(self.arena.addr, part);
        }
        Ok(())
    }

    /// Writes `bytes`.
    pub fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<(), Error> {
        let step = self.step_bytes();
        for (index, part) in bytes.chunks(step).enumerate() {
            let sector = (offset_bytes + (index * step) as u64) / SECTOR_BYTES;
            self.ring.memory().write(self.arena.addr, part);
            self.transfer(request_type::OUT, sector, part.len(), false)?;
        }
        Ok(())
    }

    /// Makes completed writes durable.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.transfer(request_type::FLUSH, 0, 0, false)
    }

    /// Discards a range.
    pub fn discard(&mut self, offset_bytes: u64, len_bytes: u64) -> Result<(), Error> {
        self.range(request_type::DISCARD, offset_bytes, len_bytes, 0)
    }

    /// Zeroes a range; `unmap`: the disk may deallocate it.
    pub fn write_zeroes(&mut self, offset: u64, len: u64, unmap: bool) -> Result<(), Error> {
        self.range(request_type::WRITE_ZEROES, offset, len, unmap.into())
    }

    /// Returns the serial, without its padding.
    pub fn get_id(&mut self) -> Result<Vec<u8>, Error> {
        self.ring.memory().fill(self.arena.addr, ID_BYTES, UNREAD);
        self.transfer(request_type::GET_ID, 0, ID_BYTES, true)?;
        let mut id = self.ring.memory().bytes(self.arena.addr, ID_BYTES);
        id.truncate(id.iter().position(|byte| *byte == 0).unwrap_or(ID_BYTES));
        Ok(id)
    }

    /// Runs one request in the usual layout (header, data, status) and returns its result.
    pub fn execute(&mut self, request: &DriverRequest) -> Result<RequestResult, Error> {
        let (header, status_addr) = (self.arena.control, self.arena.control + STATUS_AT);
        self.write_header(request.kind, request.sector);
        let (addr, len) = request.data;
        let data = Buffer {
            addr,
            len,
            writable: request.writable,
        };
        let all = [
            Buffer::readable(header, HEADER_BYTES as u32),
            data,
            Buffer::writable(status_addr, 1),
        ];
        let without = [all[0], all[2]];
        let used = self.chain(if len > 0 { &all } else { &without })?;
        let status = self.ring.memory().bytes(status_addr, 1)[0];
        Ok(RequestResult {
            status,
            used_bytes: used.len,
        })
    }

    /// Writes the header of the first control block and resets its status byte.
    pub fn write_header(&self, kind: u32, sector: u64) {
        let mut block = [0xff; HEADER_BYTES + 1];
        block[..HEADER_BYTES].copy_from_slice(&header(kind, sector));
        self.ring.memory().write(self.arena.control, &block);
    }

    /// Returns the guest addresses of the header and the status byte of the first control block.
    pub fn control(&self) -> (u64, u64) {
        (self.arena.control, self.arena.control + STATUS_AT)
    }

    /// Runs a single chain and returns its used entry.
    pub fn chain(&mut self, buffers: &[Buffer]) -> Result<Used, Error> {
        let head = self.ring.add(buffers).ok_or(Error::Full)?;
        if self.ring.publish() {
            self.ring_kick();
        }
        let used = self.wait_used()?;
        if used.head != u32::from(head) {
            return Err(Error::Spurious { head: used.head });
        }
        Ok(used)
    }

    /// Serves a chain as `chain` does, through an indirect table at `table`.
    pub fn chain_through(&mut self, table: u64, buffers: &[Buffer]) -> Result<Used, Error> {
        self.ring.add_indirect(table, buffers).ok_or(Error::Full)?;
        if self.ring.publish() {
            self.ring_kick();
        }
        self.wait_used()
    }

    /// Waits for the next used entry, asleep or polling as configured.
    pub fn wait_used(&mut self) -> Result<Used, Error> {
        let deadline = Instant::now() + self.timeout;
        loop {
            if let Some(used) = self.ring.reap() {
                return Ok(used);
            }
            self.wait_some(deadline)?;
        }
    }

    /// Waits until used entries may have arrived, at most until the deadline.
    pub(crate) fn wait_some(&mut self, deadline: Instant) -> Result<(), Error> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::TimedOut {
                what: "a request",
                after: self.timeout,
            });
        }
        match self.wait {
            ReapWait::Poll => {
                self.ring.disarm();
                for _ in 0..4096 {
                    if self.ring.has_used() {
                        return Ok(());
                    }
                    std::hint::spin_loop();
                }
            }
            ReapWait::Sleep => {
                if !self.ring.arm() {
                    self.sleep(left);
                }
            }
        }
        Ok(())
    }

    /// Sleeps on the call descriptor; without one, sleeps briefly.
    pub(crate) fn sleep(&self, time: Duration) -> bool {
        let Some(call) = &self.vring.call else {
            std::thread::sleep(time.min(Duration::from_micros(50)));
            return false;
        };
        let woken = readable(call.reader.as_fd(), time);
        if woken {
            drain(&call.reader);
        }
        woken
    }

    /// Returns true if the daemon signals this vring's err descriptor in time.
    pub fn err_signalled(&self, time: Duration) -> bool {
        let signalled = readable(self.vring.err.as_fd(), time);
        if signalled {
            drain(&self.vring.err);
        }
        signalled
    }

    /// Returns true if the daemon has called, and consumes the call.
    pub fn called(&self, time: Duration) -> bool {
        match &self.vring.call {
            Some(call) if readable(call.reader.as_fd(), time) => {
                drain(&call.reader);
                true
            }
            _ => false,
        }
    }

    /// Kicks even if the daemon did not ask for it.
    pub fn ring_kick(&self) {
        if let Some(kick) = &self.vring.kick {
            // A non-blocking eventfd with a full counter has a kick pending already.
            let _ = rustix::io::write(kick.writer(), &1u64.to_ne_bytes());
        }
    }

    fn step_bytes(&self) -> usize {
        self.arena.len.min(1 << 20) as usize
    }

    fn transfer(
        &mut self,
        kind: u32,
        sector: u64,
        len: usize,
        writable: bool,
    ) -> Result<(), Error> {
        let data = (self.arena.addr, len as u32);
        let done = self.execute(&DriverRequest {
            kind,
            sector,
            data,
            writable,
        })?;
        let wanted = if writable { len as u32 + 1 } else { 1 };
        check(kind, sector, done, wanted)
    }

    fn range(&mut self, kind: u32, offset: u64, len: u64, flags: u32) -> Result<(), Error> {
        let sector = offset / SECTOR_BYTES;
        let segment = range(sector, (len / SECTOR_BYTES) as u32, flags);
        self.ring.memory().write(self.arena.addr, &segment);
        let request = DriverRequest {
            kind,
            sector: 0,
            data: (self.arena.addr, 16),
            writable: false,
        };
        let done = self.execute(&request)?;
        check(kind, sector, done, 1)
    }
}

/// Returns the header of a request (virtio 1.3 §5.2.6).
pub fn header(kind: u32, sector: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[0..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..16].copy_from_slice(&sector.to_le_bytes());
    bytes
}

/// Encodes one discard or write-zeroes range (virtio 1.3 §5.2.6).
pub fn range(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[0..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..16].copy_from_slice(&flags.to_le_bytes());
    bytes
}

fn check(kind: u32, sector: u64, done: RequestResult, wanted: u32) -> Result<(), Error> {
    if done.status != status::OK {
        return Err(Error::Status {
            kind,
            sector,
            status: done.status,
        });
    }
    if done.used_bytes != wanted {
        return Err(Error::UsedLength {
            kind,
            sector,
            found: done.used_bytes,
            wanted,
        });
    }
    Ok(())
}

/// Reads the count of an eventfd, or the contents of a pipe. It was readable, so this does not block even though the
/// daemon shares the flags.
fn drain(fd: &OwnedFd) {
    let mut taken = [0; 4096];
    let _ = rustix::io::read(fd, &mut taken);
}
