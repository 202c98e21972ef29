//! How one asks: the wire types of the control socket. This crate must not know disks, workers or the sandbox: it describes
//! what is sent and received, and not how it comes about.
#![forbid(unsafe_code)]

#[macro_use]
mod words;

mod disk;
mod event;
mod orders;
mod problem;
mod report;

pub use disk::{DeletedState, DiskDeleted, DiskEntry, DiskRow, DiskState, NodeDisk};
pub use event::EventName;
pub use orders::{
    Flushed, HeldRequests, QuiesceRequest, Quiesced, QuietState, ResumeRequest, Resumed, Snapshot,
    SnapshotRequest,
};
pub use problem::Problem;
pub use report::{
    DiskReport, ImageLock, InFlightRequests, LatencySummary, LegReport, PacingReport,
    ProcessReport, RequestClass, RequestDirection, RequestTotals, RequestVerb, RunningVring,
    ServerConnections, SessionReport, SizeClass, SpinExperiment, SplitExperiment, SplitReport,
    StalledRequests, StoreKind, StoreReport, TuningReport, VringReport, WorkerMode, ZeroReads,
};
