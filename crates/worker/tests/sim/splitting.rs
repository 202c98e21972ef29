//! Requests that are split, and what the splitter learns from them.

use super::model::run;
use super::*;

#[test]
fn split_requests_match_the_model_survive_a_power_cut_and_fail_as_one() {
    let chunk = |bytes| Split::Fixed(NonZeroU32::new(bytes).unwrap());
    let auto = || {
        Split::Auto(Prior {
            useful_depth: 64,
            chunk_min_bytes: 4096,
            never: false,
            measured: vec![
                (DataDirection::Read, 64 << 10, 4 << 10),
                (DataDirection::Write, 32 << 10, 8 << 10),
            ],
        })
    };
    for seed in seeds(2000..2010) {
        println!("CLEAVE_SEED={seed}");
        for fail_per_mille in [0, 20] {
            run(seed, fail_per_mille, chunk(4 << 10));
            run(seed, fail_per_mille, chunk(32 << 10));
            run(seed, fail_per_mille, auto());
        }
    }
}

#[test]
fn split_request_is_several_ops_and_one_answer() {
    let split = Split::Fixed(NonZeroU32::new(8 << 10).unwrap());
    let mut bench = Bench::with_split(quiet(1), FEATURES, split);
    assert_eq!(
        bench.ask(&Ask::read(16, 128 << 10, 65536, true)).status,
        status::OK
    );
    // The simulated store gets 16 ops. The failure of the twelfth fails the whole request, once.
    let mut failing = Bench::with_split(
        SimConfig {
            fail_at: Some(11),
            ..quiet(1)
        },
        FEATURES,
        Split::Fixed(NonZeroU32::new(8 << 10).unwrap()),
    );
    let answer = failing.ask(&Ask::read(16, 128 << 10, 65536, true));
    assert_eq!((answer.status, answer.used_bytes), (status::IOERR, 1));
    let again = failing.ask(&Ask::read(16, 128 << 10, 65536, true));
    assert_eq!(
        (again.status, again.used_bytes),
        (status::OK, (128 << 10) + 1)
    );
    assert_eq!(failing.totals().failed, 1);
}

#[test]
fn the_splitter_learns_nothing_from_requests_that_fail() {
    for (fail_per_mille, cells) in [(0, 1), (1000, 0)] {
        let split = Split::Auto(Prior {
            useful_depth: 64,
            chunk_min_bytes: 4096,
            never: false,
            measured: Vec::new(),
        });
        let config = SimConfig {
            fail_per_mille,
            ..quiet(1)
        };
        let mut bench = Bench::with_split(config, FEATURES, split);
        for _ in 0..5 {
            bench.ask(&Ask::read(0, 64 << 10, 65536, true));
        }
        assert_eq!(bench.device.split_states().len(), cells);
    }
}

/// A new splitter starts without findings, also if both changes happen before the worker checks.
#[test]
fn a_splitter_that_was_replaced_starts_afresh() {
    let auto = Split::Auto(Prior {
        useful_depth: 64,
        chunk_min_bytes: 4096,
        never: false,
        measured: Vec::new(),
    });
    let mut bench = Bench::with_split(quiet(1), FEATURES, auto);
    let large = Ask::read(0, 64 << 10, 65536, true);
    for _ in 0..5 {
        bench.ask(&large);
    }
    let tuning = Tuning::clone(&bench.device.tuning());
    bench.device.tune(Tuning {
        split: Split::Off,
        ..tuning.clone()
    });
    bench.device.tune(tuning);
    // Time for the worker to adopt it.
    for _ in 0..4 {
        bench.lap();
    }
    for asked in 1..4 {
        bench.ask(&large);
        assert_eq!(bench.device.split_states()[0].requests, asked);
    }
}
