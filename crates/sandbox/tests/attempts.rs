//! The attempts of an exploit, from inside each kind of thread.
//!
//! A confinement cannot be taken back, so each attempt has a process of its own: this program runs itself, confines itself as
//! the daemon does, and ends with the errno of the attempt as its exit code.
#![allow(clippy::unwrap_used, clippy::panic)] // shared steps lie outside of #[test] functions

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio, exit};
use std::sync::OnceLock;
use std::thread;

use cleave_sandbox::{Keep, Missing, PathAccess, Reach, Reaches, Role, Sandbox};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, getppid, prlimit};
use rustix::thread::{CpuSet, sched_setaffinity};
use vm_memory::MmapRegion;

const VARIABLE: &str = "CLEAVE_SANDBOX_ATTEMPT";

/// Made before the process is confined, as signal handlers have it.
static PAIR: OnceLock<(UnixStream, UnixStream)> = OnceLock::new();
/// Opened before too, as a disk is.
static DISK: OnceLock<File> = OnceLock::new();
/// Made before too, as the threads of a pool have it.
static EPOLL: OnceLock<OwnedFd> = OnceLock::new();

/// Made before too, as for messages to the service manager: connected to nothing. The other one receives them.
static MANAGER: OnceLock<[UnixDatagram; 2]> = OnceLock::new();

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Done,
    Refused(Errno),
    Killed,
}

use End::{Done, Killed};
const PERM: End = End::Refused(Errno::PERM);
const ACCESS: End = End::Refused(Errno::ACCESS);
const LOST: End = End::Refused(Errno::NOTCONN);

