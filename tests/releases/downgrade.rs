//! An earlier release after this program.

use std::time::Duration;

use cleave_client::Base;
use cleave_tests::{Case, Requirement, Survivor, scale, seeded};

use super::service::{LIFE_MAX_US, Release, Service, device};

/// Entries of a vring whose list of requests in flight every release reads (docs/recovery.md).
const EVERY_RELEASE: u16 = 1024;

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_service_that_is_stopped_goes_on_with_an_earlier_release: Requirement::EarlierRelease,
        a_restart_goes_on_or_ends_the_service: Requirement::EarlierRelease,
        a_frontend_that_was_kept_for_a_kill_is_free_after_a_stop: Requirement::EarlierRelease,
    ]
}

/// The way that docs/upgrade.md names: guests are shut down, and the service is stopped and started.
fn a_service_that_is_stopped_goes_on_with_an_earlier_release() {
    let mut random = seeded("downgrade");
    for round in 0..scale(4) {
        let options = device([1, 4][round % 2], 256);
        let mut service = Service::new();
        service.start(Release::This);
        let mut client = service.open(&options);
        let mut guest = Survivor::new(&mut client);
        let life = Duration::from_micros(random.below(LIFE_MAX_US));
        guest.work(&mut client, &mut random, life);
        guest.await_all(&mut client, true);
        service.stop(&mut client);
        service.start(Release::Earlier);
        let mut client = service.open(&options);
        guest.verify(&mut client, true);
        guest.work(&mut client, &mut random, life);
        guest.await_all(&mut client, true);
        guest.verify(&mut client, true);
    }
}

/// A release that takes disks over goes on with the frontend. One that does not finds the disk locked, by what the manager keeps. It
/// ends with code 2, after which the unit is not started again, and the manager closes what it kept.
fn a_restart_goes_on_or_ends_the_service() {
    let mut random = seeded("downgrade-restart");
    for round in 0..scale(4) {
        let options = device([1, 4][round % 2], EVERY_RELEASE);
        let mut service = Service::new();
        service.start(Release::This);
        let mut client = service.open(&options);
        let mut guest = Survivor::new(&mut client);
        let life = Duration::from_micros(random.below(LIFE_MAX_US));
        guest.work(&mut client, &mut random, life);
        guest.submit(&mut client, &mut random);
        service.terminate();
        guest.submit(&mut client, &mut random);
        service.start(Release::Earlier);
        if let Some(code) = service.refuses() {
            assert_eq!(code, 2);
            service.forget(&mut client);
            service.start(Release::Earlier);
        }
        service.follow(&mut client, &options, Base::Used);
        guest.await_all(&mut client, round % 2 == 0);
        guest.verify(&mut client, true);
    }
}

/// After a kill a release that does not take disks over serves the disk beside the connection that the manager keeps.
fn a_frontend_that_was_kept_for_a_kill_is_free_after_a_stop() {
    let mut random = seeded("downgrade-kill");
    for round in 0..scale(4) {
        let options = device([1, 4][round % 2], EVERY_RELEASE);
        let mut service = Service::new();
        service.start(Release::This);
        let mut client = service.open(&options);
        let mut guest = Survivor::new(&mut client);
        client.frontend().features().unwrap();
        assert!(service.manager.keeps_one());
        let life = Duration::from_micros(random.below(LIFE_MAX_US));
        guest.work(&mut client, &mut random, life);
        guest.submit(&mut client, &mut random);
        service.kill();
        assert_eq!(service.manager.kept.len(), 1);
        service.start(Release::Earlier);
        service.is_up();
        service.stop(&mut client);
        service.start(Release::Earlier);
        service.follow(&mut client, &options, Base::Used);
        guest.await_all(&mut client, round % 2 == 0);
        guest.verify(&mut client, true);
    }
}
