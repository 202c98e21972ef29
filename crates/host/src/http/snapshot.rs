//! A snapshot of a disk that is a file: a copy that shares its blocks (FICLONE), as XFS and Btrfs make it.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::Response;
use cleave_api::{ProblemKind, Snapshot, SnapshotRequest};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, openat};

use crate::hosted::aside::aside;
use crate::problem::{Refusal, answer};
use crate::status::DiskStatus;

/// How long the guest may wait.
const GUEST_TIME: Duration = Duration::from_secs(10);

/// Makes a new file that has what the disk had at one moment.
pub(super) async fn take(status: &Arc<DiskStatus>, body: &[u8]) -> Result<Response, Refusal> {
    let bad = |why: String| Refusal(ProblemKind::InvalidRequest, why);
    let wanted: SnapshotRequest = serde_json::from_slice(body).map_err(|error| {
        bad(format!(
            "the body: {error}: send {{\"to\": \"/folder/of/the/copy.img\"}}"
        ))
    })?;
    let to = wanted.to;
    if !to.is_absolute() {
        return Err(bad(format!("to: {} is not an absolute path", to.display())));
    }
    status.refuse_snapshot().map_err(bad)?;
    let _one = status.begin_snapshot()?;
    let file = create(to.clone()).await?;
    let copy = file.try_clone().map_err(|error| failed(&to, &error))?;
    let waited = status.snapshot(copy, GUEST_TIME).await?;
    let named = to.clone();
    let done = aside("snapshot", move || name(&file, &named));
    done.await.map_err(|error| failed(&to, &error))?;
    let size_bytes = status.size_bytes();
    let guest_waited_ms = waited.as_micros() as f64 / 1e3;
    tracing::info!(
        "{}: snapshot {} taken; the guest waited for {guest_waited_ms:.1} ms",
        status.name(),
        to.display()
    );
    let taken = Snapshot {
        to,
        size_bytes,
        guest_waited_ms,
    };
    Ok(answer(StatusCode::CREATED, &taken))
}

/// Makes a file in the folder of `path`. It has no name, so nothing is left of it when it does not become a snapshot.
async fn create(path: PathBuf) -> Result<File, Refusal> {
    let (reply, made) = tokio::sync::oneshot::channel();
    let shown = path.clone();
    let done = aside("snapshot", move || {
        if fs::symlink_metadata(&path).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let made = openat(CWD, folder(&path), flags, Mode::RUSR | Mode::WUSR)?;
        // Only a client that has left does not take it.
        let _ = reply.send(File::from(made));
        Ok(())
    });
    done.await.map_err(|error| failed(&shown, &error))?;
    made.await
        .map_err(|lost| failed(&shown, &io::Error::other(lost)))
}

/// Gives the file its name, which must be new, and has both kept by the disk.
fn name(file: &File, path: &Path) -> io::Result<()> {
    file.sync_all()?;
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    linkat(CWD, unnamed, CWD, path, AtFlags::SYMLINK_FOLLOW)?;
    File::open(folder(path))?.sync_all()
}

/// An absolute path other than `/` has one.
fn folder(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

fn failed(path: &Path, error: &io::Error) -> Refusal {
    let kind = match error.kind() {
        io::ErrorKind::AlreadyExists
        | io::ErrorKind::NotFound
        | io::ErrorKind::PermissionDenied => ProblemKind::CannotSnapshot,
        _ => ProblemKind::StorageFailed,
    };
    let why = format!("cannot make {}: {error}", path.display());
    Refusal(kind, why)
}
