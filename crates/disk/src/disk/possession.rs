//! Giving a disk up to another host, and taking it again.

use std::io;

use crate::superblock::{self, SuperblockState};
use crate::{Disk, OpenError, StripeError};

impl Disk {
    /// Releases the locks of all legs, so that another host can acquire the disk. Nothing may be in flight, what was written
    /// has to be durable, and nothing may be read or written from now on until [`acquire`](Disk::acquire) has succeeded. An
    /// export of an NBD server and a disk in memory have no locks. The claim of a block device stays: it keeps this host from
    /// mounting the device, and other hosts do not see it.
    pub fn release(&self) -> io::Result<()> {
        let mut released = Ok(());
        for leg in self.legs() {
            released = released.and(leg.release());
        }
        released
    }

    /// Takes the locks of all legs in order, or of none, without waiting for a program that has one ([`OpenError::holder`]).
    /// Pages of this host's cache are dropped, the legs of a stripe must have the superblocks with which they were opened, and
    /// the size is looked at again ([`refresh`](Disk::refresh)): another host may have had the disk. For a disk that was opened
    /// with [`Locking::Later`](crate::Locking::Later) or released.
    pub fn acquire(&self) -> Result<(), OpenError> {
        let read_only = self.limits().read_only;
        let mut legs = self.legs().iter();
        let acquired = legs
            .try_for_each(|leg| leg.acquire(read_only))
            .and_then(|()| self.check_superblocks())
            .and_then(|()| {
                self.refresh()
                    .map(drop)
                    .map_err(|error| failed(self.name(), error))
            });
        acquired.inspect_err(|_| drop(self.release()))
    }

    fn check_superblocks(&self) -> Result<(), OpenError> {
        let legs = self.legs().iter().zip(&self.superblocks);
        for (leg, (place, opened)) in legs {
            match superblock::read_again(leg.backing(), *place) {
                Ok(SuperblockState::Whole(found)) if found == *opened => {}
                Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
                    return Err(failed(leg.name(), error));
                }
                _ => return Err(StripeError::changed(leg.name()).into()),
            }
        }
        Ok(())
    }
}

fn failed(name: &str, error: io::Error) -> OpenError {
    OpenError::Io(name.to_owned(), error)
}
