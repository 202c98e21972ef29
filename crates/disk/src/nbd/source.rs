//! An NBD disk that is open: what its server promised, connections that nobody uses now, and the thread that makes new ones.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::io::Errno;

use super::dial::{Call, NbdError, Target, resolve, wait};
use super::handshake::{Export, negotiate};
use super::{NbdSpec, wire};

/// Longest time for connecting and negotiating.
const DIAL_TIME: Duration = Duration::from_secs(10);
/// The same for the second and further connections of a disk that is being opened.
const MORE_TIME: Duration = Duration::from_secs(2);
/// Pause after a failed attempt, or one that was of no use; it doubles up to the second one.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How often a server that stays away is reported.
const REPORT_EVERY: Duration = Duration::from_secs(60);
/// Most connections that wait for a use.
const SPARES_MAX: usize = 256;

/// A connection whose negotiation is over.
#[derive(Debug)]
pub struct Link {
    /// Blocking, so that an io_uring waits on it.
    pub socket: OwnedFd,
    /// The server's promises on this connection.
    pub export: Export,
}

/// An opened NBD disk. Its thread ends when it and its ports are dropped.
#[derive(Debug)]
pub struct Nbd {
    shared: Arc<Shared>,
    orders: Sender<Order>,
}

/// How the connections are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NbdState {
    /// Connections that stores use now.
    pub connected: u64,
    /// Connections that stores wait for.
    pub waiting: u64,
    /// Connections that were lost.
    pub lost: u64,
    /// Connections made in place of lost ones.
    pub reconnects: u64,
    /// Requests that wait for a connection.
    pub held: u64,
    /// Bytes that went to the server, heads included; without the negotiation.
    pub sent_bytes: u64,
    /// The same from it.
    pub received_bytes: u64,
}

#[derive(Debug)]
struct Shared {
    spec: NbdSpec,
    name: String,
    targets: Vec<Target>,
    export: Export,
    /// Of each store.
    connections: u16,
    workers_max: u16,
    is_read_only: bool,
    opened_at: Instant,
    /// No store gets a connection any more.
    is_abandoned: AtomicBool,
    size_bytes: AtomicU64,
    /// Written when the size has changed.
    changed: OwnedFd,
    spares: Mutex<Vec<Link>>,
    connected: AtomicU64,
    waiting: AtomicU64,
    lost: AtomicU64,
    reconnects: AtomicU64,
    /// Eventfds of ports that are gone, for those to come: a thread that serves a guest can make none.
    bells: Mutex<Vec<Arc<OwnedFd>>>,
    traffic: Mutex<Ledger>,
}

/// The counts of all ports.
#[derive(Debug, Default)]
struct Ledger {
    /// By ports that are gone.
    past: [u64; 2],
    ports: Vec<Arc<Traffic>>,
}

/// The bytes that one port moved, and the requests that wait at it. Only its own thread writes here, so that workers do not share a cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
    held: AtomicU64,
}

impl Traffic {
    fn read(&self) -> [u64; 3] {
        [&self.sent, &self.received, &self.held].map(|counter| counter.load(Ordering::Relaxed))
    }
}

enum Order {
    /// Make a connection for this port.
    Dial(Weak<Mailbox>, Want),
    /// Run this on the dialler's thread.
    Run(Box<dyn FnOnce() + Send>),
}

/// Why a connection is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Want {
    First,
    /// In place of one that was lost.
    Next,
    /// In place of one on which the server answered nothing.
    Better,
}

