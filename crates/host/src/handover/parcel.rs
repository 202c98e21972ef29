//! A disk on its way from one process to the next, and how it is packed.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::iter;
use std::os::fd::OwnedFd;
use std::time::Duration;

use cleave_disk::SyncFailure;
use cleave_session::{Handover, Offloaded, RecordedMessage};
use cleave_worker::LimitLevels;
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType, getpeername};

pub(crate) use super::document::DiskRecord;
use super::document::{Document, FORMAT, MessageEntry, SessionEntry, VERSION, from_hex, to_hex};

/// Longest reason that an error gives, because the sender chooses parts of it.
const REASON_CHARS_MAX: usize = 200;

/// A disk as one process gives it to the next.
#[derive(Debug, Default)]
pub(crate) struct Parcel {
    /// Which disk it is.
    pub(crate) disk: DiskRecord,
    /// The open files that hold its locks and claims, in the order of its legs.
    pub(crate) files: Vec<OwnedFd>,
    /// The socket on which frontends connect, if it goes with the disk. It has what they have queued in it.
    pub(crate) listener: Offloaded<OwnedFd>,
    /// The control socket of the process, and that of its metrics, which are passed on with the files.
    pub(crate) control: Option<OwnedFd>,
    pub(crate) metrics: Option<OwnedFd>,
    /// Longest time between two signs of life that the service manager of the process accepts.
    pub(crate) watchdog: Option<Duration>,
    /// Sessions of the frontends that are connected.
    pub(crate) sessions: Offloaded<Handover>,
    /// When the disk stopped being served, by CLOCK_MONOTONIC, which all processes of a host share.
    pub(crate) since: Option<Duration>,
    /// The levels of the buckets of its limits at that time.
    pub(crate) limit_levels: Option<LimitLevels>,
    /// A sync has failed: no flush may succeed, whoever serves the disk.
    pub(crate) sync_failure: Option<SyncFailure>,
}

/// A parcel as it is kept and sent.
#[derive(Debug)]
pub(crate) struct Packed {
    /// The document, in a sealed memfd.
    pub(crate) document: OwnedFd,
    /// The descriptors, by the names that the document has for them: this process's own, or all if another one has sent them.
    fds: Vec<(String, OwnedFd)>,
    /// Those that belong to frontends, or have what they have queued.
    of_frontends: Offloaded<(String, OwnedFd)>,
}

impl Packed {
    /// Makes what another process has sent, whoever the descriptors belong to.
    pub(crate) fn received(document: OwnedFd, fds: Vec<(String, OwnedFd)>) -> Packed {
        Packed {
            document,
            fds,
            of_frontends: Offloaded::default(),
        }
    }

    /// Returns all descriptors with their names.
    pub(crate) fn fds(&self) -> impl Iterator<Item = &(String, OwnedFd)> {
        self.fds.iter().chain(self.of_frontends.iter())
    }

    /// Returns the descriptors, which the caller closes: at once if they are copies, so that no close of them is the last one and may
    /// wait, else where it may.
    pub(crate) fn into_fds(self) -> Vec<(String, OwnedFd)> {
        let mut all = self.fds;
        all.append(&mut self.of_frontends.into_vec());
        all
    }
}

/// Why a parcel was refused. Its descriptors have been closed.
#[derive(Debug)]
pub(crate) struct UnpackError(String);

impl fmt::Display for UnpackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "what another process handed over is refused: {}", self.0)
    }
}

impl From<String> for UnpackError {
    fn from(why: String) -> UnpackError {
        let shown = |c: char| if c.is_control() { '?' } else { c };
        UnpackError(why.chars().map(shown).take(REASON_CHARS_MAX).collect())
    }
}

impl Parcel {
    /// Takes the files out.
    pub(crate) fn take_files(&mut self) -> Vec<File> {
        std::mem::take(&mut self.files)
            .into_iter()
            .map(File::from)
            .collect()
    }

    /// Returns true if frontends can connect, whether or not a process serves them.
    pub(crate) fn has_listener(&self) -> bool {
        !self.listener.is_empty()
    }

    /// Packs it. If that fails, the parcel comes back, so that its sessions can be resumed here.
    pub(crate) fn pack(self) -> Result<Packed, Box<(Parcel, io::Error)>> {
        match self.document().seal() {
            Ok(document) => Ok(self.packed_with(document)),
            Err(error) => Err(Box::new((self, error))),
        }
    }

    /// Describes it. A descriptor is named after its place in the order of [`Parcel::packed_with`].
    fn document(&self) -> Document {
        let mut count = 0_usize;
        let mut name = || {
            let name = count.to_string();
            count += 1;
            name
        };
        let files = self.files.iter().map(|_| name()).collect();
        let listeners = [
            self.listener.first(),
            self.control.as_ref(),
            self.metrics.as_ref(),
        ];
        let [listener, control, metrics] = listeners.map(|fd| fd.map(|_| name()));
        let sessions = self.sessions.iter().map(|session| SessionEntry {
            connection: name(),
            owns: session.owns,
            has_owned: session.has_owned,
            needs_reset: session.needs_reset,
            writeback: session.writeback,
            device: to_hex(&session.device),
            messages: (session.messages.iter())
                .map(|message| MessageEntry {
                    request: message.request,
                    payload: to_hex(&message.payload),
                    fds: message.fds.iter().map(|_| name()).collect(),
                })
                .collect(),
        });
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Document {
            format: FORMAT.to_owned(),
            version: VERSION,
            cleave: env!("CARGO_PKG_VERSION").to_owned(),
            disk: self.disk.clone(),
            files,
            listener,
            control,
            metrics,
            watchdog_ns: self.watchdog.map(ns),
            since_ns: self.since.map(ns),
            limit_levels: self.limit_levels,
            sync_failure: self.sync_failure.map(Into::into),
            sessions: sessions.collect(),
        }
    }

