//! The router of a node's HTTP interface, made from the table of what can be asked.

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{MethodFilter, MethodRouter, get, on};
use cleave_api::{HttpMethod, Operation, document};

use super::disks::Node;
use super::routes;
use crate::control::{metrics_only, not_so};
use crate::problem::answer;

/// Makes the router of all paths.
pub(super) fn router(node: Arc<Node>) -> Router {
    let all = Operation::ALL.iter();
    let all = all.fold(Router::new(), |router, operation| {
        router.route(operation.route().path, handler(*operation))
    });
    all.fallback(routes::nothing)
        .method_not_allowed_fallback(not_so)
        .with_state(node)
}

fn handler(operation: Operation) -> MethodRouter<Arc<Node>> {
    let method = match operation.route().method {
        HttpMethod::Get => MethodFilter::GET,
        HttpMethod::Put => MethodFilter::PUT,
        HttpMethod::Patch => MethodFilter::PATCH,
        HttpMethod::Delete => MethodFilter::DELETE,
        HttpMethod::Post => MethodFilter::POST,
    };
    match operation {
        Operation::ListDisks => on(method, routes::list),
        Operation::GetDisk => on(method, routes::show),
        Operation::PutDisk => on(method, routes::add_disk),
        Operation::PatchDisk => on(method, routes::change),
        Operation::DeleteDisk => on(method, routes::remove),
        Operation::ResizeDisk => on(method, routes::resize),
        Operation::StartDisk => on(method, routes::start),
        Operation::ResumeDisk => on(method, routes::resume),
        Operation::FailDisk => on(method, routes::fail),
        Operation::FlushDisk => on(method, routes::flush),
        Operation::QuiesceDisk => on(method, routes::quiesce),
        Operation::SnapshotDisk => on(method, routes::snapshot),
        Operation::WatchEvents => on(method, routes::events),
        Operation::GetOpenapi => on(method, describe),
        Operation::GetMetrics => on(method, routes::metrics),
    }
}

/// Makes the router of the metrics alone.
pub(super) fn metrics_router(node: Arc<Node>) -> Router {
    metrics_only(Router::new().route("/metrics", get(routes::metrics))).with_state(node)
}

async fn describe() -> Response {
    answer(StatusCode::OK, &document())
}
