//! All guests of a node share its address space, and no VMM can use it up.

use std::os::fd::AsFd;

use cleave_client::message::RegionBytes;
use cleave_client::{Error, Frontend};
use cleave_tests::{Node, TIMEOUT, exercise, small};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::ram;

/// A sparse file costs the VMM nothing, however long it is.
#[test]
fn a_frontend_that_maps_all_it_can_leaves_memory_for_other_guests() {
    const TIB: u64 = 1 << 40;
    let node = Node::start();
    for id in ["greedy", "other"] {
        node.add(id, &ram());
    }
    let mut greedy = Frontend::connect(&node.socket("greedy"), TIMEOUT).unwrap();
    let offered = greedy.features().unwrap();
    greedy.set_owner().unwrap();
    let protocol = greedy.protocol_features().unwrap();
    greedy.set_protocol_features(protocol).unwrap();
    greedy.set_features(offered & !(1 << 26)).unwrap();
    let file = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 64 * TIB).unwrap();
    let (mut mapped_bytes, mut bytes) = (0, 64 * TIB);
    while bytes >= 4096 {
        let region = RegionBytes {
            guest_addr: mapped_bytes,
            len_bytes: bytes,
            user_addr: mapped_bytes,
            file_offset: 0,
        };
        match greedy.add_mem_reg(region, file.as_fd()) {
            Ok(()) => mapped_bytes += bytes,
            Err(Error::Refused { .. }) => bytes /= 2,
            Err(other) => panic!("{bytes} bytes: {other}"),
        }
    }
    // As much as a large guest needs, and no more.
    assert!(
        (4 * TIB..=8 * TIB).contains(&mapped_bytes),
        "{mapped_bytes} bytes"
    );
    exercise(&mut node.open("other", &small(2))).unwrap();
    drop(greedy);
    node.daemon.finish();
}
