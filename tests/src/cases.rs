//! Test programs that list their own cases. A case that cannot run here is reported as ignored, with the reason, and
//! counted in the summary.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};

use crate::{LoopDevice, Scratch, earlier_program, is_root};

/// A test by its name.
pub struct Case {
    name: String,
    needs: Requirement,
    run: Box<dyn FnOnce() + Send>,
}

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
    /// The program of an earlier release.
    EarlierRelease,
}

impl Requirement {
    /// The reason if the machine does not meet it.
    fn missing(self) -> Option<String> {
        match self {
            Requirement::Nothing => None,
            Requirement::Program(path) => {
                (!Path::new(path).exists()).then(|| format!("{path} is not installed"))
            }
            Requirement::EarlierRelease => earlier_program()
                .is_none()
                .then(|| "CLEAVE_EARLIER names no program".to_owned()),
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

impl Case {
    fn trial(self) -> Trial {
        let Case { name, needs, run } = self;
        Trial::ignorable_test(name, move || match needs.missing() {
            Some(reason) => Ok(Completion::ignored_with(reason)),
            None => {
                run();
                Ok(Completion::Completed)
            }
        })
    }
}

/// Makes a case. It fails if `run` panics.
pub fn case(
    name: impl Into<String>,
    needs: Requirement,
    run: impl FnOnce() + Send + 'static,
) -> Case {
    Case {
        name: name.into(),
        needs,
        run: Box::new(run),
    }
}

/// Puts the name of a module before those of its cases, as the standard harness does.
pub fn in_module(module: &str, mut cases: Vec<Case>) -> Vec<Case> {
    for case in &mut cases {
        case.name = format!("{module}::{}", case.name);
    }
    cases
}

/// Runs the cases that the command line selects; it accepts the usual options of a test program.
pub fn run_cases(cases: Vec<Case>) -> ExitCode {
    let trials = cases.into_iter().map(Case::trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
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

/// The cases of modules, each of which lists its own in a function `cases`.
#[macro_export]
macro_rules! cases_of {
    ($($module:ident),* $(,)?) => {{
        let modules = [$($crate::in_module(stringify!($module), $module::cases())),*];
        modules.into_iter().flatten().collect::<Vec<_>>()
    }};
}
