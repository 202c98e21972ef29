//! The `cleave` program: its command line, its commands, and what they print. This crate forbids workers, sessions, guest memory and
//! unsafe code: `cleave-host` serves disks, and a command that asks a daemon sends it requests.
#![forbid(unsafe_code)]

mod cli;
mod commands;
mod options_doc;
mod output;
mod pages;
mod progress;
mod signals;

use std::process::ExitCode;

use cleave_host::{Failure, last_words, serve_disk, serve_node};

use cli::Action;
use commands::{demo, detach, doctor, probe, remote, stripe, upgrade, view};

fn main() -> ExitCode {
    let ended = match cli::parse(std::env::args_os()) {
        Ok(action) => run(action),
        Err(failure) => Err(failure),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            last_words(&failure.to_string());
            failure.exit_code()
        }
    }
}

fn run(action: Action) -> Result<(), Failure> {
    match action {
        Action::Print(text) => output::print(&text),
        Action::OpenApi => output::print(&openapi()?),
        Action::Serve(settings) => serve_disk(&settings),
        Action::Node(settings) => serve_node(&settings),
        Action::Detach(detached) => detach::run(&detached),
        Action::Disk(remote) => remote::run(&remote),
        Action::Probe(probe) => probe::run(&probe),
        Action::Demo(demo) => demo::run(&demo),
        Action::Top(top) => view::top(&top),
        Action::Stats(stats) => view::stats(&stats),
        Action::Upgrade(asked) => upgrade::run(&asked),
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
