//! The service manager of this host, by its command `systemctl`.

use std::fs;
use std::process::{Command, Output};

use cleave_host::Failure;

use crate::commands::remote::clean;

/// The packaged units.
const UNITS: [&str; 2] = ["cleave.service", "cleave@*.service"];

/// The unit in which a process runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unit {
    /// A service of which it is the main process.
    Of(String),
    /// Perhaps this service; why that is not certain, and what to do.
    Unclear { unit: Option<String>, why: String },
    /// None.
    Nowhere,
}

impl Unit {
    /// Finds the unit of a process.
    pub(super) fn of(pid: u32) -> Unit {
        let groups = match fs::read_to_string(format!("/proc/{pid}/cgroup")) {
            Ok(groups) => groups,
            Err(error) => {
                let why = format!(
                    "its unit cannot be found, because process {pid} cannot be seen here ({error}): run this command as root, \
                     and outside of containers"
                );
                return Unit::Unclear { unit: None, why };
            }
        };
        match service_of(&groups) {
            None => Unit::Nowhere,
            Some(unit) => Unit::judged(unit, pid, main_process(unit)),
        }
    }

    /// Judges a unit by its main process, as the service manager names it.
    fn judged(unit: &str, pid: u32, main: Result<String, String>) -> Unit {
        let why = match main {
            Ok(main) if main == pid.to_string() => return Unit::Of(unit.to_owned()),
            Ok(_) => format!(
                "it runs in {unit}, and is not the main process of a unit of that name here: restart it as you started it"
            ),
            Err(why) => format!("{why}: restart {unit} yourself"),
        };
        let unit = Some(unit.to_owned());
        Unit::Unclear { unit, why }
    }

    /// Returns its name.
    pub(super) fn name(&self) -> Option<&str> {
        match self {
            Unit::Of(unit) => Some(unit),
            Unit::Unclear { unit, .. } => unit.as_deref(),
            Unit::Nowhere => None,
        }
    }
}

/// Returns the service whose own control group is in this list: `0::/system.slice/system-cleave.slice/cleave@a.service`.
fn service_of(groups: &str) -> Option<&str> {
    let names = groups.lines().filter_map(|line| line.rsplit('/').next());
    names
        .into_iter()
        .find(|name| name.len() > ".service".len() && name.ends_with(".service"))
}

/// Returns the number of the main process of a unit.
fn main_process(unit: &str) -> Result<String, String> {
    property(unit, "MainPID")
}

fn property(unit: &str, name: &str) -> Result<String, String> {
    let name = format!("--property={name}");
    let shown = run(&["show", &name, "--value", "--", unit])?;
    match shown.status.success() {
        true => Ok(String::from_utf8_lossy(&shown.stdout).trim().to_owned()),
        false => Err(format!(
            "systemctl show: {}",
            lines(&shown.stderr).join(" ")
        )),
    }
}

/// Why a unit does not run the installed program, as the operator reads it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotRenewed {
    /// Its reload was refused. The process that runs goes on, and guests have noticed nothing.
    GoesOn(Vec<String>),
    /// The restart failed.
    Failed(Vec<String>),
}

/// Has a unit run the installed program, and returns when it does, with warnings.
///
/// A restart is for a unit whose reload takes nothing over, or whose running process said that it cannot hand over: guests pause
/// longer, and the new process may meet whatever else had the reload refused. Then nobody would serve.
pub(super) fn renew(unit: &str) -> Result<Vec<String>, NotRenewed> {
    match reload(unit)? {
        Some(said) => Ok(said),
        None => restart(unit),
    }
}

/// Has a unit taken over by a new process. `None`: it takes a restart.
fn reload(unit: &str) -> Result<Option<Vec<String>>, NotRenewed> {
    let goes_on = |why| NotRenewed::GoesOn(vec![why]);
    let command = || property(unit, "ExecReload").map_err(goes_on);
    let before = command()?;
    if !before.contains("--take-over") {
        return Ok(None);
    }
    let ended = run(&["reload", "--", unit]);
    let ended = ended.map_err(goes_on)?;
    let mut said = lines(&ended.stderr);
    if ended.status.success() {
        return Ok(Some(said));
    }
    let after = command()?;
    // If the command did not run, what it says is of an earlier reload.
    if after != before && has_met_an_obstacle(&after) {
        return Ok(None);
    }
    said.extend(reasons(unit, 8));
    Err(NotRenewed::GoesOn(said))
}

/// Returns true if a reload ended because the process that runs cannot hand over, as `ExecReload` of a unit shows it:
/// `{ path=/usr/bin/cleave ; argv[]=... ; pid=812 ; code=exited ; status=3 }`
fn has_met_an_obstacle(command: &str) -> bool {
    command.contains(&format!("code=exited ; status={} }}", Failure::OBSTACLE))
}

