//! The requests of `cleave disk`.

use std::path::PathBuf;

use cleave_api::Operation;
use cleave_config::{Change, DiskConfig};
use serde::Serialize;
use serde_json::Value;

/// A command.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Remote {
    /// The control socket.
    pub(crate) socket: PathBuf,
    /// Print answers as they are.
    pub(crate) json: bool,
    pub(crate) disks: DiskChoice,
    pub(crate) ask: Ask,
}

/// The disks that a command is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DiskChoice {
    /// None in particular.
    Any,
    Named(String),
    /// The disk of a socket that has no other.
    Only,
    /// Each disk that is served.
    Served,
}

/// A request to a control socket.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ask {
    Add(Box<DiskConfig>),
    List,
    Show,
    Set(Box<Change>),
    /// An operation on the disk, with this body; null: none.
    Order(Operation, Value),
    /// With this mode.
    Remove(&'static str),
    Events,
}

impl Ask {
    /// Returns the method, the target and the body of the request about this disk. An ID that could not be one is the server's to refuse.
    pub(super) fn request(&self, id: &str) -> (&'static str, String, String) {
        let (operation, body) = match self {
            Ask::Add(config) => (Operation::PutDisk, text(config)),
            Ask::List => (Operation::ListDisks, String::new()),
            Ask::Show => (Operation::GetDisk, String::new()),
            Ask::Set(change) => (Operation::PatchDisk, text(change)),
            Ask::Order(operation, Value::Null) => (*operation, String::new()),
            Ask::Order(operation, body) => (*operation, body.to_string()),
            Ask::Remove(_) => (Operation::DeleteDisk, String::new()),
            Ask::Events => (Operation::WatchEvents, String::new()),
        };
        let query = match self {
            Ask::Remove(mode) => format!("?mode={mode}"),
            _ => String::new(),
        };
        let method = operation.route().method.name();
        (method, operation.path(id) + &query, body)
    }
}

/// Writes a description, or a change of it. Its names are texts and its numbers finite, so this always works.
fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
