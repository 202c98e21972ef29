//! Watches, bells and waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use rustix::fs::{OFlags, fcntl_setfl};

use super::*;

#[test]
fn a_signal_wakes_again_and_again_without_being_read() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    for nonblocking in [true, false] {
        let fd = eventfd(nonblocking);
        engine.watch(2, fd.try_clone().unwrap());
        engine.enter(soon()).unwrap();
        assert_eq!(woken(&mut engine), None);
        for _ in 0..5 {
            let other = fd.try_clone().unwrap();
            let kicker = thread::spawn(move || signal(&other));
            engine.enter(Wait::Until(None)).unwrap();
            assert_eq!(woken(&mut engine), Some(2));
            assert_eq!(woken(&mut engine), None);
            kicker.join().unwrap();
        }
        // A polling owner sees the signal too.
        signal(&fd);
        engine.enter(Wait::No).unwrap();
        assert_eq!(woken(&mut engine), Some(2));
        assert_eq!(count(&fd), 6, "the counter is not read");
        // A signal that precedes the watch is reported at once.
        signal(&fd);
        engine.watch(2, fd.try_clone().unwrap());
        engine.enter(Wait::Until(None)).unwrap();
        assert_eq!(woken(&mut engine), Some(2));
        engine.unwatch(2);
        engine.enter(Wait::No).unwrap();
        signal(&fd);
        engine.enter(soon()).unwrap();
        assert_eq!(woken(&mut engine), None);
    }
}

#[test]
fn a_watch_outlasts_a_short_lack_of_memory() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let fd = eventfd(true);
    engine.reactor.plain_ring().shortages.set(3);
    engine.watch(2, fd.try_clone().unwrap());
    engine.enter(Wait::No).unwrap();
    assert_eq!(woken(&mut engine), None, "it is watched");
    for _ in 0..3 {
        signal(&fd);
        engine.enter(soon()).unwrap();
        assert_eq!(woken(&mut engine), Some(2));
    }
}

/// The kernel does not remove a poll that is just reporting a signal (EALREADY). Such a poll stayed armed for
/// good. Linux 6.1 then waited for it when the ring released its files, so the engine's thread never ended.
#[test]
fn a_watch_that_is_signalled_as_it_is_removed_is_gone() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    for signalled_first in [true, false] {
        let fd = eventfd(true);
        engine.watch(0, fd.try_clone().unwrap());
        engine.enter(Wait::No).unwrap();
        // The poll's reports and its end are delayed until the reactor enters the kernel.
        if signalled_first {
            signal(&fd);
        }
        engine.unwatch(0);
        signal(&fd);
        for _ in 0..3 {
            engine.enter(Wait::No).unwrap();
            assert_eq!(woken(&mut engine), None);
        }
        // A poll that still exists would end the sleep.
        signal(&fd);
        let until = Instant::now() + Duration::from_millis(100);
        engine.enter(Wait::Until(Some(until))).unwrap();
        assert!(
            Instant::now() >= until,
            "signalled first: {signalled_first}"
        );
    }
}

#[test]
fn a_replaced_watch_is_the_new_one_only() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let (old, new) = (eventfd(true), eventfd(true));
    for entered in [true, false] {
        count(&new);
        engine.watch(0, old.try_clone().unwrap());
        if entered {
            engine.enter(Wait::No).unwrap();
        }
        engine.watch(0, new.try_clone().unwrap());
        engine.enter(Wait::No).unwrap();
        while woken(&mut engine).is_some() {}
        signal(&old);
        engine.enter(soon()).unwrap();
        assert_eq!(woken(&mut engine), None);
        signal(&new);
        engine.enter(Wait::Until(None)).unwrap();
        assert_eq!(woken(&mut engine), Some(0));
    }
    // An out-of-range slot is ignored.
    engine.watch(99, eventfd(true));
    engine.unwatch(99);
}

#[test]
fn hostile_kicks_wake_once_and_cost_nothing_after() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    let dir = folder();
    let (pipe_in, pipe_out) = rustix::pipe::pipe().unwrap();
    drop(pipe_out);
    let regular: OwnedFd = std::fs::File::open(image(dir.path(), 4096)).unwrap().into();
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let folder: OwnedFd = std::fs::File::open(dir.path()).unwrap().into();
    let path = rustix::fs::open(
        dir.path(),
        rustix::fs::OFlags::PATH,
        rustix::fs::Mode::empty(),
    )
    .unwrap();
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let full = eventfd(true);
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    for (name, fd) in [
        ("hung-up pipe", pipe_in),
        ("regular file", regular),
        ("/dev/null", null),
        ("folder", folder),
        ("path", path),
        ("epoll", epoll),
        ("full counter", full),
    ] {
        let mut engine = engine(&disk, &guest);
        engine.watch(1, fd);
        let mut wakes = 0;
        for _ in 0..20 {
            engine
                .enter(Wait::Until(Some(Instant::now() + Duration::from_millis(2))))
                .unwrap();
            while woken(&mut engine).is_some() {
                wakes += 1;
            }
        }
        println!("{name}: woken {wakes} times, {} enters", engine.enters());
        assert!(wakes <= 16, "{name}");
        assert!(engine.enters() <= 25, "{name}");
        // The engine still works.
        let good = eventfd(true);
        engine.watch(0, good.try_clone().unwrap());
        signal(&good);
        engine.enter(Wait::Until(None)).unwrap();
        assert_eq!(woken(&mut engine), Some(0));
    }
}