fn restart(unit: &str) -> Result<Vec<String>, NotRenewed> {
    let ended = run(&["restart", "--", unit]);
    let ended = ended.map_err(|why| NotRenewed::Failed(vec![why]))?;
    let mut said = lines(&ended.stderr);
    if ended.status.success() {
        return Ok(said);
    }
    said.extend(reasons(unit, 5));
    Err(NotRenewed::Failed(said))
}

/// Asks why a unit is as it is: its state, and so many lines of the end of its log.
fn reasons(unit: &str, count: u32) -> Vec<String> {
    let count = format!("--lines={count}");
    let status = run(&["status", "--no-pager", "--full", &count, "--", unit]);
    let status = status.map(|status| lines(&status.stdout));
    state_and_log(&status.unwrap_or_default())
}

/// Returns the state of a unit out of its status, and the end of its log, which is after an empty line.
fn state_and_log(status: &[String]) -> Vec<String> {
    let log = status.iter().skip_while(|line| !line.is_empty()).skip(1);
    let state = status.iter().filter(|line| line.starts_with("Active:"));
    state.chain(log).cloned().collect()
}

/// Returns the packaged units that run. Without a service manager there are none.
pub(super) fn running() -> Vec<String> {
    let options = ["list-units", "--state=active", "--plain", "--full"];
    let quiet = ["--no-legend", "--no-pager", "--"];
    let Ok(listed) = run(&[&options[..], &quiet, &UNITS].concat()) else {
        return Vec::new();
    };
    let listed = lines(&listed.stdout);
    let names = listed.iter().filter_map(|line| line.split(' ').next());
    names
        .filter(|name| name.ends_with(".service"))
        .map(str::to_owned)
        .collect()
}

fn run(arguments: &[&str]) -> Result<Output, String> {
    let ended = Command::new("systemctl").args(arguments).output();
    ended.map_err(|error| format!("systemctl cannot be run: {error}"))
}

/// Returns lines without the blanks around them.
fn lines(text: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(text);
    text.trim_end()
        .lines()
        .map(|line| clean(line.trim()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_the_last_part_of_a_control_group() {
        let unified = "0::/system.slice/system-cleave.slice/cleave@a.service\n";
        assert_eq!(service_of(unified), Some("cleave@a.service"));
        let legacy = "5:devices:/\n1:name=systemd:/system.slice/cleave.service\n0::/\n";
        assert_eq!(service_of(legacy), Some("cleave.service"));
        for other in [
            "",
            "0::/\n",
            "0::/user.slice/user-0.slice/session-1.scope\n",
            "0::/user.slice/user-0.slice/user@0.service/app.slice/run.scope\n",
            "0::/.service\n",
        ] {
            assert_eq!(service_of(other), None, "{other}");
        }
    }

    #[test]
    fn a_unit_is_that_of_its_main_process_only() {
        let judged = |main| Unit::judged("cleave.service", 812, main);
        let own = judged(Ok("812".to_owned()));
        assert_eq!(own, Unit::Of("cleave.service".to_owned()));
        for (main, says) in [
            (Ok("0".to_owned()), "is not the main process"),
            (
                Err("systemctl cannot be run".to_owned()),
                "systemctl cannot be run: restart cleave.service yourself",
            ),
        ] {
            match judged(main) {
                Unit::Unclear { unit, why } => {
                    assert_eq!(unit.as_deref(), Some("cleave.service"));
                    assert!(why.contains(says), "{why}");
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(
            Unit::of(u32::MAX),
            Unit::Unclear { unit: None, .. }
        ));
    }

    #[test]
    fn a_status_is_its_state_and_the_end_of_the_log() {
        let status = "x cleave@a.service - Cleave disk a\n     Loaded: loaded (/x)\n     Active: failed (Result: exit-code)\n   \
                      Main PID: 9 (code=exited, status=2)\n\nNov 27 host cleave[9]: cleave: no disk\n";
        let expected = [
            "Active: failed (Result: exit-code)",
            "Nov 27 host cleave[9]: cleave: no disk",
        ];
        assert_eq!(state_and_log(&lines(status.as_bytes())), expected);
    }

    /// A unit is restarted for no other end of its reload.
    #[test]
    fn an_obstacle_is_told_by_the_end_of_a_reload() {
        let command = |end: &str| {
            format!(
                "{{ path=/usr/bin/cleave ; argv[]=/usr/bin/cleave node --take-over --detach ; ignore_errors=no ; \
                 start_time=[Fri 2026-11-27 10:00:00 UTC] ; stop_time=[n/a] ; pid=812 ; {end} }}"
            )
        };
        assert!(has_met_an_obstacle(&command("code=exited ; status=3")));
        for end in [
            "code=(null) ; status=0/0",
            "code=exited ; status=0",
            "code=exited ; status=1",
            "code=exited ; status=2",
            "code=exited ; status=33",
            "code=killed ; status=3/QUIT",
        ] {
            assert!(!has_met_an_obstacle(&command(end)), "{end}");
        }
    }
}
