//! The `cleave` program: command line, socket, signals, log and the demonstration. This crate forbids
//! seeing a vring, and unsafe code: it opens a disk, accepts frontends and hands each to a session.
#![forbid(unsafe_code)]

mod alone;
mod cli;
mod confine;
mod control;
mod cpus;
mod demo;
mod disk_server;
mod doctor;
mod events;
mod failure;
mod host;
mod knock;
mod log;
mod loop_device;
mod node;
mod options_doc;
mod output;
mod pages;
mod path_lock;
mod pending;
mod probe;
mod problem;
mod process;
mod progress;
mod remote;
mod resize;
mod serve;
mod service;
mod signals;
mod socket;
mod source;
mod stripe;
mod systemd;
mod tuning;
mod unit;
mod view;

use std::process::ExitCode;

use cli::Action;
use failure::Failure;

fn main() -> ExitCode {
    process::started();
    let ended = match cli::parse(std::env::args_os()) {
        Ok(action) => run(action),
        Err(failure) => Err(failure),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            log::last_words(&failure.to_string());
            failure.exit_code()
        }
    }
}

fn run(action: Action) -> Result<(), Failure> {
    match action {
        Action::Print(text) => output::print(&text),
        Action::OpenApi => output::print(&openapi()?),
        Action::Serve(served) => serve::run(*served),
        Action::Node(node) => node::run(&node),
        Action::Disk(remote) => remote::run(&remote),
        Action::Probe(probe) => probe::run(&probe),
        Action::Demo(demo) => demo::run(&demo),
        Action::Top(top) => view::top(&top),
        Action::Stats(stats) => view::stats(&stats),
        Action::Pages(folder) => pages::write(cli::definition(), &folder),
        Action::Doctor(doctor) => doctor::run(&doctor),
        Action::Stripe(stripe) => stripe::run(&stripe),
    }
}

/// `docs/openapi.json`.
fn openapi() -> Result<String, Failure> {
    let document = serde_json::to_string_pretty(&cleave_api::document());
    document.map(|text| text + "\n").map_err(Failure::run)
}
