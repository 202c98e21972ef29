//! The confinement of a running daemon. What it refuses to each thread is tried in
//! `crates/sandbox/tests/attempts.rs`; here every thread of the program is seen to have it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cleave_client::Workload;
use cleave_tests::{
    Daemon, Node, Scratch, exercise, http, is_root, run_to_exit, small, wait_until,
};
use rustix::process::Signal;

const NOBODY: u32 = 65534;

/// The status of each thread, by its name.
fn threads(daemon: &Daemon) -> Vec<(String, BTreeMap<String, String>)> {
    let threads = daemon.named_threads().into_iter();
    let parsed = threads.filter_map(|(task, name)| {
        let text = fs::read_to_string(task.join("status")).ok()?;
        let fields = text.lines().filter_map(|line| line.split_once(':'));
        let fields = fields.map(|(key, value)| (key.to_owned(), value.trim().to_owned()));
        Some((name, fields.collect()))
    });
    parsed.collect()
}

/// Capabilities that the threads of a node keep that open disks: CAP_CHOWN and CAP_DAC_OVERRIDE.
const OPENING: u64 = 0b11;

/// How many filters a thread has: the two of all threads, and one for each role that it or a thread that it descends from has.
fn filters(name: &str) -> &'static str {
    match name {
        "log" => "3",
        "session" | "size" | "flush" => "4",
        // A node opens disks, and writes its files, on threads with the rights of the one that starts them.
        "open" | "state" => "3",
        "offload" => "4 or 5",
        name if name.starts_with("cleave-w") => "5",
        name if name.starts_with("cleave") => "3",
        // Kernel threads of a ring have the filters of the thread that made it.
        _ => "",
    }
}

/// The capability CAP_IPC_LOCK is kept where the limit of locked memory could not be lifted.
fn kept_capabilities(daemon: &Daemon) -> u64 {
    let limits = fs::read_to_string(format!("/proc/{}/limits", daemon.pid())).unwrap();
    let line = limits
        .lines()
        .find(|line| line.starts_with("Max locked memory"))
        .unwrap();
    if line.contains("unlimited") {
        0
    } else {
        1 << 14
    }
}

fn check_threads(daemon: &Daemon) -> Vec<String> {
    check_threads_of(daemon, &|_| 0)
}

/// `opening` says which capabilities a thread may have to open disks.
fn check_threads_of(daemon: &Daemon, opening: &dyn Fn(&str) -> u64) -> Vec<String> {
    // The daemon listens before it confines itself, its log thread comes later, and each thread narrows itself when it starts.
    let has_its_filters = |(name, status): &(String, BTreeMap<String, String>)| {
        let expected = filters(name);
        status["Seccomp"] == "2"
            && (expected.is_empty() || expected.contains(status["Seccomp_filters"].as_str()))
    };
    // A thread that starts later may not be narrowed yet, so those are judged that were found to be.
    let mut found = Vec::new();
    let is_confined = || {
        found = threads(daemon);
        found.iter().all(has_its_filters)
    };
    assert!(wait_until(is_confined), "{:?}", threads(daemon));
    let kept = kept_capabilities(daemon);
    for (name, status) in &found {
        let shown = format!("{name}: {status:?}");
        assert_eq!(status["Seccomp"], "2", "{shown}");
        assert_eq!(status["NoNewPrivs"], "1", "{shown}");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            let value = u64::from_str_radix(&status[set], 16).unwrap();
            let may_be = match set {
                "CapPrm" | "CapEff" => kept | opening(name),
                // Only root can empty the bounding set, and the log thread is late where root is given up. Nothing could be
                // gained from it.
                "CapBnd" if !is_root() || name == "log" => u64::MAX,
                _ => 0,
            };
            assert_eq!(value & !may_be, 0, "{set} of {shown}");
        }
    }
    found.into_iter().map(|(name, _)| name).collect()
}

/// Runs `check` while requests are in flight on two vrings. The daemon needs `--workers 2`: a host of one CPU has one worker.
fn under_load<T>(daemon: &Daemon, check: impl FnOnce() -> T) -> T {
    let mut client = daemon.open(&small(2));
    let mix = Workload {
        read_percent: 50,
        ..Workload::reads(16 << 10, 8, 32 << 20, Duration::from_secs(1))
    };
    std::thread::scope(|scope| {
        let load = scope.spawn(|| client.run(&mix, |_| |_| ()).map(drop));
        let busy = || threads(daemon).iter().any(|(name, _)| name == "cleave-w1");
        assert!(wait_until(busy), "{}", daemon.log());
        let checked = check();
        load.join().unwrap().unwrap();
        checked
    })
}

