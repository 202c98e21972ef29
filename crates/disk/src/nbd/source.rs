//! An NBD disk that is open: what its server promised, and what is known of its connections.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerPidfd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::dial::{Call, NbdError, Target, resolve, wait};
use super::dialler::{Dialler, Order};
use super::fence::{Fence, Fences};
use super::handshake::{Export, negotiate};
use super::port::{Attached, Port, Store, Traffic};
use super::unflushed::Unflushed;
use super::{NbdSpec, replay, wire};

/// Longest time for connecting and negotiating.
pub(super) const DIAL_TIME: Duration = Duration::from_secs(10);
/// The same for the second and further connections of a disk.
pub(super) const MORE_TIME: Duration = Duration::from_secs(2);
/// Most connections of a disk.
const CONNECTIONS_MAX: usize = 256;
/// So many times the time-out of the disk, a server may be busy with a slow request, and with what waits for that.
pub const PATIENCE: u32 = 4;

/// A connection whose negotiation is over.
#[derive(Debug)]
pub struct Link {
    /// Blocking, so that an io_uring waits on it. Another owner only shuts it down.
    pub socket: Arc<OwnedFd>,
    /// The server's promises on this connection.
    pub export: Export,
    /// A pidfd of the server's process; `None`: it is not known, as over TCP and before Linux 6.5.
    pub server: Option<OwnedFd>,
}

impl Link {
    pub(super) fn of(call: Call, export: Export, is_unix: bool) -> Result<Link, NbdError> {
        let server = process_of(call.socket(), is_unix);
        Ok(Link {
            socket: call.into_socket()?,
            export,
            server,
        })
    }

    /// Takes leave of the server, which closes the connection. Only for a connection on which nothing is under way. Its socket then
    /// has room, unless the server answered what it did not read; that server is not told.
    pub fn part(&self) {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let _ = send(&self.socket, &wire::Request::DISCONNECT.bytes(), flags);
    }

    /// Returns false if it was lost while nobody used it.
    pub(super) fn is_alive(&self) -> bool {
        !is_ready(&self.socket)
    }
}

/// Returns a pidfd of the process that listens at the other end. `None`: it is not known.
fn process_of(socket: &OwnedFd, is_unix: bool) -> Option<OwnedFd> {
    let process = is_unix.then(|| getsockopt(socket, PeerPidfd).ok());
    // A process that has ended already only made the socket, and left it to another one that serves us: nbdkit does that when it
    // goes to the background.
    process.flatten().filter(|process| !is_ready(process))
}

/// Returns true if a descriptor can be read: a socket that has data or is closed, a process that has ended.
pub(super) fn is_ready(fd: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|count| count > 0)
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
    /// Bytes that the server answered and did not flush yet.
    pub unflushed_bytes: u64,
    /// Bytes of such changes that were sent again to a server that may have lost them.
    pub replayed_bytes: u64,
    /// Times that the server was lost while it may have lost such changes.
    pub lossy: u64,
    /// Bytes of such changes the last time.
    pub lossy_bytes: u64,
}

/// What the ports, the dialler and the disk share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) spec: NbdSpec,
    pub(super) name: String,
    pub(super) targets: Vec<Target>,
    pub(super) export: Export,
    /// Of each store.
    connections: u16,
    workers_max: u16,
    pub(super) is_read_only: bool,
    opened_at: Instant,
    /// No store gets a connection any more.
    is_abandoned: AtomicBool,
    pub(super) size_bytes: AtomicU64,
    /// Written when the size has changed, and when the server may have lost changes or was sent them again.
    pub(super) changed: OwnedFd,
    /// Connections that were made when the disk was opened, for its first stores.
    pub(super) spares: Mutex<Vec<Link>>,
    pub(super) attached: Mutex<Attached>,
    pub(super) waiting: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) reconnects: AtomicU64,
    pub(super) fences: Mutex<Fences>,
    pub(super) unflushed: Mutex<Unflushed>,
    /// What the changes will occupy there that are under way. Added to under the lock of `unflushed`.
    pub(super) reserved_bytes: AtomicU64,
    pub(super) replayed_bytes: AtomicU64,
    pub(super) lossy: AtomicU64,
    pub(super) lossy_bytes: AtomicU64,
    /// The server refused to do again what it had done, or nobody has it any more.
    has_lost_data: AtomicBool,
    /// A flush failed, or data was lost, and no flush of the guest has failed since.
    has_untold_loss: AtomicBool,
    /// Eventfds of ports that are gone, for those to come: a thread that serves a guest can make none.
    pub(super) bells: Mutex<Vec<Arc<OwnedFd>>>,
    pub(super) traffic: Mutex<Ledger>,
    /// When a lost connection, a new one, and a guest that left while its server was away were last told of.
    pub(super) told: [Mutex<Option<Instant>>; 3],
}

/// The counts of all ports.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// By ports that are gone.
    pub(super) past: [u64; 2],
    pub(super) ports: Vec<Arc<Traffic>>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn new_bell() -> Result<OwnedFd, NbdError> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// A full counter signals as well.
