//! The `cleave` program: command line, socket, signals, log and the demonstration. This crate forbids
//! seeing a vring, and unsafe code: it opens a disk, accepts frontends and hands each to a session.
#![forbid(unsafe_code)]

mod cli;
mod confine;
mod control;
mod cpus;
mod demo;
mod disk_server;
mod doctor;
mod events;
mod failure;
mod log;
mod loop_device;
mod node;
mod options_doc;
mod pacing;
mod pages;
mod path_lock;
mod pending;
mod probe;
mod process;
mod progress;
mod remote;
mod resize;
mod serve;
mod service;
mod signals;
mod socket;
mod split;
mod stripe;
mod systemd;
mod unit;
mod view;

use std::io::Write as _;
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
        Action::Print(text) => print(&text),
        Action::Serve(service) => serve::run(*service),
        Action::Node(node) => node::run(&node),
        Action::Disk(remote) => remote::run(&remote),
        Action::Probe(probe) => probe::run(&probe),
        Action::Demo(demo) => demo::run(&demo),
        Action::Top(top) => view::top(&top),
        Action::Stats(stats) => view::stats(&stats),
        Action::Held(held) => view::order_held(&held),
        Action::Pages(folder) => pages::write(cli::definition(), &folder),
        Action::Doctor(doctor) => doctor::run(&doctor),
        Action::Stripe(stripe) => stripe::run(&stripe),
    }
}

fn print(text: &str) -> Result<(), Failure> {
    print_more(text).map(drop)
}

/// The same for one text of many; whether there is anybody to read the next.
fn print_more(text: &str) -> Result<bool, Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // `cleave --help | head` closes early; nothing is lost by it.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::run(format!("cannot write to stdout: {error}"))),
        Ok(()) => Ok(true),
    }
}
