//! A worker that panics, and the next worker on the same vring and the same in-flight region.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

/// Sectors of each write; write `n` goes to sector `n * WRITE_SECTORS`.
const WRITE_SECTORS: u64 = 8;
const WRITES: u64 = 60;

/// A guest that writes each of its sectors once, whichever worker serves it.
struct Guest {
    contents: Vec<Vec<u8>>,
    next: u64,
    /// Writes in flight, by head.
    flying: HashMap<u16, u64>,
}

impl Guest {
    fn submit(&mut self, driver: &mut Driver) {
        while self.next < WRITES {
            let bytes = self.contents[self.next as usize].clone();
            let ask = Ask::write(self.next * WRITE_SECTORS, bytes, 1000, true);
            let Some(head) = driver.submit(&ask) else {
                return;
            };
            assert!(self.flying.insert(head, self.next).is_none());
            self.next += 1;
        }
    }

    /// Takes the answers. The driver fails the test if a head is used twice.
    fn collect(&mut self, driver: &mut Driver) {
        for answer in driver.collect(|_| 0) {
            assert_eq!(answer.status, status::OK);
            assert!(self.flying.remove(&answer.head).is_some());
        }
    }
}

/// A worker on the vring of `driver`, with the requests in flight in `region`.
fn start(
    config: SimConfig,
    device: &Arc<Device>,
    store: &Arc<Mutex<SimStore>>,
    driver: &Driver,
    region: &Inflight,
) -> (Worker<Sim>, Control) {
    let (control, commands) = Control::channel().unwrap();
    let worker = Worker::new(
        reactor(&device.disk, 64).unwrap(),
        Sim::new(config, store.clone()),
        device.clone(),
        driver.memory(),
        commands,
        Arc::new(event()),
    )
    .unwrap();
    // Carried out in the first lap, which may be the one that panics.
    let _ = control.start(kept_vring(region));
    (worker, control)
}

#[test]
fn the_next_worker_does_what_one_that_panicked_left_and_nothing_twice() {
    let mut done_again = 0;
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let device = device(Split::Off);
        let store = Arc::new(Mutex::new(SimStore {
            now: vec![0; DISK_BYTES],
            durable: vec![0; DISK_BYTES],
            ..Default::default()
        }));
        let region = inflight_region();
        let mut driver = Driver::new();
        let mut guest = Guest {
            contents: (0..WRITES)
                .map(|_| random_bytes(&mut random, WRITE_SECTORS as usize * 512))
                .collect(),
            next: 0,
            flying: HashMap::new(),
        };
        let mut panics = 0;
        for life in 0.. {
            let config = SimConfig {
                // Three lives panic, and the last one completes the rest.
                panic_at: (life < 3).then(|| random.below(15)),
                delay_max: 1 + random.below(10) as u32,
                ..quiet(seed)
            };
            let (mut worker, _control) = start(config, &device, &store, &driver, &region);
            if panics > 0 {
                done_again += guest.flying.len();
            }
            let lived = catch_unwind(AssertUnwindSafe(|| {
                for lap in 0.. {
                    if guest.next == WRITES && guest.flying.is_empty() {
                        break;
                    }
                    assert!(lap < 1000, "seed {seed}: requests are lost");
                    guest.submit(&mut driver);
                    worker.lap().unwrap();
                    guest.collect(&mut driver);
                }
            }));
            drop(worker);
            guest.collect(&mut driver);
            match lived {
                Ok(()) => break,
                Err(_) => panics += 1,
            }
            assert!(life < 3, "seed {seed}: the last worker failed");
        }
        assert!(panics > 0, "seed {seed}");
        let store = store.lock().unwrap_or_else(|broken| broken.into_inner());
        for (n, bytes) in guest.contents.iter().enumerate() {
            let at = n * WRITE_SECTORS as usize * 512;
            assert_eq!(
                &store.now[at..at + bytes.len()],
                bytes,
                "seed {seed}, write {n}"
            );
        }
    }
    assert!(done_again > 500, "{done_again}");
}
