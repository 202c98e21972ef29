//! The handlers of the HTTP interface: what a request says, given to the disk that it is for, and what comes of it as an answer.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequestParts, Path, Query, State as Shared};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use cleave_api::{DeletedState, DiskDeleted, DiskRow, NodeDisk, ProblemKind};
use cleave_config::{Change, DiskConfig};
use serde::Deserialize;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::scrapes::Scrapes;
use super::server::Streaming;
use super::snapshot;
use crate::disk_server::SizeAsker;
use crate::events::Since;
use crate::hosted::Host;
use crate::hosted::disk::{
    DeleteMode, DiskRequest, HostedDisk, HostedState, Placed, written_name, written_serial,
};
use crate::hosted::generation::{self, Condition};
use crate::problem::{Refusal, answer};
use crate::status::DiskStatus;

/// A check of the size that takes longer is answered with 202.
const SIZE_TIME: Duration = Duration::from_secs(5);
/// Longest body of a request, which comes at once.
const BODY_BYTES_MAX: usize = 64 << 10;
const BODY_TIME: Duration = Duration::from_secs(5);

/// The format that Prometheus asks for, by its version.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

pub(super) type Answer = Result<Response, Refusal>;

/// What may follow the path of the list.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    full: Option<String>,
    label: Option<String>,
}

impl ListQuery {
    /// Returns true if all of a disk is to be shown.
    fn is_full(&self) -> Result<bool, Refusal> {
        match self.full.as_deref() {
            None => Ok(false),
            Some("1") => Ok(true),
            Some(_) => Err(bad_request(
                "full: write ?full=1, or leave it out".to_owned(),
            )),
        }
    }

    /// Returns the name and the value of a label that a disk must have.
    fn label(&self) -> Result<Option<(&str, &str)>, Refusal> {
        let Some(label) = self.label.as_deref() else {
            return Ok(None);
        };
        let bad = || bad_request("label: write ?label=NAME=VALUE".to_owned());
        label.split_once('=').ok_or_else(bad).map(Some)
    }
}

pub(super) async fn list(
    Shared(host): Shared<Arc<Host>>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query.map_err(|why| bad_request(why.body_text()))?;
    let (is_full, label) = (query.is_full()?, query.label()?);
    let all = host.disks.all().into_iter().filter(|disk| {
        let has = |(name, value)| disk.shown().config.labels.get().has(name, value);
        label.is_none_or(has)
    });
    Ok(match is_full {
        true => {
            let all: Vec<NodeDisk> = all.map(|disk| full(&host, &disk)).collect();
            answer(StatusCode::OK, &all)
        }
        false => {
            let all: Vec<DiskRow> = all.map(|disk| row(&host, &disk)).collect();
            answer(StatusCode::OK, &all)
        }
    })
}

pub(super) async fn show(Shared(host): Shared<Arc<Host>>, path: DiskId) -> Answer {
    let disk = host.find(&path)?;
    Ok(shown(StatusCode::OK, &host, &disk))
}

pub(super) async fn put(
    Shared(host): Shared<Arc<Host>>,
    DiskId(id): DiskId,
    condition: Condition,
    body: Body,
) -> Answer {
    let body = read_body(body).await?;
    let config = DiskConfig::from_json(&body).map_err(bad_request)?;
    let begun = host.changes.begin()?;
    to_completion(async move {
        let _begun = begun;
        let (disk, placed) = host.put(&condition, &id, &config).await?;
        let code = match placed {
            Placed::New => StatusCode::CREATED,
            Placed::There => StatusCode::OK,
            Placed::Opening => StatusCode::ACCEPTED,
        };
        Ok(shown(code, &host, &disk))
    })
    .await
}

pub(super) async fn change(
    Shared(host): Shared<Arc<Host>>,
    path: DiskId,
    condition: Condition,
    body: Body,
) -> Answer {
    let body = read_body(body).await?;
    let disk = host.find(&path)?;
    let change = Box::new(Change::from_json(&body).map_err(bad_request)?);
    let begun = host.changes.begin()?;
    to_completion(async move {
        let _begun = begun;
        disk.ask_present(|reply| DiskRequest::Change(condition, change, reply))
            .await?;
        Ok(shown(StatusCode::OK, &host, &disk))
    })
    .await
}

