//! A snapshot of a disk that is a file: a copy that shares its blocks (FICLONE), as XFS and Btrfs make it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::keep::aside;
use crate::control::{DiskStatus, Refusal, answer};

/// How long the guest may wait.
const GUEST_TIME: Duration = Duration::from_secs(10);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    to: PathBuf,
}

#[derive(Debug, Serialize)]
struct Taken {
    to: PathBuf,
    size_bytes: u64,
    /// How long the guest's requests waited.
    guest_waited_ms: f64,
}

/// Makes a new file that has what the disk had at one moment.
pub(super) async fn take(status: &Arc<DiskStatus>, body: &[u8]) -> Result<Response, Refusal> {
    let bad = |why: String| Refusal(StatusCode::BAD_REQUEST, why);
    let wanted: Wanted = serde_json::from_slice(body).map_err(|error| {
        bad(format!(
            "the body: {error}: send {{\"to\": \"/folder/of/the/copy.img\"}}"
        ))
    })?;
    let to = wanted.to;
    if !to.is_absolute() {
        return Err(bad(format!("to: {} is no absolute path", to.display())));
    }
    status.refuse_snapshot().map_err(bad)?;
    let file = create(to.clone()).await?;
    let copy = file.try_clone().map_err(|error| failed(&to, &error))?;
    let waited = match status.snapshot(copy, GUEST_TIME).await {
        Ok(waited) => waited,
        Err(refusal) => {
            // It is empty, or of no use.
            let _ = fs::remove_file(&to);
            return Err(refusal);
        }
    };
    let (synced, folder) = (to.clone(), to.parent().map(Path::to_owned));
    let done = aside("snapshot", move || {
        file.sync_all()?;
        folder.map_or(Ok(()), |folder| File::open(folder)?.sync_all())
    });
    done.await.map_err(|error| failed(&synced, &error))?;
    let size_bytes = status.entry().size_bytes;
    let guest_waited_ms = waited.as_micros() as f64 / 1e3;
    tracing::info!(
        "{}: snapshot {} taken; the guest waited for {guest_waited_ms:.1} ms",
        status.entry().name,
        to.display()
    );
    let taken = Taken {
        to,
        size_bytes,
        guest_waited_ms,
    };
    Ok(answer(StatusCode::CREATED, &taken))
}

/// Makes the file, which must be new.
async fn create(path: PathBuf) -> Result<File, Refusal> {
    let (reply, made) = tokio::sync::oneshot::channel();
    let shown = path.clone();
    let done = aside("snapshot", move || {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        // Only a client that has left does not take it.
        let _ = reply.send(options.open(path)?);
        Ok(())
    });
    done.await.map_err(|error| failed(&shown, &error))?;
    made.await
        .map_err(|lost| failed(&shown, &io::Error::other(lost)))
}

fn failed(path: &Path, error: &io::Error) -> Refusal {
    let status = match error.kind() {
        io::ErrorKind::AlreadyExists
        | io::ErrorKind::NotFound
        | io::ErrorKind::PermissionDenied => StatusCode::UNPROCESSABLE_ENTITY,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let why = format!("cannot make {}: {error}", path.display());
    Refusal(status, why)
}
