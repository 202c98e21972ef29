//! The types of the settings: how each is written, read and shown.

#[macro_use]
pub(crate) mod text;

pub(crate) mod cpus;
pub(crate) mod labels;
pub(crate) mod limits;
pub(crate) mod mode;
pub(crate) mod number;
pub(crate) mod policy;
pub(crate) mod serial;
pub(crate) mod size;
pub(crate) mod spec;
pub(crate) mod split;
pub(crate) mod words;
