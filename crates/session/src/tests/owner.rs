//! Two frontends of a disk, one of which owns it while the other is parked.

use std::sync::atomic::AtomicBool;

use super::running::Driver;
use super::*;
use crate::owner::{Claim, Unserved};

const NEEDS_RESET: u64 = 0x40;

impl Frontend {
    /// Connects another frontend to the same disk.
    fn beside(&self) -> Frontend {
        let other = Frontend::connect_to(self.device.clone(), self.owners.clone());
        other.negotiate().share_memory()
    }

    /// Sends a kick, which starts a vring that has its other settings, and does not wait for the answer.
    pub(super) fn send_kick(&mut self, driver: &Driver) {
        let (payload, kick) = (longs(&[0]), driver.kick.try_clone().unwrap());
        self.send_raw(12, 0x9, 8, &payload, &[kick.as_fd()]);
    }

    /// Configures a vring, sends its kick, and returns when the session waits for the disk.
    fn wait_in_line(&mut self) -> Driver {
        let driver = Driver::new(self, 0);
        self.configure(0);
        assert_eq!(self.request(Req::SET_VRING_ENABLE, &words(&[0, 1])), Ack);
        self.send_kick(&driver);
        self.waiting_settles_at(1);
        driver
    }

    fn waiting_settles_at(&self, count: usize) {
        comes(|| self.owners.waiting() == count);
    }
}

#[track_caller]
pub(super) fn comes(is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "it does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_parked_frontend_may_do_all_that_starts_nothing() {
    let mut first = Frontend::with_memory();
    let mut driver = first.drive(0);
    driver.request();
    let mut second = first.beside();
    assert_eq!(second.config(0, 8).unwrap().len(), 12 + 8);
    assert_eq!(second.ask_number(Req::GET_QUEUE_NUM), 4);
    let fd = bell();
    for request in [Req::SET_VRING_CALL, Req::SET_VRING_ERR] {
        let fds = [fd.as_fd()];
        assert_eq!(second.request_fds(request, &longs(&[0]), &fds), Ack);
    }
    second.configure(0);
    assert_eq!(second.base(0), Some((0, 0)));
    let rows = [
        (Req::SET_VRING_ENABLE, words(&[0, 1])),
        (Req::SET_STATUS, longs(&[15])),
        (Req::RESET_OWNER, vec![]),
        (Req::RESET_DEVICE, vec![]),
        (Req::SET_STATUS, longs(&[0])),
        (Req::SET_FEATURES, longs(&[FEATURES])),
        (Req::REM_MEM_REG, longs(&[0, 0, MEM_BYTES, USER, 0])),
    ];
    for (request, payload) in rows {
        assert_eq!(second.request(request, &payload), Ack, "{request:?}");
        driver.request();
    }
    assert!(first.remote.owns() && !second.remote.owns());
    assert!(matches!(second.end(), Ending::HungUp));
    driver.request();
    assert_eq!(first.remote.view().vrings.len(), 1);
    assert_eq!(first.base(0), Some((0, 9)));
}

#[test]
fn a_retired_vring_is_its_own_frontends_matter() {
    let mut first = Frontend::with_memory();
    let mut second = first.beside();
    let driver = first.drive(0);
    // A head outside the table.
    driver.put(0x2004, &9999u16.to_le_bytes());
    driver.put(0x2002, &1u16.to_le_bytes());
    driver.kick();
    assert_eq!(Driver::signalled(&driver.err), 1);
    assert_eq!(first.ask_number(Req::GET_STATUS), NEEDS_RESET);
    assert_eq!(second.ask_number(Req::GET_STATUS), 0);
    assert!(first.base(0).is_some());
    assert_eq!(second.start(0), Ack);
    assert_eq!(first.ask_number(Req::GET_STATUS), NEEDS_RESET);
    assert_eq!(second.ask_number(Req::GET_STATUS), 0);
    assert_eq!(first.request(Req::SET_STATUS, &longs(&[0])), Ack);
    assert_eq!(first.ask_number(Req::GET_STATUS), 0);
}

