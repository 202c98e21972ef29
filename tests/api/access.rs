//! Who may reach the sockets of a node, with the folder, the group, the umask and the capabilities of its unit. The group has every
//! VMM of the host in it: its members connect, and have no other power over the socket of another guest.

use std::fs::{self, File, Permissions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use cleave_client::Socket;
use cleave_tests::http::{fetch, get};
use cleave_tests::{
    Lingering, Node, Scratch, ServiceManager, disk_socket, has_listener, ignored, is_root,
    wait_until,
};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// The group of the node's unit, and users of whom only the first is in it.
const GROUP: u32 = 64056;
const MEMBER: u32 = 64055;
const OTHER: u32 = 64057;

fn of_unit(key: &str) -> String {
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/../dist/cleave.service");
    let text = fs::read_to_string(unit).unwrap();
    let value = |line: &str| Some(line.strip_prefix(key)?.strip_prefix('=')?.to_owned());
    text.lines().find_map(value).unwrap_or_default()
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// Waits until a new socket has this mode: it listens before that, for its owner only.
fn assert_opened(socket: &Path, wanted: u32) {
    let is_open = wait_until(|| mode(socket) == wanted);
    assert!(is_open, "{:o} instead of {wanted:o}", mode(socket));
}

/// The folder of a node, whose RUN every user may enter and whose group is that of the unit.
fn folder() -> Scratch {
    let scratch = Scratch::in_memory();
    fs::set_permissions(scratch.path(), Permissions::from_mode(0o755)).unwrap();
    let run = scratch.join("run");
    fs::create_dir(&run).unwrap();
    chown(&run, Some(0), Some(GROUP)).unwrap();
    let mode = u32::from_str_radix(&of_unit("RuntimeDirectoryMode"), 8).unwrap();
    fs::set_permissions(&run, Permissions::from_mode(mode)).unwrap();
    scratch
}

/// Starts a node as its unit does.
fn start(scratch: Scratch) -> Node {
    Node::start_after(&prelude(), scratch)
}

/// Shell commands after which a program has what the node's unit gives it.
fn prelude() -> String {
    let capabilities = of_unit("CapabilityBoundingSet").to_lowercase();
    let kept = capabilities.split_whitespace();
    let kept: String = kept
        .filter_map(|name| name.strip_prefix("cap_"))
        .map(|name| format!(",+{name}"))
        .collect();
    format!(
        "umask {}; set -- setpriv --regid {GROUP} --clear-groups --inh-caps -all --bounding-set -all{kept} --no-new-privs \"$@\"",
        of_unit("UMask")
    )
}

/// Kills a node, and starts it again after that.
fn killed(mut node: Node, meanwhile: impl FnOnce(&Node)) -> Node {
    node.daemon.die().unwrap();
    meanwhile(&node);
    let daemon = node.daemon.start_again().unwrap();
    node.daemon.abandon();
    Node { daemon }
}

fn assert_serves(node: &Node, id: &str) {
    assert!(wait_until(|| node.state(id) != "opening"));
    assert_eq!(node.state(id), "serving", "{}", node.disk(id));
}

/// Returns true if this shell command succeeds for a user in these groups. `$1` is the path.
fn can(user: u32, groups: &str, command: &str, path: &Path) -> bool {
    let identity = [format!("--reuid={user}"), format!("--regid={user}")];
    let groups = format!("--groups={groups}");
    let line = Command::new("setpriv")
        .args(identity)
        .args([&groups, "--no-new-privs", "sh", "-c", command, "sh"])
        .arg(path)
        .output()
        .unwrap();
    line.status.success()
}

/// Returns true if a user in these groups can connect. A shell cannot, but it can look at what connecting asks for: the folders,
/// and writing to the socket.
fn can_connect(user: u32, groups: &str, socket: &Path) -> bool {
    can(user, groups, "test -w \"$1\"", socket)
}

fn ram() -> Value {
    json!({"disk": ["ram:1M"]})
}

fn names(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    names.sort();
    names
}

/// A member could otherwise put a socket of its own in the place of another guest's, whose VMM would hand it that guest's memory;
/// and without the lock a node does not wait for the I/O of one that was killed.
#[test]
fn a_member_of_the_group_changes_nothing_in_the_folder_of_a_socket() {
    if !is_root() {
        return ignored("not root");
    }
    let scratch = folder();
    // As a node of an earlier version left it: folders outlive it.
    let old = scratch.join("run/old");
    fs::create_dir(&old).unwrap();
    chown(&old, Some(0), Some(GROUP)).unwrap();
    fs::set_permissions(&old, Permissions::from_mode(0o2770)).unwrap();
    let node = start(scratch);
    for id in ["new", "old"] {
        node.add(id, &ram());
        let socket = node.socket(id);
        let folder = socket.parent().unwrap();
        let before = names(folder);
        assert_eq!(before.len(), 2, "the socket and its lock: {before:?}");
        let group = GROUP.to_string();
        for command in [
            ": >\"$1/mine\"",
            "mkdir \"$1/mine\"",
            "ln -s /etc/passwd \"$1/mine\"",
            "mv \"$1/disk.sock\" \"$1/mine\"",
            "rm \"$1/disk.sock\"",
            "rm -f \"$1/disk.sock.lock\"",
            ": >>\"$1/disk.sock.lock\"",
            "chmod 777 \"$1\"",
            "chmod 666 \"$1/disk.sock\"",
        ] {
            let done = can(MEMBER, &group, command, folder);
            assert!(!done, "{id}: a member of the group did {command}");
        }
        assert_eq!(names(folder), before, "{id}");
        assert_eq!(mode(folder) & 0o777, 0o750, "{id}");
        assert_eq!(mode(&socket), 0o660, "{id}");
        assert!(can_connect(MEMBER, &group, &socket), "{id}");
        assert!(!can_connect(OTHER, "64057", &socket), "{id}");
    }
    node.daemon.finish();
}

/// Somebody who can write to the folder swaps the new socket for a link to the control socket, between the moment when it is
/// made and the one when its owner and mode are set.
#[test]
fn a_link_in_the_place_of_a_socket_is_never_followed() {
    if !is_root() {
        return ignored("not root");
    }
    let node = start(folder());
    let control = node.daemon.socket().to_owned();
    let before = fs::metadata(&control).unwrap();
    let folder = node.socket("a").parent().unwrap().to_owned();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (new, link) = (folder.join("new.sock"), folder.join("link"));
            while !is_over.load(Ordering::Relaxed) {
                let is_socket = |found: fs::Metadata| found.file_type().is_socket();
                if fs::symlink_metadata(&new).is_ok_and(is_socket) {
                    let _ = renameat_with(CWD, &link, CWD, &new, RenameFlags::EXCHANGE);
                    let _ = fs::remove_file(&link);
                }
                let _ = symlink("../control.sock", &link);
            }
        });
        // It may fail, and does each time that the swap comes between.
        for _ in 0..500 {
            node.put("a", &json!({"disk": ["ram:1M"], "persistent": false}));
            node.ask("DELETE", "/v1/disks/a?mode=hard", "");
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let after = fs::metadata(&control).unwrap();
    assert_eq!(after.mode(), before.mode(), "mode of the control socket");
    assert_eq!(after.gid(), before.gid(), "group of the control socket");
    node.daemon.finish();
}

/// Each tenant's VMM in a group of its own, so that none reaches the disk of another.
#[test]
fn a_disk_can_be_for_another_group_than_that_of_the_unit() {
    if !is_root() {
        return ignored("not root");
    }
    let node = start(folder());
    let tenant = 64100;
    node.add(
        "a",
        &json!({"disk": ["ram:1M"], "socket_group": tenant.to_string()}),
    );
    node.add("b", &ram());
    let [a, b] = ["a", "b"].map(|id| node.socket(id));
    assert!(can_connect(MEMBER, "64100", &a));
    assert!(!can_connect(MEMBER, "64100", &b));
    assert!(can_connect(OTHER, "64056", &b));
    assert!(!can_connect(OTHER, "64056", &a));
    // The folder of a disk that is no longer for that group is not for it either.
    node.remove("a");
    node.add("a", &ram());
    assert!(can_connect(OTHER, "64056", &a));
    assert!(!can_connect(MEMBER, "64100", &a));
    // Everybody, if the operator says so.
    node.add("c", &json!({"disk": ["ram:1M"], "socket_mode": "0666"}));
    assert!(can_connect(OTHER, "64057", &node.socket("c")));
    for group in ["4294967295", "-1"] {
        let refused = node.put("d", &json!({"disk": ["ram:1M"], "socket_group": group}));
        assert_eq!(refused.status, 422, "{group}: {}", refused.body);
        assert!(refused.error().contains("socket_group"), "{}", refused.body);
    }
    node.daemon.finish();
}

/// As libvirt runs each guest, without a group in common.
#[test]
fn a_disk_can_be_for_one_user() {
    if !is_root() {
        return ignored("not root");
    }
    let node = start(folder());
    let body = json!({"disk": ["ram:1M"], "socket_user": OTHER.to_string(), "socket_mode": "0600"});
    node.add("a", &body);
    let socket = node.socket("a");
    assert!(can_connect(OTHER, &OTHER.to_string(), &socket));
    assert!(!can_connect(MEMBER, "64056", &socket));
    // The socket is the user's, and its place in the folder is not.
    let folder = socket.parent().unwrap();
    for command in [
        "rm -f \"$1/disk.sock\"; ! test -e \"$1/disk.sock\"",
        ": >\"$1/mine\"",
        "ls \"$1\"",
    ] {
        assert!(
            !can(OTHER, &OTHER.to_string(), command, folder),
            "{command}"
        );
    }
    let refused = node.put(
        "b",
        &json!({"disk": ["ram:1M"], "socket_user": "nobody of this name"}),
    );
    assert_eq!(refused.status, 422, "{}", refused.body);
    assert!(
        refused.error().contains("socket_user: no user"),
        "{}",
        refused.body
    );
    node.daemon.finish();
}

/// Disks to whose sockets their own node may not connect: it lacks the right of root to write to all files.
fn given_away() -> [(&'static str, Value); 4] {
    let disk = |more: Value| {
        let mut disk = ram();
        let more = more.as_object().unwrap().clone();
        disk.as_object_mut().unwrap().extend(more);
        disk
    };
    let user = OTHER.to_string();
    [
        ("user", json!({"socket_user": user, "socket_mode": "0600"})),
        (
            "both",
            json!({"socket_user": user, "socket_group": "64100"}),
        ),
        ("mode", json!({"socket_mode": "0060"})),
        ("closed", json!({"socket_user": user, "socket_mode": "0"})),
    ]
    .map(|(id, more)| (id, disk(more)))
}

/// Returns the owner, the group and the mode of a socket.
fn access(socket: &Path) -> [u32; 3] {
    let found = fs::symlink_metadata(socket).unwrap();
    [found.uid(), found.gid(), found.mode() & 0o7777]
}

/// The sockets stay behind when a node dies, and when it leaves its disks to the next one.
#[test]
fn a_socket_that_was_given_away_is_replaced_by_the_next_node() {
    if !is_root() {
        return ignored("not root");
    }
    let node = start(folder());
    for (id, body) in &given_away() {
        node.add(id, body);
    }
    let sockets = given_away().map(|(id, _)| node.socket(id));
    let before = sockets.each_ref().map(|socket| access(socket));
    let node = killed(node, |_| {
        let stale = sockets.each_ref().map(|socket| access(socket));
        assert_eq!(stale, before, "none stays behind");
    });
    for (id, _) in given_away() {
        assert_serves(&node, id);
    }
    assert_eq!(sockets.each_ref().map(|socket| access(socket)), before);
    assert!(can_connect(OTHER, &OTHER.to_string(), &sockets[0]));
    for (id, socket) in given_away().map(|(id, _)| id).iter().zip(&sockets) {
        node.remove(id);
        assert!(!socket.parent().unwrap().exists(), "{id}");
    }
    node.daemon.finish();
}

/// systemd closes what it keeps of a service when that is stopped.
#[test]
fn a_socket_that_was_given_away_is_replaced_after_a_stop_and_a_start() {
    if !is_root() {
        return ignored("not root");
    }
    let scratch = folder();
    let images = Scratch::new();
    let mut manager = ServiceManager::empty();
    manager.prelude = prelude();
    let [run, state] = ["run", "state"].map(|name| scratch.join(name).display().to_string());
    let line = ["node", "--state", &state, "--run", &run];
    let control = scratch.join("run/control.sock");
    let socket = disk_socket(scratch.path(), "a");
    let ask = |method, body: &str| fetch(&control, method, "/v1/disks/a", body);
    let [(_, mut body), ..] = given_away();
    body["disk"] = json!([images.image("a", 4 << 20)]);
    for is_first in [true, false] {
        let mut daemon = manager.start(&line);
        assert!(wait_until(|| has_listener(&control)), "{}", manager.log());
        if is_first {
            let added = ask("PUT", &body.to_string());
            assert_eq!(added.status, 201, "{}", added.body);
        }
        let shown = || get(&control, "/v1/disks/a");
        assert!(wait_until(|| shown()["state"] != "opening"));
        assert_eq!(shown()["state"], "serving", "{}", shown());
        assert!(can_connect(OTHER, &OTHER.to_string(), &socket));
        let pid = Pid::from_raw(daemon.0.id().cast_signed()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        assert_eq!(manager.awaits(&mut daemon).code(), Some(0));
        assert_eq!(access(&socket), [OTHER, GROUP, 0o600], "it stays behind");
        manager.kept.clear();
    }
}

/// A disk that does not come back leaves no folder behind when it is removed.
#[test]
fn a_socket_that_was_given_away_is_removed_with_a_disk_that_failed() {
    if !is_root() {
        return ignored("not root");
    }
    let node = start(folder());
    let images = Scratch::new();
    let image = images.image("a", 4 << 20);
    for (id, mut body) in given_away() {
        body["disk"] = json!([image]);
        body["read_only"] = json!(true);
        node.add(id, &body);
    }
    let node = killed(node, |_| fs::remove_file(&image).unwrap());
    for (id, _) in given_away() {
        // It has no reason while it is tried again.
        let is_told = || {
            let disk = node.disk(id);
            disk["state"] == "failed" && disk.to_string().contains("does not exist")
        };
        assert!(wait_until(is_told), "{id}: {}", node.disk(id));
        let socket = node.socket(id);
        // As one that was killed while it made the socket leaves it.
        let beside = socket.with_file_name("new.sock");
        drop(UnixListener::bind(&beside).unwrap());
        let [user, group, mode] = access(&socket);
        chown(&beside, Some(user), Some(group)).unwrap();
        fs::set_permissions(&beside, Permissions::from_mode(mode)).unwrap();
        node.remove(id);
        assert!(!socket.parent().unwrap().exists(), "{id}");
    }
    node.daemon.finish();
}

/// I/O that a node has in flight when it is killed holds the lock of the path.
#[test]
fn a_disk_whose_socket_was_given_away_waits_for_the_io_of_a_node_that_was_killed() {
    if !is_root() {
        return ignored("not root");
    }
    let node = start(folder());
    let [(id, body), ..] = given_away();
    node.add(id, &body);
    let lock = node.socket(id).with_file_name("disk.sock.lock");
    let mut held = None;
    let node = killed(node, |_| {
        let file = File::open(&lock).unwrap();
        flock(&file, FlockOperation::LockExclusive).unwrap();
        held = Some(file);
    });
    assert!(
        wait_until(|| node.daemon.log_has("waiting for the daemon")),
        "{}",
        node.disk(id)
    );
    assert_eq!(node.state(id), "opening", "{}", node.disk(id));
    assert_eq!(access(&node.socket(id)), [OTHER, GROUP, 0o600]);
    drop(held);
    assert_serves(&node, id);
    node.daemon.finish();
}

/// As systemd may listen for a unit: no cleave has the lock, and the socket may belong to the user that the disk names.
#[test]
fn the_socket_of_another_program_stays_as_it_is() {
    if !is_root() {
        return ignored("not root");
    }
    let node = start(folder());
    let socket = node.socket("a");
    let folder = socket.parent().unwrap();
    fs::create_dir(folder).unwrap();
    let [(_, body), ..] = given_away();
    let missing = json!({"disk": [folder.join("none")], "socket_user": OTHER.to_string()});
    for owner in [OTHER, MEMBER] {
        let listener = UnixListener::bind(&socket).unwrap();
        chown(&socket, Some(owner), Some(GROUP)).unwrap();
        fs::set_permissions(&socket, Permissions::from_mode(0o600)).unwrap();
        let why = match owner {
            OTHER => "in use by a running program",
            _ => "a socket of another user",
        };
        for (body, why) in [(&body, why), (&missing, ""), (&body, why)] {
            let refused = node.put("a", body);
            assert_eq!(refused.status, 422, "{owner}: {}", refused.body);
            assert!(refused.error().contains(why), "{owner}: {}", refused.body);
            assert_eq!(access(&socket), [owner, GROUP, 0o600]);
            UnixStream::connect(&socket).unwrap();
        }
        drop(listener);
        if owner == MEMBER {
            // Nobody listens any more, and it is still not ours to judge.
            let refused = node.put("a", &body);
            assert!(refused.error().contains(why), "{}", refused.body);
            assert_eq!(access(&socket), [owner, GROUP, 0o600]);
        }
        fs::remove_file(&socket).unwrap();
    }
    node.daemon.finish();
}

#[test]
fn a_control_socket_can_be_for_a_group() {
    if !is_root() {
        return ignored("not root");
    }
    let options = ["--control-group", "64100"].map(std::ffi::OsStr::new);
    let node = Node::start_with(folder(), &options);
    let socket = node.daemon.socket();
    assert_opened(socket, 0o660);
    assert!(can_connect(OTHER, "64100", socket));
    assert!(!can_connect(OTHER, "64056", socket));
    node.daemon.finish();
}

/// The files that describe the disks name paths and servers.
#[test]
fn the_state_of_a_node_is_its_own() {
    let node = Node::start();
    let images = Scratch::new();
    let image = images.image("a", 4 << 20);
    node.add("a", &json!({"disk": [image]}));
    let state = node.daemon.scratch().join("state");
    for (path, wanted) in [("", 0o700), ("disks", 0o700), ("disks/a.toml", 0o600)] {
        assert_eq!(mode(&state.join(path)), wanted, "{path}");
    }
    node.daemon.finish();
}

/// `GET /metrics` on a socket of its own, which may be anybody's: it shows figures, and does not take orders.
#[test]
fn the_socket_of_the_metrics_shows_them_and_takes_no_orders() {
    if !is_root() {
        return ignored("not root");
    }
    let scratch = folder();
    let metrics = scratch.join("run/metrics.sock");
    let options = [
        "--metrics",
        metrics.to_str().unwrap(),
        "--metrics-group",
        "64100",
    ];
    let node = Node::start_with(scratch, &options.map(AsRef::as_ref));
    node.add("a", &ram());
    assert!(wait_until(|| cleave_tests::has_listener(&metrics)));
    assert_opened(&metrics, 0o660);
    assert!(can_connect(OTHER, "64100", &metrics));
    assert!(!can_connect(MEMBER, "64056", &metrics));
    let shown = cleave_tests::http::fetch(&metrics, "GET", "/metrics", "");
    assert_eq!(shown.status, 200, "{}", shown.body);
    assert!(shown.body.contains("disk=\"a\""), "{}", shown.body);
    let body = r#"{"disk": ["ram:1M"]}"#;
    for (method, path, status) in [
        ("GET", "/v1/disks", 404),
        ("GET", "/v1/events", 404),
        ("PUT", "/v1/disks/b", 404),
        ("PATCH", "/v1/disks/a", 404),
        ("DELETE", "/v1/disks/a", 404),
        ("POST", "/v1/disks/a/quiesce", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/metrics", 405),
    ] {
        let answer = cleave_tests::http::fetch(&metrics, method, path, body);
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.body);
    }
    assert_eq!(node.get("/v1/disks").as_array().unwrap().len(), 1);
    node.daemon.signal(rustix::process::Signal::TERM);
    assert!(wait_until(|| !metrics.exists()), "the file stays behind");
    let mut daemon = node.daemon;
    assert_eq!(daemon.wait().unwrap().0, Some(0));
}

/// `cleave serve` has it too, and without a group everybody may read it.
#[test]
fn a_single_disk_has_a_socket_for_its_metrics() {
    let scratch = Scratch::in_memory();
    let metrics = scratch.join("metrics");
    let line = ["--disk", "ram:1M", "--metrics", metrics.to_str().unwrap()];
    let daemon = cleave_tests::Daemon::serve(&line);
    assert_opened(&metrics, 0o666);
    let shown = cleave_tests::http::fetch(&metrics, "GET", "/metrics", "");
    assert_eq!(shown.status, 200, "{}", shown.body);
    assert!(shown.body.contains("cleave_disk_info"), "{}", shown.body);
    let refused = cleave_tests::http::fetch(&metrics, "PATCH", "/v1/disks/ram:1M", "{}");
    assert_eq!(refused.status, 404, "{}", refused.body);
    daemon.finish();
    assert!(!metrics.exists(), "the file stays behind");
}

/// How a client sends a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    WithRequest,
    OutOfBand,
}

/// Its close waits ten minutes. It comes with the request or behind it, or with a byte that a plain receive has the kernel discard.
#[test]
fn a_descriptor_that_a_client_sends_holds_nobody_up() {
    const REQUEST: &[u8] = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let scratch = Scratch::in_memory();
    let sockets = ["metrics", "control"].map(|name| scratch.join(name));
    let [metrics, control] = sockets.each_ref().map(|path| path.to_str().unwrap());
    let line = [
        "--disk",
        "ram:1M",
        "--metrics",
        metrics,
        "--control",
        control,
    ];
    let daemon = cleave_tests::Daemon::serve(&line);
    let [metrics, control] = &sockets;
    assert_opened(metrics, 0o666);
    for socket in [metrics, control] {
        for (sent, is_behind) in [
            (Sent::WithRequest, false),
            (Sent::WithRequest, true),
            (Sent::OutOfBand, false),
            (Sent::OutOfBand, true),
        ] {
            let lingering = Lingering::new().unwrap();
            let client = Socket::connect(socket, cleave_tests::TIMEOUT).unwrap();
            // Its copy must not be closed before ours.
            daemon.freeze();
            if is_behind {
                client.send_raw(REQUEST, &[]).unwrap();
            }
            let _unread = match sent {
                Sent::WithRequest => {
                    let fds = [lingering.socket.as_fd()];
                    client.send_raw(REQUEST, &fds).unwrap();
                    lingering.give_up()
                }
                Sent::OutOfBand => lingering.send_out_of_band(&client).unwrap(),
            };
            if !is_behind {
                client.send_raw(REQUEST, &[]).unwrap();
            }
            daemon.signal(Signal::CONT);
            let shown = cleave_tests::http::fetch(control, "GET", "/healthz", "");
            assert_eq!(shown.status, 200, "{socket:?} {sent:?} {is_behind}");
        }
    }
    daemon.finish();
}

/// All threads that close what clients send are blocked, so what comes then would stay open.
#[test]
fn descriptors_that_clients_send_are_not_taken() {
    const REQUEST: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    let scratch = Scratch::in_memory();
    let metrics = scratch.join("metrics");
    let line = ["--disk", "ram:1M", "--metrics", metrics.to_str().unwrap()];
    let daemon = cleave_tests::Daemon::serve(&line);
    assert_opened(&metrics, 0o666);
    let before = daemon.fds_at_rest();
    let connect = || Socket::connect(&metrics, cleave_tests::TIMEOUT).unwrap();
    let (mut clients, mut unread) = (Vec::new(), Vec::new());
    daemon.freeze();
    for _ in 0..8 {
        let (client, lingering) = (connect(), Lingering::new().unwrap());
        let fds = [lingering.socket.as_fd()];
        client.send_raw(REQUEST, &fds).unwrap();
        unread.push(lingering.give_up());
        clients.push(client);
    }
    // As many as a message carries, and of all together fewer than the kernel lets a user have in sockets.
    let null = fs::File::open("/dev/null").unwrap();
    let many = vec![null.as_fd(); 253];
    for _ in 0..3 {
        let client = connect();
        client.send_raw(REQUEST, &many).unwrap();
        clients.push(client);
    }
    daemon.signal(Signal::CONT);
    for client in &clients {
        let is_closed = cleave_tests::closes_within(client, cleave_tests::TIMEOUT);
        assert!(is_closed, "a connection with descriptors goes on");
    }
    let (after, most) = (daemon.fds(), before + clients.len());
    assert!(after <= most, "{after} descriptors, more than {most}");
    let shown = cleave_tests::http::fetch(&metrics, "GET", "/metrics", "");
    assert_eq!(shown.status, 200, "{}", shown.body);
    daemon.finish();
}

/// A web page in a browser on this host, through a port that somebody forwards to the socket.
#[test]
fn a_request_of_a_web_page_is_refused() {
    let node = Node::start();
    node.add("a", &ram());
    let quiesce = "POST /v1/disks/a/quiesce HTTP/1.1\r\nHost: x\r\nOrigin: http://x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}";
    let text = cleave_tests::http::converse(
        node.daemon.socket(),
        quiesce.as_bytes(),
        cleave_tests::TIMEOUT,
    )
    .unwrap();
    let answer = cleave_tests::http::Response::parse(&text).unwrap();
    assert_eq!(answer.status, 403, "{text}");
    assert!(answer.error().contains("Origin"), "{text}");
    node.daemon.finish();
}
