use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use cleave_config::Storage;
use rustix::fs::{FlockOperation, flock};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::knock::knock;
use super::*;

fn refused(path: &Path) -> String {
    listen(path, None, Knocking::AsItIs)
        .unwrap_err()
        .to_string()
}

#[test]
fn a_stale_socket_is_replaced_and_ours_goes_away_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    drop(UnixListener::bind(&path).unwrap());
    let door = listen(&path, None, Knocking::AsItIs).unwrap();
    UnixStream::connect(&path).unwrap();
    drop(door);
    assert!(!path.exists());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// A user that may write to the folder may put another file there before root gives the socket away.
#[test]
fn no_file_is_given_away_in_the_place_of_a_socket() {
    let folder = tempfile::tempdir().unwrap();
    let [path, moved] = ["s", "moved"].map(|name| folder.path().join(name));
    let found = fs::metadata(folder.path()).unwrap();
    let door = listen(&path, None, Knocking::AsItIs).unwrap();
    let give = || door.give_to(found.uid(), found.gid());
    give().unwrap();
    fs::hard_link(&path, &moved).unwrap();
    give().unwrap_err();
    fs::remove_file(&moved).unwrap();
    give().unwrap();
    fs::rename(&path, &moved).unwrap();
    give().unwrap_err();
    fs::write(&path, "").unwrap();
    give().unwrap_err();
    // The next process finds no socket there.
    Listening::resume(&path, door.copy().unwrap()).unwrap_err();
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&moved, &path).unwrap();
    give().unwrap_err();
    Listening::resume(&path, door.copy().unwrap()).unwrap_err();
}

/// Some programs need the last byte for a zero, so they could not connect to a longer path.
#[test]
fn the_path_of_a_socket_for_a_group_is_no_longer_than_of_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("disk.sock");
    let group = fs::metadata(folder.path()).unwrap().gid();
    let padding = PATH_BYTES_MAX - taken.as_os_str().len() - 1;
    for (more, fits) in [(0, true), (1, false)] {
        let beside = folder.path().join("p".repeat(padding + more));
        fs::create_dir(&beside).unwrap();
        let made = listen_for(
            &beside.join("disk.sock"),
            0o600,
            None,
            group,
            None,
            Knocking::AsItIs,
        );
        assert_eq!(made.is_ok(), fits);
        assert!(
            fits || made
                .unwrap_err()
                .to_string()
                .contains("disk.sock has 108 bytes")
        );
    }
}

#[test]
fn a_folder_that_another_program_has_locked_is_no_hindrance() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let locked = fs::File::open(folder.path()).unwrap();
    flock(&locked, FlockOperation::LockExclusive).unwrap();
    let _door = listen(&path, None, Knocking::AsItIs).unwrap();
    UnixStream::connect(&path).unwrap();
}

/// One of several daemons that start at once at the same stale socket gets it and keeps it.
#[test]
fn one_of_many_gets_a_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    for _ in 0..20 {
        drop(UnixListener::bind(&path).unwrap());
        let doors: Vec<_> = thread::scope(|scope| {
            let start = || scope.spawn(|| open_private(&path));
            let threads: Vec<_> = (0..6).map(|_| start()).collect();
            threads.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert_eq!(doors.iter().filter(|door| door.is_ok()).count(), 1);
        UnixStream::connect(&path).unwrap();
        drop(doors);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_live_socket_is_not_stolen() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let first = listen(&path, None, Knocking::AsItIs).unwrap();
    assert!(refused(&path).contains("in use by a running program"));
    UnixStream::connect(&path).unwrap();
    drop(first);
}

/// An operator may give the socket of a daemon to the user of one VMM, and root without capabilities cannot connect to it then. Bad
/// input would be the end of the unit, and nothing is wrong with its words.
#[test]
fn a_socket_that_was_given_away_is_replaced_where_its_daemon_died() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let endpoint = Endpoint::Path(path.clone());
    // Only this thread's.
    let mut sets = capabilities(None).unwrap();
    sets.effective -= CapabilitySet::DAC_OVERRIDE;
    set_capabilities(None, sets).unwrap();
    let give_away = || {
        let listener = UnixListener::bind(&path).unwrap();
        chmod(&path, Mode::empty()).unwrap();
        listener
    };
    let of_another = |lock: Option<&PathLock>| {
        let failure = open_door(&endpoint, lock, None).unwrap_err();
        assert!(failure.to_string().contains("of another user"), "{failure}");
        assert_eq!(failure.exit_code(), ExitCode::from(1));
    };
    let listener = give_away();
    let lock = PathLock::take(&path).unwrap();
    // Nothing tells that a daemon of this path has died.
    of_another(lock.as_ref());
    of_another(None);
    let storage = Storage::One("null:1M".parse().unwrap());
    lock.as_ref().unwrap().record(&storage, false).unwrap();
    drop(listener);
    lock.unwrap().leave_to_rings();
    let lock = PathLock::take(&path).unwrap();
    // Where others may write, it can be anybody's.
    chmod(folder.path(), Mode::from_raw_mode(0o770)).unwrap();
    of_another(lock.as_ref());
    chmod(folder.path(), Mode::RWXU).unwrap();
    let _door = open_door(&endpoint, lock.as_ref(), None).unwrap();
    UnixStream::connect(&path).unwrap();
}

/// Its program is stopped, or drowns in connections.
#[test]
fn a_live_socket_whose_backlog_is_full_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let _first = open_private(&path).unwrap();
    while knock(&path).is_ok() {}
    let (tell, told) = std::sync::mpsc::channel();
    thread::spawn(move || tell.send(refused(&path)));
    let why = told.recv_timeout(Duration::from_secs(60));
    let why = why.expect("it waits for somebody to accept");
    assert!(why.contains("in use by a running program"), "{why}");
}

