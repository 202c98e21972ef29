//! A guest that outlives its daemons: requests of every kind are in flight on every vring when one is killed, and the next one
//! has to answer them. The contents of each sector are known, because no two requests in flight touch the same sector.

mod sectors;

use std::time::{Duration, Instant};

use cleave_blk::spec::{request_type, status};
use cleave_client::{Buffer, Client};
use cleave_states::Random;

use crate::TIMEOUT;
use sectors::{Change, DISK_BYTES, Range, SECTOR, Sectors, contents};

/// Size of a survivor's disk.
pub const SURVIVOR_DISK_BYTES: u64 = DISK_BYTES;

/// Most requests in flight on a vring.
const SLOTS: usize = 128;
/// Bytes of a slot: header, status and indirect table, and its data.
const CONTROL_BYTES: u64 = 256;
const STATUS_AT: u64 = 16;
const TABLE_AT: u64 = 64;
const DATA_BYTES: u64 = 64 << 10;
/// Most ranges that are read back after each kill.
const VERIFIED: usize = 24;

/// A request in flight.
#[derive(Debug, Clone, Copy)]
struct InFlight {
    head: u16,
    kind: u32,
    /// Its sectors; empty for a flush.
    range: Option<Range>,
    change: Change,
}

/// Request slots of one vring.
struct Vring {
    control: u64,
    data: u64,
    slots: Vec<Option<InFlight>>,
}

/// The driver of the guest, and what its disk must have.
pub struct Survivor {
    disk: Sectors,
    vrings: Vec<Vring>,
    /// Sectors that were changed since they were last read back.
    touched: Vec<Range>,
    /// Number of requests that were answered.
    pub answered: u64,
    /// Bytes that were read and found right.
    pub read_bytes: u64,
}

impl Survivor {
    /// Starts with a disk of zeroes and nothing in flight.
    pub fn new(client: &mut Client) -> Survivor {
        let count = client.queue_count();
        let place = |index| {
            // Single reads use the beginning of the area.
            let control = client.queue(index).data_area().0 + (2 << 20);
            Vring {
                control,
                data: control + CONTROL_BYTES * SLOTS as u64,
                slots: vec![None; SLOTS],
            }
        };
        let vrings = (0..count).map(place).collect();
        Survivor {
            disk: Sectors::new(),
            vrings,
            touched: Vec::new(),
            answered: 0,
            read_bytes: 0,
        }
    }

    /// Number of requests in flight.
    pub fn out(&self) -> u64 {
        let all = self.vrings.iter().flat_map(|vring| &vring.slots);
        all.flatten().count() as u64
    }

    /// Keeps the daemon busy for this long.
    pub fn work(&mut self, client: &mut Client, random: &mut Random, time: Duration) {
        let end = Instant::now() + time;
        loop {
            self.submit(client, random);
            loop {
                self.collect(client);
                if Instant::now() >= end {
                    return;
                }
                if random.below(8) == 0 {
                    break;
                }
            }
        }
    }

    /// Makes a batch of random size available on some vring.
    pub fn submit(&mut self, client: &mut Client, random: &mut Random) {
        let index = random.below(self.vrings.len() as u64) as usize;
        let batch = 1 << random.below(8);
        let mut kick = false;
        for slot in 0..SLOTS {
            if self.vrings[index].slots[slot].is_some() {
                continue;
            }
            if kick && random.below(batch) == 0 {
                break;
            }
            kick |= self.add(client, random, index, slot);
        }
        let queue = client.queue(index);
        if kick && queue.ring().publish() {
            queue.ring_kick();
        }
    }

    /// Puts one request into the ring; `false`: its sectors are in use.
    fn add(&mut self, client: &mut Client, random: &mut Random, index: usize, slot: usize) -> bool {
        let sectors = DISK_BYTES / SECTOR as u64;
        // Multiples of the block size of direct I/O, most of them small.
        let count = 8 << random.below(5).saturating_sub(random.below(4));
        let near = (random.below(sectors) & !7) as usize;
        let (kind, change) = match random.below(20) {
            0 => (request_type::FLUSH, Change::Nothing),
            1 => (request_type::DISCARD, Change::Discard),
            2 => (request_type::WRITE_ZEROES, Change::Zero),
            3..=6 => (request_type::IN, Change::Nothing),
            _ => (request_type::OUT, self.disk.stamp()),
        };
        let range = match kind {
            request_type::FLUSH => None,
            _ => match self.disk.take(near, count) {
                Some(range) => Some(range),
                None => return false,
            },
        };
        let vring = &mut self.vrings[index];
        let control = vring.control + CONTROL_BYTES * slot as u64;
        let data = vring.data + DATA_BYTES * slot as u64;
        let memory = client.memory().clone();
        let first = range.map_or(0, |range| range.first as u64);
        let mut header = [0xff; 17];
        header[..8].copy_from_slice(&u64::from(kind).to_le_bytes());
        header[8..16].fill(0);
        let mut buffers = vec![Buffer::readable(control, 16)];
        if let Some(range) = range {
            let bytes = (range.count * SECTOR) as u32;
            match kind {
                request_type::OUT => {
                    memory.write(data, &contents(change, range));
                    buffers.push(Buffer::readable(data, bytes));
                }
                request_type::IN => {
                    memory.fill(data, bytes as usize, 0xee);
                    buffers.push(Buffer::writable(data, bytes));
                }
                _ => {
                    let mut what = [0; 16];
                    what[..8].copy_from_slice(&first.to_le_bytes());
                    what[8..12].copy_from_slice(&(range.count as u32).to_le_bytes());
                    memory.write(data, &what);
                    buffers.push(Buffer::readable(data, 16));
                }
            }
            if matches!(kind, request_type::IN | request_type::OUT) {
                header[8..16].copy_from_slice(&first.to_le_bytes());
            }
        }
        memory.write(control, &header);
        buffers.push(Buffer::writable(control + STATUS_AT, 1));
        let ring = client.queue(index).ring();
        let head = ring.add_indirect(control + TABLE_AT, &buffers).unwrap();
        vring.slots[slot] = Some(InFlight {
            head,
            kind,
            range,
            change,
        });
        true
    }