pub(super) async fn remove(
    Shared(host): Shared<Arc<Host>>,
    path: DiskId,
    condition: Condition,
    uri: Uri,
) -> Answer {
    let disk = host.find(&path)?;
    let mode = match uri.query().unwrap_or("mode=safe") {
        "mode=safe" => DeleteMode::Safe,
        "mode=drain" => DeleteMode::Drain,
        "mode=hard" => DeleteMode::Hard,
        _ => {
            let why = "mode is none of safe, drain and hard: write ?mode=safe";
            return Err(bad_request(why.to_owned()));
        }
    };
    if host.many.is_none() {
        let why = "this is the one disk of its process: end that process (SIGTERM)".to_owned();
        return Err(Refusal(ProblemKind::OneDisk, why));
    }
    let begun = host.changes.begin()?;
    to_completion(async move {
        let _begun = begun;
        let lost = disk
            .ask_present(|reply| DiskRequest::Delete(condition, mode, reply))
            .await?;
        let gone = DiskDeleted {
            id: disk.id.clone(),
            state: DeletedState::Deleted,
            lost,
        };
        Ok(answer(StatusCode::OK, &gone))
    })
    .await
}

pub(super) async fn resize(Shared(host): Shared<Arc<Host>>, path: DiskId) -> Answer {
    let disk = host.find(&path)?;
    served(&disk)?.possession.refuse_away()?;
    let code = look_at_size(&disk).await?;
    Ok(shown(code, &host, &disk))
}

/// Has the size of a disk looked at.
async fn look_at_size(disk: &HostedDisk) -> Result<StatusCode, Refusal> {
    let (reply, checked) = oneshot::channel();
    // An order that is not taken drops the reply.
    disk.order(DiskRequest::CheckSize(Some(SizeAsker::Request(reply))))
        .await;
    match timeout(SIZE_TIME, checked).await {
        Ok(Ok(Ok(()))) => Ok(StatusCode::OK),
        Ok(Ok(Err(why))) => Err(Refusal(ProblemKind::StorageFailed, why)),
        Ok(Err(_)) => {
            let why = format!(
                "the size of disk {} was not checked, because the disk ends or has too many orders: send the request again",
                disk.id
            );
            Err(Refusal(ProblemKind::Busy, why))
        }
        Err(_) => Ok(StatusCode::ACCEPTED),
    }
}

/// Tries a disk that has failed again.
pub(super) async fn start(Shared(host): Shared<Arc<Host>>, path: DiskId) -> Answer {
    let disk = host.find(&path)?;
    disk.ask_present(DiskRequest::Start).await?;
    Ok(shown(StatusCode::OK, &host, &disk))
}

pub(super) async fn resume(Shared(host): Shared<Arc<Host>>, path: DiskId, body: Body) -> Answer {
    let body = read_body(body).await?;
    let disk = host.find(&path)?;
    if served(&disk)?.is_short() {
        // The watch may not have told yet that it was repaired. If the size cannot be had, requests beyond the end are held again.
        let _ = look_at_size(&disk).await;
    }
    // It may have ended meanwhile.
    let resumed = served(&disk)?.resume(&body)?;
    Ok(answer(StatusCode::OK, &resumed))
}

pub(super) async fn fail(Shared(host): Shared<Arc<Host>>, path: DiskId) -> Answer {
    served(&*host.find(&path)?)?.fail()
}

pub(super) async fn flush(Shared(host): Shared<Arc<Host>>, path: DiskId) -> Answer {
    let status = served(&*host.find(&path)?)?;
    to_completion(async move { Ok(answer(StatusCode::OK, &status.flush().await?)) }).await
}

pub(super) async fn quiesce(Shared(host): Shared<Arc<Host>>, path: DiskId, body: Body) -> Answer {
    let status = served(&*host.find(&path)?)?;
    let body = read_body(body).await?;
    to_completion(async move { Ok(answer(StatusCode::OK, &status.quiesce(&body).await?)) }).await
}

pub(super) async fn snapshot(Shared(host): Shared<Arc<Host>>, path: DiskId, body: Body) -> Answer {
    let status = served(&*host.find(&path)?)?;
    let body = read_body(body).await?;
    let bounds = host.many.as_ref().map(|many| many.bounds());
    let bounds = bounds.unwrap_or_default();
    to_completion(async move { snapshot::take(&status, bounds, &body).await }).await
}

pub(super) async fn events(
    Shared(host): Shared<Arc<Host>>,
    uri: Uri,
    stream: Extension<Streaming>,
) -> Answer {
    let since = Since::from_query(uri.query().unwrap_or_default())?;
    let disks = || {
        host.disks
            .all()
            .iter()
            .map(|disk| row(&host, disk))
            .collect()
    };
    let lines = host.events.listen(since.as_ref(), disks)?;
    stream.begin();
    Ok(lines)
}

/// Answers with the metrics at the control socket.
pub(super) async fn metrics(Shared(host): Shared<Arc<Host>>) -> Response {
    scraped(&host, &host.control_scrapes).await
}

