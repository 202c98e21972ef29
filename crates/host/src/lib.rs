//! Serves disks: one, or those of a node, with their sockets, their HTTP interface, their events and metrics, and the process around
//! them. This crate forbids a command line, printing, seeing a vring, and unsafe code: it opens disks, accepts frontends and
//! hands each to a session. All that it says goes to the log.
//!
//! [`serve_disk()`] and [`serve_node()`] take their settings and return when the process is to end. The other items are what commands
//! need that look at a disk without serving it.
#![forbid(unsafe_code)]

mod alone;
mod disk_server;
mod events;
mod failure;
mod handover;
mod hosted;
mod http;
mod node;
mod possession;
mod problem;
mod process;
mod resize;
mod serve;
mod service;
mod socket;
mod source;
mod status;
mod tuning;

pub use failure::Failure;
pub use node::{NodeSettings, PoolSettings, serve_node};
pub use process::log::last_words;
pub use process::unit::is_home;
pub use process::{DESCRIPTORS_MIN, runtime};
pub use serve::{ServeSettings, serve_disk};
pub use socket::path_lock::{LockRecord, lock_record};
pub use socket::{Endpoint, NEW_SOCKET, SocketSettings};
pub use source::open_storage;