/// The place of one connection of a store. Used on the store's thread, which it never blocks.
#[derive(Debug)]
pub struct Port {
    mailbox: Arc<Mailbox>,
    shared: Arc<Shared>,
    orders: Sender<Order>,
    holding: Holding,
    traffic: Arc<Traffic>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holding {
    Nothing,
    /// `again`: it had one, and lost it.
    Waits {
        again: bool,
    },
    Connection,
}

#[derive(Debug)]
struct Mailbox {
    link: Mutex<Option<Link>>,
    bell: Arc<OwnedFd>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn new_bell() -> Result<OwnedFd, NbdError> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// A full counter signals as well.
fn ring(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

impl Nbd {
    /// Connects and negotiates, which blocks for at most ten seconds after the name has been looked up, and two more if the
    /// server does not let in as many connections as `workers` need.
    pub(crate) fn open(
        spec: &NbdSpec,
        name: &str,
        is_read_only: bool,
        workers: u16,
    ) -> Result<Nbd, NbdError> {
        let targets = resolve(&spec.address)?;
        let link = dial(&targets, &spec.export, DIAL_TIME)?;
        let mut export = link.export;
        let mut links = vec![link];
        let wanted = wanted(spec, &export, workers);
        // A server may promise CAN_MULTI_CONN and let in only a few (qemu-nbd --shared=2). A worker without a connection could
        // do nothing, so there are only as many workers as there are connections for now.
        while links.len() < wanted {
            let link = dial(&targets, &spec.export, MORE_TIME);
            match link.and_then(|link| fit(&export, link, is_read_only)) {
                Ok(link) => links.push(link),
                Err(error) => {
                    let count = links.len();
                    tracing::warn!(
                        "{name}: connections to the server: {count} instead of {wanted}, because the next one failed: {error}"
                    );
                    break;
                }
            }
        }
        let connections = spec.connections.min(links.len() as u16);
        let workers_max = links.len() as u16 / connections.max(1);
        if links.len() == 1 {
            // There never are more, so a later connection need not promise it.
            export.flags &= !wire::export::CAN_MULTI_CONN;
        }
        let bells = links.iter().map(|_| new_bell().map(Arc::new));
        let bells = bells.collect::<Result<_, _>>()?;
        let shared = Arc::new(Shared {
            spec: spec.clone(),
            name: name.to_owned(),
            targets,
            export,
            is_read_only,
            opened_at: Instant::now(),
            is_abandoned: AtomicBool::new(false),
            size_bytes: AtomicU64::new(export.size_bytes),
            changed: new_bell()?,
            connections,
            workers_max,
            spares: Mutex::new(links),
            connected: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            reconnects: AtomicU64::new(0),
            bells: Mutex::new(bells),
            traffic: Mutex::default(),
        });
        let (orders, inbox) = channel();
        let dialler = Dialler {
            shared: Arc::clone(&shared),
            wanted: VecDeque::new(),
            pause: Duration::ZERO,
            next_at: None,
            made_at: None,
            reported: None,
        };
        let thread = thread::Builder::new().name("cleave-nbd".to_owned());
        thread.spawn(move || dialler.run(&inbox))?;
        Ok(Nbd { shared, orders })
    }

    /// The server's promises when the disk was opened. Later connections are refused if they promise less.
    pub fn export(&self) -> &Export {
        &self.shared.export
    }

    /// How it was named.
    pub fn spec(&self) -> &NbdSpec {
        &self.shared.spec
    }

    /// The size that the server named last.
    pub fn size_bytes(&self) -> u64 {
        self.shared.size_bytes.load(Ordering::Relaxed)
    }

    /// Whether its connections are TCP's.
    pub fn is_tcp(&self) -> bool {
        matches!(self.shared.spec.address, super::Address::Tcp(..))
    }

    /// An eventfd that is written when the size has changed.
    pub fn size_changed(&self) -> BorrowedFd<'_> {
        self.shared.changed.as_fd()
    }

    /// Most workers: those for which there are connections. A flush on one connection covers the others only where the server
    /// promises that, so without the promise it is one.
    pub fn workers_max(&self) -> u16 {
        self.shared.workers_max
    }

    /// Connections of each store.
    pub fn connections(&self) -> u16 {
        self.shared.connections
    }

    /// How its connections are.
    pub fn state(&self) -> NbdState {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let ledger = lock(&self.shared.traffic);
        let [mut sent_bytes, mut received_bytes] = ledger.past;
        let mut held = 0;
        for [sent, received, waiting] in ledger.ports.iter().map(|port| port.read()) {
            sent_bytes += sent;
            received_bytes += received;
            held += waiting;
        }
        drop(ledger);
        NbdState {
            connected: read(&self.shared.connected),
            waiting: read(&self.shared.waiting),
            lost: read(&self.shared.lost),
            reconnects: read(&self.shared.reconnects),
            held,
            sent_bytes,
            received_bytes,
        }
    }

    /// Makes the place of a connection.
    pub fn port(&self) -> Result<Port, NbdError> {
        let bell = lock(&self.shared.bells).pop();
        let bell = bell.map_or_else(|| new_bell().map(Arc::new), Ok)?;
        let traffic = Arc::new(Traffic::default());
        lock(&self.shared.traffic).ports.push(traffic.clone());
        Ok(Port {
            mailbox: Arc::new(Mailbox {
                link: Mutex::new(None),
                bell,
            }),
            traffic,
            shared: Arc::clone(&self.shared),
            orders: self.orders.clone(),
            holding: Holding::Nothing,
        })
    }

    /// Has the server flush, through a connection that nobody uses: while a store has them all, only that can. The inner result is
    /// the server's.
    pub(crate) fn sync_at_rest(&self) -> io::Result<io::Result<()>> {
        if !self.shared.export.has(wire::export::FLUSH) {
            return Ok(Ok(()));
        }
        let deadline = Instant::now() + self.shared.spec.timeout;
        loop {
            let spare = lock(&self.shared.spares).pop();
            let is_new = spare.is_none();
            let link = spare.map_or_else(|| self.new_link(deadline), Ok)?;
            match flush(&link, deadline) {
                Ok(flushed) => {
                    keep(&self.shared, link);
                    return Ok(flushed);
                }
                Err(error) if is_new => return Err(error),
                // It was lost while nobody used it.
                Err(_) => {}
            }
        }
    }

    /// Waits for the dialler to make a connection.
    fn new_link(&self, deadline: Instant) -> io::Result<Link> {
        let mut port = self.port().map_err(io::Error::other)?;
        port.request();
        loop {
            wait(&port.mailbox.bell, PollFlags::IN, deadline).map_err(io::Error::other)?;
            // A bell may ring late for its last port.
            if let Some(link) = port.take() {
                return Ok(link);
            }
        }
    }

    /// When the server has applied what a daemon sent that was killed before this disk was opened. Nothing tells when the server
    /// ended that daemon's connections, so it is the time of the fence.
    pub(crate) fn settled_at(&self) -> Option<Instant> {
        let shared = &self.shared;
        (!shared.is_read_only).then(|| shared.opened_at + shared.spec.fence)
    }

    /// Has nothing more sent, and tells the stores that wait for a connection.
    pub(crate) fn abandon(&self) {
        self.shared.is_abandoned.store(true, Ordering::SeqCst);
        self.on_dialler(|| {});
    }

    /// Whether nothing more is to be sent.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.shared.is_abandoned.load(Ordering::SeqCst)
    }

