//! `cleave serve` as a process beside others: its frontends, signals, log, sockets and images, and its place under systemd.
#![allow(clippy::unwrap_used, clippy::panic)] // shared test code lies outside of #[test] functions

mod confined;
mod frontends;
mod log;
mod owned;
mod process;
mod systemd;
