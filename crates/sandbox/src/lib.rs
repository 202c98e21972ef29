//! Confinement: takes away from a process, and then from each of its threads, everything that it does not need. This crate
//! forbids I/O of its own, knowing disks, and unsafe code.
//!
//! There are four layers. [`Sandbox::process`] applies the first three and the outermost part of the fourth; threads that
//! start later inherit them.
//!
//! 1. The user: [`Identity::assume`] gives up root for another user, if the operator names one.
//! 2. Privileges: no capability in any set (but see [`Keep`]), and `no_new_privs`.
//! 3. Landlock: which files can be opened, made and removed; no TCP, no signals to other processes.
//! 4. seccomp: which system calls a thread can make. [`Sandbox::thread`] narrows it by the thread's [`Role`].
//!
//! A call that is not in a thread's list fails with EPERM, because it could be one that these lists lack, and a disk that
//! is served must not end for that. The few calls that only an exploit makes (`execve`, `ptrace`, `fork`, …) kill the process.
#![forbid(unsafe_code)]

mod calls;
mod error;
mod filter;
mod identity;
mod paths;
mod privileges;
mod reach;

pub use calls::Role;
pub use error::{Missing, SandboxError};
pub use identity::{Identity, IdentityError};
pub use paths::Reaches;
pub use privileges::Keep;
pub use reach::{PathAccess, Reach};

use filter::Programs;

/// Confines the calling thread, and those that it starts, as far as the threads of a library can be, whose calls are in no list of
/// ours. Their files and the network stay within reach. Capabilities go, but for reading files of other users, and calls that only
/// an exploit makes kill the process. `becomes_another`: the process will call [`Identity::assume`].
pub fn confine_library(becomes_another: bool) -> Result<(), SandboxError> {
    privileges::drop_for_library(becomes_another).map_err(SandboxError::Privileges)?;
    // `Sandbox::missing` tells of a kernel that has no filters.
    filter::install_for_library()
}

/// A confined process.
#[derive(Debug)]
pub struct Sandbox {
    /// `None`: this kernel has no seccomp filters.
    programs: Option<Programs>,
    missing: Vec<Missing>,
    /// The further limits of threads that serve a guest.
    serving: Option<Serving>,
    /// Kept, because the rules end with their inodes.
    _reaches: Reaches,
}

/// In a process of many disks: the files and privileges that are left to threads which serve a guest.
#[derive(Debug)]
struct Serving {
    reaches: Reaches,
    keep: Keep,
}

impl Sandbox {
    /// Confines the calling thread, which is the control thread, and all threads that start later. Nothing but `reaches` can
    /// be opened from now on. Descriptors that are open stay usable.
    ///
    /// A layer that this kernel lacks is left out, and named by [`Sandbox::missing`].
    pub fn process(reaches: Reaches, keep: Keep) -> Result<Sandbox, SandboxError> {
        privileges::drop_all(keep).map_err(SandboxError::Privileges)?;
        Sandbox::begin(reaches, None, Role::Control)
    }

    /// Confines a process that goes on to open disks and to make sockets below `reaches`, as [`Sandbox::process`] does otherwise.
    /// Its threads that serve a guest reach no more than `served`, and have no more privileges than with [`Sandbox::process`],
    /// once they have called [`Sandbox::thread`].
    pub fn node(reaches: Reaches, served: Reaches, keep: Keep) -> Result<Sandbox, SandboxError> {
        privileges::drop_for_opening(keep).map_err(SandboxError::Privileges)?;
        let serving = Serving {
            reaches: served,
            keep,
        };
        Sandbox::begin(reaches, Some(serving), Role::Node)
    }

    fn begin(
        reaches: Reaches,
        serving: Option<Serving>,
        role: Role,
    ) -> Result<Sandbox, SandboxError> {
        let mut missing = Vec::new();
        missing.extend(match role {
            Role::Node => paths::restrict_but_connecting(&reaches),
            _ => paths::restrict(&reaches),
        }?);
        let programs = match Programs::compile()?.install_base(role)? {
            Some(programs) => Some(programs),
            None => {
                let lacks = "seccomp filters: system calls are not confined";
                missing.push(Missing::Layer(lacks.to_owned()));
                None
            }
        };
        Ok(Sandbox {
            programs,
            missing,
            serving,
            _reaches: reaches,
        })
    }

    /// Narrows the calling thread, which inherited the confinement of the thread that started it. There is no way back.
    pub fn thread(&self, role: Role) -> Result<(), SandboxError> {
        if let Some(serving) = &self.serving {
            serving.narrow(role)?;
        }
        match &self.programs {
            Some(programs) => programs.install(role),
            None => Ok(()),
        }
    }

    /// Narrows the calling thread, which connects to the server of a disk. It can open no file at all, and keeps TCP. In a process
    /// of many disks it inherited the confinement; elsewhere it was started before [`Sandbox::process`] was called.
    pub fn dialler(&self) -> Result<(), SandboxError> {
        match self.serving {
            Some(_) => self.thread(Role::Dial),
            None => self.earlier_thread(Role::Dial),
        }
    }

    /// Confines the calling thread, which was started before [`Sandbox::process`] was called. It can open no file at all.
    pub fn earlier_thread(&self, role: Role) -> Result<(), SandboxError> {
        privileges::drop_all(Keep::Nothing).map_err(SandboxError::Privileges)?;
        match role {
            Role::Dial => paths::restrict_but_connecting(&Reaches::none())?,
            _ => paths::restrict(&Reaches::none())?,
        };
        match &self.programs {
            Some(programs) => programs.clone().install_base(role).map(drop),
            None => Ok(()),
        }
    }

    /// Returns what this kernel lacks.
    pub fn missing(&self) -> &[Missing] {
        &self.missing
    }
}

impl Serving {
    /// Takes from a thread what only opening disks needs. The threads that a session starts inherit what is left.
    fn narrow(&self, role: Role) -> Result<(), SandboxError> {
        match role {
            Role::Control | Role::Log | Role::Node | Role::Worker => return Ok(()),
            Role::Session | Role::Pool => {
                paths::restrict(&self.reaches)?;
            }
            Role::Dial => {
                paths::restrict_but_connecting(&Reaches::none())?;
            }
            // They can open nothing.
            Role::Disk | Role::Offload => {}
        }
        privileges::drop_opening(self.keep).map_err(SandboxError::Privileges)
    }
}
