//! Gives disks to a process that takes over from this one. It asks for a connection that goes on as a link.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use cleave_api::ProblemKind;
use hyper::upgrade::{OnUpgrade, on};
use tokio::runtime::Handle;

use super::routes::{Answer, bad_request};
use super::server::into_socket;
use super::standstill::Standstill;
use crate::disk_server::Order;
use crate::handover::PROTOCOL;
use crate::handover::link::{Giver, Peer};
use crate::handover::parcel::Parcel;
use crate::hosted::Host;
use crate::hosted::aside::aside;
use crate::hosted::changes::PassingOn;
use crate::hosted::disk::{DiskRequest, HostedDisk, HostedState};
use crate::problem::Refusal;

/// Longest wait for what the other process says at once.
const GREETING_TIME: Duration = Duration::from_secs(5);
/// Longest time in which the other process prepares itself. Guests are served meanwhile.
const READY_TIME: Duration = Duration::from_secs(60);

/// Most reasons of a refusal; the others are counted.
const REASONS_MAX: usize = 3;
/// Pause between two looks at whether all disks are given.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

/// Offers a disk, or what a node has besides its disks, unless something keeps it here.
pub(super) async fn begin(Shared(host): Shared<Arc<Host>>, request: Request) -> Answer {
    let asked = request.headers().get(header::UPGRADE);
    if asked.is_none_or(|protocol| protocol != PROTOCOL) {
        let why = format!("this path is for another process of cleave, which asks for {PROTOCOL}");
        return Err(bad_request(why));
    }
    let (disk, passing) = match (request.uri().query(), &host.many) {
        (None, Some(_)) => return begin_all(host, request).await,
        (None, None) => {
            let passing = host.changes.pass_on().await?;
            let ends = || busy("the daemon ends".to_owned());
            let disk = host.disks.all().into_iter().next().ok_or_else(ends)?;
            (disk, Some(passing))
        }
        (Some(query), _) => {
            let id = query.strip_prefix("disk=");
            let id = id.ok_or_else(|| bad_request("write ?disk=ID".to_owned()))?;
            if !host.changes.are_passed_on() {
                let why = "take the node over first, with a request without ?disk=";
                return Err(bad_request(why.to_owned()));
            }
            let disk = host.find(id).ok();
            let disk = disk.filter(|disk| matches!(disk.state(), HostedState::Serving(_)));
            let Some(disk) = disk else {
                return Ok(StatusCode::NO_CONTENT.into_response());
            };
            (disk, None)
        }
    };
    let mut parcel = offered(&disk).await?;
    add_sockets(&mut parcel, &host)?;
    tokio::spawn(give(disk, on(request), parcel, passing));
    switch()
}

/// Offers what a node has besides its disks, which are asked for one by one then. The link stays until all are given, and no disk is
/// changed meanwhile. Refused if one of them cannot be given.
async fn begin_all(host: Arc<Host>, request: Request) -> Answer {
    let passing = host.changes.pass_on().await?;
    let mut stay = Vec::new();
    // A restart gets past obstacles alone.
    let mut kind = ProblemKind::CannotHandOver;
    for disk in host.disks.all() {
        let stays = match disk.state() {
            HostedState::Serving(_) => offered(&disk).await.map(drop),
            HostedState::Opening | HostedState::Failed(_) if disk.shown().is_awaited => {
                Err(awaited(&disk))
            }
            _ => Ok(()),
        };
        if let Err(Refusal(its_kind, why)) = stays {
            stay.push(why);
            if its_kind != ProblemKind::CannotHandOver {
                kind = its_kind;
            }
        }
    }
    if !stay.is_empty() {
        let more = stay.len().saturating_sub(REASONS_MAX);
        stay.truncate(REASONS_MAX);
        if more > 0 {
            stay.push(format!("{more} more disks stay as well"));
        }
        return Err(Refusal(kind, stay.join("; ")));
    }
    let mut parcel = Parcel::default();
    add_sockets(&mut parcel, &host)?;
    let state = host.sockets.state.iter().map(OwnedFd::try_clone);
    parcel.files = state.collect::<Result<_, _>>().map_err(no_descriptor)?;
    tokio::spawn(give_all(host, on(request), parcel, passing));
    switch()
}

