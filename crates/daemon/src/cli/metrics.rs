//! The options of the socket for metrics, which `cleave serve` and `cleave node` have.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::failure::Failure;
use crate::socket::{self, Listening};

/// The socket for the metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub(crate) struct MetricsOptions {
    /// Make a socket here that has GET /metrics only, for Prometheus
    ///
    /// Everybody who can enter its folder may read it (mode 0666), or with --metrics-group that group. A stale one is
    /// replaced; the file is removed when cleave ends.
    #[arg(long, value_name = "PATH")]
    metrics: Option<PathBuf>,
    /// Group that may read the metrics, and nobody else (mode 0660): a name or a number
    #[arg(long, value_name = "GROUP", requires = "metrics")]
    metrics_group: Option<String>,
}

impl MetricsOptions {
    /// The path of the socket.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.metrics.as_deref()
    }

    /// Makes the path absolute, for a process that may change the folder in which it works.
    pub(super) fn made_absolute(self) -> MetricsOptions {
        let path = self.metrics;
        let metrics = path.map(|path| std::path::absolute(&path).unwrap_or(path));
        MetricsOptions { metrics, ..self }
    }

    /// Opens the socket, if there is to be one.
    pub(crate) fn open(&self) -> Result<Option<Listening>, Failure> {
        let group = self.metrics_group.as_deref();
        let group = group.map(|group| socket::group_number("--metrics-group", group));
        let group = group.transpose()?;
        let opened = self.path().map(|path| socket::open_shared(path, group));
        opened.transpose()
    }
}
