//! NBD disks of a node, which is confined, and of a pool.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleave_client::{Base, Error, OffsetOrder, Stop, Workload};
use cleave_tests::nbd::{Export, NbdServer, WRITE};
use cleave_tests::{
    Case, Daemon, Node, Scratch, TIMEOUT, connect, exercise, freeze, outliving, small, wait_until,
    writes_all,
};
use rustix::process::Signal;
use rustix::thread::sched_getcpu;
use serde_json::{Value, json};

use crate::servers::{At, QEMU, SIZE, Server, load, qemu_nbd};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_confined_node_connects_again_over_tcp_and_unix_sockets: QEMU,
        a_disk_that_is_removed_writes_nothing_when_its_server_is_back,
        a_disk_that_is_removed_does_not_wait_for_its_last_flush,
        a_flush_fails_after_a_disk_was_removed_whose_last_flush_hung,
        a_server_that_is_stopped_does_not_keep_a_node_from_its_end: QEMU,
        a_disk_that_is_removed_and_added_again_does_what_was_left,
        a_disk_that_is_removed_and_added_again_waits_for_the_fence,
        disks_of_a_pool_connect_again: QEMU,
        a_limit_holds_for_a_disk_on_a_server: QEMU,
    ]
}

/// A server in this folder, and the disk that names it.
fn server(scratch: &Scratch, name: &str, at: At) -> (Server, At) {
    let image = scratch.image(name, SIZE);
    (qemu_nbd(&image, "raw", &at, &["--shared", "8"]), at)
}

/// The kernel's view of the threads that connect.
fn diallers(daemon: &Daemon) -> Vec<BTreeMap<String, String>> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let status = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("status")).ok();
    let fields = tasks.flatten().filter_map(status).map(|text| {
        let fields = text.lines().filter_map(|line| line.split_once(':'));
        let fields = fields.map(|(key, value)| (key.to_owned(), value.trim().to_owned()));
        fields.collect::<BTreeMap<_, _>>()
    });
    fields
        .filter(|fields| fields["Name"] == "cleave-nbd")
        .collect()
}

fn connections(node: &Node, id: &str) -> Value {
    node.disk(id)["store"]["connections"].clone()
}

/// Writes to a disk while its server is killed and comes back.
fn survives_a_restart(node: &Node, id: &str, server: &mut Server, at: &At) {
    let mut client = node.open(id, &small(2));
    writes_all(&mut client, &load(), || {
        std::thread::sleep(Duration::from_millis(60));
        server.kill();
        server.restart(at);
    });
    // The load may have ended before the kill.
    exercise(&mut client).unwrap();
    let reconnects = || connections(node, id)["reconnects"].as_u64() >= Some(1);
    assert!(wait_until(reconnects), "{}", node.daemon.log());
    assert_eq!(node.disk(id)["totals"]["failed"], json!(0));
}

fn a_confined_node_connects_again_over_tcp_and_unix_sockets() {
    let scratch = Scratch::in_memory();
    let servers = Scratch::in_memory();
    // The disks are in none of its folders of images, and the names of hosts are looked up all the same.
    let images = scratch.join("images");
    std::fs::create_dir(&images).unwrap();
    let options = [OsStr::new("--images"), images.as_os_str()].map(OsStr::to_owned);
    let options: Vec<&OsStr> = options.iter().map(AsRef::as_ref).collect();
    let node = Node::start_with(scratch, &options);
    let places = [At::Unix(servers.join("socket")), At::tcp(), At::tcp()];
    let mut number = 0;
    for at in places {
        number += 1;
        let id = format!("d{number}");
        let (mut server, at) = server(&servers, &id, at);
        let uri = match number {
            3 => at.uri("", "fence=1").replace("127.0.0.1", "localhost"),
            _ => at.uri("", "fence=1"),
        };
        node.add(
            &id,
            &json!({"disk": [uri], "queues": 2, "persistent": false}),
        );
        survives_a_restart(&node, &id, &mut server, &at);
        let threads = diallers(&node.daemon);
        assert_eq!(threads.len(), 1, "{threads:?}");
        let status = &threads[0];
        // Two of all threads, the node's, and its own.
        assert_eq!(
            (&*status["Seccomp"], &*status["Seccomp_filters"]),
            ("2", "4")
        );
        let effective = u64::from_str_radix(&status["CapEff"], 16).unwrap();
        assert_eq!(effective & 0b11, 0, "CAP_CHOWN and CAP_DAC_OVERRIDE");
        node.remove(&id);
        assert!(wait_until(|| diallers(&node.daemon).is_empty()));
    }
    let log = node.daemon.log();
    assert!(!log.contains("confined less"), "{log}");
    node.daemon.finish();
}

