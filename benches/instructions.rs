//! Runs a worker lap by lap for callgrind: a null disk, 4 KiB reads, one vring, one thread. `cargo xtask bench
//! instructions` runs it and has callgrind count only the code inside of `counted`, without the guest's driver and
//! the set-up.
//!
//! ```text
//! instructions          names the cases
//! instructions CASE     runs one, prints how many I/Os were counted
//! ```
#![forbid(unsafe_code)]

use std::process::ExitCode;

use cleave_benches::{Guest, ManualWorker, Place, Signals, null};
use cleave_engine::Null;

/// I/Os that are counted for a case; more only take longer.
const IOS: u32 = 3200;

/// A name, the placement of descriptors, reads in a batch, and how guest and worker notify each other.
type Case = (&'static str, Place, u16, Signals);

const CASES: &[Case] = &[
    ("poll-1-direct", Place::Direct, 1, Signals::None),
    ("poll-1-indirect", Place::Indirect, 1, Signals::None),
    ("poll-32-direct", Place::Direct, 32, Signals::None),
    ("poll-32-indirect", Place::Indirect, 32, Signals::None),
    (
        "poll-32-indirect-kept",
        Place::Indirect,
        32,
        Signals::NoneAndKept,
    ),
    (
        "poll-32-indirect-logged",
        Place::Indirect,
        32,
        Signals::NoneAndLogged,
    ),
    ("sleep-1-indirect", Place::Indirect, 1, Signals::KickAndCall),
    (
        "sleep-32-indirect",
        Place::Indirect,
        32,
        Signals::KickAndCall,
    ),
];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.as_slice() {
        [] => {
            for case in CASES {
                println!("{}", case.0);
            }
            ExitCode::SUCCESS
        }
        [name] => match CASES.iter().find(|case| case.0 == name) {
            Some(case) => {
                println!("{}", run(case));
                ExitCode::SUCCESS
            }
            None => refuse(&format!("no case `{name}`")),
        },
        _ => refuse("name one case"),
    }
}

fn refuse(why: &str) -> ExitCode {
    eprintln!("{why}; without an argument it lists the cases");
    ExitCode::from(2)
}

/// Returns the number of I/Os that were counted.
fn run(&(_, place, depth, signals): &Case) -> u32 {
    let guest = Guest::new(1);
    let mut turn = ManualWorker::new(&guest, place, depth, signals, null);
    // Work that happens once, at the first I/O, is not part of the cost of an I/O.
    for _ in 0..8 {
        turn.offer();
        turn.serve();
    }
    let rounds = IOS / u32::from(depth);
    for _ in 0..rounds {
        turn.offer();
        turn.serve_by(counted);
    }
    rounds * u32::from(depth)
}

/// The code that callgrind counts.
#[inline(never)]
fn counted(turn: &mut ManualWorker<'_, Null>) {
    turn.lap();
}
