//! The kinds of store.

pub(crate) mod any;
pub(crate) mod files;
pub(crate) mod model;
pub(crate) mod nbd;
pub(crate) mod null;
mod parts;
pub(crate) mod ram;
pub(crate) mod rbd;