/// A daemon under a sanitizer (`cargo xtask sanitize`) is not confined.
fn is_sanitized() -> bool {
    std::env::var_os("ASAN_OPTIONS").is_some()
}

#[test]
fn every_thread_is_confined_under_load() {
    if is_sanitized() {
        return cleave_tests::ignored("sanitized");
    }
    let scratch = Scratch::new();
    let image = scratch.image("disk", 64 << 20);
    let disk = image.to_str().unwrap();
    let (daemon, control) =
        Daemon::serve_with_control_in(scratch, &["--disk", disk, "--workers", "2"]);
    check_threads(&daemon);
    let names = under_load(&daemon, || {
        daemon.signal(Signal::HUP);
        http::get(&control, "/v1/disks");
        check_threads(&daemon)
    });
    for name in ["log", "session", "cleave-w0", "cleave-w1"] {
        assert!(
            names.iter().any(|found| found == name),
            "{name} in {names:?}"
        );
    }
    assert!(!daemon.log().contains("confined less"), "{}", daemon.log());
    assert!(
        !daemon.log().contains("not all is confined"),
        "{}",
        daemon.log()
    );
    daemon.finish();
}

fn node_with(options: &[&Path]) -> Node {
    let options: Vec<_> = options.iter().map(|option| option.as_os_str()).collect();
    Node::start_with(Scratch::in_memory(), &options)
}

#[test]
fn every_thread_of_a_node_is_confined_under_load() {
    if is_sanitized() {
        return cleave_tests::ignored("sanitized");
    }
    let images = Scratch::new();
    let node = node_with(&[Path::new("--images"), images.path()]);
    let ids = ["a", "b", "c"];
    for id in ids {
        let image = images.image(id, 64 << 20);
        let body = serde_json::json!({"disk": [image], "queues": 2, "workers": 2});
        node.add(id, &body);
    }
    // Only the main thread, and those that it starts to open disks and to write files.
    let opening = |name: &str| match name {
        "log" | "session" | "size" | "offload" => 0,
        name if name.starts_with("cleave-w") || name.starts_with("iou-") => 0,
        _ => OPENING,
    };
    let mix = Workload {
        read_percent: 50,
        ..Workload::reads(16 << 10, 8, 32 << 20, Duration::from_secs(2))
    };
    let mut clients = ids.map(|id| node.open(id, &small(2)));
    let names = std::thread::scope(|scope| {
        let loads = clients
            .each_mut()
            .map(|client| scope.spawn(|| client.run(&mix, |_| |_| ()).map(drop)));
        let is_busy = |at: &str| {
            threads(&node.daemon)
                .iter()
                .filter(|(name, _)| name == at)
                .count()
                == 3
        };
        assert!(wait_until(|| is_busy("cleave-w1")), "{}", node.daemon.log());
        node.daemon.signal(Signal::HUP);
        let ram = serde_json::json!({"disk": ["ram:1M"], "persistent": false});
        node.add("later", &ram);
        let names = check_threads_of(&node.daemon, &opening);
        loads
            .into_iter()
            .for_each(|load| load.join().unwrap().unwrap());
        names
    });
    for name in ["log", "session", "cleave-w0", "cleave-w1"] {
        let found = names.iter().filter(|found| *found == name).count();
        let wanted = if name == "log" { 1 } else { 3 };
        assert_eq!(found, wanted, "{name} in {names:?}");
    }
    let log = node.daemon.log();
    assert!(!log.contains("confined less"), "{log}");
    assert!(!log.contains("not all is confined"), "{log}");
    drop(clients);
    node.daemon.finish();
}

