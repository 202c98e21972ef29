//! The program under test.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cleave_client::{Client, DeviceOptions, Error};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, setpriority_process, waitid,
};

use crate::lateness::{Lateness, stolen, unless_late};
use crate::{Scratch, Stopwatch, TIMEOUT, ensure, time_limit, wait_until, wait_until_within};

/// A daemon that has done nothing for this long is idle. Longer than the pause before it watches a file again.
const QUIET: Duration = Duration::from_millis(1500);
/// For how long an idle daemon is watched.
const WINDOW: Duration = Duration::from_secs(2);
/// A machine that is later than this may have moved a thread's work into the window.
const REST_LATE_MIN: Duration = Duration::from_millis(200);
/// A daemon may stay busy with earlier work for this long before it counts as spinning.
const SPIN_WINDOW: Duration = Duration::from_secs(1);

/// A daemon whose end takes longer may wait for the kernel alone.
const AT_ONCE: Duration = Duration::from_millis(500);

/// Output of a program that has exited.
#[derive(Debug)]
pub struct Exited {
    /// Exit code; `None`: a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Stops a process. No thread of it runs when this returns; SIGSTOP alone lets some go on for a while.
pub fn freeze(child: &Child) {
    let process = Pid::from_child(child);
    kill_process(process, Signal::STOP).unwrap();
    let awaited = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let status = waitid(WaitId::Pid(process), awaited).unwrap();
    assert!(status.is_some_and(|status| status.stopped()));
}

/// Path of the program: `CLEAVE_BIN` if set; otherwise it is built now, in the caller's profile.
pub fn program_path() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        if let Some(given) = std::env::var_os("CLEAVE_BIN") {
            return given.into();
        }
        // target/PROFILE/deps/test-HASH
        let own = std::env::current_exe().unwrap();
        let profile = own.ancestors().nth(2).unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--locked", "--package", "cleave"]);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        build.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        build.arg("--target-dir").arg(profile.parent().unwrap());
        assert!(
            build.status().unwrap().success(),
            "the program does not build"
        );
        profile.join("cleave")
    })
}

/// Path of the program of an earlier release, `CLEAVE_EARLIER`.
pub fn earlier_program() -> Option<PathBuf> {
    std::env::var_os("CLEAVE_EARLIER").map(PathBuf::from)
}

/// Copies the program to a place that every user can reach.
pub fn program_copy(scratch: &Scratch) -> PathBuf {
    let copy = scratch.join("cleave");
    // Another process makes the copy: a test that forks at this moment would inherit our writable descriptor, and a
    // program that is open for writing cannot be executed.
    let copied = Command::new("cp").arg(program_path()).arg(&copy).status();
    assert!(copied.unwrap().success());
    copy
}

/// Runs `cleave` with these arguments until it exits.
pub fn run_to_exit<A: AsRef<std::ffi::OsStr>>(args: &[A]) -> Exited {
    let mut child = Command::new(program_path())
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).map(|_| text)
    });
    let code = wait_for(&mut child);
    if code.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let mut text = String::new();
    stdout.read_to_string(&mut text).unwrap();
    let stderr = errors.join().unwrap().unwrap();
    let status = code.unwrap_or_else(|| panic!("{:?} did not exit: {stderr}", words(args)));
    Exited {
        code: status.code(),
        stdout: text,
        stderr,
    }
}

fn words<A: AsRef<std::ffi::OsStr>>(args: &[A]) -> Vec<String> {
    args.iter()
        .map(|arg| arg.as_ref().to_string_lossy().into_owned())
        .collect()
}

