//! seccomp: the calls of [`calls`](crate::calls) as programs for the kernel.
//!
//! The kernel runs all programs of a thread and takes the severest answer, so each thread has three: one that kills, which
//! all share; one that makes libc start threads in a way that a filter can judge; and the lists of its role and of the
//! threads that it descends from. A call that every program permits whatever its arguments are, such as `io_uring_enter`,
//! costs a look into one bitmap (Linux 5.11).

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, apply_filter, sock_filter,
};

use crate::calls::{Arguments, Role, SystemCall};
use crate::{SandboxError, calls};

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// The compiled programs of all roles.
#[derive(Debug, Clone)]
pub(crate) struct Programs(Arc<Compiled>);

#[derive(Debug)]
struct Compiled {
    deadly: BpfProgram,
    clone3: BpfProgram,
    roles: BTreeMap<Role, BpfProgram>,
}

impl Programs {
    pub(crate) fn compile() -> Result<Programs, SandboxError> {
        let compiled = compile().map_err(|error| SandboxError::Seccomp(error.to_string()))?;
        Ok(Programs(Arc::new(compiled)))
    }

    /// Confines the calling thread, which has no filter of ours yet. `None`: this kernel, or the container that we run in, does
    /// not let us.
    pub(crate) fn install_base(self, role: Role) -> Result<Option<Programs>, SandboxError> {
        if !apply_first(&self.0.deadly)? {
            return Ok(None);
        }
        apply_filter(&self.0.clone3).map_err(|error| SandboxError::Seccomp(error.to_string()))?;
        self.install(role)?;
        Ok(Some(self))
    }

    /// Narrows the calling thread.
    pub(crate) fn install(&self, role: Role) -> Result<(), SandboxError> {
        let Some(program) = self.0.roles.get(&role) else {
            return Ok(());
        };
        apply_filter(program).map_err(|error| SandboxError::Seccomp(error.to_string()))
    }
}

/// Confines the calling thread for calls that are in no list: a deadly one kills the process, and all others are permitted. Does
/// nothing on a kernel without filters.
pub(crate) fn install_for_library() -> Result<(), SandboxError> {
    let compiled = deadly().and_then(|deadly| Ok((deadly, clone3()?)));
    let (deadly, clone3) = compiled.map_err(|error| SandboxError::Seccomp(error.to_string()))?;
    match apply_first(&deadly)? {
        true => apply_filter(&clone3).map_err(|error| SandboxError::Seccomp(error.to_string())),
        false => Ok(()),
    }
}

fn apply_first(program: &BpfProgram) -> Result<bool, SandboxError> {
    match apply_filter(program) {
        Ok(()) => Ok(true),
        Err(seccompiler::Error::Seccomp(error)) if is_lacking(&error) => Ok(false),
        Err(error) => Err(SandboxError::Seccomp(error.to_string())),
    }
}

/// Returns true if the kernel has no filters. A kernel without filters answers ENOSYS or EINVAL, and a container's own filter
/// EPERM.
fn is_lacking(error: &io::Error) -> bool {
    let lacking = [libc::ENOSYS, libc::EINVAL, libc::EPERM];
    error
        .raw_os_error()
        .is_some_and(|errno| lacking.contains(&errno))
}

fn compile() -> Result<Compiled, BackendError> {
    let roles = Role::ALL.map(|role| {
        let rules = rules(role.groups().iter().copied().flatten())?;
        // EPERM, not a kill: it could be a call that the lists lack.
        Ok((
            role,
            program(rules, SeccompAction::Allow, errno(libc::EPERM))?,
        ))
    });
    Ok(Compiled {
        deadly: deadly()?,
        clone3: clone3()?,
        roles: roles.into_iter().collect::<Result<_, BackendError>>()?,
    })
}

fn errno(errno: i32) -> SeccompAction {
    SeccompAction::Errno(errno.unsigned_abs())
}

/// Makes libc start threads by `clone`, whose flags a filter sees.
fn clone3() -> Result<BpfProgram, BackendError> {
    let clone3 = Rules::from([(libc::SYS_clone3, Vec::new())]);
    program(clone3, errno(libc::ENOSYS), SeccompAction::Allow)
}

