//! The system calls of each kind of thread.
//!
//! The lists come from traces of the whole test suite, with glibc on x86-64. Beside each group are those calls that musl, or
//! another version of glibc, makes in its place, and those of rare paths (a panic, a lack of memory). aarch64 lacks those marked
//! x86_64, and libc makes others of the list in their place; nobody has traced that.

use libc::c_long;

/// A kind of thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Accepts frontends, serves the control socket, watches the disk. It starts the session, so it keeps what that needs.
    Control,
    /// Serves one vhost-user connection. It starts the workers, so it keeps what they need while they start.
    Session,
    /// Serves vrings. Its rings exist by then: it can make no other, and can open nothing.
    Worker,
    /// Serves vrings of many disks. Their rings are made by other threads.
    Pool,
    /// Closes, queries and writes descriptors of a frontend.
    Offload,
    /// Asks for the size of the disk, makes it durable, and takes and releases its locks.
    Disk,
    /// Writes lines to stderr.
    Log,
    /// Connects to the server of a disk. It alone can make a socket and connect it.
    Dial,
    /// The control thread of a process of many disks, and the threads that open disks and make sockets for it while others
    /// are served. It keeps what the threads of the other roles need, which are started by it.
    Node,
}

impl Role {
    /// All of them.
    pub const ALL: [Role; 9] = [
        Role::Control,
        Role::Session,
        Role::Worker,
        Role::Pool,
        Role::Offload,
        Role::Disk,
        Role::Log,
        Role::Dial,
        Role::Node,
    ];

    /// Returns the groups of calls that it may make.
    pub(crate) fn groups(self) -> &'static [&'static [SystemCall]] {
        match self {
            Role::Control => &[
                BASE,
                RINGS,
                NEW_RINGS,
                START,
                DESCRIPTORS,
                FRONTEND,
                FILES,
                WATCHES,
                EVENTS,
                SYNC,
                LOCKS,
            ],
            Role::Session => &[BASE, RINGS, NEW_RINGS, START, DESCRIPTORS, FRONTEND],
            Role::Worker => &[BASE, RINGS],
            Role::Pool => &[BASE, RINGS, POOL],
            Role::Offload => &[BASE, START, DESCRIPTORS],
            Role::Disk => &[BASE, DESCRIPTORS, SYNC, LOCKS, WATCHES],
            Role::Log => &[BASE],
            Role::Dial => &[BASE, DIAL],
            Role::Node => &[
                BASE,
                RINGS,
                NEW_RINGS,
                START,
                DESCRIPTORS,
                FRONTEND,
                FILES,
                WATCHES,
                EVENTS,
                SYNC,
                LOCKS,
                NEW_DISKS,
                DIAL,
            ],
        }
    }
}

/// A system call, and which of its arguments are permitted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SystemCall {
    pub(crate) number: c_long,
    pub(crate) arguments: Arguments,
}

/// The arguments that are permitted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arguments {
    Any,
    /// Argument number `0` has none of the bits `1`.
    Without(u8, u64),
    /// Argument number `0` has all of the bits `1`.
    With(u8, u64),
    /// Argument number `0` is one of these.
    OneOf(u8, &'static [u64]),
    /// Argument number `0` is the ID of this process.
    OwnProcess(u8),
}

const fn any(number: c_long) -> SystemCall {
    SystemCall {
        number,
        arguments: Arguments::Any,
    }
}

const fn with(number: c_long, arguments: Arguments) -> SystemCall {
    SystemCall { number, arguments }
}

const PROT_EXEC: u64 = libc::PROT_EXEC as u64;

