//! The lines that the operator reads.

use std::path::Path;

use cleave_api::{ClientError, NodeReport};

use super::daemon::{Daemon, Fate, Program};
use super::outcome::{AGAIN_WITHIN, RestartOutcome};
use super::systemctl::NotRenewed;
use crate::commands::remote::{clean, unanswered};

/// The version of the installed program, which is this one.
const INSTALLED: &str = env!("CARGO_PKG_VERSION");

/// A daemon, what keeps this command from restarting it, and what a restart would mean for each disk.
pub(super) fn checked(daemon: &Daemon) -> String {
    let NodeReport { version, pid, .. } = &daemon.node;
    let program = match daemon.program {
        Program::Installed => ", runs the installed program".to_owned(),
        Program::Other => format!("; the installed program is {INSTALLED}"),
        Program::Unknown => "; which program it runs cannot be seen".to_owned(),
    };
    let head = format!("{}: {version}, pid {pid}{program}", daemon.name());
    let fates = daemon.disks.iter().map(|(id, fate)| (id, fate_words(fate)));
    block(
        &head,
        &daemon.hindrance().into_iter().collect::<Vec<_>>(),
        fates,
    )
}

/// A daemon that was restarted, with the warnings of the service manager. `is_another`: it still runs another program.
pub(super) fn restarted(
    daemon: &Daemon,
    next: &NodeReport,
    warnings: &[String],
    is_another: bool,
    outcomes: &[(String, RestartOutcome)],
) -> String {
    let head = format!(
        "{}: {} → {}",
        daemon.name(),
        daemon.node.version,
        next.version
    );
    let mut notes = warnings.to_vec();
    if is_another {
        notes.push(format!(
            "its unit starts another program than the installed one: see ExecStart= in systemctl cat {}",
            daemon.name()
        ));
    }
    let outcomes = outcomes
        .iter()
        .map(|(id, outcome)| (id, outcome_words(outcome)));
    block(&head, &notes, outcomes)
}

/// A daemon that does not run the installed program, though it was to, for these reasons.
pub(super) fn not_renewed(daemon: &Daemon, unit: &str, why: &NotRenewed) -> String {
    let (end, why, remedy) = match why {
        NotRenewed::GoesOn(why) => (
            "goes on: the installed program could not take over",
            why,
            "its disks are served as before, and after a restart they might not be: mend that; then: cleave upgrade"
                .to_owned(),
        ),
        NotRenewed::Failed(why) => (
            "could not be restarted",
            why,
            format!("mend that, or become root; then: systemctl restart {unit}"),
        ),
    };
    let head = format!("{}: {} {end}", daemon.name(), daemon.node.version);
    let notes = [&why[..], &[remedy]].concat();
    block(&head, &notes, std::iter::empty())
}

/// A daemon that runs the installed program.
pub(super) fn left_alone(daemon: &Daemon) -> String {
    let all_the_same = daemon.unit.name();
    let all_the_same = all_the_same
        .map(|unit| format!("; systemctl restart {unit} restarts it all the same"))
        .unwrap_or_default();
    let (name, version) = (daemon.name(), &daemon.node.version);
    format!("{name}: {version}, runs the installed program already{all_the_same}\n")
}

/// A unit that runs, of which nothing was found.
pub(super) fn silent(unit: &str) -> String {
    format!(
        "{unit}: runs, and its control socket was not found: name it with --control PATH, or restart the unit yourself: \
         systemctl restart {unit}\n"
    )
}

/// A daemon that does not say what it is.
pub(super) fn unknown(socket: &Path, error: &ClientError) -> String {
    let why = match error {
        ClientError::Refused(why) => format!("{}: {why}", socket.display()),
        _ => unanswered(socket, error),
    };
    clean(&why) + "\n"
}

/// A head, notes, and a line for each disk.
fn block<'a>(
    head: &str,
    notes: &[String],
    disks: impl Iterator<Item = (&'a String, String)>,
) -> String {
    let disks: Vec<_> = disks.map(|(id, words)| (clean(id), words)).collect();
    let width = disks.iter().map(|(id, _)| id.chars().count()).max();
    let width = width.unwrap_or(0);
    let notes = notes.iter().map(|note| format!("  {note}\n"));
    let disks = disks
        .iter()
        .map(|(id, words)| format!("  {id:width$}    {words}\n"));
    format!("{head}\n{}", notes.chain(disks).collect::<String>())
}

fn fate_words(fate: &Fate) -> String {
    match fate {
        Fate::NoFrontend => "no frontend".to_owned(),
        Fate::HandedOver => "handed over".to_owned(),
        Fate::ConnectsAgain(why) => format!("connects again: {why}"),
        Fate::NotServed(state) => format!("not served: {state}"),
    }
}

