//! One guest with its disks: booted, asked to run fio, watched meanwhile, and put away.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cleave_rig::daemon::DaemonProcess;
use cleave_rig::guest::{Accelerator, Machine, QEMU, qemu};
use cleave_rig::{At, PINNED, Result, command, words};
use itertools::Itertools;
use serde_json::{Value, json};

use super::jobs::{Jobs, Output, dots};
use super::kit::GuestKit;
use super::stages::{CpuSample, WatchedThreads};
use super::subject::{AttachedDisk, Subject};

/// The guest's CPU has one of the machine's for itself; whatever serves its disk has another.
pub(super) const GUEST_CPU: &str = "0";
pub(super) const SERVER_CPU: &str = "1";

const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// Beside twice the jobs' own time: a controller that needs more has lost a request.
const SLACK: Duration = Duration::from_secs(60);

/// Threads that have names, and a port whose bytes land in a file.
const PORT: &str = "-name bench,debug-threads=on -device virtio-serial-pci \
-chardev file,id=results,path={} -device virtserialport,chardev=results";

/// A guest that waits for jobs.
pub(super) struct WaitingGuest {
    machine: Machine,
    daemons: Vec<DaemonProcess>,
    watch: WatchedThreads,
    accelerator: Accelerator,
    results: PathBuf,
    results_read: u64,
    /// Names in the guest and sizes in bytes.
    pub(super) disks: Vec<(String, u64)>,
    /// The command lines that were started, for the raw data.
    pub(super) commands: Value,
}

/// Result of a run of fio.
#[derive(Default)]
pub(super) struct Ran {
    pub(super) output: Output,
    spans: BTreeMap<String, Span>,
    dots: BTreeMap<String, Vec<[f64; 2]>>,
}

/// Counters of the guest: interrupts of its disks, kicks, busy ticks of its CPU.
type Counts = [f64; 3];

/// Between the marks around a job.
#[derive(Default)]
struct Span {
    begin: Option<(CpuSample, Counts)>,
    end: Option<CpuSample>,
    counted: Option<Counts>,
}

