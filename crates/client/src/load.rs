//! Driving a vring at depth: the loop of benchmarks, the demo and long tests.
//!
//! Every slot reuses its chain, so a request costs the driver a header, an available entry and a used entry. The
//! clock is read once for each batch, and nothing is allocated or looked up.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use cleave_blk::spec::{HEADER_BYTES, SECTOR_BYTES, request_type, status};

use crate::memory::Span;
use crate::queue::{CONTROL_BYTES, ReapWait, STATUS_AT, TABLE_AT, VringSetup};
use crate::workload::Picker;
use crate::{
    Buffer, Client, Descriptor, DeviceOptions, Error, Layout, Queue, RingLayout, Sample, Stop,
    Used, Verify, Workload, WorkloadTotals, pattern_word, ring,
};

/// Used entries handled between two readings of the clock.
const BATCH: usize = 64;
/// Longest time until the end of a load is noticed.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

impl Client {
    /// Runs a workload on all vrings, each with its own thread and seed. `sampler` makes each thread's callback.
    pub fn run<F: FnMut(Sample) + Send>(
        &mut self,
        workload: &Workload<'_>,
        sampler: impl FnMut(u16) -> F,
    ) -> Result<Vec<WorkloadTotals>, Error> {
        std::thread::scope(|scope| {
            let threads = started(scope, self.queues(), workload, sampler);
            threads.into_iter().map(join).collect()
        })
    }

    /// Runs a workload as above. As often as the connection ends, it connects again as QEMU does: every `pause`, until a daemon
    /// answers. Requests in flight are left to that one.
    pub fn run_over<F: FnMut(Sample) + Send>(
        &mut self,
        workload: &Workload<'_>,
        sampler: impl FnMut(u16) -> F,
        daemons: (&Path, &DeviceOptions),
        pause: Duration,
    ) -> Result<Vec<WorkloadTotals>, Error> {
        let mut queues = std::mem::take(&mut self.queues);
        let vrings = queues.iter();
        let vrings: Vec<_> = vrings
            .map(|queue| (queue.vring.clone(), queue.ring.layout()))
            .collect();
        let done = std::thread::scope(|scope| {
            let threads = started(scope, &mut queues, workload, sampler);
            while !threads.iter().all(ScopedJoinHandle::is_finished) {
                if self.frontend.has_ended(LOOK_PAUSE) {
                    std::thread::sleep(pause);
                    // The next daemon may start late, or go again. What fails is a request that nobody answers in time.
                    let _ = self.go_on_with(&vrings, daemons);
                }
            }
            threads.into_iter().map(join).collect()
        });
        self.queues = queues;
        done
    }

    fn go_on_with(
        &mut self,
        vrings: &[(Arc<VringSetup>, RingLayout)],
        (path, options): (&Path, &DeviceOptions),
    ) -> Result<(), Error> {
        self.connect_again(path, options)?;
        vrings.iter().try_for_each(|(vring, layout)| {
            // Nobody writes it until the vring is started.
            let used = self.memory.bytes(layout.used + 2, 2);
            let base = u16::from_le_bytes([used[0], used[1]]);
            self.announce(vring, *layout, base)
        })
    }
}

type Driven<'scope> = ScopedJoinHandle<'scope, Result<WorkloadTotals, Error>>;

/// Starts a thread for each vring.
fn started<'scope, F: FnMut(Sample) + Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    queues: &'scope mut [Queue],
    workload: &Workload<'scope>,
    mut sampler: impl FnMut(u16) -> F,
) -> Vec<Driven<'scope>> {
    let threads = queues.iter_mut().map(|queue| {
        let mut mine = workload.clone();
        mine.seed = workload.seed.wrapping_add(u64::from(queue.index()) << 32);
        let sample = sampler(queue.index());
        scope.spawn(move || queue.run(&mine, sample))
    });
    threads.collect()
}