/// Memory, time, locks, open descriptors, and the end of a thread, in order or by a panic.
const BASE: &[SystemCall] = &[
    any(libc::SYS_read),
    any(libc::SYS_readv),
    any(libc::SYS_pread64),
    any(libc::SYS_write),
    any(libc::SYS_writev),
    any(libc::SYS_close),
    any(libc::SYS_futex),
    any(libc::SYS_clock_gettime),
    any(libc::SYS_clock_getres),
    any(libc::SYS_gettimeofday),
    any(libc::SYS_clock_nanosleep),
    any(libc::SYS_nanosleep),
    any(libc::SYS_restart_syscall),
    any(libc::SYS_sched_yield),
    any(libc::SYS_getcpu),
    // malloc counts CPUs.
    any(libc::SYS_sched_getaffinity),
    any(libc::SYS_getrusage),
    any(libc::SYS_getrandom),
    with(libc::SYS_mmap, Arguments::Without(2, PROT_EXEC)),
    with(libc::SYS_mprotect, Arguments::Without(2, PROT_EXEC)),
    any(libc::SYS_munmap),
    any(libc::SYS_mremap),
    any(libc::SYS_madvise),
    any(libc::SYS_brk),
    any(libc::SYS_membarrier),
    // A panic and abort(): signals go to this process only.
    any(libc::SYS_rt_sigaction),
    any(libc::SYS_rt_sigprocmask),
    any(libc::SYS_rt_sigreturn),
    // A signal handler runs on any thread, and tells the control loop through a socket. Without an address it is a write: nothing
    // reaches the service manager, whose socket is not connected.
    with(libc::SYS_sendto, Arguments::OneOf(5, NO_ADDRESS)),
    any(libc::SYS_sigaltstack),
    // Calls that cannot fail: their callers do not expect EPERM.
    any(libc::SYS_getpid),
    any(libc::SYS_getppid),
    any(libc::SYS_gettid),
    any(libc::SYS_getuid),
    any(libc::SYS_geteuid),
    any(libc::SYS_getgid),
    any(libc::SYS_getegid),
    any(libc::SYS_umask),
    // musl's raise(). It could reach other processes, so it is left out where libc does not need it.
    #[cfg(target_env = "musl")]
    any(libc::SYS_tkill),
    with(libc::SYS_tgkill, Arguments::OwnProcess(0)),
    any(libc::SYS_exit),
    any(libc::SYS_exit_group),
    // Questions about any open descriptor. They open nothing and send nothing.
    with(libc::SYS_fcntl, Arguments::OneOf(1, FCNTL)),
    any(libc::SYS_fstat),
    any(libc::SYS_ppoll),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_poll),
];

/// Length of the address.
const NO_ADDRESS: &[u64] = &[0];

/// No F_SETOWN and no F_SETSIG, by which the kernel would send signals for us.
const FCNTL: &[u64] = &[
    libc::F_GETFD as u64,
    libc::F_SETFD as u64,
    libc::F_GETFL as u64,
    libc::F_SETFL as u64,
    libc::F_DUPFD_CLOEXEC as u64,
    libc::F_GET_SEALS as u64,
    libc::F_ADD_SEALS as u64,
];

/// The rings of a worker, which exist.
const RINGS: &[SystemCall] = &[
    any(libc::SYS_io_uring_enter),
    with(libc::SYS_io_uring_register, Arguments::OneOf(1, REGISTER)),
];

/// `linux/io_uring.h`: what a worker changes about its rings. The last bit says that the ring is named by its index.
const REGISTER: &[u64] = &[
    UNREGISTER_FILES,
    FILES_UPDATE,
    RING_FDS,
    UNREGISTER_RING_FDS,
    UNREGISTER_FILES | BY_INDEX,
    FILES_UPDATE | BY_INDEX,
    RING_FDS | BY_INDEX,
    UNREGISTER_RING_FDS | BY_INDEX,
];
const UNREGISTER_FILES: u64 = 3;
const FILES_UPDATE: u64 = 6;
const RING_FDS: u64 = 20;
const UNREGISTER_RING_FDS: u64 = 21;
const BY_INDEX: u64 = 1 << 31;

/// The rings of workers, while these start.
const NEW_RINGS: &[SystemCall] = &[
    any(libc::SYS_io_uring_setup),
    any(libc::SYS_io_uring_register),
];

/// The rings of workers that are moved to a thread which runs already, and its sleep for all of them.
const POOL: &[SystemCall] = &[
    with(libc::SYS_io_uring_register, Arguments::OneOf(1, ENABLE)),
    any(libc::SYS_epoll_ctl),
    any(libc::SYS_epoll_pwait),
    any(libc::SYS_epoll_pwait2),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_epoll_wait),
    // The bell of an image of a Ceph cluster.
    any(libc::SYS_eventfd2),
];

const ENABLE: &[u64] = &[ENABLE_RINGS, ENABLE_RINGS | BY_INDEX];
const ENABLE_RINGS: u64 = 12;

/// New threads of this process, which narrow themselves further.
const START: &[SystemCall] = &[
    with(
        libc::SYS_clone,
        Arguments::With(0, libc::CLONE_THREAD as u64),
    ),
    // Its arguments lie in memory, where a filter cannot see them: it fails with ENOSYS (see `filter`), and libc uses `clone`.
    any(libc::SYS_clone3),
    any(libc::SYS_set_robust_list),
    any(libc::SYS_set_tid_address),
    any(libc::SYS_rseq),
    // Its own CPUs and limits. Another process of the same user could be killed by a limit of its CPU time.
    with(libc::SYS_sched_setaffinity, Arguments::OneOf(0, OWN)),
    with(libc::SYS_prlimit64, Arguments::OneOf(0, OWN)),
    with(libc::SYS_prctl, Arguments::OneOf(0, PRCTL)),
    // Privileges can only become fewer.
    any(libc::SYS_capget),
    any(libc::SYS_capset),
    // Filters can only be added, never removed.
    with(libc::SYS_seccomp, Arguments::OneOf(0, SECCOMP)),
];

