//! `cleave upgrade`, with a service manager that the test plays: its `systemctl` asks the test, which ends daemons and starts
//! them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cleave_tests::http::{fetch, get};
use cleave_tests::{
    Exited, Killed, Scratch, ServiceManager, TIMEOUT, closes_within, disk_socket, exercise_queue,
    ignored, is_root, program_copy, run, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::open;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// In place of systemctl. `$0.asked` has what it was asked, and `$0.answer` the commands that answer.
const SYSTEMCTL: &str = r#"#!/bin/sh
echo "$*" >"$0.asking"
mv "$0.asking" "$0.asked"
while ! mv "$0.answer" "$0.answered" 2>/dev/null; do sleep 0.01; done
. "$0.answered"
"#;

/// Runs a command where /run/cleave is the folder $1, and processes have other control groups: a number and a file for each, up
/// to `--`.
const ELSEWHERE: &str = r#"
set -e
mount -t tmpfs tmpfs /run
mkdir /run/cleave
mount --bind "$1" /run/cleave
shift
while [ "$1" != -- ]; do
    mount --bind "$2" "/proc/$1/cgroup"
    shift 2
done
shift
exec "$@"
"#;

/// A daemon with its manager.
struct Service {
    daemon: Killed,
    manager: ServiceManager,
    args: Vec<String>,
    /// The group in which it seems to run.
    group: PathBuf,
    fails_to_restart: bool,
    /// How the manager shows that the last reload ended.
    reloaded: String,
    /// True if a reload has a new process take over.
    reloads: bool,
    /// The process that goes on in the background after a reload.
    detached: Option<Detached>,
    /// Holds what the manager needs.
    _scratch: Scratch,
}

/// A process that another one has started.
struct Detached(Pid);

impl Drop for Detached {
    fn drop(&mut self) {
        // It may have ended.
        let _ = kill_process(self.0, Signal::KILL);
    }
}

impl Service {
    fn pid(&self) -> u32 {
        let detached = self.detached.as_ref();
        detached.map_or(self.daemon.0.id(), |it| it.0.as_raw_pid().cast_unsigned())
    }

    /// Does as `ExecReload=` of the packaged units says. Returns false if the daemon goes on, which the manager remembers.
    fn reload(&mut self) -> bool {
        // The manager tells this to the process that it starts at first.
        self.manager.prelude = "unset WATCHDOG_USEC".to_owned();
        let more = ["--take-over", "--detach"].map(str::to_owned);
        let mut reload = self.manager.start(&[&self.args[..], &more].concat());
        let ended = self.manager.awaits(&mut reload);
        let (pid, code) = (reload.0.id(), ended.code().unwrap());
        self.reloaded = format!("pid={pid} ; code=exited ; status={code}");
        if !ended.success() {
            return false;
        }
        assert_eq!(self.manager.awaits(&mut self.daemon).code(), Some(0));
        let pid = self.manager.main_pid.unwrap().cast_signed();
        self.detached = Some(Detached(Pid::from_raw(pid).unwrap()));
        true
    }

    fn restart(&mut self) {
        let pid = Pid::from_raw(self.pid().cast_signed()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        assert_eq!(self.manager.awaits(&mut self.daemon).code(), Some(0));
        self.daemon = self.manager.start(&self.args);
        self.manager.hears("READY=1");
    }
}

/// The services of a host, by the names of their units.
struct Services {
    all: BTreeMap<String, Service>,
    /// Units that run and are none of these.
    others: Vec<String>,
    /// The program that is installed, a copy of the one that runs.
    installed: PathBuf,
    scratch: Scratch,
}

impl Services {
    /// Returns a host without any. `None`: the test cannot have one.
    fn new() -> Option<Services> {
        if !is_root() {
            ignored("needs root, to mount");
            return None;
        }
        let scratch = Scratch::new();
        fs::create_dir_all(scratch.join("run")).unwrap();
        fs::create_dir(scratch.join("bin")).unwrap();
        let script = scratch.join("script");
        fs::write(&script, SYSTEMCTL).unwrap();
        // Another program writes it, because no program is started that a process has open for writing.
        let [from, to] =
            [script, scratch.join("bin/systemctl")].map(|path| path.display().to_string());
        run("install", &["--mode=755", &from, &to]).unwrap();
        Some(Services {
            all: BTreeMap::new(),
            others: Vec::new(),
            installed: program_copy(&scratch),
            scratch,
        })
    }

    /// Starts a daemon after shell commands, in this control group.
    fn start(&mut self, unit: &str, group: &str, prelude: &str, args: &[String]) {
        let own = Scratch::in_memory();
        let file = own.join("cgroup");
        fs::write(&file, format!("0::{group}\n")).unwrap();
        let mut manager = ServiceManager::empty();
        prelude.clone_into(&mut manager.prelude);
        let daemon = manager.start(args);
        manager.hears("READY=1");
        let service = Service {
            daemon,
            manager,
            args: args.to_vec(),
            group: file,
            fails_to_restart: false,
            reloaded: "pid=0 ; code=(null) ; status=0/0".to_owned(),
            reloads: false,
            detached: None,
            _scratch: own,
        };
        self.all.insert(unit.to_owned(), service);
    }

    /// Starts the node of the packaged unit, with these disks.
    fn start_node(&mut self, disks: &[&str]) {
        self.start_node_with(&[], disks);
    }

    /// Starts it with more options.
    fn start_node_with(&mut self, options: &[&str], disks: &[&str]) {
        let [state, run] =
            ["state", "run"].map(|name| self.scratch.join(name).display().to_string());
        let args = ["node", "--state", &state, "--run", &run].map(str::to_owned);
        let more = options.iter().map(|&word| word.to_owned());
        let args: Vec<_> = args.into_iter().chain(more).collect();
        self.start("cleave.service", "/system.slice/cleave.service", ":", &args);
        for id in disks {
            let body = json!({"disk": [self.scratch.image(id, 64 << 20)]}).to_string();
            let answer = fetch(&self.control(), "PUT", &format!("/v1/disks/{id}"), &body);
            assert_eq!(answer.status, 201, "{}", answer.body);
        }
    }

    /// Starts a disk of the packaged unit, with its sockets in the folder `name`.
    fn start_disk(&mut self, name: &str, group: &str, prelude: &str) {
        let folder = self.scratch.join("run").join(name);
        fs::create_dir(&folder).unwrap();
        let [socket, control] =
            ["disk.sock", "control.sock"].map(|name| folder.join(name).display().to_string());
        let image = self.scratch.image(name, 64 << 20).display().to_string();
        let args = [
            "serve",
            "--socket-path",
            &socket,
            "--control",
            &control,
            "--disk",
            &image,
        ];
        let args = args.map(str::to_owned);
        self.start(&format!("cleave@{name}.service"), group, prelude, &args);
    }

    /// The control socket of the node.
    fn control(&self) -> PathBuf {
        self.scratch.join("run/control.sock")
    }

    fn socket(&self, disk: &str) -> PathBuf {
        disk_socket(self.scratch.path(), disk)
    }

    fn pid(&self, unit: &str) -> u32 {
        self.all[unit].pid()
    }

    /// Has the manager start the installed program from now on.
    fn install(&mut self) {
        for service in self.all.values_mut() {
            service.manager.program.clone_from(&self.installed);
        }
    }

    /// Runs `cleave upgrade` of the installed program.
    fn upgrade(&mut self, options: &[&str]) -> Exited {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", ELSEWHERE, "sh"]);
        command.arg(self.scratch.join("run"));
        for service in self.all.values() {
            command.arg(service.pid().to_string()).arg(&service.group);
        }
        let path = std::env::var("PATH").unwrap();
        let path = format!("{}:{path}", self.scratch.join("bin").display());
        command.arg("--").arg(&self.installed).arg("upgrade");
        command.args(options).env("PATH", path);
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let ended = wait_until(|| {
            self.play();
            child.try_wait().unwrap().is_some()
        });
        if !ended {
            child.kill().unwrap();
        }
        let output = child.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let exited = Exited {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        };
        assert!(ended, "it does not end: {exited:?}");
        exited
    }

    /// Answers what systemctl was asked, if it was.
    fn play(&mut self) {
        self.all
            .values_mut()
            .for_each(|service| service.manager.settle());
        let file = |name: &str| self.scratch.join(&format!("bin/systemctl.{name}"));
        let Ok(asked) = fs::read_to_string(file("asked")) else {
            return;
        };
        fs::remove_file(file("asked")).unwrap();
        let (new, answer) = (file("new"), file("answer"));
        fs::write(&new, self.answer(asked.trim())).unwrap();
        fs::rename(new, answer).unwrap();
    }

    fn answer(&mut self, asked: &str) -> String {
        let unit = asked.rsplit(' ').next().unwrap();
        let service = self.all.get_mut(unit);
        let runs = service.as_ref().is_some_and(|it| !it.fails_to_restart);
        match asked.split(' ').next().unwrap() {
            "show" if asked.contains("ExecReload") => match service {
                Some(service) if service.reloads => format!(
                    "echo '{{ argv[]=/usr/bin/cleave serve --take-over --detach ; {} }}'",
                    service.reloaded
                ),
                _ => "echo 'argv[]=/bin/kill -HUP $MAINPID'".to_owned(),
            },
            "show" => format!("echo {}", service.map_or(0, |service| service.pid())),
            "reload" => match service.is_some_and(Service::reload) {
                true => String::new(),
                false => format!("echo 'Job for {unit} failed.' >&2; exit 1"),
            },
            "restart" => match service {
                Some(service) if !service.fails_to_restart => {
                    service.restart();
                    String::new()
                }
                _ => format!("echo 'Job for {unit} failed.' >&2; exit 1"),
            },
            "status" if runs => {
                let log = self.scratch.join("bin/systemctl.log");
                let said = service.map(|service| service.manager.log());
                fs::write(&log, said.unwrap_or_default()).unwrap();
                format!(
                    "echo 'Active: active (running)'; echo; tail -n 8 {}",
                    log.display()
                )
            }
            "status" => format!(
                "printf 'x {unit}\\n     Active: failed (Result: exit-code)\\n\\nNov 27 host cleave[9]: cleave: no disk\\n'\n\
                 exit 3"
            ),
            "list-units" => {
                let units = self.all.keys().chain(&self.others);
                let lines =
                    units.map(|unit| format!("echo '{unit} loaded active running Disks'\n"));
                lines.collect()
            }
            other => panic!("systemctl was asked for {other}: {asked}"),
        }
    }
}

fn ask(control: &Path, method: &str, path: &str, status: u16, body: &str) {
    let answer = fetch(control, method, path, body);
    assert_eq!(answer.status, status, "{}", answer.body);
}

fn quiesce(control: &Path, disk: &str) {
    let path = format!("/v1/disks/{disk}/quiesce");
    ask(control, "POST", &path, 200, "{\"seconds\": 60}");
}

#[test]
fn a_node_is_upgraded_and_each_disk_says_what_its_guest_noticed() {
    let Some(mut host) = Services::new() else {
        return;
    };
    host.start_node(&["a", "b", "longer"]);
    host.all.get_mut("cleave.service").unwrap().reloads = true;
    let control = host.control();
    assert_eq!(get(&control, "/v1/node")["keeps"], true);
    let mut kept = open(&host.socket("a"));
    let lost = open(&host.socket("longer"));
    let pid = host.pid("cleave.service");
    let checked = |longer: &str| {
        format!(
            "cleave.service: {VERSION}, pid {pid}; the installed program is {VERSION}\n\
             \u{20} a         handed over\n\
             \u{20} b         no frontend\n\
             \u{20} longer    {longer}\n"
        )
    };
    let said = host.upgrade(&["--check"]);
    let well = "3 disks: no frontend has to connect again\n";
    assert_eq!(said.stdout, checked("handed over") + well, "{said:?}");
    assert_eq!((said.code, &*said.stderr), (Some(0), ""));

    quiesce(&control, "longer");
    let said = host.upgrade(&["--check"]);
    assert_eq!(said.stdout, checked("connects again: it is quiesced"));
    let fault = "cleave: 1 of 3 disks: its frontend has to connect again\n";
    assert_eq!((said.code, &*said.stderr), (Some(1), fault));
    assert_eq!(host.pid("cleave.service"), pid, "a check changes nothing");

    // What passes is waited for.
    host.install();
    let said = host.upgrade(&[]);
    let head = format!("cleave.service: {VERSION} goes on: ");
    assert!(said.stdout.starts_with(&head), "{said:?}");
    assert!(said.stdout.contains("it is quiesced"), "{said:?}");
    assert_eq!(said.code, Some(1));
    assert_eq!(host.pid("cleave.service"), pid, "it was restarted");

    // An obstacle that lasts has it restarted.
    drop(lost);
    ask(&control, "DELETE", "/v1/disks/longer?mode=drain", 200, "");
    ask(
        &control,
        "PUT",
        "/v1/disks/longer",
        201,
        r#"{"disk": ["ram:64M"]}"#,
    );
    let mut lost = open(&host.socket("longer"));
    let socket = host.socket("longer");
    let said = std::thread::scope(|scope| {
        let again = scope.spawn(|| {
            assert!(closes_within(lost.frontend().socket(), TIMEOUT));
            drop(lost);
            open(&socket)
        });
        let said = host.upgrade(&[]);
        exercise_queue(&mut again.join().unwrap(), 0).unwrap();
        said
    });
    assert_eq!((said.code, &*said.stderr), (Some(0), ""), "{said:?}");
    let lines: Vec<_> = said.stdout.lines().collect();
    let [head, a, b, longer] = lines[..] else {
        panic!("{said:?}");
    };
    assert_eq!(head, format!("cleave.service: {VERSION} → {VERSION}"));
    assert_eq!(b, "  b         no frontend");
    let again = longer.strip_prefix("  longer    its frontend connected again after ");
    let again: u64 = again
        .and_then(|rest| rest.strip_suffix(" ms")?.parse().ok())
        .unwrap();
    assert!(again > 0, "{longer}");
    let disk = |id: &str| get(&control, &format!("/v1/disks/{id}"))["hand_over"].clone();
    let pause = disk("a")["last"]["pause_seconds"].as_f64().unwrap();
    assert_eq!(a, format!("  a         pause {:.1} ms", pause * 1e3));
    let obstacle = "its bytes are in the memory of this process";
    assert_eq!(disk("longer"), json!({"obstacle": obstacle, "last": null}));
    exercise_queue(&mut kept, 0).unwrap();

    let pid = host.pid("cleave.service");
    let said = host.upgrade(&[]);
    let alone = format!(
        "cleave.service: {VERSION}, runs the installed program already; systemctl restart cleave.service restarts it all the \
         same\n"
    );
    assert_eq!((said.code, said.stdout), (Some(0), alone));
    assert_eq!(host.pid("cleave.service"), pid, "it is left alone");
    let said = host.upgrade(&["--check"]);
    let head = format!("cleave.service: {VERSION}, pid {pid}, runs the installed program\n");
    assert!(said.stdout.starts_with(&head), "{said:?}");
}

#[test]
fn one_daemon_that_cannot_be_restarted_does_not_keep_the_others() {
    let Some(mut host) = Services::new() else {
        return;
    };
    host.start_disk(
        "d",
        "/system.slice/system-cleave.slice/cleave@d.service",
        ":",
    );
    host.start_node(&[]);
    host.others = vec!["cleave@e.service".to_owned()];
    // Of a daemon that was killed.
    fs::create_dir(host.scratch.join("run/f")).unwrap();
    drop(UnixListener::bind(host.scratch.join("run/f/control.sock")).unwrap());
    let failing = host.all.get_mut("cleave@d.service").unwrap();
    failing.fails_to_restart = true;
    let before = ["cleave.service", "cleave@d.service"].map(|unit| host.pid(unit));
    host.install();
    let said = host.upgrade(&[]);
    let expected = format!(
        "cleave.service: {VERSION} → {VERSION}\n\
         cleave@d.service: {VERSION} could not be restarted\n\
         \u{20} Job for cleave@d.service failed.\n\
         \u{20} Active: failed (Result: exit-code)\n\
         \u{20} Nov 27 host cleave[9]: cleave: no disk\n\
         \u{20} mend that, or become root; then: systemctl restart cleave@d.service\n\
         cleave@e.service: runs, and its control socket was not found: name it with --control PATH, or restart the unit \
         yourself: systemctl restart cleave@e.service\n"
    );
    assert_eq!(said.stdout, expected, "{said:?}");
    let fault = "cleave: 2 of 3 daemons may not run the installed program\n";
    assert_eq!((said.code, &*said.stderr), (Some(1), fault));
    let after = ["cleave.service", "cleave@d.service"].map(|unit| host.pid(unit));
    assert_ne!(before[0], after[0]);
    assert_eq!(before[1], after[1]);
}

#[test]
fn a_daemon_that_would_lose_its_frontends_is_left_to_the_operator() {
    let Some(mut host) = Services::new() else {
        return;
    };
    let keeps_nothing = "unset FDSTORE";
    host.start_disk("d", "/system.slice/cleave@d.service", keeps_nothing);
    host.start_disk("e", "/user.slice/session-1.scope", keeps_nothing);
    let _frontends = ["d", "e"].map(|disk| open(&host.socket(disk)));
    let units = ["cleave@d.service", "cleave@e.service"];
    let before = units.map(|unit| host.pid(unit));
    host.install();
    let controls = ["d", "e"].map(|disk| host.socket(disk).with_file_name("control.sock"));
    let [d, e] = controls.each_ref().map(|control| control.to_str().unwrap());
    // Named twice, it is one daemon all the same.
    let sockets = ["--control", d, "--control", e, "--control", d];
    let expected = format!(
        "cleave@d.service: {VERSION}, pid {}; the installed program is {VERSION}\n\
         \u{20} nothing keeps its disks during a restart: its unit lacks FileDescriptorStoreMax= and Environment=FDSTORE=, or \
         the program is too old; systemctl restart cleave@d.service restarts it all the same\n\
         \u{20} d    connects again: nothing keeps its connection\n\
         {e}: {VERSION}, pid {}; the installed program is {VERSION}\n\
         \u{20} not in a unit of systemd: start the installed program with the same options and --take-over, and this one hands \
         its disks over and ends\n\
         \u{20} e    handed over\n",
        before[0], before[1]
    );
    for (options, fault) in [
        (
            &["--check"][..],
            "1 of 2 disks: its frontend has to connect again; 2 of 2 daemons cannot be restarted by this command",
        ),
        (&[], "2 of 2 daemons may not run the installed program"),
    ] {
        let said = host.upgrade(&[options, &sockets].concat());
        assert_eq!(said.stdout, expected, "{said:?}");
        assert_eq!(
            (said.code, said.stderr),
            (Some(1), format!("cleave: {fault}\n"))
        );
    }
    assert_eq!(units.map(|unit| host.pid(unit)), before);
    let said = host.upgrade(&["--control", "/nowhere"]);
    let missing = "control socket /nowhere: no such socket: is a `cleave serve --control /nowhere`";
    assert!(said.stdout.starts_with(missing), "{said:?}");
    assert_eq!(said.code, Some(1));
}

/// Nothing was left to the next process, and what it says of it is not a guess.
#[test]
fn a_report_tells_obstacles_of_all_kinds_of_disks() {
    let node = cleave_tests::Node::start();
    node.add("memory", &json!({"disk": ["ram:1M"]}));
    let image = node.daemon.scratch().image("gone", 1 << 20);
    node.add("gone", &json!({"disk": [image], "persistent": false}));
    let obstacle = |id: &str| node.get(&format!("/v1/disks/{id}"))["hand_over"]["obstacle"].clone();
    let expected = [
        "its bytes are in the memory of this process",
        "it is not persistent, so the next process does not serve it",
    ];
    assert_eq!(["memory", "gone"].map(obstacle), expected.map(Value::from));
    node.daemon.finish();
}

#[test]
fn a_unit_whose_reload_takes_over_is_not_restarted() {
    let Some(mut host) = Services::new() else {
        return;
    };
    let unit = "cleave@a.service";
    let prelude = "export WATCHDOG_USEC=400000";
    host.start_disk(
        "a",
        "/system.slice/system-cleave.slice/cleave@a.service",
        prelude,
    );
    let service = host.all.get_mut(unit).unwrap();
    (service.reloads, service.fails_to_restart) = (true, true);
    let before = host.pid(unit);
    let mut guest = open(&host.socket("a"));
    host.install();
    let said = host.upgrade(&[]);
    assert_eq!((said.code, &*said.stderr), (Some(0), ""), "{said:?}");
    let head = format!("{unit}: {VERSION} → {VERSION}\n  a    pause ");
    assert!(said.stdout.starts_with(&head), "{said:?}");
    assert_ne!(host.pid(unit), before);
    exercise_queue(&mut guest, 0).unwrap();
    let service = host.all.get_mut(unit).unwrap();
    service.manager.settle();
    // It knows from the process before that the manager waits for it.
    service.manager.hears("WATCHDOG=1");
}

/// The reason for which the new process is refused may keep the next one from starting too, and then nobody serves.
#[test]
fn a_unit_whose_reload_is_refused_goes_on() {
    let Some(mut host) = Services::new() else {
        return;
    };
    let unit = "cleave.service";
    let images = host.scratch.path().to_owned();
    let mounted = host.scratch.join("mounted");
    fs::create_dir(&mounted).unwrap();
    let mounted = mounted.display().to_string();
    host.start_node_with(&["--images", &mounted], &[]);
    host.all.get_mut(unit).unwrap().reloads = true;
    let control = host.control();
    let image = PathBuf::from(&mounted).join("a");
    let file = fs::File::create(&image).unwrap();
    file.set_len(64 << 20).unwrap();
    let body = json!({"disk": [image]}).to_string();
    let added = fetch(&control, "PUT", "/v1/disks/a", &body);
    assert_eq!(added.status, 201, "{}", added.body);
    let before = host.pid(unit);
    let mut guest = open(&host.socket("a"));
    host.install();
    let mut refused = |host: &mut Services, why: &str| {
        let said = host.upgrade(&[]);
        assert_eq!(said.code, Some(1), "{said:?}");
        let head = format!("{unit}: {VERSION} goes on: the installed program could not ");
        assert!(said.stdout.starts_with(&head), "{said:?}");
        assert!(said.stdout.contains(why), "{said:?}");
        assert_eq!(host.pid(unit), before, "{said:?}");
        exercise_queue(&mut guest, 0).unwrap();
    };
    // A folder of images that is not mounted now.
    let away = images.join("away");
    fs::rename(&mounted, &away).unwrap();
    refused(&mut host, &format!("--images {mounted}: No such file"));
    // The same beside others that are there.
    let options = ["--images".to_owned(), images.display().to_string()];
    host.all.get_mut(unit).unwrap().args.extend(options);
    refused(&mut host, "disk a: ");
    fs::rename(&away, &mounted).unwrap();
    // A word that nobody knows, in a drop-in of the unit.
    let words = &mut host.all.get_mut(unit).unwrap().args;
    words.push("--no-such-option".to_owned());
    refused(&mut host, "--no-such-option");
}

/// Has what is asked at one socket answered by the daemon at another.
fn answer_for(listener: UnixListener, other: PathBuf) {
    std::thread::spawn(move || {
        while let Ok((asker, _)) = listener.accept() {
            let answerer = UnixStream::connect(&other).unwrap();
            let pass = |from: &UnixStream, to: &UnixStream| {
                let [mut from, mut to] = [from, to].map(|end| end.try_clone().unwrap());
                std::thread::spawn(move || {
                    // Either end may close first.
                    let _ = io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            };
            pass(&asker, &answerer);
            pass(&answerer, &asker);
        }
    });
}

/// A daemon may be in the hands of its guest, and this command is root's.
#[test]
fn a_daemon_cannot_have_the_unit_of_another_process_restarted() {
    let Some(mut host) = Services::new() else {
        return;
    };
    host.start_disk("d", "/system.slice/cleave@d.service", ":");
    let unit = "cleave@d.service";
    let before = host.pid(unit);
    host.install();
    fs::create_dir(host.scratch.join("run/false")).unwrap();
    let path = host.scratch.join("run/false/control.sock");
    let listener = UnixListener::bind(&path).unwrap();
    answer_for(listener, host.socket("d").with_file_name("control.sock"));
    let socket = path.to_str().unwrap();
    let hindrance = format!(
        "  it says that it is process {before}, which does not have this socket open, as far as this command can see: run it as root, \
         and outside of containers; if that changes nothing, take the daemon for compromised, and restart it yourself"
    );
    for options in [&[][..], &["--check"]] {
        let said = host.upgrade(&[options, &["--control", socket]].concat());
        assert_eq!(host.pid(unit), before, "{said:?}");
        assert_eq!(said.code, Some(1), "{said:?}");
        let head = format!(
            "{socket}: {VERSION}, pid {before}; which program it runs cannot be seen\n{hindrance}\n"
        );
        assert!(said.stdout.starts_with(&head), "{said:?}");
    }
    // The daemon itself is believed.
    let said = host.upgrade(&[
        "--control",
        host.socket("d")
            .with_file_name("control.sock")
            .to_str()
            .unwrap(),
    ]);
    assert_eq!((said.code, &*said.stderr), (Some(0), ""), "{said:?}");
    assert_ne!(host.pid(unit), before);
}
