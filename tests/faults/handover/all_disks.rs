//! A node gives all of its disks to one that takes over from it, below guests whose VMMs cannot connect again.

use std::fs::File;
use std::io::Write as _;
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cleave_client::{Base, Client};
use cleave_tests::http::{converse, fetch, get};
use cleave_tests::{
    Case, Killed, Random, SURVIVOR_DISK_BYTES, Scratch, Survivor, TIMEOUT, connect, disk_socket,
    exercise_queue, freeze, has_listener, outliving, program_path, run_to_exit, seeded, wait_until,
};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::pauses::Pauses;
use super::running::{
    HELLO, KEPT, PARCEL, READY, TAKEN, answered, asked, asked_by_another, frame, received,
    send_offer, signal,
};
use super::service::{Service, terminate};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        no_request_is_lost_when_a_node_is_taken_over,
        no_request_is_lost_whichever_node_is_killed,
        a_node_keeps_all_disks_if_one_has_to_stay,
        a_disk_comes_back_if_the_next_node_dies,
        a_node_fails_if_the_one_that_took_its_disks_is_dead,
        a_node_ends_if_the_one_before_waits_no_longer,
        a_node_that_was_taken_over_leaves_nothing_to_its_manager,
        a_node_that_could_not_take_a_disk_takes_none,
        a_take_over_ends_although_a_disk_is_not_taken,
        a_process_that_takes_no_disk_gets_none,
    ]
}

const DISKS: [&str; 3] = ["a", "b", "c"];
/// Longest time after which a node is killed that takes part in a take-over.
const KILL_MAX_US: u64 = 60_000;

/// The folders of a node.
struct Place {
    scratch: Scratch,
    control: PathBuf,
}

impl Place {
    fn new() -> Place {
        let scratch = Scratch::new();
        let control = scratch.join("run").join("control.sock");
        Place { scratch, control }
    }

    fn args(&self) -> Vec<String> {
        let folder = |name| self.scratch.join(name).to_str().unwrap().to_owned();
        let words = ["node", "--take-over", "--state"].map(str::to_owned);
        let folders = [folder("state"), "--run".to_owned(), folder("run")];
        words.into_iter().chain(folders).collect()
    }

    fn log(&self) -> PathBuf {
        self.scratch.join("log")
    }

    fn start(&self) -> Killed {
        let log = File::options().create(true).append(true).open(self.log());
        let mut command = Command::new(program_path());
        Killed::start(command.args(self.args()).stderr(log.unwrap()))
    }

    fn start_first(&self) -> Killed {
        let node = self.start();
        assert!(wait_until(|| has_listener(&self.control)));
        node
    }

    fn put(&self, id: &str, body: &Value) {
        let answer = fetch(
            &self.control,
            "PUT",
            &format!("/v1/disks/{id}"),
            &body.to_string(),
        );
        assert_eq!(answer.status, 201, "{id}: {}", answer.body);
    }

    /// Waits until this node, whose interface is served when it has all disks, serves them.
    fn serves_all(&self, node: &mut Killed) -> bool {
        let request = b"GET /v1/disks HTTP/1.0\r\n\r\n";
        let mut has_ended = false;
        let serves = wait_until(|| {
            has_ended = node.0.try_wait().unwrap().is_some();
            let answer = converse(&self.control, request, TIMEOUT).unwrap_or_default();
            has_ended || answer.matches(r#""state": "serving""#).count() == DISKS.len()
        });
        assert!(serves, "{}", get(&self.control, "/v1/disks"));
        !has_ended
    }
}

/// A guest of each disk.
struct Guests(Vec<(PathBuf, Client, Survivor)>);

impl Guests {
    fn of(place: &Place) -> Guests {
        let guests = DISKS.map(|id| {
            let image = place
                .scratch
                .image(&format!("image-{id}"), SURVIVOR_DISK_BYTES);
            place.put(id, &json!({"disk": [image], "queues": 4}));
            let socket = disk_socket(place.scratch.path(), id);
            let mut client = connect(|| Client::open(&socket, &outliving()));
            let guest = Survivor::new(&mut client);
            (socket, client, guest)
        });
        Guests(guests.into())
    }

