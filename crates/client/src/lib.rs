//! An independent vhost-user frontend and the driver side of its vrings: the oracle that tests, benches
//! and the demo drive the daemon with. This crate forbids sharing vring, memory or message code with the
//! daemon (only the numbers of the specification in `cleave_blk::spec` are common), so that a
//! misreading of the specification on one side does not hide behind the same misreading on the other.
//!
//! From the outside in: [`Client::open`] sets a whole device up and gives its [`Config`] and [`Queue`]s, which
//! read, write and flush, or run a [`Workload`] at depth. Below lie [`Frontend`] (one method per
//! message, and raw messages for those that must not be sent), [`GuestMemory`] (the pretended guest
//! RAM) and [`DriverRing`] (one split virtqueue, orderly or hostile).
//!
//! Unsafe code is allowed here alone besides the daemon's two doors: `memory` maps and touches memory that
//! another process writes too, and `ring` keeps pointers into it. Everything else is safe code.
#![allow(unsafe_code)]

mod config;
mod device;
mod error;
mod frontend;
mod load;
mod memory;
mod queue;
mod ring;
mod socket;
pub mod wire;
mod workload;

pub use config::Config;
pub use device::{Base, Client, Options, Table};
pub use error::Error;
pub use frontend::{Frontend, Inflight};
pub use memory::{GuestMemory, RegionPlan};
pub use queue::{Completion, Doorbell, Queue, Request, Wait};
pub use ring::{Buffer, Descriptor, DriverRing, RingLayout, Used};
pub use socket::{Message, Socket};
pub use workload::{
    Layout, Offered, Order, Pulse, Sample, Stop, Tally, Verify, Workload, pattern_word,
};
