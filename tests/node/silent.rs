//! A disk whose server is silent, or whose descriptors cannot be closed, is felt by nobody else.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use cleave_client::message;
use cleave_tests::{
    Exited, Node, Scratch, Stopwatch, TIMEOUT, UnresponsiveFs, closes_within, exercise, ignored,
    is_root, run_to_exit, small, wait_until,
};
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};
use rustix::process::Signal;
use serde_json::json;

use crate::{killed, mounted, ram};

/// A disk whose server is silent holds up neither the others nor the interface, and the end only for its deadline.
#[test]
fn a_hung_disk_is_felt_by_nobody_else() {
    let node = Node::start();
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    let count = 63;
    for at in 0..count {
        node.add(&format!("d{at}"), &ram());
    }
    node.add(
        "hung",
        &json!({"disk": [silent.file()], "queues": 1, "stop_deadline": 1, "direct": "off"}),
    );
    let hung = node.open("hung", &small(1));
    silent.stop_answering();
    let stuck = std::thread::spawn(move || {
        let mut client = hung;
        let _ = client.queue(0).read(0, &mut [0; 4096]);
    });
    assert!(wait_until(|| {
        node.get("/v1/disks/hung")["in_flight"]["requests"] == json!(1)
    }));
    for at in 0..count {
        exercise(&mut node.open(&format!("d{at}"), &small(1))).unwrap();
    }
    let mut daemon = node.daemon;
    let start = Stopwatch::start();
    daemon.signal(Signal::TERM);
    assert!(daemon.log_has("lost: still in flight after 1 s"));
    let took = start.elapsed();
    drop(silent);
    let ended = daemon.wait();
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(ended.unwrap().0, Some(1), "{}", daemon.log_tail());
    stuck.join().unwrap();
}

/// The kernel asks the server of a file for its permissions whenever its watch changes, as a busy disk has it do each second.
#[test]
fn a_busy_disk_that_hangs_does_not_hold_up_the_interface() {
    let node = Node::start();
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    node.add("other", &ram());
    node.add(
        "hung",
        &json!({"disk": [silent.file()], "queues": 1, "stop_deadline": 1, "direct": "off"}),
    );
    let mut client = node.open("hung", &small(1));
    // Nobody waits for its last write, which is not answered.
    std::thread::spawn(move || while client.queue(0).write(0, &[7; 4096]).is_ok() {});
    std::thread::sleep(Duration::from_millis(1500));
    silent.stop_answering();
    // Longer than between two changes of its watch.
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        let asked = Stopwatch::start();
        assert_eq!(node.state("other"), "serving");
        let took = asked.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut daemon = node.daemon;
    daemon.signal(Signal::TERM);
    assert!(daemon.log_has("lost: still in flight after 1 s"));
    drop(silent);
    let _ = daemon.wait();
}

/// As many as may be opened at once.
#[test]
fn disks_whose_server_is_silent_keep_no_other_disk_away() {
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    let node = killed(Node::start(), |folder| {
        let keep = |id: &str, disk: &str| {
            let file = folder.join(format!("state/disks/{id}.toml"));
            std::fs::write(file, format!("disk = [{disk:?}]\n")).unwrap();
        };
        for at in 0..64 {
            keep(&format!("hung{at}"), silent.file().to_str().unwrap());
        }
        keep("other", "ram:1M");
        silent.stop_answering();
    });
    assert!(wait_until(|| node.state("other") == "serving"));
    assert_eq!(node.state("hung0"), "opening");
    let waits = node.daemon.log_has("hung0: still waiting for");
    assert!(waits, "{}", node.daemon.log_tail());
    drop(silent);
    node.daemon.finish();
}

#[test]
fn a_disk_whose_server_has_become_silent_keeps_no_other_disk_away() {
    let Some((mount, silent)) = mounted() else {
        return;
    };
    let node = Node::start();
    node.add("silent", &json!({"disk": [silent.file()]}));
    silent.stop_answering();
    node.add("memory", &ram());
    node.add("image", &json!({"disk": [mount.image("a.img", 1 << 20)]}));
    let log = node.daemon.log();
    assert!(!log.contains("still waiting for"), "{log}");
    drop(silent);
    node.daemon.finish();
}

