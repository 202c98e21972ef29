//! Serves disks: one, or those of a node, with their sockets, their HTTP interface, their events and metrics, and the process around
//! them. This crate forbids a command line, printing, seeing a vring, and unsafe code: it opens disks, accepts frontends and
//! hands each to a session. All that it says goes to the log.
//!
//! [`serve_disk()`] and [`serve_node()`] take their settings and return when the process is to end. The other items are what commands
//! need that look at a disk without serving it.
#![forbid(unsafe_code)]

mod alone;
mod confine;
mod control;
mod cpus;
mod disk_server;
mod events;
mod failure;
mod hosted;
mod knock;
mod log;
mod loop_device;
mod node;
mod path_lock;
mod pending;
mod problem;
mod process;
mod resize;
mod serve;
mod service;
mod signals;
mod socket;
mod source;
mod systemd;
mod tuning;
mod unit;

pub use failure::Failure;
pub use log::last_words;
pub use node::{NodeSettings, PoolSettings, serve_node};
pub use path_lock::{LockRecord, lock_record};
pub use process::{DESCRIPTORS_MIN, runtime};
pub use serve::{ServeSettings, serve_disk};
pub use socket::{Endpoint, NEW_SOCKET, SocketSettings};
pub use source::open_storage;
pub use unit::is_home;
