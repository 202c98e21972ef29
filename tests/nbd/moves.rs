//! A guest that moves to a daemon with another kind of storage for the same bytes, or away from a server that is not there.

use std::path::PathBuf;
use std::time::Duration;

use cleave_client::message::{request, vring_state};
use cleave_client::{Error, WriteLog};
use cleave_tests::http::fetch;
use cleave_tests::nbd::{Export, NbdServer};
use cleave_tests::{
    Case, Daemon, SURVIVOR_DISK_BYTES, Scratch, Survivor, leave, moving, prepared, seeded, small,
    wait_until,
};
use serde_json::json;

use crate::servers::{At, QEMU, holds, qemu_nbd, report, serve};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_guest_of_a_file_moves_to_its_export_and_back: QEMU,
        a_guest_moves_when_its_server_is_back_with_all_that_it_was_answered,
        a_guest_moves_when_its_held_requests_are_done,
        a_flush_sends_nothing_again_of_a_guest_that_may_run_elsewhere,
    ]
}

/// What the log says while a move waits.
const WAITS: &str = "the move waits until the server is back";

/// The guest has negotiated all that the file offers.
fn a_guest_of_a_file_moves_to_its_export_and_back() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
    let file = Daemon::serve(&["--disk", image.to_str().unwrap(), "--start", "inactive"]);
    let options = moving(2);
    let mut random = seeded("nbd-moves");
    let mut client = file.open(&options);
    let mut guest = Survivor::new(&mut client);
    guest.work(&mut client, &mut random, Duration::from_millis(200));
    let positions = leave(&client);
    // The file is locked until the guest has left.
    let at = At::Unix(scratch.join("nbd"));
    let server = qemu_nbd(&image, "raw", &at, &["--shared=4"]);
    let (export, _) = serve(&at.uri("", ""), &["--start", "inactive"]);
    let mut there = prepared(export.socket(), &client, &options);
    there.take_over(&mut client, &positions).unwrap();
    client = there;
    guest.work(&mut client, &mut random, Duration::from_millis(200));
    guest.await_all(&mut client, true);
    guest.verify(&mut client, true);
    let positions = leave(&client);
    let mut back = prepared(file.socket(), &client, &options);
    drop(server);
    back.take_over(&mut client, &positions).unwrap();
    guest.verify(&mut back, true);
    drop((client, back));
    file.finish();
    export.finish();
}

/// A server that answers a write and loses it, and a daemon on it, whose guest has done that write.
struct Lossy {
    _scratch: Scratch,
    server: NbdServer,
    source: Daemon,
    control: PathBuf,
}

impl Lossy {
    fn new(more: &[&str]) -> Lossy {
        let scratch = Scratch::in_memory();
        let server = NbdServer::start(&scratch.join("nbd"), Export::able(8 << 20));
        // Requests wait for the server for a second, and the fence is short.
        let (source, control) = serve(&server.uri("&reconnect=1&fence=1"), more);
        Lossy {
            _scratch: scratch,
            server,
            source,
            control,
        }
    }

    /// The server is killed. It has flushed nothing.
    fn lose(&self) {
        self.server.accept(false);
        self.server.fill(|_| 0);
        self.server.hang_up();
        let lost = || report(&self.control)["store"]["connections"]["lost"] != json!(0);
        assert!(wait_until(lost), "{}", self.source.log());
    }

    fn assert_has(&self, byte: u8) {
        assert!(self.server.bytes()[..4096] == [byte; 4096]);
    }

    fn finish(self) {
        self.source.finish();
    }
}

