//! A guest that moves to a daemon with another kind of storage for the same bytes.

use std::time::Duration;

use cleave_tests::{
    Case, Daemon, SURVIVOR_DISK_BYTES, Scratch, Survivor, leave, moving, prepared, seeded,
};

use crate::servers::{At, QEMU, qemu_nbd, serve};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![a_guest_of_a_file_moves_to_its_export_and_back: QEMU]
}

/// The guest has negotiated all that the file offers.
fn a_guest_of_a_file_moves_to_its_export_and_back() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
    let file = Daemon::serve(&["--disk", image.to_str().unwrap(), "--start", "inactive"]);
    let options = moving(2);
    let mut random = seeded("nbd-moves");
    let mut client = file.open(&options);
    let mut guest = Survivor::new(&mut client);
    guest.work(&mut client, &mut random, Duration::from_millis(200));
    let positions = leave(&client);
    // The file is locked until the guest has left.
    let at = At::Unix(scratch.join("nbd"));
    let server = qemu_nbd(&image, "raw", &at, &["--shared=4"]);
    let (export, _) = serve(&at.uri("", ""), &["--start", "inactive"]);
    let mut there = prepared(export.socket(), &client, &options);
    there.take_over(&mut client, &positions).unwrap();
    client = there;
    guest.work(&mut client, &mut random, Duration::from_millis(200));
    guest.await_all(&mut client, true);
    guest.verify(&mut client, true);
    let positions = leave(&client);
    let mut back = prepared(file.socket(), &client, &options);
    drop(server);
    back.take_over(&mut client, &positions).unwrap();
    guest.verify(&mut back, true);
    drop((client, back));
    file.finish();
    export.finish();
}