    /// Handles the completions that have arrived.
    fn collect(&mut self, client: &mut Client) {
        for index in 0..self.vrings.len() {
            while let Some(used) = client.queue(index).ring().reap() {
                self.end(client, index, used.head);
            }
        }
    }

    /// Checks one completion: it must belong to a request in flight and have the right result.
    fn end(&mut self, client: &Client, index: usize, head: u32) {
        let vring = &mut self.vrings[index];
        let waits = |slot: &Option<InFlight>| slot.is_some_and(|out| u32::from(out.head) == head);
        let Some(slot) = vring.slots.iter().position(waits) else {
            panic!("vring {index}: head {head} completed, but it is not in flight");
        };
        let out = vring.slots[slot].take().unwrap();
        let control = vring.control + CONTROL_BYTES * slot as u64;
        let data = vring.data + DATA_BYTES * slot as u64;
        let result = client.memory().bytes(control + STATUS_AT, 1)[0];
        assert_eq!(result, status::OK, "vring {index}: {out:?}");
        if let Some(range) = out.range {
            if out.kind == request_type::IN {
                let bytes = client.memory().bytes(data, range.count * SECTOR);
                if let Err(wrong) = self.disk.check(range, &bytes) {
                    panic!("{out:?}: {wrong}");
                }
                self.read_bytes += bytes.len() as u64;
            } else {
                self.touched.push(range);
            }
            self.disk.ended(range, out.change);
        }
        self.answered += 1;
    }

    /// Waits for any completion.
    pub fn await_one(&mut self, client: &mut Client) {
        let (before, end) = (self.answered, Instant::now() + TIMEOUT);
        while self.answered == before {
            self.collect(client);
            assert!(
                Instant::now() < end,
                "{} requests did not complete",
                self.out()
            );
        }
    }

    /// Waits for all completions, asleep on the call or polling.
    pub fn await_all(&mut self, client: &mut Client, sleeps: bool) {
        let end = Instant::now() + TIMEOUT;
        for index in 0..self.vrings.len() {
            loop {
                let left = self.vrings[index].slots.iter().flatten().count();
                if left == 0 {
                    break;
                }
                match sleeps {
                    true => match client.queue(index).wait_used() {
                        Ok(used) => self.end(client, index, used.head),
                        Err(error) => panic!("vring {index}: {left} are lost: {error}"),
                    },
                    false => self.collect(client),
                }
                assert!(Instant::now() < end, "vring {index}: {left} are lost");
            }
        }
        // A duplicate completion would arrive about now.
        self.collect(client);
    }

    /// Reads back the changed ranges, or everything. Nothing is in flight.
    pub fn verify(&mut self, client: &mut Client, whole: bool) {
        let piece = 1 << 20;
        let mut ranges: Vec<Range> = match whole {
            true => (0..DISK_BYTES as usize / piece)
                .map(|at| Range {
                    first: at * piece / SECTOR,
                    count: piece / SECTOR,
                })
                .collect(),
            false => std::mem::take(&mut self.touched),
        };
        self.touched.clear();
        if !whole {
            // The last ranges are those that were in flight.
            let first = ranges.len().saturating_sub(VERIFIED);
            ranges.drain(..first);
        }
        for range in ranges {
            let mut bytes = vec![0; range.count * SECTOR];
            let read = client
                .queue(0)
                .read((range.first * SECTOR) as u64, &mut bytes);
            read.unwrap();
            if let Err(wrong) = self.disk.check(range, &bytes) {
                panic!("read back: {wrong}");
            }
            self.read_bytes += bytes.len() as u64;
        }
    }
}
