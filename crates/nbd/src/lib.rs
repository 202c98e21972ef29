//! Exports of NBD servers: their names, connecting and negotiating, and what a server has yet to flush. This crate must not know
//! requests of guests, reactors or other kinds of disk, and has no unsafe code. It says how requests and replies are written; the
//! engine sends and receives them.
//!
//! Everything that blocks happens here, with time-outs: on the caller's thread when an export is opened, and on a dialler thread of
//! its own afterwards. Nothing that a server sends is trusted.
#![forbid(unsafe_code)]

mod attached;
mod bell;
mod client;
mod dial;
mod dialler;
mod disconnect;
mod fence;
mod flushes;
pub mod frame;
mod handshake;
mod link;
mod lock;
mod mailbox;
mod port;
mod replay;
mod shared;
mod spec;
mod traffic;
mod unflushed;
pub mod wire;

pub use client::{NbdClient, NbdState};
pub use dial::NbdError;
pub use disconnect::Disconnect;
pub use flushes::FlushTurn;
pub use handshake::Export;
pub use link::{Link, PATIENCE};
pub use port::{Kept, Port};
pub use spec::{Address, NbdSpec, is_uri};
pub use unflushed::Change;
