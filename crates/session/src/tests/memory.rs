//! Memory tables.

use super::*;

/// Hostile case 40, except for the checks in `Memory`.
#[test]
fn memory_tables_are_accepted_or_refused_as_a_whole() {
    let file = memory_file(MEM_BYTES);
    let region = |guest, bytes, user, offset| longs(&[guest, bytes, user, offset]);
    let table = |regions: &[Vec<u8>]| {
        let mut payload = words(&[regions.len() as u32, 0]);
        payload.extend(regions.concat());
        payload
    };
    let page = 0x1000;
    let good: Vec<_> = (0..32)
        .map(|at| region(at * page, page, USER + at * page, at * page))
        .collect();
    let rows = [
        (table(&[]), Ack),
        (table(&good[..1]), Ack),
        (table(&good[..8]), Ack),
        (table(&good[..9]), Ack),
        (table(&good), Ack),
        (table(&[region(0, 0, USER, 0)]), Nack),
        (table(&[region(0, 1 << 63, USER, 0)]), Nack),
        (table(&[region(u64::MAX, page, USER, 0)]), Nack),
        (table(&[region(0, page, u64::MAX, 0)]), Nack),
        (table(&[region(0, page, USER, u64::MAX)]), Nack),
        (table(&[region(0, MEM_BYTES + page, USER, 0)]), Nack),
        (table(&[region(0, MEM_BYTES, USER, page)]), Nack),
        (table(&[good[0].clone(), good[0].clone()]), Nack),
    ];
    let mut frontend = Frontend::negotiated();
    for (row, (payload, answer)) in rows.iter().enumerate() {
        let fds = vec![file.as_fd(); payload.len() / 32];
        assert_eq!(
            frontend.request_fds(Req::SET_MEM_TABLE, payload, &fds),
            *answer,
            "row {row}"
        );
    }
    // As sent by user-mode Linux: one region, in a message with room for two.
    let mut roomy = table(&good[..1]);
    roomy.resize(8 + 2 * 32, 0);
    let answer = frontend.request_fds(Req::SET_MEM_TABLE, &roomy, &[file.as_fd()]);
    assert_eq!(answer, Ack);
    // Fewer or more descriptors than regions, and more regions than allowed.
    for (regions, fds) in [(1, 0), (1, 2), (2, 1), (0, 1), (8, 9)] {
        let mut frontend = Frontend::negotiated();
        let fds = vec![file.as_fd(); fds];
        let answer = frontend.request_fds(Req::SET_MEM_TABLE, &table(&good[..regions]), &fds);
        assert_eq!(answer, Closed, "{regions} regions");
    }
}

#[test]
fn regions_are_added_and_removed() {
    let mut frontend = Frontend::with_memory();
    let region = |user| longs(&[0, 0, MEM_BYTES, user, 0]);
    assert_eq!(frontend.add_memory(0, MEM_BYTES, USER), Nack, "twice");
    assert_eq!(
        frontend.request(Req::REM_MEM_REG, &region(USER + 1)),
        Nack,
        "another"
    );
    // With a descriptor, which is legal and is sent by some frontends.
    let file = memory_file(4096);
    assert_eq!(
        frontend.request_fds(Req::REM_MEM_REG, &region(USER), &[file.as_fd()]),
        Ack
    );
    assert_eq!(
        frontend.request(Req::REM_MEM_REG, &region(USER)),
        Nack,
        "gone"
    );
    assert_eq!(frontend.add_memory(0, MEM_BYTES, USER), Ack);
    assert_eq!(frontend.request(Req::REM_MEM_REG, &region(USER)), Ack);
}

/// Hostile case 40: 509 regions are accepted, and not one more.
#[test]
fn there_are_as_many_memory_slots_as_reported() {
    let mut frontend = Frontend::negotiated();
    for at in 0..509 {
        let start = at * 0x10_0000;
        assert_eq!(
            frontend.add_memory(start, 0x1000, USER + start),
            Ack,
            "{at}"
        );
    }
    assert_eq!(frontend.add_memory(1 << 40, 0x1000, USER + (1 << 40)), Nack);
    assert!(frontend.is_alive());
}
