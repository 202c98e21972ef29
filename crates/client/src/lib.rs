//! An independent vhost-user frontend with the driver side of its vrings. Tests, benchmarks and the demo drive the
//! daemon with it. This crate forbids sharing vring, memory or message code with the daemon (only the specification's
//! numbers in `cleave_blk::spec` are common), so that both sides cannot share a misreading of the specification.
//!
//! From the outside in: [`Client::open`] sets a whole device up and gives its [`DeviceConfig`] and [`Queue`]s. A queue
//! reads, writes and flushes, or runs a [`Workload`] at depth. Below lie [`Frontend`] (one method for each message,
//! and raw messages for invalid ones), [`GuestMemory`] (the simulated guest's RAM) and [`DriverRing`] (one split
//! virtqueue, managed or hostile).
//!
//! Besides the daemon's three crates with unsafe code, it is allowed only here: `memory` maps and accesses memory that
//! another process writes too, and `ring` keeps pointers into it. Everything else is safe code.
#![allow(unsafe_code)]

mod config;
mod device;
mod error;
mod frontend;
mod load;
mod log;
mod memory;
pub mod message;
mod moving;
mod queue;
mod ring;
mod socket;
mod workload;

pub use config::DeviceConfig;
pub use device::{Base, Client, DeviceOptions, InflightKind, MemoryMessages};
pub use error::Error;
pub use frontend::{Frontend, InflightRegion};
pub use log::WriteLog;
pub use memory::{GuestMemory, RegionOptions};
pub use queue::{DriverRequest, Notifier, Queue, ReapWait, RequestResult, header, range};
pub use ring::{Buffer, Descriptor, DriverRing, RingLayout, Used};
pub use socket::{ReceivedMessage, Socket};
pub use workload::{
    Layout, Offered, OffsetOrder, Pulse, Sample, Stop, Verify, Workload, WorkloadTotals, all_are,
    first_other, pattern_word,
};
