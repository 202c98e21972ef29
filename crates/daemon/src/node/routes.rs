//! The paths of a node's interface.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::State as Shared;
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use cleave_config::{Change, DiskConfig, ID_CHARS_MAX, is_id};
use cleave_worker::RateLimits;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::aside::aside;
use super::disks::{DISKS_MAX, Node, descriptors_needed};
use super::kept::{Kept, State};
use super::{keep, snapshot};
use crate::control::{
    DiskId, DiskStatus, Streaming, merged_metrics, metrics_of, metrics_of_state, read_body,
};
use crate::disk_server::{Order, SizeAsker};
use crate::problem::{Refusal, answer};

/// A disk that takes longer to open is answered with 202.
const OPEN_TIME: Duration = Duration::from_secs(10);
/// A check of the size that takes longer is answered with 202.
const SIZE_TIME: Duration = Duration::from_secs(5);
/// A hard end waits so long for a session that has nothing to wait for.
const HARD_TIME: Duration = Duration::from_millis(50);
/// Longest description of a disk.
const BODY_BYTES_MAX: usize = 64 << 10;

type Answer = Result<Response, Refusal>;

/// A disk of the list.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Row {
    id: String,
    state: &'static str,
    socket: String,
    name: String,
    serial: Option<String>,
    size_bytes: u64,
    connected: bool,
    /// Why it is not served.
    error: Option<String>,
}

/// The answer to the end of a disk.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Deleted {
    id: String,
    /// `deleted`
    state: &'static str,
    /// The fate of requests that were in flight, if they did not end.
    lost: Option<String>,
}

pub(super) async fn list(Shared(node): Shared<Arc<Node>>, uri: Uri) -> Response {
    let all = node.all();
    match uri.query() {
        Some("full=1") => {
            let all: Vec<Value> = all.iter().map(|kept| full(&node, kept)).collect();
            answer(StatusCode::OK, &all)
        }
        _ => {
            let all: Vec<Row> = all.iter().map(|kept| row(&node, kept)).collect();
            answer(StatusCode::OK, &all)
        }
    }
}

pub(super) async fn show(Shared(node): Shared<Arc<Node>>, path: DiskId) -> Answer {
    let kept = find(&node, &path)?;
    Ok(answer(StatusCode::OK, &full(&node, &kept)))
}

/// Adds a disk. In a task of its own, since a client that leaves must not stop it half way.
pub(super) async fn add_disk(
    Shared(node): Shared<Arc<Node>>,
    DiskId(id): DiskId,
    body: Body,
) -> Answer {
    if !is_id(&id) {
        let why = format!(
            "id: {id:?}: take 1 to {ID_CHARS_MAX} letters, digits and _.- that begin with a letter or a digit"
        );
        return Err(Refusal(StatusCode::BAD_REQUEST, why));
    }
    if node.run.join(&id) == node.control {
        let why =
            format!("id: {id} is the name of the control socket in the same folder: take another");
        return Err(Refusal(StatusCode::BAD_REQUEST, why));
    }
    let body = read_body(body, BODY_BYTES_MAX).await?;
    let bad = |why| Refusal(StatusCode::BAD_REQUEST, why);
    let file = DiskConfig::from_json(&body).map_err(bad)?;
    apart(async move { add(&node, &id, file).await }).await
}

