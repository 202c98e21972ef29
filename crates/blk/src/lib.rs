//! virtio-blk as pure values. This crate must not contain I/O, clocks, threads, guest memory or unsafe code,
//! so a test can repeat every decision from the same arguments.
//!
//! `Request::parse` turns a copy of the header bytes into a [`Request`] or an error status, [`Plan`] turns a
//! request into [`Op`]s for an engine, [`Outcome`] is the result for the guest, and [`Config`] is the
//! device's configuration space.
#![forbid(unsafe_code)]

mod config;
mod cut;
mod limits;
mod outcome;
mod plan;
mod request;
pub mod spec;
mod status;
mod stripe;

pub use config::{Config, Face};
pub use cut::{Cut, PLAIN_OPS_MAX, SPLIT_OPS_MAX};
pub use limits::Limits;
pub use outcome::Outcome;
pub use plan::{Op, OpKind, Plan};
pub use request::{Gate, Request, Segment, Shape, Verb};
pub use status::Status;
pub use stripe::{OP_CHUNKS_MAX, STRIPE_OPS_MAX, Stripe};