#[test]
fn a_bell_rings_once_per_enter_whatever_its_flags() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    for nonblocking in [true, false] {
        let mut engine = engine(&disk, &guest);
        let fd = eventfd(nonblocking);
        let flags = rustix::fs::fcntl_getfl(&fd).unwrap();
        engine.set_bell(3, Some(fd.try_clone().unwrap()));
        for _ in 0..5 {
            engine.ring(3);
            engine.ring(3);
            engine.enter(Wait::No).unwrap();
            assert_eq!(count(&fd), 1, "nonblocking {nonblocking}");
            engine.enter(Wait::No).unwrap();
            assert_eq!(count(&fd), 0);
        }
        if nonblocking {
            assert_eq!(engine.enters(), 5, "a bell costs one enter");
        }
        // Together with a sleep.
        engine.ring(3);
        engine.enter(soon()).unwrap();
        assert_eq!(count(&fd), 1);
        // A bell that is removed after it was rung is still written.
        engine.ring(3);
        engine.set_bell(3, None);
        engine.ring(3);
        engine.enter(Wait::No).unwrap();
        assert_eq!(count(&fd), 1);
        engine.set_bell(3, Some(fd.try_clone().unwrap()));
        engine.ring(3);
        drop(engine);
        assert_eq!(count(&fd), 1, "a bell rung before the close is written");
        assert_eq!(rustix::fs::fcntl_getfl(&fd).unwrap(), flags);
    }
}

#[test]
fn full_and_broken_bells_are_ignored_without_blocking() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    for nonblocking in [true, false] {
        let mut engine = engine(&disk, &guest);
        let full = eventfd(nonblocking);
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        engine.set_bell(0, Some(full.try_clone().unwrap()));
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        drop(reader);
        engine.set_bell(1, Some(writer));
        let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        engine.set_bell(2, Some(null));
        let good = eventfd(nonblocking);
        engine.set_bell(3, Some(good.try_clone().unwrap()));
        for _ in 0..3 {
            for slot in 0..6 {
                engine.ring(slot);
            }
            engine.enter(soon()).unwrap();
            assert_eq!(engine.reap(), None);
            assert_eq!(count(&good), 1);
        }
        assert!(count(&full) >= u64::MAX - 1);
    }
}

/// Each pending write would cost kernel memory, for as many calls as the guest has.
#[test]
fn a_full_bell_that_became_blocking_keeps_no_writes() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let fd = eventfd(true);
    engine.set_bell(0, Some(fd.try_clone().unwrap()));
    rustix::fs::fcntl_setfl(&fd, rustix::fs::OFlags::RDWR).unwrap();
    rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    for _ in 0..10 {
        engine.ring(0);
        engine.enter(Wait::No).unwrap();
    }
    assert_eq!(count(&fd), u64::MAX - 1);
    engine.enter(soon()).unwrap();
    assert_eq!(engine.reap(), None);
    assert_eq!(count(&fd), 0, "no write was left waiting for room");
}

/// The kernel looks at the flag twice before it writes an eventfd, and a frontend may change it in between. The thread would then
/// sleep until somebody reads the eventfd, and all disks of a pool with it.
#[test]
fn a_full_bell_whose_flag_changes_all_the_time_does_not_block_a_shared_thread() {
    let bell = Arc::new(eventfd(true));
    rustix::io::write(&*bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let (changed, over) = (bell.clone(), is_over.clone());
    let frontend = thread::spawn(move || {
        while !over.load(Ordering::Relaxed) {
            for flags in [OFlags::RDWR, OFlags::NONBLOCK] {
                fcntl_setfl(&changed, flags).unwrap();
            }
        }
    });
    let given = bell.try_clone().unwrap();
    let (to, done) = channel();
    let caller = thread::spawn(move || {
        let disk = Arc::new(disk_of("null:1M"));
        let guest = Guest::new();
        let mut engine = engine(&disk, &guest);
        engine.set_shared_bell(0, given);
        for _ in 0..100_000 {
            engine.ring(0);
            engine.enter(Wait::No).unwrap();
        }
        to.send(()).unwrap();
    });
    let has_returned = done.recv_timeout(Duration::from_secs(60));
    is_over.store(true, Ordering::Relaxed);
    frontend.join().unwrap();
    // So that a thread that sleeps there ends.
    fcntl_setfl(&bell, OFlags::NONBLOCK).unwrap();
    let mut read = [0; 8];
    while !caller.is_finished() {
        let _ = rustix::io::read(&*bell, &mut read);
    }
    caller.join().unwrap();
    has_returned.unwrap();
}

#[test]
fn a_wait_ends_at_its_deadline_and_with_results() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Off);
    let mut engine = engine(&disk, &guest);
    let start = Instant::now();
    engine
        .enter(Wait::Until(Some(start + Duration::from_millis(30))))
        .unwrap();
    assert!(start.elapsed() >= Duration::from_millis(29));
    engine.enter(Wait::Until(Some(start))).unwrap();
    // With a result ready, it does not sleep.
    engine.push(op(READ, 0, 512, &[segment(u64::MAX, 1)]), 5);
    engine.enter(Wait::Until(None)).unwrap();
    assert_eq!(
        engine.reap(),
        Some(Event::Done {
            token: 5,
            result: Err(libc::EFAULT)
        })
    );
    let before = engine.enters();
    for _ in 0..100 {
        engine.enter(Wait::No).unwrap();
    }
    assert_eq!(engine.enters(), before, "no work, no system call");
}