/// A node that is taken over would lose it: the next one could not open it. One that is restarted would as well.
#[test]
fn a_node_with_a_disk_whose_server_is_silent_is_not_taken_over() {
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    let node = Node::start();
    node.add("silent", &json!({"disk": [silent.file()]}));
    let folder = node.daemon.scratch();
    let [state, run] = ["state", "run"].map(|name| folder.join(name).display().to_string());
    silent.stop_answering();
    let refused = || run_to_exit(&["node", "--take-over", "--state", &state, "--run", &run]);
    let Exited { code, stderr, .. } = refused();
    assert_eq!(code, Some(1), "{stderr}");
    let why = "disk silent: its storage does not answer";
    assert!(stderr.contains(why), "{stderr}");
    // It may notice a moment later that the other process has left, and does not take orders until then.
    assert!(wait_until(|| {
        let left = "a process that was to take over all disks of this node has not";
        node.daemon.log_has(left)
    }));
    // With an obstacle too, which a restart would get past.
    node.add("memory", &json!({"disk": ["ram:4M"], "queues": 2}));
    let Exited { code, stderr, .. } = refused();
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains(why), "{stderr}");
    assert_eq!(node.state("silent"), "serving");
    exercise(&mut node.open("memory", &small(1))).unwrap();
    drop(silent);
    node.daemon.finish();
}

/// An image is looked for in each of the folders of --images.
#[test]
fn a_folder_of_images_whose_server_is_silent_keeps_no_disk_of_another_away() {
    let Some((mount, silent)) = mounted() else {
        return;
    };
    let image = mount.image("a.img", 1 << 20);
    let folders = [silent.file(), mount.path().to_owned()];
    let mut options = vec![OsStr::new("--sandbox"), OsStr::new("off")];
    for folder in &folders {
        options.extend([OsStr::new("--images"), folder.as_ref()]);
    }
    let node = Node::start_with(Scratch::in_memory(), &options);
    silent.stop_answering();
    node.add("a", &json!({"disk": [image]}));
    drop(silent);
    node.daemon.finish();
}

/// A folder that is away, whose server is silent, or that is the root of such a server, is at most one that has no disks.
#[test]
fn folders_of_images_that_are_away_keep_no_disk_of_another_away() {
    let Some((mount, silent)) = mounted() else {
        return;
    };
    let image = mount.image("a.img", 1 << 20);
    let gone = mount.join("gone");
    std::fs::create_dir(&gone).unwrap();
    let root = silent.file().parent().unwrap().to_owned();
    let all = mount.path().to_owned();
    let folders = [silent.file(), root, gone.clone(), all];
    let mut options: Vec<&OsStr> = Vec::new();
    for folder in &folders {
        options.extend([OsStr::new("--images"), folder.as_ref()]);
    }
    let node = Node::start_with(Scratch::in_memory(), &options);
    node.add("a", &json!({"disk": [image]}));
    let node = killed(node, |_| {
        silent.stop_answering();
        std::fs::remove_dir(&gone).unwrap();
    });
    assert!(wait_until(|| node.state("a") == "serving"));
    exercise(&mut node.open("a", &small(1))).unwrap();
    for (folder, why) in [
        (&silent.file(), "its file system does not answer"),
        (&gone, "No such file"),
    ] {
        let line = format!("--images {}: {why}", folder.display());
        assert!(node.daemon.log_has(&line), "{}", node.daemon.log());
    }
    drop(silent);
    node.daemon.finish();
}

/// As many as may be opened at once, and none of them is wanted any more.
#[test]
fn disks_that_are_deleted_while_their_server_is_silent_keep_no_other_disk_away() {
    let node = Node::start();
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    silent.stop_answering();
    let body = json!({"disk": [silent.file()], "persistent": false});
    for at in 0..64 {
        let id = format!("hung{at}");
        std::thread::scope(|scope| {
            let added = scope.spawn(|| node.put(&id, &body).status);
            let path = format!("/v1/disks/{id}");
            assert!(wait_until(|| node.ask("GET", &path, "").status == 200));
            assert_eq!(node.ask("DELETE", &path, "").status, 200);
            assert_eq!(added.join().unwrap(), 409);
        });
    }
    node.add("other", &ram());
    drop(silent);
    // Until now the threads that opened them held locks in their folders, or had not made the folders.
    let run = node.daemon.scratch().join("run");
    let folders = || std::fs::read_dir(&run).unwrap().flatten();
    let is_left =
        || folders().any(|folder| folder.file_name().to_string_lossy().starts_with("hung"));
    assert!(
        wait_until(|| !is_left()),
        "{:?}",
        folders().collect::<Vec<_>>()
    );
    node.daemon.finish();
}

