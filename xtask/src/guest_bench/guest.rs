//! One guest with its disks: booted, asked to run fio, watched meanwhile, and put away.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::fio::{self, Jobs, Output};
use super::lab::Lab;
use super::stages::{Sample, Stages, Watch};
use super::subject::{Attached, Subject};
use crate::daemon::Daemon;
use crate::guest::machine::{Accelerator, Boot, Machine, MachineSpec};
use crate::step::pinned;

/// The guest's CPU has one of the machine's for itself; whatever serves its disk has another.
pub(super) const GUEST_CPU: &str = "0";
pub(super) const SERVER_CPU: &str = "1";

const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// Beside twice the jobs' own time: a controller that needs more has lost a request.
const SLACK: Duration = Duration::from_secs(60);

/// A guest that waits for jobs.
pub(super) struct Guest {
    machine: Machine,
    daemons: Vec<Daemon>,
    watch: Watch,
    accelerator: Accelerator,
    results: PathBuf,
    results_read: u64,
    /// Names in the guest and sizes in bytes.
    pub(super) disks: Vec<(String, u64)>,
    /// For the raw data: what was started.
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
    begin: Option<(Sample, Counts)>,
    end: Option<Sample>,
    counted: Option<Counts>,
}

impl Guest {
    /// Boots a guest with a subject's disks, the first of them alone or several together.
    pub(super) fn boot(
        lab: &Lab,
        subject: &Subject,
        disks: Vec<Attached<'_>>,
    ) -> Result<Guest, String> {
        let sockets: Vec<PathBuf> = (0..disks.len())
            .map(|n| lab.folder.join(format!("disk{n}.sock")))
            .collect();
        let disks: Vec<(Attached<'_>, &Path)> = disks
            .into_iter()
            .zip(sockets.iter().map(PathBuf::as_path))
            .collect();
        let lines = subject.daemons(&lab.cleave, &disks);
        let mut daemons = Vec::new();
        for (line, socket) in lines.iter().zip(&sockets) {
            let log = socket.with_extension("log");
            let (program, words) = line.split_first().ok_or("a daemon without a name")?;
            let mut command = pinned(SERVER_CPU, program);
            command.args(words);
            daemons.push(Daemon::start(command, socket.clone(), log)?);
        }
        let results = lab.folder.join("results");
        // Left from the guest before, it would be read as this one's.
        let _ = std::fs::remove_file(&results);
        let mut devices = port(&results);
        devices.extend(subject.devices(&disks));
        let commands = json!({ "qemu": devices, "daemons": lines });
        let machine = start(lab, subject, devices, disks.len())?;
        let watch = Watch {
            qemu: machine.process(),
            daemons: daemons.iter().map(Daemon::process).collect(),
            io_thread: subject.io_thread(),
        };
        let mut guest = Guest {
            machine,
            daemons,
            watch,
            accelerator: lab.accelerator,
            results,
            results_read: 0,
            disks: Vec::new(),
            commands,
        };
        let listing = guest
            .machine
            .expect("disks")
            .map_err(|why| first_line(&why))?;
        guest.disks = disks_in(&listing);
        if guest.disks.len() != disks.len() {
            return Err(format!(
                "the guest found {} of {} disks",
                guest.disks.len(),
                disks.len()
            ));
        }
        // A main loop that only delivers interrupts belongs to the guest's side; beside a daemon that polls it
        // would wait for its CPU. One that does the I/O itself stays with those that do.
        guest
            .watch
            .pin(GUEST_CPU, subject.is_served_by_main_loop())?;
        Ok(guest)
    }

    /// Names of the disks of a size.
    pub(super) fn disks_of(&self, bytes: u64) -> Vec<String> {
        let own = self.disks.iter().filter(|disk| disk.1 == bytes);
        own.map(|disk| disk.0.clone()).collect()
    }

    /// Runs jobs; a disk that does not end them in time has stalled.
    pub(super) fn run(&mut self, jobs: Jobs) -> Result<Ran, String> {
        let Jobs {
            text,
            seconds,
            names,
        } = jobs;
        let limit = Duration::from_secs_f64(seconds * 2.0) + SLACK;
        self.machine.allow(limit);
        self.machine.say(&format!("fio\n{text}.\n"))?;
        let mut ran = Ran::default();
        let mut said = String::new();
        loop {
            let mark = self.machine.mark().map_err(|why| {
                format!(
                    "stalled: {} ({} s) {}",
                    first_line(&why),
                    limit.as_secs(),
                    ran.last_seen(&names)
                )
            })?;
            let Some((name, values)) = mark else {
                return Err("the guest ended in the middle of a job".to_owned());
            };
            match (
                name.as_str(),
                values.split_once(' ').unwrap_or((&values, "")),
            ) {
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

    /// From now on the guest counts its kicks, which costs it a little at each.
    pub(super) fn count_kicks(&mut self) -> Result<(), String> {
        self.machine.say("probe\n")?;
        match self.machine.expect("probing")?.as_str() {
            "0" => Ok(()),
            _ => Err("the guest's kernel cannot count kicks".to_owned()),
        }
    }

    /// Of a job, for each of its requests.
    pub(super) fn stages(&self, ran: &Ran, job: &str) -> Option<Stages> {
        let span = ran.spans.get(job)?;
        let (begin, _) = span.begin.as_ref()?;
        let io_in_qemu = self.watch.io_thread.is_some();
        Some(begin.until(span.end.as_ref()?, self.accelerator, io_in_qemu))
    }

    /// Ends it all; what the guest's kernel complained about, if it did.
    pub(super) fn end(mut self) -> Result<Option<String>, String> {
        self.machine.allow(SLACK);
        self.machine.say("end\n")?;
        while self
            .machine
            .mark()
            .map_err(|why| first_line(&why))?
            .is_some()
        {}
        let checks = self.machine.kill()?;
        for daemon in self.daemons {
            daemon.stop()?;
        }
        let failed = checks.into_iter().find_map(|(name, result)| {
            let why = result.err()?;
            Some(format!("{name}: {why}"))
        });
        Ok(failed)
    }

    /// The next bytes of what the guest sent through its port.
    fn read(&mut self, bytes: &str) -> Result<String, String> {
        use std::io::{Seek, SeekFrom};
        let told = |error: std::io::Error| format!("the guest's port: {error}");
        let wanted: u64 = bytes
            .trim()
            .parse()
            .map_err(|_| format!("the guest sent `{bytes}` bytes"))?;
        let end = Instant::now() + SLACK;
        let mut text = Vec::new();
        loop {
            let mut file = File::open(&self.results).map_err(told)?;
            file.seek(SeekFrom::Start(self.results_read))
                .map_err(told)?;
            text.clear();
            file.take(wanted).read_to_end(&mut text).map_err(told)?;
            if text.len() as u64 == wanted {
                self.results_read += wanted;
                return Ok(String::from_utf8_lossy(&text).into_owned());
            }
            if Instant::now() > end {
                return Err(format!("of {wanted} bytes the guest sent {}", text.len()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Ran {
    /// Interrupts and kicks during a job, and the share of its time in which the guest's CPU was busy.
    pub(super) fn counted(&self, job: &str) -> Option<Counts> {
        let span = self.spans.get(job)?;
        let (_, before) = span.begin.as_ref()?;
        let after = span.counted.as_ref()?;
        Some([0, 1, 2].map(|at| after[at] - before[at]))
    }

    /// Response times over time, where the job logged them.
    pub(super) fn dots(&self, job: &str) -> &[[f64; 2]] {
        self.dots.get(job).map_or(&[], Vec::as_slice)
    }

    fn span(&mut self, job: &str) -> &mut Span {
        self.spans.entry(job.to_owned()).or_default()
    }

    fn take(&mut self, name: &str, text: &str) -> Result<(), String> {
        match name.strip_suffix("_lat.log") {
            Some(job) => {
                self.dots.insert(job.to_owned(), fio::dots(text));
            }
            None => self.output = Output::parse(text)?,
        }
        Ok(())
    }

    /// The progress, as the end of a sentence.
    fn last_seen(&self, names: &[String]) -> String {
        let is_open = |name: &&String| self.spans.get(*name).is_some_and(|span| span.end.is_none());
        match (names.iter().find(is_open), names.first()) {
            (Some(job), _) => format!("in `{job}`"),
            (None, Some(first)) => format!("in a run of {} jobs from `{first}` on", names.len()),
            (None, None) => String::new(),
        }
    }
}

fn start(
    lab: &Lab,
    subject: &Subject,
    devices: Vec<String>,
    disks: usize,
) -> Result<Machine, String> {
    let initramfs = lab.initramfs_for(disks)?;
    Machine::start(&MachineSpec {
        accelerator: lab.accelerator,
        cpus: 1,
        devices,
        pinned_to: Some(SERVER_CPU),
        boot: Boot::Linux {
            kernel: &lab.image,
            initramfs: &initramfs,
            parameters: "",
        },
        log: lab.folder.join(format!("{}.log", subject.name)),
        limit: BOOT_LIMIT,
    })
}

/// QEMU's words for a port whose bytes land in a file, and for threads that have names.
fn port(results: &Path) -> Vec<String> {
    let path = results.to_string_lossy().replace(',', ",,");
    let chardev = format!("file,id=results,path={path}");
    [
        "-name",
        "bench,debug-threads=on",
        "-device",
        "virtio-serial-pci",
        "-chardev",
        &chardev,
        "-device",
        "virtserialport,chardev=results",
    ]
    .map(str::to_owned)
    .to_vec()
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
    let mut counts = Counts::default();
    for (count, value) in counts.iter_mut().zip(values.split_whitespace()) {
        *count = value.parse().unwrap_or(0.0);
    }
    counts
}

/// Of what a machine explains: the rest is the end of logs, which stay on the disk.
fn first_line(why: &str) -> String {
    why.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_guest_lists_is_read() {
        assert_eq!(
            disks_in("vda:524288 vdb:8 rubbish"),
            [("vda".to_owned(), 256 << 20), ("vdb".to_owned(), 4096)]
        );
        assert_eq!(counts_in("12 3 400"), [12.0, 3.0, 400.0]);
        assert_eq!(counts_in("12"), [12.0, 0.0, 0.0]);
    }
}
