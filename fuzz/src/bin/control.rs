//! The bodies of a PATCH and of a PUT, and the file of a disk: each is a description within all bounds that is read as it is written,
//! or is refused with a line.
#![no_main]

use cleave_config::{Change, DiskConfig, Names};
use libfuzzer_sys::fuzz_target;

fn run(text: &[u8]) {
    let disk = DiskConfig::from_json(br#"{"disk": ["ram:1M"], "limits": {"group": "g"}}"#).unwrap();
    match Change::from_json(text).and_then(|change| disk.with(&change).map(|next| (change, next))) {
        Ok((change, next)) => {
            is_within(&next);
            is_kept(&next);
            // The settings in force can be sent again.
            assert!(next.with(&change).is_ok_and(|again| again == next));
        }
        Err(why) => assert!(!why.is_empty()),
    }
    match DiskConfig::from_json(text) {
        Ok(disk) if disk.check(Names::Fields).is_ok() => {
            is_within(&disk);
            is_kept(&disk);
        }
        Ok(_) => {}
        Err(why) => assert!(!why.is_empty()),
    }
    if let Ok(text) = std::str::from_utf8(text)
        && let Ok(disk) = DiskConfig::from_toml(text)
    {
        is_kept(&disk);
    }
}

fn is_within(disk: &DiskConfig) {
    assert!(disk.spin_cpu_max.get().get() <= 25_600);
    let total = disk.spin_cpu_total.get().0;
    assert!(total.is_none_or(|total| (1..=25_600).contains(&total.get())));
    assert!(disk.coalesce_us.get().get() <= 10_000);
    assert!(disk.coalesce_max.get().get() <= 32_768);
    assert!((1..=256).contains(&disk.queues.get().get()));
}

fn is_kept(disk: &DiskConfig) {
    let file = disk.to_toml().unwrap();
    assert_eq!(DiskConfig::from_toml(&file).as_ref(), Ok(disk));
}

fuzz_target!(|input: &[u8]| run(input));
