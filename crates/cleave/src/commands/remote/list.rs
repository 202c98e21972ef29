//! The disks of a control socket.

use std::path::Path;

use cleave_api::{ClientError, HttpClient, Operation, natural};
use cleave_host::Failure;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::lines::clean;

/// A disk in the list of a control socket.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Listed {
    pub(crate) id: String,
    /// A `cleave serve` of an earlier version leaves it out.
    #[serde(default = "serving")]
    pub(crate) state: String,
    pub(crate) name: String,
    /// Why it is not served, if that is a fault.
    pub(crate) error: Option<String>,
    /// The other fields, for a reader that wants all as it came.
    #[serde(flatten)]
    more: Map<String, Value>,
}

fn serving() -> String {
    "serving".to_owned()
}

impl Listed {
    /// Returns false for a disk that has nothing to report, and of which nothing is held.
    pub(crate) fn is_served(&self) -> bool {
        self.state == "serving"
    }

    /// Returns its state in words, with the reason if it has one.
    pub(crate) fn words(&self) -> String {
        let error = self.error.as_ref().map(|error| format!(": {error}"));
        clean(&format!("{}{}", self.state, error.unwrap_or_default()))
    }
}

/// Asks for the list of all disks, `d2` before `d10`.
pub(crate) fn list(client: &HttpClient) -> Result<Vec<Listed>, ClientError> {
    let reply = client.call(Operation::ListDisks, "", "")?;
    if let Some(why) = reply.refusal() {
        return Err(ClientError::Refused(why));
    }
    let mut all: Vec<Listed> = reply.json()?;
    all.sort_by_cached_key(|disk| natural(&disk.id));
    Ok(all)
}

/// Returns the id of the disk of a socket that has no other.
pub(super) fn only(socket: &Path, disks: &[Listed]) -> Result<String, Failure> {
    match disks {
        [one] => Ok(one.id.clone()),
        [] => Err(Failure::input(format!(
            "control socket {} has no disk",
            socket.display()
        ))),
        several => Err(Failure::input(format!(
            "control socket {} has {} disks: give the ID of one; `cleave disk list` shows them",
            socket.display(),
            several.len()
        ))),
    }
}

/// Says why there is no answer from a socket, and what to do.
pub(crate) fn unanswered(socket: &Path, error: &ClientError) -> String {
    let socket = socket.display();
    match error {
        ClientError::Refused(why) => why.clone(),
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
    use serde_json::json;

    use super::*;

    #[test]
    fn the_hint_fits_the_reason() {
        let path = Path::new("/run/a.ctl");
        let line = unanswered(path, &ClientError::OtherUser);
        assert!(line.ends_with("run this command as that user"), "{line}");
        let line = unanswered(path, &ClientError::NoSocket);
        assert!(
            line.ends_with(
                "no such socket: is a `cleave serve --control /run/a.ctl`, or the node of that socket, running?"
            ),
            "{line}"
        );
    }

    #[test]
    fn a_disk_goes_without_its_id_if_it_is_the_only_one() {
        let path = Path::new("/run/a.ctl");
        let disk = |id: &str| json!({"id": id, "name": "/a", "more": 1});
        let disks = json!([disk("a"), disk("b")]);
        let disks: Vec<Listed> = serde_json::from_value(disks).unwrap();
        assert!(disks.iter().all(Listed::is_served));
        let told = |disks: &[Listed]| only(path, disks).unwrap_err().to_string();
        assert_eq!(only(path, &disks[..1]).unwrap(), "a");
        assert_eq!(told(&[]), "control socket /run/a.ctl has no disk");
        assert!(told(&disks).contains(" has 2 disks: give the ID of one"));
    }
}