#[test]
fn a_parked_frontend_starts_when_the_other_has_stopped_all_vrings() {
    let mut first = Frontend::with_memory();
    let mut drivers = [first.drive(0), first.drive(1)];
    drivers.iter_mut().for_each(Driver::request);
    let mut second = first.beside();
    let mut next = second.wait_in_line();
    // The message waits in the session, and later ones after it.
    second.send(Req::GET_QUEUE_NUM, &[], &[]);
    drivers.iter_mut().for_each(Driver::request);
    assert_eq!(first.base(0), Some((0, 2)));
    drivers[1].request();
    assert_eq!(second.owners.waiting(), 1);
    assert_eq!(first.base(1), Some((1, 3)));
    assert_eq!(second.answer(Req::SET_VRING_KICK.into()), Ack);
    assert_eq!(second.reply().unwrap().0, u32::from(Req::GET_QUEUE_NUM));
    next.request();
    assert!(second.remote.owns() && !first.remote.owns());
    // The workers of the first have ended: only those of the second are left.
    assert_eq!(first.device.modes().len(), 1);
    assert!(first.is_alive());
}

/// Returns two frontends and their drivers. The second has taken the disk over from the first, and each driver has had one request.
fn taken_over() -> [(Frontend, Driver); 2] {
    let mut first = Frontend::with_memory();
    let mut second = first.beside();
    let mut driver = first.drive(0);
    driver.request();
    let mut next = second.wait_in_line();
    assert_eq!(first.base(0), Some((0, 1)));
    assert_eq!(second.answer(Req::SET_VRING_KICK.into()), Ack);
    next.request();
    [(first, driver), (second, next)]
}

/// An operator may continue the old guest by mistake. It must not write as soon as the new one pauses.
#[test]
fn a_frontend_that_was_taken_over_is_hung_up_if_it_starts_while_the_other_is_connected() {
    for is_paused in [false, true] {
        let [(mut first, driver), (mut second, mut next)] = taken_over();
        if is_paused {
            assert_eq!(second.base(0), Some((0, 1)));
        }
        assert!(first.is_alive(), "nothing is wrong so far");
        assert_eq!(first.kick_on(&driver), Closed);
        let ending = first.thread.join().unwrap();
        let is_plain =
            matches!(&ending, Ending::Refused(why) if why.contains("taken the disk over"));
        assert!(is_plain, "{ending:?}");
        assert_eq!(second.owners.waiting(), 0);
        if is_paused {
            assert_eq!(second.kick_on(&next), Ack);
        }
        next.request();
    }
}

/// The new VMM was killed, and the old one goes on.
#[test]
fn a_frontend_that_was_taken_over_has_the_disk_again_when_the_other_has_left() {
    let [(mut first, mut driver), (second, _)] = taken_over();
    // Its session may not have ended yet.
    hang_up(second.stream);
    assert_eq!(first.kick_on(&driver), Ack);
    driver.request();
    assert!(first.remote.owns());
    assert!(matches!(second.thread.join().unwrap(), Ending::HungUp));
    // A new one finds the first in its place.
    let mut third = first.beside();
    let mut next = third.wait_in_line();
    driver.request();
    assert!(first.base(0).is_some());
    assert_eq!(third.answer(Req::SET_VRING_KICK.into()), Ack);
    next.request();
}

/// Ends a connection at once: a child of another test may hold a copy of the descriptor for a moment.
fn hang_up(stream: UnixStream) {
    stream.shutdown(std::net::Shutdown::Both).unwrap();
}

/// A member of these sessions, and the other end of its connection.
pub(super) fn member(owners: &Arc<Owners>) -> (Claimant, UnixStream) {
    let (stream, frontend) = UnixStream::pair().unwrap();
    let signals = Arc::new(SessionSignals::new().unwrap());
    let claimant = Claimant::new(owners.clone(), signals, Arc::new(stream));
    (claimant, frontend)
}

#[test]
fn a_session_without_vrings_has_the_disk_for_a_while_if_no_other_goes_on_with_it() {
    let owners = Arc::default();
    let (first, frontend) = member(&owners);
    let (second, _connected) = member(&owners);
    let (third, _beside) = member(&owners);
    assert_eq!(first.claim(), Ok(Some(Claim::First)));
    assert_eq!(second.claim_unserved(), Unserved::Owned);
    first.stopped();
    assert_eq!(first.claim_unserved(), Unserved::Owned, "it has workers");
    assert_eq!(second.claim_unserved(), Unserved::Owned);
    hang_up(frontend);
    assert_eq!(second.claim_unserved(), Unserved::Ending);
    drop(first);
    assert_eq!(second.claim_unserved(), Unserved::Taken);
    assert_eq!(third.claim_unserved(), Unserved::Owned);
    assert_eq!(third.claim(), Ok(None));
    assert!(!second.must_yield(), "it is flushing");
    second.release();
    // As if nothing had been.
    assert_eq!(second.claim(), Ok(Some(Claim::First)));
    second.stopped();
    second.give_up();
    assert_eq!(second.claim_unserved(), Unserved::Taken);
    second.release();
    assert_eq!(second.claim(), Ok(Some(Claim::Defended)));
}

