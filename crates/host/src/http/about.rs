//! What the process tells of itself: what it is, that it runs, and that it is ready.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::State as Shared;
use axum::http::StatusCode;
use axum::response::Response;
use cleave_api::{DiskRoom, FileRoom, NodeReport, ProblemKind, ProcessKind};

use crate::hosted::Host;
use crate::problem::{Refusal, answer};
use crate::process::started;

/// The answer to a process that is asked whether it does what it should.
const OK: &str = "ok\n";

pub(super) async fn node(Shared(host): Shared<Arc<Host>>) -> Response {
    let (room, setup) = (&host.room, host.many.as_ref().map(|many| many.setup()));
    let report = NodeReport {
        kind: match setup {
            Some(_) => ProcessKind::Node,
            None => ProcessKind::Disk,
        },
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        boot: host.events.boot().to_owned(),
        start_seconds: seconds(started().time),
        now_seconds: seconds(SystemTime::now()),
        keeps: host.keeps,
        disks: DiskRoom {
            count: host.disks.all().len() as u64,
            max: room.disks_max as u64,
        },
        open_files: FileRoom {
            needed: room.descriptors_own + host.disks.descriptors(),
            max: room.descriptors_max,
        },
        setup,
    };
    answer(StatusCode::OK, &report)
}

/// The control loop has come here, so it runs.
pub(super) async fn health() -> &'static str {
    OK
}

/// Refuses as long as a disk is being opened for the first time. One that failed and is tried again is not waited for.
pub(super) async fn readiness(Shared(host): Shared<Arc<Host>>) -> Result<&'static str, Refusal> {
    let all = host.disks.all();
    let opening = all.iter().filter(|disk| !disk.shown().is_settled).count();
    let are = match opening {
        0 => return Ok(OK),
        1 => "1 disk is".to_owned(),
        _ => format!("{opening} disks are"),
    };
    let why = format!(
        "{are} being opened: ask again, and see whether the storage answers if that stays so"
    );
    Err(Refusal(ProblemKind::NotReady, why))
}

/// Seconds since 1970, to a millisecond.
fn seconds(time: SystemTime) -> f64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as f64 / 1e3
}