pub(super) fn ring(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

/// A connection that was not made.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) error: NbdError,
    /// If changes were sent again on it and may not have been answered.
    pub(super) fence: Option<Fence>,
}

impl From<NbdError> for Failed {
    fn from(error: NbdError) -> Failed {
        Failed { error, fence: None }
    }
}

impl Shared {
    pub(super) fn is_unix(&self) -> bool {
        matches!(self.spec.address, super::Address::Unix(_))
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::SeqCst)
    }

    /// Returns what those changes occupy that a lost server may lack and was not sent again.
    pub(super) fn owed_bytes(&self) -> u64 {
        match lock(&self.attached).is_lossy() {
            true => lock(&self.unflushed).bytes(),
            false => 0,
        }
    }

    /// Returns true if changes are kept until the server has flushed them. A server without flushes has nothing that is not
    /// durable, or cannot make it so.
    pub(super) fn keeps_changes(&self) -> bool {
        !self.is_read_only && self.export.has(wire::export::FLUSH)
    }

    /// Connects and negotiates. While no store has a connection, the changes that the server may have lost are written again first.
    pub(super) fn connect(&self, time: Duration, is_alone: bool) -> Result<Link, Failed> {
        let (mut call, export) = dial(&self.targets, &self.spec, time)?;
        fit(&self.export, &export, self.is_read_only)?;
        if is_alone {
            self.replay(&mut call, &export)?;
        }
        let size = export.size_bytes;
        if self.size_bytes.swap(size, Ordering::Relaxed) != size {
            ring(&self.changed);
        }
        Ok(Link::of(call, export, self.is_unix())?)
    }

    fn lose_data(&self) {
        self.has_untold_loss.store(true, Ordering::SeqCst);
        self.has_lost_data.store(true, Ordering::SeqCst);
    }

    /// Writes the kept changes again. Nobody adds to them meanwhile, because no store has a connection.
    fn replay(&self, call: &mut Call, export: &Export) -> Result<(), Failed> {
        let server = process_of(call.socket(), self.is_unix());
        // Not under the lock: a store that closes must not wait for the server here.
        let kept = lock(&self.unflushed).lend();
        let (has_some, is_abandoned) = (!kept.is_empty(), || self.is_abandoned());
        let done = replay::replay(call, export, kept.iter(), self.spec.timeout, is_abandoned);
        lock(&self.unflushed).give_back(kept);
        let done = done.map_err(|error| Failed {
            error,
            fence: has_some.then(|| Fence {
                until: Instant::now() + self.spec.fence,
                server,
            }),
        })?;
        if done.bytes > 0 {
            self.replayed_bytes.fetch_add(done.bytes, Ordering::Relaxed);
            tracing::warn!(
                "{}: {} bytes were answered by the NBD server and not flushed before the connection was lost; they were sent again",
                self.name,
                done.bytes
            );
        }
        if done.refused_bytes > 0 {
            self.lose_data();
            tracing::error!(
                "{}: the NBD server refuses {} of these bytes, and data may be lost; every flush fails until the disk is reopened",
                self.name,
                done.refused_bytes
            );
        }
        if done.bytes + done.refused_bytes > 0 {
            ring(&self.changed);
        }
        Ok(())
    }
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
        let is_unix = matches!(spec.address, super::Address::Unix(_));
        let (call, mut export) = dial(&targets, spec, DIAL_TIME)?;
        let mut links = vec![Link::of(call, export, is_unix)?];
        let wanted = wanted(spec, &export, workers);
        // A server may promise CAN_MULTI_CONN and let in only a few (qemu-nbd --shared=2). A worker without a connection could
        // do nothing, so there are only as many workers as there are connections for now.
        while links.len() < wanted {
            let more = dial(&targets, spec, MORE_TIME).and_then(|(call, now)| {
                fit(&export, &now, is_read_only)?;
                Link::of(call, now, is_unix)
            });
            match more {
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
            attached: Mutex::default(),
            waiting: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            reconnects: AtomicU64::new(0),
            fences: Mutex::default(),
            unflushed: Mutex::default(),
            reserved_bytes: AtomicU64::new(0),
            replayed_bytes: AtomicU64::new(0),
            lossy: AtomicU64::new(0),
            lossy_bytes: AtomicU64::new(0),
            has_lost_data: AtomicBool::new(false),
            has_untold_loss: AtomicBool::new(false),
            bells: Mutex::new(bells),
            traffic: Mutex::default(),
            told: Default::default(),
        });
        let (orders, inbox) = channel();
        Dialler::start(Arc::clone(&shared), inbox)?;
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
        !self.shared.is_unix()
    }

    /// An eventfd that is written when the size has changed, and when the server may have lost changes or was sent them again.
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
            connected: lock(&self.shared.attached).count as u64,
            waiting: read(&self.shared.waiting),
            lost: read(&self.shared.lost),
            reconnects: read(&self.shared.reconnects),
            held,
            sent_bytes,
            received_bytes,
            unflushed_bytes: lock(&self.shared.unflushed).bytes(),
            replayed_bytes: read(&self.shared.replayed_bytes),
            // Before its bytes, which are written first.
            lossy: self.shared.lossy.load(Ordering::Acquire),
            lossy_bytes: read(&self.shared.lossy_bytes),
        }
    }

    /// Makes the places of a store's connections.
    pub fn ports(&self) -> Result<Vec<Port>, NbdError> {
        let store = Arc::new(Store::default());
        let place = |_| Port::new(&self.shared, &self.orders, &store);
        (0..self.shared.connections).map(place).collect()
    }

    /// Has the server flush, through a connection of its own. Not for a disk that a store uses: that may have every connection that
    /// the server lets in, and flushes through them. The inner result is the server's.
    pub(crate) fn sync_at_rest(&self) -> io::Result<io::Result<()>> {
        if !self.shared.export.has(wire::export::FLUSH) {
            return Ok(Ok(()));
        }
        let mut port =
            Port::new(&self.shared, &self.orders, &Arc::default()).map_err(io::Error::other)?;
        port.request();
        let deadline = Instant::now() + self.shared.spec.timeout;
        let link = loop {
            wait(port.bell_fd(), PollFlags::IN, deadline).map_err(io::Error::other)?;
            // A bell may ring late for its last port.
            if let Some(link) = port.take() {
                break link;
            }
            if self.is_abandoned() {
                return Err(Errno::NOTCONN.into());
            }
        };
        let covered = port.answered();
        let time = self.shared.spec.timeout * PATIENCE;
        let mut call = Call::on(link.socket.clone(), Instant::now() + time);
        let error = replay::flush(&mut call).map_err(io::Error::other)?;
        link.part();
        match error {
            0 => {
                port.flushed(covered);
                Ok(Ok(()))
            }
            // It did nothing, and so nothing failed.
            wire::SHUTS_DOWN => Err(Errno::SHUTDOWN.into()),
            _ => Ok(Err(Errno::IO.into())),
        }
    }

    /// Returns true if the server did not do again what it had answered and not flushed.
    pub fn has_lost_data(&self) -> bool {
        self.shared.has_lost_data.load(Ordering::SeqCst)
    }

    /// Returns true if changes that the server had answered and not flushed were not written again, and the guest does not know.
    pub(crate) fn owes_changes(&self) -> bool {
        self.shared.has_untold_loss.load(Ordering::SeqCst) || self.shared.owed_bytes() > 0
    }

    /// Records that the guest was answered that a flush failed.
    pub(crate) fn mark_loss_told(&self) {
        self.shared.has_untold_loss.store(false, Ordering::SeqCst);
    }

    /// Records that a flush failed, of which the guest may not be told: the store's own or the operator's.
    pub(crate) fn mark_loss_untold(&self) {
        self.shared.has_untold_loss.store(true, Ordering::SeqCst);
    }

    /// Has every flush fail: nobody has the changes any more that the server may have lost.
    pub(crate) fn mark_changes_lost(&self) {
        self.shared.lose_data();
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
        let _ = self.orders.send(Order::Look);
    }

    /// Whether nothing more is to be sent.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.shared.is_abandoned()
    }

    /// Runs something on the thread that connects, which then can be confined.
    pub fn on_dialler(&self, run: impl FnOnce() + Send + 'static) {
        let _ = self.orders.send(Order::Run(Box::new(run)));
    }
}

