//! The body of a PATCH on the control socket: it changes the tuning to one within all bounds, or is refused with a line.
#![no_main]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "modules of the program, of which one is used"
)]

#[path = "../../../crates/daemon/src/failure.rs"]
mod failure;
#[path = "../../../crates/daemon/src/pacing.rs"]
mod pacing;
#[path = "../../../crates/daemon/src/control/patch.rs"]
mod patch;
#[path = "../../../crates/daemon/src/split.rs"]
mod split;
#[path = "../../../crates/daemon/src/unit.rs"]
mod unit;

use std::sync::LazyLock;

use cleave_disk::{Disk, DiskSpec, OpenOptions};
use cleave_worker::{Prior, Split, Tuning};
use libfuzzer_sys::fuzz_target;

static DISK: LazyLock<Disk> =
    LazyLock::new(|| Disk::open(&DiskSpec::Ram(1 << 20), &OpenOptions::default()).unwrap());

fn run(body: &[u8]) {
    let auto = Split::Auto(Prior::from_limits(DISK.limits()));
    let ground = patch::Ground {
        disk: &DISK,
        vrings: 4,
        auto: &auto,
    };
    let now = Tuning::new(Split::Off);
    match patch::apply(body, &now, &ground) {
        Ok(tuning) => {
            let within = |value: u32, least: i64, most: i64| (least..=most).contains(&value.into());
            assert!(within(tuning.spin_cpu_max, 0, pacing::SPIN_MAX));
            assert!(
                tuning
                    .spin_cpu_total
                    .is_none_or(|total| within(total, 1, pacing::SPIN_MAX))
            );
            assert!(within(tuning.coalesce.us, 0, pacing::COALESCE_US_MAX));
            assert!(within(tuning.coalesce.max, 0, pacing::COALESCE_MAX_MAX));
            // The tuning in force can be sent again.
            assert!(patch::apply(body, &tuning, &ground).is_ok());
        }
        Err(why) => assert!(!why.is_empty()),
    }
}

fuzz_target!(|input: &[u8]| run(input));
