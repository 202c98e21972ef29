//! Another project's driver (libblkio's `virtio-driver`) against the same daemon: if both drivers agree, a misreading
//! of the specification is less likely.
//!
//! Unsafe: that driver takes raw pointers; they lead into a mapping that outlives it.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_client::{GuestMemory, RegionOptions};
use cleave_tests::{Case, Daemon, Random, Scratch, TIMEOUT, scale, seeded};
use virtio_driver::{VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags};

const DEPTH: usize = 32;
const BLOCK: usize = 4096;
const SPAN: u64 = 8 << 20;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        the_other_driver_reads_back_its_writes,
        both_drivers_read_the_same_configuration,
    ]
}

/// The other driver, its transport, and memory for `DEPTH` blocks.
struct Other {
    queues: Vec<VirtioBlkQueue<'static, usize>>,
    transport: Box<VirtioBlkTransport>,
    memory: Arc<GuestMemory>,
    polling: bool,
}

/// An operation on one block.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Operation {
    Read,
    Write,
    Zero,
    Discard,
    Flush,
}

impl Other {
    /// `None`: the daemon has refused it.
    fn try_open(
        daemon: &Daemon,
        features: VirtioFeatureFlags,
        polling: bool,
        queues: usize,
    ) -> Option<Other> {
        let socket = daemon.socket().to_str().unwrap();
        let block_features = 0xffff; // all feature bits of the block device
        let transport = VhostUser::new(socket, features.bits() | block_features).ok()?;
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        let memory = GuestMemory::new(&[RegionOptions::new(0, (DEPTH * BLOCK) as u64)]).unwrap();
        let region = memory.region(0);
        let fd = memory.fd(0).as_raw_fd();
        transport
            .map_mem_region(region.user_addr as usize, region.len_bytes as usize, fd, 0)
            .ok()?;
        let queues = VirtioBlkQueue::setup_queues(transport.as_mut(), queues, 128).ok()?;
        let mut other = Other {
            queues,
            transport,
            memory,
            polling,
        };
        for queue in &mut other.queues {
            queue.set_used_notif_enabled(!polling);
        }
        Some(other)
    }

    /// Runs the same operation on many blocks in parallel; `model` is the expected contents of the disk.
    fn run(
        &mut self,
        index: usize,
        operation: Operation,
        offsets: &[u64],
        model: &mut [u8],
        random: &mut Random,
    ) {
        let mut todo = offsets.iter();
        let mut flying: Vec<Option<u64>> = vec![None; DEPTH];
        let mut left = offsets.len();
        while left > 0 {
            for (slot, place) in flying.iter_mut().enumerate() {
                if place.is_some() {
                    continue;
                }
                let Some(offset) = todo.next() else { break };
                *place = Some(*offset);
                start(
                    &mut self.queues[index],
                    &self.memory,
                    operation,
                    slot,
                    *offset,
                    model,
                    random,
                );
            }
            if self.queues[index].avail_notif_needed() {
                self.transport
                    .get_submission_notifier(index)
                    .notify()
                    .unwrap();
            }
            for slot in self.wait(index) {
                let offset = flying[slot]
                    .take()
                    .unwrap_or_else(|| panic!("{slot} completed twice"));
                if operation == Operation::Read {
                    let found = self.memory.bytes((slot * BLOCK) as u64, BLOCK);
                    let wanted = &model[offset as usize..offset as usize + BLOCK];
                    assert!(found == wanted, "wrong data at {offset}");
                }
                left -= 1;
            }
        }
    }

    fn wait(&mut self, index: usize) -> Vec<usize> {
        let end = Instant::now() + TIMEOUT;
        loop {
            let done: Vec<_> = self.queues[index]
                .completions()
                .map(|c| (c.context, c.ret))
                .collect();
            assert!(done.iter().all(|(_, ret)| *ret == 0), "{done:?}");
            if !done.is_empty() {
                return done.into_iter().map(|(slot, _)| slot).collect();
            }
            assert!(Instant::now() < end, "no completion");
            if !self.polling {
                self.transport.get_completion_fd(index).read().unwrap();
            }
        }
    }
}

