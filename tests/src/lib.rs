//! Shared parts of the integration tests: the real `cleave` program in a temporary folder, disks to serve, a table
//! runner, and a model to compare data with. This crate forbids access to the daemon's internals: the tests observe
//! its socket, exit code, output and `/proc`.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test that cannot go on must stop

mod cases;
pub mod ceph;
mod daemon;
mod exercise;
mod face;
mod frontend;
pub mod fuse;
pub mod http;
mod killed;
mod lateness;
mod lingering;
mod load;
mod manager;
mod model;
mod moving;
pub mod nbd;
mod node;
mod outcome;
pub mod schema;
mod scratch;
mod stream;
mod survivor;
mod table;
mod timing;
mod unresponsive;

pub use cases::{Case, Requirement, case, ignored, in_module, run_cases};
pub use cleave_client::{header, range};
pub use cleave_states::Random;
pub use daemon::{
    Daemon, Exited, earlier_program, freeze, program_copy, program_path, run_to_exit,
};
pub use exercise::{assert_serves, exercise, exercise_queue, small};
pub use face::assert_face_v1;
pub use frontend::{BackendChannel, Messages, closes_within, has_listener};
pub use killed::{Killed, connect, outliving};
pub use lateness::{Lateness, unless_late};
pub use lingering::Lingering;
pub use load::{EndOf, flood, flood_with_writes, pattern, writes_all};
pub use manager::ServiceManager;
pub use model::{Model, compare_bytes, seeded};
pub use moving::{leave, moving, prepared};
pub use node::{Node, disk_socket};
pub use outcome::{Outcome, ensure};
pub use scratch::{LoopDevice, Mount, Scratch, go_first, is_root, run, run_on};
pub use stream::{Cut, stream};
pub use survivor::{SURVIVOR_DISK_BYTES, Survivor};
pub use table::{Basis, Row, policy, row, run_rows, scale, specified};
pub use timing::{Stopwatch, TIMEOUT, set_time_limit, time_limit, wait_until};
pub use unresponsive::UnresponsiveFs;

use timing::wait_until_within;
