//! An export that is open: what its server promised, and what is known of its connections.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::io::Errno;

use crate::bell::new_bell;
use crate::dial::{Call, NbdError, resolve, wait};
use crate::dialler::Dialler;
use crate::flushes::FlushTurn;
use crate::handshake::Export;
use crate::link::{DIAL_TIME, Link, MORE_TIME, PATIENCE, dial, fit};
use crate::lock::lock;
use crate::mailbox::{ConnectionCount, DiallerOrder};
use crate::port::Port;
use crate::shared::Shared;
use crate::{NbdSpec, replay, wire};

/// Most connections of a disk.
const CONNECTIONS_MAX: usize = 256;

/// The client of an export that is open. Its thread ends when it and its ports are dropped.
#[derive(Debug)]
pub struct NbdClient {
    shared: Arc<Shared>,
    orders: Sender<DiallerOrder>,
}

/// How the connections are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NbdState {
    /// Connections that stores use now.
    pub connected: u64,
    /// Connections that stores wait for, and those in whose place others are to come.
    pub waiting: u64,
    /// Connections that were lost.
    pub lost: u64,
    /// Connections made in place of lost ones.
    pub reconnects: u64,
    /// Requests that wait for a connection.
    pub held: u64,
    /// Bytes that went to the server, heads included; without the negotiation.
    pub sent_bytes: u64,
    /// Bytes received from it.
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

impl NbdClient {
    /// Connects and negotiates, which blocks for at most ten seconds after the name has been looked up, and two more if the
    /// server does not let in as many connections as `workers` need.
    pub fn open(
        spec: &NbdSpec,
        name: &str,
        is_read_only: bool,
        workers: u16,
    ) -> Result<NbdClient, NbdError> {
        let targets = resolve(&spec.address)?;
        let is_unix = matches!(spec.address, crate::Address::Unix(_));
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
            ending: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            reconnects: AtomicU64::new(0),
            fences: Mutex::default(),
            unflushed: Mutex::default(),
            flushes: Arc::default(),
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
        Ok(NbdClient { shared, orders })
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

    /// Returns true if its connections are TCP's.
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
        let ending = read(&self.shared.ending);
        let attached = lock(&self.shared.attached).count as u64;
        NbdState {
            connected: attached.saturating_sub(ending),
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
        let store = Arc::new(ConnectionCount::default());
        let place = |_| Port::new(&self.shared, &self.orders, &store);
        (0..self.shared.connections).map(place).collect()
    }

    /// Has the server flush, through a connection of its own. Not for a disk that a store uses: that may have every connection that
    /// the server lets in, and flushes through them. The inner result is the server's. A failure has to be recorded before the turn is
    /// dropped: a store that began meanwhile may flush then, and the server may not tell it.
    pub fn sync_at_rest(&self) -> io::Result<(io::Result<()>, Option<FlushTurn>)> {
        if !self.shared.export.has(wire::export::FLUSH) {
            return Ok((Ok(()), None));
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
        let turn = loop {
            if let Some(turn) = port.take_turn() {
                break turn;
            }
            if self.is_abandoned() || lock(&self.shared.attached).is_lossy() {
                return Err(Errno::NOTCONN.into());
            }
            wait(port.bell_fd(), PollFlags::IN, deadline).map_err(io::Error::other)?;
            // Quiets the bell.
            let _ = port.take();
        };
        turn.begin();
        let covered = port.answered();
        let time = self.shared.spec.timeout * PATIENCE;
        let mut call = Call::on(link.socket.clone(), Instant::now() + time);
        let error = replay::flush(&mut call).map_err(|error| {
            // Nobody knows what the server said, so what it may have lost is sent to it again.
            port.lost(&error.to_string(), None);
            io::Error::other(error)
        })?;
        port.part(&link);
        match error {
            0 => {
                port.flushed(covered);
                // There is no guest whose writes would use it.
                port.forget_copy_room();
                Ok((Ok(()), Some(turn)))
            }
            // It did nothing, and so nothing failed.
            wire::SHUTS_DOWN => Err(Errno::SHUTDOWN.into()),
            _ => Ok((Err(Errno::IO.into()), Some(turn))),
        }
    }

    /// Returns true if the server did not do again what it had answered and not flushed.
    pub fn has_lost_data(&self) -> bool {
        self.shared.has_lost_data.load(Ordering::SeqCst)
    }

    /// Returns true if changes that the server had answered and not flushed were not written again, or will not be because the disk was
    /// given up, and the guest does not know.
    pub fn owes_changes(&self) -> bool {
        self.shared.has_untold_loss.load(Ordering::SeqCst) || self.shared.owed_bytes() > 0
    }

    /// Returns true if changes were answered and not flushed. They are sent again on the next connection of a disk that has none.
    pub fn has_unflushed(&self) -> bool {
        self.shared.has_unflushed()
    }

    /// Returns true if a flush was sent and is not answered. The server may tell nobody else of lost data.
    pub fn has_flush_out(&self) -> bool {
        lock(&self.shared.flushes).is_out()
    }

    /// Returns true if a connection was lost, and none was made since. Always false for a server that has nothing to flush.
    pub fn is_cut_off(&self) -> bool {
        lock(&self.shared.attached).is_lossy()
    }

    /// Records that the guest was answered that a flush failed.
    pub fn mark_loss_told(&self) {
        self.shared.has_untold_loss.store(false, Ordering::SeqCst);
    }

    /// Records that a flush failed, of which the guest may not be told: the store's own or the operator's.
    pub fn mark_loss_untold(&self) {
        self.shared.has_untold_loss.store(true, Ordering::SeqCst);
    }

    /// Has every flush fail: nobody has the changes any more that the server may have lost.
    pub fn mark_changes_lost(&self) {
        self.shared.lose_data();
    }

    /// When the server has applied what a daemon sent that was killed before this disk was opened. Nothing tells when the server
    /// ended that daemon's connections, so it is the time of the fence.
    pub fn settled_at(&self) -> Option<Instant> {
        let shared = &self.shared;
        (!shared.is_read_only).then(|| shared.opened_at + shared.spec.fence)
    }

    /// Has nothing more sent, and tells the stores that wait for a connection.
    pub fn abandon(&self) {
        self.shared.is_abandoned.store(true, Ordering::SeqCst);
        let _ = self.orders.send(DiallerOrder::Look);
    }

    /// Returns true if nothing more is to be sent.
    pub fn is_abandoned(&self) -> bool {
        self.shared.is_abandoned()
    }

    /// Runs something on the thread that connects, which then can be confined.
    pub fn on_dialler(&self, run: impl FnOnce() + Send + 'static) {
        let _ = self.orders.send(DiallerOrder::Run(Box::new(run)));
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