async fn add(node: &Arc<Node>, id: &str, file: DiskConfig) -> Answer {
    let before = node.find(id).filter(|before| before.is_replaceable());
    let (kept, is_new) = admit(node, id, file)?;
    if !is_new {
        kept.start_again();
    }
    let state = kept.settled(OPEN_TIME).await;
    match &state {
        State::Failed(why) => {
            if is_new {
                kept.order(Order::Stop("it could not be opened".to_owned(), None));
                node.give_up(&kept, before);
            }
            return Err(Refusal(StatusCode::UNPROCESSABLE_ENTITY, why.clone()));
        }
        State::Ended(_) => return Err(removed(id)),
        State::Opening | State::Ending | State::Serving(_) => {}
    }
    let _changing = node.changing.lock().await;
    let has_joined = matches!(state, State::Serving(_) | State::Ending);
    if is_new && (has_joined || node.stays(&kept)) {
        let others = node.others_of_group(&kept);
        let of_group = std::iter::once(&kept).chain(&others);
        let mut values = of_group.map(|kept| kept.file().limits.get().values);
        let values = values.find(|values| *values != RateLimits::default());
        // Also if it does not stay: they are in force.
        share_limits(node, &kept, values.unwrap_or_default()).await;
    }
    // A file that is written now would bring back a disk that was deleted.
    if !node.stays(&kept) {
        return Err(removed(id));
    }
    // By whichever request for the same disk comes first.
    if kept.written().is_none() {
        write_new(node, &kept, before).await?;
    }
    let code = match (state, is_new) {
        (State::Opening, _) => StatusCode::ACCEPTED,
        (_, true) => StatusCode::CREATED,
        (_, false) => StatusCode::OK,
    };
    Ok(answer(code, &full(node, &kept)))
}

fn removed(id: &str) -> Refusal {
    let why = format!("disk {id} is being removed: send the request again when it has ended");
    Refusal(StatusCode::CONFLICT, why)
}

/// Takes a new disk in, if there is none of its id; else that one must be the same. Returns true if it is new.
fn admit(node: &Arc<Node>, id: &str, file: DiskConfig) -> Result<(Arc<Kept>, bool), Refusal> {
    let service = node.service(id, &file);
    let service = service.map_err(|why| Refusal(StatusCode::BAD_REQUEST, why))?;
    let mut disks = node.lock();
    if let Some(kept) = disks.get(id).filter(|kept| !kept.is_replaceable()) {
        return match difference(&kept.file(), &file) {
            None => Ok((kept.clone(), false)),
            Some(field) => Err(Refusal(
                StatusCode::CONFLICT,
                format!(
                    "{field}: disk {id} has another value: change what can change while it is served, or remove the disk first"
                ),
            )),
        };
    }
    if disks.len() >= DISKS_MAX {
        let why = format!("a node has at most {DISKS_MAX} disks: start another node");
        return Err(Refusal(StatusCode::INSUFFICIENT_STORAGE, why));
    }
    let needed = descriptors_needed(&disks) + service.descriptors_in_node();
    if needed > node.descriptors {
        let why = format!(
            "{needed} files may have to be open and {} may be: raise LimitNOFILE=, or lower queues or workers",
            node.descriptors
        );
        return Err(Refusal(StatusCode::INSUFFICIENT_STORAGE, why));
    }
    let file = with_limits_of_group(file, disks.values());
    let kept = keep::begin(node, id, file, None);
    disks.insert(id.to_owned(), kept.clone());
    Ok((kept, true))
}

/// The name of a field in which a disk that is there is not as a request wants it. A request that names a group alone takes
/// whatever limits the group has.
fn difference(now: &DiskConfig, wanted: &DiskConfig) -> Option<&'static str> {
    let names_group_alone = wanted.limits.get().values == RateLimits::default()
        && wanted
            .limit_group()
            .is_some_and(|group| now.limit_group() == Some(group));
    match names_group_alone {
        true => now.difference(&wanted.with_limits(now.limits.get().values)),
        false => now.difference(wanted),
    }
}

/// Gives a disk that names only a group the limits of the others. They have limits even while none of them is served.
fn with_limits_of_group<'a>(
    file: DiskConfig,
    mut others: impl Iterator<Item = &'a Arc<Kept>>,
) -> DiskConfig {
    let Some(group) = file
        .limit_group()
        .filter(|_| file.limits.get().values == RateLimits::default())
    else {
        return file;
    };
    let values = others.find_map(|other| {
        let other = other.file();
        let values = other.limits.get().values;
        (other.limit_group() == Some(group) && values != RateLimits::default()).then_some(values)
    });
    match values {
        Some(values) => file.with_limits(values),
        None => file,
    }
}