/// No lock keeps the target from starting, and its flush would succeed.
fn a_guest_moves_when_its_server_is_back_with_all_that_it_was_answered() {
    let lossy = Lossy::new(&[]);
    let (server, source) = (&lossy.server, &lossy.source);
    let (target, _) = serve(&server.uri("&fence=1"), &["--start", "inactive"]);
    let options = moving(1);
    let mut client = source.open(&options);
    client.queue(0).write(0, &[1; 4096]).unwrap();
    lossy.lose();
    let positions = std::thread::scope(|scope| {
        let leaving = scope.spawn({
            let client = &mut client;
            move || leave(client)
        });
        let waits = || source.log_has(WAITS) || leaving.is_finished();
        assert!(wait_until(waits), "{}", source.log());
        assert!(!leaving.is_finished(), "{}", source.log());
        assert_eq!(report(&lossy.control)["possession"], json!("active"));
        server.accept(true);
        leaving.join().unwrap()
    });
    assert_eq!(report(&lossy.control)["possession"], json!("handed-over"));
    let mut there = prepared(target.socket(), &client, &options);
    there.take_over(&mut client, &positions).unwrap();
    let mut bytes = [0; 4096];
    there.queue(0).read(0, &mut bytes).unwrap();
    assert!(bytes == [1; 4096], "a write is lost that was answered");
    there.queue(0).flush().unwrap();
    drop((client, there));
    target.finish();
    lossy.finish();
}

/// The end of the connection in place of a position keeps no VMM from going on at the target, where the request would be lost.
fn a_guest_moves_when_its_held_requests_are_done() {
    let lossy = Lossy::new(&["--on-error", "hold"]);
    let (server, source) = (&lossy.server, &lossy.source);
    let mut client = source.open(&moving(1));
    client.queue(0).write(0, &[1; 4096]).unwrap();
    lossy.lose();
    client.queue(0).set_timeout(Duration::from_millis(300));
    let stuck = client.queue(0).write(4096, &[2; 4096]);
    assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
    assert!(wait_until(|| holds(&lossy.control)), "{}", source.log());
    let log = WriteLog::new(client.memory()).unwrap();
    client.start_log(&log).unwrap();
    std::thread::scope(|scope| {
        let stopping = scope.spawn({
            let client = &mut client;
            move || client.stop()
        });
        let waits = || source.log_has(WAITS) || stopping.is_finished();
        assert!(wait_until(waits), "{}", source.log());
        assert!(!stopping.is_finished(), "{}", source.log());
        server.accept(true);
        assert_eq!(stopping.join().unwrap().unwrap(), [2]);
    });
    assert!(server.flushes() > 0);
    assert_eq!(report(&lossy.control)["possession"], json!("handed-over"));
    lossy.assert_has(1);
    assert!(server.bytes()[4096..8192] == [2; 4096]);
    drop(client);
    lossy.finish();
}

/// Its VMM gave up the move while that waited, or so it seems. The guest may have written at the target since.
fn a_flush_sends_nothing_again_of_a_guest_that_may_run_elsewhere() {
    let lossy = Lossy::new(&[]);
    let (server, source) = (&lossy.server, &lossy.source);
    let mut client = source.open(&moving(1));
    client.queue(0).write(0, &[1; 4096]).unwrap();
    let log = WriteLog::new(client.memory()).unwrap();
    client.start_log(&log).unwrap();
    lossy.lose();
    let (number, payload) = (request::GET_VRING_BASE, vring_state(0, 0));
    let frontend = client.frontend();
    // The answer is not waited for.
    frontend.set_reply_ack(false);
    frontend.send(number, &payload, &[]).unwrap();
    assert!(wait_until(|| source.log_has(WAITS)), "{}", source.log());
    drop(client);
    let told = || source.log_has("no guest is left, and the NBD server is away");
    assert!(wait_until(told), "{}", source.log());
    server.fill(|_| 2);
    server.accept(true);
    let flush = || fetch(&lossy.control, "POST", "/v1/disks/disk/flush", "");
    let refused = flush();
    assert_eq!(refused.status, 409, "{}", refused.body);
    assert!(
        refused.error().contains("may run on another host"),
        "{}",
        refused.body
    );
    lossy.assert_has(2);
    // A guest that starts here says where it runs.
    let mut client = source.open(&small(1));
    // The pause before the next attempt to connect may be longer than requests wait.
    assert!(wait_until(|| client.queue(0).flush().is_ok()));
    lossy.assert_has(1);
    assert_eq!(flush().status, 200);
    drop(client);
    lossy.finish();
}
