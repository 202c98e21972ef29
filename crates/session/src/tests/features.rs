//! The handshake, the configuration space and the device status.

use super::*;

#[test]
fn the_handshake_works_in_both_orders() {
    for protocol_first in [true, false] {
        let mut frontend = Frontend::connect();
        let offered = frontend.ask_number(Req::GET_FEATURES);
        assert_eq!(offered & FEATURES, FEATURES);
        if !protocol_first {
            frontend.send(Req::SET_FEATURES, &longs(&[FEATURES]), &[]);
        }
        assert_eq!(frontend.ask_number(Req::GET_PROTOCOL_FEATURES), PROTOCOL);
        frontend.send(Req::SET_PROTOCOL_FEATURES, &longs(&[PROTOCOL]), &[]);
        if protocol_first {
            assert_eq!(
                frontend.request(Req::SET_FEATURES, &longs(&[FEATURES])),
                Ack
            );
        }
        for _ in 0..2 {
            assert_eq!(frontend.request(Req::SET_OWNER, &[]), Ack);
        }
        assert_eq!(frontend.ask_number(Req::GET_QUEUE_NUM), 4);
        assert_eq!(frontend.ask_number(Req::GET_MAX_MEM_SLOTS), 509);
        assert!(matches!(frontend.end(), Ending::HungUp));
    }
}

/// Hostile case 34.
#[test]
fn features_that_were_not_offered_are_refused() {
    let mut frontend = Frontend::negotiated();
    let rows = [
        (FEATURES, Ack),
        (0, Ack),
        (feature::VHOST_USER_PROTOCOL, Ack),
        (FEATURES & !feature::VERSION_1, Nack),
        (feature::CONFIG_WCE, Nack),
        (FEATURES | 1 << 26, Ack), // LOG_ALL
        (1 << 26, Ack),
        (feature::CONFIG_WCE | 1 << 26, Nack),
        (FEATURES | 1 << 34, Nack), // packed
        (u64::MAX, Nack),
    ];
    for (features, answer) in rows {
        assert_eq!(
            frontend.request(Req::SET_FEATURES, &longs(&[features])),
            answer,
            "{features:#x}"
        );
    }
    // The refused messages have changed nothing, in the `vhost` crate either.
    assert_eq!(
        frontend.request(Req::SET_FEATURES, &longs(&[FEATURES])),
        Ack
    );
    assert_eq!(
        frontend.request(Req::SET_FEATURES, &longs(&[1 << 34])),
        Nack
    );
    assert_eq!(
        frontend.request(Req::SET_VRING_ENABLE, &words(&[0, 1])),
        Ack
    );
    // Without an acknowledgement the frontend would not notice the refusal.
    frontend.send(Req::SET_FEATURES, &longs(&[u64::MAX]), &[]);
    assert!(!frontend.is_alive());
    assert!(matches!(frontend.end(), Ending::Refused(_)));
}

#[test]
fn protocol_features_that_were_not_offered_end_the_connection() {
    for bit in [2, 4, 8, 14, 18, 20, 22, 40] {
        let mut frontend = Frontend::connect();
        frontend.ask_number(Req::GET_FEATURES);
        frontend.send(
            Req::SET_PROTOCOL_FEATURES,
            &longs(&[PROTOCOL | 1 << bit]),
            &[],
        );
        assert!(!frontend.is_alive(), "{bit}");
    }
}

/// Hostile cases 31 and 32.
#[test]
fn the_configuration_space_is_read_within_its_bounds() {
    let mut frontend = Frontend::negotiated();
    let whole = frontend.config(0, 256).unwrap();
    assert_eq!(whole.len(), 12 + 256);
    assert_eq!(message::long(&whole, 12), CAPACITY / 512);
    assert!(whole[12 + 96..].iter().all(|byte| *byte == 0));
    let within = [
        (0, 8),
        (34, 2),
        (95, 1),
        (0, 60),
        (0, 97),
        (95, 2),
        (255, 1),
    ];
    for (offset, bytes) in within {
        let part = frontend.config(offset, bytes).unwrap();
        assert_eq!(message::word(&part, 0), offset);
        assert_eq!(message::word(&part, 4), bytes);
        let range = 12 + offset as usize..12 + (offset + bytes) as usize;
        assert_eq!(part[12..], whole[range], "{offset} {bytes}");
    }
    let beyond = [
        (0, 0),
        (0, 257),
        (255, 2),
        (256, 1),
        (256, 0),
        (96, 0),
        (4095, 1),
        (4096, 1),
        (u32::MAX, 1),
        (1, u32::MAX),
        (u32::MAX, u32::MAX),
    ];
    for (offset, bytes) in beyond {
        let payload = frontend.config(offset, bytes).unwrap();
        assert_eq!(payload, words(&[offset, 0, 0]), "{offset} {bytes}");
    }
    assert!(frontend.is_alive());
}