    /// Runs something on the thread that connects, which then can be confined.
    pub fn on_dialler(&self, run: impl FnOnce() + Send + 'static) {
        let _ = self.orders.send(Order::Run(Box::new(run)));
    }
}

impl Port {
    /// Asks for a connection. The bell rings when there is one, or when the disk is given up; the attempts do not end before.
    pub fn request(&mut self) {
        if self.holding == Holding::Nothing {
            self.wait(Want::First);
        }
    }

    /// The connection is lost, and another one is wanted. `was_used`: the server answered a request on it.
    pub fn replace(&mut self, was_used: bool) {
        if self.holding == Holding::Connection {
            self.shared.connected.fetch_sub(1, Ordering::Relaxed);
            self.wait(if was_used { Want::Next } else { Want::Better });
        }
    }

    fn wait(&mut self, want: Want) {
        let again = want != Want::First;
        self.holding = Holding::Waits { again };
        self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::downgrade(&self.mailbox);
        let _ = self.orders.send(Order::Dial(mailbox, want));
    }

    /// Counts and logs that the connection was lost.
    pub fn lost(&self, why: &str) {
        self.shared.lost.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(
            "{}: the connection to the NBD server is lost ({why}); its requests wait for a new one",
            self.shared.name
        );
    }

    /// Counts bytes that went to the server.
    #[inline]
    pub fn count_sent(&self, bytes: u64) {
        bump(&self.traffic.sent, bytes);
    }

