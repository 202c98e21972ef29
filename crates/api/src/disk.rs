//! A disk in the answers of the interface.

use cleave_config::{DiskConfig, Labels};
use schemars::JsonSchema;
use serde::ser::{Error, Serializer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::report::DiskReport;

words! {
    /// The state of a disk of a node.
    DiskState {
        /// The node opens the disk.
        Opening = "opening",
        /// The disk is served.
        Serving = "serving",
        /// The disk has been told to end.
        Ending = "ending",
        /// The disk cannot be served, and is tried again.
        Failed = "failed",
        /// The disk has ended.
        Ended = "ended",
    }
}

/// A disk of a node in a few fields: one of the list of `GET /v1/disks`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DiskRow {
    /// Names the disk in the paths of this interface.
    pub id: String,
    /// The state of the disk.
    pub state: DiskState,
    /// Generation of its description, for `If-Match`: another one after each change of that.
    pub generation: String,
    /// Names and values by which the disk's owner finds it.
    pub labels: Labels,
    /// The socket to which frontends connect.
    pub socket: String,
    /// The storage of the disk, as it was named.
    pub name: String,
    /// The serial number that the guest sees.
    pub serial: Option<String>,
    /// Size of the disk. 0 while it is not served.
    pub size_bytes: u64,
    /// A frontend is connected.
    pub connected: bool,
    /// Why the disk is not served, if that is a fault.
    pub error: Option<String>,
}

/// A disk of a node: its row, its description, and while it is served its report.
#[derive(Debug, Clone, PartialEq, JsonSchema)]
#[schemars(rename = "Disk")]
pub struct NodeDisk {
    /// The fields that the list has as well.
    #[schemars(flatten)]
    pub row: DiskRow,
    /// The description of the disk, with the changes that were made since.
    pub spec: DiskConfig,
    /// State of the disk while it is served.
    #[schemars(flatten)]
    pub report: Option<Box<DiskReport>>,
}

/// Writes the fields of all parts side by side. The row has the last word on those that the report has as well.
impl Serialize for NodeDisk {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut all = Map::new();
        for part in [to_value(&self.report), to_value(&self.row)] {
            if let Value::Object(fields) = part.map_err(S::Error::custom)? {
                all.extend(fields);
            }
        }
        let spec = to_value(&self.spec).map_err(S::Error::custom)?;
        all.insert("spec".to_owned(), spec);
        all.serialize(to)
    }
}

fn to_value(part: &impl Serialize) -> Result<Value, serde_json::Error> {
    serde_json::to_value(part)
}

/// Reply to the removal of a disk.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct DiskDeleted {
    /// The id of the disk.
    pub id: String,
    /// The word `deleted`.
    pub state: DeletedState,
    /// Fate of the requests that were in flight, if they did not end.
    pub lost: Option<String>,
}

words! {
    /// The state of a disk that has been removed.
    DeletedState {
        /// The disk is not in the list any more.
        Deleted = "deleted",
    }
}
