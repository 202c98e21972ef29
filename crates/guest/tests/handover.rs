//! A driver thread and a device thread that sleep whenever the protocol lets them: no entry and no wake-up
//! may be lost, and a descriptor's contents must arrive with its index.

#![allow(clippy::unwrap_used, clippy::panic)] // helper functions of tests are outside of test functions here

use std::fs::File;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use cleave_blk::spec::feature;
use cleave_guest::{Chain, Memory, RegionSpec, Vring, VringLayout};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

const LAYOUT: VringLayout = VringLayout {
    size: 64,
    desc_addr: 0,
    avail_addr: 0x1000,
    used_addr: 0x2000,
};

/// Parameters of a test.
#[derive(Clone, Copy)]
struct Workload {
    features: u64,
    entries: u32,
    /// Most entries at a time.
    batch: u32,
    /// Most iterations of a spin loop before sleeping. Ideally both sides check each other within the
    /// nanoseconds in which a missing fence would show.
    spin: u32,
}

/// The random generator of both threads; `seed` reproduces it.
struct Random {
    seed: u64,
}

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        (self.seed >> 32) as u32 % limit.max(1)
    }

    fn spin(&mut self, workload: Workload) {
        for _ in 0..self.below(workload.spin) {
            std::hint::spin_loop();
        }
    }
}

/// An eventfd whose wait times out: a lost wake-up ends the test.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self, who: &str) {
        let rung = self.rung.lock().unwrap();
        let patience = Duration::from_secs(60);
        let (mut rung, late) = self
            .changed
            .wait_timeout_while(rung, patience, |rung| !*rung)
            .unwrap();
        assert!(!late.timed_out(), "{who} was not woken");
        *rung = false;
    }
}

/// The driver's view, through another mapping of the same file.
struct Driver {
    memory: GuestMemoryMmap,
    workload: Workload,
    random: Random,
    avail: u16,
    used: u16,
}

impl Driver {
    fn load(&self, addr: u64) -> u16 {
        self.memory
            .load(GuestAddress(addr), Ordering::Acquire)
            .unwrap()
    }

    fn store(&self, addr: u64, value: u16) {
        self.memory
            .store(value, GuestAddress(addr), Ordering::Release)
            .unwrap();
    }

    /// Makes `count` entries from number `first` on available. Returns whether a kick is due.
    fn offer(&mut self, first: u32, count: u16) -> bool {
        let old = self.avail;
        for number in 0..count {
            // Entries complete in order here, so slot and head are the same.
            let head = self.avail % LAYOUT.size;
            let desc = GuestAddress(LAYOUT.desc_addr + 16 * u64::from(head));
            let number = u64::from(first + u32::from(number));
            self.memory.write_obj([number, 16], desc).unwrap();
            self.store(LAYOUT.avail_addr + 4 + 2 * u64::from(head), head);
            self.avail = self.avail.wrapping_add(1);
        }
        self.store(LAYOUT.avail_addr + 2, self.avail);
        fence(Ordering::SeqCst);
        if self.workload.features != 0 {
            let event = self.load(LAYOUT.used_addr + 4 + 8 * u64::from(LAYOUT.size));
            // The entry after `event` is among the new ones.
            (0..count).any(|step| old.wrapping_add(step) == event)
        } else {
            self.load(LAYOUT.used_addr) & 1 == 0
        }
    }

    /// Announces whether calls are wanted. Returns whether there is something to reap.
    fn want_calls(&self, wanted: bool) -> bool {
        if self.workload.features != 0 {
            let event = if wanted {
                self.used
            } else {
                self.used.wrapping_sub(1)
            };
            self.store(LAYOUT.avail_addr + 4 + 2 * u64::from(LAYOUT.size), event);
        } else {
            self.store(LAYOUT.avail_addr, u16::from(!wanted));
        }
        fence(Ordering::SeqCst);
        self.load(LAYOUT.used_addr + 2) != self.used
    }