    /// Counts bytes that came from it.
    #[inline]
    pub fn count_received(&self, bytes: u64) {
        bump(&self.traffic.received, bytes);
    }

    /// Says how many requests wait for a connection.
    #[inline]
    pub fn set_held(&self, requests: usize) {
        self.traffic.held.store(requests as u64, Ordering::Relaxed);
    }

    /// Takes the connection that was made.
    pub fn take(&mut self) -> Option<Link> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.mailbox.bell, &mut count);
        let link = lock(&self.mailbox.link).take()?;
        let Holding::Waits { again } = self.holding else {
            return None;
        };
        if self.is_abandoned() {
            return None;
        }
        self.holding = Holding::Connection;
        self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
        self.shared.connected.fetch_add(1, Ordering::Relaxed);
        if again {
            self.shared.reconnects.fetch_add(1, Ordering::Relaxed);
            tracing::info!("{}: connected to the NBD server again", self.shared.name);
        }
        Some(link)
    }

    /// The disk is given up: no connection comes any more, and nothing is to be sent.
    #[inline]
    pub fn is_abandoned(&self) -> bool {
        self.shared.is_abandoned.load(Ordering::SeqCst)
    }

    /// Returns a connection on which nothing is in flight, for the next store.
    pub fn give_back(&mut self, link: Link) {
        keep(&self.shared, link);
    }

    /// Readable when `take` may find a connection, or the disk is given up.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.mailbox.bell.as_fd()
    }

    /// Rings the bell, to end a watch of it.
    pub fn wake(&self) {
        ring(&self.mailbox.bell);
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        match self.holding {
            Holding::Nothing => {}
            Holding::Waits { .. } => {
                self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
            }
            Holding::Connection => {
                self.shared.connected.fetch_sub(1, Ordering::Relaxed);
            }
        }
        if let Some(link) = lock(&self.mailbox.link).take() {
            keep(&self.shared, link);
        }
        // If the dialler still rings it, its next user finds nothing.
        lock(&self.shared.bells).push(self.mailbox.bell.clone());
        let mut ledger = lock(&self.shared.traffic);
        let [sent, received, _] = self.traffic.read();
        ledger.past[0] += sent;
        ledger.past[1] += received;
        ledger
            .ports
            .retain(|port| !Arc::ptr_eq(port, &self.traffic));
    }
}

/// Adds to a counter that no other thread writes.
#[inline]
fn bump(counter: &AtomicU64, count: u64) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(count);
    counter.store(sum, Ordering::Relaxed);
}

