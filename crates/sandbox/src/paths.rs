//! Landlock: which files the process can still open, make and remove.

use std::os::fd::OwnedFd;
use std::path::Path;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus,
    PathBeneath, RestrictionStatus, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _,
    RulesetStatus, Scope,
};
use rustix::fs::{FileType, Mode, OFlags, fstat, open as open_at};

use crate::{Missing, PathAccess, Reach, SandboxError};

/// The newest rules that are asked for: files, devices' commands, TCP, abstract sockets and signals (Linux 6.12). Of these an
/// older kernel enforces those that it knows.
const NEWEST: ABI = ABI::V6;

/// The opened paths of the rules. A descriptor of this kind can be neither read nor written.
#[derive(Debug)]
pub struct Reaches(Vec<(OwnedFd, BitFlags<AccessFs>)>);

impl Reaches {
    /// Opens them, while the process still may. The kernel attaches a rule to an inode, and one of /proc exists only while
    /// something refers to it, so these are kept.
    pub fn open(reaches: &[Reach]) -> Result<Reaches, SandboxError> {
        let opened = reaches.iter().map(open);
        opened.collect::<Result<_, _>>().map(Reaches)
    }

    /// Makes a list of nothing.
    pub(crate) fn none() -> Reaches {
        Reaches(Vec::new())
    }
}

fn open(reach: &Reach) -> Result<(OwnedFd, BitFlags<AccessFs>), SandboxError> {
    let failed = |errno: rustix::io::Errno| SandboxError::Path(reach.path.clone(), errno.into());
    let path: &Path = &reach.path;
    let fd = open_at(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
    let kind = FileType::from_raw_mode(fstat(&fd).map_err(failed)?.st_mode);
    let rights = rights(reach.access);
    let rights = match kind {
        FileType::Directory => rights,
        _ => rights & AccessFs::from_file(NEWEST),
    };
    Ok((fd, rights))
}

fn rights(access: PathAccess) -> BitFlags<AccessFs> {
    match access {
        PathAccess::Read => AccessFs::ReadFile | AccessFs::ReadDir,
        PathAccess::ReadWrite => {
            AccessFs::ReadFile
                | AccessFs::ReadDir
                | AccessFs::WriteFile
                | AccessFs::MakeReg
                | AccessFs::IoctlDev
        }
        PathAccess::MakeSockets => {
            AccessFs::ReadFile
                | AccessFs::WriteFile
                | AccessFs::MakeSock
                | AccessFs::MakeReg
                | AccessFs::RemoveFile
        }
        PathAccess::Remove => AccessFs::RemoveFile.into(),
        PathAccess::Change => {
            AccessFs::ReadFile
                | AccessFs::ReadDir
                | AccessFs::WriteFile
                | AccessFs::Truncate
                | AccessFs::MakeSock
                | AccessFs::MakeReg
                | AccessFs::MakeDir
                | AccessFs::RemoveFile
                | AccessFs::RemoveDir
        }
    }
}

/// Confines the calling thread to these rules. Returns what this kernel lacks for it.
pub(crate) fn restrict(reaches: &Reaches) -> Result<Option<Missing>, SandboxError> {
    restrict_to(reaches, AccessNet::from_all(NEWEST))
}

/// Confines the calling thread to these rules, but lets it, and the threads that it starts, connect over TCP. Nothing listens.
pub(crate) fn restrict_but_connecting(reaches: &Reaches) -> Result<Option<Missing>, SandboxError> {
    restrict_to(reaches, AccessNet::BindTcp.into())
}

fn restrict_to(
    reaches: &Reaches,
    net: BitFlags<AccessNet>,
) -> Result<Option<Missing>, SandboxError> {
    let status =
        enforce(reaches, net).map_err(|error| SandboxError::Landlock(error.to_string()))?;
    Ok(missing(status.ruleset, status.landlock))
}

fn missing(ruleset: RulesetStatus, landlock: LandlockStatus) -> Option<Missing> {
    match (ruleset, landlock) {
        (RulesetStatus::FullyEnforced, _) => None,
        (RulesetStatus::PartiallyEnforced, LandlockStatus::Available { effective_abi, .. }) => {
            Some(Missing::Rules(format!(
                "the newer rules of Landlock (it has version {}, and {} is used): access to files is confined, and not all \
                 of devices' commands, TCP, signals and abstract sockets",
                effective_abi as i32, NEWEST as i32
            )))
        }
        _ => Some(Missing::Layer(
            "Landlock: access to files is not confined".to_owned(),
        )),
    }
}

fn enforce(
    reaches: &Reaches,
    net: BitFlags<AccessNet>,
) -> Result<RestrictionStatus, landlock::RulesetError> {
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(net)?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    for (fd, rights) in &reaches.0 {
        ruleset = ruleset.add_rule(PathBeneath::new(fd, *rights))?;
    }
    ruleset.restrict_self()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_landlock_lacks_rules_and_an_absent_one_is_a_missing_layer() {
        let old = LandlockStatus::Available {
            effective_abi: ABI::V2,
            kernel_abi: None,
        };
        let found = missing(RulesetStatus::PartiallyEnforced, old);
        assert!(
            matches!(&found, Some(Missing::Rules(text)) if text.contains("version 2")),
            "{found:?}"
        );
        let found = missing(RulesetStatus::NotEnforced, LandlockStatus::NotImplemented);
        assert!(matches!(found, Some(Missing::Layer(_))), "{found:?}");
        let whole = missing(RulesetStatus::FullyEnforced, old);
        assert!(whole.is_none(), "{whole:?}");
    }
}
