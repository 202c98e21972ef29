//! The control socket of a process and that of its metrics, from their opening to their end.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::router;
use super::server::Server;
use crate::failure::Failure;
use crate::hosted::{Host, OwnSockets};
use crate::socket::{self, FileOwner, Listening, SocketSettings};

/// Sockets that nobody is accepted from yet.
#[derive(Debug)]
pub(crate) struct Interfaces([Option<Listening>; 2]);

/// Sockets that are served. Dropping them ends all connections and removes the files.
#[derive(Debug)]
pub(crate) struct Servers([Option<Server>; 2]);

impl Interfaces {
    /// Opens the sockets. `given`: those of a process that still runs, which are used where they have the same paths.
    pub(crate) fn open(
        control: Option<&SocketSettings>,
        metrics: Option<&SocketSettings>,
        given: [Option<OwnedFd>; 2],
    ) -> Result<Interfaces, Failure> {
        let [first, second] = given;
        let control = control.map(|socket| Listening::share(socket, first, socket::open_control));
        let metrics = metrics.map(|socket| Listening::share(socket, second, socket::open_metrics));
        Ok(Interfaces([control.transpose()?, metrics.transpose()?]))
    }

    /// Has the files go away with this process, because the one that gave the sockets serves no more.
    pub(crate) fn own(&mut self) {
        let sockets = self.0.iter_mut().flatten();
        sockets.for_each(|socket| socket.set_owner(FileOwner::Us));
    }

    /// Returns copies for a process that takes over from this one.
    pub(crate) fn copies(&self) -> Result<OwnSockets, Failure> {
        let copy = |socket: &Option<Listening>| -> io::Result<Option<OwnedFd>> {
            socket.as_ref().map(Listening::copy).transpose()
        };
        let [control, metrics] = self.0.each_ref().map(copy);
        let cannot = |error| Failure::run(format!("cannot copy a socket: {error}"));
        Ok(OwnSockets {
            control: control.map_err(cannot)?,
            metrics: metrics.map_err(cannot)?,
            state: None,
        })
    }

    /// Returns the control socket, if there is one.
    pub(crate) fn control(&self) -> Option<&Listening> {
        self.0[0].as_ref()
    }

    /// Serves them on the runtime at hand.
    pub(crate) fn serve(self, host: &Arc<Host>) -> Result<Servers, Failure> {
        let [control, metrics] = self.0;
        let control = control.map(|socket| Server::start(socket, router::router(host.clone())));
        let metrics =
            metrics.map(|socket| Server::start(socket, router::metrics_router(host.clone())));
        Ok(Servers([control.transpose()?, metrics.transpose()?]))
    }
}

impl Servers {
    /// Ends all connections. The files are there until the end.
    pub(crate) fn stop(&self) {
        self.0.iter().flatten().for_each(Server::stop);
    }

    /// Ends and leaves the files to another process, which has the sockets.
    pub(crate) fn leave(mut self) {
        self.0.iter_mut().flatten().for_each(Server::leave);
    }
}
