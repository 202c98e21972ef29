//! virtio-blk as pure values. This crate forbids I/O, clocks, threads, guest memory and unsafe code:
//! whatever it decides can be decided again in a test from the same arguments.
//!
//! `Request::parse` turns copied-out header bytes into a [`Request`] or a refusal, [`Plan`] turns a
//! request into [`Op`]s for an engine, [`Outcome`] is what the guest is told, and [`Config`] is the
//! device's configuration space.
#![forbid(unsafe_code)]

mod config;
mod limits;
mod outcome;
mod plan;
mod request;
pub mod spec;
mod stripe;

pub use config::Config;
pub use limits::Limits;
pub use outcome::{Outcome, Status};
pub use plan::{Op, OpKind, Plan};
pub use request::{Gate, Request, Segment, Shape, Verb};
pub use stripe::{Cut, SPLIT_OPS_MAX, STRIPE_OPS_MAX, Stripe};