fn start(
    queue: &mut VirtioBlkQueue<'static, usize>,
    memory: &GuestMemory,
    operation: Operation,
    slot: usize,
    offset: u64,
    model: &mut [u8],
    random: &mut Random,
) {
    let guest = (slot * BLOCK) as u64;
    let host = memory.user_addr(guest).unwrap() as *mut u8;
    let place = offset as usize..offset as usize + BLOCK;
    let started = match operation {
        Operation::Read => {
            memory.fill(guest, BLOCK, 0xee);
            // SAFETY: the block lies in `memory`, which lives as long as the queue in `Other`.
            unsafe { queue.read_raw(offset, host, BLOCK, slot) }
        }
        Operation::Write => {
            let bytes = random.bytes(BLOCK);
            memory.write(guest, &bytes);
            model[place].copy_from_slice(&bytes);
            // SAFETY: as above.
            unsafe { queue.write_raw(offset, host, BLOCK, slot) }
        }
        Operation::Zero => {
            model[place].fill(0);
            queue.write_zeroes(offset, BLOCK as u64, random.below(2) == 0, slot)
        }
        Operation::Discard => queue.discard(offset, BLOCK as u64, slot),
        Operation::Flush => queue.flush(slot),
    };
    started.unwrap();
}

fn blocks(random: &mut Random, count: usize, span: u64) -> Vec<u64> {
    // Distinct, so that no two requests in flight touch the same block.
    let mut all: Vec<u64> = (0..span / BLOCK as u64)
        .map(|block| block * BLOCK as u64)
        .collect();
    for index in (1..all.len()).rev() {
        all.swap(index, random.below(index as u64 + 1) as usize);
    }
    all.truncate(count);
    all
}

fn the_other_driver_reads_back_its_writes() {
    let mut random = seeded("second opinion");
    let scratch = Scratch::new();
    let image = scratch.image("disk", 64 << 20);
    let event_idx = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
    for args in [
        &["--disk", "ram:64M"][..],
        &["--disk", image.to_str().unwrap()],
    ] {
        let daemon = Daemon::serve(args);
        let mut model = vec![0; SPAN as usize];
        for (name, features, polling) in [
            ("EVENT_IDX, asleep", event_idx, false),
            ("EVENT_IDX, polling", event_idx, true),
            ("flags, asleep", VirtioFeatureFlags::VERSION_1, false),
            ("flags, polling", VirtioFeatureFlags::VERSION_1, true),
        ] {
            println!("{name}");
            let mut other = open_patiently(&daemon, features, polling, 2);
            for _ in 0..scale(3) {
                for index in 0..2 {
                    for operation in [
                        Operation::Write,
                        Operation::Flush,
                        Operation::Read,
                        Operation::Zero,
                        Operation::Read,
                    ] {
                        let offsets = blocks(&mut random, 500, SPAN);
                        other.run(index, operation, &offsets, &mut model, &mut random);
                    }
                }
            }
            // Discarded blocks may hold anything, so they lie outside of the model.
            let beyond: Vec<u64> = blocks(&mut random, 200, SPAN)
                .into_iter()
                .map(|offset| offset + SPAN)
                .collect();
            let mut nothing = Vec::new();
            other.run(0, Operation::Discard, &beyond, &mut nothing, &mut random);
            let all = blocks(&mut random, usize::MAX, SPAN);
            other.run(1, Operation::Read, &all, &mut model, &mut random);
        }
        daemon.finish();
    }
}

/// Connects, and retries while the previous session drains: until then the daemon refuses the next frontend.
fn open_patiently(
    daemon: &Daemon,
    features: VirtioFeatureFlags,
    polling: bool,
    queues: usize,
) -> Other {
    let end = Instant::now() + TIMEOUT;
    loop {
        if let Some(other) = Other::try_open(daemon, features, polling, queues) {
            return other;
        }
        assert!(Instant::now() < end, "the daemon refused every connection");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn both_drivers_read_the_same_configuration() {
    let daemon = Daemon::serve(&["--disk", "ram:64M", "--queues", "5"]);
    let other = open_patiently(&daemon, VirtioFeatureFlags::VERSION_1, false, 1);
    let config = other.transport.get_config().unwrap();
    assert_eq!(u64::from(config.capacity) * 512, 64 << 20);
    assert_eq!(u16::from(config.num_queues), 5);
    assert_eq!(u32::from(config.blk_size), 512);
    assert!(other.transport.max_mem_regions() >= 509);
    drop(other);
    daemon.finish();
}
