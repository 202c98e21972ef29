//! The protocol of arming, checking and kicking, in every order that memory allows: unless a fence prevents
//! it, each side's stores reach the other late and, on some machines, in another order than they were made.
//! `Vring::arm` and `Vring::disarm` are the worker's steps here; a driver's (virtio 1.3 §2.7.13.4) are the
//! guest's. Every state is visited, so the result holds for every interleaving of this many requests.

// A mistake in the test itself ends the test.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::HashSet;

/// Requests that the guest makes available, one by one.
const REQUESTS: u8 = 4;
/// Checks of a worker that spins, before it arms.
const SPINS: u8 = 2;

/// How a side asks for kicks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Format {
    /// `avail_event` (EVENT_IDX).
    Index,
    /// The flag in the used ring.
    Flag,
}

/// The words that the two sides share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Word {
    /// Available index: requests made so far.
    Avail,
    /// The request for kicks: an index, or 1 for "none".
    KickRequest,
}

/// Stores of one side that the other cannot see yet, in the order in which they were made.
type Pending = Vec<(Word, u8)>;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    avail: u8,
    kick_request: u8,
    /// The kick eventfd.
    kick: bool,
    guest: Guest,
    worker: Worker,
    guest_stores: Pending,
    worker_stores: Pending,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Guest {
    /// Makes request `n` available.
    Add(u8),
    /// Its fence after that.
    Fence(u8),
    /// Checks whether a kick is wanted, and kicks if so.
    Check(u8),
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Worker {
    /// Takes all available requests: `n` so far, after this many further checks.
    Take(u8, u8),
    /// Asks for kicks.
    Arm(u8),
    /// Its fence after that.
    Fence(u8),
    /// Checks again.
    Check(u8),
    Asleep(u8),
    /// Announces that no kicks are needed.
    Disarm(u8),
}

/// A step that a side omits, to show that the model would detect it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    NoGuestFence,
    NoWorkerFence,
    NoSecondLook,
}

struct Model {
    format: Format,
    fault: Fault,
    /// Stores to different words may become visible in another order.
    reorders: bool,
}

impl Model {
    fn start(&self) -> State {
        State {
            avail: 0,
            // A vring starts armed.
            kick_request: 0,
            kick: false,
            guest: Guest::Add(1),
            worker: Worker::Take(0, 0),
            guest_stores: Vec::new(),
            worker_stores: Vec::new(),
        }
    }

    /// Visits all states. The error is a state that no step leaves although work is left.
    fn explore(&self) -> Result<usize, State> {
        let mut seen = HashSet::from([self.start()]);
        let mut open = vec![self.start()];
        while let Some(state) = open.pop() {
            let next = self.steps(&state);
            let asleep = matches!(state.worker, Worker::Asleep(taken) if taken < REQUESTS);
            if next.is_empty() && asleep {
                return Err(state);
            }
            for state in next {
                if seen.insert(state.clone()) {
                    open.push(state);
                }
            }
        }
        Ok(seen.len())
    }

    fn steps(&self, state: &State) -> Vec<State> {
        let mut next = Vec::new();
        next.extend(self.guest(state));
        next.extend(self.worker(state));
        for side in [true, false] {
            next.extend(self.arrivals(state, side));
        }
        next
    }

    /// Stores that may become visible now.
    fn arrivals(&self, state: &State, guest: bool) -> Vec<State> {
        let stores = if guest {
            &state.guest_stores
        } else {
            &state.worker_stores
        };
        let mut next = Vec::new();
        for (at, (word, value)) in stores.iter().enumerate() {
            let overtakes = at > 0 && !self.reorders;
            // Stores to one word always keep their order.
            if overtakes || stores[..at].iter().any(|(earlier, _)| earlier == word) {
                continue;
            }
            let mut state = state.clone();
            match word {
                Word::Avail => state.avail = *value,
                Word::KickRequest => state.kick_request = *value,
            }
            let stores = if guest {
                &mut state.guest_stores
            } else {
                &mut state.worker_stores
            };
            stores.remove(at);
            next.push(state);
        }
        next
    }

