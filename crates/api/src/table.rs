//! What a node can be asked: one table of paths. The router of the node, the OpenAPI document and the client are made from it.

use crate::id::encoded;

words! {
    /// An operation, by its `operationId` in the OpenAPI document.
    Operation {
        /// Lists all disks.
        ListDisks = "listDisks",
        /// Shows a disk.
        GetDisk = "getDisk",
        /// Adds a disk.
        PutDisk = "putDisk",
        /// Changes how a disk is served.
        PatchDisk = "patchDisk",
        /// Removes a disk.
        DeleteDisk = "deleteDisk",
        /// Checks the size of a disk.
        ResizeDisk = "resizeDisk",
        /// Tries a failed disk again.
        StartDisk = "startDisk",
        /// Repeats held requests, and ends a quiet.
        ResumeDisk = "resumeDisk",
        /// Ends held requests.
        FailDisk = "failDisk",
        /// Makes what was written durable.
        FlushDisk = "flushDisk",
        /// Has a disk take no requests for a while.
        QuiesceDisk = "quiesceDisk",
        /// Copies a disk.
        SnapshotDisk = "snapshotDisk",
        /// Tells what happens.
        WatchEvents = "watchEvents",
        /// Describes all this.
        GetOpenapi = "getOpenapi",
        /// Shows figures for Prometheus.
        GetMetrics = "getMetrics",
    }
}

words! {
    /// The method of a request.
    Method {
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
        /// What happens to them.
        Events = "events",
        /// The node itself.
        Node = "node",
    }
}

/// The contents of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// A disk.
    Disk,
    /// All disks, each as its row or in full.
    DiskList,
    /// A disk that is to be.
    DiskConfig,
    /// What is to change.
    Change,
    /// Reply to the removal of a disk.
    DiskDeleted,
    /// Reply to `fail`.
    HeldRequests,
    /// Body of `resume`.
    ResumeRequest,
    /// Reply to `resume`.
    Resumed,
    /// Reply to `flush`.
    Flushed,
    /// Body of `quiesce`.
    QuiesceRequest,
    /// Reply to `quiesce`.
    Quiesced,
    /// Body of `snapshot`.
    SnapshotRequest,
    /// Reply to `snapshot`.
    Snapshot,
    /// The OpenAPI document.
    OpenApi,
    /// Lines without end, each an event.
    Events,
    /// The text format of Prometheus.
    Metrics,
}

/// The part of a URL after `?`.
#[derive(Debug, Clone, Copy)]
pub struct Query {
    /// Its name.
    pub name: &'static str,
    /// All values that it takes, each with a name for programs.
    pub values: &'static [(&'static str, &'static str)],
    /// The value that it has if it is left out.
    pub default: Option<&'static str>,
    /// Its meaning.
    pub about: &'static str,
}

/// A row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// The method.
    pub method: Method,
    /// The path, in which `{id}` stands for the id of a disk.
    pub path: &'static str,
    /// The part of the interface that it belongs to.
    pub tag: Tag,
    /// The effect, in a line.
    pub does: &'static str,
    /// What may follow the path.
    pub query: Option<Query>,
    /// The body that it takes.
    pub body: Option<Content>,
    /// True if there must be a body.
    pub needs_body: bool,
    /// How it answers when it is done.
    pub answers: &'static [(u16, Content)],
    /// How it answers when it refuses: always with a problem document.
    pub refusals: &'static [u16],
}

impl Route {
    const fn new(method: Method, path: &'static str, tag: Tag, does: &'static str) -> Route {
        Route {
            method,
            path,
            tag,
            does,
            query: None,
            body: None,
            needs_body: false,
            answers: &[],
            refusals: &[],
        }
    }

    const fn query(self, query: Query) -> Route {
        let query = Some(query);
        Route { query, ..self }
    }

    const fn takes(self, body: Content) -> Route {
        let body = Some(body);
        Route { body, ..self }
    }

    const fn needs(self, body: Content) -> Route {
        let needs_body = true;
        Route {
            needs_body,
            ..self.takes(body)
        }
    }

    const fn answers(self, answers: &'static [(u16, Content)]) -> Route {
        Route { answers, ..self }
    }

    const fn refuses(self, refusals: &'static [u16]) -> Route {
        Route { refusals, ..self }
    }
}

const FULL: Query = Query {
    name: "full",
    values: &[("1", "Yes")],
    default: None,
    about: "With 1 each disk has all the fields that getDisk answers with.",
};

const MODE: Query = Query {
    name: "mode",
    values: &[("safe", "Safe"), ("drain", "Drain"), ("hard", "Hard")],
    default: Some("safe"),
    about: "safe: refuse while a frontend is connected. drain: disconnect it, and wait for its requests at most as long as \
            stop_deadline says. hard: do not wait.",
};

