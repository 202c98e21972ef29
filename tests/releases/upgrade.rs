//! This program after an earlier release.

use std::time::Duration;

use cleave_client::Base;
use cleave_tests::{Case, Requirement, Survivor, scale, seeded};

use super::service::{LIFE_MAX_US, Release, Service, device};

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_frontend_that_connects_again_loses_nothing: Requirement::EarlierRelease,
    ]
}

/// The earlier daemon ends in order in some rounds, and is killed in others.
fn a_frontend_that_connects_again_loses_nothing() {
    let mut random = seeded("upgrade");
    let (rounds, mut requests, mut again) = (scale(20), 0, 0);
    for round in 0..rounds {
        let options = device([1, 4][round % 2], 256);
        let mut service = Service::new();
        service.start(Release::Earlier);
        let mut client = service.open(&options);
        assert!(client.keeps_inflight());
        let mut guest = Survivor::new(&mut client);
        let time = Duration::from_micros(random.below(LIFE_MAX_US));
        guest.work(&mut client, &mut random, time);
        guest.submit(&mut client, &mut random);
        match round % 4 {
            0 | 1 => service.terminate(),
            _ => service.kill(),
        }
        guest.submit(&mut client, &mut random);
        service.start(Release::This);
        let base = [Base::Used, Base::Avail][round / 4 % 2];
        again += usize::from(service.follow(&mut client, &options, base));
        guest.await_all(&mut client, round % 3 == 0);
        guest.verify(&mut client, true);
        // From here on no frontend has to connect again.
        guest.submit(&mut client, &mut random);
        service.terminate();
        service.start(Release::This);
        assert!(!service.follow(&mut client, &options, base));
        guest.await_all(&mut client, round % 3 == 0);
        guest.verify(&mut client, true);
        requests += guest.answered;
        drop(client);
        service.terminate();
    }
    println!(
        "{rounds} upgrades: {requests} requests, 0 lost, 0 twice; the frontend had to connect again after {again}"
    );
}