/// Writes the file of a new disk. Without it the disk would be gone after the next start, so it is not served.
async fn write_new(
    node: &Arc<Node>,
    kept: &Arc<Kept>,
    before: Option<Arc<Kept>>,
) -> Result<(), Refusal> {
    let written = write(node, kept, kept.file()).await;
    written.map_err(|error| {
        kept.order(Order::Stop("its file cannot be written".to_owned(), None));
        node.give_up(kept, before);
        let why =
            format!("cannot write the file of the disk: {error}: see to the folder of --state");
        Refusal(StatusCode::INTERNAL_SERVER_ERROR, why)
    })
}

/// Writes the file of a disk that is kept.
async fn write(node: &Node, kept: &Kept, file: DiskConfig) -> io::Result<()> {
    let (files, id, written) = (node.files.clone(), kept.id.clone(), file.clone());
    let was_opened = kept.was_opened();
    let write = move || {
        files.write(&id, &file)?;
        // The end of a disk that had this id before may have taken the note of this one.
        if was_opened && !files.was_opened(&id, &file.disk) {
            files.note_opened(&id, &file.disk);
        }
        Ok(())
    };
    match written.persistent.get().0 {
        true => aside("state", write).await?,
        // One that could not be read may be there.
        false => {
            let (files, id) = (node.files.clone(), kept.id.clone());
            aside("state", move || files.remove(&id)).await?;
        }
    }
    kept.set_written(written);
    Ok(())
}

pub(super) async fn change(Shared(node): Shared<Arc<Node>>, path: DiskId, body: Body) -> Answer {
    let body = read_body(body, BODY_BYTES_MAX).await?;
    apart(async move { change_kept(&node, &path, &body).await }).await
}

/// Changes how a disk is served, and the file that keeps it. Changes of single vrings are not kept.
async fn change_kept(node: &Node, id: &str, body: &[u8]) -> Answer {
    let _changing = node.changing.lock().await;
    let kept = find(node, id)?;
    let status = served(node, id)?;
    let bad = |why| Refusal(StatusCode::BAD_REQUEST, why);
    let change = Change::from_json(body).map_err(bad)?;
    let changed = kept.file().with(&change).map_err(bad)?;
    // One that is refused here could not be opened when the node starts again.
    node.service(id, &changed).map_err(bad)?;
    status.change(&change)?;
    kept.set_file(changed.clone());
    let written = match kept.written().as_ref() != Some(&changed) {
        true => write(node, &kept, changed).await,
        false => Ok(()),
    };
    share_limits(node, &kept, kept.file().limits.get().values).await;
    written.map_err(|error| {
        let why = format!(
            "changed until the disk is opened again, but its file cannot be written: {error}: see to the folder of --state"
        );
        Refusal(StatusCode::INTERNAL_SERVER_ERROR, why)
    })?;
    Ok(answer(StatusCode::OK, &full(node, &kept)))
}

/// Keeps the limits of a disk for the others of its group too, so that they come back the same whichever comes back last; and puts
/// them in force, which a disk that is still being opened has not done.
async fn share_limits(node: &Node, kept: &Arc<Kept>, values: RateLimits) {
    if kept.file().limit_group().is_none() {
        return;
    }
    let others = node.others_of_group(kept);
    for kept in others.iter().chain([kept]) {
        let file = kept.file().with_limits(values);
        kept.set_file(file.clone());
        if let State::Serving(status) = kept.state() {
            status.limit(values);
        }
        // The request that adds a disk writes its file, if the disk can be opened.
        let is_due = kept
            .written()
            .is_some_and(|written| written != file && node.stays(kept));
        if is_due && let Err(error) = write(node, kept, file).await {
            tracing::warn!(
                "{}: the limits of its group are not kept, because its file cannot be written: {error}",
                kept.id
            );
        }
    }
}

pub(super) async fn remove(Shared(node): Shared<Arc<Node>>, path: DiskId, uri: Uri) -> Answer {
    let kept = find(&node, &path)?;
    let mode = uri.query().unwrap_or("mode=safe").to_owned();
    apart(async move { end(&node, &kept, &mode).await }).await
}