fn outcome_words(outcome: &RestartOutcome) -> String {
    match outcome {
        RestartOutcome::NoFrontend => "no frontend".to_owned(),
        RestartOutcome::Paused(seconds) => format!("pause {:.1} ms", seconds * 1e3),
        RestartOutcome::Recovered => {
            "taken over from a process that was killed; how long the pause was is not known"
                .to_owned()
        }
        RestartOutcome::ConnectedAgain(after) => {
            format!(
                "its frontend connected again after {} ms",
                after.as_millis()
            )
        }
        RestartOutcome::Away => format!(
            "its frontend has not connected again within {} s",
            AGAIN_WITHIN.as_secs()
        ),
        RestartOutcome::NotServed(why) => format!("not served: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::commands::upgrade::systemctl::Unit;

    fn node(version: &str, keeps: bool) -> NodeReport {
        let node = json!({
            "kind": "node", "version": version, "pid": 812, "boot": "5f", "start_seconds": 1, "now_seconds": 2, "keeps": keeps,
            "disks": {"count": 4, "max": 4}, "open_files": {"needed": 1, "max": 2},
        });
        serde_json::from_value(node).unwrap()
    }

    fn daemon(unit: Unit, program: Program, keeps: bool, disks: &[(&str, Fate)]) -> Daemon {
        let disks = disks.iter();
        Daemon {
            socket: "/run/x/a.ctl".into(),
            node: node("0.1.0", keeps),
            program,
            unit,
            disks: disks
                .map(|(id, fate)| ((*id).to_owned(), fate.clone()))
                .collect(),
        }
    }

    fn of_unit() -> Unit {
        Unit::Of("cleave.service".to_owned())
    }

    #[test]
    fn a_check_is_a_line_for_each_disk() {
        let disks = [
            ("a", Fate::HandedOver),
            ("longer", Fate::NoFrontend),
            ("c\n", Fate::ConnectsAgain("it is quiesced".to_owned())),
            ("d", Fate::NotServed("failed: no file".to_owned())),
        ];
        let text = checked(&daemon(of_unit(), Program::Other, true, &disks));
        let expected = format!(
            "cleave.service: 0.1.0, pid 812; the installed program is {INSTALLED}\n\
             \u{20} a         handed over\n\
             \u{20} longer    no frontend\n\
             \u{20} c?        connects again: it is quiesced\n\
             \u{20} d         not served: failed: no file\n"
        );
        assert_eq!(text, expected);
    }

    #[test]
    fn what_is_to_be_done_by_hand_is_said() {
        let with = |unit, program, keeps, fate| {
            let text = checked(&daemon(unit, program, keeps, &[("a", fate)]));
            text.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let lines = with(Unit::Nowhere, Program::Installed, false, Fate::HandedOver);
        assert_eq!(
            lines[0],
            "/run/x/a.ctl: 0.1.0, pid 812, runs the installed program"
        );
        assert!(lines[1].contains("with the same options and --take-over"));
        assert_eq!(lines[2], "  a    handed over");
        let lines = with(Unit::Nowhere, Program::Other, true, Fate::HandedOver);
        assert!(lines[1].contains("restart it by its service manager"));
        let why = || Fate::ConnectsAgain("nothing keeps its connection".to_owned());
        let lines = with(of_unit(), Program::Unknown, false, why());
        assert!(
            lines[0].ends_with("which program it runs cannot be seen"),
            "{lines:?}"
        );
        assert!(lines[1].contains("FileDescriptorStoreMax="), "{lines:?}");
        assert!(lines[1].contains("systemctl restart cleave.service"));
        // A restart costs nobody anything.
        let lines = with(of_unit(), Program::Other, false, Fate::NoFrontend);
        assert_eq!(lines.len(), 2, "{lines:?}");
        let unit = Unit::Unclear {
            unit: Some("cleave@a.service".to_owned()),
            why: "why".to_owned(),
        };
        let lines = with(unit, Program::Other, true, Fate::HandedOver);
        assert!(lines[0].starts_with("cleave@a.service: ") && lines[1] == "  why");
    }

    #[test]
    fn a_restart_is_what_each_guest_noticed() {
        let before = daemon(of_unit(), Program::Other, true, &[]);
        let outcomes = [
            ("a", RestartOutcome::Paused(0.006_41)),
            ("b", RestartOutcome::NoFrontend),
            (
                "c",
                RestartOutcome::ConnectedAgain(Duration::from_millis(21)),
            ),
            ("d", RestartOutcome::Away),
            ("e", RestartOutcome::NotServed("failed: no file".to_owned())),
        ];
        let outcomes = outcomes.map(|(id, outcome)| (id.to_owned(), outcome));
        let warnings = ["Warning: the unit file has changed".to_owned()];
        let text = restarted(&before, &node("0.4.0", true), &warnings, true, &outcomes);
        assert_eq!(
            text,
            "cleave.service: 0.1.0 → 0.4.0\n\
             \u{20} Warning: the unit file has changed\n\
             \u{20} its unit starts another program than the installed one: see ExecStart= in systemctl cat cleave.service\n\
             \u{20} a    pause 6.4 ms\n\
             \u{20} b    no frontend\n\
             \u{20} c    its frontend connected again after 21 ms\n\
             \u{20} d    its frontend has not connected again within 10 s\n\
             \u{20} e    not served: failed: no file\n"
        );
        let why = ["Job failed.", "Active: failed"].map(str::to_owned);
        assert_eq!(
            not_renewed(&before, "cleave.service", &NotRenewed::Failed(why.to_vec())),
            "cleave.service: 0.1.0 could not be restarted\n  Job failed.\n  Active: failed\n  \
             mend that, or become root; then: systemctl restart cleave.service\n"
        );
        let why = vec!["cleave: no such option".to_owned()];
        assert_eq!(
            not_renewed(&before, "cleave.service", &NotRenewed::GoesOn(why)),
            "cleave.service: 0.1.0 goes on: the installed program could not take over\n  cleave: no such option\n  \
             its disks are served as before, and after a restart they might not be: mend that; then: cleave upgrade\n"
        );
        assert_eq!(
            left_alone(&before),
            "cleave.service: 0.1.0, runs the installed program already; systemctl restart cleave.service restarts it all the \
             same\n"
        );
    }
}
