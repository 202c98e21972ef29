//! The requests of `cleave disk`.

use std::path::PathBuf;

use cleave_config::{Change, DiskConfig};
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
    /// `POST` to this part of the disk, with this body; null: none.
    Order(String, &'static str, Value),
    /// With this mode.
    Remove(String, &'static str),
    Events,
}
