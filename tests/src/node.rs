//! A node under test: `cleave node` with its folders in a temporary one.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use cleave_client::{Client, DeviceOptions};
use serde_json::Value;

use crate::http::{Response, fetch, get};
use crate::{Daemon, Scratch, wait_until};

/// A running node.
#[derive(Debug)]
pub struct Node {
    /// Its process. The socket is that of the control interface.
    pub daemon: Daemon,
}

impl Node {
    /// Starts one without disks.
    pub fn start() -> Node {
        Node::start_with(Scratch::in_memory(), &[])
    }

    /// Starts one in this folder, with more options. Disks that the folder keeps come back.
    pub fn start_with(scratch: Scratch, options: &[&OsStr]) -> Node {
        let (control, mut line) = line(&scratch);
        line.extend(options.iter().map(|option| (*option).to_owned()));
        Node {
            daemon: Daemon::with_args(scratch, control, &line),
        }
    }

    /// Starts one in this folder under `sh`, after shell commands that may change the line in `$@`.
    pub fn start_after(prelude: &str, scratch: Scratch) -> Node {
        let (control, line) = line(&scratch);
        Node {
            daemon: Daemon::with_args_after(prelude, scratch, control, &line),
        }
    }

    /// Sends a request to the control interface.
    pub fn ask(&self, method: &str, path: &str, body: &str) -> Response {
        fetch(self.daemon.socket(), method, path, body)
    }

    /// Asks to add a disk.
    pub fn put(&self, id: &str, body: &Value) -> Response {
        self.ask("PUT", &format!("/v1/disks/{id}"), &body.to_string())
    }

    /// Adds a disk.
    pub fn add(&self, id: &str, body: &Value) {
        let answer = self.put(id, body);
        // Storage that is slow to open is waited for.
        let is_late = answer.status == 202 && wait_until(|| self.state(id) == "serving");
        assert!(answer.status == 201 || is_late, "{id}: {}", answer.body);
    }

    /// Removes a disk, with its frontend.
    pub fn remove(&self, id: &str) {
        let answer = self.ask("DELETE", &format!("/v1/disks/{id}?mode=drain"), "");
        assert_eq!(answer.status, 200, "{id}: {}", answer.body);
    }

    /// The answer of the interface to a GET.
    pub fn get(&self, path: &str) -> Value {
        get(self.daemon.socket(), path)
    }

    /// Its answer about a disk.
    pub fn disk(&self, id: &str) -> Value {
        self.get(&format!("/v1/disks/{id}"))
    }

    /// The state of a disk.
    pub fn state(&self, id: &str) -> String {
        self.disk(id)["state"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }

    /// The socket of a disk.
    pub fn socket(&self, id: &str) -> PathBuf {
        disk_socket(self.daemon.scratch().path(), id)
    }

    /// Opens a client of a disk. The node refuses it while the session before drains.
    pub fn open(&self, id: &str, options: &DeviceOptions) -> Client {
        let mut client = None;
        wait_until(|| {
            client = Client::open(&self.socket(id), options).ok();
            client.is_some()
        });
        client.unwrap_or_else(|| panic!("{id}: no client\n{}", self.daemon.log_tail()))
    }
}

/// The control socket of a node in this folder, and its arguments.
fn line(scratch: &Scratch) -> (PathBuf, Vec<OsString>) {
    let (run, state) = (scratch.join("run"), scratch.join("state"));
    let control = run.join("control.sock");
    let words = ["node".into(), "--state".into(), state.into()];
    let line = words.into_iter().chain(["--run".into(), run.into()]);
    (control, line.collect())
}

/// The socket of a disk of the node in this folder.
pub fn disk_socket(folder: &Path, id: &str) -> PathBuf {
    folder.join("run").join(id).join("disk.sock")
}
