//! Asks a control socket for what its disk does.

use std::path::Path;
use std::time::Duration;

use cleave_api::{ClientError, DiskEntry, DiskReport, HttpClient, Operation, natural};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// An answer takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// A disk behind a socket.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(super) enum ReportedDisk {
    Served(Box<DiskReport>),
    Away(Away),
}

/// A disk of a node that is not served.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Away {
    pub(super) id: String,
    pub(super) state: String,
    pub(super) name: String,
    /// Why it is not served, if that is a fault.
    pub(super) error: Option<String>,
    /// The other fields, for those who want all as it came.
    #[serde(flatten)]
    more: Map<String, Value>,
}

impl ReportedDisk {
    pub(super) fn id(&self) -> &str {
        match self {
            ReportedDisk::Served(report) => &report.id,
            ReportedDisk::Away(away) => &away.id,
        }
    }

    pub(super) fn report(&self) -> Option<&DiskReport> {
        match self {
            ReportedDisk::Served(report) => Some(report),
            ReportedDisk::Away(_) => None,
        }
    }

    /// The disk, if it is not served because of a fault.
    pub(super) fn failed(&self) -> Option<&Away> {
        match self {
            ReportedDisk::Away(away) if away.error.is_some() => Some(away),
            _ => None,
        }
    }
}

/// Asks for all disks behind a socket. Each is asked for by itself: what the disks of a node have to tell has no bound, and a node
/// that told it at once would do nothing else meanwhile.
pub(super) fn disks(socket: &Path) -> Result<Vec<ReportedDisk>, ClientError> {
    let client = HttpClient::new(socket, PATIENCE);
    let mut shown = Vec::new();
    for disk in list(&client)? {
        if !is_served(&disk) {
            shown.push(read(disk)?);
            continue;
        }
        let DiskEntry { id, .. } = typed(disk)?;
        if let Some(disk) = ask(&client, Operation::GetDisk, &id, "")? {
            shown.push(read(disk)?);
        }
    }
    Ok(shown)
}

/// Orders something of each disk behind a socket that is served. Returns the answers, each with the disk's id.
pub(super) fn each<T: DeserializeOwned>(
    socket: &Path,
    operation: Operation,
    body: &str,
) -> Result<Vec<(String, T)>, ClientError> {
    let client = HttpClient::new(socket, PATIENCE);
    let mut answers = Vec::new();
    for disk in list(&client)?.into_iter().filter(is_served) {
        let DiskEntry { id, .. } = typed(disk)?;
        if let Some(answer) = ask(&client, operation, &id, body)? {
            answers.push((id, answer));
        }
    }
    Ok(answers)
}

/// Asks for the list of all disks, `d2` before `d10`.
fn list(client: &HttpClient) -> Result<Vec<Value>, ClientError> {
    let all: Option<Vec<Value>> = ask(client, Operation::ListDisks, "", "")?;
    let mut all = all.ok_or_else(|| ClientError::Unexpected("it refuses".to_owned()))?;
    all.sort_by_cached_key(|disk| disk.get("id").and_then(Value::as_str).map(natural));
    Ok(all)
}

/// Returns nothing if the request is refused, as for a disk that has gone meanwhile.
fn ask<T: DeserializeOwned>(
    client: &HttpClient,
    operation: Operation,
    id: &str,
    body: &str,
) -> Result<Option<T>, ClientError> {
    let reply = client.call(operation, id, body)?;
    match reply.refusal() {
        Some(_) => Ok(None),
        None => reply.json().map(Some),
    }
}

fn read(disk: Value) -> Result<ReportedDisk, ClientError> {
    match is_served(&disk) {
        true => typed(disk).map(ReportedDisk::Served),
        false => typed(disk).map(ReportedDisk::Away),
    }
}

fn typed<T: DeserializeOwned>(disk: Value) -> Result<T, ClientError> {
    serde_json::from_value(disk).map_err(|error| ClientError::Unexpected(error.to_string()))
}

/// Returns false for a disk of a node that is not served: it has nothing to report, and nothing of it is held.
fn is_served(disk: &Value) -> bool {
    let state = disk.get("state").and_then(Value::as_str);
    state.is_none_or(|state| state == "serving")
}

/// Says why there is no answer from a socket, and what to do.
pub(super) fn unheard(socket: &Path, error: &ClientError) -> String {
    let socket = socket.display();
    match error {
        ClientError::OtherUser => {
            format!("control socket {socket}: {error}: run this command as that user")
        }
        ClientError::Unexpected(_) => format!("control socket {socket}: {error}"),
        _ => format!(
            "control socket {socket}: {error}: is a `cleave serve --control {socket}`, or the node of that socket, running?"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_fits_the_reason() {
        let path = Path::new("/run/a.ctl");
        let line = unheard(path, &ClientError::OtherUser);
        assert!(line.ends_with("run this command as that user"), "{line}");
        let line = unheard(path, &ClientError::NoSocket);
        assert!(
            line.ends_with(
                "no such socket: is a `cleave serve --control /run/a.ctl`, or the node of that socket, running?"
            ),
            "{line}"
        );
    }
}