fn disks_of_a_pool_connect_again() {
    let servers = Scratch::in_memory();
    let pool = format!("one={}", sched_getcpu());
    let options = [OsStr::new("--pool"), OsStr::new(&pool)];
    let node = Node::start_with(Scratch::in_memory(), &options);
    let mut places = vec![At::Unix(servers.join("socket")), At::tcp()];
    let body = |disk: String, way: &str| json!({"disk": [disk], "queues": 2, "pool": "one", "completion": way, "persistent": false});
    // A disk of another kind on the same thread, which must not wait for the servers.
    node.add("ram", &body("ram:4M".to_owned(), "interrupt"));
    let mut beside = node.open("ram", &small(1));
    for (number, way) in ["adaptive", "interrupt"].into_iter().enumerate() {
        let at = places.remove(0);
        let id = format!("d{number}");
        let (mut server, at) = server(&servers, &id, at);
        node.add(&id, &body(at.uri("", "connections=2&fence=1"), way));
        survives_a_restart(&node, &id, &mut server, &at);
        // Without its server a disk waits; the other one does not.
        let mut client = node.open(&id, &small(1));
        server.kill();
        std::thread::scope(|scope| {
            let write = scope.spawn(|| client.queue(0).write(0, &[2; 4096]));
            assert!(wait_until(|| connections(&node, &id)["held"] == json!(1)));
            exercise(&mut beside).unwrap();
            server.restart(&at);
            write.join().unwrap().unwrap();
        });
        drop(client);
        node.remove(&id);
    }
    let log = node.daemon.log();
    assert!(!log.contains("confined less"), "{log}");
    drop(beside);
    node.daemon.finish();
}

fn a_limit_holds_for_a_disk_on_a_server() {
    let servers = Scratch::in_memory();
    let (_server, at) = server(&servers, "image", At::tcp());
    let node = Node::start();
    let limits = json!({"iops-total": 200});
    node.add(
        "d",
        &json!({"disk": [at.uri("", "")], "limits": limits, "persistent": false}),
    );
    let mut client = node.open("d", &small(1));
    let load = Workload {
        order: OffsetOrder::Random,
        stop: Stop::Requests(220),
        ..Workload::reads(4096, 16, 32 << 20, Duration::ZERO)
    };
    let start = Instant::now();
    assert_eq!(client.queue(0).run(&load, |_| {}).unwrap().failed, 0);
    // A tenth of a second's requests may come at once.
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(900), "{took:?}");
    assert!(node.disk("d")["totals"]["throttled"].as_u64() > Some(0));
    let refused = node.ask("POST", "/v1/disks/d/snapshot", r#"{"to": "/copy"}"#);
    assert!(
        refused.body.contains("take the snapshot there"),
        "{}",
        refused.body
    );
    drop(client);
    node.daemon.finish();
}

/// The operator may have started the guest elsewhere by then.
fn a_disk_that_is_removed_writes_nothing_when_its_server_is_back() {
    let servers = Scratch::in_memory();
    let server = NbdServer::start(&servers.join("nbd"), Export::able(8 << 20));
    let node = Node::start();
    let disk = json!({"disk": [server.uri("&reconnect=600&fence=1")], "persistent": false});
    node.add("d", &disk);
    let mut client = node.open("d", &small(1));
    client.queue(0).write(0, &[1; 512]).unwrap();
    server.accept(false);
    server.hang_up();
    std::thread::scope(|scope| {
        let write = scope.spawn(|| client.queue(0).write(0, &[2; 512]));
        assert!(wait_until(|| connections(&node, "d")["held"] == json!(1)));
        let gone = node.ask("DELETE", "/v1/disks/d?mode=hard", "");
        assert_eq!(gone.status, 200, "{}", gone.body);
        assert!(gone.body.contains("1 request"), "{}", gone.body);
        server.accept(true);
        // Attempts are at most two seconds apart.
        std::thread::sleep(Duration::from_secs(5));
        let asked = server.asked();
        let writes = asked.iter().filter(|asked| asked.kind == WRITE).count();
        assert_eq!(writes, 1, "{asked:?}");
        let _ = write.join();
    });
    node.daemon.finish();
}

/// What it left in flight is done by its successor at the same socket, and that does not wait for the server of the first.
fn a_disk_that_is_removed_and_added_again_does_what_was_left() {
    let servers = Scratch::in_memory();
    let server = NbdServer::start(&servers.join("nbd"), Export::able(8 << 20));
    let node = Node::start();
    let disk = json!({"disk": [server.uri("&reconnect=600&fence=1")], "persistent": false});
    node.add("d", &disk);
    let options = outliving();
    let mut client = node.open("d", &options);
    client.queue(0).write(0, &[1; 512]).unwrap();
    server.accept(false);
    server.hang_up();
    client.queue(0).set_timeout(Duration::from_millis(300));
    let stuck = client.queue(0).write(0, &[2; 512]);
    assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
    assert!(wait_until(|| connections(&node, "d")["held"] == json!(1)));
    let gone = node.ask("DELETE", "/v1/disks/d?mode=hard", "");
    assert!(gone.body.contains("1 request"), "{}", gone.body);
    server.accept(true);
    node.add("d", &disk);
    let socket = node.socket("d");
    connect(|| client.reconnect(&socket, &options, Base::Used));
    client.queue(0).set_timeout(TIMEOUT);
    client.queue(0).wait_used().unwrap();
    assert_eq!(server.bytes()[..512], [2; 512]);
    drop(client);
    node.daemon.finish();
}

