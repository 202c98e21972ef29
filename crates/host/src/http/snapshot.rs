//! A snapshot of a disk that is a file: a copy that shares its blocks (FICLONE), as XFS and Btrfs make it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::Response;
use cleave_api::{ProblemKind, Snapshot, SnapshotRequest};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, openat, statat};

use crate::hosted::FileBounds;
use crate::hosted::aside::aside;
use crate::problem::{Refusal, answer};
use crate::status::DiskStatus;

/// How long the guest may wait.
const GUEST_TIME: Duration = Duration::from_secs(10);

/// Makes a new file that has what the disk had at one moment.
pub(super) async fn take(
    status: &Arc<DiskStatus>,
    bounds: FileBounds,
    body: &[u8],
) -> Result<Response, Refusal> {
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
    let unnamed = create(to.clone(), bounds).await?;
    let copy = unnamed.file.try_clone();
    let copy = copy.map_err(|error| failed(&to, &error))?;
    let waited = status.snapshot(copy, GUEST_TIME).await?;
    let done = aside("snapshot", move || unnamed.give_name());
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

/// A file without a name, so that nothing is left of it when it does not become a snapshot.
#[derive(Debug)]
struct Unnamed {
    file: File,
    /// The folder in which it is to have the name. Whatever its path leads to meanwhile, it is this one.
    folder: OwnedFd,
    name: OsString,
}

/// Makes a file in the folder of `path`.
async fn create(path: PathBuf, bounds: FileBounds) -> Result<Unnamed, Refusal> {
    let (reply, made) = tokio::sync::oneshot::channel();
    let shown = path.clone();
    let done = aside("snapshot", move || {
        // Only a client that has left does not take it.
        let _ = reply.send(Unnamed::create(&path, &bounds)?);
        Ok(())
    });
    done.await.map_err(|error| failed(&shown, &error))?;
    made.await
        .map_err(|lost| failed(&shown, &io::Error::other(lost)))
}

impl Unnamed {
    fn create(path: &Path, bounds: &FileBounds) -> io::Result<Unnamed> {
        // Only `/`, and what ends with `..`, has none.
        let name = path.file_name().ok_or(io::ErrorKind::AlreadyExists)?;
        // An absolute path other than `/` has one.
        let folder = path.parent().unwrap_or(path);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(CWD, folder, flags, Mode::empty())?;
        // After it was opened, so that no link can lead elsewhere.
        let real_path = fs::read_link(own_path(&folder))?;
        if let Some(why) = bounds.why_not(&real_path) {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        if statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let made = openat(&folder, c".", flags, Mode::RUSR | Mode::WUSR)?;
        Ok(Unnamed {
            file: File::from(made),
            folder,
            name: name.to_owned(),
        })
    }

    /// Gives the file its name, which must be new, and has both kept by the disk.
    fn give_name(self) -> io::Result<()> {
        let Unnamed { file, folder, name } = self;
        file.sync_all()?;
        linkat(CWD, own_path(&file), &folder, name, AtFlags::SYMLINK_FOLLOW)?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(&folder, c".", flags, Mode::empty())?;
        File::from(folder).sync_all()
    }
}

/// The path of an open file or folder in `/proc`.
fn own_path(file: impl AsFd) -> String {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())
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
