//! The handler of each path and method.

use std::ops::Deref;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{FromRequestParts, Path, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use cleave_config::{Change, DiskConfig, Names, SplitOption};
use cleave_worker::{RateLimits, Split, Tuning};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use super::DiskStatus;
use super::serve::Streaming;
use crate::problem::{Refusal, answer};
use crate::tuning;

/// A change takes less, and comes at once.
const BODY_BYTES_MAX: usize = 16 << 10;
const BODY_TIME: Duration = Duration::from_secs(5);

/// The format that Prometheus asks for, by its version.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// All paths.
pub(crate) fn router(status: Arc<DiskStatus>) -> Router {
    Router::new()
        .route("/v1/disks", get(disks))
        .route("/v1/disks/{id}", get(disk).patch(change))
        .route("/v1/disks/{id}/resume", post(resume))
        .route("/v1/disks/{id}/fail", post(fail))
        .route("/v1/disks/{id}/flush", post(flush))
        .route("/v1/disks/{id}/quiesce", post(quiesce))
        .route("/v1/events", get(events))
        .route("/metrics", get(metrics))
        .fallback(nothing)
        .method_not_allowed_fallback(not_so)
        .with_state(status)
}

/// The metrics alone.
pub(crate) fn metrics_router(status: Arc<DiskStatus>) -> Router {
    metrics_only(Router::new().route("/metrics", get(metrics))).with_state(status)
}

/// Refuses whatever the routes of metrics do not have.
pub(crate) fn metrics_only<S: Clone + Send + Sync + 'static>(routes: Router<S>) -> Router<S> {
    let nothing = || async {
        let why = "this socket has GET /metrics only";
        Refusal(StatusCode::NOT_FOUND, why.to_owned())
    };
    routes.fallback(nothing).method_not_allowed_fallback(not_so)
}

async fn disks(State(status): State<Arc<DiskStatus>>, uri: Uri) -> Response {
    match uri.query() {
        Some("full=1") => answer(StatusCode::OK, &[status.report()]),
        _ => answer(StatusCode::OK, &[status.entry()]),
    }
}

async fn disk(State(status): State<Arc<DiskStatus>>, path: DiskId) -> Response {
    match status.find(&path) {
        Ok(()) => answer(StatusCode::OK, &status.report()),
        Err(refusal) => refusal.into_response(),
    }
}

/// The disk, and a body that says what is to be different.
async fn change(
    State(status): State<Arc<DiskStatus>>,
    path: DiskId,
    body: Body,
) -> Result<Response, Refusal> {
    status.find(&path)?;
    let body = read_body(body, BODY_BYTES_MAX).await?;
    let change = Change::from_json(&body);
    let change = change.map_err(|why| Refusal(StatusCode::BAD_REQUEST, why))?;
    status.change(&change)?;
    Ok(answer(StatusCode::OK, &status.report()))
}

/// The body of a request, which comes at once and is no longer than that.
pub(crate) async fn read_body(body: Body, bytes_max: usize) -> Result<Bytes, Refusal> {
    match tokio::time::timeout(BODY_TIME, to_bytes(body, bytes_max)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(_)) => {
            let why = format!("the body is broken, or longer than {bytes_max} bytes");
            Err(Refusal(StatusCode::PAYLOAD_TOO_LARGE, why))
        }
        Err(_) => {
            let why = "the body did not come in time".to_owned();
            Err(Refusal(StatusCode::REQUEST_TIMEOUT, why))
        }
    }
}

/// Ends the quiet, and has held requests done again.
async fn resume(
    State(status): State<Arc<DiskStatus>>,
    path: DiskId,
    body: Body,
) -> Result<Response, Refusal> {
    let body = read_body(body, BODY_BYTES_MAX).await?;
    status.find(&path)?;
    Ok(answer(StatusCode::OK, &status.resume(&body)?))
}

/// Makes the disk durable.
async fn flush(State(status): State<Arc<DiskStatus>>, path: DiskId) -> Result<Response, Refusal> {
    status.find(&path)?;
    Ok(answer(StatusCode::OK, &status.flush().await?))
}

/// Stops the disk for a while.
async fn quiesce(
    State(status): State<Arc<DiskStatus>>,
    path: DiskId,
    body: Body,
) -> Result<Response, Refusal> {
    status.find(&path)?;
    let body = read_body(body, BODY_BYTES_MAX).await?;
    Ok(answer(StatusCode::OK, &status.quiesce(&body).await?))
}

