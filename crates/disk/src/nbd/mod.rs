//! Disks that an NBD server exports: naming, connecting and negotiating. The I/O of requests is the engine's.
//!
//! Everything that blocks happens here, with time-outs: on the caller's thread when the disk is opened, and on the disk's dialler
//! thread afterwards. Nothing that a server sends is trusted.

mod attached;
mod bell;
mod dial;
mod dialler;
mod fence;
mod handshake;
mod link;
mod mailbox;
mod port;
mod replay;
mod shared;
mod source;
mod spec;
mod traffic;
mod unflushed;
pub mod wire;

pub use dial::NbdError;
pub use handshake::Export;
pub use link::{Link, PATIENCE};
pub use port::{Kept, Port};
pub use source::{Nbd, NbdState};
pub(crate) use spec::is_uri;
pub use spec::{Address, NbdSpec};
pub use unflushed::Change;
