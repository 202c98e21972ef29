//! The program from outside: its socket, its signals, its exit codes and what it leaves behind.
//! What happens inside a session is tested in the workspace's `tests`.
#![allow(
    clippy::unwrap_used,
    reason = "all of this is a test; the exemption knows functions marked so only"
)]

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use cleave_client::{Client, Options};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_cleave");

/// How long anything may take before the test fails; far above what it takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running program; killed when dropped.
struct Cleave(Child);

impl Cleave {
    fn start(line: &[&str]) -> Cleave {
        Cleave::spawn(command(line).stderr(Stdio::null()))
    }

    fn spawn(command: &mut Command) -> Cleave {
        Cleave(command.spawn().unwrap())
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.0.id()).unwrap()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    fn ended(mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            match self.0.try_wait().unwrap() {
                Some(status) => return status,
                None => assert!(start.elapsed() < PATIENCE, "does not end"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Time that the main thread has spent on a CPU.
    fn main_cpu(&self) -> Duration {
        let id = self.0.id();
        let text = fs::read_to_string(format!("/proc/{id}/task/{id}/schedstat")).unwrap();
        Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
    }

    /// Whether its inotify watches anything now.
    fn is_watching(&self) -> bool {
        let id = self.0.id();
        let watching = |entry: fs::DirEntry| {
            let is_inotify =
                fs::read_link(entry.path()).is_ok_and(|to| to == Path::new("anon_inode:inotify"));
            let info = format!("/proc/{id}/fdinfo/{}", text(Path::new(&entry.file_name())));
            is_inotify && fs::read_to_string(info).is_ok_and(|info| info.contains("inotify wd:"))
        };
        fs::read_dir(format!("/proc/{id}/fd"))
            .unwrap()
            .flatten()
            .any(watching)
    }

    /// Open descriptors.
    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.0.id()))
            .unwrap()
            .count()
    }
}

impl Drop for Cleave {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn command(line: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(line).stdin(Stdio::null());
    command
}

/// A folder with an image, and the path of a socket.
struct Place {
    folder: TempDir,
    image: PathBuf,
    socket: PathBuf,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        File::create(&image).unwrap().set_len(8 << 20).unwrap();
        Place {
            socket: folder.path().join("socket"),
            image,
            folder,
        }
    }

