//! How one asks: what is sent to a control socket and received from it. This crate must not know disks, workers or the sandbox,
//! nor how an answer comes about. It has no files and no threads, and sockets in its client alone.
//!
//! [`Operation`] is the one table of what a node can be asked: [`Operation::route`] has the method, the path, the bodies and the
//! refusals. The node makes its router of it, [`document`] the OpenAPI document, and [`HttpClient`] its requests.
#![forbid(unsafe_code)]

#[macro_use]
mod words;

mod client;
mod content;
mod disk;
mod event;
mod id;
mod node;
mod openapi;
mod orders;
mod problem;
mod report;
mod table;

pub use client::{ClientError, EventLines, HttpClient, HttpReply, UpgradeReply};
pub use content::BodyContent;
pub use disk::{DeletedState, DiskDeleted, DiskRow, DiskState, NodeDisk};
pub use event::EventName;
pub use id::natural;
pub use node::{DiskRoom, FileRoom, NodeReport, NodeSetup, PoolReport, ProcessKind};
pub use openapi::document;
pub use orders::{
    Flushed, HeldRequests, QuiesceRequest, Quiesced, QuietState, ResumeRequest, Resumed, Snapshot,
    SnapshotRequest,
};
pub use problem::{Problem, ProblemKind};
pub use report::{
    DiskReport, HandOverReport, ImageLock, InFlightRequests, LastHandOver, LatencySummary,
    LegReport, PacingReport, PossessionState, ProcessReport, RequestClass, RequestDirection,
    RequestTotals, RequestVerb, RunningVring, ServerConnections, SessionReport, SizeClass,
    SpinExperiment, SplitExperiment, SplitReport, StalledVring, StoreKind, StoreReport,
    TuningReport, VringReport, WorkerMode, ZeroReads,
};
pub use table::{HttpMethod, Operation, Query, QueryValue, Route, Tag};
