//! The state of a device moves to another daemon, in the order of Cloud Hypervisor: the vrings are disabled and stopped, then the state
//! is saved; the other daemon checks it before its vrings start.

use cleave_client::message::protocol;
use cleave_client::{DeviceOptions, Error};
use cleave_tests::{Case, Daemon, Messages as _, TIMEOUT, small};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![a_state_is_loaded_for_an_equal_disk_and_refused_for_another]
}

fn a_state_is_loaded_for_an_equal_disk_and_refused_for_another() {
    let options = DeviceOptions {
        protocol_features: small(2).protocol_features | protocol::DEVICE_STATE,
        ..small(2)
    };
    let source = Daemon::serve(&["--disk", "ram:64M"]);
    let mut client = source.open(&options);
    client.frontend().set_config(32, &[0]).unwrap();
    for index in 0..2 {
        client.frontend().set_vring_enable(index, false).unwrap();
    }
    for index in 0..2 {
        client.frontend().vring_base(index).unwrap();
    }
    let state = client.frontend().save_state(TIMEOUT).unwrap();
    drop(client);
    source.finish();

    // (another disk, what its log says)
    let rows: [(&[&str], Option<&str>); 4] = [
        (&["--disk", "ram:64M"], None),
        (
            &["--disk", "ram:32M"],
            Some("the size 67108864, and this one has 33554432"),
        ),
        (
            &["--disk", "ram:64M", "--block-size", "4K"],
            Some("the block size 512, and this one has 4096"),
        ),
        (
            &["--disk", "ram:64M", "--read-only"],
            Some("the access read-write, and this one has read-only"),
        ),
    ];
    for (args, refused) in rows {
        let target = Daemon::serve(args);
        let mut client = target.open(&options);
        for index in 0..2 {
            client.frontend().vring_base(index).unwrap();
        }
        let loaded = client.frontend().load_state(&state);
        match refused {
            None => {
                loaded.unwrap();
                // The guest's cache mode came with it.
                assert_eq!(client.refresh_config().unwrap().writeback, 0);
            }
            Some(line) => {
                assert!(
                    matches!(loaded, Err(Error::Refused { code: 1, .. })),
                    "{args:?}: {loaded:?}"
                );
                assert!(target.log_has(line), "{args:?}: {}", target.log_tail());
            }
        }
        drop(client);
        target.finish();
    }
}
