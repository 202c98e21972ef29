//! Settings that may change while a disk is served.

pub(crate) mod limits;
pub(crate) mod on_error;
pub(crate) mod tuning;