#[test]
fn a_socket_of_a_running_process_stays_until_it_is_ours() {
    let folder = tempfile::tempdir().unwrap();
    let settings = |name| SocketSettings {
        path: folder.path().join(name),
        group: None,
    };
    let (control, other) = (settings("s"), settings("t"));
    let mut running = open_control(&control).unwrap();
    let share = |socket| {
        let given = running.copy().unwrap();
        Listening::share(socket, Some(given), open_control).unwrap()
    };
    drop(share(&control));
    assert!(control.path.exists());
    // The running process does not have this one.
    drop(share(&other));
    assert!(control.path.exists() && !other.path.exists());
    let mut shared = share(&control);
    running.set_owner(FileOwner::Another);
    drop(running);
    UnixStream::connect(&control.path).unwrap();
    shared.set_owner(FileOwner::Us);
    drop(shared);
    assert!(!control.path.exists());
}

#[test]
fn a_socket_that_took_our_place_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let ours = listen(&path, None, Knocking::AsItIs).unwrap();
    fs::remove_file(&path).unwrap();
    let theirs = UnixListener::bind(&path).unwrap();
    drop(ours);
    assert!(path.exists());
    drop(theirs);
}

#[test]
fn what_cannot_be_a_socket_is_refused_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "kept").unwrap();
    let cases = [
        (file.clone(), "is not a socket: remove it"),
        (folder.path().to_owned(), "is not a socket: remove it"),
        (folder.path().join("none/s"), "create its folder first"),
        (folder.path().join("x".repeat(120)), "choose a shorter one"),
    ];
    for (path, part) in cases {
        let why = refused(&path);
        assert!(why.contains(part), "{}: {why}", path.display());
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn the_longest_path_that_fits_works() {
    let folder = tempfile::tempdir().unwrap();
    let room = PATH_BYTES_MAX - folder.path().as_os_str().len() - 1;
    let path = folder.path().join("y".repeat(room));
    assert_eq!(path.as_os_str().len(), PATH_BYTES_MAX);
    listen(&path, None, Knocking::AsItIs).unwrap();
    assert!(refused(&folder.path().join("y".repeat(room + 1))).contains("shorter"));
}

fn inherited(fd: &impl std::os::fd::AsRawFd) -> Result<Door, Failure> {
    inherit(u32::try_from(fd.as_raw_fd()).unwrap(), "--fd")
}

#[test]
fn an_inherited_socket_is_asked_what_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("s")).unwrap();
    let door = inherited(&listener);
    let Ok(Door::Listening(taken)) = &door else {
        panic!("{door:?}");
    };
    let flags = rustix::io::fcntl_getfd(&taken.listener).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    assert_ne!(taken.listener.as_raw_fd(), listener.as_raw_fd());
    let (ours, _theirs) = UnixStream::pair().unwrap();
    assert!(matches!(inherited(&ours), Ok(Door::Connected(_))));
    let refuse = |door: Result<Door, Failure>| door.unwrap_err().to_string();
    let file = fs::File::open("/dev/null").unwrap();
    assert!(refuse(inherited(&file)).contains("not a unix stream socket"));
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(refuse(inherited(&tcp)).contains("not a unix stream socket"));
    let datagram = std::os::unix::net::UnixDatagram::unbound().unwrap();
    assert!(refuse(inherited(&datagram)).contains("not a unix stream socket"));
    let bare = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    assert!(refuse(inherited(&bare)).contains("neither listens nor is connected"));
    // The lowest that is free would be that of whatever is opened next, also by another test.
    let is_closed = |number| {
        let door = inherit(number, "--fd");
        door.is_err_and(|failure| failure.to_string().contains("is not open"))
    };
    let next = || u32::try_from(file.try_clone().unwrap().as_raw_fd()).unwrap();
    assert!((0..100).any(|_| is_closed(next())));
    assert!(is_closed(999_999) && is_closed(u32::MAX));
}
