//! The folders of images of a node, as they are when it starts.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SendError, channel};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

use crate::failure::Failure;

/// Longest wait for the folders. A network file system that was just mounted takes a second or two to answer, and the guests of all
/// other folders wait as well.
const FOLDER_TIME: Duration = Duration::from_secs(5);

/// A folder, and where it is without links.
type FoundFolder = (PathBuf, io::Result<PathBuf>);

/// The folders of images.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ImageFolders {
    /// Those that are there, without links.
    pub(super) there: Vec<PathBuf>,
    /// One whose server does not answer, and so may have images that cannot be judged.
    pub(super) silent: Option<String>,
}

/// Finds the folders of images, without links, as the confinement has them from the start. Looked for again with each disk, one whose
/// server has become silent would keep the disks of all other folders away.
///
/// A folder that is not there, or whose server does not answer, is left out for the same reason, and the log says so. The node does not
/// start if that is all of them: with an empty list it would open images everywhere.
pub(super) fn find(folders: &[PathBuf]) -> Result<ImageFolders, Failure> {
    let looked = look(folders)?;
    settled(await_all(folders, &looked, FOLDER_TIME))
}

/// Has a thread look at each folder: it may wait for a server without end. Such a thread is not confined with the process. When it is
/// answered after all, it has the log say so, and does nothing more.
fn look(folders: &[PathBuf]) -> Result<Receiver<FoundFolder>, Failure> {
    let (reply, looked) = channel();
    for folder in folders {
        let (reply, folder) = (reply.clone(), folder.clone());
        let thread = thread::Builder::new().name("images".to_owned());
        let spawned = thread.spawn(move || {
            let found = seen(&folder);
            if let Err(SendError((folder, Ok(_)))) = reply.send((folder, found)) {
                tracing::error!("{}", answers_late(&folder));
            }
        });
        spawned.map_err(|error| Failure::start(format!("cannot start a thread: {error}")))?;
    }
    Ok(looked)
}

/// Returns where a folder is. The kernel knows the way to the root of a file system, and asks the server for what it is, as the
/// confinement does.
fn seen(folder: &Path) -> io::Result<PathBuf> {
    let found = folder.canonicalize()?;
    fs::metadata(&found).map(|_| found)
}

/// Waits for what is found, at most for so long. A folder that is not answered for by then has timed out.
fn await_all(
    folders: &[PathBuf],
    looked: &Receiver<FoundFolder>,
    time: Duration,
) -> Vec<FoundFolder> {
    let until = Instant::now() + time;
    let mut found: Vec<FoundFolder> = Vec::new();
    while found.len() < folders.len() {
        match looked.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(one) => found.push(one),
            Err(_) => break,
        }
    }
    let is_silent = |folder: &&PathBuf| found.iter().all(|(answered, _)| answered != *folder);
    let silent = folders.iter().filter(is_silent).map(|folder| {
        let why = "its file system does not answer";
        let error = io::Error::new(io::ErrorKind::TimedOut, why);
        (folder.clone(), Err(error))
    });
    let silent: Vec<FoundFolder> = silent.collect();
    found.extend(silent);
    found
}

/// Returns the folders that are there. Tells of the others, or refuses to start without any.
fn settled(looked: Vec<FoundFolder>) -> Result<ImageFolders, Failure> {
    let (mut there, mut away, mut silent) = (Vec::new(), Vec::new(), None);
    for (folder, found) in looked {
        match found {
            Ok(found) => there.push(found),
            Err(error) => {
                let line = named(&folder, &error);
                if error.kind() == io::ErrorKind::TimedOut {
                    silent = Some(line.clone());
                }
                away.push(line);
            }
        }
    }
    if there.is_empty() && !away.is_empty() {
        let away = away.join("; ");
        return Err(Failure::start(format!(
            "{away}: make or mount that folder, or name another"
        )));
    }
    for line in &away {
        tracing::error!(
            "{line}: the disks in that folder cannot be opened: make or mount it, then restart the node, or have another take over \
             (systemctl reload)"
        );
    }
    Ok(ImageFolders { there, silent })
}

/// Tells of a folder that is not waited for any more, whose disks were left out.
fn answers_late(folder: &Path) -> String {
    format!(
        "--images {}: its file system answers now: have another node take over, which opens the disks in that folder (systemctl reload)",
        folder.display()
    )
}

fn named(folder: &Path, error: &io::Error) -> String {
    format!("--images {}: {error}", folder.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_away_keeps_no_other_away() {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().canonicalize().unwrap();
        let missing = folder.path().join("missing");
        let found = find(&[missing.clone(), folder.path().to_owned()]).unwrap();
        assert_eq!((found.there, found.silent), (vec![there], None));
        let refused = find(std::slice::from_ref(&missing)).unwrap_err();
        let line = format!("--images {}: No such file", missing.display());
        assert!(refused.to_string().starts_with(&line), "{refused}");
        assert_eq!(refused.exit_code(), std::process::ExitCode::from(1));
        // Everywhere.
        assert_eq!(find(&[]).unwrap().there, Vec::<PathBuf>::new());
    }

    /// Its thread still looks.
    #[test]
    fn a_folder_whose_server_is_silent_is_not_waited_for() {
        let folders = ["/silent", "/there"].map(PathBuf::from);
        let (reply, looked) = channel();
        let answer = (folders[1].clone(), Ok(folders[1].clone()));
        reply.send(answer).unwrap();
        let found = await_all(&folders, &looked, Duration::from_millis(10));
        let found = settled(found).unwrap();
        assert_eq!(found.there, [folders[1].clone()]);
        let line = "--images /silent: its file system does not answer";
        assert_eq!(found.silent.as_deref(), Some(line));
        let found = await_all(&folders[..1], &looked, Duration::ZERO);
        let refused = settled(found).unwrap_err();
        assert!(refused.to_string().starts_with(line), "{refused}");
    }
}
