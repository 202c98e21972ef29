//! The folder of a disk's socket. The group of the socket may enter it, and no more: a VMM that could replace the socket of another
//! guest would be given that guest's memory.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;

use rustix::fs::{Gid, Mode, OFlags, fchmod, fchown, fstat, open};
use rustix::process::{getegid, geteuid};

use crate::failure::Failure;

/// The node's folders, which every user may enter and look at.
const RUN_MODE: u32 = 0o755;
const SETGID: u32 = 0o2000;

/// Who may enter the folder of a socket.
#[derive(Debug, Clone, Copy)]
pub(super) enum FolderAccess {
    Group,
    All,
    /// All, and they may list it.
    AllAndLook,
}

impl FolderAccess {
    fn mode(self) -> u32 {
        match self {
            FolderAccess::Group => 0o750,
            FolderAccess::All => 0o751,
            FolderAccess::AllAndLook => 0o755,
        }
    }
}

/// Makes the folder of all folders.
pub(super) fn make_run(run: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(RUN_MODE).create(run)
}

/// Makes the folder of a socket with these permissions, and leaves one that is there as it is: another daemon may serve there. One of
/// another user is replaced if it is empty, and refused otherwise.
pub(super) fn make(folder: &Path, entry: FolderAccess) -> Result<(), Failure> {
    let failed = |error: io::Error| cannot_make(folder, &error);
    make_run(folder.parent().unwrap_or(folder)).map_err(failed)?;
    let create = || DirBuilder::new().mode(entry.mode()).create(folder);
    match create() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made.map_err(failed),
    }
    let Some(owner) = another_owner(folder).map_err(failed)? else {
        return Ok(());
    };
    fs::remove_dir(folder).map_err(|error| {
        let shown = folder.display();
        Failure::start(format!(
            "{shown} belongs to user {owner}, who could replace the socket in it, and cannot be removed: {error}: remove it if no \
             program serves there, or choose another id"
        ))
    })?;
    create().map_err(failed)
}

/// Returns the owner of a folder if that is another user, who could rename and remove what is in it. The user that has the folder of all
/// folders could do so anyway.
pub(super) fn another_owner(folder: &Path) -> io::Result<Option<u32>> {
    let found = fs::symlink_metadata(folder)?;
    if !found.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    let run = fs::metadata(folder.parent().unwrap_or(folder))?;
    let trusted = [0, geteuid().as_raw(), run.uid()];
    Ok((!trusted.contains(&found.uid())).then(|| found.uid()))
}

/// Gives the folder of a socket, in which this process has the lock, to a group with these permissions: a node of an earlier version
/// may have left it writable for its group. Returns the group of the folder, which is the one given or else that of a new file.
pub(super) fn give(folder: &Path, group: Option<u32>, entry: FolderAccess) -> Result<u32, Failure> {
    let shown = folder.display();
    let failed = |error: io::Error| cannot_make(folder, &error);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = open(folder, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
    let found = fstat(&opened).map_err(|error| failed(error.into()))?;
    let run = folder.parent().unwrap_or(folder);
    let wanted = group
        .map_or_else(|| group_of_new(run), Ok)
        .map_err(failed)?;
    if found.st_gid != wanted {
        fchown(&opened, None, Some(Gid::from_raw(wanted))).map_err(|error| {
            Failure::input(format!(
                "socket_group: cannot give {shown} to group {wanted}: {error}: start the node as root or with a user of that \
                 group, or leave socket_group out"
            ))
        })?;
    }
    // The bit that passes the group on stays as it is: its setting may be forbidden, and the socket is given its group itself.
    if found.st_mode & 0o777 != entry.mode() {
        fchmod(&opened, Mode::from_raw_mode(entry.mode())).map_err(|error| failed(error.into()))?;
    }
    Ok(wanted)
}

fn cannot_make(folder: &Path, error: &io::Error) -> Failure {
    let shown = folder.display();
    let remedy = match error.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => "remove it",
        _ => "make its parent writable",
    };
    Failure::input(format!("cannot make {shown}: {error}: {remedy}"))
}

/// The group of what is made in a folder.
fn group_of_new(folder: &Path) -> io::Result<u32> {
    let found = fs::metadata(folder)?;
    Ok(match found.mode() & SETGID {
        0 => getegid().as_raw(),
        _ => found.gid(),
    })
}