    /// Takes all used entries, which must carry the numbers from `first` on.
    fn reap(&mut self, first: u32) -> u32 {
        let index = self.load(LAYOUT.used_addr + 2);
        let count = index.wrapping_sub(self.used);
        for step in 0..count {
            let slot = u64::from(self.used % LAYOUT.size);
            let entry = GuestAddress(LAYOUT.used_addr + 4 + 8 * slot);
            let [head, len]: [u32; 2] = self.memory.read_obj(entry).unwrap();
            assert_eq!(u64::from(head), slot);
            assert_eq!(len, first + u32::from(step), "the entry has its own number");
            self.used = self.used.wrapping_add(1);
        }
        u32::from(count)
    }

    fn run(mut self, kick: &Bell, call: &Bell) {
        let (mut sent, mut done) = (0, 0);
        while done < self.workload.entries {
            let room = (u32::from(LAYOUT.size) - (sent - done)).min(self.workload.entries - sent);
            let count = self.random.below(room.min(self.workload.batch) + 1);
            if count > 0 && self.offer(sent, count as u16) {
                kick.ring();
            }
            sent += count;
            self.random.spin(self.workload);
            while done < sent && !self.want_calls(true) {
                call.wait("the driver");
            }
            self.want_calls(false);
            done += self.reap(done);
        }
    }
}

fn serve(mut vring: Vring, workload: Workload, mut random: Random, kick: &Bell, call: &Bell) {
    let mut chain = Chain::new();
    let mut done = 0;
    while done < workload.entries {
        while let Some(taken) = vring.take(&mut chain).unwrap() {
            assert_eq!(taken.fault, None);
            assert_eq!(chain.readable()[0].addr, u64::from(done));
            vring.push_used(taken.head, done);
            done += 1;
        }
        if vring.publish() {
            call.ring();
        }
        random.spin(workload);
        if done < workload.entries && !vring.arm() {
            kick.wait("the device");
        }
        vring.disarm();
    }
}

fn hand_over(workload: Workload) {
    let seed = 0x9e37_79b9_7f4a_7c15 ^ u64::from(std::process::id());
    println!("seed {seed}");
    let file = tempfile::tempfile().unwrap();
    file.set_len(0x4000).unwrap();
    let shared = |file: &File| Some(FileOffset::new(file.try_clone().unwrap(), 0));
    let range = (GuestAddress(0), 0x4000, shared(&file));
    let driver = Driver {
        memory: GuestMemoryMmap::from_ranges_with_files([range]).unwrap(),
        workload,
        random: Random { seed },
        avail: 0,
        used: 0,
    };
    let spec = RegionSpec {
        guest_addr: 0,
        user_addr: 0,
        len_bytes: 0x4000,
        file_offset: 0,
        file,
    };
    let memory = Memory::new(vec![spec]).unwrap();
    let (kick, call) = (Arc::new(Bell::default()), Arc::new(Bell::default()));
    let (kicked, called) = (kick.clone(), call.clone());
    let device = std::thread::spawn(move || {
        let vring = Vring::new(memory, LAYOUT, workload.features, 0).unwrap();
        serve(vring, workload, Random { seed: !seed }, &kicked, &called);
    });
    driver.run(&kick, &call);
    device.join().unwrap();
}

/// As fast as possible.
const STREAM: Workload = Workload {
    features: 0,
    entries: 1_000_000,
    batch: 64,
    spin: 0,
};

/// One at a time, falling asleep at about the moment at which the other side acts.
const PING_PONG: Workload = Workload {
    features: 0,
    entries: 60_000,
    batch: 1,
    spin: 60,
};

#[test]
fn a_million_entries_by_event_index() {
    hand_over(Workload {
        features: feature::EVENT_IDX,
        ..STREAM
    });
}

#[test]
fn a_million_entries_by_flags() {
    hand_over(STREAM);
}

#[test]
fn one_at_a_time_by_event_index() {
    hand_over(Workload {
        features: feature::EVENT_IDX,
        ..PING_PONG
    });
}

#[test]
fn one_at_a_time_by_flags() {
    hand_over(PING_PONG);
}
