//! Giving disks, with the connections of their frontends, from one process to the next.
//!
//! A [`Parcel`](parcel::Parcel) is a disk with its files, its listening socket and its sessions. A session is described by the
//! messages of its frontend that are in force, which the next process judges like those of any frontend. Packed, a parcel is a
//! document and named descriptors: the service manager can keep it, and a [`link`] carries it to another process, which asks for an
//! [`offer`].

mod document;
pub(crate) mod link;
pub(crate) mod merge;
pub(crate) mod offer;
pub(crate) mod parcel;
pub(crate) mod store;

/// Where a control socket is asked for a link, and the name of its protocol.
pub(crate) const PATH: &str = "/v1/take-over";
pub(crate) const PROTOCOL: &str = "cleave-hand-over";