async fn end(node: &Arc<Node>, kept: &Arc<Kept>, mode: &str) -> Answer {
    let why = "it is deleted".to_owned();
    match mode {
        "mode=safe" => stop_unused(kept).await?,
        "mode=drain" => drop(kept.order(Order::Stop(why, None))),
        "mode=hard" => drop(kept.order(Order::Stop(why, Some(HARD_TIME)))),
        _ => {
            let why = "mode is none of safe, drain and hard: write ?mode=safe".to_owned();
            return Err(Refusal(StatusCode::BAD_REQUEST, why));
        }
    }
    let State::Ended(lost) = kept.ended().await else {
        return Err(Refusal(StatusCode::CONFLICT, "it goes on".to_owned()));
    };
    let _changing = node.changing.lock().await;
    // Another request may have removed it, and a third may have added a disk of the same name. The file belongs to that one, once
    // it has written it: it may still fail, and then nobody would remove the file.
    let is_anothers = node
        .find(&kept.id)
        .is_some_and(|now| !Arc::ptr_eq(&now, kept) && now.written().is_some());
    let (files, id) = (node.files.clone(), kept.id.clone());
    let removed = match is_anothers {
        true => Ok(()),
        false => aside("state", move || files.remove(&id)).await,
    };
    // In the list until its file is gone: with the file, the next start of the node would serve the disk again.
    removed.map_err(|error| {
        let why = format!(
            "the disk has ended, but its file cannot be removed: {error}: see to the folder of --state, then remove the disk again"
        );
        kept.set_leftover(why.clone());
        Refusal(StatusCode::INTERNAL_SERVER_ERROR, why)
    })?;
    kept.forget_file();
    node.forget(kept);
    let gone = Deleted {
        id: kept.id.clone(),
        state: "deleted",
        lost,
    };
    Ok(answer(StatusCode::OK, &gone))
}

/// Stops a disk that nobody uses.
async fn stop_unused(kept: &Kept) -> Result<(), Refusal> {
    let (reply, unused) = oneshot::channel();
    // One that ends already, or has no file that can be read, takes no order.
    if kept.order(Order::StopUnused(reply)) && unused.await == Ok(false) {
        let why = format!(
            "a frontend is connected to disk {}: unplug the disk first, or remove it with mode=drain",
            kept.id
        );
        return Err(Refusal(StatusCode::CONFLICT, why));
    }
    Ok(())
}

pub(super) async fn resize(Shared(node): Shared<Arc<Node>>, path: DiskId) -> Answer {
    served(&node, &path)?;
    let kept = find(&node, &path)?;
    let (reply, checked) = oneshot::channel();
    // An order that is not taken drops the reply.
    kept.order(Order::CheckSize(Some(SizeAsker::Request(reply))));
    let code = match timeout(SIZE_TIME, checked).await {
        Ok(Ok(Ok(()))) => StatusCode::OK,
        Ok(Ok(Err(why))) => return Err(Refusal(StatusCode::INTERNAL_SERVER_ERROR, why)),
        Ok(Err(_)) => {
            let why = format!(
                "the size of disk {} was not checked, because the disk ends or has too many orders: send the request again",
                kept.id
            );
            return Err(Refusal(StatusCode::CONFLICT, why));
        }
        Err(_) => StatusCode::ACCEPTED,
    };
    Ok(answer(code, &full(&node, &kept)))
}

/// Tries a disk that has failed again.
pub(super) async fn start(Shared(node): Shared<Arc<Node>>, path: DiskId) -> Answer {
    let kept = find(&node, &path)?;
    kept.start_again();
    match kept.settled(OPEN_TIME).await {
        State::Failed(why) => Err(Refusal(StatusCode::UNPROCESSABLE_ENTITY, why)),
        _ => Ok(answer(StatusCode::OK, &full(&node, &kept))),
    }
}

pub(super) async fn resume(Shared(node): Shared<Arc<Node>>, path: DiskId, body: Body) -> Answer {
    let body = read_body(body, BODY_BYTES_MAX).await?;
    let resumed = served(&node, &path)?.resume(&body)?;
    Ok(answer(StatusCode::OK, &resumed))
}

pub(super) async fn fail(Shared(node): Shared<Arc<Node>>, path: DiskId) -> Answer {
    Ok(served(&node, &path)?.fail())
}

pub(super) async fn flush(Shared(node): Shared<Arc<Node>>, path: DiskId) -> Answer {
    let status = served(&node, &path)?;
    apart(async move { Ok(answer(StatusCode::OK, &status.flush().await?)) }).await
}