/// Returns the beginning of a program that kills the process at a call by a number of x32. A kernel with that ABI makes the same
/// calls by numbers that are in no list, so the deadly ones would pass where all others are permitted.
fn x32() -> BpfProgram {
    const X32: u32 = 0x4000_0000;
    // Numbers below zero, as a tracer sets them, are none of x32.
    const BEYOND: u32 = 0x8000_0000;
    if cfg!(not(target_arch = "x86_64")) {
        return Vec::new();
    }
    let step = |code: u32, jt, jf, k| sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let jump = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
    let end = libc::BPF_RET | libc::BPF_K;
    vec![
        // The number is the first field of what the kernel shows.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        // The others go on after the end.
        step(jump, 0, 2, X32),
        step(jump, 1, 0, BEYOND),
        step(end, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
    ]
}

fn deadly() -> Result<BpfProgram, BackendError> {
    let mut program = x32();
    program.extend(self::program(
        rules(calls::DEADLY)?,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
    )?);
    Ok(program)
}

fn program(
    rules: Rules,
    listed: SeccompAction,
    others: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    let architecture = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, others, listed, architecture)?.try_into()
}

/// Makes the rules of these calls. A call that is listed twice may be made in both ways.
fn rules<'a>(calls: impl IntoIterator<Item = &'a SystemCall>) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    let mut unconditional = Vec::new();
    for call in calls {
        let ways = rules.entry(call.number).or_default();
        match ways_of(call.arguments)? {
            Some(more) => ways.extend(more),
            None => unconditional.push(call.number),
        }
    }
    // No rule means any arguments.
    for number in unconditional {
        rules.insert(number, Vec::new());
    }
    Ok(rules)
}

/// Returns the permitted ways; `None`: any.
fn ways_of(arguments: Arguments) -> Result<Option<Vec<SeccompRule>>, BackendError> {
    use SeccompCmpOp::{Eq, MaskedEq};
    let one = |argument, operator, value| {
        let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?;
        SeccompRule::new(vec![condition])
    };
    let ways = match arguments {
        Arguments::Any => return Ok(None),
        Arguments::Without(at, bits) => vec![one(at, MaskedEq(bits), 0)?],
        Arguments::With(at, bits) => vec![one(at, MaskedEq(bits), bits)?],
        Arguments::OwnProcess(at) => vec![one(at, Eq, std::process::id().into())?],
        Arguments::OneOf(at, values) => {
            let ways = values.iter().map(|value| one(at, Eq, *value));
            ways.collect::<Result<_, _>>()?
        }
    };
    Ok(Some(ways))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_role_may_make_a_deadly_call() {
        for role in Role::ALL {
            let permitted = rules(role.groups().iter().copied().flatten()).unwrap();
            for call in calls::DEADLY {
                let ways = permitted.get(&call.number);
                let is_judged = matches!(call.arguments, Arguments::Without(..));
                assert!(
                    ways.is_none() || is_judged && ways.is_some_and(|ways| !ways.is_empty()),
                    "{role:?}: {}",
                    call.number
                );
            }
        }
    }

    /// A thread inherits the filters of the one that starts it, so a call that only the narrower one permits is never permitted.
    #[test]
    fn a_thread_that_starts_another_may_do_what_that_one_needs() {
        let permitted = |role: Role| rules(role.groups().iter().copied().flatten()).unwrap();
        let pairs = [
            (Role::Control, Role::Session),
            (Role::Control, Role::Offload),
            (Role::Control, Role::Disk),
            (Role::Session, Role::Worker),
            (Role::Session, Role::Offload),
            (Role::Node, Role::Control),
            (Role::Node, Role::Pool),
            (Role::Node, Role::Disk),
            (Role::Node, Role::Dial),
        ];
        for (starter, started) in pairs {
            let wide = permitted(starter);
            for (number, ways) in permitted(started) {
                let covers = wide.get(&number).is_some_and(|wide| {
                    wide.is_empty() || ways.iter().all(|way| wide.contains(way))
                });
                assert!(
                    covers,
                    "{started:?} makes call {number}, and {starter:?} may not"
                );
            }
        }
    }
}
