//! What a node can be asked: one table of paths. The router of the node, the OpenAPI document and the client are made from it.

use cleave_config::{Change, DiskConfig};

use crate::content::{BodyContent, json};
use crate::disk::{DiskDeleted, NodeDisk};
use crate::id::encoded;
use crate::node::NodeReport;
use crate::orders::{
    Flushed, HeldRequests, QuiesceRequest, Quiesced, ResumeRequest, Resumed, Snapshot,
    SnapshotRequest,
};

words! {
    /// The method of a request.
    HttpMethod {
        /// Reads.
        Get = "GET",
        /// Adds.
        Put = "PUT",
        /// Changes.
        Patch = "PATCH",
        /// Removes.
        Delete = "DELETE",
        /// Has something done.
        Post = "POST",
    }
}

words! {
    /// A part of the interface.
    Tag {
        /// The disks of the node.
        Disks = "disks",
        /// Events of the disks.
        Events = "events",
        /// The node itself.
        Node = "node",
    }
}

/// The values that a parameter takes.
#[derive(Debug, Clone, Copy)]
pub enum QueryValue {
    /// One of these, each with a name for programs.
    Word(&'static [(&'static str, &'static str)]),
    /// A whole number.
    Number,
    /// Any text.
    Text,
}

/// A parameter after the `?` of a URL.
#[derive(Debug, Clone, Copy)]
pub struct Query {
    /// The name.
    pub name: &'static str,
    /// The values that it takes.
    pub values: QueryValue,
    /// The value that it has if it is left out.
    pub default: Option<&'static str>,
    /// The meaning.
    pub about: &'static str,
}

/// A row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// The method.
    pub method: HttpMethod,
    /// The path, in which `{id}` stands for the id of a disk.
    pub path: &'static str,
    /// The part of the interface that it belongs to.
    pub tag: Tag,
    /// The effect, in a line.
    pub does: &'static str,
    /// What may follow the path.
    pub query: &'static [Query],
    /// The body that it takes.
    pub body: Option<BodyContent>,
    /// True if there must be a body.
    pub needs_body: bool,
    /// How it answers when it is done.
    pub answers: &'static [(u16, BodyContent)],
    /// How it answers when it refuses: always with a problem document.
    pub refusals: &'static [u16],
}

impl Route {
    /// Returns true if it changes the description of a disk.
    pub fn changes_a_disk(&self) -> bool {
        matches!(
            self.method,
            HttpMethod::Put | HttpMethod::Patch | HttpMethod::Delete
        )
    }

    const fn new(method: HttpMethod, path: &'static str, tag: Tag, does: &'static str) -> Route {
        Route {
            method,
            path,
            tag,
            does,
            query: &[],
            body: None,
            needs_body: false,
            answers: &[],
            refusals: &[],
        }
    }
}

const FULL: Query = Query {
    name: "full",
    values: QueryValue::Word(&[("1", "Yes")]),
    default: None,
    about: "With 1 each disk has all the fields that getDisk answers with.",
};

const LABEL: Query = Query {
    name: "label",
    values: QueryValue::Text,
    default: None,
    about: "Only disks with this label: owner=web.",
};

const MODE: Query = Query {
    name: "mode",
    values: QueryValue::Word(&[("safe", "Safe"), ("drain", "Drain"), ("hard", "Hard")]),
    default: Some("safe"),
    about: "safe: refuse while a frontend is connected. drain: disconnect it, and wait for its requests at most as long as \
            stop_deadline says. hard: do not wait.",
};

const SINCE: Query = Query {
    name: "since",
    values: QueryValue::Number,
    default: None,
    about: "Begins with the events after this number, instead of all disks, if they are still kept. Needs boot.",
};

const BOOT: Query = Query {
    name: "boot",
    values: QueryValue::Text,
    default: None,
    about: "The start of the process that the number belongs to, as the line listening named it.",
};