    fn serve<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let (socket, image) = (text(&self.socket), text(&self.image));
        [&["serve", "--socket-path", socket, "--disk", image], more].concat()
    }

    fn files(&self) -> usize {
        fs::read_dir(self.folder.path()).unwrap().count()
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn connect(socket: &Path) -> UnixStream {
    let start = Instant::now();
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return stream,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn client(socket: &Path) -> Client {
    Client::over(connect(socket), &Options::default()).unwrap()
}

/// Writes and reads back through a whole device.
fn is_served(client: &mut Client, mark: u8) {
    let queue = client.queue(0);
    queue.write(4096, &[mark; 4096]).unwrap();
    let mut back = [0; 4096];
    queue.read(4096, &mut back).unwrap();
    assert_eq!(back, [mark; 4096]);
}

/// Waits for a line that holds all parts, and returns it.
fn line_with(stderr: &mut BufReader<ChildStderr>, parts: &[&str]) -> String {
    let mut line = String::new();
    loop {
        line.clear();
        assert_ne!(
            stderr.read_line(&mut line).unwrap(),
            0,
            "stderr ended before {parts:?}"
        );
        if parts.iter().all(|part| line.contains(part)) {
            return line;
        }
    }
}

#[test]
fn bad_input_is_one_line_exit_code_2_and_nothing_left_behind() {
    let place = Place::new();
    let (socket, image) = (text(&place.socket), text(&place.image));
    let long = format!("{}/{}", text(place.folder.path()), "x".repeat(120));
    let folder = text(place.folder.path());
    let odd = place.folder.path().join("odd");
    fs::write(&odd, [0; 700]).unwrap();
    let empty = place.folder.path().join("empty");
    File::create(&empty).unwrap();
    let cases: &[(&str, &[&str], &str)] = &[
        ("no arguments", &[], "cleave serve"),
        (
            "missing file",
            &["serve", "--socket-path", socket, "--disk", "/none/x"],
            "/none/x",
        ),
        (
            "directory",
            &["serve", "--socket-path", socket, "--disk", folder],
            "directory",
        ),
        (
            "character device",
            &["serve", "--socket-path", socket, "--disk", "/dev/null"],
            "/dev/null",
        ),
        (
            "no size",
            &["serve", "--socket-path", socket, "--disk", "null:0"],
            "null:0",
        ),
        (
            "odd size",
            &["serve", "--socket-path", socket, "--disk", text(&odd)],
            "odd",
        ),
        (
            "empty file",
            &["serve", "--socket-path", socket, "--disk", text(&empty)],
            "empty",
        ),
        (
            "bad spec",
            &["serve", "--socket-path", socket, "--disk", "ram:much"],
            "ram:much",
        ),
        (
            "two disks",
            &[
                "serve",
                "--socket-path",
                socket,
                "--disk",
                image,
                "--disk",
                "null:1G",
            ],
            "one disk",
        ),
        (
            "long socket path",
            &["serve", "--socket-path", &long, "--disk", image],
            "shorter",
        ),
        (
            "socket is a file",
            &["serve", "--socket-path", image, "--disk", image],
            "no socket",
        ),
        (
            "socket without folder",
            &["serve", "--socket-path", "/none/s", "--disk", image],
            "folder",
        ),
        (
            "no such fd",
            &["serve", "--fd", "77", "--disk", image],
            "--fd 77",
        ),
        (
            "fd is no socket",
            &["serve", "--fd", "0", "--disk", image],
            "--fd 0",
        ),
        (
            "both",
            &[
                "serve",
                "--fd",
                "0",
                "--socket-path",
                socket,
                "--disk",
                image,
            ],
            "--fd",
        ),
        (
            "conventions",
            &["--socket-path", socket, "--blk-file", "/none/x"],
            "/none/x",
        ),
        (
            "far CPU",
            &[
                "serve",
                "--socket-path",
                socket,
                "--disk",
                image,
                "--cpus",
                "1023",
            ],
            "1023",
        ),
    ];
    let before = place.files();
    for (name, line, part) in cases {
        let output = command(line).output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{name}: {told}");
        assert_eq!(told.lines().count(), 1, "{name}: {told}");
        assert!(
            told.starts_with("cleave: ") && told.contains(part),
            "{name}: {told}"
        );
        assert!(output.stdout.is_empty(), "{name}");
        assert_eq!(place.files(), before, "{name}: something is left behind");
    }
}

#[test]
fn too_few_descriptors_are_an_error_at_start() {
    let place = Place::new();
    let line = [
        &["-c", "ulimit -n 500; exec \"$0\" \"$@\"", PROGRAM],
        &place.serve(&[])[..],
    ]
    .concat();
    let output = Command::new("sh").args(line).output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(
        told.contains("at most 500 files") && told.lines().count() == 1,
        "{told}"
    );
    assert_eq!(place.files(), 1);
}

#[test]
fn frontends_come_and_go_and_leave_nothing_open() {
    let place = Place::new();
    let cleave = Cleave::start(&place.serve(&[]));
    is_served(&mut client(&place.socket), 1);
    drop(connect(&place.socket));
    is_served(&mut client(&place.socket), 2);
    let before = cleave.descriptors();
    for mark in 0..50 {
        // The next one connects while the one before it is still being let go.
        is_served(&mut client(&place.socket), mark);
    }
    let start = Instant::now();
    while cleave.descriptors() > before {
        assert!(
            start.elapsed() < PATIENCE,
            "{} → {}",
            before,
            cleave.descriptors()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_second_frontend_is_turned_away_and_told_of() {
    let place = Place::new();
    let mut cleave = Cleave::spawn(command(&place.serve(&[])).stderr(Stdio::piped()));
    let mut stderr = BufReader::new(cleave.0.stderr.take().unwrap());
    let mut first = client(&place.socket);
    let mut second = connect(&place.socket);
    second.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(second.read(&mut [0; 1]).unwrap(), 0, "closed at once");
    line_with(&mut stderr, &["WARN", "second frontend"]);
    is_served(&mut first, 7);
}

#[test]
fn silent_connections_keep_nobody_out() {
    let place = Place::new();
    let _cleave = Cleave::start(&place.serve(&[]));
    let silent: Vec<_> = (0..300).map(|_| connect(&place.socket)).collect();
    is_served(&mut client(&place.socket), 3);
    drop(silent);
}

#[test]
fn running_out_of_descriptors_is_waited_out_without_spinning() {
    let place = Place::new();
    let cleave = Cleave::start(&place.serve(&[]));
    is_served(&mut client(&place.socket), 1);
    let all = getrlimit(Resource::Nofile);
    let limit = |current: Option<u64>| {
        let limit = Rlimit {
            current,
            maximum: all.maximum,
        };
        prlimit(Some(cleave.pid()), Resource::Nofile, limit).unwrap();
    };
    // Not even one connection can be accepted.
    limit(Some(3));
    let waiting = connect(&place.socket);
    let before = cleave.main_cpu();
    std::thread::sleep(Duration::from_millis(500));
    let used = cleave.main_cpu() - before;
    assert!(
        used < Duration::from_millis(50),
        "spins: {used:?} of 500 ms"
    );
    limit(all.maximum);
    // The one that waited says nothing, and keeps nobody out.
    is_served(&mut client(&place.socket), 2);
    drop(waiting);
}

#[test]
fn an_inherited_socket_may_listen_or_be_connected() {
    let place = Place::new();
    let image = text(&place.image);
    let with_fd_0 = |socket: OwnedFd, line: &[&str]| {
        Cleave::spawn(
            Command::new(PROGRAM)
                .args(line)
                .stdin(socket)
                .stderr(Stdio::null()),
        )
    };
    let listener = UnixListener::bind(&place.socket).unwrap();
    let cleave = with_fd_0(listener.into(), &["serve", "--fd", "0", "--disk", image]);
    is_served(&mut client(&place.socket), 4);
    is_served(&mut client(&place.socket), 5);
    cleave.signal(Signal::TERM);
    assert_eq!(cleave.ended().code(), Some(0));
    assert!(place.socket.exists(), "the file is not ours");

    let (ours, theirs) = UnixStream::pair().unwrap();
    let cleave = with_fd_0(theirs.into(), &["--fd", "0", "--blk-file", image]);
    is_served(&mut Client::over(ours, &Options::default()).unwrap(), 6);
    assert_eq!(
        cleave.ended().code(),
        Some(0),
        "ends when its frontend leaves"
    );
}

#[test]
fn once_ends_with_the_first_frontend() {
    let place = Place::new();
    let cleave = Cleave::start(&place.serve(&["--once"]));
    is_served(&mut client(&place.socket), 8);
    assert_eq!(cleave.ended().code(), Some(0));
    assert_eq!(place.files(), 1, "the socket file is gone");
}

#[test]
fn term_and_int_end_in_order_with_and_without_a_frontend() {
    for signal in [Signal::TERM, Signal::INT] {
        let place = Place::new();
        let cleave = Cleave::start(&place.serve(&[]));
        connect(&place.socket);
        cleave.signal(signal);
        assert_eq!(cleave.ended().code(), Some(0));
        assert_eq!(place.files(), 1, "the socket file is gone");

        let cleave = Cleave::start(&place.serve(&[]));
        let mut frontend = client(&place.socket);
        is_served(&mut frontend, 9);
        cleave.signal(signal);
        assert_eq!(cleave.ended().code(), Some(0));
        assert_eq!(place.files(), 1, "the socket file is gone");
    }
}

#[test]
fn a_live_socket_is_not_stolen_and_a_stale_one_is_replaced() {
    let place = Place::new();
    let mut cleave = Cleave::start(&place.serve(&[]));
    connect(&place.socket);
    let socket = text(&place.socket);
    let second = command(&["serve", "--socket-path", socket, "--disk", "null:1G"])
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(2));
    connect(&place.socket);
    // kill -9 leaves the file.
    cleave.0.kill().unwrap();
    cleave.0.wait().unwrap();
    assert!(place.socket.exists());
    let _again = Cleave::start(&place.serve(&[]));
    is_served(&mut client(&place.socket), 10);
}

#[test]
fn an_image_in_use_is_refused() {
    let place = Place::new();
    let _cleave = Cleave::start(&place.serve(&[]));
    connect(&place.socket);
    let other = place.folder.path().join("other");
    for more in [&[][..], &["--read-only"]] {
        let line = [
            "serve",
            "--socket-path",
            text(&other),
            "--disk",
            text(&place.image),
        ];
        let second = command(&[&line, more].concat()).output().unwrap();
        assert_eq!(second.status.code(), Some(2));
        assert!(String::from_utf8(second.stderr).unwrap().contains("in use"));
        assert!(!other.exists());
    }
}

#[test]
fn a_blocked_stderr_stops_nothing() {
    let place = Place::new();
    let (reader, mut writer) = std::io::pipe().unwrap();
    // Full before the program starts: nobody reads.
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while writer.write(&[b'x'; 4096]).is_ok() {}
    while writer.write(b"x").is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let cleave = Cleave::spawn(command(&place.serve(&["--log", "trace"])).stderr(writer));
    for mark in 0..20 {
        is_served(&mut client(&place.socket), mark);
    }
    cleave.signal(Signal::TERM);
    assert_eq!(cleave.ended().code(), Some(0));
    drop(reader);
}

#[test]
fn a_grown_image_is_told_to_the_guest() {
    let place = Place::new();
    let _cleave = Cleave::start(&place.serve(&[]));
    let mut client = client(&place.socket);
    let channel = client.open_backend_channel().unwrap();
    let image = File::options().write(true).open(&place.image).unwrap();
    assert_eq!(client.config().capacity_bytes(), 8 << 20);
    image.set_len(12 << 20).unwrap();
    assert!(channel.config_change(PATIENCE).unwrap());
    assert_eq!(client.refresh_config().unwrap().capacity_bytes(), 12 << 20);
    is_served(&mut client, 11);
}

#[test]
fn a_hang_up_signal_looks_at_the_size_at_once() {
    let place = Place::new();
    let cleave = Cleave::start(&place.serve(&[]));
    let client = client(&place.socket);
    let channel = client.open_backend_channel().unwrap();
    let image = File::options().write(true).open(&place.image).unwrap();
    let mut size = 8 << 20;
    let mut grow = || {
        size += 1 << 20;
        image.set_len(size).unwrap();
    };
    // For a second after it noticed a change the file is not watched; where this test is slower than that,
    // it cannot tell who noticed the next one, and tries again.
    for _ in 0..20 {
        grow();
        assert!(channel.config_change(PATIENCE).unwrap());
        grow();
        cleave.signal(Signal::HUP);
        assert!(channel.config_change(PATIENCE).unwrap());
        if !cleave.is_watching() {
            return;
        }
    }
    panic!("the signal was not what noticed");
}

#[test]
fn a_file_size_limit_costs_a_request_and_not_the_daemon() {
    let place = Place::new();
    let cleave = Cleave::start(&place.serve(&[]));
    let mut client = client(&place.socket);
    let limit = Rlimit {
        current: Some(1 << 20),
        maximum: Some(1 << 20),
    };
    prlimit(Some(cleave.pid()), Resource::Fsize, limit).unwrap();
    assert!(client.queue(0).write(4 << 20, &[1; 4096]).is_err());
    is_served(&mut client, 12);
}

#[test]
fn a_demonstration_verifies_prints_and_cleans_up() {
    let folder = tempfile::tempdir().unwrap();
    let line = [
        "demo",
        "--exit",
        "--seconds",
        "1",
        "--size",
        "16M",
        "--dir",
        text(folder.path()),
    ];
    let output = command(&line).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{told}");
    for part in [
        "read  4K     1",
        "read  4K    32",
        "p99.9",
        "verified before and after",
    ] {
        assert!(table.contains(part), "no {part:?} in {table}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn an_interrupted_demonstration_cleans_up() {
    let folder = tempfile::tempdir().unwrap();
    let line = ["demo", "--size", "16M", "--dir", text(folder.path())];
    let mut demo = Cleave::spawn(command(&line).stdout(Stdio::null()).stderr(Stdio::piped()));
    let mut stderr = BufReader::new(demo.0.stderr.take().unwrap());
    line_with(&mut stderr, &["filled with a pattern"]);
    demo.signal(Signal::INT);
    line_with(&mut stderr, &["interrupted"]);
    assert_eq!(demo.ended().code(), Some(1));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// An image that holds data everywhere.
fn filled(place: &Place) {
    fs::write(&place.image, vec![0x5a; 8 << 20]).unwrap();
}

#[test]
fn a_probe_that_is_interrupted_leaves_a_partial_result() {
    let place = Place::new();
    filled(&place);
    let out = |name: &str| place.folder.path().join(name);
    let (json, svg, profile) = (out("j"), out("s"), out("p"));
    let line = [
        "probe",
        text(&place.image),
        "--json",
        text(&json),
        "--svg",
        text(&svg),
        "--profile",
        text(&profile),
    ];
    let mut child = Cleave::spawn(command(&line).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let mut stderr = BufReader::new(child.0.stderr.take().unwrap());
    // The first tenth of the points is measured; the rest would take minutes.
    line_with(&mut stderr, &["points"]);
    let interrupted = Instant::now();
    child.signal(Signal::INT);
    line_with(&mut stderr, &["cleave: interrupted"]);
    let mut table = String::new();
    let mut stdout = child.0.stdout.take().unwrap();
    stdout.read_to_string(&mut table).unwrap();
    assert_eq!(child.ended().code(), Some(1));
    assert!(interrupted.elapsed() < Duration::from_secs(5));
    assert!(
        table.contains("512 KiB outstanding") && table.contains("partial"),
        "{table}"
    );
    assert!(
        fs::read_to_string(&json)
            .unwrap()
            .contains("\"partial\": true")
    );
    assert!(fs::read_to_string(&svg).unwrap().ends_with("</svg>\n"));
    // A partial profile is one that can be served from.
    let mut serve =
        Cleave::spawn(command(&place.serve(&["--profile", text(&profile)])).stderr(Stdio::piped()));
    let mut stderr = BufReader::new(serve.0.stderr.take().unwrap());
    line_with(&mut stderr, &["WARN", "partial"]);
    is_served(&mut client(&place.socket), 9);
    serve.signal(Signal::TERM);
    assert!(serve.ended().success());
    assert_eq!(place.files(), 4, "the image and the three results");
}

#[test]
fn a_probe_refuses_what_would_mislead_or_destroy() {
    let place = Place::new();
    let image = text(&place.image).to_owned();
    let told = |line: &[&str]| {
        let output = command(&[&["probe"], line].concat()).output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{line:?}: {told}");
        assert_eq!(told.lines().count(), 1, "{told}");
        told
    };
    let thin = told(&[&image]);
    assert!(
        thin.contains("only 0 %") && thin.contains("--allow-thin"),
        "{thin}"
    );
    filled(&place);
    let before = fs::read(&place.image).unwrap();
    let data = told(&[&image, "--writes"]);
    assert!(data.contains("--destructive"), "{data}");
    for option in ["--svg", "--json", "--profile"] {
        let itself = told(&[&image, option, &image]);
        assert!(itself.contains("the disk itself"), "{itself}");
    }
    let busy = {
        let _cleave = Cleave::start(&place.serve(&[]));
        is_served(&mut client(&place.socket), 0x5a);
        told(&[&image])
    };
    assert!(busy.contains("in use"), "{busy}");
    assert_eq!(
        fs::read(&place.image).unwrap(),
        before,
        "nothing was written"
    );
}

#[test]
fn a_probe_prints_json_alone_and_a_profile_is_for_its_disk_alone() {
    let place = Place::new();
    let profile = place.folder.path().join("p");
    let line = [
        "probe",
        "ram:1M",
        "--seconds",
        "1",
        "--json",
        "-",
        "--profile",
        text(&profile),
    ];
    let output = command(&line).output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{told}");
    let json = String::from_utf8(output.stdout).unwrap();
    assert!(json.starts_with("{\n") && json.ends_with("}\n"), "{json}");
    for (more, part) in [
        (&["--profile", text(&profile)][..], "is not of disk"),
        (&["--profile", "/none/p"], "/none/p"),
        (&["--profile", text(&place.image)], "too long"),
        (
            &["--split", "off", "--profile", text(&profile)],
            "leave one",
        ),
    ] {
        let output = command(&place.serve(more)).output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.lines().count() == 1 && told.contains(part), "{told}");
    }
}
