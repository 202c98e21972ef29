//! `cleave probe`: measures a disk on a thread of its own, shows how far it is, listens for Ctrl-C,
//! and writes what came out.

mod outputs;
mod progress;
mod settings;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use cleave_disk::{Disk, OpenError, OpenOptions};
use cleave_engine::Reactor;
use cleave_host::{Failure, open_storage, runtime};
use cleave_probe::{
    Circumstances, DataDirection, DiskIdentity, Extent, Matrix, Pace, ProbeProgress, ProbeReport,
    ProbeSettings, RunError, points,
};
use tokio::sync::{oneshot, watch};

use crate::progress::{clear, note};
use crate::signals::QuitSignals;
use outputs::Outputs;
use progress::{ProgressLines, clock};
pub(crate) use settings::{Depth, Probe};

/// Below this share of stored bytes a file is not measured without being asked to.
const STORED_MIN: f64 = 0.9;

/// Result of the measuring thread: the matrices, and whether they are complete.
type Ended = Result<(Vec<Matrix>, bool), RunError>;

/// Measures, prints and writes.
pub(crate) fn run(probe: &Probe) -> Result<(), Failure> {
    let outputs = Outputs::new(probe)?;
    Reactor::probe().map_err(Failure::input)?;
    let options = OpenOptions {
        // Shared with other readers, and safe: a probe that does not write cannot.
        read_only: !probe.writes,
        direct: probe.direct,
        discard: false,
        ..OpenOptions::default()
    };
    let disk = Arc::new(open_storage(&probe.disk, &options, Vec::new()).map_err(unopened)?);
    check_writes(probe, &disk)?;
    let stored = check_thin(probe, &disk)?;
    let source = measured(probe, &disk);
    let mut around = Circumstances {
        rotational: disk.limits().rotational,
        stored,
        pace: source.pace,
        seed: source.seed,
        partial: false,
    };
    let measured = runtime()?.block_on(measure(Arc::clone(&disk), source));
    let (ended, interrupted) = measured?;
    let (matrices, is_whole) = ended.map_err(Failure::run)?;
    if matrices.is_empty() {
        let why = if interrupted {
            "interrupted"
        } else {
            "out of time"
        };
        return Err(Failure::run(format!(
            "{why} before anything was measured; nothing is written"
        )));
    }
    around.partial = !is_whole;
    outputs.write(&ProbeReport::new(
        DiskIdentity::of(&disk),
        matrices,
        &around,
    ))?;
    match interrupted {
        true => Err(Failure::run(
            "interrupted; the result holds what was measured until then",
        )),
        false => Ok(()),
    }
}

/// Returns the failure of a disk that cannot be opened. A probe serves nothing, so remedies are others than those of a daemon.
fn unopened(error: OpenError) -> Failure {
    let remedy = match &error {
        OpenError::InUse(_) => "stop the daemon that serves it, or probe a copy",
        OpenError::InUseByQemu(_) => "stop that one, or probe a copy",
        // Of a probe that is to write.
        OpenError::NoWrite(_)
        | OpenError::WriteProtected(_)
        | OpenError::ReadOnlyFileSystem(_)
        | OpenError::Claimed(_)
        | OpenError::ReadOnlyExport(_)
        | OpenError::Snapshot(_) => "leave --writes out, or probe another disk",
        _ => return Failure::open(error),
    };
    let line = error.to_string();
    let what = line.rsplit_once("; ").map_or(&*line, |(what, _)| what);
    Failure::input(format!("{what}; {remedy}"))
}

/// Writing at random destroys what is there.
fn check_writes(probe: &Probe, disk: &Disk) -> Result<(), Failure> {
    if probe.writes && !probe.destructive && cleave_probe::holds_data(disk) {
        return Err(Failure::input(format!(
            "--writes would overwrite disk {}, which holds data or may; add --destructive if that is \
             wanted",
            disk.name()
        )));
    }
    Ok(())
}

