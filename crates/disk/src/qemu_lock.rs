//! QEMU's image locks, so that QEMU and this program do not write to the same image.
//!
//! QEMU (`block/file-posix.c`) announces its use of an image by read locks on single bytes: 100 + *p* while
//! it uses permission *p*, 200 + *p* while nobody else may use it. A program may not use a permission while
//! the second byte is locked, and may not exclude others from it while the first is. The locks belong to the
//! open file description, like those of flock.

use std::fs::File;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::io::Errno;

const USED: i64 = 100;
const UNSHARED: i64 = 200;

/// QEMU's permissions, by number.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// Takes the locks of a guest's disk: it reads, writes unless it is read-only, and excludes other writers and
/// resizing. `WOULDBLOCK`: QEMU has locks that conflict. If the file system has no such locks, the disk is
/// used without them, like QEMU does.
pub(crate) fn lock(file: &File, read_only: bool) -> Result<(), Errno> {
    // They are released, so that a retry, or QEMU meanwhile, does not fail because of them.
    lock_given(file, read_only).or_else(|refused| unlock(file).and(Err(refused)))
}

/// Takes the locks like `lock`, of a description that may have them already. A refusal releases none of them: another process may
/// rely on them.
pub(crate) fn lock_given(file: &File, read_only: bool) -> Result<(), Errno> {
    let used = match read_only {
        true => &[CONSISTENT_READ][..],
        false => &[CONSISTENT_READ, WRITE],
    };
    let unshared = &[WRITE, RESIZE];
    where_possible(try_lock(file, used, unshared))
}

/// Releases all of them.
pub(crate) fn unlock(file: &File) -> Result<(), Errno> {
    let all = bytes(&[CONSISTENT_READ, WRITE], USED).chain(bytes(&[WRITE, RESIZE], UNSHARED));
    let mut released = Ok(());
    for byte in all {
        released = released.and(set(file, byte, libc::F_UNLCK));
    }
    where_possible(released)
}

/// Ignores that a file system has no such locks.
fn where_possible(tried: Result<(), Errno>) -> Result<(), Errno> {
    match tried {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Ok(()),
        tried => tried,
    }
}

/// Locks first and checks afterwards, like QEMU: of two that start at the same time, each sees the other.
fn try_lock(file: &File, used: &[i64], unshared: &[i64]) -> Result<(), Errno> {
    for byte in bytes(used, USED).chain(bytes(unshared, UNSHARED)) {
        set(file, byte, libc::F_RDLCK)?;
    }
    for byte in bytes(used, UNSHARED).chain(bytes(unshared, USED)) {
        if is_locked(file, byte)? {
            return Err(Errno::WOULDBLOCK);
        }
    }
    Ok(())
}

fn bytes(permissions: &[i64], kind: i64) -> impl Iterator<Item = i64> {
    permissions.iter().map(move |permission| kind + permission)
}

fn set(file: &File, byte: i64, kind: i32) -> Result<(), Errno> {
    control(file, FcntlArg::F_OFD_SETLK(&request(byte, kind)))
}

/// Returns true if another open file description has a lock on the byte.
fn is_locked(file: &File, byte: i64) -> Result<bool, Errno> {
    let mut found = request(byte, libc::F_WRLCK);
    control(file, FcntlArg::F_OFD_GETLK(&mut found))?;
    Ok(i32::from(found.l_type) != libc::F_UNLCK)
}

fn control(file: &File, what: FcntlArg<'_>) -> Result<(), Errno> {
    let failed = |errno| Errno::from_raw_os_error(errno as i32);
    fcntl(file, what).map(drop).map_err(failed)
}

fn request(byte: i64, kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        // Must be 0 for locks of open file descriptions.
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes the locks of a program that uses the permissions `used` and shares all but `unshared`.
    fn other(path: &std::path::Path, used: &[i64], unshared: &[i64]) -> File {
        let file = File::open(path).unwrap();
        try_lock(&file, used, unshared).unwrap();
        file
    }

    #[test]
    fn permissions_that_exclude_each_other_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let mut options = File::options();
        let ours = options
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        let cases: [(&[i64], &[i64], bool, bool); 6] = [
            // Used and unshared permissions of another program; whether we may write, and read.
            (&[], &[], true, true),
            (&[CONSISTENT_READ], &[], true, true),
            (&[CONSISTENT_READ], &[WRITE, RESIZE], false, true),
            (&[CONSISTENT_READ, WRITE], &[], false, false),
            (&[RESIZE], &[], false, false),
            (&[], &[CONSISTENT_READ], false, false),
        ];
        for (used, unshared, writes, reads) in cases {
            // A child would keep the locks of the case before.
            crate::children::none_run();
            let held = other(&path, used, unshared);
            for (read_only, wanted) in [(false, writes), (true, reads)] {
                let tried = lock(&ours, read_only);
                let wanted = if wanted {
                    Ok(())
                } else {
                    Err(Errno::WOULDBLOCK)
                };
                assert_eq!(tried, wanted, "{used:?} {unshared:?} {read_only}");
                // A refused attempt leaves nothing locked.
                let byte = |byte| is_locked(&held, byte).unwrap();
                assert_eq!(byte(UNSHARED + WRITE), wanted.is_ok());
                for byte in bytes(&[CONSISTENT_READ, WRITE, RESIZE], USED)
                    .chain(bytes(&[WRITE, RESIZE], UNSHARED))
                {
                    set(&ours, byte, libc::F_UNLCK).unwrap();
                }
            }
        }
    }
}