/// Answers with them at the socket that has nothing else.
pub(super) async fn metrics_alone(Shared(host): Shared<Arc<Host>>) -> Response {
    scraped(&host, &host.metrics_scrapes).await
}

async fn scraped(host: &Host, scrapes: &Scrapes) -> Response {
    let text = scrapes.text(|| host.disks.all()).await;
    ([(header::CONTENT_TYPE, PROMETHEUS)], text).into_response()
}

pub(super) async fn nothing() -> Refusal {
    Refusal(
        ProblemKind::NoSuchPath,
        "no such path; there are /v1/disks, /v1/disks/{id}, its /start, /resize, /resume, /fail, /flush, /quiesce and /snapshot, \
         /v1/events, /v1/node, /v1/openapi.json, /healthz, /readyz and /metrics"
            .to_owned(),
    )
}

/// The answer to a path that a socket for metrics does not have.
pub(super) async fn only_metrics() -> Refusal {
    let why = "this socket has GET /metrics only";
    Refusal(ProblemKind::NoSuchPath, why.to_owned())
}

/// The answer to a method that a path does not have.
pub(super) async fn method_not_allowed() -> Refusal {
    let why = "this path does not know that method";
    Refusal(ProblemKind::MethodNotAllowed, why.to_owned())
}

/// The id of a disk in a path. One that is not UTF-8 is refused like all else, with a problem document.
#[derive(Debug)]
pub(super) struct DiskId(String);

impl<S: Send + Sync> FromRequestParts<S> for DiskId {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<DiskId, Refusal> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(id)) => Ok(DiskId(id)),
            Err(why) => Err(bad_request(format!("id: {why}"))),
        }
    }
}

impl Deref for DiskId {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

async fn read_body(body: Body) -> Result<Bytes, Refusal> {
    match timeout(BODY_TIME, to_bytes(body, BODY_BYTES_MAX)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(_)) => {
            let why = format!("the body is broken, or longer than {BODY_BYTES_MAX} bytes");
            Err(Refusal(ProblemKind::BodyTooLarge, why))
        }
        Err(_) => {
            let why = "the body did not come in time".to_owned();
            Err(Refusal(ProblemKind::BodyTimeout, why))
        }
    }
}

pub(super) fn bad_request(why: String) -> Refusal {
    Refusal(ProblemKind::InvalidRequest, why)
}

/// Returns the status of a disk that is served.
fn served(disk: &HostedDisk) -> Result<Arc<DiskStatus>, Refusal> {
    match disk.state() {
        HostedState::Serving(status) => Ok(status),
        other => {
            let why = format!("disk {} is not served, it is {}", disk.id, other.word());
            Err(Refusal(ProblemKind::NotServed, why))
        }
    }
}

fn row(host: &Host, disk: &HostedDisk) -> DiskRow {
    let shown = disk.shown();
    let config = &host.in_force(&shown.config);
    let mut row = DiskRow {
        id: disk.id.clone(),
        state: shown.state.word(),
        generation: generation::of(config),
        socket: disk.socket.clone(),
        labels: config.labels.get(),
        name: written_name(config),
        serial: written_serial(config),
        size_bytes: 0,
        connected: false,
        error: None,
    };
    match &shown.state {
        HostedState::Serving(status) => {
            status.name().clone_into(&mut row.name);
            row.size_bytes = status.size_bytes();
            row.connected = status.is_connected();
        }
        HostedState::Failed(why) => {
            row.error = Some(why.clone());
            row.connected = shown.is_awaited;
        }
        HostedState::Ended(lost) => row.error.clone_from(lost),
        HostedState::Opening => row.connected = shown.is_awaited,
        HostedState::Ending => {}
    }
    row
}

/// The answer that shows a disk. Its header has the generation too, as HTTP wants it.
fn shown(code: StatusCode, host: &Host, disk: &HostedDisk) -> Response {
    let all = full(host, disk);
    let tag = format!("\"{}\"", all.row.generation);
    ([(header::ETAG, tag)], answer(code, &all)).into_response()
}

/// Returns a disk with what it is to be and, if it is served, what it does.
fn full(host: &Host, disk: &HostedDisk) -> NodeDisk {
    let report = match disk.state() {
        HostedState::Serving(status) => Some(Box::new(status.report())),
        _ => None,
    };
    NodeDisk {
        row: row(host, disk),
        spec: host.in_force(&disk.shown().config),
        report,
    }
}

/// Carries a request out to its end, even if its client leaves.
async fn to_completion(work: impl Future<Output = Answer> + Send + 'static) -> Answer {
    tokio::spawn(work).await.unwrap_or_else(|_| {
        let why = "internal fault, see the log".to_owned();
        Err(Refusal(ProblemKind::InternalFault, why))
    })
}