#[test]
fn a_node_opens_images_only_in_the_folders_that_are_named() {
    if is_sanitized() {
        return cleave_tests::ignored("sanitized");
    }
    let images = Scratch::new();
    let elsewhere = Scratch::new();
    // As a person writes it.
    let node = node_with(&[Path::new("--images"), &images.join("")]);
    let inside = images.image("inside", 1 << 20);
    let outside = elsewhere.image("outside", 1 << 20);
    let link = images.join("link");
    std::os::unix::fs::symlink(&outside, &link).unwrap();
    let put = |id: &str, path: &Path| node.put(id, &serde_json::json!({"disk": [path]}));
    assert_eq!(put("a", &inside).status, 201);
    let name = elsewhere.path().file_name().unwrap();
    let beside = images.join("..").join(name).join("outside");
    for path in [&outside, &link, &beside] {
        let refused = put("b", path);
        assert_eq!(refused.status, 422, "{}", refused.body);
        let error = refused.error();
        assert!(error.contains("--images"), "{error}");
    }
    // A guest's memory is open in the node, and has no folder.
    let _guest = node.open("a", &small(1));
    let open = std::fs::read_dir(format!("/proc/{}/fd", node.daemon.pid())).unwrap();
    let is_memory = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|file| file.to_string_lossy().starts_with("/memfd:"))
    };
    let memory: Vec<_> = open
        .map(|fd| fd.unwrap().path())
        .filter(is_memory)
        .collect();
    assert!(!memory.is_empty());
    for fd in memory {
        let own = Path::new("/proc/self/fd").join(fd.file_name().unwrap());
        let refused = put("b", &own);
        assert_eq!(refused.status, 422, "{}", refused.body);
        assert!(refused.error().contains("--images"), "{}", refused.body);
    }
    node.daemon.finish();
    let missing = images.join("missing");
    let state = images.join("state");
    let (named, state) = (missing.to_str().unwrap(), state.to_str().unwrap());
    for sandbox in ["on", "off"] {
        let line = [
            "node",
            "--sandbox",
            sandbox,
            "--images",
            named,
            "--state",
            state,
            "--run",
            state,
        ];
        let exited = run_to_exit(&line);
        assert_eq!(exited.code, Some(1), "{}", exited.stderr);
        let line = format!("--images {named}: No such file");
        assert!(exited.stderr.contains(&line), "{}", exited.stderr);
    }
}

/// What a guest wrote must not become the description of another disk, nor a file elsewhere on the host.
#[test]
fn a_node_makes_snapshots_only_in_the_folders_that_are_named() {
    let images = Scratch::new();
    let elsewhere = Scratch::new();
    let link = images.join("link");
    std::os::unix::fs::symlink(elsewhere.path(), &link).unwrap();
    let image = images.image("inside", 1 << 20);
    let refusal = |node: &Node, to: &Path| {
        let body = serde_json::json!({ "to": to }).to_string();
        let refused = node.ask("POST", "/v1/disks/a/snapshot", &body);
        match refused.status {
            201 => String::new(),
            _ => refused.error(),
        }
    };
    let off = [Path::new("--sandbox"), Path::new("off")];
    let named = [off[0], off[1], Path::new("--images"), images.path()];
    for (options, outside) in [(&named[..], Some("--images")), (&off[..], None)] {
        let node = node_with(options);
        node.add(
            "a",
            &serde_json::json!({"disk": [image], "persistent": false}),
        );
        let own = node.daemon.scratch();
        for (folder, option) in [
            (own.join("state/disks"), "--state"),
            (own.join("state"), "--state"),
            (own.join("run/a"), "--run"),
        ] {
            let why = refusal(&node, &folder.join("b.toml"));
            assert!(why.contains(option), "{}: {why}", folder.display());
            assert!(!folder.join("b.toml").exists());
        }
        for folder in [elsewhere.path(), &link] {
            let why = refusal(&node, &folder.join("copy"));
            assert_eq!(why.contains("--images"), outside.is_some(), "{why}");
            let _ = fs::remove_file(elsewhere.join("copy"));
        }
        // The file system may have no copies that share blocks.
        let why = refusal(&node, &images.join("copy"));
        assert!(!why.contains("--"), "{why}");
        let _ = fs::remove_file(images.join("copy"));
        node.daemon.finish();
    }
}

#[test]
fn a_node_gives_nothing_up_with_sandbox_off() {
    let node = node_with(&[Path::new("--sandbox"), Path::new("off")]).daemon;
    assert!(node.log_has("--sandbox off"), "{}", node.log());
    for (name, status) in threads(&node) {
        assert_eq!(status["Seccomp"], "0", "{name}");
    }
    node.finish();
}

#[test]
fn nothing_is_given_up_with_sandbox_off() {
    let daemon = Daemon::serve(&["--disk", "ram:64M", "--workers", "2", "--sandbox", "off"]);
    assert!(
        wait_until(|| daemon.log_has("--sandbox off")),
        "{}",
        daemon.log()
    );
    for (name, status) in under_load(&daemon, || threads(&daemon)) {
        assert_eq!(status["Seccomp"], "0", "{name}");
    }
    daemon.finish();
}

/// Mappings of at least a MiB that have one of these names, and whether each stays out of core dumps.
fn large_mappings(daemon: &Daemon, names: &[&str]) -> Vec<(String, bool)> {
    let text = fs::read_to_string(format!("/proc/{}/smaps", daemon.pid())).unwrap();
    let mut found = Vec::new();
    let mut current = None;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-') {
            let at = |text| u64::from_str_radix(text, 16).unwrap();
            let is_meant = names.iter().any(|name| line.contains(name));
            current = (is_meant && at(end) - at(start) >= 1 << 20).then(|| line.to_owned());
        } else if let ("VmFlags:", Some(line)) = (first, current.take_if(|_| first == "VmFlags:")) {
            found.push((line, words.any(|flag| flag == "dd")));
        }
    }
    found
}

