//! The manager passes a disk twice: a session that was kept of a process that was killed, and the disk as a whole, which a process left
//! that ran beside that one and knew nothing of the session. The session goes on only if nobody was served after it.

use std::path::PathBuf;
use std::time::Duration;

use cleave_client::{Client, DeviceOptions};
use cleave_tests::{
    Case, SURVIVOR_DISK_BYTES, Scratch, Survivor, TIMEOUT, closes_within, connect, disk_socket,
    http, outliving, seeded, wait_until,
};
use serde_json::json;

use super::killed::{BLOCK, BLOCKS, write_all};
use super::node::add;
use super::service::Service;

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_session_goes_on_if_nobody_was_served_after_it,
        a_session_ends_if_somebody_was_served_after_it,
    ]
}

/// How long a guest works.
const WORK: Duration = Duration::from_millis(5);
/// Id of the disk.
const ID: &str = "a";

/// What serves the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Program {
    Serve,
    Node,
}

/// The order in which the manager passes what it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    SessionFirst,
    DiskFirst,
}

const WAYS: [(Program, Order); 4] = [
    (Program::Serve, Order::SessionFirst),
    (Program::Serve, Order::DiskFirst),
    (Program::Node, Order::SessionFirst),
    (Program::Node, Order::DiskFirst),
];

/// A service with one disk.
struct OneDisk {
    service: Service,
    socket: PathBuf,
}

impl OneDisk {
    fn start(program: Program) -> OneDisk {
        match program {
            Program::Serve => {
                let scratch = Scratch::new();
                let image = scratch.image(ID, SURVIVOR_DISK_BYTES);
                let options = ["--serial", ID];
                let service = Service::serve_in(scratch, image.to_str().unwrap(), &options);
                let socket = service.socket();
                OneDisk { service, socket }
            }
            Program::Node => {
                let service = Service::node();
                add(&service, ID, &json!({}));
                let socket = disk_socket(service.scratch.path(), ID);
                OneDisk { service, socket }
            }
        }
    }

    fn open(&self, options: &DeviceOptions) -> Client {
        connect(|| Client::open(&self.socket, options))
    }

    fn is_connected(&self) -> bool {
        let path = format!("/v1/disks/{ID}");
        http::get(&self.service.control(), &path)["session"]["connected"] == true
    }

    /// Kills the process, whose session the manager has, and starts another one, to which the manager passes nothing. That one is told
    /// to end after `meanwhile`. The manager passes both to the one that is started then.
    fn is_left_twice(&mut self, order: Order, meanwhile: impl FnOnce(&OneDisk)) {
        self.service.daemon.kill();
        self.service.manager.settle();
        let session = std::mem::take(&mut self.service.manager.kept);
        assert_eq!(session.len(), 1);
        self.service.start_again();
        meanwhile(self);
        self.service.stop();
        let kept = &mut self.service.manager.kept;
        assert_eq!(kept.len(), 1);
        match order {
            Order::SessionFirst => kept.splice(..0, session).for_each(drop),
            Order::DiskFirst => kept.extend(session),
        }
    }
}

fn a_session_goes_on_if_nobody_was_served_after_it() {
    let mut random = seeded("left-twice");
    for (program, order) in WAYS {
        let mut disk = OneDisk::start(program);
        let mut client = disk.open(&outliving());
        let mut guest = Survivor::new(&mut client);
        client.frontend().features().unwrap();
        assert!(disk.service.manager.keeps_one());
        guest.work(&mut client, &mut random, WORK);
        guest.submit(&mut client, &mut random);
        disk.is_left_twice(order, |_| {});
        guest.submit(&mut client, &mut random);
        disk.service.start_again();
        guest.await_all(&mut client, true);
        guest.verify(&mut client, true);
        // It is a session like any other.
        assert!(disk.service.manager.keeps_one());
        disk.service.restart();
        guest.work(&mut client, &mut random, WORK);
        guest.await_all(&mut client, true);
        guest.verify(&mut client, true);
        println!("{program:?}, {order:?}: the guest noticed nothing");
    }
}

/// The bytes of all blocks.
fn whole(client: &mut Client) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK * BLOCKS as usize];
    client.queue(0).read(0, &mut bytes).unwrap();
    bytes
}

fn a_session_ends_if_somebody_was_served_after_it() {
    let new = vec![2; BLOCK * BLOCKS as usize];
    for (program, order) in WAYS {
        for stays in [true, false] {
            let mut disk = OneDisk::start(program);
            let mut earlier = disk.open(&outliving());
            earlier.queue(0).write(0, &vec![0; new.len()]).unwrap();
            earlier.frontend().features().unwrap();
            assert!(disk.service.manager.keeps_one());
            let mut later = None;
            disk.is_left_twice(order, |disk| {
                // Whoever serves that guest again writes this.
                write_all(&mut earlier, 1);
                let mut client = disk.open(&outliving());
                client.queue(0).write(0, &new).unwrap();
                later = Some(client).filter(|_| stays);
                assert!(wait_until(|| disk.is_connected() == stays));
            });
            disk.service.start_again();
            let way = format!("{program:?}, {order:?}, stays: {stays}");
            let socket = earlier.frontend().socket();
            assert!(closes_within(socket, TIMEOUT), "{way}: it waits for nobody");
            let mut later = later.unwrap_or_else(|| disk.open(&outliving()));
            assert!(whole(&mut later) == new, "{way}: an earlier guest wrote");
            assert!(later.frontend().features().is_ok(), "{way}");
            if program == Program::Serve {
                continue;
            }
            // Nothing of it is left for the next opening either.
            drop(later);
            let path = format!("/v1/disks/{ID}?mode=drain");
            let removed = http::fetch(&disk.service.control(), "DELETE", &path, "");
            assert_eq!(removed.status, 200, "{}", removed.body);
            let body = json!({"disk": [disk.service.scratch.join(ID)]}).to_string();
            let path = format!("/v1/disks/{ID}");
            let added = http::fetch(&disk.service.control(), "PUT", &path, &body);
            assert_eq!(added.status, 201, "{}", added.body);
            let mut client = disk.open(&outliving());
            assert!(whole(&mut client) == new, "{way}: an earlier guest wrote");
        }
    }
}
