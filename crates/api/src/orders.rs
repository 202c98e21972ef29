//! Requests that have something done to a disk, and the replies to them.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Body of `resume`. Without fields it ends whatever quiet there is, and repeats held requests.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ResumeRequest {
    /// Ends the quiet that `quiesce` named so, and no other. Held requests are left alone.
    pub quiet: Option<String>,
    /// Repeats held requests, and leaves a quiet alone.
    pub held: bool,
}

/// Reply to `resume`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Resumed {
    /// Number of held requests that are repeated.
    pub requests: u64,
    /// The disk was quiesced until this request ended that. False: the quiet was over before, and the guest has gone on.
    pub quiesced: bool,
}

/// Reply to `fail`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HeldRequests {
    /// Number of requests that were held.
    pub requests: u64,
}

/// Reply to `flush`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Flushed {
    /// Time that the flush took, in milliseconds.
    pub took_ms: f64,
}

/// Body of `quiesce`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct QuiesceRequest {
    /// How long the disk stays quiesced if nobody resumes it before, in seconds. 10 if left out.
    #[schemars(range(min = 1, max = QuiesceRequest::SECONDS_MAX))]
    pub seconds: Option<u64>,
}

impl QuiesceRequest {
    /// Guests warn of tasks that hang after 120 s.
    pub const SECONDS_MAX: u64 = 60;
}

/// Reply to `quiesce`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Quiesced {
    /// The word `quiesced`.
    pub state: QuietState,
    /// Names this quiet to `resume`.
    pub quiet: String,
    /// Time after which the disk goes on by itself.
    pub seconds_left: f64,
    /// Time that the drain and the flush took, in milliseconds.
    pub took_ms: f64,
}

words! {
    /// The state of a quiesced disk.
    QuietState {
        /// Everything is durable, and new requests wait.
        Quiesced = "quiesced",
    }
}

/// Body of `snapshot`.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// Absolute path of the copy. There must be no such file yet.
    pub to: PathBuf,
}

/// Reply to `snapshot`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Snapshot {
    /// Path of the copy.
    pub to: PathBuf,
    /// Size of the copy.
    pub size_bytes: u64,
    /// Time that requests of the guest waited, in milliseconds.
    pub guest_waited_ms: f64,
}
