//! The HTTP API of a node: one table of what can be asked and answered. The router and the OpenAPI document are both made from it.

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{MethodRouter, delete, get, patch, post, put};
use cleave_api::{
    DiskDeleted, DiskRow, EventName, Flushed, HeldRequests, NodeDisk, Problem, QuiesceRequest,
    Quiesced, ResumeRequest, Resumed, Snapshot, SnapshotRequest,
};
use cleave_config::{Change, DiskConfig};
use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Map, Value, json};

use super::disks::Node;
use super::routes;
use crate::control::{metrics_only, not_so};
use crate::problem::answer;

/// A method of a path.
struct Route {
    method: &'static str,
    path: &'static str,
    /// Its effect, in a line.
    does: &'static str,
    /// A part of the query, and the values that it takes.
    query: Option<(&'static str, &'static [&'static str])>,
    /// The body that it takes.
    body: Option<Shape>,
    /// How it answers when it is done.
    answers: &'static [(u16, Shape)],
    /// How it answers when it refuses; always with a problem document.
    refusals: &'static [u16],
    handler: fn() -> MethodRouter<Arc<Node>>,
}

/// The contents of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Disk,
    Disks,
    Spec,
    Change,
    Deleted,
    Ordered,
    Resume,
    Resumed,
    Flushed,
    Quiet,
    Quiesced,
    SnapshotTo,
    Snapshot,
    OpenApi,
    /// Lines without end, each an event.
    Events,
    /// The text format of Prometheus.
    Metrics,
}

/// All that can be asked.
const ALL: &[Route] = &[
    Route {
        method: "GET",
        path: "/v1/disks",
        does: "Lists all disks; with full=1 each with all there is to know",
        query: Some(("full", &["1"])),
        body: None,
        answers: &[(200, Shape::Disks)],
        refusals: &[],
        handler: || get(routes::list),
    },
    Route {
        method: "GET",
        path: "/v1/disks/{id}",
        does: "Shows a disk",
        query: None,
        body: None,
        answers: &[(200, Shape::Disk)],
        refusals: &[400, 404],
        handler: || get(routes::show),
    },
    Route {
        method: "PUT",
        path: "/v1/disks/{id}",
        does: "Adds a disk: 201. The same again: 200. It takes longer than 10 s to open: 202",
        query: None,
        body: Some(Shape::Spec),
        answers: &[(200, Shape::Disk), (201, Shape::Disk), (202, Shape::Disk)],
        refusals: &[400, 408, 409, 413, 422, 500, 507],
        handler: || put(routes::add_disk),
    },
    Route {
        method: "PATCH",
        path: "/v1/disks/{id}",
        does: "Changes how a disk is served",
        query: None,
        body: Some(Shape::Change),
        answers: &[(200, Shape::Disk)],
        refusals: &[400, 404, 408, 409, 413, 500],
        handler: || patch(routes::change),
    },
    Route {
        method: "DELETE",
        path: "/v1/disks/{id}",
        does: "Removes a disk; its image stays",
        query: Some(("mode", &["safe", "drain", "hard"])),
        body: None,
        answers: &[(200, Shape::Deleted)],
        refusals: &[400, 404, 409, 500],
        handler: || delete(routes::remove),
    },
    Route {
        method: "POST",
        path: "/v1/disks/{id}/resize",
        does: "Checks the size of a disk, and reports growth to the guest. It takes longer than 5 s to check: 202",
        query: None,
        body: None,
        answers: &[(200, Shape::Disk), (202, Shape::Disk)],
        refusals: &[400, 404, 409, 500],
        handler: || post(routes::resize),
    },
    Route {
        method: "POST",
        path: "/v1/disks/{id}/start",
        does: "Tries a failed disk again at once",
        query: None,
        body: None,
        answers: &[(200, Shape::Disk)],
        refusals: &[400, 404, 422],
        handler: || post(routes::start),
    },
    Route {
        method: "POST",
        path: "/v1/disks/{id}/resume",
        does: "Repeats held requests, and ends a quiet; says whether the disk was quiesced until then",
        query: None,
        body: Some(Shape::Resume),
        answers: &[(200, Shape::Resumed)],
        refusals: &[400, 404, 408, 409, 413],
        handler: || post(routes::resume),
    },
    Route {
        method: "POST",
        path: "/v1/disks/{id}/fail",
        does: "Ends held requests as I/O errors",
        query: None,
        body: None,
        answers: &[(200, Shape::Ordered)],
        refusals: &[400, 404, 409],
        handler: || post(routes::fail),
    },
    Route {
        method: "POST",
        path: "/v1/disks/{id}/flush",
        does: "Makes everything durable that was written",
        query: None,
        body: None,
        answers: &[(200, Shape::Flushed)],
        refusals: &[400, 404, 409, 500, 503],
        handler: || post(routes::flush),
    },
    Route {
        method: "POST",
        path: "/v1/disks/{id}/quiesce",
        does: "Finishes what is in flight, flushes, and has new requests wait",
        query: None,
        body: Some(Shape::Quiet),
        answers: &[(200, Shape::Quiesced)],
        refusals: &[400, 404, 408, 409, 413, 500, 503],
        handler: || post(routes::quiesce),
    },
    Route {
        method: "POST",
        path: "/v1/disks/{id}/snapshot",
        does: "Copies a disk at one moment into a new file that shares its blocks",
        query: None,
        body: Some(Shape::SnapshotTo),
        answers: &[(201, Shape::Snapshot)],
        refusals: &[400, 404, 408, 409, 413, 422, 500, 503],
        handler: || post(routes::snapshot),
    },
    Route {
        method: "GET",
        path: "/v1/events",
        does: "Tells what happens to all disks, as long as the client listens",
        query: None,
        body: None,
        answers: &[(200, Shape::Events)],
        refusals: &[503],
        handler: || get(routes::events),
    },
    Route {
        method: "GET",
        path: "/v1/openapi.json",
        does: "Describes all this",
        query: None,
        body: None,
        answers: &[(200, Shape::OpenApi)],
        refusals: &[],
        handler: || get(describe),
    },
    Route {
        method: "GET",
        path: "/metrics",
        does: "Shows all disks for Prometheus: of those that are not served, their states",
        query: None,
        body: None,
        answers: &[(200, Shape::Metrics)],
        refusals: &[],
        handler: || get(routes::metrics),
    },
];

/// The router of all paths.
pub(super) fn router(node: Arc<Node>) -> Router {
    let empty = Router::new();
    let all = ALL.iter();
    let all = all.fold(empty, |router, route| {
        router.route(route.path, (route.handler)())
    });
    all.fallback(routes::nothing)
        .method_not_allowed_fallback(not_so)
        .with_state(node)
}

/// The router of the metrics alone.
pub(super) fn metrics_router(node: Arc<Node>) -> Router {
    metrics_only(Router::new().route("/metrics", get(routes::metrics))).with_state(node)
}

async fn describe() -> Response {
    answer(StatusCode::OK, &document())
}

/// The OpenAPI document.
pub(crate) fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
    });
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    for route in ALL {
        let methods = paths.entry(route.path).or_insert_with(|| json!({}));
        if let Value::Object(methods) = methods {
            methods.insert(
                route.method.to_lowercase(),
                operation(route, &mut generator),
            );
        }
    }
    let event = event(&mut generator);
    let mut schemas = generator.take_definitions(true);
    schemas.insert("Event".to_owned(), event);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Cleave node",
            "version": "1",
            "description": "The control socket of `cleave node`: HTTP/1.1 on a unix socket.",
            "license": {"name": "MIT OR Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas},
    })
}

