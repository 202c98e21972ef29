//! Test programs that list their own cases. A case that cannot run here is reported as ignored, with the reason, and
//! counted in the summary.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};

use crate::{LoopDevice, Scratch, is_root};

/// A test by its name.
pub type Case = Trial;

/// Requirement of a case on the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirement {
    /// Nothing special.
    Nothing,
    /// Root.
    Root,
    /// Loop devices, and root to attach them.
    LoopDevices,
    /// FUSE, and root to mount it.
    Fuse,
    /// A program, by its path.
    Program(&'static str),
}

impl Requirement {
    /// The reason if the machine does not meet it.
    fn missing(self) -> Option<String> {
        match self {
            Requirement::Nothing => None,
            Requirement::Program(path) => {
                (!Path::new(path).exists()).then(|| format!("{path} is not installed"))
            }
            _ if !is_root() => Some("needs root".to_owned()),
            Requirement::Root => None,
            Requirement::LoopDevices => {
                let scratch = Scratch::new();
                LoopDevice::attach(&scratch.image("probe", 1 << 20)).err()
            }
            Requirement::Fuse => {
                (!Path::new("/dev/fuse").exists()).then(|| "there is no /dev/fuse".to_owned())
            }
        }
    }
}

/// Makes a case. It fails if `run` panics.
pub fn case(
    name: impl Into<String>,
    needs: Requirement,
    run: impl FnOnce() + Send + 'static,
) -> Case {
    Trial::ignorable_test(name, move || match needs.missing() {
        Some(reason) => Ok(Completion::ignored_with(reason)),
        None => {
            run();
            Ok(Completion::Completed)
        }
    })
}

/// Runs the cases that the command line selects; it accepts the usual options of a test program.
pub fn run_cases(cases: Vec<Case>) -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), cases).exit_code()
}

/// Reports that a unit test stops here and why. The standard harness cannot mark a running test as ignored.
/// The line bypasses the harness's capture, because `.ci/run` counts these lines.
pub fn ignored(why: &str) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("?");
    // A write error on the terminal cannot be reported anywhere.
    let _ = writeln!(std::io::stderr(), "ignored: {name}: {why}");
}

/// A list of cases: functions, each with what it needs beyond [`Requirement::Nothing`].
#[macro_export]
macro_rules! cases {
    (@needs) => { $crate::Requirement::Nothing };
    (@needs $needs:expr) => { $needs };
    ($($name:ident $(: $needs:expr)?),* $(,)?) => {
        vec![$($crate::case(stringify!($name), $crate::cases!(@needs $($needs)?), $name)),*]
    };
}
