//! The requests of `cleave disk`.

use std::path::PathBuf;

use cleave_api::Operation;
use cleave_config::{Change, DiskConfig};
use serde::Serialize;
use serde_json::Value;

/// A command.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Remote {
    /// The node's control socket.
    pub(crate) socket: PathBuf,
    /// Print answers as they are.
    pub(crate) json: bool,
    pub(crate) ask: Ask,
}

/// A request to the node. Texts are names of disks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ask {
    Add(String, Box<DiskConfig>),
    List,
    Show(String),
    Set(String, Box<Change>),
    /// An operation on the disk, with this body; null: none.
    Order(String, Operation, Value),
    /// With this mode.
    Remove(String, &'static str),
    Events,
}

impl Ask {
    /// Returns the method, the target and the body. An ID that could not be one is the node's to refuse.
    pub(super) fn request(&self) -> (&'static str, String, String) {
        let (operation, id, body) = match self {
            Ask::Add(id, config) => (Operation::PutDisk, &**id, text(config)),
            Ask::List => (Operation::ListDisks, "", String::new()),
            Ask::Show(id) => (Operation::GetDisk, &**id, String::new()),
            Ask::Set(id, change) => (Operation::PatchDisk, &**id, text(change)),
            Ask::Order(id, operation, Value::Null) => (*operation, &**id, String::new()),
            Ask::Order(id, operation, body) => (*operation, &**id, body.to_string()),
            Ask::Remove(id, _) => (Operation::DeleteDisk, &**id, String::new()),
            Ask::Events => (Operation::WatchEvents, "", String::new()),
        };
        let query = match self {
            Ask::Remove(_, mode) => format!("?mode={mode}"),
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