/// The attempts, and how each ends in the control thread, a session, a worker, an offload thread, the size thread and the log
/// thread.
const TABLE: &[(&str, [End; 7])] = &[
    (
        "open a foreign file",
        [ACCESS, ACCESS, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "open its memory to write",
        [ACCESS, PERM, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "read a permitted file",
        [Done, Done, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "write a read-only file",
        [ACCESS, PERM, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "write a permitted file",
        [Done, PERM, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "make a lock file",
        [Done, PERM, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "make a file elsewhere",
        [ACCESS, PERM, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "remove a permitted file",
        [Done, PERM, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "remove a foreign file",
        [ACCESS, PERM, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "lock and unlock a disk",
        [Done, PERM, PERM, PERM, Done, PERM, PERM],
    ),
    ("execute a program", [Killed; 7]),
    // `clone3` is refused before its flags are known; where `clone` may start a thread, libc then tries that one.
    (
        "start a process",
        [Killed, Killed, PERM, Killed, PERM, PERM, PERM],
    ),
    ("trace the parent", [Killed; 7]),
    #[cfg(target_arch = "x86_64")]
    ("call by a number of x32", [Killed; 7]),
    ("read the parent's memory", [Killed; 7]),
    ("signal the parent", [PERM; 7]),
    ("limit the parent", [PERM; 7]),
    ("move the parent", [PERM; 7]),
    ("open a TCP socket", [PERM; 7]),
    (
        "open a unix socket",
        [PERM, PERM, PERM, PERM, PERM, PERM, Done],
    ),
    (
        "connect over TCP",
        [PERM, PERM, PERM, PERM, PERM, PERM, Done],
    ),
    ("map executable memory", [PERM; 7]),
    ("become another user", [PERM; 7]),
    ("set up a ring", [Done, Done, PERM, PERM, PERM, PERM, PERM]),
    ("start a thread", [Done, Done, PERM, Done, PERM, PERM, PERM]),
    ("map memory", [Done; 7]),
    ("tell the control loop of a signal", [Done; 7]),
    ("write to the service manager", [LOST; 7]),
    ("order the service manager", [PERM; 7]),
    // The calls of a session, which sends descriptors, cannot be told apart.
    (
        "pass the service manager a descriptor",
        [Done, Done, PERM, PERM, PERM, PERM, PERM],
    ),
    ("panic", [Done; 7]),
];

/// The roles of [`TABLE`].
const SERVE: [Role; 7] = [
    Role::Control,
    Role::Session,
    Role::Worker,
    Role::Offload,
    Role::Disk,
    Role::Log,
    Role::Dial,
];

/// The attempts in a process of many disks: the control thread and those that open disks, a session, a worker, an offload thread
/// and the size thread. All but the first are narrowed as in [`TABLE`].
const NODE_TABLE: &[(&str, [End; 6])] = &[
    (
        "open a foreign file",
        [ACCESS, ACCESS, PERM, PERM, PERM, PERM],
    ),
    (
        "open its memory to write",
        [ACCESS, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "read a permitted file",
        [Done, ACCESS, PERM, PERM, PERM, PERM],
    ),
    (
        "write a read-only file",
        [ACCESS, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "write a permitted file",
        [Done, PERM, PERM, PERM, PERM, PERM],
    ),
    ("make a lock file", [Done, PERM, PERM, PERM, PERM, PERM]),
    (
        "make a file elsewhere",
        [ACCESS, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "link a file without a name",
        [Done, PERM, PERM, PERM, PERM, PERM],
    ),
    ("make a folder", [Done, PERM, PERM, PERM, PERM, PERM]),
    (
        "make a folder elsewhere",
        [ACCESS, PERM, PERM, PERM, PERM, PERM],
    ),
    ("keep a file", [Done, PERM, PERM, PERM, PERM, PERM]),
    (
        "cut off a permitted file",
        [ACCESS, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "remove a permitted file",
        [Done, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "remove a foreign file",
        [ACCESS, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "lock and unlock a disk",
        [Done, PERM, PERM, PERM, Done, PERM],
    ),
    ("execute a program", [Killed; 6]),
    (
        "start a process",
        [Killed, Killed, PERM, Killed, PERM, PERM],
    ),
    ("trace the parent", [Killed; 6]),
    #[cfg(target_arch = "x86_64")]
    ("call by a number of x32", [Killed; 6]),
    ("read the parent's memory", [Killed; 6]),
    ("signal the parent", [PERM; 6]),
    ("limit the parent", [PERM; 6]),
    ("move the parent", [PERM; 6]),
    ("open a TCP socket", [ACCESS, PERM, PERM, PERM, PERM, PERM]),
    ("open a unix socket", [Done, PERM, PERM, PERM, PERM, Done]),
    ("connect over TCP", [Done, PERM, PERM, PERM, PERM, Done]),
    ("map executable memory", [PERM; 6]),
    ("become another user", [PERM; 6]),
    // Only root has it to begin with.
    ("use root's rights", [Done, PERM, PERM, PERM, PERM, PERM]),
    ("set up a ring", [Done, Done, PERM, PERM, PERM, PERM]),
    ("start a thread", [Done, Done, PERM, Done, PERM, PERM]),
    ("map memory", [Done; 6]),
    ("write to the service manager", [LOST; 6]),
    // The main thread asks name servers.
    (
        "order the service manager",
        [Done, PERM, PERM, PERM, PERM, PERM],
    ),
    (
        "pass the service manager a descriptor",
        [Done, Done, PERM, PERM, PERM, PERM],
    ),
    ("panic", [Done; 6]),
];

const NODE: [Role; 6] = [
    Role::Node,
    Role::Session,
    Role::Worker,
    Role::Offload,
    Role::Disk,
    Role::Dial,
];

/// The attempts on a thread of a library whose calls are in no list.
const LIBRARY_TABLE: &[(&str, End)] = &[
    ("open a foreign file", Done),
    ("execute a program", Killed),
    ("start a process", Killed),
    ("trace the parent", Killed),
    ("read the parent's memory", Killed),
    ("connect over TCP", Done),
    ("start a thread", Done),
    ("use root's rights", PERM),
];

/// The files of the attempts.
struct Files(PathBuf);

impl Files {
    fn make(folder: &Path) -> Files {
        for name in ["read", "write", "sockets", "remove", "kept", "foreign"] {
            std::fs::create_dir(folder.join(name)).unwrap();
            std::fs::write(folder.join(name).join("file"), "x").unwrap();
        }
        Files(folder.to_owned())
    }

    fn file(&self, folder: &str) -> PathBuf {
        self.0.join(folder).join("file")
    }

    fn reaches(&self) -> Vec<Reach> {
        vec![
            Reach::new("/proc/self", PathAccess::Read),
            Reach::new(self.file("read"), PathAccess::Read),
            Reach::new(self.0.join("write"), PathAccess::ReadWrite),
            Reach::new(self.0.join("sockets"), PathAccess::MakeSockets),
            Reach::new(self.0.join("remove"), PathAccess::Remove),
            Reach::new(self.0.join("kept"), PathAccess::Change),
        ]
    }
}

fn process(reaches: &[Reach]) -> Result<Sandbox, cleave_sandbox::SandboxError> {
    Sandbox::process(Reaches::open(reaches)?, Keep::Nothing)
}

fn node(reaches: &[Reach]) -> Result<Sandbox, cleave_sandbox::SandboxError> {
    let served = [Reach::new("/proc/self", PathAccess::Read)];
    Sandbox::node(
        Reaches::open(reaches)?,
        Reaches::open(&served)?,
        Keep::Nothing,
    )
}

#[allow(clippy::too_many_lines)] // a table
fn try_out(attempt: &str, files: &Files) -> io::Result<()> {
    let parent = || getppid().unwrap();
    let raw = |pid: Pid| nix::unistd::Pid::from_raw(pid.as_raw_nonzero().get());
    let writing = || OpenOptions::new().write(true).to_owned();
    match attempt {
        "open a foreign file" => File::open(files.file("foreign")).map(drop),
        "open its memory to write" => writing().open("/proc/self/mem").map(drop),
        "read a permitted file" => File::open(files.file("read"))
            .and_then(|_| File::open("/proc/thread-self/schedstat"))
            .map(drop),
        "write a read-only file" => writing().open(files.file("read")).map(drop),
        "write a permitted file" => writing().open(files.file("write")).map(drop),
        "make a lock file" => File::create_new(files.0.join("sockets/new.lock")).map(drop),
        "make a file elsewhere" => File::create_new(files.0.join("remove/new")).map(drop),
        "link a file without a name" => link_unnamed(&files.0.join("write")),
        "make a folder" => std::fs::create_dir(files.0.join("kept/new")),
        "make a folder elsewhere" => std::fs::create_dir(files.0.join("write/new")),
        "keep a file" => std::fs::write(files.0.join("kept/new"), "x")
            .and_then(|()| std::fs::rename(files.0.join("kept/new"), files.file("kept"))),
        "cut off a permitted file" => File::create(files.file("write")).map(drop),
        "use root's rights" => use_roots_rights(),
        "remove a permitted file" => std::fs::remove_file(files.file("remove")),
        "remove a foreign file" => std::fs::remove_file(files.file("foreign")),
        "lock and unlock a disk" => lock_and_unlock(DISK.get().unwrap()),
        "execute a program" => Err(Command::new("/bin/true").exec()),
        "start a process" => Command::new("/bin/true").spawn().map(drop),
        "trace the parent" => Ok(nix::sys::ptrace::attach(raw(parent()))?),
        "call by a number of x32" => call_by_x32(),
        "read the parent's memory" => {
            let remote = nix::sys::uio::RemoteIoVec { base: 4096, len: 1 };
            let mut byte = [0];
            let local = &mut [io::IoSliceMut::new(&mut byte)];
            Ok(nix::sys::uio::process_vm_readv(raw(parent()), local, &[remote]).map(drop)?)
        }
        "signal the parent" => Ok(rustix::process::test_kill_process(parent())?),
        // A process that used up its CPU time is killed: such a limit is as good as a signal.
        "limit the parent" => {
            let none = Rlimit {
                current: Some(0),
                maximum: Some(0),
            };
            Ok(prlimit(Some(parent()), Resource::Core, none).map(drop)?)
        }
        "move the parent" => {
            let mut cpus = CpuSet::new();
            (0..CpuSet::MAX_CPU).for_each(|cpu| cpus.set(cpu));
            Ok(sched_setaffinity(Some(parent()), &cpus)?)
        }
        "open a TCP socket" => std::net::TcpListener::bind("127.0.0.1:0").map(drop),
        "open a unix socket" => std::os::unix::net::UnixDatagram::unbound().map(drop),
        // Nothing listens on that port.
        "connect over TCP" => match std::net::TcpStream::connect("127.0.0.1:1") {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
            other => other.map(drop),
        },
        "map executable memory" => map(libc::PROT_READ | libc::PROT_EXEC),
        // For this thread alone: libc would ask every thread of the test.
        "become another user" => Ok(rustix::thread::set_thread_uid(rustix::process::Uid::ROOT)?),
        "set up a ring" => io_uring::IoUring::new(8).map(drop),
        "start a thread" => thread::Builder::new().spawn(|| {}).map(drop),
        "wait for events" => wait_for_events(),
        "map memory" => map(libc::PROT_READ | libc::PROT_WRITE),
        "tell the control loop of a signal" => {
            let (ours, _) = PAIR.get().unwrap();
            Ok(rustix::net::send(ours, &[1], rustix::net::SendFlags::NOSIGNAL).map(drop)?)
        }
        "write to the service manager" => {
            let [ours, _] = MANAGER.get().unwrap();
            Ok(rustix::io::write(ours, b"MAINPID=1").map(drop)?)
        }
        "order the service manager" => {
            let [ours, _] = MANAGER.get().unwrap();
            ours.send_to(b"MAINPID=1", files.0.join("notify")).map(drop)
        }
        "pass the service manager a descriptor" => pass_to_manager(&files.0.join("notify")),
        "panic" => match std::panic::catch_unwind(|| panic!("as told")) {
            Ok(()) => Err(io::Error::other("it did not panic")),
            Err(_) => Ok(()),
        },
        other => panic!("unknown attempt {other}"),
    }
}

/// Takes the locks of a disk that is open, drops what is cached of it, and releases the locks.
fn lock_and_unlock(file: &File) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, fcntl};
    use rustix::fs::{Advice, FlockOperation, fadvise, flock};
    flock(file, FlockOperation::NonBlockingLockExclusive)?;
    let lock = |kind| libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 100,
        l_len: 1,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK)))?;
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock(libc::F_WRLCK)))?;
    fadvise(file, 0, None, Advice::DontNeed)?;
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_UNLCK)))?;
    Ok(flock(file, FlockOperation::Unlock)?)
}

/// Names the address of the service manager where a filter cannot see it.
fn pass_to_manager(address: &Path) -> io::Result<()> {
    use rustix::net::{SendAncillaryBuffer, SendFlags, SocketAddrUnix, sendmsg_addr};
    let [ours, _] = MANAGER.get().unwrap();
    let to = SocketAddrUnix::new(address)?;
    let bytes = [io::IoSlice::new(b"MAINPID=1")];
    let mut control = SendAncillaryBuffer::default();
    let flags = SendFlags::NOSIGNAL;
    Ok(sendmsg_addr(ours, &to, &bytes, &mut control, flags).map(drop)?)
}

/// Links a file as a snapshot is made: it has a name once it is whole.
fn link_unnamed(folder: &Path) -> io::Result<()> {
    use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, openat};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = openat(CWD, folder, flags, Mode::RUSR)?;
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let to = folder.join("linked");
    Ok(linkat(CWD, name, CWD, to, AtFlags::SYMLINK_FOLLOW)?)
}

/// Sleeps as the thread of a pool does: on an epoll that it had before.
fn wait_for_events() -> io::Result<()> {
    let watch = EPOLL.get().unwrap();
    let (socket, _) = PAIR.get().unwrap();
    epoll::add(
        watch,
        socket,
        epoll::EventData::new_u64(0),
        epoll::EventFlags::IN,
    )?;
    let none = epoll::Event {
        flags: epoll::EventFlags::empty(),
        data: epoll::EventData::new_u64(0),
    };
    Ok(epoll::wait(watch, &mut [none], Some(&Timespec::default())).map(drop)?)
}

fn call_by_x32() -> io::Result<()> {
    const X32: libc::c_long = 0x4000_0000;
    // SAFETY: getpid has no arguments and touches no memory, by whatever number it is called.
    match unsafe { libc::syscall(X32 | libc::SYS_getpid) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Succeeds if CAP_CHOWN and CAP_DAC_OVERRIDE are all that this thread has.
fn use_roots_rights() -> io::Result<()> {
    use rustix::thread::CapabilitySet;
    let opening = CapabilitySet::CHOWN | CapabilitySet::DAC_OVERRIDE;
    match rustix::thread::capabilities(None)?.effective == opening {
        true => Ok(()),
        false => Err(Errno::PERM.into()),
    }
}

fn map(protection: i32) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let mapped = MmapRegion::<()>::build(None, 1 << 20, protection, flags);
    mapped.map(drop).map_err(|error| match error {
        vm_memory::mmap::MmapRegionError::Mmap(error) => error,
        other => io::Error::other(other.to_string()),
    })
}

/// Confines the process of its own, and makes the attempt on a thread of the role, which was started as the daemon does it.
fn attempt_here(words: &str) -> ! {
    let mut words = words.split('|');
    let mut word = || words.next().unwrap().to_owned();
    let (kind, role, attempt, files) = (word(), word(), word(), Files(word().into()));
    if kind == "library" {
        cleave_sandbox::confine_library(false).unwrap();
        end_with(try_out(&attempt, &files))
    }
    let roles = match kind.as_str() {
        "node" => &NODE[..],
        "pool" => &[Role::Pool],
        _ => &SERVE,
    };
    let role = roles[role.parse::<usize>().unwrap()];
    PAIR.set(UnixStream::pair().unwrap()).unwrap();
    DISK.set(File::open(files.file("foreign")).unwrap())
        .unwrap();
    let [ours, theirs] = [
        UnixDatagram::unbound(),
        UnixDatagram::bind(files.0.join("notify")),
    ];
    MANAGER.set([ours.unwrap(), theirs.unwrap()]).unwrap();
    EPOLL
        .set(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap())
        .unwrap();
    // A log thread, and in `serve` one that connects, start before the process is confined.
    let (order, ordered) = std::sync::mpsc::sync_channel(1);
    let early = thread::spawn(move || {
        ordered
            .recv()
            .map(|order: Box<dyn FnOnce() + Send>| order())
    });
    let confined = match kind.as_str() {
        "node" | "pool" => node(&files.reaches()),
        _ => process(&files.reaches()),
    };
    let sandbox = std::sync::Arc::new(confined.unwrap());
    assert!(sandbox.missing().is_empty(), "{:?}", sandbox.missing());
    let last = sandbox.clone();
    let end = move || end_with(try_out(&attempt, &files));
    let narrowed = move || {
        match role {
            Role::Log => last.earlier_thread(role).unwrap(),
            Role::Dial => last.dialler().unwrap(),
            // It starts the others, and is not narrowed.
            Role::Node => {}
            _ => last.thread(role).unwrap(),
        }
        end()
    };
    match role {
        Role::Control | Role::Node => narrowed(),
        Role::Dial if kind == "node" => thread::spawn(narrowed).join().unwrap(),
        Role::Log | Role::Dial => {
            order.send(Box::new(narrowed)).unwrap();
            early.join().unwrap().unwrap();
        }
        Role::Session | Role::Disk | Role::Pool => thread::spawn(narrowed).join().unwrap(),
        Role::Worker | Role::Offload => {
            let session = move || {
                sandbox.thread(Role::Session).unwrap();
                thread::spawn(narrowed).join().unwrap()
            };
            thread::spawn(session).join().unwrap()
        }
    }
    unreachable!("the attempt ends the process")
}

fn end_with(tried: io::Result<()>) -> ! {
    match tried {
        Ok(()) => exit(0),
        Err(error) => exit(error.raw_os_error().unwrap_or(255)),
    }
}

/// Runs this program again, with that test alone.
fn run(test: &str, words: &str) -> (ExitStatus, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]);
    command.env(VARIABLE, words).stdin(Stdio::null());
    let output = command.output().unwrap();
    (
        output.status,
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

fn end_of(status: ExitStatus) -> Option<End> {
    const SIGSYS: i32 = libc::SIGSYS;
    match (status.code(), status.signal()) {
        (Some(0), _) => Some(Done),
        // 101 is the code of a test that has failed.
        (Some(code @ (1..=100 | 102..=133)), _) => {
            Some(End::Refused(Errno::from_raw_os_error(code)))
        }
        (_, Some(SIGSYS)) => Some(Killed),
        _ => None,
    }
}

/// Makes all attempts of a table that `test` is about.
fn check<const ROLES: usize>(
    test: &str,
    kind: &str,
    roles: [Role; ROLES],
    table: &[(&str, [End; ROLES])],
) {
    if let Ok(words) = std::env::var(VARIABLE) {
        attempt_here(&words);
    }
    let mut faults = Vec::new();
    for (attempt, ends) in table {
        for (place, (role, expected)) in roles.into_iter().zip(ends).enumerate() {
            let folder = tempfile::tempdir().unwrap();
            let files = Files::make(folder.path());
            let words = format!("{kind}|{place}|{attempt}|{}", files.0.display());
            let (status, errors) = run(test, &words);
            if end_of(status) != Some(*expected) {
                faults.push(format!(
                    "{role:?}: {attempt}: {status}, not {expected:?}: {errors}"
                ));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_thread_of_a_library_is_refused_what_only_an_exploit_needs() {
    let name = "a_thread_of_a_library_is_refused_what_only_an_exploit_needs";
    let rows = LIBRARY_TABLE.iter().map(|&(attempt, end)| (attempt, [end]));
    check(name, "library", [Role::Control], &rows.collect::<Vec<_>>());
}

#[test]
fn each_thread_is_refused_what_it_does_not_need() {
    let name = "each_thread_is_refused_what_it_does_not_need";
    check(name, "serve", SERVE, TABLE);
}

#[test]
fn each_thread_of_a_node_is_refused_what_it_does_not_need() {
    let name = "each_thread_of_a_node_is_refused_what_it_does_not_need";
    let is_root = rustix::process::geteuid().is_root();
    let rows = NODE_TABLE.iter();
    let rows = rows.filter(|(attempt, _)| is_root || *attempt != "use root's rights");
    check(name, "node", NODE, &rows.copied().collect::<Vec<_>>());
}

#[test]
fn a_thread_of_a_pool_is_refused_what_a_worker_of_a_node_is() {
    let name = "a_thread_of_a_pool_is_refused_what_a_worker_of_a_node_is";
    let as_worker = |&(attempt, [_, _, worker, ..]): &(_, [End; 6])| (attempt, [worker]);
    let mut rows: Vec<_> = NODE_TABLE.iter().map(as_worker).collect();
    rows.push(("wait for events", [Done]));
    check(name, "pool", [Role::Pool], &rows);
}

/// Installs the filter of a container, or an old kernel, which answers like this.
fn lack(numbers: &[i64], errno: i32) {
    use seccompiler::{SeccompAction, SeccompFilter, apply_filter};
    let rules = numbers.iter().map(|number| (*number, Vec::new())).collect();
    let errno = SeccompAction::Errno(errno.unsigned_abs());
    let architecture = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, errno, architecture).unwrap();
    let program: seccompiler::BpfProgram = filter.try_into().unwrap();
    apply_filter(&program).unwrap();
}

#[test]
fn a_kernel_that_lacks_a_layer_is_named_and_the_rest_is_enforced() {
    const NAME: &str = "a_kernel_that_lacks_a_layer_is_named_and_the_rest_is_enforced";
    let landlock = [libc::SYS_landlock_create_ruleset];
    match std::env::var(VARIABLE).as_deref() {
        Ok("landlock") => {
            lack(&landlock, libc::ENOSYS);
            let sandbox = process(&[Reach::new("/proc/self", PathAccess::Read)]).unwrap();
            assert_eq!(
                sandbox.missing(),
                [Missing::Layer(
                    "Landlock: access to files is not confined".to_owned()
                )]
            );
            assert!(File::open("/etc/passwd").is_ok());
            sandbox.thread(Role::Worker).unwrap();
            let refused = File::open("/etc/passwd").unwrap_err();
            exit(refused.raw_os_error().unwrap());
        }
        Ok("seccomp") => {
            lack(&[libc::SYS_seccomp], libc::EINVAL);
            let sandbox = process(&[]).unwrap();
            assert_eq!(
                sandbox.missing(),
                [Missing::Layer(
                    "seccomp filters: system calls are not confined".to_owned()
                )]
            );
            sandbox.thread(Role::Worker).unwrap();
            let refused = File::open("/etc/passwd").unwrap_err();
            exit(refused.raw_os_error().unwrap());
        }
        _ => {
            for (lacking, left) in [("landlock", PERM), ("seccomp", ACCESS)] {
                let (status, errors) = run(NAME, lacking);
                assert_eq!(end_of(status), Some(left), "{lacking}: {errors}");
            }
        }
    }
}

#[test]
fn a_path_that_is_not_there_is_an_error_that_names_it() {
    const NAME: &str = "a_path_that_is_not_there_is_an_error_that_names_it";
    if std::env::var(VARIABLE).is_ok() {
        let refused = process(&[Reach::new("/no/such/folder", PathAccess::Remove)]);
        let line = refused.unwrap_err().to_string();
        exit(i32::from(!line.contains("/no/such/folder: No such file")));
    }
    let (status, errors) = run(NAME, "path");
    assert_eq!(end_of(status), Some(Done), "{errors}");
}
