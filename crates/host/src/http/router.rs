//! The router of the HTTP interface, made from the table of what can be asked.

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{MethodFilter, MethodRouter, get, on, post};
use cleave_api::{HttpMethod, Operation, document};

use super::{about, routes, take_over};
use crate::handover;
use crate::hosted::Host;
use crate::problem::answer;

/// Makes the router of all paths.
pub(crate) fn router(host: Arc<Host>) -> Router {
    let all = Operation::ALL.iter();
    let all = all.fold(Router::new(), |router, operation| {
        router.route(operation.route().path, handler(*operation))
    });
    // Between two processes, so it is not in the table.
    let all = all.route(handover::PATH, post(take_over::begin));
    all.fallback(routes::nothing)
        .method_not_allowed_fallback(routes::method_not_allowed)
        .with_state(host)
}

fn handler(operation: Operation) -> MethodRouter<Arc<Host>> {
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
        Operation::PutDisk => on(method, routes::put),
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
        Operation::GetNode => on(method, about::node),
        Operation::GetHealth => on(method, about::health),
        Operation::GetReadiness => on(method, about::readiness),
        Operation::GetOpenapi => on(method, describe),
        Operation::GetMetrics => on(method, routes::metrics),
    }
}

/// Makes the router of the metrics alone.
pub(crate) fn metrics_router(host: Arc<Host>) -> Router {
    let metrics = Router::new().route("/metrics", get(routes::metrics_alone));
    metrics
        .fallback(routes::only_metrics)
        .method_not_allowed_fallback(routes::method_not_allowed)
        .with_state(host)
}

async fn describe() -> Response {
    answer(StatusCode::OK, &document())
}