#[test]
fn a_session_that_was_taken_over_waits_for_the_end_of_one_whose_frontend_has_left() {
    let owners = Arc::default();
    let (first, _frontend) = member(&owners);
    let (second, frontend) = member(&owners);
    assert_eq!(first.claim(), Ok(Some(Claim::First)));
    assert_eq!(second.claim(), Ok(None));
    first.stopped();
    assert!(first.must_yield());
    first.give_up();
    assert_eq!(second.claim(), Ok(Some(Claim::TakenOver)));
    assert!(matches!(first.claim(), Err(MessageRefusal::Connection(_))));
    assert_eq!(owners.waiting(), 0);
    hang_up(frontend);
    assert_eq!(first.claim(), Ok(None), "its requests are under way");
    assert_eq!(owners.waiting(), 1);
    drop(second);
    assert_eq!(first.claim(), Ok(Some(Claim::First)));
    assert_eq!(owners.waiting(), 0);
}

#[test]
fn an_owner_from_another_process_has_the_disk_before_others_can_claim_it() {
    let both = || {
        let owners = Arc::default();
        let (parked, owner) = (member(&owners), member(&owners));
        owner.0.resume(true, true);
        parked.0.resume(false, false);
        assert_eq!(parked.0.claim(), Ok(None));
        (parked, owner)
    };
    let ((parked, _connected), (owner, _frontend)) = both();
    assert_eq!(owner.claim(), Ok(Some(Claim::First)), "and none is hung up");
    owner.resumed();
    assert_eq!(parked.claim(), Ok(None), "it serves");
    let ((parked, _connected), (owner, _frontend)) = both();
    owner.resumed();
    assert_eq!(
        parked.claim(),
        Ok(Some(Claim::TakenOver)),
        "it has no vring"
    );
    let ((parked, _connected), (owner, _frontend)) = both();
    drop(owner);
    assert!(matches!(parked.claim(), Ok(Some(_))), "it could not go on");
}

#[test]
fn a_disk_that_is_served_has_no_second_owner() {
    let owners = Arc::default();
    let (first, _frontend) = member(&owners);
    let (second, _connected) = member(&owners);
    first.resume(true, true);
    second.resume(true, true);
    assert_eq!(first.claim(), Ok(Some(Claim::First)));
    assert!(matches!(second.claim(), Err(MessageRefusal::Connection(_))));
}

#[test]
fn any_message_that_starts_a_vring_waits() {
    for last in [Req::SET_VRING_NUM, Req::SET_VRING_ADDR] {
        let mut first = Frontend::with_memory();
        let mut driver = first.drive(0);
        let mut second = first.beside();
        let kick = longs(&[0x100]);
        let messages = [
            (Req::SET_VRING_KICK, kick),
            (Req::SET_VRING_NUM, words(&[0, 8])),
            (Req::SET_VRING_ADDR, addrs(0, 0)),
        ];
        let (before, after): (Vec<_>, Vec<_>) = messages
            .into_iter()
            .partition(|(request, _)| *request != last);
        for (request, payload) in before {
            assert_eq!(second.request(request, &payload), Ack);
        }
        let payload = &after[0].1;
        second.send_raw(last.into(), 0x9, payload.len() as u32, payload, &[]);
        second.waiting_settles_at(1);
        driver.request();
        assert_eq!(first.base(0), Some((0, 1)));
        assert_eq!(second.answer(last.into()), Ack, "{last:?}");
        assert!(second.remote.owns());
    }
}

/// Starts vring 0. Any step may fail, because the other frontend starts too, which may have this one hung up.
fn tries_to_start(frontend: &mut Frontend) -> bool {
    if frontend.remote.view().features.is_none() {
        if frontend.ask(Req::GET_FEATURES, &[]).is_none() {
            return false;
        }
        frontend.send(Req::SET_PROTOCOL_FEATURES, &longs(&[PROTOCOL]), &[]);
        if frontend.request(Req::SET_FEATURES, &longs(&[FEATURES])) != Ack
            || frontend.add_memory(0, MEM_BYTES, USER) != Ack
        {
            return false;
        }
    }
    let settings = [
        (Req::SET_VRING_NUM, words(&[0, 8])),
        (Req::SET_VRING_BASE, words(&[0, 0])),
        (Req::SET_VRING_ADDR, addrs(0, 0)),
        (Req::SET_VRING_KICK, longs(&[0x100])),
    ];
    let mut settings = settings.iter();
    settings.all(|(request, payload)| frontend.request(*request, payload) == Ack)
}

