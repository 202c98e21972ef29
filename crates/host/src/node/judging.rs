//! Judges, before the first disk is taken over from a node that runs, whether this one can serve all that are served there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cleave_api::{ClientError, DiskState, HttpClient};
use cleave_config::DiskConfig;
use cleave_disk::ContentOrigin;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::timeout;

use super::files::KeptLimits;
use super::opening::{out_of_reach, refuse_out_of_reach};
use super::shared::Node;
use crate::failure::Failure;
use crate::hosted::aside::aside;
use crate::hosted::disk_host::FileFault;
use crate::source;

/// Longest wait for the list of disks.
const LIST_TIME: Duration = Duration::from_secs(5);
/// Longest wait for the judgement, which looks at images.
const JUDGE_TIME: Duration = Duration::from_secs(10);
/// Where the list of disks is found, with their descriptions.
const LIST: &str = "/v1/disks?full=1";

/// How the disks would come to this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// From the running one, while that serves them.
    TakesOver,
    /// When that one has ended.
    Restarts,
}

/// What is read of a disk that the other node serves.
#[derive(Debug, Deserialize)]
struct ServedDisk {
    id: String,
    state: Value,
    socket: String,
    spec: Spec,
}

#[derive(Debug, Deserialize)]
struct Spec {
    #[serde(default)]
    persistent: Value,
    disk: Value,
    #[serde(default)]
    stripe: Value,
    #[serde(default)]
    stripe_raw: Value,
}

impl Node {
    /// Refuses to take over from a node that serves a disk which this one could never take. That node changes no disk meanwhile, so the
    /// folder of state stays as it is.
    ///
    /// A disk whose storage hangs cannot be judged. Here it would not come to be served, and its guest would lose it, so that node goes on.
    pub(super) async fn judge_served(self: &Arc<Node>, next: Next) -> Result<(), Failure> {
        let stays =
            |why: &str| Failure::run(format!("--take-over: the running node goes on: {why}"));
        let judging = Arc::<Mutex<String>>::default();
        let (node, named) = (self.clone(), judging.clone());
        let judged = aside("judge", move || Ok(node.stays(next, &named)));
        match timeout(JUDGE_TIME, judged).await {
            Ok(Ok(found)) => found?.map_or(Ok(()), |why| Err(stays(&why))),
            Ok(Err(error)) => Err(Failure::run(format!("cannot start a thread: {error}"))),
            Err(_) => {
                let name = judging.lock().unwrap_or_else(PoisonError::into_inner);
                Err(stays(&match name.is_empty() {
                    true => "the folder of --state does not answer".to_owned(),
                    false => format!("disk {name}: its storage does not answer"),
                }))
            }
        }
    }

    /// Returns which disk could not be taken, and why. `judging`: set to the name of the disk that is being judged.
    fn stays(&self, next: Next, judging: &Mutex<String>) -> Result<Option<String>, Failure> {
        let client = HttpClient::new(&self.control, LIST_TIME);
        let list = client.send("GET", LIST, "");
        let served = match list.and_then(|reply| reply.json::<Vec<ServedDisk>>()) {
            Ok(served) => served,
            // One that dies now is found out when its disks are opened.
            Err(ClientError::NoSocket | ClientError::NoListener) => return Ok(None),
            Err(error) => return Err(Failure::run(format!("--take-over: {error}"))),
        };
        let mut files: BTreeMap<_, _> = self.files.load()?.into_iter().collect();
        let groups = self.files.load_groups()?;
        let serving = serde_json::to_value(DiskState::Serving).unwrap_or_default();
        let mut served = served.into_iter().filter(|disk| disk.state == serving);
        let why = served.find_map(|disk| {
            let mut name = judging.lock().unwrap_or_else(PoisonError::into_inner);
            name.clone_from(&disk.id);
            drop(name);
            let file = files.remove(&disk.id);
            let judged = self.judge_disk(next, &disk, file, &groups);
            judged.err().map(|why| format!("disk {}: {why}", disk.id))
        });
        Ok(why)
    }

    /// Judges what the folder of state says of a disk that is served.
    fn judge_disk(
        &self,
        next: Next,
        disk: &ServedDisk,
        file: Option<Result<DiskConfig, FileFault>>,
        groups: &BTreeMap<String, KeptLimits>,
    ) -> Result<(), String> {
        // It ends with the node that runs, which therefore hands nothing over.
        if disk.spec.persistent == Value::Bool(false) {
            return Ok(());
        }
        let missing = || "its file in the folder of --state is missing: change a field of the disk, which writes it again";
        let config = file.ok_or_else(missing)?;
        let config = config.map_err(|fault| fault.line().to_owned())?;
        if let Some(Err(why)) = config.limit_group().and_then(|group| groups.get(group)) {
            return Err(why.clone());
        }
        let service = self.service(&disk.id, &config)?;
        let own = serde_json::to_value(&config).unwrap_or_default();
        let is_there = |field: &str, there: &Value| own.get(field).unwrap_or(&Value::Null) == there;
        if !is_there("disk", &disk.spec.disk) {
            return Err(format!(
                "its file in the folder of --state is another disk, {}",
                service.disk.line()
            ));
        }
        // Its guest would find its blocks at other places.
        if !is_there("stripe", &disk.spec.stripe) || !is_there("stripe_raw", &disk.spec.stripe_raw)
        {
            return Err("its file in the folder of --state is another stripe".to_owned());
        }
        let socket = self.socket_path(&disk.id).display().to_string();
        if socket != disk.socket {
            return Err(format!(
                "its socket is {}, and here it would be {socket}: give the same --run",
                disk.socket
            ));
        }
        if let Some(path) = out_of_reach(&self.images, &service) {
            return Err(refuse_out_of_reach(&path).to_string());
        }
        match next {
            // The files that are open there are used here.
            Next::TakesOver => source::missing_file(&service.disk).map_or(Ok(()), Err),
            Next::Restarts => {
                let content = match self.files.was_opened(&disk.id, &config.disk) {
                    true => ContentOrigin::Guest,
                    false => ContentOrigin::Unknown,
                };
                source::judge_served(&service.disk, &service.open, content)
            }
        }
    }
}
