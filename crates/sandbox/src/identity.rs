//! The user that the process becomes once root is no longer needed.

use rustix::thread::set_keep_capabilities;

use nix::unistd::{Gid, Group, Uid, User, getegid, geteuid, setgroups, setresgid, setresuid};

use crate::{Keep, privileges};

/// A user and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    uid: Uid,
    gid: Gid,
}

/// Why another user cannot be assumed. Each message names the remedy.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The name is not in the user database, and no number either.
    #[error("there is no {0} {1:?} on this host: check the name, or give a number")]
    Unknown(&'static str, String),
    /// A bare number has no primary group.
    #[error("user {0} has no entry on this host, so its group is unknown: give --group too")]
    NoGroup(u32),
    /// The kernel refuses.
    #[error(
        "cannot become user {uid}, group {gid}: {reason}; start as root, or leave --user and --group out"
    )]
    Refused {
        /// The user.
        uid: u32,
        /// The group.
        gid: u32,
        /// The error.
        reason: nix::Error,
    },
}

impl Identity {
    /// Looks up what the operator named: `None` if nothing. Without a group it is the user's primary group, without a user the
    /// user stays. It reads the user database, so it is to be called before the process is confined.
    pub fn find(
        user: Option<&str>,
        group: Option<&str>,
    ) -> Result<Option<Identity>, IdentityError> {
        let gid = group.map(find_group).transpose()?;
        let identity = match (user, gid) {
            (None, None) => return Ok(None),
            (None, Some(gid)) => Identity {
                uid: geteuid(),
                gid,
            },
            (Some(user), gid) => {
                let (uid, primary) = find_user(user)?;
                let gid = gid.or(primary);
                let gid = gid.ok_or(IdentityError::NoGroup(uid.as_raw()))?;
                Identity { uid, gid }
            }
        };
        Ok(Some(identity))
    }

    /// Returns the user's number.
    pub fn uid(self) -> u32 {
        self.uid.as_raw()
    }

    /// Returns the group's number.
    pub fn gid(self) -> u32 {
        self.gid.as_raw()
    }

    /// Makes all threads of the process run as this user and group, in no other group. There is no way back.
    pub fn assume(self, keep: Keep) -> Result<(), IdentityError> {
        let Identity { uid, gid } = self;
        if (uid, gid) == (geteuid(), getegid()) && !uid.is_root() {
            return Ok(());
        }
        let as_nix = |error: std::io::Error| {
            nix::Error::from_raw(error.raw_os_error().unwrap_or(libc::EPERM))
        };
        // Only root can, and the switch takes every capability away that is not kept here.
        let switched = privileges::empty_bounding_set()
            .and_then(|()| Ok(set_keep_capabilities(keep != Keep::Nothing)?))
            .map_err(as_nix)
            .and_then(|()| setgroups(&[]))
            .and_then(|()| setresgid(gid, gid, gid))
            .and_then(|()| setresuid(uid, uid, uid))
            .and_then(|()| privileges::drop_all(keep).map_err(as_nix));
        switched.map_err(|reason| IdentityError::Refused {
            uid: uid.as_raw(),
            gid: gid.as_raw(),
            reason,
        })
    }
}

/// Finds a user by name or number, and its primary group if it has an entry.
fn find_user(text: &str) -> Result<(Uid, Option<Gid>), IdentityError> {
    let unknown = || IdentityError::Unknown("user", text.to_owned());
    if let Ok(Some(user)) = User::from_name(text) {
        return Ok((user.uid, Some(user.gid)));
    }
    let uid = Uid::from_raw(number(text).ok_or_else(unknown)?);
    let entry = User::from_uid(uid).ok().flatten();
    Ok((uid, entry.map(|user| user.gid)))
}

fn find_group(text: &str) -> Result<Gid, IdentityError> {
    let unknown = || IdentityError::Unknown("group", text.to_owned());
    if let Ok(Some(group)) = Group::from_name(text) {
        return Ok(group.gid);
    }
    number(text).map(Gid::from_raw).ok_or_else(unknown)
}

/// Reads a number. The largest one means "no change" to the kernel.
fn number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|number| *number != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_are_found_by_name_and_by_number() {
        let found = |user, group| {
            let found =
                Identity::find(user, group).map(|found| found.map(|id| (id.uid(), id.gid())));
            found.map_err(|error| error.to_string())
        };
        assert_eq!(found(None, None), Ok(None));
        assert_eq!(found(Some("root"), None), Ok(Some((0, 0))));
        assert_eq!(found(Some("0"), None), Ok(Some((0, 0))));
        assert_eq!(
            found(Some("4000000000"), Some("7")),
            Ok(Some((4_000_000_000, 7)))
        );
        assert_eq!(found(None, Some("root")), Ok(Some((geteuid().as_raw(), 0))));
        for (user, group, wanted) in [
            (Some("4000000000"), None, "give --group too"),
            (Some("no-such-user"), None, "no user \"no-such-user\""),
            (Some("root"), Some("no such group"), "no group"),
            (Some("4294967295"), Some("0"), "no user"),
            (Some("-1"), None, "no user"),
            (Some(""), None, "no user"),
        ] {
            let error = found(user, group).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
