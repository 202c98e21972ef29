//! The commands that the program carries out itself. `serve` and `node` are those of `cleave-host`.

pub(crate) mod demo;
pub(crate) mod detach;
pub(crate) mod doctor;
pub(crate) mod probe;
pub(crate) mod remote;
pub(crate) mod stripe;
pub(crate) mod upgrade;
pub(crate) mod view;