fn join(thread: Driven<'_>) -> Result<WorkloadTotals, Error> {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Queue {
    /// Runs a workload on this vring and passes each completion to `sample`. After an error, requests may still be in
    /// flight, and the queue must not be used again.
    pub fn run(
        &mut self,
        workload: &Workload<'_>,
        sample: impl FnMut(Sample),
    ) -> Result<WorkloadTotals, Error> {
        let mut load = Load::new(self, workload, sample)?;
        let done = load.drive();
        let tally = load.tally;
        done?;
        self.ring.free_all();
        Ok(tally)
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    offset_bytes: u64,
    started_ns: u64,
    write: bool,
    busy: bool,
}

struct Load<'a, F> {
    queue: &'a mut Queue,
    workload: &'a Workload<'a>,
    sample: F,
    indirect: bool,
    control: Span,
    data: Span,
    stride: usize,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    picker: Picker,
    clock: Instant,
    now_ns: u64,
    progress_ns: u64,
    issued: u64,
    disarmed: u64,
    tally: WorkloadTotals,
}

impl<'a, F: FnMut(Sample)> Load<'a, F> {
    fn new(
        queue: &'a mut Queue,
        workload: &'a Workload<'a>,
        sample: F,
    ) -> Result<Load<'a, F>, Error> {
        let indirect = chosen_layout(queue, workload)?;
        let depth = workload.depth;
        let stride = u64::from(workload.block_bytes).next_multiple_of(4096);
        let data_bytes = stride * u64::from(depth);
        if data_bytes > queue.arena.len {
            let what = format!(
                "{data_bytes} bytes of data in an area of {}",
                queue.arena.len
            );
            return Err(Error::Memory(what));
        }
        let memory = queue.memory();
        let control = memory.span(queue.arena.control, CONTROL_BYTES * u64::from(depth))?;
        let data = memory.span(queue.arena.addr, data_bytes)?;
        let load = Load {
            indirect,
            control,
            data,
            stride: stride as usize,
            slots: vec![Slot::default(); depth.into()].into(),
            free: (0..depth).rev().collect(),
            picker: Picker::new(workload)?,
            clock: Instant::now(),
            now_ns: 0,
            progress_ns: 0,
            issued: 0,
            disarmed: 0,
            tally: WorkloadTotals::default(),
            queue,
            workload,
            sample,
        };
        load.lay_chains();
        Ok(load)
    }

    /// Writes the constant parts of every slot's chain.
    fn lay_chains(&self) {
        for slot in 0..self.workload.depth {
            let parts = self.parts(slot, false);
            if self.indirect {
                let table = self.control_addr(slot) + TABLE_AT;
                ring::write_table(self.queue.ring.memory(), table, &parts);
                let entry = Descriptor {
                    addr: table,
                    len: 48,
                    flags: 4,
                    next: 0,
                };
                self.queue.ring.write_descriptor(slot, entry);
            } else {
                for (index, part) in (0u16..).zip(parts) {
                    let flags = u16::from(index < 2) | if part.writable { 2 } else { 0 };
                    let next = 3 * slot + index + 1;
                    let entry = Descriptor {
                        addr: part.addr,
                        len: part.len,
                        flags,
                        next,
                    };
                    self.queue.ring.write_descriptor(3 * slot + index, entry);
                }
            }
        }
    }

    fn parts(&self, slot: u16, write: bool) -> [Buffer; 3] {
        let control = self.control_addr(slot);
        let addr = self.queue.arena.addr + u64::from(slot) * self.stride as u64;
        [
            Buffer::readable(control, HEADER_BYTES as u32),
            Buffer {
                addr,
                len: self.workload.block_bytes,
                writable: !write,
            },
            Buffer::writable(control + STATUS_AT, 1),
        ]
    }

    fn control_addr(&self, slot: u16) -> u64 {
        self.queue.arena.control + CONTROL_BYTES * u64::from(slot)
    }

    fn drive(&mut self) -> Result<(), Error> {
        self.queue.ring.disarm();
        let mut used = [Used::default(); BATCH];
        loop {
            self.submit();
            let count = self.queue.ring.reap_batch(&mut used);
            if count == 0 {
                if self.in_flight() == 0 && self.ended() {
                    self.tally.elapsed = Duration::from_nanos(self.progress_ns);
                    return Ok(());
                }
                self.pause()?;
                continue;
            }
            for entry in &used[..count] {
                self.control
                    .prefetch(self.slot_of(entry.head) * CONTROL_BYTES as usize);
            }
            self.tick();
            self.progress_ns = self.now_ns;
            for entry in &used[..count] {
                self.finish(*entry)?;
            }
            self.disarmed += count as u64;
            if self.disarmed > 16384 {
                // Without EVENT_IDX this has no effect. With it, the used event must not be reached again.
                self.disarmed = 0;
                self.queue.ring.disarm();
            }
        }
    }

    fn tick(&mut self) {
        self.now_ns = self.clock.elapsed().as_nanos() as u64;
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn ended(&self) -> bool {
        let over = match self.workload.stop {
            Stop::After(time) => u128::from(self.now_ns) >= time.as_nanos(),
            Stop::Requests(most) => self.issued >= most,
        };
        over || self
            .workload
            .abort
            .is_some_and(|abort| abort.load(Ordering::Relaxed))
    }

    /// Returns when the next request is due: at once, unless requests start at a rate.
    fn due_ns(&self) -> u64 {
        self.workload.offered.map_or(self.now_ns, |offered| {
            let burst = u64::from(offered.burst.max(1));
            let groups = self.issued / burst;
            let due_ns = (groups as f64 * burst as f64 * 1e9 / offered.per_second) as u64;
            self.workload
                .pulse
                .map_or(due_ns, |pulse| pulse.stretch(due_ns))
        })
    }

    /// Starts every request that is due and fits, and publishes once.
    fn submit(&mut self) {
        let ended = self.ended();
        while !ended && !self.free.is_empty() {
            let due = self.due_ns();
            let all = matches!(self.workload.stop, Stop::Requests(most) if self.issued >= most);
            if due > self.now_ns || all {
                break;
            }
            let Some(slot) = self.free.pop() else { break };
            self.start(slot, due);
        }
        if self.queue.ring.publish() {
            self.tally.kicks += 1;
            self.queue.ring_kick();
        }
    }

    fn start(&mut self, slot: u16, started_ns: u64) {
        let (offset_bytes, write) = self.picker.next(self.workload);
        let at = usize::from(slot) * CONTROL_BYTES as usize;
        let kind = if write {
            request_type::OUT
        } else {
            request_type::IN
        };
        let mut control = [0; HEADER_BYTES + 1];
        control[0..4].copy_from_slice(&kind.to_le_bytes());
        control[8..16].copy_from_slice(&(offset_bytes / SECTOR_BYTES).to_le_bytes());
        control[16] = 0xff;
        self.control.store(at, control);
        if self.slots[usize::from(slot)].write != write {
            self.turn_data(slot, write);
        }
        match self.workload.verify {
            Verify::Pattern(seed) if write => self.write_pattern(slot, offset_bytes, seed),
            Verify::Pattern(seed) => self.spoil(slot, offset_bytes, seed),
            Verify::Off => {}
        }
        self.slots[usize::from(slot)] = Slot {
            offset_bytes,
            started_ns,
            write,
            busy: true,
        };
        self.issued += 1;
        let head = if self.indirect { slot } else { 3 * slot };
        self.queue.ring.push(head);
    }

    /// Reverses the direction of the data descriptor.
    fn turn_data(&self, slot: u16, write: bool) {
        let part = self.parts(slot, write)[1];
        let flags = if write { 1 } else { 3 };
        let next = if self.indirect { 2 } else { 3 * slot + 2 };
        let entry = Descriptor {
            addr: part.addr,
            len: part.len,
            flags,
            next,
        };
        if self.indirect {
            let at = usize::from(slot) * CONTROL_BYTES as usize + TABLE_AT as usize + 16;
            self.control.store(at, entry.to_bytes());
        } else {
            self.queue.ring.write_descriptor(3 * slot + 1, entry);
        }
    }

    fn slot_of(&self, head: u32) -> usize {
        if self.indirect {
            head as usize
        } else {
            head as usize / 3
        }
    }

    fn finish(&mut self, used: Used) -> Result<(), Error> {
        let index = self.slot_of(used.head);
        let aligned = self.indirect || used.head.is_multiple_of(3);
        let slot = match self.slots.get_mut(index) {
            Some(slot) if slot.busy && aligned => slot,
            _ => return Err(Error::Spurious { head: used.head }),
        };
        slot.busy = false;
        let slot = *slot;
        let bytes = self.workload.block_bytes;
        let at = index * CONTROL_BYTES as usize + STATUS_AT as usize;
        let [code] = self.control.load::<1>(at);
        if code == status::OK {
            self.check(index, slot, used)?;
        } else {
            self.tally.failed += 1;
        }
        *(if slot.write {
            &mut self.tally.writes
        } else {
            &mut self.tally.reads
        }) += 1;
        self.tally.bytes += u64::from(bytes);
        self.free.push(index as u16);
        (self.sample)(Sample {
            write: slot.write,
            bytes,
            latency_ns: self.now_ns.saturating_sub(slot.started_ns),
            at_ns: self.now_ns,
        });
        Ok(())
    }

    fn check(&self, index: usize, slot: Slot, used: Used) -> Result<(), Error> {
        let wanted = if slot.write {
            1
        } else {
            self.workload.block_bytes + 1
        };
        if used.len != wanted {
            let kind = if slot.write {
                request_type::OUT
            } else {
                request_type::IN
            };
            let sector = slot.offset_bytes / SECTOR_BYTES;
            return Err(Error::UsedLength {
                kind,
                sector,
                found: used.len,
                wanted,
            });
        }
        match self.workload.verify {
            Verify::Pattern(seed) if !slot.write => self.check_pattern(index, slot, seed),
            _ => Ok(()),
        }
    }

    fn write_pattern(&self, slot: u16, offset_bytes: u64, seed: u64) {
        let from = usize::from(slot) * self.stride;
        let words = self.workload.block_bytes as usize / 8;
        self.data.store_pattern(from, words, seed, offset_bytes / 8);
    }

    /// Overwrites one word of each sector, so that old contents are not mistaken for data that was read.
    fn spoil(&self, slot: u16, offset_bytes: u64, seed: u64) {
        let from = usize::from(slot) * self.stride;
        for at in (0..self.workload.block_bytes as usize).step_by(SECTOR_BYTES as usize) {
            let value = !pattern_word(seed, (offset_bytes + at as u64) / 8);
            self.data.store(from + at, value.to_le_bytes());
        }
    }

    fn check_pattern(&self, index: usize, slot: Slot, seed: u64) -> Result<(), Error> {
        let words = self.workload.block_bytes as usize / 8;
        let from = index * self.stride;
        let wrong = self
            .data
            .wrong_word(from, words, seed, slot.offset_bytes / 8);
        if let Some((word, found, wanted)) = wrong {
            return Err(Error::Verify {
                offset_bytes: slot.offset_bytes + 8 * word as u64,
                found,
                wanted,
            });
        }
        Ok(())
    }

    /// Waits for completions, or until the next request is due.
    fn pause(&mut self) -> Result<(), Error> {
        self.tick();
        if self.in_flight() == 0 {
            // Nothing is in flight; only the clock matters.
            self.progress_ns = self.now_ns;
        }
        let timeout = self.queue.timeout.as_nanos() as u64;
        if self.now_ns - self.progress_ns > timeout {
            return Err(Error::TimedOut {
                what: "a request",
                after: self.queue.timeout,
            });
        }
        match self.queue.wait {
            ReapWait::Poll => self.spin(),
            ReapWait::Sleep => self.sleep(),
        }
        Ok(())
    }

    fn spin(&mut self) {
        let rounds = if self.workload.offered.is_some() {
            64
        } else {
            4096
        };
        for _ in 0..rounds {
            if self.queue.ring.has_used() {
                break;
            }
            std::hint::spin_loop();
        }
        self.tick();
    }

    fn sleep(&mut self) {
        let mut time = self.queue.timeout;
        if !self.free.is_empty() && !self.ended() {
            let due = self.due_ns().saturating_sub(self.now_ns);
            time = time.min(Duration::from_nanos(due));
        }
        let nothing = self.in_flight() == 0;
        if nothing || !self.queue.ring.arm() {
            self.tally.calls += u64::from(self.queue.sleep(time));
        }
        self.queue.ring.disarm();
        self.tick();
    }
}

/// Chooses the layout; `true`: indirect.
fn chosen_layout(queue: &Queue, workload: &Workload<'_>) -> Result<bool, Error> {
    let size = u32::from(queue.ring.size());
    let depth = u32::from(workload.depth);
    let direct = 3 * depth <= size;
    match workload.layout {
        _ if depth == 0 || depth > size => Err(Error::Full),
        Layout::Direct if direct => Ok(false),
        Layout::Auto if direct => Ok(false),
        Layout::Auto | Layout::Indirect if queue.indirect => Ok(true),
        _ => Err(Error::Full),
    }
}
