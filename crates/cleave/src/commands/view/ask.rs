//! Asks a control socket for what its disks do.

use std::path::Path;
use std::time::Duration;

use cleave_api::{ClientError, DiskReport, HttpClient, Operation};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::commands::remote::{Listed, list};

/// An answer takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// A disk behind a socket.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(crate) enum ReportedDisk {
    Served(Box<DiskReport>),
    /// A disk that is not served.
    Away(Listed),
}

impl ReportedDisk {
    pub(crate) fn id(&self) -> &str {
        match self {
            ReportedDisk::Served(report) => &report.id,
            ReportedDisk::Away(away) => &away.id,
        }
    }

    pub(crate) fn report(&self) -> Option<&DiskReport> {
        match self {
            ReportedDisk::Served(report) => Some(report),
            ReportedDisk::Away(_) => None,
        }
    }

    /// The disk, if it is not served because of a fault.
    pub(crate) fn failed(&self) -> Option<&Listed> {
        match self {
            ReportedDisk::Away(away) if away.error.is_some() => Some(away),
            _ => None,
        }
    }
}

/// Asks for all disks behind a socket. Each is asked for by itself: what the disks of a node have to tell has no bound, and a node
/// that told it at once would do nothing else meanwhile.
pub(crate) fn disks(socket: &Path) -> Result<Vec<ReportedDisk>, ClientError> {
    let client = HttpClient::new(socket, PATIENCE);
    let mut shown = Vec::new();
    for disk in list(&client)? {
        if !disk.is_served() {
            shown.push(ReportedDisk::Away(disk));
            continue;
        }
        shown.extend(self::disk(&client, &disk.id)?);
    }
    Ok(shown)
}

/// Asks for a disk. `None`: it has gone.
pub(crate) fn disk(client: &HttpClient, id: &str) -> Result<Option<ReportedDisk>, ClientError> {
    let reply = client.call(Operation::GetDisk, id, "")?;
    match reply.refusal() {
        None => read(reply.json()?).map(Some),
        Some(_) => Ok(None),
    }
}

fn read(disk: Value) -> Result<ReportedDisk, ClientError> {
    let is_served = disk.get("state").is_none_or(|state| state == "serving");
    match is_served {
        true => typed(disk).map(ReportedDisk::Served),
        false => typed(disk).map(ReportedDisk::Away),
    }
}

fn typed<T: DeserializeOwned>(disk: Value) -> Result<T, ClientError> {
    serde_json::from_value(disk).map_err(|error| ClientError::Unexpected(error.to_string()))
}
