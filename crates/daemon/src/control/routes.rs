//! The handler of each path and method.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Serialize;

use super::DiskStatus;
use super::patch::{Ground, apply};

/// A change takes less, and comes at once.
const BODY_BYTES_MAX: usize = 16 << 10;
const BODY_TIME: Duration = Duration::from_secs(5);
/// Longest error in an answer.
const ERROR_CHARS_MAX: usize = 250;

/// The format that Prometheus asks for, by its version.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// All paths.
pub(super) fn router(status: Arc<DiskStatus>) -> Router {
    Router::new()
        .route("/v1/disks", get(disks))
        .route("/v1/disks/{id}", get(disk).patch(change))
        .route("/v1/disks/{id}/resume", post(resume))
        .route("/v1/disks/{id}/fail", post(fail))
        .route("/metrics", get(metrics))
        .fallback(nothing)
        .method_not_allowed_fallback(not_so)
        .with_state(status)
}

async fn disks(State(status): State<Arc<DiskStatus>>) -> Response {
    json(StatusCode::OK, &[status.entry()])
}

async fn disk(State(status): State<Arc<DiskStatus>>, path: Path<String>) -> Response {
    match status.find(&path) {
        Ok(()) => json(StatusCode::OK, &status.report()),
        Err(refusal) => refusal.into_response(),
    }
}

/// The disk, and a body that says what is to be different.
async fn change(
    State(status): State<Arc<DiskStatus>>,
    path: Path<String>,
    body: Body,
) -> Result<Response, Refusal> {
    status.find(&path)?;
    let body = match tokio::time::timeout(BODY_TIME, to_bytes(body, BODY_BYTES_MAX)).await {
        Ok(Ok(body)) => body,
        Ok(Err(_)) => {
            let why = format!("the body is broken, or longer than {BODY_BYTES_MAX} bytes");
            return Err(Refusal(StatusCode::PAYLOAD_TOO_LARGE, why));
        }
        Err(_) => {
            let why = "the body did not come in time".to_owned();
            return Err(Refusal(StatusCode::REQUEST_TIMEOUT, why));
        }
    };
    status.change(&body)?;
    Ok(json(StatusCode::OK, &status.report()))
}

/// Has held requests done again.
async fn resume(
    State(status): State<Arc<DiskStatus>>,
    path: Path<String>,
) -> Result<Response, Refusal> {
    status.find(&path)?;
    let requests = status.device.resume();
    Ok(status.ordered(requests, "are done again"))
}

/// Ends held requests as I/O errors.
async fn fail(
    State(status): State<Arc<DiskStatus>>,
    path: Path<String>,
) -> Result<Response, Refusal> {
    status.find(&path)?;
    let requests = status.device.fail();
    Ok(status.ordered(requests, "end as I/O errors"))
}

async fn metrics(State(status): State<Arc<DiskStatus>>) -> Response {
    ([(header::CONTENT_TYPE, PROMETHEUS)], status.metrics()).into_response()
}

async fn nothing() -> Refusal {
    Refusal(
        StatusCode::NOT_FOUND,
        "no such path; there are /v1/disks, /v1/disks/{id}, its /resume and /fail, and /metrics"
            .to_owned(),
    )
}

async fn not_so() -> Refusal {
    Refusal(
        StatusCode::METHOD_NOT_ALLOWED,
        "this path does not know that method".to_owned(),
    )
}

impl DiskStatus {
    /// Puts another tuning in force. Between its reading and this nobody else changes it: all requests are
    /// carried out on one thread.
    fn change(&self, body: &[u8]) -> Result<(), Refusal> {
        let now = self.device.tuning();
        let ground = Ground {
            disk: &self.device.disk,
            vrings: self.vrings,
            auto: &self.auto,
        };
        let tuning =
            apply(body, &now, &ground).map_err(|why| Refusal(StatusCode::BAD_REQUEST, why))?;
        if tuning != *now {
            self.device.tune(tuning);
            let name = self.device.disk.name();
            tracing::info!(
                "{name}: is served differently from now on: {}",
                self.describe_tuning()
            );
        }
        Ok(())
    }

    /// The answer to an order about so many held requests.
    fn ordered(&self, requests: u64, outcome: &str) -> Response {
        #[derive(Serialize)]
        struct Ordered {
            requests: u64,
        }
        if requests > 0 {
            let name = self.device.disk.name();
            tracing::info!("{name}: {requests} held requests {outcome}, as ordered");
        }
        json(StatusCode::OK, &Ordered { requests })
    }

    /// How it is served now, in a line.
    fn describe_tuning(&self) -> String {
        serde_json::to_string(&self.tuning()).unwrap_or_default()
    }

    /// Whether the disk goes by this name.
    fn find(&self, id: &str) -> Result<(), Refusal> {
        let name = self.device.disk.name();
        if id == self.id() || id == name || self.serial().is_some_and(|serial| id == serial) {
            return Ok(());
        }
        Err(Refusal(
            StatusCode::NOT_FOUND,
            format!("no disk `{id}` here; this one is `{}`", self.id()),
        ))
    }
}

/// Why a request is not carried out: one line, as JSON.
#[derive(Debug)]
pub(super) struct Refusal(pub(super) StatusCode, pub(super) String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        #[derive(Serialize)]
        struct ErrorBody {
            error: String,
        }
        // A part of what was sent may be in it.
        let line = self.1.chars().map(|c| if c.is_control() { '?' } else { c });
        let error = line.take(ERROR_CHARS_MAX).collect();
        json(self.0, &ErrorBody { error })
    }
}

fn json(status: StatusCode, value: &impl Serialize) -> Response {
    // Our own values have string keys and finite numbers; should one not, the caller hears of it.
    let (status, text) = match serde_json::to_string_pretty(value) {
        Ok(text) => (status, text + "\n"),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    };
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (status, kind, text).into_response()
}
