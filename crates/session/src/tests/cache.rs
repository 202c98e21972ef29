//! The note by which the next process knows that a guest has switched its write cache off.

use std::net::Shutdown;
use std::sync::atomic::AtomicBool;

use cleave_worker::CacheNote;

use super::inflight::layout;
use super::*;

#[derive(Debug, Default)]
struct NotedCache(AtomicBool);

impl CacheNote for NotedCache {
    fn is_off(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    fn set_off(&self, is_off: bool) {
        self.0.store(is_off, Ordering::SeqCst);
    }
}

/// A device in a new process. `is_off`: what an earlier one noted.
fn noting(is_off: bool) -> (Arc<Device>, Arc<NotedCache>) {
    let note = Arc::new(NotedCache(AtomicBool::new(is_off)));
    let device = Arc::into_inner(device()).unwrap();
    (Arc::new(device.noting_cache(Some(note.clone()))), note)
}

/// Connects a frontend whose driver can flush.
fn flushing(device: &Arc<Device>) -> Frontend {
    let frontend = Frontend::connect_to(device.clone(), Arc::default());
    let mut frontend = frontend.negotiate().share_memory();
    let all = longs(&[FEATURES | feature::FLUSH]);
    assert_eq!(frontend.request(Req::SET_FEATURES, &all), Ack);
    frontend
}

fn switch(frontend: &mut Frontend, mode: u8) -> Answer {
    frontend.request(Req::SET_CONFIG, &mode_of(mode))
}

fn mode_of(mode: u8) -> Vec<u8> {
    let mut payload = words(&[32, 1, 0]);
    payload.push(mode);
    payload
}

/// The note is there before the guest is told that its cache is off, and until it has been told that the cache is on.
#[test]
fn a_cache_that_is_off_is_noted_whenever_the_guest_may_believe_it() {
    for runs in [false, true] {
        let (device, note) = noting(false);
        let mut frontend = flushing(&device);
        if runs {
            assert_eq!(frontend.start(0), Ack);
        }
        assert_eq!(switch(&mut frontend, 0), Ack);
        assert!(note.is_off(), "{runs}");
        assert_eq!(switch(&mut frontend, 1), Ack);
        assert!(frontend.is_alive());
        // Before a vring runs, an earlier guest may rely on it.
        assert_eq!(note.is_off(), !runs, "{runs}");
        if !runs {
            assert_eq!(frontend.start(0), Ack);
            assert!(frontend.is_alive());
            assert!(!note.is_off());
        }
        assert_eq!(switch(&mut frontend, 0), Ack);
        // This answer cannot be sent.
        frontend.stream.shutdown(Shutdown::Read).unwrap();
        frontend.send_raw(Req::SET_CONFIG.into(), 0x9, 13, &mode_of(1), &[]);
        drop(frontend.thread.join().unwrap());
        assert!(device.writeback.load(Ordering::Relaxed));
        assert!(note.is_off(), "{runs}");
        // So the guest may go on with a cache that is off, in this process as well.
        assert_eq!(flushing(&device).start(0), Ack);
        assert!(!device.writeback.load(Ordering::Relaxed));
    }
}

/// The mode that a guest has told an earlier process holds for it, and for nobody else.
#[test]
fn a_guest_that_goes_on_has_the_mode_that_was_noted() {
    // (the frontend reads the configuration, its vring's base, the mode that it sets, write-back afterwards)
    let rows = [
        (false, 0, None, false),
        (false, 5, None, false),
        (true, 5, None, false),
        (true, 0, None, true),
        (false, 0, Some(1), true),
        (true, 0, Some(0), false),
    ];
    for is_noted in [false, true] {
        for (reads, base, mode, expected) in rows {
            let (device, note) = noting(is_noted);
            let mut frontend = flushing(&device);
            if reads {
                assert_eq!(frontend.config(0, 60).unwrap()[12 + 32], 1);
            }
            frontend.configure(0);
            let at = words(&[0, base]);
            assert_eq!(frontend.request(Req::SET_VRING_BASE, &at), Ack);
            if let Some(mode) = mode {
                assert_eq!(switch(&mut frontend, mode), Ack);
            }
            let kick = bell();
            let started = frontend.request_fds(Req::SET_VRING_KICK, &longs(&[0]), &[kick.as_fd()]);
            assert_eq!(started, Ack);
            let row = (is_noted, reads, base, mode);
            let expected = expected || !is_noted && mode.is_none();
            assert_eq!(
                device.writeback.load(Ordering::Relaxed),
                expected,
                "{row:?}"
            );
            assert_eq!(frontend.config(32, 1).unwrap()[12], u8::from(expected));
            assert_eq!(note.is_off(), !expected, "{row:?}");
            // It pauses and goes on, and another frontend comes: the mode is that of this process now.
            frontend.base(0).unwrap();
            assert_eq!(frontend.start(0), Ack);
            assert_eq!(
                device.writeback.load(Ordering::Relaxed),
                expected,
                "{row:?}"
            );
            frontend.end();
            let mut next = flushing(&device);
            assert_eq!(next.start(0), Ack);
            assert_eq!(
                device.writeback.load(Ordering::Relaxed),
                expected,
                "{row:?}"
            );
        }
    }
}

/// A frontend that reads the configuration whenever it connects may name any position.
#[test]
fn a_guest_with_requests_in_flight_goes_on() {
    let (device, _) = noting(false);
    let mut first = flushing(&device);
    let (bytes, offset, file) = first.region(&layout(0, 0, 4, 8));
    let (payload, file) = (layout(bytes, offset, 4, 8), file.unwrap());
    assert_eq!(first.give(&payload, &file), Ack);
    assert_eq!(first.start(0), Ack);
    first.end();
    for is_in_flight in [false, true] {
        let (device, note) = noting(true);
        let mut next = flushing(&device);
        assert!(next.config(0, 60).is_some());
        // The first entry of vring 0.
        std::os::unix::fs::FileExt::write_all_at(&file, &[u8::from(is_in_flight)], 16).unwrap();
        assert_eq!(next.give(&payload, &file), Ack);
        assert_eq!(next.start(0), Ack);
        assert!(next.is_alive());
        assert_eq!(device.writeback.load(Ordering::Relaxed), !is_in_flight);
        assert_eq!(note.is_off(), is_in_flight);
    }
}

/// An operator who adds the option and restarts the daemon wants durable writes from then on, although the guest believes in a cache.
#[test]
fn a_process_that_is_write_through_stays_so_until_the_guest_says_otherwise() {
    let mut frontend = flushing(&device());
    assert_eq!(frontend.start(0), Ack);
    let mut frontend = frontend.move_to(write_through());
    let mode = |frontend: &mut Frontend| frontend.config(32, 1).unwrap()[12];
    assert_eq!(mode(&mut frontend), 0);
    assert!(!frontend.device.writeback.load(Ordering::Relaxed));
    // The other way round the guest may rely on what it has.
    let mut frontend = frontend.move_to(device());
    assert_eq!(mode(&mut frontend), 0);
    let mut frontend = frontend.move_to(write_through());
    assert_eq!(switch(&mut frontend, 1), Ack);
    assert_eq!(mode(&mut frontend), 1);
    frontend.end();
}