#[test]
fn one_at_a_time_is_served_however_they_start() {
    let (device, owners) = (device(), Arc::<Owners>::default());
    let connect = || Frontend::connect_to(device.clone(), owners.clone());
    let serving = AtomicBool::new(false);
    let contend = || {
        let mut frontend = connect();
        for _ in 0..300 {
            // The other has started again, or has taken the disk over: this one is hung up, and comes back as a new frontend.
            while !tries_to_start(&mut frontend) {
                let hung_up = std::mem::replace(&mut frontend, connect());
                match hung_up.end() {
                    Ending::HungUp => {}
                    Ending::Refused(why) if why.contains("taken the disk over") => {}
                    ending => panic!("{ending:?}"),
                }
            }
            assert!(!serving.swap(true, Ordering::SeqCst), "two are served");
            assert_eq!(device.modes().len(), 1);
            serving.store(false, Ordering::SeqCst);
            assert!(frontend.base(0).is_some());
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(contend);
        scope.spawn(contend);
    });
}

#[test]
fn a_parked_frontend_that_leaves_while_it_waits_ends() {
    let mut first = Frontend::with_memory();
    let mut driver = first.drive(0);
    let mut second = first.beside();
    second.wait_in_line();
    // Behind messages that are not read yet.
    second.send(Req::GET_QUEUE_NUM, &[], &[]);
    assert!(matches!(second.end(), Ending::HungUp));
    assert_eq!(first.owners.waiting(), 0);
    driver.request();
    // It is not in the way of the next one.
    let mut third = first.beside();
    let mut next = third.wait_in_line();
    assert_eq!(first.base(0), Some((0, 1)));
    assert_eq!(third.answer(Req::SET_VRING_KICK.into()), Ack);
    next.request();
}

#[test]
fn a_parked_frontend_goes_on_when_the_other_leaves() {
    let mut first = Frontend::with_memory();
    first.drive(0).request();
    let mut second = first.beside();
    let mut next = second.wait_in_line();
    assert!(matches!(first.end(), Ending::HungUp));
    assert_eq!(second.answer(Req::SET_VRING_KICK.into()), Ack);
    next.request();
}

#[test]
fn a_first_frontend_that_starts_again_has_the_parked_one_hung_up() {
    let mut first = Frontend::with_memory();
    let mut second = first.beside();
    // Nobody has started so far, so the parked one has lost nothing.
    let mut driver = first.drive(0);
    driver.request();
    assert!(second.is_alive());
    assert_eq!(first.base(0), Some((0, 1)));
    assert_eq!(first.kick_on(&driver), Ack);
    driver.request();
    assert_eq!(second.reply(), None);
    assert!(matches!(second.end(), Ending::HungUp));
    driver.request();
}

#[test]
fn a_waiting_session_can_be_hung_up() {
    let mut first = Frontend::with_memory();
    let mut driver = first.drive(0);
    let mut second = first.beside();
    second.wait_in_line();
    // Woken for another reason, it waits on.
    second.remote.config_changed();
    driver.request();
    second.remote.hang_up();
    assert_eq!(second.reply(), None);
    assert!(matches!(second.thread.join().unwrap(), Ending::HungUp));
    driver.request();
}

#[test]
fn the_cache_mode_of_a_parked_frontend_is_in_force_when_it_starts() {
    let mut first = Frontend::with_memory();
    let mut second = first.beside();
    let all = longs(&[FEATURES | feature::FLUSH]);
    assert_eq!(first.request(Req::SET_FEATURES, &all), Ack);
    assert_eq!(second.request(Req::SET_FEATURES, &all), Ack);
    assert_eq!(first.start(0), Ack);
    let device = first.device.clone();
    let writeback = || device.writeback.load(Ordering::Relaxed);
    let mode = |frontend: &mut Frontend| frontend.config(32, 1).unwrap()[12];
    let mut payload = words(&[32, 1, 0]);
    payload.push(0);
    assert_eq!(second.request(Req::SET_CONFIG, &payload), Ack);
    assert!(writeback());
    assert_eq!((mode(&mut first), mode(&mut second)), (1, 0));
    assert!(first.base(0).is_some());
    assert!(writeback());
    assert_eq!(second.start(0), Ack);
    assert!(!writeback());
    assert_eq!((mode(&mut first), mode(&mut second)), (0, 0));
}
