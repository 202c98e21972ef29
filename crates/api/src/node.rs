//! The process that serves the disks, in the answers of the interface.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

words! {
    /// The kind of a process.
    ProcessKind {
        /// `cleave node`: disks are added and removed while it runs.
        Node = "node",
        /// `cleave serve`: one disk, from the start to the end.
        Disk = "disk",
    }
}

/// The process that serves the disks, and what it has room for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Node")]
pub struct NodeReport {
    /// The kind of process. A `node` has all fields.
    pub kind: ProcessKind,
    /// Version of the program.
    pub version: String,
    /// Process ID.
    pub pid: u32,
    /// Names this start of the process, as the events do.
    pub boot: String,
    /// When the process started, in seconds since 1970.
    pub start_seconds: f64,
    /// The time of this answer, in seconds since 1970.
    pub now_seconds: f64,
    /// A service manager keeps the disks, with the connections of their frontends, while this process is restarted.
    #[serde(default)]
    pub keeps: bool,
    /// Room for disks.
    pub disks: DiskRoom,
    /// Room for open files.
    pub open_files: FileRoom,
    /// How the node was started.
    #[serde(flatten)]
    pub setup: Option<NodeSetup>,
}

/// Room for disks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DiskRoom {
    /// Number of disks in the list.
    pub count: u64,
    /// Most disks that there can be.
    pub max: u64,
}

/// Room for open files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FileRoom {
    /// Files that may have to be open at a time with these disks, with guests that use all vrings.
    pub needed: u64,
    /// Most files that may be open.
    pub max: u64,
}

/// How a node was started.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeSetup {
    /// Folder that keeps the disks.
    pub state: String,
    /// Folder of the sockets of the disks.
    pub run: String,
    /// Folders of images, block devices and profiles. Empty: they are opened everywhere.
    pub images: Vec<String>,
    /// Images of Ceph clusters are served too.
    pub ceph: bool,
    /// Threads that serve many disks.
    pub pools: Vec<PoolReport>,
}

/// A pool of threads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PoolReport {
    /// Its name, for the field `pool` of a disk.
    pub name: String,
    /// The CPUs on which it has a thread each.
    pub cpus: Vec<usize>,
}