/// Few threads close what frontends send, and a frontend that leaves needs one of them.
#[test]
fn disks_that_cannot_be_closed_keep_no_frontend_away() {
    if !is_root() {
        return ignored("needs root, to mount");
    }
    let node = Node::start();
    node.add("other", &ram());
    let folder = Scratch::in_memory();
    // It ends before the node, which could not close its files.
    let silent = UnresponsiveFs::mount_caching(&folder, 4 << 20).unwrap();
    let mut file = std::fs::File::options()
        .write(true)
        .open(silent.file())
        .unwrap();
    // Before the first write alone the kernel asks for an attribute.
    file.write_all(&[7; 4096]).unwrap();
    let ids: Vec<_> = (0..40).map(|at| format!("d{at}")).collect();
    let body = json!({"disk": [silent.file()], "read_only": true, "queues": 1, "direct": "off",
        "persistent": false});
    ids.iter().for_each(|id| node.add(id, &body));
    silent.stop_answering();
    // Into the cache of the kernel, which has the file wait for the server when it is closed.
    let written = std::thread::spawn(move || file.write_all(&[7; 4096]));
    std::thread::sleep(Duration::from_millis(300));
    // Side by side, because each answer waits some seconds for the file to be closed.
    std::thread::scope(|scope| {
        for id in &ids {
            let node = &node;
            scope.spawn(move || {
                let gone = node.ask("DELETE", &format!("/v1/disks/{id}"), "");
                assert_eq!(gone.status, 200, "{}", gone.body);
            });
        }
    });
    for _ in 0..100 {
        exercise(&mut node.open("other", &small(1))).unwrap();
    }
    drop(silent);
    let _ = written.join();
    node.daemon.finish();
}

/// Descriptors whose close waits until `let_go`: a pipe, opened so many times, into which a thread splices while there is nothing to
/// splice.
struct HeldPipe {
    feed: UnixStream,
    holder: std::thread::JoinHandle<()>,
    opened: Vec<File>,
}

impl HeldPipe {
    fn new(count: usize) -> HeldPipe {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let opened = (0..count).map(|_| File::open(&path).unwrap()).collect();
        drop(reader);
        let (source, feed) = UnixStream::pair().unwrap();
        let (sender, thread) = std::sync::mpsc::channel();
        let holder = std::thread::spawn(move || {
            sender.send(rustix::thread::gettid()).unwrap();
            let flags = SpliceFlags::empty();
            let _ = splice(source, None, &writer, None, 4096, flags);
        });
        let stat = format!(
            "/proc/self/task/{}/stat",
            thread.recv().unwrap().as_raw_nonzero()
        );
        assert!(wait_until(|| std::fs::read_to_string(&stat)
            .unwrap()
            .contains(") S ")));
        HeldPipe {
            feed,
            holder,
            opened,
        }
    }

    fn let_go(mut self) {
        self.feed.write_all(b"x").unwrap();
        self.holder.join().unwrap();
    }
}

/// Returns true if a process other than this one has a file open with this name in `/proc`.
fn is_open_elsewhere(name: &Path) -> bool {
    let is_other = |process: &std::fs::DirEntry| {
        let pid = process.file_name().to_string_lossy().parse::<u32>();
        pid.is_ok_and(|pid| pid != std::process::id())
    };
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let others = processes.filter(is_other);
    let open = others.filter_map(|process| std::fs::read_dir(process.path().join("fd")).ok());
    let mut names = open
        .flatten()
        .flatten()
        .filter_map(|fd| fd.path().read_link().ok());
    names.any(|open| open == *name)
}

