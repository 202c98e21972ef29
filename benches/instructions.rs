//! A worker turned by hand, for callgrind to count: a null disk, 4 KiB reads, one vring, one thread. Run by
//! `cargo xtask bench instructions`, which has callgrind count what happens inside of `counted` and nothing
//! else: neither the guest's driver nor the set-up.
//!
//! ```text
//! instructions          names the cases
//! instructions CASE     runs one, prints how many I/Os were counted
//! ```
#![forbid(unsafe_code)]

use std::process::ExitCode;

use cleave_benches::{Guest, Place, Signals, Turn, null};
use cleave_engine::Null;

/// I/Os that a case is counted over; more change nothing but the time that it takes.
const IOS: u32 = 3200;

/// A name, where the descriptors lie, reads at once, who signals whom.
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
    eprintln!("{why}; without a word the cases are named");
    ExitCode::from(2)
}

/// How many I/Os were counted.
fn run(&(_, place, depth, signals): &Case) -> u32 {
    let guest = Guest::new(1);
    let mut turn = Turn::new(&guest, place, depth, signals, null);
    // What happens once, at the first I/O, is not what an I/O costs.
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

/// What callgrind counts.
#[inline(never)]
fn counted(turn: &mut Turn<'_, Null>) {
    turn.lap();
}