/// The guest wrote and did not flush, so its worker has the server flush at its end, and gets no answer.
fn a_server_that_is_stopped_does_not_keep_a_node_from_its_end() {
    let servers = Scratch::in_memory();
    let (stopped, at) = server(&servers, "image", At::Unix(servers.join("socket")));
    let pool = format!("one={}", sched_getcpu());
    let node = Node::start_with(Scratch::in_memory(), &["--pool", &pool].map(OsStr::new));
    let body = |disk: &str| json!({"disk": [disk], "pool": "one", "stop_deadline": 1, "persistent": false});
    node.add("d", &body(&at.uri("", "")));
    node.add("quick", &body("ram:4M"));
    let mut client = node.open("d", &small(1));
    client.queue(0).write(0, &[1; 512]).unwrap();
    freeze(&stopped.child);
    drop(client);
    exercise(&mut node.open("quick", &small(1))).unwrap();
    let mut daemon = node.daemon;
    daemon.signal(Signal::TERM);
    let ended = daemon.wait();
    let log = daemon.log();
    match ended {
        Some((Some(1), took)) if took < Duration::from_secs(8) => {}
        other => panic!("{other:?}\n{log}"),
    }
    assert!(log.contains("did not answer the last flush"), "{log}");
}

/// The rings of a worker keep others from its socket until it has ended.
fn a_disk_that_is_removed_does_not_wait_for_its_last_flush() {
    let servers = Scratch::in_memory();
    let server = NbdServer::start(&servers.join("nbd"), Export::able(8 << 20));
    let node = Node::start();
    let body = json!({"disk": [server.uri("&fence=1")], "stop_deadline": 1, "persistent": false});
    node.add("d", &body);
    let mut client = node.open("d", &small(1));
    client.queue(0).write(0, &[1; 512]).unwrap();
    let is_held = Arc::new(AtomicBool::new(true));
    server.hold_flushes(&is_held);
    drop(client);
    assert!(wait_until(|| server.flushes() > 0));
    let gone = node.ask("DELETE", "/v1/disks/d?mode=drain", "");
    assert_eq!(gone.status, 200, "{}", gone.body);
    assert_eq!(server.flushes(), 1);
    node.add("d", &body);
    let mut back = [0; 512];
    node.open("d", &small(1))
        .queue(0)
        .read(0, &mut back)
        .unwrap();
    assert_eq!(back, [1; 512]);
    is_held.store(false, Ordering::SeqCst);
    node.daemon.finish();
}

/// The copies of what the server answered are gone with the disk, and so is the answer to that flush.
fn a_flush_fails_after_a_disk_was_removed_whose_last_flush_hung() {
    let servers = Scratch::in_memory();
    let server = NbdServer::start(&servers.join("nbd"), Export::able(8 << 20));
    let node = Node::start();
    let body = json!({"disk": [server.uri("&fence=1")], "stop_deadline": 1, "persistent": false});
    node.add("d", &body);
    let mut client = node.open("d", &small(1));
    client.queue(0).write(0, &[1; 512]).unwrap();
    let is_held = Arc::new(AtomicBool::new(true));
    server.hold_flushes(&is_held);
    drop(client);
    assert!(wait_until(|| server.flushes() > 0));
    let gone = node.ask("DELETE", "/v1/disks/d?mode=drain", "");
    assert_eq!(gone.status, 200, "{}", gone.body);
    is_held.store(false, Ordering::SeqCst);
    node.add("d", &body);
    let failed = node.open("d", &small(1)).queue(0).flush();
    let is_failed = matches!(failed, Err(Error::Status { status: 1, .. }));
    assert!(is_failed, "{failed:?}");
    // The guest was told.
    node.remove("d");
    node.add("d", &body);
    node.open("d", &small(1)).queue(0).flush().unwrap();
    node.daemon.finish();
}

/// The server may still do what the killed node sent, whatever becomes of the disk before the fence is over.
fn a_disk_that_is_removed_and_added_again_waits_for_the_fence() {
    let servers = Scratch::in_memory();
    let server = NbdServer::start(&servers.join("nbd"), Export::able(8 << 20));
    let disk = |fence: u32| json!({"disk": [server.uri(&format!("&fence={fence}"))]});
    let mut before = Node::start();
    before.add("d", &disk(600));
    exercise(&mut before.open("d", &small(1))).unwrap();
    let node = Node {
        daemon: before.daemon.succeed().unwrap(),
    };
    before.daemon.abandon();
    assert!(wait_until(|| node.state("d") == "serving"));
    node.remove("d");
    node.add("d", &disk(2));
    exercise(&mut node.open("d", &small(1))).unwrap();
    let logged = node.daemon.log_has("did not end in order");
    assert!(logged, "{}", node.daemon.log());
    // The fence is over, and so this is an end in order.
    node.remove("d");
    assert!(!node.socket("d").parent().unwrap().exists());
    node.daemon.finish();
}