/// They cost that disk its frontend, and nobody else anything.
#[test]
fn descriptors_that_cannot_be_closed_are_felt_by_the_disk_they_came_to() {
    let node = Node::start();
    node.add("a", &ram());
    node.add("b", &ram());
    let mut hostile = node.open("a", &small(1));
    let mut neighbour = node.open("b", &small(1));
    let mut held = HeldPipe::new(128);
    let pipe = std::fs::read_link(format!("/proc/self/fd/{}", held.opened[0].as_raw_fd()));
    let pipe = pipe.unwrap();
    // It owns the last copy of each then.
    node.daemon.freeze();
    let kick = message::message(
        message::request::SET_VRING_KICK,
        message::VERSION | message::FLAG_NEED_REPLY,
        &[0; 8],
    );
    for file in held.opened.drain(..) {
        let socket = hostile.frontend().socket();
        socket.send_raw(&kick, &[file.as_fd()]).unwrap();
    }
    // A child that another test starts may have copies for a moment, and would be the last to close them.
    assert!(wait_until(|| !is_open_elsewhere(&pipe)));
    node.daemon.signal(Signal::CONT);
    assert!(closes_within(hostile.frontend().socket(), TIMEOUT));
    assert!(
        node.daemon.log_has("block all threads that close them"),
        "{}",
        node.daemon.log()
    );
    // A neighbour sends descriptors, leaves, and comes again.
    let call = neighbour.queue(0).call_descriptor().unwrap();
    let said = neighbour.frontend().set_vring_call(0, Some(call.as_fd()));
    said.unwrap();
    exercise(&mut neighbour).unwrap();
    drop(neighbour);
    exercise(&mut node.open("b", &small(1))).unwrap();
    // The door of the first one opens when they are closed.
    drop(hostile);
    let early = UnixStream::connect(node.socket("a")).unwrap();
    assert!(
        node.daemon.log_has("no frontend is accepted"),
        "{}",
        node.daemon.log()
    );
    held.let_go();
    drop(early);
    exercise(&mut node.open("a", &small(1))).unwrap();
    node.daemon.finish();
}

#[test]
fn a_check_of_the_size_that_hangs_is_answered_with_accepted() {
    let node = Node::start();
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    node.add(
        "hung",
        &json!({"disk": [silent.file()], "queues": 1, "stop_deadline": 1, "direct": "off"}),
    );
    silent.stop_answering();
    let answer = node.ask("POST", "/v1/disks/hung/resize", "");
    assert_eq!(answer.status, 202, "{}", answer.body);
    drop(silent);
    // The check that hung has failed with its server, and the next one begins.
    let mut answer = None;
    assert!(wait_until(|| {
        let again = node.ask("POST", "/v1/disks/hung/resize", "");
        answer = Some(again.status);
        again.status == 500
    }));
    node.daemon.finish();
}

/// The node goes on and learns how the flush ends, so one that was merely slow fails nothing. If it does not go on, nobody learns that.
#[test]
fn a_flush_that_hung_when_its_disk_was_removed_is_judged_by_its_end() {
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    let mut node = Node::start();
    let body = json!({"disk": [silent.file()], "queues": 1, "stop_deadline": 1, "direct": "off", "persistent": false});
    let remove_hung = |node: &Node| {
        node.add("d", &body);
        let mut client = node.open("d", &small(1));
        client.queue(0).write(0, &[1; 4096]).unwrap();
        silent.hold(true);
        client.queue(0).set_timeout(Duration::from_millis(100));
        client.queue(0).flush().unwrap_err();
        assert!(wait_until(|| silent.held() == 1));
        let gone = node.ask("DELETE", "/v1/disks/d?mode=drain", "");
        assert!(gone.json()["lost"].is_string(), "{}", gone.body);
    };
    let is_failed = |node: &Node| {
        node.add("d", &body);
        let flushed = node.open("d", &small(1)).queue(0).flush();
        node.remove("d");
        flushed.is_err()
    };
    for fails in [false, true] {
        remove_hung(&node);
        if fails {
            silent.fail_flush();
        }
        silent.release();
        assert_eq!(is_failed(&node), fails);
    }
    remove_hung(&node);
    node.daemon.signal(Signal::TERM);
    assert!(wait_until(|| node.daemon.is_zombie()));
    silent.release();
    node.daemon.wait().unwrap();
    let daemon = node.daemon.start_again().unwrap();
    let next = Node { daemon };
    assert!(is_failed(&next));
    next.daemon.finish();
}