    fn work(&mut self, random: &mut Random, time: Duration) {
        for (_, client, guest) in &mut self.0 {
            guest.work(client, random, time);
        }
    }

    /// Connects those again whose connections have ended, and checks all. Returns how many those were.
    fn verify(&mut self, sleeps: bool) -> usize {
        let mut lost = 0;
        for (socket, client, guest) in &mut self.0 {
            // Its end may come a little later than the next answer of the interface.
            if client.frontend().features().is_err() {
                connect(|| client.reconnect(socket, &outliving(), Base::Used));
                lost += 1;
            }
            guest.await_all(client, sleeps);
            guest.verify(client, false);
        }
        lost
    }
}

fn no_request_is_lost_when_a_node_is_taken_over() {
    let mut random = seeded("node-take-over");
    let place = Place::new();
    let mut node = place.start_first();
    let mut guests = Guests::of(&place);
    for round in 0..10 {
        guests.work(&mut random, Duration::from_millis(2));
        let mut next = place.start();
        while node.0.try_wait().unwrap().is_none() {
            guests.work(&mut random, Duration::from_micros(200));
        }
        assert_eq!(node.0.wait().unwrap().code(), Some(0));
        assert!(place.serves_all(&mut next));
        assert_eq!(guests.verify(round % 2 == 0), 0);
        node = next;
    }
    let log = || std::fs::read_to_string(place.log()).unwrap();
    let pauses = Pauses::told_of(10 * DISKS.len(), log);
    println!(
        "10 take-overs of a node with {} disks: pause {pauses}",
        DISKS.len()
    );
    // It is a node like any other.
    drop(guests);
    for id in DISKS {
        let path = format!("/v1/disks/{id}?mode=drain");
        assert_eq!(fetch(&place.control, "DELETE", &path, "").status, 200);
    }
    terminate(&mut node);
    assert_eq!(node.0.wait().unwrap().code(), Some(0));
    assert!(!place.control.exists());
}

fn no_request_is_lost_whichever_node_is_killed() {
    let mut random = seeded("node-take-over-kills");
    let place = Place::new();
    let mut node = place.start_first();
    let mut guests = Guests::of(&place);
    let (mut lost, mut again) = (0, 0);
    for round in 0..16 {
        guests.work(&mut random, Duration::from_millis(1));
        let next = place.start();
        let end = Instant::now() + Duration::from_micros(random.below(KILL_MAX_US));
        while Instant::now() < end {
            guests.work(&mut random, Duration::from_micros(100));
        }
        let [killed, mut left] = match round % 2 {
            0 => [node, next],
            _ => [next, node],
        };
        drop(killed);
        // It serves what the other one had taken, unless it had nothing left to do, or had not heard yet what it needs.
        if !place.serves_all(&mut left) {
            left = place.start();
            assert!(place.serves_all(&mut left));
            again += 1;
        }
        lost += guests.verify(round % 3 == 0);
        node = left;
    }
    println!(
        "16 kills, {} connections: {lost} made again; {again} nodes started again",
        16 * DISKS.len()
    );
    drop(guests);
    terminate(&mut node);
    assert_eq!(node.0.wait().unwrap().code(), Some(0));
}

fn a_node_keeps_all_disks_if_one_has_to_stay() {
    let mut random = seeded("node-take-over-obstacles");
    let place = Place::new();
    let mut node = place.start_first();
    let mut guests = Guests::of(&place);
    let image = place.scratch.image("image-x", SURVIVOR_DISK_BYTES);
    let file = place.scratch.join("state").join("disks").join("b.toml");
    let kept = std::fs::read_to_string(&file).unwrap();
    for (body, why) in [
        (json!({"disk": ["ram:1M"]}), "in the memory of this process"),
        (
            json!({"disk": [image], "persistent": false}),
            "it is not persistent",
        ),
    ] {
        place.put("x", &body);
        let refused = run_to_exit(&place.args());
        assert_eq!(refused.code, Some(3), "{}", refused.stderr);
        assert!(refused.stderr.contains(why), "{}", refused.stderr);
        // A restart would lose another disk, so the code says nothing of one.
        std::fs::write(&file, "disk = 7").unwrap();
        let refused = run_to_exit(&place.args());
        std::fs::write(&file, &kept).unwrap();
        assert_eq!(refused.code, Some(1), "{}", refused.stderr);
        assert!(refused.stderr.contains("disk b"), "{}", refused.stderr);
        // No socket could be made there.
        let metrics = place.scratch.join("none").join("metrics");
        let more = ["--metrics".to_owned(), metrics.display().to_string()];
        let refused = run_to_exit(&[place.args(), more.into()].concat());
        assert_eq!(refused.code, Some(1), "{}", refused.stderr);
        assert!(
            refused.stderr.contains("cannot make socket"),
            "{}",
            refused.stderr
        );
        guests.work(&mut random, Duration::from_millis(2));
        assert_eq!(guests.verify(true), 0);
        // When the running node has heard of the end of the other one.
        let removed = || fetch(&place.control, "DELETE", "/v1/disks/x", "").status;
        assert!(wait_until(|| removed() == 200));
    }
    // Nothing is given without the rest.
    let asks = b"POST /v1/take-over?disk=a HTTP/1.0\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: cleave-hand-over\r\n\r\n";
    let answer = converse(&place.control, asks, TIMEOUT).unwrap_or_default();
    assert!(answer.contains(" 400 "), "{answer}");
    // A disk that is not served keeps nothing here.
    let missing = place.scratch.image("missing", SURVIVOR_DISK_BYTES);
    place.put("x", &json!({"disk": [&missing]}));
    terminate(&mut node);
    node.0.wait().unwrap();
    std::fs::remove_file(&missing).unwrap();
    node = place.start();
    assert!(place.serves_all(&mut node));
    assert_eq!(guests.verify(true), DISKS.len());
    let mut next = place.start();
    assert_eq!(node.0.wait().unwrap().code(), Some(0));
    assert!(place.serves_all(&mut next));
    assert_eq!(guests.verify(true), 0);
    let state = || get(&place.control, "/v1/disks/x")["state"].clone();
    assert!(wait_until(|| state() == "failed"), "{}", state());
    drop(guests);
    terminate(&mut next);
    assert_eq!(next.0.wait().unwrap().code(), Some(0));
}

/// Takes part in a take-over until all is prepared.
fn made_ready(control: &Path, target: &str) -> UnixStream {
    let mut link = asked(control, target);
    let version = 1_u32.to_le_bytes();
    link.write_all(&frame(HELLO, &version)).unwrap();
    assert_eq!(received(&mut link), 2);
    link.write_all(&frame(READY, &[])).unwrap();
    link
}

/// Takes a disk of a node.
fn taken(control: &Path, id: &str) -> UnixStream {
    loop {
        let mut link = made_ready(control, &format!("/v1/take-over?disk={id}"));
        // A disk that takes longer than a guest may wait stays, and is asked for again.
        match received(&mut link) {
            PARCEL => {
                link.write_all(&frame(TAKEN, &[])).unwrap();
                return link;
            }
            kind => assert_eq!(kind, KEPT),
        }
    }
}

fn a_disk_comes_back_if_the_next_node_dies() {
    let mut random = seeded("node-take-over-back");
    let place = Place::new();
    let mut node = place.start_first();
    let mut guests = Guests::of(&place);
    let state = || get(&place.control, "/v1/disks/a")["state"].clone();
    let line = format!(" serving {} ", place.scratch.join("image-a").display());
    let openings = || {
        std::fs::read_to_string(place.log())
            .unwrap()
            .matches(&line)
            .count()
    };
    // It dies when this node has closed the disk, or before.
    for is_closed in [true, false] {
        let before = openings();
        guests.work(&mut random, Duration::from_millis(5));
        let all = made_ready(&place.control, "/v1/take-over");
        // The description of a disk has been read, so it stays.
        let change = fetch(&place.control, "DELETE", "/v1/disks/b?mode=drain", "");
        assert_eq!(change.status, 409, "{}", change.body);
        let link = taken(&place.control, "a");
        assert!(!is_closed || wait_until(|| state() == "ended"));
        drop((link, all));
        assert!(wait_until(|| openings() > before), "nobody serves it");
        assert_eq!(guests.verify(true), 1);
        assert!(place.serves_all(&mut node));
    }
    let change = fetch(&place.control, "DELETE", "/v1/disks/b?mode=drain", "");
    assert_eq!(change.status, 200, "{}", change.body);
}

/// The next node takes nothing from a manager while it runs, so a disk that is opened after all others were given must be free.
fn a_node_that_was_taken_over_leaves_nothing_to_its_manager() {
    let mut node = Service::node();
    let image = node.scratch.image("image", SURVIVOR_DISK_BYTES);
    let body = json!({"disk": [image]}).to_string();
    let added = fetch(&node.control(), "PUT", "/v1/disks/late", &body);
    assert_eq!(added.status, 201, "{}", added.body);
    node.stop();
    let away = node.scratch.join("away");
    std::fs::rename(&image, &away).unwrap();
    node.start_again();
    let mut all = made_ready(&node.control(), "/v1/take-over");
    assert_eq!(received(&mut all), PARCEL);
    std::fs::rename(&away, &image).unwrap();
    let started = fetch(&node.control(), "POST", "/v1/disks/late/start", "");
    assert_eq!(started.status, 200, "{}", started.body);
    all.write_all(&frame(TAKEN, &[])).unwrap();
    assert_eq!(node.manager.awaits(&mut node.daemon).code(), Some(0));
    assert_eq!(node.manager.main_pid, Some(std::process::id()));
    assert_eq!(node.manager.disks(), 0, "nobody takes what it keeps");
    node.start_again();
    let socket = disk_socket(node.scratch.path(), "late");
    let mut client = connect(|| Client::open(&socket, &outliving()));
    exercise_queue(&mut client, 0).unwrap();
}

fn a_node_that_could_not_take_a_disk_takes_none() {
    let mut random = seeded("node-take-over-judged");
    let place = Place::new();
    let mut node = place.start_first();
    let mut guests = Guests::of(&place);
    let file = place.scratch.join("state").join("disks").join("b.toml");
    let kept = std::fs::read_to_string(&file).unwrap();
    let other = kept.replace("image-b", "image-c");
    assert_ne!(other, kept);
    for (text, why) in [
        (Some("disk = 7".to_owned()), "b.toml"),
        (None, "is missing"),
        (Some(other), "is another disk"),
        (Some(format!("pool = \"none\"\n{kept}")), "none"),
    ] {
        match text {
            Some(text) => std::fs::write(&file, text).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        guests.work(&mut random, Duration::from_millis(2));
        let refused = run_to_exit(&place.args());
        let said = refused.stderr;
        assert_eq!(refused.code, Some(1), "{said}");
        assert!(said.contains("disk b") && said.contains(why), "{said}");
        assert_eq!(guests.verify(true), 0);
        // When the running node has heard of the end of the other one.
        let change = || fetch(&place.control, "PATCH", "/v1/disks/b", "{}").status;
        assert!(wait_until(|| change() == 200));
    }
    std::fs::write(&file, kept).unwrap();
    let mut next = place.start();
    assert_eq!(node.0.wait().unwrap().code(), Some(0));
    assert!(place.serves_all(&mut next));
    assert_eq!(guests.verify(true), 0);
}

fn a_take_over_ends_although_a_disk_is_not_taken() {
    let mut random = seeded("node-take-over-bound");
    let place = Place::new();
    let mut node = place.start_first();
    let mut guests = Guests::of(&place);
    guests.work(&mut random, Duration::from_millis(5));
    assert_eq!(guests.verify(true), 0);
    // The next node takes the file that is open, and refuses another one.
    let [image, copy] = ["image-b", "copy"].map(|name| place.scratch.join(name));
    std::fs::copy(&image, &copy).unwrap();
    std::fs::rename(&copy, &image).unwrap();
    let mut next = place.start();
    let mut has_ended = || node.0.try_wait().unwrap().is_some();
    assert!(wait_until(&mut has_ended) || wait_until(&mut has_ended));
    assert_eq!(node.0.wait().unwrap().code(), Some(0));
    let log = std::fs::read_to_string(place.log()).unwrap();
    let ends = "could not take it over: finishing the requests in flight";
    assert_eq!(log.matches(ends).count(), 1, "{log}");
    assert!(place.serves_all(&mut next));
    assert_eq!(guests.verify(true), 1);
    let change = fetch(&place.control, "DELETE", "/v1/disks/b?mode=drain", "");
    assert_eq!(change.status, 200, "{}", change.body);
}

fn a_process_that_takes_no_disk_gets_none() {
    let mut random = seeded("node-take-over-silent");
    let place = Place::new();
    let mut node = place.start_first();
    let mut guests = Guests::of(&place);
    guests.work(&mut random, Duration::from_millis(5));
    let mut silent = made_ready(&place.control, "/v1/take-over");
    // The node waits for 30 s.
    silent.set_read_timeout(Some(TIMEOUT)).unwrap();
    assert_eq!(received(&mut silent), KEPT);
    assert_eq!(guests.verify(true), 0);
    let change = || fetch(&place.control, "PATCH", "/v1/disks/b", "{}").status;
    assert!(wait_until(|| change() == 200));
    assert!(place.serves_all(&mut node));
    drop(guests);
    let mut next = place.start();
    assert!(place.serves_all(&mut next));
    assert_eq!(node.0.wait().unwrap().code(), Some(0));
}

/// Its manager starts the service again only then.
fn a_node_fails_if_the_one_that_took_its_disks_is_dead() {
    let mut random = seeded("node-take-over-dead");
    let place = Place::new();
    let mut node = place.start_first();
    let mut guests = Guests::of(&place);
    guests.work(&mut random, Duration::from_millis(5));
    let mut all = made_ready(&place.control, "/v1/take-over");
    let _taken = DISKS.map(|id| taken(&place.control, id));
    assert_eq!(received(&mut all), PARCEL);
    // Both have happened when it looks.
    freeze(&node.0);
    all.write_all(&frame(TAKEN, &[])).unwrap();
    // A child that another test starts may have a copy of it for a moment.
    all.shutdown(Shutdown::Both).unwrap();
    signal(&node, Signal::CONT);
    assert_eq!(node.0.wait().unwrap().code(), Some(1));
    let log = std::fs::read_to_string(place.log()).unwrap();
    assert!(log.contains("until this daemon is started again"), "{log}");
    let mut next = place.start();
    assert!(place.serves_all(&mut next));
    assert_eq!(guests.verify(true), DISKS.len());
    drop(guests);
    terminate(&mut next);
    assert_eq!(next.0.wait().unwrap().code(), Some(0));
}

/// Otherwise both would serve the control socket.
fn a_node_ends_if_the_one_before_waits_no_longer() {
    let place = Place::new();
    for folder in ["state", "run"] {
        std::fs::create_dir(place.scratch.join(folder)).unwrap();
    }
    let state = File::open(place.scratch.join("state")).unwrap();
    let control = UnixListener::bind(&place.control).unwrap();
    let mut next = place.start();
    let mut link = asked_by_another(&control);
    let document = json!({
        "format": "cleave-hand-over", "version": 1, "cleave": "0.3.0",
        "disk": {"id": "", "storage": "", "endpoint": "", "identities": []},
        "files": ["0"], "listener": null, "control": "1", "metrics": null, "watchdog_ns": null, "since_ns": null,
        "limit_levels": null, "sessions": [],
    });
    send_offer(&link, &document, &[state.as_fd(), control.as_fd()]);
    // It asks for the disks that are served.
    let none = "200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n[]";
    let _list = answered(&control, none);
    assert_eq!(received(&mut link), READY);
    link.write_all(&frame(KEPT, b"it waits no longer")).unwrap();
    assert_eq!(next.0.wait().unwrap().code(), Some(1));
    let log = std::fs::read_to_string(place.log()).unwrap();
    assert!(log.contains("goes on: it waits no longer"), "{log}");
    UnixStream::connect(&place.control).unwrap();
}