pub(super) async fn quiesce(Shared(node): Shared<Arc<Node>>, path: DiskId, body: Body) -> Answer {
    let status = served(&node, &path)?;
    let body = read_body(body, BODY_BYTES_MAX).await?;
    apart(async move { Ok(answer(StatusCode::OK, &status.quiesce(&body).await?)) }).await
}

pub(super) async fn snapshot(Shared(node): Shared<Arc<Node>>, path: DiskId, body: Body) -> Answer {
    let status = served(&node, &path)?;
    let body = read_body(body, BODY_BYTES_MAX).await?;
    apart(async move { snapshot::take(&status, &body).await }).await
}

pub(super) async fn events(
    Shared(node): Shared<Arc<Node>>,
    stream: Extension<Streaming>,
) -> Answer {
    stream.begin();
    node.events.listen()
}

pub(super) async fn metrics(Shared(node): Shared<Arc<Node>>) -> Response {
    let all = node.all();
    let texts = all.iter().flat_map(|kept| {
        let state = kept.state();
        let shown = metrics_of_state(&kept.id, state.name());
        match state {
            State::Serving(status) => vec![shown, status.metrics()],
            _ => vec![shown],
        }
    });
    metrics_of(merged_metrics(texts))
}

pub(super) async fn nothing() -> Refusal {
    Refusal(
        StatusCode::NOT_FOUND,
        "no such path; there are /v1/disks, /v1/disks/{id}, its /start, /resize, /resume, /fail, /flush, /quiesce and /snapshot, \
         /v1/events, /v1/openapi.json and /metrics"
            .to_owned(),
    )
}

fn find(node: &Node, id: &str) -> Result<Arc<Kept>, Refusal> {
    node.find(id).ok_or_else(|| {
        let why = format!("no disk `{id}` here: see the list of disks");
        Refusal(StatusCode::NOT_FOUND, why)
    })
}

/// A disk that is served.
fn served(node: &Node, id: &str) -> Result<Arc<DiskStatus>, Refusal> {
    match find(node, id)?.state() {
        State::Serving(status) => Ok(status),
        other => {
            let why = format!("disk {id} is not served, it is {}", other.name());
            Err(Refusal(StatusCode::CONFLICT, why))
        }
    }
}

fn row(node: &Node, kept: &Kept) -> Row {
    let (state, file) = (kept.state(), kept.file());
    let mut row = Row {
        id: kept.id.clone(),
        state: state.name(),
        socket: node.socket(&kept.id).display().to_string(),
        name: file
            .disk
            .first()
            .map(ToString::to_string)
            .unwrap_or_default(),
        serial: file.serial.written().map(ToString::to_string),
        size_bytes: 0,
        connected: false,
        error: None,
    };
    match state {
        State::Serving(status) => {
            let entry = status.entry();
            row.name = entry.name;
            row.size_bytes = entry.size_bytes;
            row.connected = entry.connected;
        }
        State::Failed(why) => row.error = Some(why),
        State::Ended(lost) => row.error = kept.leftover().or(lost),
        State::Opening | State::Ending => {}
    }
    row
}

/// A disk with what it is to be and, if it is served, what it does.
fn full(node: &Node, kept: &Kept) -> Value {
    let mut all = Map::new();
    if let State::Serving(status) = kept.state()
        && let Ok(Value::Object(report)) = serde_json::to_value(status.report())
    {
        all.extend(report);
    }
    if let Ok(Value::Object(row)) = serde_json::to_value(row(node, kept)) {
        all.extend(row);
    }
    let spec = serde_json::to_value(kept.file()).unwrap_or_default();
    all.insert("spec".to_owned(), spec);
    Value::Object(all)
}

/// Carries a request out to its end, even if its client leaves.
async fn apart(work: impl Future<Output = Answer> + Send + 'static) -> Answer {
    tokio::spawn(work).await.unwrap_or_else(|_| {
        let why = "internal fault, see the log".to_owned();
        Err(Refusal(StatusCode::INTERNAL_SERVER_ERROR, why))
    })
}