    fn guest(&self, state: &State) -> Option<State> {
        let mut state = state.clone();
        state.guest = match state.guest {
            Guest::Add(number) => {
                state.guest_stores.push((Word::Avail, number));
                match self.fault {
                    Fault::NoGuestFence => Guest::Check(number),
                    _ => Guest::Fence(number),
                }
            }
            Guest::Fence(number) if state.guest_stores.is_empty() => Guest::Check(number),
            Guest::Fence(_) | Guest::Done => return None,
            Guest::Check(number) => {
                let wanted = match self.format {
                    // The kick was requested for the entry that was just added.
                    Format::Index => state.kick_request == number - 1,
                    Format::Flag => state.kick_request == 0,
                };
                state.kick |= wanted;
                match number {
                    REQUESTS => Guest::Done,
                    number => Guest::Add(number + 1),
                }
            }
        };
        Some(state)
    }

    /// The worker's possible steps; if it may spin or arm, both.
    fn worker(&self, state: &State) -> Vec<State> {
        let to = |worker: Worker| {
            let mut state = state.clone();
            state.worker = worker;
            state
        };
        match state.worker {
            Worker::Take(taken, spun) => {
                if state.avail > taken {
                    return vec![to(Worker::Take(state.avail, 0))];
                }
                let mut ways = vec![to(Worker::Arm(taken))];
                if spun < SPINS {
                    ways.push(to(Worker::Take(taken, spun + 1)));
                    if spun == 0 {
                        ways.push(to(Worker::Disarm(taken)));
                    }
                }
                ways
            }
            Worker::Disarm(taken) => {
                let mut state = to(Worker::Take(taken, 1));
                // With an index: one that the guest does not reach, which may be any that it has passed.
                let kick_request = match self.format {
                    Format::Index => u8::MAX,
                    Format::Flag => 1,
                };
                state.worker_stores.push((Word::KickRequest, kick_request));
                vec![state]
            }
            Worker::Arm(taken) => {
                let mut state = to(match self.fault {
                    Fault::NoSecondLook => Worker::Asleep(taken),
                    Fault::NoWorkerFence => Worker::Check(taken),
                    _ => Worker::Fence(taken),
                });
                let kick_request = match self.format {
                    Format::Index => taken,
                    Format::Flag => 0,
                };
                state.worker_stores.push((Word::KickRequest, kick_request));
                vec![state]
            }
            Worker::Fence(taken) if state.worker_stores.is_empty() => {
                vec![to(Worker::Check(taken))]
            }
            Worker::Fence(_) => Vec::new(),
            Worker::Check(taken) if state.avail > taken => vec![to(Worker::Take(taken, 0))],
            Worker::Check(taken) => vec![to(Worker::Asleep(taken))],
            Worker::Asleep(taken) if state.kick => {
                let mut state = to(Worker::Take(taken, 0));
                state.kick = false;
                vec![state]
            }
            Worker::Asleep(_) => Vec::new(),
        }
    }
}

const FORMATS: [Format; 2] = [Format::Index, Format::Flag];

#[test]
fn no_order_of_arming_checking_and_kicking_loses_a_request() {
    for format in FORMATS {
        for reorders in [false, true] {
            let model = Model {
                format,
                fault: Fault::None,
                reorders,
            };
            let states = model
                .explore()
                .unwrap_or_else(|state| panic!("{format:?}: asleep without end: {state:?}"));
            assert!(states > 500, "{format:?}: only {states} states");
        }
    }
}

#[test]
fn each_fence_and_the_second_check_are_needed() {
    for format in FORMATS {
        for fault in [
            Fault::NoGuestFence,
            Fault::NoWorkerFence,
            Fault::NoSecondLook,
        ] {
            let model = Model {
                format,
                fault,
                reorders: false,
            };
            assert!(model.explore().is_err(), "{format:?} {fault:?}");
        }
    }
}
