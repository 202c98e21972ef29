//! Which writes are durable in each cache mode, and from when on.

use super::*;

#[test]
fn write_through_makes_every_completed_write_durable() {
    let cases = [
        ("cache off", FEATURES, false),
        ("flush not taken", FEATURES & !feature::FLUSH, true),
    ];
    for (name, features, writeback) in cases {
        let mut bench = Bench::new(quiet(3), features);
        bench.device.writeback.store(writeback, Ordering::Relaxed);
        assert_eq!(
            bench.ask(&Ask::write(16, vec![9; 1024], 512, false)).status,
            status::OK
        );
        let store = bench.store.lock().unwrap();
        assert_eq!(store.durable[16 * 512..][..1024], [9; 1024], "{name}");
    }
}

#[test]
fn after_the_cache_is_switched_off_completed_writes_are_durable() {
    let config = |seed, ops| SimConfig {
        ops,
        delay_max: 30,
        ..quiet(seed)
    };
    for seed in 0..50 {
        switch_off_mid_load(seed, Bench::new(config(seed, 64), FEATURES), |n| n * 4096);
        // Chunks of one page, dealt out to the legs in turn.
        switch_off_mid_load(seed, Bench::striped(config(seed, 2048), FEATURES), |n| {
            n % LEGS * (DISK_BYTES / LEGS) + n / LEGS * 4096
        });
    }
}

/// `place`: the store's page that holds page `n` of the disk.
fn switch_off_mid_load(seed: u64, mut bench: Bench, place: impl Fn(usize) -> usize) {
    for n in 0..8 {
        let ask = Ask::write(n * 8, vec![n as u8 + 1; 4096], 4096, true);
        bench.driver.submit(&ask).unwrap();
    }
    bench.lap();
    let before = bench.driver.collect(|_| 0).len();
    bench.device.writeback.store(false, Ordering::Relaxed);
    let mut answers = 0;
    for _ in 0..600 {
        bench.lap();
        answers += bench.driver.collect(|_| 0).len();
        // Checked at once: later the simulated disk may have written back by itself.
        let store = bench.store.lock().unwrap();
        let durable = (0..8)
            .filter(|n| store.durable[place(*n)] == *n as u8 + 1)
            .count();
        assert!(durable >= answers, "seed {seed}: {durable} of {answers}");
        if before + answers == 8 {
            return;
        }
    }
    panic!("seed {seed}: {answers} answers after {before}");
}

#[test]
fn a_write_back_write_is_not_durable_before_its_flush() {
    // Proves that the durable copy of the simulation differs at all.
    let mut found = false;
    for seed in 0..20 {
        let mut bench = Bench::new(quiet(seed), FEATURES);
        bench.ask(&Ask::write(16, vec![9; 1024], 512, false));
        found |= bench.store.lock().unwrap().durable[16 * 512] != 9;
        bench.ask(&Ask::flush());
        assert_eq!(bench.store.lock().unwrap().durable[16 * 512], 9);
    }
    assert!(found);
}