fn wait_for(child: &mut Child) -> Option<std::process::ExitStatus> {
    let mut status = None;
    wait_until(|| {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status
}

/// SIGTERM to exit, or to the moment at which only the kernel is late.
const EXIT_MAX: Duration = Duration::from_secs(6);

/// A running `cleave`. End it with [`Daemon::finish`], which asserts that it still runs and exits cleanly. A test
/// that fails earlier leaves the daemon's log in the output.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// Program and arguments, for a successor.
    line: Vec<OsString>,
    /// Shared with the successors.
    scratch: Arc<Scratch>,
    socket: PathBuf,
    done: bool,
}

impl Daemon {
    /// Starts `cleave serve --socket-path … ARGS`.
    pub fn serve(args: &[&str]) -> Daemon {
        let scratch = Scratch::in_memory();
        let socket = scratch.join("socket");
        let mut all = vec![
            "serve".into(),
            "--socket-path".into(),
            socket.display().to_string(),
        ];
        all.extend(args.iter().map(|arg| (*arg).to_owned()));
        Daemon::start(scratch, socket, Command::new(program_path()).args(all))
    }

    /// Starts `cleave serve --socket-path … --control … ARGS`; the second path is that of the control socket.
    pub fn serve_with_control(args: &[&str]) -> (Daemon, PathBuf) {
        Daemon::serve_with_control_in(Scratch::in_memory(), args)
    }

    /// Starts it with both sockets in this folder.
    pub fn serve_with_control_in(scratch: Scratch, args: &[&str]) -> (Daemon, PathBuf) {
        let (socket, control) = (scratch.join("socket"), scratch.join("control"));
        let mut all = vec![
            "serve".to_owned(),
            "--socket-path".to_owned(),
            socket.display().to_string(),
            "--control".to_owned(),
            control.display().to_string(),
        ];
        all.extend(args.iter().map(|arg| (*arg).to_owned()));
        (Daemon::with_args(scratch, socket, &all), control)
    }

    /// Starts it under `sh`, after shell commands such as `ulimit -n 64`.
    pub fn serve_after(prelude: &str, args: &[&str]) -> Daemon {
        let scratch = Scratch::in_memory();
        let socket = scratch.join("socket");
        let path = socket.display().to_string();
        let mut all = vec!["serve", "--socket-path", &path];
        all.extend(args);
        Daemon::with_args_after(prelude, scratch, socket, &all)
    }

    /// Starts it with any arguments; `socket` is the path on which it will listen.
    pub fn with_args<A: AsRef<std::ffi::OsStr>>(
        scratch: Scratch,
        socket: PathBuf,
        args: &[A],
    ) -> Daemon {
        Daemon::start(scratch, socket, Command::new(program_path()).args(args))
    }

    /// Starts it under `sh`, after shell commands, which may change the line that they find in `$@`.
    pub fn with_args_after<A: AsRef<std::ffi::OsStr>>(
        prelude: &str,
        scratch: Scratch,
        socket: PathBuf,
        args: &[A],
    ) -> Daemon {
        let line = format!("{prelude}; exec \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &line, "sh"]).arg(program_path());
        Daemon::start(scratch, socket, command.args(args))
    }

    /// Starts it with a descriptor as its standard input, for `--fd 0`.
    pub fn with_stdin<A: AsRef<std::ffi::OsStr>>(
        stdin: std::os::fd::OwnedFd,
        args: &[A],
    ) -> Daemon {
        let scratch = Scratch::in_memory();
        Daemon::spawn(
            Arc::new(scratch),
            PathBuf::new(),
            Command::new(program_path()).args(args).stdin(stdin),
        )
    }

    /// Starts a command that serves no socket, such as `demo` or `probe`. Its output goes to the log too.
    pub fn without_socket(args: &[&str]) -> Daemon {
        let mut command = Command::new(program_path());
        command.args(args).stdin(Stdio::null());
        Daemon::spawn(Arc::new(Scratch::in_memory()), PathBuf::new(), &mut command)
    }

    /// Starts any back-end by a shell command, in which `{socket}`, `{disk}` and `{queues}` are replaced. Returns an
    /// error if it does not listen in time.
    pub fn by_command(template: &str, disk_bytes: u64, queues: u16) -> Result<Daemon, String> {
        let scratch = Arc::new(Scratch::new());
        let socket = scratch.join("socket");
        let line = template
            .replace("{socket}", &socket.to_string_lossy())
            .replace(
                "{disk}",
                &scratch.image("disk", disk_bytes).to_string_lossy(),
            )
            .replace("{queues}", &queues.to_string());
        let mut command = Command::new("sh");
        // Without `exec` the process that is watched and killed would be the shell.
        command.args(["-c", &format!("exec {line}")]);
        Daemon::try_start(scratch, socket, &mut command)
    }

    /// Kills it with SIGKILL and starts the same command again, with the same socket and files.
    pub fn succeed(&self) -> Result<Daemon, String> {
        self.die()?;
        self.start_again()
    }

    /// Kills it with SIGKILL and waits until a successor can take its files and its socket.
    pub fn die(&self) -> Result<(), String> {
        self.signal(Signal::KILL);
        // The last of its threads to end closes its descriptors, so that a successor finds no lock. It is left to `wait`.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let is_dead = || !matches!(waitid(WaitId::Pid(self.process()), options), Ok(None));
        ensure(wait_until(is_dead), || "it survives SIGKILL".into())?;
        // The kernel may close its socket later, with its io_uring.
        wait_until_within(TIMEOUT, || !crate::has_listener(&self.socket));
        Ok(())
    }

    /// Starts the same command again, with the same socket and files.
    pub fn start_again(&self) -> Result<Daemon, String> {
        let mut command = Command::new(&self.line[0]);
        command.args(&self.line[1..]);
        Daemon::try_start(Arc::clone(&self.scratch), self.socket.clone(), &mut command)
    }

    fn start(scratch: Scratch, socket: PathBuf, command: &mut Command) -> Daemon {
        Daemon::try_start(Arc::new(scratch), socket, command).unwrap_or_else(|why| panic!("{why}"))
    }

    fn try_start(
        scratch: Arc<Scratch>,
        socket: PathBuf,
        command: &mut Command,
    ) -> Result<Daemon, String> {
        let mut daemon = Daemon::spawn(scratch, socket, command.stdin(Stdio::null()));
        let mut ended = Ok(());
        let is_there = wait_until_within(TIMEOUT, || {
            ended = daemon.alive();
            ended.is_err() || crate::has_listener(&daemon.socket)
        });
        if let Err(how) = ended {
            return Err(format!(
                "the daemon exited at start: {how}\n{}",
                daemon.log_tail()
            ));
        }
        ensure(is_there, || {
            format!("no socket appeared\n{}", daemon.log_tail())
        })?;
        Ok(daemon)
    }

    fn spawn(scratch: Arc<Scratch>, socket: PathBuf, command: &mut Command) -> Daemon {
        let log = File::create(scratch.join("log")).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let line = std::iter::once(command.get_program()).chain(command.get_args());
        Daemon {
            child,
            line: line.map(OsString::from).collect(),
            scratch,
            socket,
            done: false,
        }
    }

    /// The path of its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its temporary folder.
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// Its process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Opens a client.
    pub fn open(&self, options: &DeviceOptions) -> Client {
        self.try_open(options)
            .unwrap_or_else(|error| panic!("{error}\n{}", self.log_tail()))
    }

    /// Opens a client. While the previous session drains, the daemon refuses another frontend; this call retries
    /// then.
    pub fn try_open(&self, options: &DeviceOptions) -> Result<Client, Error> {
        let end = Instant::now() + time_limit();
        loop {
            match Client::open(&self.socket, options) {
                Err(Error::Closed | Error::Io { .. }) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => return other,
            }
        }
    }

    /// `Err` with the exit status if it has exited.
    pub fn alive(&mut self) -> Result<(), String> {
        match self.child.try_wait().unwrap() {
            None => Ok(()),
            Some(status) => Err(status.to_string()),
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(self.process(), signal);
    }

    /// Freezes it. SIGCONT lets it go on.
    pub fn freeze(&self) {
        freeze(&self.child);
    }

    fn process(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns true if its first thread has ended. The kernel may still wait for what the others have in flight.
    pub fn is_zombie(&self) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/stat", self.pid()));
        status.is_ok_and(|text| text.contains(") Z "))
    }

    /// Waits until it exits: exit code, and how long that took. The time after which only the kernel was late is left out: it lets go of
    /// an inotify descriptor when its own workers have run, which took eleven seconds once on a busy machine.
    pub fn wait(&mut self) -> Option<(Option<i32>, Duration)> {
        let watch = Stopwatch::start();
        let mut done = None;
        let is_over = wait_until(|| {
            let is_over = self.alive().is_err();
            let is_late = !is_over && done.is_none() && watch.elapsed() > AT_ONCE;
            if is_late && self.stacks().contains("inotify_release") {
                done = Some(watch.elapsed());
            }
            is_over
        });
        if !is_over {
            return None;
        }
        let status = wait_for(&mut self.child)?;
        self.done = true;
        Some((status.code(), done.unwrap_or_else(|| watch.elapsed())))
    }

    /// Asserts that it runs, sends SIGTERM, and asserts that it exits cleanly and in time.
    pub fn finish(mut self) {
        if let Err(how) = self.alive() {
            panic!("the daemon exited early: {how}\n{}", self.log_tail());
        }
        self.signal(Signal::TERM);
        let watch = Stopwatch::start();
        wait_until(|| self.alive().is_err() || watch.elapsed() >= EXIT_MAX);
        let waited = watch.elapsed();
        // Where its threads are, for whoever reads why it is late.
        let threads = self.stacks();
        // As in `wait`.
        let is_done = threads.contains("inotify_release");
        match self.wait() {
            Some((Some(0), more)) if is_done || waited + more < EXIT_MAX => {}
            other => panic!(
                "SIGTERM led to {other:?} after {waited:?}\n{threads}{}",
                self.log_tail()
            ),
        }
    }

    /// Name, state and kernel stack of each thread.
    fn stacks(&self) -> String {
        let folder = format!("/proc/{}/task", self.child.id());
        let tasks = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        tasks
            .map(|task| {
                let [stat, sched, call, stack] = ["stat", "schedstat", "syscall", "stack"]
                    .map(|name| read(task.path().join(name)));
                format!("{stat}{sched}{call}{stack}")
            })
            .collect()
    }

    /// Kills it with SIGKILL.
    pub fn abandon(&mut self) {
        self.done = true;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Its whole log.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.scratch.join("log")).unwrap_or_default())
            .into_owned()
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let from = lines.len().saturating_sub(25);
        format!(
            "--- log of the daemon ---\n{}\n---",
            lines[from..].join("\n")
        )
    }

    /// Waits until its log contains a text.
    pub fn log_has(&self, text: &str) -> bool {
        wait_until(|| self.log().contains(text))
    }

    /// Number of open descriptors.
    pub fn fds(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).map_or(0, |dir| dir.count())
    }

    /// Number of open descriptors once it no longer changes: a daemon that starts still opens some, and sessions that end close some. One
    /// of its threads that waits for a CPU meanwhile may be about to.
    pub fn fds_at_rest(&self) -> usize {
        let (mut last, mut since) = (self.fds(), Instant::now());
        let end = since + Duration::from_secs(3);
        while since.elapsed() < Duration::from_millis(30) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
            let now = self.fds();
            if now != last || self.asleep().is_none() {
                (last, since) = (now, Instant::now());
            }
        }
        last
    }

    /// Waits until it has at most `most` descriptors; fails if it keeps more.
    pub fn fds_settle_at(&self, most: usize) -> Result<(), String> {
        match wait_until(|| self.fds() <= most) {
            true => Ok(()),
            false => Err(format!("{} descriptors, more than {most}", self.fds())),
        }
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.pid())).map_or(0, |dir| dir.count())
    }

    /// Waits until it has at most `most` threads; fails if it keeps more.
    pub fn threads_settle_at(&self, most: usize) -> Result<(), String> {
        match wait_until(|| self.threads() <= most) {
            true => Ok(()),
            false => Err(format!("{} threads, more than {most}", self.threads())),
        }
    }

    /// Resident memory that is not shared with a guest, in KiB.
    pub fn rss_kib(&self) -> u64 {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        number.unwrap_or(0)
    }

    /// Fails if [`Daemon::rss_kib`] has grown by more than `more` KiB since `before`. `CLEAVE_TEST_KEPT_KIB`, which
    /// `cargo xtask sanitize` sets, adds the memory that a sanitizer's allocator keeps after it is freed.
    pub fn stays_small(&self, before: u64, more: u64) -> Result<(), String> {
        let kept = std::env::var("CLEAVE_TEST_KEPT_KIB").ok();
        let kept: u64 = kept.map_or(0, |kib| kib.parse().unwrap());
        let now = self.rss_kib();
        if now <= before + more + kept {
            return Ok(());
        }
        Err(format!("{before} KiB became {now}"))
    }

    /// As [`Daemon::stays_small`], but waits for sessions that are ending to free their memory.
    pub fn settles_small(&self, before: u64, more: u64) -> Result<(), String> {
        let mut verdict = Ok(());
        wait_until(|| {
            verdict = self.stays_small(before, more);
            verdict.is_ok()
        });
        verdict
    }

    /// Contents of this file in `/proc` for each of its threads.
    fn tasks<T>(&self, file: &str, read: impl Fn(&str) -> Option<T>) -> Vec<T> {
        let texts = self.task_folders().into_iter();
        let texts = texts.filter_map(|task| std::fs::read_to_string(task.join(file)).ok());
        texts.filter_map(|text| read(&text)).collect()
    }

    /// Has its threads, and those that they start, wait for hardly anything else that runs on this machine, which takes root.
    pub fn hurry(&self) {
        let number = |task: PathBuf| Pid::from_raw(task.file_name()?.to_str()?.parse().ok()?);
        for thread in self.task_folders().into_iter().filter_map(number) {
            // It may have ended.
            let _ = setpriority_process(Some(thread), -20);
        }
    }

    fn task_folders(&self) -> Vec<PathBuf> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid()));
        let tasks = tasks.into_iter().flatten().flatten();
        tasks.map(|task| task.path()).collect()
    }

    /// The folders in `/proc` of its threads, and their names. A thread that the kernel has just lent to io_uring has the name of the
    /// one that it serves for a moment, and is told from that by its flags.
    pub fn named_threads(&self) -> Vec<(PathBuf, String)> {
        const PF_IO_WORKER: u32 = 0x10;
        let named = |task: PathBuf| {
            let stat = std::fs::read_to_string(task.join("stat")).ok()?;
            let (name, behind) = stat.split_once('(')?.1.rsplit_once(')')?;
            let flags: u32 = behind.split_whitespace().nth(6)?.parse().ok()?;
            let name = match flags & PF_IO_WORKER {
                0 => name.to_owned(),
                _ => "iou-wrk".to_owned(),
            };
            Some((task, name))
        };
        self.task_folders().into_iter().filter_map(named).collect()
    }

    /// CPU time of all its threads so far.
    pub fn cpu(&self) -> Duration {
        Duration::from_nanos(self.tasks("schedstat", first_number).iter().sum())
    }

    /// Its threads: the name, how often it has gone to sleep, which is how often it was woken, and its CPU time; `None`: one is awake.
    /// Threads that the kernel lends to io_uring are left out: they wake and end by themselves when there was nothing to do for
    /// seconds.
    fn asleep(&self) -> Option<Vec<(String, u64, Duration)>> {
        let mut all = Vec::new();
        for task in self.task_folders() {
            // A thread that has just ended has nothing to tell.
            let read = |file| std::fs::read_to_string(task.join(file)).unwrap_or_default();
            let status = read("status");
            let value = |key| {
                Some(
                    status
                        .lines()
                        .find_map(|line| line.strip_prefix(key))?
                        .trim(),
                )
            };
            let Some(name) = value("Name:").filter(|name| !name.starts_with("iou-")) else {
                continue;
            };
            if !value("State:")?.starts_with('S') {
                return None;
            }
            let sleeps = value("voluntary_ctxt_switches:")?.parse().ok()?;
            let cpu = first_number(&read("schedstat")).unwrap_or_default();
            all.push((name.to_owned(), sleeps, Duration::from_nanos(cpu)));
        }
        Some(all)
    }

    /// How often its threads have gone to sleep.
    pub fn wakes(&self) -> u64 {
        let key = "voluntary_ctxt_switches:";
        let count = |text: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key))?;
            line.trim().parse::<u64>().ok()
        };
        self.tasks("status", count).iter().sum()
    }

    /// Waits until it is idle, then watches it for one long window: none of its threads may wake, and it may use no
    /// CPU time beyond what the hypervisor may have stolen. It is watched again if its threads were so late that what
    /// one did in the window may belong to the time before.
    pub fn stays_at_rest(&self) -> Result<(), String> {
        unless_late("at-rest", REST_LATE_MIN, |lateness| {
            *lateness = Lateness::of(vec![self.pid()]);
            self.rests()
        })
    }

    /// A worker looks once, long after its first kick, if requests were seen. So after a single wake the daemon is watched for longer, and
    /// has to sleep through.
    fn rests(&self) -> Result<(), String> {
        let watched = match self.watch(WINDOW) {
            Err((1, _)) => self.watch(2 * WINDOW),
            watched => watched,
        };
        watched.map_err(|(_, why)| why)
    }

    /// Waits until it is idle, and then for this time. Fails if it woke or used CPU time: with how often it woke, and with what it did.
    fn watch(&self, window: Duration) -> Result<(), (u64, String)> {
        let mut before = None;
        let is_quiet = || {
            before = self.asleep();
            before.is_some() && {
                std::thread::sleep(QUIET);
                self.asleep() == before
            }
        };
        if !wait_until(is_quiet) {
            return Err((0, format!("it is never idle: {:?}", self.asleep())));
        }
        let stolen_before = stolen();
        std::thread::sleep(window);
        let after = self.asleep();
        let stolen = stolen() - stolen_before;
        let (before, after) = (before.unwrap_or_default(), after.unwrap_or_default());
        let wakes =
            |all: &[(String, u64, Duration)]| all.iter().map(|one| one.1).collect::<Vec<_>>();
        let cpu = |all: &[(String, u64, Duration)]| all.iter().map(|one| one.2).sum::<Duration>();
        let used = cpu(&after).saturating_sub(cpu(&before));
        if !after.is_empty() && wakes(&after) == wakes(&before) && used <= stolen {
            return Ok(());
        }
        let woke = wakes(&after).iter().sum::<u64>();
        let woke = woke.saturating_sub(wakes(&before).iter().sum());
        Err((
            woke,
            format!(
                "at rest, then {before:?} became {after:?} in {window:?}; {stolen:?} were stolen"
            ),
        ))
    }

    /// Fails if it uses 10 % of a core or more throughout; one window below that is enough.
    pub fn does_not_spin(&self) -> Result<(), String> {
        let (began, before, stolen_before) = (Instant::now(), self.cpu(), stolen());
        loop {
            std::thread::sleep(Duration::from_millis(30));
            let window = began.elapsed();
            let spent = self.cpu().saturating_sub(before);
            let stolen = stolen() - stolen_before;
            if spent.saturating_sub(stolen) < window / 10 {
                return Ok(());
            }
            if window > SPIN_WINDOW {
                return Err(format!(
                    "{spent:?} of CPU in {window:?}; {stolen:?} were stolen"
                ));
            }
        }
    }
}

/// The first number of a line.
fn first_number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if !self.done {
            if std::thread::panicking() {
                println!("{}", self.log_tail());
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
