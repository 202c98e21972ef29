//! Why an image cannot be opened.

use std::io;

use crate::ImagePlace;
use crate::settings::RiskySetting;

/// Why an image cannot be opened. Each is one line that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// The host has no librbd, or one that is too old.
    #[error(
        "{0}; install Ceph's client library (Debian, Ubuntu: librbd1; Fedora, RHEL: librbd1 too), version 15.2 or later"
    )]
    Library(String),
    /// A name that contains a zero byte.
    #[error("a name contains a zero byte")]
    Text,
    /// There is no configuration.
    #[error("there is no {0}; name the cluster's configuration with conf=PATH")]
    Conf(String, #[source] io::Error),
    /// There is one, and it cannot be read or is none.
    #[error(
        "cannot read {0}, the configuration of the cluster: {1}; correct it, or name another one with conf=PATH"
    )]
    BadConf(String, #[source] io::Error),
    /// The cluster cannot be reached, or refuses every client.
    #[error(
        "cannot connect to the cluster as client.{0}: {1}; check mon_host and the keyring (ceph -s --id {0})"
    )]
    Connect(String, #[source] io::Error),
    /// The pool or the namespace.
    #[error(
        "cannot open pool {0}: {1}; check its name (ceph osd pool ls), and what the user may do"
    )]
    Pool(String, #[source] io::Error),
    /// The image or the snapshot.
    #[error("cannot open image {0}: {1}; check its name (rbd ls), and what the user may do")]
    Image(String, #[source] io::Error),
    /// Nothing keeps two hosts from writing it at once.
    #[error(
        "image {0} has no exclusive lock, without which two hosts could write to it at once; run: rbd feature enable {0} exclusive-lock"
    )]
    NoLock(String),
    /// A setting of the image, or of its pool, with which a guest could lose writes.
    #[error("image {0} has {harm}; run: rbd config image set {0} {name} {wanted}", harm = .1.harm, name = .1.name, wanted = .1.wanted)]
    Harmful(String, RiskySetting),
    /// Another client has the lock.
    #[error(
        "image {0} is in use by another client ({1}); stop it, or serve a snapshot with --read-only"
    )]
    InUse(String, String),
    /// The lock cannot be had.
    #[error("cannot lock image {0}: {1}")]
    Lock(String, #[source] io::Error),
    /// An eventfd.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Returns the kernel's words for a negative result.
pub(crate) fn io(result: i32) -> io::Error {
    io::Error::from_raw_os_error(result.saturating_neg())
}

impl RbdError {
    /// Returns true if the cluster may answer later: it does not now, or the names of its monitors cannot be looked up, which
    /// librados reports as invalid. Another client that has the image may release it.
    pub fn may_pass(&self) -> bool {
        use io::ErrorKind::{InvalidInput, TimedOut};
        match self {
            RbdError::Connect(_, error) => matches!(error.kind(), TimedOut | InvalidInput),
            RbdError::Pool(_, error) | RbdError::Image(_, error) | RbdError::Lock(_, error) => {
                error.kind() == TimedOut
            }
            // The host lacks open files.
            RbdError::InUse(..) | RbdError::Io(_) => true,
            RbdError::Library(_)
            | RbdError::Text
            | RbdError::Conf(..)
            | RbdError::BadConf(..)
            | RbdError::NoLock(_)
            | RbdError::Harmful(..) => false,
        }
    }

    /// Returns the client that has the lock of the image, if that is the reason.
    pub fn owner(&self) -> Option<&str> {
        match self {
            RbdError::InUse(_, owner) => Some(owner),
            _ => None,
        }
    }

    /// Returns true if the cluster refuses this client for good, because another one has taken the lock.
    pub fn is_fenced(&self) -> bool {
        matches!(self, RbdError::Lock(_, error) if error.raw_os_error() == Some(libc::ESHUTDOWN))
    }

    pub(crate) fn image(place: &ImagePlace, result: i32) -> RbdError {
        let name = match &place.snapshot {
            Some(snapshot) => format!("{}@{snapshot}", place.image_name()),
            None => place.image_name(),
        };
        RbdError::Image(name, io(result))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A service manager gives a service up for an error that does not pass.
    #[test]
    fn an_image_that_another_client_has_and_a_cluster_that_is_silent_may_pass() {
        let name = || "pool/image".to_owned();
        let kinds = [RbdError::Pool, RbdError::Image, RbdError::Lock];
        for kind in kinds {
            assert!(kind(name(), io(-libc::ETIMEDOUT)).may_pass());
            assert!(!kind(name(), io(-libc::EPERM)).may_pass());
        }
        assert!(!RbdError::Image(name(), io(-libc::ENOENT)).may_pass());
        assert!(RbdError::InUse(name(), "client.4".to_owned()).may_pass());
        assert!(!RbdError::NoLock(name()).may_pass());
    }
}