/// Sends a flush and waits for its answer, on a connection on which nothing else is under way.
fn flush(link: &Link, deadline: Instant) -> io::Result<io::Result<()>> {
    const COOKIE: u64 = 0;
    let strange = || io::Error::from(io::ErrorKind::InvalidData);
    let mut request = wire::REQUEST.to_be_bytes().to_vec();
    request.extend(0_u16.to_be_bytes());
    request.extend(wire::request::FLUSH.to_be_bytes());
    request.extend(COOKIE.to_be_bytes());
    request.extend([0; 12]);
    // Nothing else waits in the socket, so it takes this at once.
    if rustix::io::write(&link.socket, &request)? != request.len() {
        return Err(strange());
    }
    let [magic, error] = [array(link, deadline)?, array(link, deadline)?].map(u32::from_be_bytes);
    let cookie = u64::from_be_bytes(array(link, deadline)?);
    // In a chunk, flags and type are where a simple reply has the error.
    let (flags, kind) = ((error >> 16) as u16, error as u16);
    let error = match magic {
        wire::SIMPLE_REPLY => error,
        wire::STRUCTURED_REPLY if flags & wire::chunk::DONE != 0 => {
            let len = u32::from_be_bytes(array(link, deadline)?) as usize;
            match kind {
                wire::chunk::NONE if len == 0 => 0,
                _ if kind & wire::chunk::ERROR != 0 && (6..=wire::TEXT_MAX + 14).contains(&len) => {
                    let error = u32::from_be_bytes(array(link, deadline)?);
                    read(link, &mut vec![0; len - 4], deadline)?;
                    error.max(1)
                }
                _ => return Err(strange()),
            }
        }
        _ => return Err(strange()),
    };
    match (cookie, error) {
        (COOKIE, 0) => Ok(Ok(())),
        // It did nothing, and so nothing failed.
        (COOKIE, wire::SHUTS_DOWN) => Err(Errno::SHUTDOWN.into()),
        (COOKIE, _) => Ok(Err(Errno::IO.into())),
        _ => Err(strange()),
    }
}

fn array<const N: usize>(link: &Link, deadline: Instant) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    read(link, &mut bytes, deadline)?;
    Ok(bytes)
}

/// Reads exactly so many bytes. With `read`, because the thread that flushes may not use `recv`.
fn read(link: &Link, bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        wait(&link.socket, PollFlags::IN, deadline).map_err(io::Error::other)?;
        match rustix::io::read(&link.socket, rest)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => filled += count,
        }
    }
    Ok(())
}

fn keep(shared: &Shared, link: Link) {
    let mut spares = lock(&shared.spares);
    if spares.len() < SPARES_MAX {
        spares.push(link);
    }
}

/// The connections of a disk with so many workers.
fn wanted(spec: &NbdSpec, export: &Export, workers: u16) -> usize {
    match export.has(wire::export::CAN_MULTI_CONN) {
        true => usize::from(spec.connections) * usize::from(workers.max(1)),
        false => 1,
    }
    .min(SPARES_MAX)
}

fn dial(targets: &[Target], export: &str, time: Duration) -> Result<Link, NbdError> {
    let mut call = Call::place(targets, Instant::now() + time)?;
    let export = negotiate(&mut call, export)?;
    Ok(Link {
        socket: call.into_socket()?,
        export,
    })
}

/// Refuses a connection whose server promises less than on the first one, which the guest was told of.
fn fit(first: &Export, link: Link, is_read_only: bool) -> Result<Link, NbdError> {
    let now = &link.export;
    let lacks = |flag| first.has(flag) && !now.has(flag);
    let unfit = |why: &str| Err(NbdError::Unfit(format!("the export has changed: {why}")));
    if now.has(wire::export::READ_ONLY) && !first.has(wire::export::READ_ONLY) && !is_read_only {
        return unfit("it is read-only now");
    }
    if lacks(wire::export::CAN_MULTI_CONN) {
        return unfit("it permits one connection only now");
    }
    if lacks(wire::export::FLUSH) {
        return unfit("it cannot flush now");
    }
    if now.block_min > first.block_min.max(512) {
        return unfit("its smallest block is larger now");
    }
    Ok(link)
}

/// The thread that makes connections, one at a time: all go to the same server.
struct Dialler {
    shared: Arc<Shared>,
    wanted: VecDeque<Weak<Mailbox>>,
    pause: Duration,
    /// Not before this, because the last attempt failed, or brought a connection that was of no use.
    next_at: Option<Instant>,
    /// When the last connection was made.
    made_at: Option<Instant>,
    reported: Option<Instant>,
}