impl WaitingGuest {
    /// Boots a guest with a subject's disks, the first of them alone or several together.
    pub(super) fn boot(
        kit: &GuestKit,
        subject: &Subject,
        disks: Vec<AttachedDisk<'_>>,
    ) -> Result<WaitingGuest> {
        let sockets = (0..disks.len()).map(|n| kit.folder.join(format!("disk{n}.sock")));
        let sockets = sockets.collect_vec();
        let disks = disks
            .into_iter()
            .zip(sockets.iter().map(|socket| &**socket));
        let disks: Vec<(AttachedDisk<'_>, &Path)> = disks.collect();
        let (mut daemons, mut lines) = (Vec::new(), Vec::new());
        for (disk, socket) in &disks {
            let Some(line) = subject.daemon(&kit.cleave, disk, socket) else {
                continue;
            };
            let pinned = [words(PINNED, &[&SERVER_CPU]), line.clone()].concat();
            daemons.push(DaemonProcess::start(&pinned, socket.to_path_buf())?);
            lines.push(line);
        }
        let results = kit.folder.join("results");
        // Left from the guest before, it would be read as this one's.
        let _ = std::fs::remove_file(&results);
        let mut devices = words(PORT, &[&results.to_string_lossy().replace(',', ",,")]);
        devices.extend(subject.devices(&disks));
        let commands = json!({ "qemu": devices, "daemons": lines });
        let line = qemu(QEMU, kit.accelerator, 1, &[devices, kit.boot(disks.len())?]);
        let line = [words(PINNED, &[&SERVER_CPU]), line].concat();
        let log = kit.folder.join(format!("{}.log", subject.name));
        let mut machine = Machine::run(command(&line), &log, BOOT_LIMIT)?;
        let watch = WatchedThreads {
            qemu: machine.process(),
            daemons: daemons.iter().map(DaemonProcess::process).collect(),
            io_thread: subject.io_thread(),
        };
        let found = machine.expect("disks").map_err(|why| first_line(&why))?;
        let found = disks_in(&found);
        if found.len() != disks.len() {
            let (found, all) = (found.len(), disks.len());
            return Err(format!("the guest found {found} of {all} disks"));
        }
        // A main loop that only delivers interrupts belongs to the guest's side; beside a daemon that polls it
        // would wait for its CPU. One that does the I/O itself stays with those that do.
        watch.pin(GUEST_CPU, subject.is_served_by_main_loop())?;
        Ok(WaitingGuest {
            machine,
            daemons,
            watch,
            accelerator: kit.accelerator,
            results,
            results_read: 0,
            disks: found,
            commands,
        })
    }

    /// Names of the disks of a size.
    pub(super) fn disks_of(&self, bytes: u64) -> Vec<String> {
        let own = self.disks.iter().filter(|disk| disk.1 == bytes);
        own.map(|disk| disk.0.clone()).collect()
    }

    /// Runs jobs; a disk that does not end them in time has stalled.
    pub(super) fn run(&mut self, jobs: &Jobs) -> Result<Ran> {
        let limit = Duration::from_secs_f64(jobs.seconds * 2.0) + SLACK;
        self.machine.allow(limit);
        self.machine.say(&format!("fio\n{}.\n", jobs.text))?;
        let mut ran = Ran::default();
        let mut said = String::new();
        loop {
            let mark = self.machine.mark().map_err(|why| {
                let (why, seen) = (first_line(&why), ran.last_seen(&jobs.names));
                format!("stalled: {why} ({} s) {seen}", limit.as_secs())
            })?;
            let (name, values) = mark.ok_or("the guest ended in the middle of a job")?;
            let of = values.split_once(' ').unwrap_or((&values, ""));
            match (name.as_str(), of) {
                ("begin", (job, counts)) => {
                    ran.span(job).begin = Some((self.watch.sample(), counts_in(counts)));
                }
                ("end", (job, _)) => ran.span(job).end = Some(self.watch.sample()),
                ("counted", (job, counts)) => ran.span(job).counted = Some(counts_in(counts)),
                ("file", (name, bytes)) => ran.take(name, &self.read(bytes)?)?,
                ("said", _) => said = values,
                ("done", ("0", _)) => return Ok(ran),
                ("done", _) => return Err(format!("fio failed: {said}")),
                _ => return Err(format!("the guest said `{name} {values}`")),
            }
        }
    }

    /// Makes the guest count its kicks from now on, which costs it a little at each.
    pub(super) fn count_kicks(&mut self) -> Result {
        self.machine.say("probe\n")?;
        match self.machine.expect("probing")?.as_str() {
            "0" => Ok(()),
            _ => Err("the guest's kernel cannot count kicks".to_owned()),
        }
    }

    /// CPU time of a job by stage, for each of so many requests.
    pub(super) fn stages(&self, ran: &Ran, job: &str, ios: f64) -> Option<Value> {
        let span = ran.spans.get(job)?;
        let ((begin, _), end) = (span.begin.as_ref()?, span.end.as_ref()?);
        let io_in_qemu = self.watch.io_thread.is_some();
        Some(begin.until(end, self.accelerator, io_in_qemu, ios))
    }

    /// Ends the guest and its daemons; returns the complaint of the guest's kernel, if it had one.
    pub(super) fn end(mut self) -> Result<Option<String>> {
        self.machine.allow(SLACK);
        self.machine.say("end\n")?;
        let mut mark = || self.machine.mark().map_err(|why| first_line(&why));
        while mark()?.is_some() {}
        let checks = self.machine.kill()?;
        self.daemons.into_iter().try_for_each(DaemonProcess::stop)?;
        let mut faults = checks.into_iter();
        Ok(faults.find_map(|(name, result)| Some(format!("{name}: {}", result.err()?))))
    }

    /// Reads the next bytes that the guest sent through its port.
    fn read(&mut self, bytes: &str) -> Result<String> {
        let wanted: usize = bytes.trim().parse().at("the guest's count of bytes")?;
        let end = Instant::now() + SLACK;
        let mut text = vec![0; wanted];
        let read = |text: &mut [u8], from| File::open(&self.results)?.read_exact_at(text, from);
        while let Err(error) = read(&mut text, self.results_read) {
            if Instant::now() > end {
                return Err(format!("{wanted} bytes of the guest's port: {error}"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.results_read += wanted as u64;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

impl Ran {
    /// Interrupts and kicks during a job, and the share of its time in which the guest's CPU was busy.
    pub(super) fn counted(&self, job: &str) -> Option<Counts> {
        let span = self.spans.get(job)?;
        let ((_, before), after) = (span.begin.as_ref()?, span.counted?);
        Some([0, 1, 2].map(|at| after[at] - before[at]))
    }

    /// Response times over time, where the job logged them.
    pub(super) fn dots(&self, job: &str) -> &[[f64; 2]] {
        self.dots.get(job).map_or(&[], Vec::as_slice)
    }

    fn span(&mut self, job: &str) -> &mut Span {
        self.spans.entry(job.to_owned()).or_default()
    }

    fn take(&mut self, name: &str, text: &str) -> Result {
        match name.strip_suffix("_lat.log") {
            Some(job) => drop(self.dots.insert(job.to_owned(), dots(text))),
            None => self.output = Output::parse(text)?,
        }
        Ok(())
    }

    /// Returns the progress, as the end of a sentence.
    fn last_seen(&self, names: &[String]) -> String {
        let is_open = |name: &&String| self.spans.get(*name).is_some_and(|span| span.end.is_none());
        match (names.iter().find(is_open), names) {
            (Some(job), _) => format!("in `{job}`"),
            (None, [first, ..]) => format!("in a run of {} jobs from `{first}` on", names.len()),
            (None, []) => String::new(),
        }
    }
}

/// `name:sectors` for each disk.
fn disks_in(listing: &str) -> Vec<(String, u64)> {
    let disk = |word: &str| {
        let (name, sectors) = word.split_once(':')?;
        Some((name.to_owned(), sectors.parse::<u64>().ok()? * 512))
    };
    listing.split_whitespace().filter_map(disk).collect()
}

fn counts_in(values: &str) -> Counts {
    let mut values = values.split_whitespace();
    [(); 3].map(|()| {
        values
            .next()
            .and_then(|value| value.parse().ok())
            .unwrap_or(0.0)
    })
}

/// Returns the first line of a machine's explanation. The rest is the end of logs, which stay on the disk.
fn first_line(why: &str) -> String {
    why.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_lists_are_read() {
        assert_eq!(
            disks_in("vda:524288 vdb:8 rubbish"),
            [("vda".to_owned(), 256 << 20), ("vdb".to_owned(), 4096)]
        );
        assert_eq!(counts_in("12 3 400"), [12.0, 3.0, 400.0]);
        assert_eq!(counts_in("12"), [12.0, 0.0, 0.0]);
    }
}