/// Ends held requests as I/O errors.
async fn fail(State(status): State<Arc<DiskStatus>>, path: DiskId) -> Result<Response, Refusal> {
    status.find(&path)?;
    Ok(status.fail())
}

async fn events(
    State(status): State<Arc<DiskStatus>>,
    stream: Extension<Streaming>,
) -> Result<Response, Refusal> {
    stream.begin();
    status.events.listen()
}

async fn metrics(State(status): State<Arc<DiskStatus>>) -> Response {
    metrics_of(status.metrics())
}

/// Metrics, as Prometheus takes them.
pub(crate) fn metrics_of(text: String) -> Response {
    ([(header::CONTENT_TYPE, PROMETHEUS)], text).into_response()
}

async fn nothing() -> Refusal {
    Refusal(
        StatusCode::NOT_FOUND,
        "no such path; there are /v1/disks, /v1/disks/{id}, its /resume, /fail, /flush and /quiesce, /v1/events and /metrics"
            .to_owned(),
    )
}

/// The answer to a method that a path does not have.
pub(crate) async fn not_so() -> Refusal {
    Refusal(
        StatusCode::METHOD_NOT_ALLOWED,
        "this path does not know that method".to_owned(),
    )
}

impl DiskStatus {
    /// Puts a change in force: all of it or nothing. Between its reading and this nobody else changes the tuning: all requests are
    /// carried out on one thread.
    pub(crate) fn change(&self, change: &Change) -> Result<(), Refusal> {
        let (config, tuning) = self.judge(change)?;
        *self.lock_config() = config;
        if tuning != *self.device.tuning() {
            self.device.tune(tuning);
            let tuning = serde_json::to_value(self.tuning()).unwrap_or_default();
            self.tell("changed", json!({ "tuning": tuning }));
            let name = self.device.disk.name();
            tracing::info!(
                "{name}: is served differently from now on: {}",
                self.describe_tuning()
            );
        }
        Ok(())
    }

    /// Puts these limits in force.
    pub(crate) fn limit(&self, limits: RateLimits) {
        let now = self.device.tuning();
        if now.limits != limits {
            let tuning = now.as_ref().clone();
            self.device.tune(Tuning { limits, ..tuning });
        }
    }

    /// The description and the tuning that a change leads to.
    pub(crate) fn judge(&self, change: &Change) -> Result<(DiskConfig, Tuning), Refusal> {
        let bad = |why| Refusal(StatusCode::BAD_REQUEST, why);
        let now = self.device.tuning();
        let config = self.lock_config().with_limits(now.limits);
        let config = config.with(change).map_err(bad)?;
        let split = match config.split.get() {
            SplitOption::Off => Split::Off,
            SplitOption::Auto => self.auto.clone(),
            SplitOption::Fixed(chunk) => {
                tuning::fixed(chunk, &self.device.disk, Names::Fields).map_err(bad)?
            }
        };
        let vrings = change.vrings.applied_to(&now.vrings, self.vrings);
        let tuning = Tuning {
            vrings: vrings.map_err(bad)?,
            ..tuning::tuning(&config, split)
        };
        Ok((config, tuning))
    }

    fn lock_config(&self) -> MutexGuard<'_, DiskConfig> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has held requests done again. Returns how many there were.
    pub(super) fn repeat_held(&self) -> u64 {
        self.released(self.device.resume(), "are done again")
    }

    /// Ends held requests as I/O errors.
    pub(crate) fn fail(&self) -> Response {
        let requests = self.released(self.device.fail(), "end as I/O errors");
        answer(StatusCode::OK, &Ordered { requests })
    }

    /// Tells of an order about so many held requests.
    fn released(&self, requests: u64, outcome: &str) -> u64 {
        if requests > 0 {
            self.tell("released", json!({ "requests": requests }));
            let name = self.device.disk.name();
            tracing::info!("{name}: {requests} held requests {outcome}, as ordered");
        }
        requests
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

/// The id of a disk in a path. One that is no text is refused like all else, with a problem document.
#[derive(Debug)]
pub(crate) struct DiskId(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for DiskId {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<DiskId, Refusal> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(id)) => Ok(DiskId(id)),
            Err(why) => Err(Refusal(StatusCode::BAD_REQUEST, format!("id: {why}"))),
        }
    }
}

impl Deref for DiskId {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

/// The answer to an order about held requests.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Ordered {
    /// How many there were.
    requests: u64,
}
