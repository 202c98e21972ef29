//! The exclusive lock of an image.
//!
//! Unsafe because it calls librbd, with the handle of an image that its caller keeps open until the call has returned.

use std::ffi::{CStr, c_char};
use std::io;
use std::ptr::null_mut;

use crate::RbdError;
use crate::calls::{self, Calls, RadosHandle};
use crate::error::io as failed;

/// The handle of an image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shareable(pub(crate) RadosHandle);

// SAFETY: librbd permits the use of its handles from any thread, and from several at once.
unsafe impl Send for Shareable {}
// SAFETY: as above.
unsafe impl Sync for Shareable {}

/// The lock of an image that is open as long as this is used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExclusiveLock {
    pub(crate) calls: &'static Calls,
    pub(crate) image: Shareable,
}

impl ExclusiveLock {
    /// Refuses an image that has no such lock. `name`: for the error.
    pub(crate) fn require(self, name: &str) -> Result<(), RbdError> {
        let mut features = 0;
        // SAFETY: the image is open.
        let asked = unsafe { (self.calls.rbd_get_features)(self.image.0, &raw mut features) };
        match asked {
            0.. if features & calls::FEATURE_LOCK != 0 => Ok(()),
            0.. => Err(RbdError::NoLock(name.to_owned())),
            error => Err(RbdError::Image(name.to_owned(), failed(error))),
        }
    }

    /// Takes the lock, and forgets what was read before, which its last owner may have changed. From now on librbd does not take it
    /// by itself again: without the lock, writes fail.
    pub(crate) fn take(self, name: &str) -> Result<(), RbdError> {
        let refused = |error| RbdError::Lock(name.to_owned(), failed(error));
        // SAFETY: the image is open.
        match unsafe { (self.calls.rbd_lock_acquire)(self.image.0, calls::EXCLUSIVE) } {
            0.. => {}
            error => {
                return Err(match (error.saturating_neg(), self.owner()) {
                    (libc::EROFS | libc::EBUSY | libc::EAGAIN, Some(owner)) => {
                        RbdError::InUse(name.to_owned(), owner)
                    }
                    _ => refused(error),
                });
            }
        }
        // SAFETY: as above.
        match unsafe { (self.calls.rbd_invalidate_cache)(self.image.0) } {
            0.. => Ok(()),
            error => {
                let _ = self.give_back();
                Err(refused(error))
            }
        }
    }

    /// Gives the lock back, when everything that was written is in the cluster.
    pub(crate) fn give_back(self) -> io::Result<()> {
        // SAFETY: as above.
        match unsafe { (self.calls.rbd_lock_release)(self.image.0) } {
            0.. => Ok(()),
            error => Err(failed(error)),
        }
    }

    /// Returns the client that has the lock.
    fn owner(self) -> Option<String> {
        let (mut mode, mut owners, mut count) = (0, [null_mut::<c_char>(); 1], 1);
        // SAFETY: there is room for `count` texts, which are ended by a zero byte and freed after the copy.
        unsafe {
            let got = (self.calls.rbd_lock_get_owners)(
                self.image.0,
                &raw mut mode,
                owners.as_mut_ptr(),
                &raw mut count,
            );
            let owner = *owners
                .first()
                .filter(|owner| got >= 0 && count > 0 && !owner.is_null())?;
            let name = CStr::from_ptr(owner).to_string_lossy().into_owned();
            (self.calls.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count);
            Some(name)
        }
    }
}
