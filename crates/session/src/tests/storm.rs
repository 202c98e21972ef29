//! Random messages, similar enough to valid ones to reach all code. A session may refuse them and end. It must
//! not panic, hang, or report a fault of anyone but the frontend.

use super::*;

const CONNECTIONS: u64 = 150;
const MESSAGES: usize = 200;
/// Bytes of a dirty log for the memory of one region.
const LOG_BYTES: u64 = MEM_BYTES / 4096 / 8;

/// xorshift64*: the seed determines the whole storm.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.roll() % end as u64) as usize
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn index(&mut self) -> u32 {
        self.pick(&[0, 0, 0, 1, 1, 2, 3, 4, 255, 256, 65536, u32::MAX])
    }

    fn region(&mut self) -> Vec<u8> {
        let at = self.pick(&[0, 0, 0, 0x1000, MEM_BYTES, u64::MAX]);
        let bytes = self.pick(&[MEM_BYTES, MEM_BYTES, 0x1000, 0, 1, 1 << 63, u64::MAX]);
        longs(&[
            at,
            bytes,
            USER.wrapping_add(at),
            self.pick(&[0, 0, 0, 1, 0x1000, u64::MAX]),
        ])
    }

    /// Returns a request, its payload, and the number of descriptors that it should have.
    fn message(&mut self) -> (u32, Vec<u8>, usize) {
        let index = self.index();
        let number = self.pick(&[0, 1, 3, 8, 8, 64, 256, 65535, 65536, u32::MAX]);
        let request = self.pick(&[
            1, 2, 3, 4, 5, 6, 8, 8, 9, 9, 9, 10, 11, 12, 12, 12, 13, 14, 15,
        ]);
        let request = if self.one_in(3) {
            self.pick(&[
                16, 17, 18, 18, 18, 21, 24, 25, 34, 36, 37, 37, 37, 38, 39, 40,
            ])
        } else {
            request
        };
        match request {
            2 => {
                let bits = [
                    FEATURES,
                    FEATURES,
                    FEATURES | feature::EVENT_IDX,
                    FEATURES | feature::LOG_ALL,
                    0,
                    1 << 34,
                ];
                (request, longs(&[self.pick(&bits)]), 0)
            }
            5 => {
                let count = self.below(4);
                let mut payload = words(&[count as u32, 0]);
                (0..count).for_each(|_| payload.extend(self.region()));
                (request, payload, count)
            }
            6 if self.one_in(20) => {
                let bytes = self.pick(&[0, 1, LOG_BYTES - 1, 1 << 62, u64::MAX]);
                (request, longs(&[bytes, self.pick(&[0, 1, u64::MAX])]), 1)
            }
            6 => (request, longs(&[LOG_BYTES << 4, self.pick(&[0, 4096])]), 1),
            8 | 10 => (request, words(&[index, number]), 0),
            18 => (request, words(&[index, u32::from(!self.one_in(4))]), 0),
            9 => {
                let shift = self.pick(&[0, 0, 0, 16, MEM_BYTES, u64::MAX - USER - 0x10_0000]);
                let mut payload = addrs(index % 16, shift & !0xf);
                if self.one_in(2) {
                    payload[4] = 1;
                    payload[32..].copy_from_slice(&self.roll().to_ne_bytes());
                }
                (request, payload, 0)
            }
            11 if self.one_in(50) => (request, words(&[index, 0]), 0),
            11 => (request, words(&[index % 4, 0]), 0),
            12..=14 if self.one_in(4) => (request, longs(&[u64::from(index % 4) | 0x100]), 0),
            12..=14 if self.one_in(50) => (request, longs(&[index.into()]), 1),
            12..=14 => (request, longs(&[u64::from(index % 4)]), 1),
            16 if self.one_in(50) => (request, longs(&[self.pick(&[0, 1 << 12])]), 0),
            16 => (request, longs(&[PROTOCOL]), 0),
            21 => (request, vec![], 1),
            24 | 25 => {
                let bytes = self.pick(&[1, 1, 8, 60, 96, 97]);
                let mut payload = words(&[self.pick(&[0, 32, 32, 95, 4095]), bytes, 0]);
                payload.resize(12 + bytes as usize, 1);
                (request, payload, 0)
            }
            37 | 38 => {
                let mut payload = longs(&[0]);
                payload.extend(self.region());
                (request, payload, usize::from(request == 37))
            }
            39 => (request, longs(&[self.pick(&[0, 1, 15, 256])]), 0),
            _ => (request, vec![], 0),
        }
    }
}

fn storm(seed: u64) {
    let mut dice = Dice(seed);
    let mut frontend = if dice.one_in(10) {
        Frontend::connect()
    } else {
        Frontend::with_memory()
    };
    let (socket, _other) = UnixStream::pair().unwrap();
    let null = File::open("/dev/null").unwrap();
    let bells = [bell(), bell()];
    let memory = frontend.memory.try_clone().unwrap();
    // Answers are read as they arrive, so that the session never waits for room for them.
    let mut reader = frontend.stream.try_clone().unwrap();
    let sink = std::thread::spawn(move || io::copy(&mut reader, &mut io::sink()));
    for _ in 0..MESSAGES {
        let (request, mut payload, mut count) = dice.message();
        let mut size = payload.len() as u32;
        if dice.one_in(300) {
            size = dice.pick(&[0, 1, size + 1, 4096, u32::MAX]);
        }
        if dice.one_in(300) {
            payload.truncate(dice.below(payload.len() + 1));
        }
        if dice.one_in(300) {
            count = dice.pick(&[0, 1, 2, 32, 33, 253]);
        }
        let usual = if matches!(request, 12..=14) {
            bells[0].as_fd()
        } else {
            memory.as_fd()
        };
        let usual = if request == 21 { socket.as_fd() } else { usual };
        let odd = [
            bells[1].as_fd(),
            socket.as_fd(),
            null.as_fd(),
            memory.as_fd(),
        ];
        let fds: Vec<_> = (0..count)
            .map(|_| {
                if dice.one_in(100) {
                    dice.pick(&odd)
                } else {
                    usual
                }
            })
            .collect();
        let flags = if dice.one_in(300) {
            dice.roll() as u32
        } else {
            0x9
        };
        frontend.send_raw(request, flags, size, &payload, &fds);
        if dice.one_in(10) {
            frontend.remote.config_changed();
        }
        let _ = rustix::io::write(&bells[0], &1u64.to_ne_bytes());
    }
    if dice.one_in(8) {
        frontend.remote.hang_up();
    }
    // Messages that were sent are still served.
    let _ = frontend.stream.shutdown(std::net::Shutdown::Write);
    let ending = frontend.thread.join().unwrap();
    assert!(
        !matches!(ending, Ending::Lost(_)),
        "seed {seed:#x}: {ending:?}"
    );
    let _ = sink.join();
}

#[test]
fn random_messages_do_no_harm() {
    let replay = std::env::var("CLEAVE_SEED").ok();
    if let Some(seed) = replay.and_then(|seed| seed.parse().ok()) {
        return storm(seed);
    }
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let start = now.as_nanos() as u64 | 1;
    for seed in (0..CONNECTIONS).map(|at| start.wrapping_add(at * 2)) {
        let done = std::panic::catch_unwind(|| storm(seed));
        assert!(done.is_ok(), "replay with CLEAVE_SEED={seed}");
    }
}