#[test]
fn guest_memory_and_disks_in_memory_stay_out_of_core_dumps() {
    let daemon = Daemon::serve(&["--disk", "ram:77M"]);
    let mut client = daemon.open(&small(1));
    exercise(&mut client).unwrap();
    let shared = large_mappings(&daemon, &["memfd"]);
    assert!(
        !shared.is_empty() && shared.iter().all(|(_, dumped)| *dumped),
        "{shared:#?}"
    );
    // The disk is the only mapping of its size.
    let text = fs::read_to_string(format!("/proc/{}/smaps", daemon.pid())).unwrap();
    let (_, disk) = text.split_once(&format!("{} kB", 77 << 10)).unwrap();
    let flags = disk
        .lines()
        .find(|line| line.starts_with("VmFlags:"))
        .unwrap();
    assert!(flags.contains(" dd"), "{flags}");
    daemon.finish();
}

/// A daemon that is started as root and becomes nobody, on an image that nobody could not open.
fn as_nobody(scratch: &Scratch, image: &Path, more: &[&str]) -> Daemon {
    fs::set_permissions(image, fs::Permissions::from_mode(0o600)).unwrap();
    chown(scratch.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let mut args = vec![
        "--disk",
        image.to_str().unwrap(),
        "--user",
        "65534",
        "--group",
        "65534",
    ];
    args.extend(more);
    Daemon::serve(&args)
}

#[test]
fn it_becomes_another_user_once_the_disk_is_open() {
    if !is_root() || is_sanitized() {
        return cleave_tests::ignored("not root, or sanitized");
    }
    let scratch = Scratch::in_memory();
    let image = scratch.image("disk", 64 << 20);
    let control = scratch.join("control");
    let daemon = as_nobody(
        &scratch,
        &image,
        &["--control", control.to_str().unwrap(), "--workers", "2"],
    );
    for socket in [daemon.socket(), &control] {
        // It listens before it gives the sockets away.
        let owner = || fs::metadata(socket).map(|found| (found.uid(), found.gid()));
        let is_given = || owner().is_ok_and(|owner| owner == (NOBODY, NOBODY));
        assert!(wait_until(is_given), "{}: {:?}", socket.display(), owner());
    }
    under_load(&daemon, || {
        for (name, status) in threads(&daemon) {
            assert_eq!(status["Uid"], "65534\t65534\t65534\t65534", "{name}");
            assert_eq!(status["Gid"], "65534\t65534\t65534\t65534", "{name}");
            assert_eq!(status["Groups"], "", "{name}");
        }
        check_threads(&daemon)
    });
    // It may not watch a file that it may not read, and says so instead of failing with each write.
    assert!(daemon.log_has("not noticed by itself"), "{}", daemon.log());
    fs::File::options()
        .write(true)
        .open(&image)
        .unwrap()
        .set_len(96 << 20)
        .unwrap();
    daemon.signal(Signal::HUP);
    assert!(
        wait_until(|| daemon.log_has("has grown to")),
        "{}",
        daemon.log()
    );
    let report = http::get(&control, "/v1/disks");
    assert_eq!(report[0]["size_bytes"], 96 << 20, "{report}");
    daemon.signal(Signal::TERM);
    let mut daemon = daemon;
    assert_eq!(daemon.wait().unwrap().0, Some(0), "{}", daemon.log());
    assert!(
        !control.exists(),
        "its folder belongs to that user, who removed it"
    );
}

#[test]
fn a_user_that_cannot_be_assumed_is_an_error_with_a_remedy() {
    let cases: [(&[&str], &str); 4] = [
        (&["--user", "no-such-user"], "no user \"no-such-user\""),
        (&["--group", "no-such-group"], "no group \"no-such-group\""),
        (&["--user", "4000000000"], "give --group too"),
        (
            &["--user", "4294967295", "--group", "0"],
            "no user \"4294967295\"",
        ),
    ];
    for (more, wanted) in cases {
        let scratch = Scratch::in_memory();
        let socket = scratch.join("socket");
        let mut args = vec![
            "serve",
            "--socket-path",
            socket.to_str().unwrap(),
            "--disk",
            "ram:1M",
        ];
        args.extend(more);
        let exited = run_to_exit(&args);
        assert_eq!(exited.code, Some(2), "{}", exited.stderr);
        assert!(exited.stderr.contains(wanted), "{}", exited.stderr);
        assert!(!socket.exists());
    }
}
