//! The options of the socket for metrics, which `cleave serve` and `cleave node` have.

use std::path::PathBuf;

use clap::Args;
use cleave_host::SocketSettings;

/// The socket for the metrics.
#[derive(Debug, Clone, Args)]
pub(super) struct MetricsOptions {
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
    /// Returns the socket, if there is to be one.
    pub(super) fn socket(&self) -> Option<SocketSettings> {
        let path = self.metrics.clone()?;
        let group = self.metrics_group.clone();
        Some(SocketSettings { path, group })
    }
}