fn check_thin(probe: &Probe, disk: &Disk) -> Result<Extent, Failure> {
    let stored = cleave_probe::stored(disk);
    if let Extent::Share(share) = stored
        && share < STORED_MIN
        && !probe.allow_thin
    {
        return Err(Failure::input(format!(
            "only {:.0} % of disk {} was ever written, and the rest would answer without the device; \
             fill it first, or add --allow-thin",
            (share * 100.0).floor(),
            disk.name()
        )));
    }
    Ok(stored)
}

fn measured(probe: &Probe, disk: &Disk) -> ProbeSettings {
    let mut directions = vec![DataDirection::Read];
    if probe.writes {
        directions.push(DataDirection::Write);
    }
    let identity = DiskIdentity::of(disk);
    let count = points(identity.block_bytes, identity.size_bytes).len() * directions.len();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    ProbeSettings {
        directions,
        pace: match probe.depth {
            Depth::Quick => Pace::quick(),
            Depth::Full => Pace::full(count),
            Depth::Within(time) => Pace::within(time),
        },
        // Another one each time: the same offsets again would be found in caches.
        seed: now.as_nanos() as u64 | 1,
    }
}

/// Runs the measurement; also tells whether a signal ended it.
async fn measure(disk: Arc<Disk>, source: ProbeSettings) -> Result<(Ended, bool), Failure> {
    let mut signals = QuitSignals::catch()?;
    let stop = Arc::new(AtomicBool::new(false));
    let (tell, mut told) = watch::channel::<Option<ProbeProgress>>(None);
    let (end, mut ended) = oneshot::channel();
    let harm = match source.directions.len() {
        1 => "nothing is written to it",
        _ => "it is being overwritten",
    };
    let (name, time) = (disk.name(), clock(source.pace.total));
    note(&format!("measuring {name}, at most {time}; {harm}"));
    let thread_stop = Arc::clone(&stop);
    thread::Builder::new()
        .name("probe".to_owned())
        .spawn(move || {
            let mut report = |progress: &ProbeProgress| {
                tell.send_replace(Some(*progress));
            };
            let result = cleave_probe::run(&disk, &source, &thread_stop, &mut report);
            // Nobody listens any more where a second signal ended the program.
            let _ = end.send(result);
        })
        .map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
    let mut shown = ProgressLines::default();
    loop {
        tokio::select! {
            biased;
            result = &mut ended => {
                clear();
                let result = result.map_err(|_| Failure::run("the measuring thread died"))?;
                return Ok((result, stop.load(Ordering::Relaxed)));
            }
            () = signals.received() => {
                if stop.swap(true, Ordering::Relaxed) {
                    clear();
                    return Err(Failure::run("interrupted twice; nothing is written"));
                }
            }
            Ok(()) = told.changed() => {
                if let Some(progress) = &*told.borrow_and_update() {
                    shown.show(progress);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `--read-only` is an option of a daemon.
    #[test]
    fn a_disk_that_cannot_be_opened_has_a_remedy_that_a_probe_can_follow() {
        let of: [fn(String) -> OpenError; 8] = [
            OpenError::InUse,
            OpenError::InUseByQemu,
            OpenError::NoWrite,
            OpenError::WriteProtected,
            OpenError::ReadOnlyFileSystem,
            OpenError::Claimed,
            OpenError::ReadOnlyExport,
            OpenError::Snapshot,
        ];
        for of in of {
            let line = unopened(of("/a; b".to_owned())).to_string();
            assert!(line.contains("/a; b"), "{line}");
            assert!(line.contains(", or probe "), "{line}");
            assert!(!line.contains("--read-only"), "{line}");
        }
        let in_use = unopened(OpenError::InUse("/d".to_owned())).to_string();
        assert_eq!(
            in_use,
            "disk /d is in use by another cleave; stop the daemon that serves it, or probe a copy"
        );
        let missing = unopened(OpenError::Missing("/d".to_owned())).to_string();
        assert!(missing.contains("truncate"), "{missing}");
    }
}