impl Operation {
    /// Its row of the table.
    #[allow(clippy::too_many_lines)] // a table
    pub const fn route(self) -> Route {
        use self::{Content as C, Method as M};
        let route = Route::new;
        match self {
            Operation::ListDisks => route(M::Get, "/v1/disks", Tag::Disks, "Lists all disks")
                .query(FULL)
                .answers(&[(200, C::DiskList)]),
            Operation::GetDisk => route(M::Get, "/v1/disks/{id}", Tag::Disks, "Shows a disk")
                .answers(&[(200, C::Disk)])
                .refuses(&[400, 404]),
            Operation::PutDisk => route(
                M::Put,
                "/v1/disks/{id}",
                Tag::Disks,
                "Adds a disk: 201. The disk is there already, with the same options: 200. It is still being opened after 10 s: 202",
            )
            .needs(C::DiskConfig)
            .answers(&[(200, C::Disk), (201, C::Disk), (202, C::Disk)])
            .refuses(&[400, 408, 409, 413, 422, 500, 507]),
            Operation::PatchDisk => route(
                M::Patch,
                "/v1/disks/{id}",
                Tag::Disks,
                "Changes how a disk is served",
            )
            .needs(C::Change)
            .answers(&[(200, C::Disk)])
            .refuses(&[400, 404, 408, 409, 413, 500]),
            Operation::DeleteDisk => route(
                M::Delete,
                "/v1/disks/{id}",
                Tag::Disks,
                "Removes a disk. Its image stays",
            )
            .query(MODE)
            .answers(&[(200, C::DiskDeleted)])
            .refuses(&[400, 404, 409, 500]),
            Operation::ResizeDisk => route(
                M::Post,
                "/v1/disks/{id}/resize",
                Tag::Disks,
                "Checks the size of a disk, and reports growth to the guest. The check takes longer than 5 s: 202",
            )
            .answers(&[(200, C::Disk), (202, C::Disk)])
            .refuses(&[400, 404, 409, 500]),
            Operation::StartDisk => route(
                M::Post,
                "/v1/disks/{id}/start",
                Tag::Disks,
                "Tries a failed disk again at once",
            )
            .answers(&[(200, C::Disk)])
            .refuses(&[400, 404, 422]),
            Operation::ResumeDisk => route(
                M::Post,
                "/v1/disks/{id}/resume",
                Tag::Disks,
                "Repeats held requests, and ends a quiet. Says whether the disk was quiesced until then",
            )
            .takes(C::ResumeRequest)
            .answers(&[(200, C::Resumed)])
            .refuses(&[400, 404, 408, 409, 413]),
            Operation::FailDisk => route(
                M::Post,
                "/v1/disks/{id}/fail",
                Tag::Disks,
                "Ends held requests as I/O errors",
            )
            .answers(&[(200, C::HeldRequests)])
            .refuses(&[400, 404, 409]),
            Operation::FlushDisk => route(
                M::Post,
                "/v1/disks/{id}/flush",
                Tag::Disks,
                "Makes everything durable that was written",
            )
            .answers(&[(200, C::Flushed)])
            .refuses(&[400, 404, 409, 500, 503]),
            Operation::QuiesceDisk => route(
                M::Post,
                "/v1/disks/{id}/quiesce",
                Tag::Disks,
                "Finishes what is in flight, flushes, and has new requests wait",
            )
            .takes(C::QuiesceRequest)
            .answers(&[(200, C::Quiesced)])
            .refuses(&[400, 404, 408, 409, 413, 500, 503]),
            Operation::SnapshotDisk => route(
                M::Post,
                "/v1/disks/{id}/snapshot",
                Tag::Disks,
                "Copies a disk as it is at one moment into a new file that shares its blocks",
            )
            .needs(C::SnapshotRequest)
            .answers(&[(201, C::Snapshot)])
            .refuses(&[400, 404, 408, 409, 413, 422, 500, 503]),
            Operation::WatchEvents => route(
                M::Get,
                "/v1/events",
                Tag::Events,
                "Tells what happens to all disks, a line of JSON for each event, as long as the client listens",
            )
            .answers(&[(200, C::Events)])
            .refuses(&[503]),
            Operation::GetOpenapi => route(
                M::Get,
                "/v1/openapi.json",
                Tag::Node,
                "Describes this interface",
            )
            .answers(&[(200, C::OpenApi)]),
            Operation::GetMetrics => route(
                M::Get,
                "/metrics",
                Tag::Node,
                "Shows all disks for Prometheus. Of those that are not served, it shows the states",
            )
            .answers(&[(200, C::Metrics)]),
        }
    }

    /// Returns its path for the disk `id`. A path without a disk stays as it is.
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
