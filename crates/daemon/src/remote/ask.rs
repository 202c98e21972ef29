//! The requests of `cleave disk`.

use std::path::PathBuf;

use serde_json::{Map, Value};

/// A command.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Remote {
    /// The node's control socket.
    pub(crate) socket: PathBuf,
    /// Print answers as they are.
    pub(crate) json: bool,
    pub(crate) ask: Ask,
}

/// A request to the node. Texts are names of disks; maps are fields of a disk's file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ask {
    Add(String, Map<String, Value>),
    List,
    Show(String),
    Set(String, Map<String, Value>),
    /// `POST` to this part of the disk, with this body; null: none.
    Order(String, &'static str, Value),
    /// With this mode.
    Remove(String, &'static str),
    Events,
}
