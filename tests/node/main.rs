//! `cleave node`: disks are added, kept, removed and served over its control socket, and one does not feel another.
#![allow(clippy::unwrap_used, clippy::panic)] // shared test code lies outside of #[test] functions

mod deleted;
mod groups;
mod kept;
mod memory;
mod neighbours;
mod pool;
mod put;
mod scale;
mod silent;
mod state_file;

use std::path::Path;

use cleave_tests::{Node, Scratch, UnresponsiveFs, ignored, is_root};
use serde_json::{Value, json};

pub(crate) fn ram() -> Value {
    json!({"disk": ["ram:4M"], "queues": 2, "persistent": false})
}

/// Kills it, and starts it again with the same files.
pub(crate) fn killed(mut node: Node, meanwhile: impl FnOnce(&Path)) -> Node {
    node.daemon.die().unwrap();
    meanwhile(node.daemon.scratch().path());
    let next = node.daemon.start_again().unwrap();
    node.daemon.abandon();
    Node { daemon: next }
}

/// A file system that can fall silent, and its folder.
pub(crate) fn mounted() -> Option<(Scratch, UnresponsiveFs)> {
    if !is_root() {
        ignored("needs root, to mount");
        return None;
    }
    let folder = Scratch::in_memory();
    let silent = UnresponsiveFs::mount(&folder, 4 << 20).unwrap();
    Some((folder, silent))
}
