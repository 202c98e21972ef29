//! A guest that moves to another host while its daemon is restarted: each page that a daemon writes is marked.

use std::collections::BTreeSet;
use std::fs::File;

use cleave_client::message::{VERSION, message, request, vring_state};
use cleave_client::{Buffer, Queue, WriteLog};
use cleave_tests::{Case, Requirement, Scratch, UnresponsiveFs, header, http, moving, wait_until};
use rustix::fs::{FlockOperation, flock};

use super::service::{Service, terminate};

const BLOCK: u64 = 4096;
const SLOTS: u64 = 64;

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        no_page_is_unmarked,
        no_page_is_unmarked_by_take_overs,
        a_disk_that_leaves_while_its_daemon_ends_stays_released: Requirement::Fuse,
    ]
}

/// Prepares reads into pages that hold something else.
fn prepare(queue: &mut Queue, round: u64) {
    let (area, _) = queue.data_area();
    let memory = queue.memory();
    for slot in 0..SLOTS {
        let at = area + slot * 2 * BLOCK;
        memory.write(at, &header(0, (round * SLOTS + slot) * BLOCK / 512));
        memory.fill(at + 16, 1, 0xff);
        memory.fill(at + BLOCK, BLOCK as usize, 0xee);
        let chain = [
            Buffer::readable(at, 16),
            Buffer::writable(at + BLOCK, BLOCK as u32),
            Buffer::writable(at + 16, 1),
        ];
        queue.ring().add(&chain).unwrap();
    }
}

fn no_page_is_unmarked() {
    mark(|service| {
        terminate(&mut service.daemon);
        assert_eq!(service.manager.awaits(&mut service.daemon).code(), Some(0));
        service.start_again();
    });
}

fn no_page_is_unmarked_by_take_overs() {
    mark(Service::take_over);
}

/// Has a guest log what is written, while the process that serves it changes.
fn mark(change: fn(&mut Service)) {
    let scratch = Scratch::new();
    let image = scratch.join("disk");
    std::fs::write(&image, vec![0x11; 8 << 20]).unwrap();
    let mut service = Service::serve_in(scratch, image.to_str().unwrap(), &[]);
    let mut client = service.open(&moving(1));
    let log = WriteLog::new(client.memory()).unwrap();
    client.start_log(&log).unwrap();
    let memory = client.memory().clone();
    for round in 0..12 {
        log.take_pages();
        let queue = client.queue(0);
        let serves = round % 3 < 2;
        if !serves {
            service.stop();
        }
        prepare(queue, round);
        let before = memory.copy();
        queue.ring().publish();
        if serves {
            queue.ring_kick();
            // One round is most likely served by the process before, one in part, and one by the next.
            let some = SLOTS as u16 * (round % 3) as u16 / 2;
            let end = queue.ring().position();
            wait_until(|| end.wrapping_sub(queue.ring().used_index()) <= some);
            change(&mut service);
        } else {
            service.start_again();
        }
        let is_served = |queue: &mut Queue| queue.ring().used_index() == queue.ring().position();
        assert!(
            wait_until(|| is_served(queue)),
            "requests were not answered"
        );
        let mut changed = memory.changed_pages(&before);
        // Our own write.
        changed.remove(&(queue.ring().layout().avail / BLOCK));
        let marked = log.pages();
        let unmarked: BTreeSet<_> = changed.difference(&marked).collect();
        assert!(unmarked.is_empty(), "round {round}: {unmarked:?}");
        assert!(changed.len() as u64 >= SLOTS);
        while queue.ring().reap().is_some() {}
    }
}

/// The guest's last virtqueue stops, and its disk is handed to another host, while the daemon ends.
fn a_disk_that_leaves_while_its_daemon_ends_stays_released() {
    let folder = Scratch::in_memory();
    let storage = UnresponsiveFs::mount(&folder, 4 << 20).unwrap();
    let image = storage.file();
    let mut service = Service::serve(
        image.to_str().unwrap(),
        &["--start", "inactive", "--serial", "moves"],
    );
    let possession = |service: &Service| {
        let disk = http::get(&service.control(), "/v1/disks/moves");
        disk["possession"].as_str().unwrap().to_owned()
    };
    let mut client = service.open(&moving(1));
    client.queue(0).write(0, &[b'A'; 4096]).unwrap();
    assert_eq!(possession(&service), "active");
    let log = WriteLog::new(client.memory()).unwrap();
    client.start_log(&log).unwrap();
    storage.hold(true);
    let stop = message(request::GET_VRING_BASE, VERSION, &vring_state(0, 0));
    client.frontend().socket().send_raw(&stop, &[]).unwrap();
    assert!(wait_until(|| storage.held() > 0), "nothing is flushed");
    terminate(&mut service.daemon);
    let is_told = || service.manager.log().contains("finishing the requests");
    assert!(wait_until(is_told), "{}", service.manager.log());
    storage.release();
    assert_eq!(service.manager.awaits(&mut service.daemon).code(), Some(0));
    assert!(client.frontend().socket().recv().is_ok(), "its position");
    assert_eq!(service.manager.disks(), 0);
    let told = service.manager.log();
    assert!(told.contains("has left for another host"), "{told}");
    service.start_again();
    assert_eq!(possession(&service), "inactive");
    let other = File::options().read(true).write(true).open(&image).unwrap();
    flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
    service.stop();
}
