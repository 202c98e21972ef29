//! The HTTP interface: the [`router`] of what can be asked, the handlers behind it, and the [`server`] of a socket.

mod about;
mod client_stream;
pub(crate) mod interfaces;
pub(crate) mod router;
mod routes;
pub(crate) mod scrapes;
pub(crate) mod server;
mod snapshot;
mod standstill;
mod take_over;