/// Waits until another process has all disks that were served, and has this node end then. If that process leaves before, the disks
/// that it has taken are opened here again, as soon as each has been closed.
///
/// If that process takes none of the disks that are left, they end here, so that it can open them. One that has not taken any disk by
/// then gets none. Until this node ends, no disk can be changed, and those of the other process are not shown.
async fn give_all(host: Arc<Host>, upgrade: OnUpgrade, parcel: Parcel, passing: PassingOn) {
    let (disks, runtime) = (host.disks.clone(), Handle::current());
    let all_given = link(upgrade, parcel, move |giver, peer| {
        let nothing = Parcel::default().pack().map_err(|failed| failed.1)?;
        let mut standstill = Standstill::new(Instant::now());
        let count = disks.served().len();
        loop {
            let left = disks.served();
            // After the last one too, which the other process may have died of.
            giver.stays_for(LOOK_PAUSE)?;
            if left.is_empty() {
                break;
            }
            if standstill.is_over(left.len(), Instant::now()) {
                if left.len() == count {
                    let why = "it has taken no disk in time";
                    giver.keep(why);
                    return Err(io::Error::other(why));
                }
                let why = format!("process {} could not take it over", peer.pid);
                for disk in left {
                    let order = DiskRequest::Forward(Order::Yield(why.clone()));
                    runtime.block_on(disk.order(order));
                }
            }
        }
        giver.leave(&nothing, Instant::now() + GREETING_TIME);
        Ok(peer)
    });
    let all_given = all_given.await;
    let Some(many) = &host.many else { return };
    match all_given {
        Ok(peer) => {
            many.end_for(peer);
            // Never let go: a signal that comes before the process ends must leave its sockets to the other one.
            std::mem::forget(passing);
        }
        Err(error) => {
            tracing::warn!(
                "a process that was to take over all disks of this node has not: {error}: this node serves them, and opens those again that \
                 it had given"
            );
            drop(passing);
        }
    }
}

/// Refuses to give a disk whose frontend the process before has left, and which is not open yet: that frontend's connection would end with
/// this node, and nothing but its opening is needed.
fn awaited(disk: &HostedDisk) -> Refusal {
    busy(format!(
        "disk {} stays with this node until it is opened: its frontend waits for that; see whether its storage answers, and try again",
        disk.id
    ))
}

fn busy(why: String) -> Refusal {
    Refusal(ProblemKind::Busy, why)
}

/// Asks the server of a disk what another process needs.
async fn offered(disk: &HostedDisk) -> Result<Parcel, Refusal> {
    let offered = disk.ask(|reply| DiskRequest::Forward(Order::Offer(reply)));
    let id = &disk.id;
    let gone = || busy(format!("disk {id} ends, or another process takes it over"));
    offered.await.ok_or_else(gone)?
}

fn add_sockets(parcel: &mut Parcel, host: &Host) -> Result<(), Refusal> {
    let copy = |fd: &Option<OwnedFd>| fd.as_ref().map(OwnedFd::try_clone).transpose();
    let copies = [&host.sockets.control, &host.sockets.metrics].map(copy);
    let [control, metrics] = copies.map(|copied| copied.map_err(no_descriptor));
    (parcel.control, parcel.metrics) = (control?, metrics?);
    parcel.watchdog = host.watchdog;
    Ok(())
}

fn no_descriptor(error: io::Error) -> Refusal {
    let why = format!("cannot copy a socket: {error}");
    Refusal(ProblemKind::NoRoom, why)
}

fn switch() -> Answer {
    let response = Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header(header::CONNECTION, "upgrade")
        .header(header::UPGRADE, PROTOCOL)
        .body(Body::empty());
    response.map_err(|error| Refusal(ProblemKind::InternalFault, error.to_string()))
}

/// Talks to the other process until it is ready, while the disk is served, and has the disk given away then.
async fn give(
    disk: Arc<HostedDisk>,
    upgrade: OnUpgrade,
    parcel: Parcel,
    passing: Option<PassingOn>,
) {
    match link(upgrade, parcel, |giver, peer| Ok((giver, peer))).await {
        Ok((giver, peer)) => {
            let order = Order::Give(giver, peer, passing);
            disk.order(DiskRequest::Forward(order)).await;
        }
        Err(error) => tracing::warn!(
            "{}: a process asked for it and did not take it: {error}: it is served by this one as before",
            disk.id
        ),
    }
}

/// Sends another process what it needs, and does this when it is ready, on a thread.
async fn link<T: Send + 'static>(
    upgrade: OnUpgrade,
    parcel: Parcel,
    when_ready: impl FnOnce(Giver, Peer) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let upgraded = upgrade.await.map_err(io::Error::other)?;
    aside("hand-over", move || {
        let files = parcel.pack().map_err(|failed| failed.1)?;
        let stream = into_socket(upgraded).ok_or(io::ErrorKind::InvalidData)?;
        let deadline = Instant::now() + GREETING_TIME;
        let (giver, peer) = Giver::accept(stream, deadline)?;
        giver.send_files(&files, deadline)?;
        giver.await_ready(Instant::now() + READY_TIME)?;
        when_ready(giver, peer)
    })
    .await
}