/// The caller, by the ID that means it.
const OWN: &[u64] = &[0];
const PRCTL: &[u64] = &[
    libc::PR_SET_NAME as u64,
    libc::PR_GET_NAME as u64,
    libc::PR_SET_NO_NEW_PRIVS as u64,
    libc::PR_SET_VMA as u64,
    // A worker whose store pauses for microseconds sets how late its own timers may be.
    libc::PR_SET_TIMERSLACK as u64,
];
const SECCOMP: &[u64] = &[libc::SECCOMP_SET_MODE_FILTER as u64];

/// Makes the writes to an open file durable.
const SYNC: &[SystemCall] = &[
    any(libc::SYS_fsync),
    any(libc::SYS_fdatasync),
    with(libc::SYS_ioctl, Arguments::OneOf(1, CLONE)),
];

/// FICLONE, which is of another type in each libc.
const CLONE: &[u64] = &[0x4004_9409];

/// The locks of an open file, and the pages that this host has cached of it.
const LOCKS: &[SystemCall] = &[
    any(libc::SYS_flock),
    // QEMU's locks.
    with(libc::SYS_fcntl, Arguments::OneOf(1, OFD_LOCKS)),
    // The advice may cost time, and changes no byte.
    any(libc::SYS_fadvise64),
];

const OFD_LOCKS: &[u64] = &[libc::F_OFD_SETLK as u64, libc::F_OFD_GETLK as u64];

/// Descriptors that a frontend sent: asked what they are, read, written and closed.
const DESCRIPTORS: &[SystemCall] = &[
    // A socket of the control loop that is closed elsewhere leaves that loop.
    any(libc::SYS_epoll_ctl),
    any(libc::SYS_newfstatat),
    any(libc::SYS_statx),
    any(libc::SYS_fstatfs),
    any(libc::SYS_lseek),
    any(libc::SYS_readlinkat),
    any(libc::SYS_recvfrom),
    any(libc::SYS_recvmsg),
    any(libc::SYS_shutdown),
    any(libc::SYS_getsockopt),
    // So that the close of a socket that lingers does not wait.
    with(
        libc::SYS_setsockopt,
        Arguments::OneOf(2, &[libc::SO_LINGER as u64]),
    ),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_readlink),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_stat),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_lstat),
];

/// A connection: its eventfds, its in-flight region, and what the kernel says about its descriptors.
const FRONTEND: &[SystemCall] = &[
    // Descriptors in answers to a frontend, to the next process and to the service manager. It may name an address, which lies in
    // memory, where a filter cannot see it.
    any(libc::SYS_sendmsg),
    any(libc::SYS_eventfd2),
    any(libc::SYS_memfd_create),
    any(libc::SYS_ftruncate),
    // Between two of our own threads; no address can be given to it.
    with(libc::SYS_socketpair, Arguments::OneOf(0, UNIX)),
    any(libc::SYS_setsockopt),
    any(libc::SYS_getsockname),
    any(libc::SYS_getpeername),
    with(libc::SYS_ioctl, Arguments::OneOf(1, IOCTL)),
    // To start a worker: its thread's counters, which Landlock permits. Never for writing.
    with(libc::SYS_openat, Arguments::Without(2, OPEN_TO_CHANGE)),
    #[cfg(target_arch = "x86_64")]
    with(libc::SYS_open, Arguments::Without(1, OPEN_TO_CHANGE)),
];

const OPEN_TO_CHANGE: u64 = (libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC) as u64;
const UNIX: &[u64] = &[libc::AF_UNIX as u64];
/// FIONBIO and FIONREAD, which are of another type in each libc.
const IOCTL: &[u64] = &[0x5421, 0x541b];

/// Connecting to a server over TCP or a unix socket, talking to it, and resetting the connection when it is lost. Landlock keeps TCP from
/// listening.
const DIAL: &[SystemCall] = &[
    with(libc::SYS_socket, Arguments::OneOf(0, FAMILIES)),
    any(libc::SYS_connect),
    any(libc::SYS_getsockopt),
    any(libc::SYS_setsockopt),
    any(libc::SYS_recvfrom),
    // When one connection of a disk is lost, it ends the others.
    any(libc::SYS_shutdown),
];

const FAMILIES: &[u64] = &[
    libc::AF_UNIX as u64,
    libc::AF_INET as u64,
    libc::AF_INET6 as u64,
];

/// Files that Landlock leaves within reach.
const FILES: &[SystemCall] = &[
    any(libc::SYS_openat),
    any(libc::SYS_unlinkat),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_open),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_unlink),
];