/// The connections of a disk with so many workers.
fn wanted(spec: &NbdSpec, export: &Export, workers: u16) -> usize {
    match export.has(wire::export::CAN_MULTI_CONN) {
        true => usize::from(spec.connections) * usize::from(workers.max(1)),
        false => 1,
    }
    .min(CONNECTIONS_MAX)
}

fn dial(targets: &[Target], spec: &NbdSpec, time: Duration) -> Result<(Call, Export), NbdError> {
    let mut call = Call::place(targets, Instant::now() + time, spec.timeout * PATIENCE)?;
    let export = negotiate(&mut call, &spec.export)?;
    Ok((call, export))
}

/// Refuses a connection whose server promises less than on the first one, which the guest was told of.
fn fit(first: &Export, now: &Export, is_read_only: bool) -> Result<(), NbdError> {
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
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::thread;

    /// It answered requests that it did not read, so they count as done.
    #[test]
    fn a_server_that_reads_nothing_does_not_keep_us_from_leaving() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        while send(&ours, &[0; 4096], SendFlags::DONTWAIT).is_ok() {}
        let link = Link {
            socket: Arc::new(ours.into()),
            export: Export {
                size_bytes: 0,
                flags: 0,
                block_min: 1,
                block_preferred: 1,
                payload_max: 1,
                structured: false,
            },
            server: None,
        };
        let (to, parted) = channel();
        thread::spawn(move || {
            link.part();
            to.send(()).unwrap();
        });
        parted.recv_timeout(Duration::from_secs(20)).unwrap();
    }
}
