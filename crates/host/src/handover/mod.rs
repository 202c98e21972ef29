//! Giving disks, with the connections of their frontends, from one process to the next.
//!
//! A [`Parcel`](parcel::Parcel) is a disk with its files, its listening socket and its sessions. A session is described by the
//! messages of its frontend that are in force, which the next process judges like those of any frontend. Packed, a parcel is a
//! document and named descriptors: the service manager can keep it, and a [`link`] carries it to another process.

mod document;
#[cfg_attr(
    not(test),
    expect(
        dead_code,
        reason = "no process takes disks over from one that runs yet"
    )
)]
pub(crate) mod link;
pub(crate) mod parcel;
pub(crate) mod store;
