//! Test programs that name their cases themselves, so that one that cannot run here is reported as ignored, with its
//! reason, and counted in the closing lines.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};

use crate::{LoopDevice, Scratch, is_root};

/// A test by its name.
pub type Case = Trial;

/// Requirement of a case on the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Nothing that a machine may lack.
    Nothing,
    /// The right to mount.
    Root,
    /// Loop devices, and the right to attach them.
    LoopDevices,
    /// FUSE, and the right to mount it.
    Fuse,
    /// A program, by its path.
    Program(&'static str),
}

impl Needs {
    /// Reason why the machine does not meet it, if so.
    fn missing(self) -> Option<String> {
        match self {
            Needs::Nothing => None,
            Needs::Program(path) => {
                (!Path::new(path).exists()).then(|| format!("{path} is not installed"))
            }
            _ if !is_root() => Some("needs root".to_owned()),
            Needs::Root => None,
            Needs::LoopDevices => {
                let scratch = Scratch::new();
                LoopDevice::attach(&scratch.image("probe", 1 << 20)).err()
            }
            Needs::Fuse => {
                (!Path::new("/dev/fuse").exists()).then(|| "there is no /dev/fuse".to_owned())
            }
        }
    }
}

/// Makes a case. It fails where `run` panics.
pub fn case(name: impl Into<String>, needs: Needs, run: impl FnOnce() + Send + 'static) -> Case {
    Trial::ignorable_test(name, move || match needs.missing() {
        Some(reason) => Ok(Completion::ignored_with(reason)),
        None => {
            run();
            Ok(Completion::Completed)
        }
    })
}

/// Runs the cases that the command line asks for, which is that of any test.
pub fn run_cases(cases: Vec<Case>) -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), cases).exit_code()
}

/// Says that the test of this thread ends here and why, for unit tests, whose harness cannot ignore them once they run.
/// Written past that harness's capture, so that it is seen; `.ci/run` counts these lines.
pub fn ignored(why: &str) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("?");
    // Nothing can be done about a terminal that takes no text.
    let _ = writeln!(std::io::stderr(), "ignored: {name}: {why}");
}

/// A list of cases: functions, each with what it needs beyond [`Needs::Nothing`].
#[macro_export]
macro_rules! cases {
    (@needs) => { $crate::Needs::Nothing };
    (@needs $needs:expr) => { $needs };
    ($($name:ident $(: $needs:expr)?),* $(,)?) => {
        vec![$($crate::case(stringify!($name), $crate::cases!(@needs $($needs)?), $name)),*]
    };
}