    fn packed_with(self, document: OwnedFd) -> Packed {
        let listeners = self.listener.into_vec().into_iter();
        let listeners = listeners.chain(self.control).chain(self.metrics);
        let sessions = self.sessions.into_vec().into_iter();
        let sessions = sessions.flat_map(|session| {
            let messages = session.messages.into_iter();
            iter::once(session.connection.into()).chain(messages.flat_map(|message| message.fds))
        });
        let mut names = (0_usize..).map(|at| at.to_string());
        let fds = names.by_ref().zip(self.files).collect();
        let of_frontends: Vec<_> = names.zip(listeners.chain(sessions)).collect();
        Packed {
            document,
            fds,
            of_frontends: of_frontends.into(),
        }
    }

    /// Opens a parcel that comes from anywhere. What the messages say, and the descriptors that go with them, are left for a session
    /// to judge.
    pub(crate) fn unpack(packed: Packed) -> Result<Parcel, UnpackError> {
        let document = Document::read(packed.document)?;
        let of_frontends = packed.of_frontends.into_vec();
        let mut fds = NamedFds::new(packed.fds.into_iter().chain(of_frontends))?;
        let files = fds.take_all(&document.files)?;
        let mut listener = |name: Option<String>| {
            let taken = name.map(|name| fds.take_listener(&name));
            taken.transpose()
        };
        let [listener, control, metrics] = [
            listener(document.listener)?,
            listener(document.control)?,
            listener(document.metrics)?,
        ];
        let sessions = document.sessions.into_iter();
        let sessions = sessions.map(|session| fds.take_session(session));
        let sessions = sessions.collect::<Result<Vec<_>, _>>()?;
        fds.finish()?;
        Ok(Parcel {
            disk: document.disk,
            files,
            listener: Vec::from_iter(listener).into(),
            control,
            metrics,
            watchdog: document.watchdog_ns.map(Duration::from_nanos),
            sessions: sessions.into(),
            since: document.since_ns.map(Duration::from_nanos),
            limit_levels: document.limit_levels,
            sync_failure: document.sync_failure.map(Into::into),
        })
    }
}

/// Descriptors that the document has not used yet.
struct NamedFds(BTreeMap<String, OwnedFd>);

impl NamedFds {
    fn new(named: impl Iterator<Item = (String, OwnedFd)>) -> Result<NamedFds, String> {
        let mut fds = BTreeMap::new();
        for (name, fd) in named {
            if let Some(_other) = fds.insert(name.clone(), fd) {
                return Err(format!("it has two descriptors with the name {name:?}"));
            }
        }
        Ok(NamedFds(fds))
    }

    fn take(&mut self, name: &str) -> Result<OwnedFd, String> {
        let missing = || format!("its descriptor {name:?} is missing or used twice");
        self.0.remove(name).ok_or_else(missing)
    }

    fn take_all(&mut self, names: &[String]) -> Result<Vec<OwnedFd>, String> {
        names.iter().map(|name| self.take(name)).collect()
    }

    fn take_listener(&mut self, name: &str) -> Result<OwnedFd, String> {
        self.take_socket(name, "listens", |fd| socket_acceptconn(fd) == Ok(true))
    }

    /// Takes a stream socket of which `is_right` is true.
    fn take_socket(
        &mut self,
        name: &str,
        what: &str,
        is_right: impl Fn(&OwnedFd) -> bool,
    ) -> Result<OwnedFd, String> {
        let is_stream = |fd| {
            socket_domain(fd) == Ok(AddressFamily::UNIX)
                && socket_type(fd) == Ok(SocketType::STREAM)
        };
        let fd = self.take(name)?;
        match is_stream(&fd) && is_right(&fd) {
            true => Ok(fd),
            false => Err(format!(
                "its descriptor {name:?} is not a unix stream socket that {what}"
            )),
        }
    }

    fn take_session(&mut self, session: SessionEntry) -> Result<Handover, String> {
        // It has an address as long as the socket exists, even if the frontend has left.
        let is_connected = |fd: &OwnedFd| getpeername(fd).is_ok();
        let connection = self.take_socket(&session.connection, "is connected", is_connected)?;
        let messages = session.messages.into_iter().map(|message| {
            Ok(RecordedMessage {
                request: message.request,
                payload: from_hex(&message.payload)?,
                fds: self.take_all(&message.fds)?,
            })
        });
        let messages = messages.collect::<Result<_, String>>()?;
        Ok(Handover {
            connection: connection.into(),
            owns: session.owns,
            has_owned: session.has_owned,
            needs_reset: session.needs_reset,
            writeback: session.writeback,
            device: from_hex(&session.device)?,
            messages,
        })
    }

    /// Refuses descriptors that the document does not know: nobody would ever close or use them knowingly.
    fn finish(self) -> Result<(), String> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => Err(format!("its document does not use the descriptor {name:?}")),
        }
    }
}

#[cfg(test)]
mod tests;