fn operation(route: &Route, generator: &mut SchemaGenerator) -> Value {
    let mut responses = Map::new();
    for (status, shape) in route.answers {
        responses.insert(status.to_string(), content(*shape, generator));
    }
    let problem = generator.subschema_for::<Problem>();
    for status in route.refusals {
        let refusal = json!({
            "description": "refused",
            "content": {"application/problem+json": {"schema": problem}},
        });
        responses.insert(status.to_string(), refusal);
    }
    let mut parameters = Vec::new();
    if route.path.contains("{id}") {
        let id = json!({"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"});
        parameters.push(json!({"name": "id", "in": "path", "required": true, "schema": id}));
    }
    if let Some((name, values)) = route.query {
        let schema = json!({"type": "string", "enum": values});
        parameters.push(json!({"name": name, "in": "query", "schema": schema}));
    }
    let mut operation =
        json!({"summary": route.does, "responses": responses, "parameters": parameters});
    if let (Some(shape), Value::Object(operation)) = (route.body, &mut operation) {
        let mut body = content(shape, generator);
        body["description"] = json!("");
        operation.insert("requestBody".to_owned(), body);
    }
    operation
}

/// A body as the document has it.
fn content(shape: Shape, generator: &mut SchemaGenerator) -> Value {
    let named = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
    let (kind, schema) = match shape {
        Shape::Events => ("application/x-ndjson", named("Event")),
        Shape::Metrics => ("text/plain", json!({"type": "string"})),
        Shape::OpenApi => ("application/json", json!({"type": "object"})),
        Shape::Disk => (
            "application/json",
            generator.subschema_for::<NodeDisk>().into(),
        ),
        Shape::Disks => (
            "application/json",
            json!({"type": "array", "items": generator.subschema_for::<DiskRow>()}),
        ),
        Shape::Change => (
            "application/json",
            generator.subschema_for::<Change>().into(),
        ),
        Shape::Spec => (
            "application/json",
            generator.subschema_for::<DiskConfig>().into(),
        ),
        Shape::Deleted => (
            "application/json",
            generator.subschema_for::<DiskDeleted>().into(),
        ),
        Shape::Ordered => (
            "application/json",
            generator.subschema_for::<HeldRequests>().into(),
        ),
        Shape::Resume => (
            "application/json",
            generator.subschema_for::<ResumeRequest>().into(),
        ),
        Shape::Resumed => (
            "application/json",
            generator.subschema_for::<Resumed>().into(),
        ),
        Shape::Flushed => (
            "application/json",
            generator.subschema_for::<Flushed>().into(),
        ),
        Shape::Quiet => (
            "application/json",
            generator.subschema_for::<QuiesceRequest>().into(),
        ),
        Shape::Quiesced => (
            "application/json",
            generator.subschema_for::<Quiesced>().into(),
        ),
        Shape::SnapshotTo => (
            "application/json",
            generator.subschema_for::<SnapshotRequest>().into(),
        ),
        Shape::Snapshot => (
            "application/json",
            generator.subschema_for::<Snapshot>().into(),
        ),
    };
    json!({"description": "done", "content": {kind: {"schema": schema}}})
}

fn event(generator: &mut SchemaGenerator) -> Value {
    json!({
        "description": "What happened, and to which disk; the other fields depend on the event",
        "type": "object",
        "properties": {
            "time": {"type": "number", "description": "seconds since 1970"},
            "event": generator.subschema_for::<EventName>(),
            "disk": {"type": "string"},
        },
        "required": ["time", "event"],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_is_that_of_the_sources() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
        let written = std::fs::read_to_string(page).unwrap_or_default();
        let document = serde_json::to_string_pretty(&document()).unwrap() + "\n";
        assert!(
            written == document,
            "docs/openapi.json is out of date: cargo run -- node --openapi > docs/openapi.json"
        );
    }

    #[test]
    fn the_page_of_the_file_has_each_field() {
        let page = include_str!("../../../../docs/disk-file.md");
        let document = document();
        let fields = &document["components"]["schemas"]["DiskConfig"]["properties"];
        for name in fields.as_object().unwrap().keys() {
            assert!(page.contains(&format!("`{name}`")), "{name}");
        }
    }
}