/// Makes [`Operation`] and its table. The comment of a row is what the document says of the operation.
macro_rules! operations {
    ($(
        #[doc = $does:literal]
        $Name:ident = $id:literal: $Method:ident $path:literal in $Tag:ident
        $(, $field:ident($($value:tt)+))*;
    )+) => {
        words! {
            /// An operation, by its `operationId` in the OpenAPI document.
            Operation { $(#[doc = $does] $Name = $id,)+ }
        }

        impl Operation {
            /// Returns the row of the operation.
            pub const fn route(self) -> Route {
                match self {
                    $(Operation::$Name => Route {
                        $($field: const { $($value)+ },)*
                        ..Route::new(HttpMethod::$Method, $path, Tag::$Tag, $does)
                    },)+
                }
            }
        }
    };
}

operations! {
    /// Lists all disks
    ListDisks = "listDisks": Get "/v1/disks" in Disks,
        query(&[FULL, LABEL]), answers(&[(200, BodyContent::DISKS)]), refusals(&[400]);
    /// Shows a disk
    GetDisk = "getDisk": Get "/v1/disks/{id}" in Disks,
        answers(&[(200, json::<NodeDisk>())]), refusals(&[400, 404]);
    /// Adds a disk: 201. The disk is there already, with the same options: 200. It is still being opened after 10 s: 202
    PutDisk = "putDisk": Put "/v1/disks/{id}" in Disks,
        body(Some(json::<DiskConfig>())), needs_body(true),
        answers(&[(200, json::<NodeDisk>()), (201, json::<NodeDisk>()), (202, json::<NodeDisk>())]),
        refusals(&[400, 408, 409, 412, 413, 422, 500, 503, 507]);
    /// Changes how a disk is served
    PatchDisk = "patchDisk": Patch "/v1/disks/{id}" in Disks,
        body(Some(json::<Change>())), needs_body(true),
        answers(&[(200, json::<NodeDisk>())]), refusals(&[400, 404, 408, 409, 412, 413, 500]);
    /// Removes a disk. Its image stays
    DeleteDisk = "deleteDisk": Delete "/v1/disks/{id}" in Disks,
        query(&[MODE]), answers(&[(200, json::<DiskDeleted>())]), refusals(&[400, 404, 409, 412, 500]);
    /// Checks the size of a disk, and reports growth to the guest. The check takes longer than 5 s: 202
    ResizeDisk = "resizeDisk": Post "/v1/disks/{id}/resize" in Disks,
        answers(&[(200, json::<NodeDisk>()), (202, json::<NodeDisk>())]), refusals(&[400, 404, 409, 500]);
    /// Tries a failed disk again at once
    StartDisk = "startDisk": Post "/v1/disks/{id}/start" in Disks,
        answers(&[(200, json::<NodeDisk>())]), refusals(&[400, 404, 409, 422]);
    /// Repeats held requests, and ends a quiet. Says whether the disk was quiesced until then
    ResumeDisk = "resumeDisk": Post "/v1/disks/{id}/resume" in Disks,
        body(Some(json::<ResumeRequest>())), answers(&[(200, json::<Resumed>())]), refusals(&[400, 404, 408, 409, 413]);
    /// Ends held requests as I/O errors
    FailDisk = "failDisk": Post "/v1/disks/{id}/fail" in Disks,
        answers(&[(200, json::<HeldRequests>())]), refusals(&[400, 404, 409]);
    /// Makes everything durable that was written
    FlushDisk = "flushDisk": Post "/v1/disks/{id}/flush" in Disks,
        answers(&[(200, json::<Flushed>())]), refusals(&[400, 404, 409, 500, 503]);
    /// Finishes what is in flight, flushes, and has new requests wait
    QuiesceDisk = "quiesceDisk": Post "/v1/disks/{id}/quiesce" in Disks,
        body(Some(json::<QuiesceRequest>())), answers(&[(200, json::<Quiesced>())]),
        refusals(&[400, 404, 408, 409, 413, 500, 503]);
    /// Copies a disk as it is at one moment into a new file that shares its blocks
    SnapshotDisk = "snapshotDisk": Post "/v1/disks/{id}/snapshot" in Disks,
        body(Some(json::<SnapshotRequest>())), needs_body(true), answers(&[(201, json::<Snapshot>())]),
        refusals(&[400, 404, 408, 409, 413, 422, 500, 503]);
    /// Shows all disks, and tells what happens to them, a line of JSON for each event, as long as the client listens
    WatchEvents = "watchEvents": Get "/v1/events" in Events,
        query(&[SINCE, BOOT]), answers(&[(200, BodyContent::EVENTS)]), refusals(&[400, 503]);
    /// Shows the process, and what it has room for
    GetNode = "getNode": Get "/v1/node" in Node,
        answers(&[(200, json::<NodeReport>())]);
    /// Answers as long as the control loop runs
    GetHealth = "getHealth": Get "/healthz" in Node,
        answers(&[(200, BodyContent::WORD)]);
    /// Tells when no disk is being opened for the first time any more. Until then: 503
    GetReadiness = "getReadiness": Get "/readyz" in Node,
        answers(&[(200, BodyContent::WORD)]), refusals(&[503]);
    /// Describes this interface
    GetOpenapi = "getOpenapi": Get "/v1/openapi.json" in Node,
        answers(&[(200, BodyContent::DOCUMENT)]);
    /// Shows all disks for Prometheus. Of those that are not served, it shows the states
    GetMetrics = "getMetrics": Get "/metrics" in Node,
        answers(&[(200, BodyContent::METRICS)]);
}

impl Operation {
    /// Returns the path for the disk `id`. A path without a disk stays as it is.
    pub fn path(self, id: &str) -> String {
        self.route().path.replace("{id}", &encoded(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_operations_are_asked_in_the_same_way() {
        let ways = Operation::ALL.iter().map(|operation| {
            let route = operation.route();
            (route.method.name(), route.path)
        });
        let ways: std::collections::BTreeSet<_> = ways.collect();
        assert_eq!(ways.len(), Operation::ALL.len());
        assert_eq!(Operation::FlushDisk.path("a b"), "/v1/disks/a%20b/flush");
        assert_eq!(Operation::ListDisks.path("a"), "/v1/disks");
    }
}
