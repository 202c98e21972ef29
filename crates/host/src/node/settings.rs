//! The settings of a node.

use std::path::PathBuf;

use tracing::level_filters::LevelFilter;

use crate::socket::SocketSettings;

/// A node. The paths are absolute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSettings {
    /// The folder that keeps the disks.
    pub state: PathBuf,
    /// The folder of the sockets of the disks.
    pub run: PathBuf,
    /// The control socket.
    pub control: SocketSettings,
    /// The socket of the metrics.
    pub metrics: Option<SocketSettings>,
    /// Folders of images; none: everywhere.
    pub images: Vec<PathBuf>,
    /// True if the process is confined.
    pub sandbox: bool,
    /// The threads that serve many disks.
    pub pools: Vec<PoolSettings>,
    /// True if images of Ceph clusters are served.
    pub ceph: bool,
    /// True if the disks are taken over from the node that has the control socket, if one runs.
    pub take_over: bool,
    /// The least severe messages that are written.
    pub log: LevelFilter,
}

/// A pool of a node: one thread on each of its CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSettings {
    /// The name by which disks ask for the pool.
    pub name: String,
    /// The CPUs.
    pub cpus: Vec<usize>,
}