/// Watches of files that are open.
const WATCHES: &[SystemCall] = &[
    any(libc::SYS_inotify_add_watch),
    any(libc::SYS_inotify_rm_watch),
];

/// The control loop: connections, signals and timers.
const EVENTS: &[SystemCall] = &[
    any(libc::SYS_epoll_pwait),
    any(libc::SYS_epoll_pwait2),
    any(libc::SYS_accept4),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_epoll_wait),
];

/// Disks and sockets that are opened while others are served, in the folders that Landlock leaves; and what narrows the
/// threads that serve them.
const NEW_DISKS: &[SystemCall] = &[
    // Its pools start once it is confined.
    any(libc::SYS_epoll_create1),
    any(libc::SYS_bind),
    any(libc::SYS_listen),
    // glibc asks a name server for the addresses of both families at once, and the kernel for our own.
    any(libc::SYS_sendmmsg),
    any(libc::SYS_sendto),
    any(libc::SYS_getdents64),
    any(libc::SYS_mkdirat),
    any(libc::SYS_renameat2),
    // A snapshot has a name once it is whole.
    any(libc::SYS_linkat),
    any(libc::SYS_fchmod),
    any(libc::SYS_fchmodat),
    any(libc::SYS_fchown),
    any(libc::SYS_fchownat),
    any(libc::SYS_faccessat),
    // glibc's realpath, of a path with `..` or a slash at its end.
    any(libc::SYS_faccessat2),
    any(libc::SYS_fallocate),
    any(libc::SYS_pwrite64),
    // Sizes of a block device, and of what kind a file is.
    with(libc::SYS_ioctl, Arguments::OneOf(1, PROPERTIES)),
    // Reachable files can only become fewer.
    any(libc::SYS_landlock_create_ruleset),
    any(libc::SYS_landlock_add_rule),
    any(libc::SYS_landlock_restrict_self),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_mkdir),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_rmdir),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_rename),
    any(RENAMEAT),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_chmod),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_chown),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_lchown),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_access),
];

/// Number of renameat, by which libc renames on aarch64. The crate names it there for musl alone.
#[cfg(not(target_arch = "aarch64"))]
const RENAMEAT: c_long = libc::SYS_renameat;
#[cfg(target_arch = "aarch64")]
const RENAMEAT: c_long = 38;

/// BLKSSZGET, BLKPBSZGET and BLKGETSIZE64; FS_IOC_GETFLAGS.
const PROPERTIES: &[u64] = &[0x1268, 0x127b, 0x8008_1272, 0x8008_6601];

/// Number of kexec_file_load, which the crate names on aarch64 for glibc alone.
#[cfg(not(target_arch = "aarch64"))]
const KEXEC_FILE_LOAD: c_long = libc::SYS_kexec_file_load;
#[cfg(target_arch = "aarch64")]
const KEXEC_FILE_LOAD: c_long = 294;

/// Calls that only an exploit makes. They kill the process.
pub(crate) const DEADLY: &[SystemCall] = &[
    // Other programs and processes.
    any(libc::SYS_execve),
    any(libc::SYS_execveat),
    with(
        libc::SYS_clone,
        Arguments::Without(0, libc::CLONE_THREAD as u64),
    ),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_fork),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_vfork),
    any(libc::SYS_ptrace),
    any(libc::SYS_process_vm_readv),
    any(libc::SYS_process_vm_writev),
    any(libc::SYS_pidfd_getfd),
    any(libc::SYS_kcmp),
    // The kernel.
    any(libc::SYS_init_module),
    any(libc::SYS_finit_module),
    any(libc::SYS_delete_module),
    any(libc::SYS_kexec_load),
    any(KEXEC_FILE_LOAD),
    any(libc::SYS_bpf),
    any(libc::SYS_perf_event_open),
    any(libc::SYS_userfaultfd),
    any(libc::SYS_add_key),
    any(libc::SYS_request_key),
    any(libc::SYS_keyctl),
    any(libc::SYS_reboot),
    any(libc::SYS_swapon),
    any(libc::SYS_swapoff),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_iopl),
    #[cfg(target_arch = "x86_64")]
    any(libc::SYS_ioperm),
    // The file system and namespaces.
    any(libc::SYS_mount),
    any(libc::SYS_umount2),
    any(libc::SYS_move_mount),
    any(libc::SYS_open_tree),
    any(libc::SYS_fsopen),
    any(libc::SYS_fsmount),
    any(libc::SYS_pivot_root),
    any(libc::SYS_chroot),
    any(libc::SYS_setns),
    any(libc::SYS_unshare),
    any(libc::SYS_open_by_handle_at),
    any(libc::SYS_personality),
];
