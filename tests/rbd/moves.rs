//! A guest moves between two daemons of one image, whose exclusive lock moves with it.

use std::time::Duration;

use cleave_tests::ceph::CEPH;
use cleave_tests::{Case, Survivor, leave, moving, prepared, seeded};
use serde_json::json;

use crate::daemons::{report, serve, with_cluster};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![the_lock_moves_with_the_guest: CEPH]
}

fn the_lock_moves_with_the_guest() {
    with_cluster(|ceph| {
        let disk = ceph.image("moves", 32);
        let mut hosts = [(); 2].map(|()| serve(&disk, &["--start", "inactive"]));
        assert_eq!(ceph.owner("moves"), None, "nobody has it yet");
        let options = moving(2);
        let mut random = seeded("rbd-moves");
        let mut client = hosts[0].0.open(&options);
        let mut guest = Survivor::new(&mut client);
        for _ in 0..4 {
            guest.work(&mut client, &mut random, Duration::from_millis(200));
            let [(here, here_control), (there, there_control)] = &hosts;
            let mut target = prepared(there.socket(), &client, &options);
            let positions = leave(&client);
            assert_eq!(ceph.owner("moves"), None, "{}", here.log());
            assert_eq!(report(here_control)["possession"], json!("handed-over"));
            target.take_over(&mut client, &positions).unwrap();
            client = target;
            assert!(ceph.owner("moves").is_some(), "{}", there.log());
            assert_eq!(report(there_control)["possession"], json!("active"));
            guest.await_all(&mut client, true);
            guest.verify(&mut client, true);
            hosts.swap(0, 1);
        }
        drop(client);
        hosts.into_iter().for_each(|(daemon, _)| daemon.finish());
    });
}