impl Dialler {
    fn run(mut self, inbox: &Receiver<Order>) {
        loop {
            let now = Instant::now();
            let left = self
                .next_at
                .map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
            let order = match self.wanted.is_empty() {
                true => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => inbox.recv_timeout(left),
            };
            match order {
                Ok(Order::Dial(mailbox, want)) => {
                    if want != Want::First {
                        // Most likely lost with it.
                        lock(&self.shared.spares).clear();
                    }
                    self.wanted.push_back(mailbox);
                    self.slow_down(want);
                }
                Ok(Order::Run(run)) => run(),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.serve();
        }
    }

    /// Makes a connection for the first port that still wants one, if the time has come.
    fn serve(&mut self) {
        if self.shared.is_abandoned.load(Ordering::SeqCst) {
            let waiting = self.wanted.drain(..);
            let waiting = waiting.filter_map(|mailbox| mailbox.upgrade());
            return waiting.for_each(|mailbox| ring(&mailbox.bell));
        }
        self.wanted.retain(|mailbox| mailbox.strong_count() > 0);
        let is_early = self.is_early();
        let Some(mailbox) = self.wanted.front().filter(|_| !is_early).cloned() else {
            return;
        };
        let spare = lock(&self.shared.spares).pop();
        let made = match spare {
            Some(link) => Ok(link),
            None => dial(&self.shared.targets, &self.shared.spec.export, DIAL_TIME)
                .and_then(|link| self.accept(link)),
        };
        match made {
            Ok(link) => {
                self.wanted.pop_front();
                (self.next_at, self.reported) = (None, None);
                self.made_at = Some(Instant::now());
                match mailbox.upgrade() {
                    Some(mailbox) => {
                        *lock(&mailbox.link) = Some(link);
                        ring(&mailbox.bell);
                    }
                    None => keep(&self.shared, link),
                }
            }
            Err(error) => {
                self.report(&error);
                self.pause_longer();
            }
        }
    }

    /// A server that lets us in and then hangs up must not keep us busy, nor fill the log.
    fn slow_down(&mut self, want: Want) {
        // One that nobody used for a while may be lost like any other.
        let is_short = self.made_at.is_some_and(|at| at.elapsed() < PAUSE_MAX);
        if want == Want::Better && is_short {
            // A pause that has begun is for all connections that are lost together.
            if !self.is_early() {
                self.pause_longer();
            }
            return;
        }
        if self.next_at.is_none() {
            self.pause = Duration::ZERO;
            let made_at = self.made_at.filter(|_| want != Want::First);
            self.next_at = made_at.map(|at| at + PAUSE_FIRST);
        }
    }

    fn is_early(&self) -> bool {
        self.next_at.is_some_and(|at| Instant::now() < at)
    }

    fn pause_longer(&mut self) {
        self.pause = (self.pause * 2).clamp(PAUSE_FIRST, PAUSE_MAX);
        self.next_at = Some(Instant::now() + self.pause);
    }

    /// Takes a connection, unless it promises too little, and notes a new size.
    fn accept(&self, link: Link) -> Result<Link, NbdError> {
        let link = fit(&self.shared.export, link, self.shared.is_read_only)?;
        let size = link.export.size_bytes;
        if self.shared.size_bytes.swap(size, Ordering::Relaxed) != size {
            ring(&self.shared.changed);
        }
        Ok(link)
    }

    fn report(&mut self, error: &NbdError) {
        let is_due = self.reported.is_none_or(|at| at.elapsed() >= REPORT_EVERY);
        if is_due {
            self.reported = Some(Instant::now());
            tracing::warn!(
                "{}: cannot connect to the NBD server: {error}; trying again",
                self.shared.name
            );
        }
    }
}
