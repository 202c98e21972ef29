//! The host of one disk, that of `cleave serve`: it is served until the process ends, and the command line keeps its description.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use cleave_api::EventName;
use cleave_config::DiskConfig;
use serde_json::Value;
use tokio::sync::mpsc;

use crate::disk_server::Order;
use crate::events::Events;
use crate::failure::Failure;
use crate::hosted::disk::HostedState;
use crate::hosted::disk_host::{DiskHost, FileFault, OpenResult, Past, Removal, ServerEnd, Work};
use crate::process::systemd::Manager;
use crate::status::DiskStatus;

/// The host of one disk.
#[derive(Debug)]
pub(crate) struct Alone {
    /// The socket of its frontends, as it is shown.
    pub(crate) endpoint: String,
    pub(crate) events: Arc<Events>,
}

impl DiskHost for Alone {
    /// The disk is open when its life begins, and is not opened again.
    type Opened = Infallible;

    fn judge(&self, _: &str, _: &DiskConfig) -> Result<u64, String> {
        Ok(0)
    }

    fn read(self: Arc<Alone>, _: &str) -> Work<Result<DiskConfig, FileFault>> {
        let why = "the disk of `cleave serve` has no file of its own".to_owned();
        Box::pin(std::future::ready(Err(FileFault::Lasting(why))))
    }

    fn has_frontend_left(&self, _: &str) -> bool {
        false
    }

    fn open(self: Arc<Alone>, _: &str, _: &DiskConfig, _: Past) -> Work<OpenResult<Alone>> {
        let refused = Failure::run("the disk was opened when the process began: start it again");
        Box::pin(std::future::ready(Err(refused)))
    }

    fn leave(self: Arc<Alone>, _: &str, _: Arc<Manager>) -> Work<()> {
        Box::pin(std::future::ready(()))
    }

    fn serve(
        self: Arc<Alone>,
        _: &str,
        opened: Infallible,
        _: mpsc::Receiver<Order>,
    ) -> Result<(Arc<DiskStatus>, Work<ServerEnd>), Failure> {
        match opened {}
    }

    fn keep(
        self: Arc<Alone>,
        _: &str,
        _: Option<&DiskConfig>,
        _: Option<&str>,
    ) -> Work<io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn remove(self: Arc<Alone>, _: &str, _: Option<&str>) -> Work<io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    // A group takes several disks.

    fn is_group_due(&self, _: &str) -> bool {
        false
    }

    fn joins(&self, _: &DiskConfig) {}

    fn leaves(&self, _: &DiskConfig) {}

    fn with_group_limits(&self, config: &DiskConfig) -> DiskConfig {
        config.clone()
    }

    fn set_group_limits(&self, _: &str, _: &DiskConfig) {}

    fn take_limits_back(self: Arc<Alone>, _: &str, _: &DiskConfig) {}

    fn tell_change(&self, id: &str, details: Value) {
        self.events.tell(id, EventName::Changed, details);
    }

    fn socket(&self, _: &str) -> String {
        self.endpoint.clone()
    }

    fn tell(&self, id: &str, state: &HostedState, config: &DiskConfig) {
        let details = state.details(&self.endpoint, config);
        self.events.tell(id, state.word().into(), details);
    }

    fn forget(&self, _: &str, _: Removal) {}
}
