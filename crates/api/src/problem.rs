//! Refusals.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

words! {
    /// The kind of a problem: its `type` is `urn:cleave:` and this word, which stays the same when texts change.
    ProblemKind {
        /// The request, its body or a field of it is wrong.
        InvalidRequest = "invalid-request",
        /// The request comes from a web page.
        WebPage = "web-page",
        /// There is no disk of this id.
        NoSuchDisk = "no-such-disk",
        /// There is no such path.
        NoSuchPath = "no-such-path",
        /// The path does not have this method.
        MethodNotAllowed = "method-not-allowed",
        /// The body did not come in time.
        BodyTimeout = "body-timeout",
        /// The disk is opening, has failed, or ends.
        NotServed = "disk-not-served",
        /// The disk is another host's to use: it is inactive, was handed over, or waits for its locks.
        NotActive = "disk-not-active",
        /// The disk is being removed.
        BeingRemoved = "disk-being-removed",
        /// A frontend is connected.
        FrontendConnected = "frontend-connected",
        /// Fields differ for which the disk would have to be opened anew.
        FixedFields = "fixed-fields",
        /// The disk is that of its process, which serves no other.
        OneDisk = "one-disk",
        /// The disk is quiesced already.
        AlreadyQuiesced = "already-quiesced",
        /// The quiet ended before the work was done.
        QuietEnded = "quiet-ended",
        /// Work of the same kind is under way.
        Busy = "busy",
        /// The disk cannot be handed over to a process that takes over from a running one. A restart gets past that.
        CannotHandOver = "cannot-hand-over",
        /// The description of the disk is not the one that `If-Match` names.
        GenerationDiffers = "generation-differs",
        /// The body is broken or too long.
        BodyTooLarge = "body-too-large",
        /// The disk cannot be opened.
        CannotOpen = "disk-cannot-be-opened",
        /// No snapshot of this disk can be taken, or not at this path.
        CannotSnapshot = "cannot-snapshot",
        /// The storage of the disk failed.
        StorageFailed = "storage-failed",
        /// A file in the state folder cannot be written or removed.
        StateFolder = "state-folder",
        /// A fault of the daemon.
        InternalFault = "internal-fault",
        /// The storage of the disk did not answer in time.
        StorageSlow = "storage-slow",
        /// Too many clients listen to events.
        TooManyListeners = "too-many-listeners",
        /// Disks are still being opened.
        NotReady = "not-ready",
        /// The daemon ends.
        Ending = "daemon-ending",
        /// There would be too many disks or open files.
        NoRoom = "no-room",
    }
}

impl ProblemKind {
    /// Returns the status that goes with it.
    pub const fn status(self) -> u16 {
        match self {
            ProblemKind::InvalidRequest => 400,
            ProblemKind::WebPage => 403,
            ProblemKind::NoSuchDisk | ProblemKind::NoSuchPath => 404,
            ProblemKind::MethodNotAllowed => 405,
            ProblemKind::BodyTimeout => 408,
            ProblemKind::NotServed
            | ProblemKind::NotActive
            | ProblemKind::BeingRemoved
            | ProblemKind::FrontendConnected
            | ProblemKind::FixedFields
            | ProblemKind::OneDisk
            | ProblemKind::AlreadyQuiesced
            | ProblemKind::QuietEnded
            | ProblemKind::Busy
            | ProblemKind::CannotHandOver => 409,
            ProblemKind::GenerationDiffers => 412,
            ProblemKind::BodyTooLarge => 413,
            ProblemKind::CannotOpen | ProblemKind::CannotSnapshot => 422,
            ProblemKind::StorageFailed | ProblemKind::StateFolder | ProblemKind::InternalFault => {
                500
            }
            ProblemKind::StorageSlow
            | ProblemKind::TooManyListeners
            | ProblemKind::NotReady
            | ProblemKind::Ending => 503,
            ProblemKind::NoRoom => 507,
        }
    }

    /// Returns the `type` of its problem documents.
    pub fn uri(self) -> String {
        format!("urn:cleave:{}", self.name())
    }
}

/// A refusal as a problem document (RFC 9457).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Problem {
    /// The kind of problem, for programs: `urn:cleave:` and a word, such as `urn:cleave:frontend-connected`.
    pub r#type: String,
    /// Name of the status.
    pub title: Cow<'static, str>,
    /// Status of the response.
    #[schemars(range(min = 400, max = 599))]
    pub status: u16,
    /// The fault and the remedy, in a line.
    pub detail: String,
}