#[test]
fn only_the_cache_mode_is_written() {
    let mut frontend = Frontend::with_memory();
    let all = longs(&[FEATURES | feature::FLUSH]);
    assert_eq!(frontend.request(Req::SET_FEATURES, &all), Ack);
    let device = frontend.device.clone();
    let writeback = || device.writeback.load(Ordering::Relaxed);
    let message = |offset, flags, bytes: &[u8]| {
        let mut payload = words(&[offset, bytes.len() as u32, flags]);
        payload.extend_from_slice(bytes);
        payload
    };
    // (offset, flags, bytes, answer, write-back afterwards)
    let rows: [(u32, u32, &[u8], Answer, bool); 9] = [
        (32, 0, &[0], Ack, false),
        (32, 0, &[1], Ack, true),
        (32, 1, &[0], Ack, false),
        (32, 0, &[7], Ack, true),
        (31, 0, &[0], Nack, true),
        (32, 0, &[0, 0], Nack, true),
        (33, 0, &[0], Nack, true),
        (0, 0, &[0; 96], Nack, true),
        (4000, 0, &[0], Nack, true),
    ];
    // It is in force while a vring runs: until then the disk may be another frontend's.
    for runs in [false, true] {
        if runs {
            assert_eq!(frontend.start(0), Ack);
        }
        for (offset, flags, bytes, answer, after) in &rows {
            let payload = message(*offset, *flags, bytes);
            assert_eq!(
                frontend.request(Req::SET_CONFIG, &payload),
                *answer,
                "{offset} {bytes:?}"
            );
            assert_eq!(writeback(), *after || !runs, "{offset} {bytes:?}");
            let read = frontend.config(32, 1).unwrap();
            assert_eq!(read[12], u8::from(*after));
        }
    }
    assert!(frontend.base(0).is_some());
    // A driver that did not acknowledge CONFIG_WCE has no such byte.
    let features = FEATURES & !feature::CONFIG_WCE;
    assert_eq!(
        frontend.request(Req::SET_FEATURES, &longs(&[features])),
        Ack
    );
    assert_eq!(
        frontend.request(Req::SET_CONFIG, &message(32, 0, &[0])),
        Nack
    );
    assert!(writeback());
}

/// virtio 1.3 §5.2.5.2.
#[test]
fn the_cache_mode_of_a_driver_that_cannot_flush_is_write_through() {
    let mut frontend = Frontend::negotiated();
    let bit_30 = feature::VHOST_USER_PROTOCOL;
    let wce = feature::VERSION_1 | feature::CONFIG_WCE | bit_30;
    // Before a driver has chosen, and for each of its choices.
    for (features, mode) in [
        (bit_30, 1),
        (wce, 0),
        (wce | feature::FLUSH, 1),
        (feature::VERSION_1 | bit_30, 1),
    ] {
        let taken = longs(&[features]);
        assert_eq!(frontend.request(Req::SET_FEATURES, &taken), Ack);
        assert_eq!(frontend.config(32, 1).unwrap()[12], mode, "{features:#x}");
    }
}

#[test]
fn the_status_is_kept_and_zero_resets() {
    let mut frontend = Frontend::negotiated();
    assert_eq!(frontend.ask_number(Req::GET_STATUS), 0);
    for status in [1, 3, 11, 15, 0x8f, 0] {
        assert_eq!(frontend.request(Req::SET_STATUS, &longs(&[status])), Ack);
        assert_eq!(frontend.ask_number(Req::GET_STATUS), status);
    }
    assert_eq!(frontend.request(Req::SET_STATUS, &longs(&[256])), Nack);
    for (request, payload) in [
        (Req::SET_STATUS, longs(&[0])),
        (Req::RESET_DEVICE, vec![]),
        (Req::RESET_OWNER, vec![]),
    ] {
        assert_eq!(frontend.request(Req::SET_VRING_BASE, &words(&[0, 77])), Ack);
        assert_eq!(frontend.base(0), Some((0, 77)));
        assert_eq!(frontend.request(request, &payload), Ack);
        assert_eq!(frontend.base(0), Some((0, 77)), "{request:?}");
    }
}

#[test]
fn messages_of_features_that_were_not_taken_end_the_connection() {
    let rows = [
        (Req::GET_STATUS, vec![]),
        (Req::SET_STATUS, longs(&[1])),
        (Req::GET_QUEUE_NUM, vec![]),
        (Req::GET_MAX_MEM_SLOTS, vec![]),
        (Req::RESET_DEVICE, vec![]),
        (Req::GET_CONFIG, words(&[0, 8, 0, 0, 0])),
        (Req::GET_CONFIG, words(&[0, 0, 0])),
        (Req::SET_CONFIG, words(&[32, 1, 0])),
        (Req::SET_VRING_ENABLE, words(&[0, 1])),
    ];
    for (request, payload) in rows {
        let mut frontend = Frontend::connect();
        frontend.send(request, &payload, &[]);
        assert_eq!(frontend.reply(), None, "{request:?}");
        assert!(matches!(frontend.end(), Ending::Refused(_)));
    }
}
