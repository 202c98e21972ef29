//! Everything that suites share: built programs, CPUs to be pinned to, the run's folder, and the rounds.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::cpus::Cpus;
use super::fio::Job;
use super::image;
use super::subject::{SOCKET, Spdk, Store};
use super::{Options, Pace};
use crate::built;
use crate::daemon::Daemon;
use crate::report::{Run, environment, merged};
use crate::setup;
use crate::step::quietly;

const FILE_BYTES: u64 = 2 << 30;
const SMOKE_FILE_BYTES: u64 = 32 << 20;

/// Programs, and where the results go.
pub(super) struct Desk {
    pub(super) root: PathBuf,
    pub(super) cleave: PathBuf,
    drive: PathBuf,
    pub(super) cpus: Cpus,
    pub(super) pace: Pace,
    pub(super) rounds: u32,
    pub(super) seconds: f64,
    pub(super) run: Run,
    pub(super) spdk: Option<Spdk>,
    options: Options,
}

/// How the driving side waits for completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wait {
    /// As a guest does.
    Sleep,
    /// Spins on the used ring. fio waits in the kernel all the same: that is what the bare disk is.
    Poll,
}

/// Random requests for some time.
#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) block_bytes: u32,
    /// In flight on each vring.
    pub(super) depth: u32,
    pub(super) queues: u32,
    pub(super) wait: Wait,
    pub(super) read_percent: u32,
    pub(super) seconds: f64,
    /// Driven before it counts: until the worker runs, memory is touched and caches are warm.
    pub(super) warm_up: f64,
    /// Further options of the driver.
    pub(super) more: String,
}

/// One bar of a figure: a subject at a point.
#[derive(Clone)]
pub(super) struct Case {
    pub(super) point: String,
    pub(super) subject: String,
    /// The daemons' command lines, with [`SOCKET`] for the path; none for fio on the disk itself.
    pub(super) daemons: Vec<Vec<String>>,
    /// The disk, for fio.
    pub(super) disk: Option<PathBuf>,
    pub(super) load: Load,
    /// Driven once before the rounds, for so many seconds.
    pub(super) learns: f64,
    /// What a reader of the raw line needs besides.
    pub(super) facts: Value,
}

/// For how long a daemon runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Served {
    /// For one measurement.
    Anew,
    /// To the end of the rounds: idle ones cost nothing.
    Throughout,
}

/// Running daemons and their sockets, by their command lines.
type Running = BTreeMap<Vec<Vec<String>>, Vec<Daemon>>;

impl Load {
    /// 4 KiB reads on one vring.
    pub(super) fn reads(depth: u32, wait: Wait, seconds: f64) -> Load {
        Load {
            block_bytes: 4096,
            depth,
            queues: 1,
            wait,
            read_percent: 100,
            seconds,
            warm_up: seconds / 10.0,
            more: String::new(),
        }
    }

    /// The driver's options.
    fn words(&self) -> String {
        let wait = format!("{:?}", self.wait).to_lowercase();
        let Load {
            seconds,
            warm_up,
            depth,
            queues,
            block_bytes,
            read_percent,
            more,
            ..
        } = self;
        format!(
            "--{wait} --seconds {seconds} --warm-up {warm_up} --depth {depth} --queues {queues} --bs {block_bytes} \
             --mix {read_percent}{more}"
        )
    }
}

impl Desk {
    /// Provides and builds the programs, begins the run.
    pub(super) fn set_up(root: &Path, options: &Options) -> Result<Desk, String> {
        // Before a build of minutes, not after it.
        let (pace, rounds) = (options.pace(), options.rounds()?);
        if let Some(disk) = &options.disk {
            std::fs::metadata(disk)
                .map_err(|error| format!("--disk {}: {error}", disk.display()))?;
        }
        let spdk = options.spdk.as_deref().map(Spdk::find).transpose()?;
        setup::provide_programs(root, &["fio", "qemu-storage-daemon"])?;
        let cpus = Cpus::choose()?;
        println!("building");
        let [cleave, drive] = match pace {
            Pace::Smoke => built::programs(root)?,
            Pace::Full | Pace::Quick => built::for_release(root)?,
        };
        let built_for = pace.pick("release", "release", "tests: its figures say nothing");
        let facts = json!({ "pinning": {
            "driver_cpu": cpus.driver, "daemon_cpu": cpus.daemon, "caveat": cpus.caveat, "built_for": built_for,
            "spdk": spdk.as_ref().map_or("not measured: --spdk was not given", |spdk| &spdk.version),
        }});
        let folder = match &options.out {
            Some(folder) => std::path::absolute(folder).map_err(|error| error.to_string())?,
            None => root.join("target/bench").join(options.name()),
        };
        let seconds = options.seconds.unwrap_or(pace.pick(1.5, 0.4, 0.05));
        let suites: Vec<String> = options
            .suites()
            .into_iter()
            .map(super::Suite::name)
            .collect();
        let words: Vec<String> = std::env::args().skip(1).collect();
        let asked = json!({
            "words": words, "suites": suites, "rounds": rounds, "seconds": seconds, "pace": format!("{pace:?}"),
        });
        let mut run = Run::create(&folder, &environment(root, &cleave, &facts), &asked)?;
        if let Some(caveat) = &cpus.caveat {
            run.warn("all", caveat)?;
        }
        if pace == Pace::Smoke {
            run.warn(
                "all",
                "a smoke run: it shows that the suites work, its figures say nothing",
            )?;
        }
        let (driver, daemon) = (&cpus.driver, &cpus.daemon);
        let shown = folder.display();
        println!(
            "driver on CPU {driver}, daemon on CPU {daemon}; {rounds} rounds of {seconds} s; raw data: {shown}"
        );
        Ok(Desk {
            root: root.to_owned(),
            cleave,
            drive,
            cpus,
            pace,
            rounds,
            seconds,
            run,
            spdk,
            options: options.clone(),
        })
    }

    /// The file or device that suites read: the operator's, or a filled file of ours.
    pub(super) fn disk(&mut self, suite: &str) -> Result<Store, String> {
        let Some(disk) = &self.options.disk else {
            return self.own_file();
        };
        let disk = std::path::absolute(disk).map_err(|error| error.to_string())?;
        match image::check(&disk) {
            Err(why) if self.options.allow_thin => self.run.warn(suite, &why)?,
            Err(why) => {
                return Err(format!(
                    "{why}.\nSuch a disk answers without its device. Fill it, or say --allow-thin"
                ));
            }
            Ok(()) => {}
        }
        Ok(Store::Disk(disk))
    }

    /// The same for suites that write: the operator's disk only when that was allowed.
    pub(super) fn disk_to_write(&mut self, suite: &str) -> Result<Store, String> {
        if self.options.disk.is_none() || self.options.destructive {
            return self.disk(suite);
        }
        let why =
            "it writes, so it ran on a file of its own; --destructive lets it write on --disk";
        self.run.warn(suite, why)?;
        self.own_file()
    }

    fn own_file(&self) -> Result<Store, String> {
        let (name, bytes) = match self.pace {
            Pace::Smoke => ("smoke.img", SMOKE_FILE_BYTES),
            Pace::Full | Pace::Quick => ("random.img", FILE_BYTES),
        };
        let path = self.root.join("target/bench").join(name);
        image::random_file(&path, bytes).map(Store::Disk)
    }

    /// Measures all cases in each of the rounds, the cases of a point forth and back, so that whatever drifts meets each as
    /// often early as late. Round 0 is a warm-up and marked so.
    pub(super) fn rounds(
        &mut self,
        suite: &str,
        rounds: std::ops::RangeInclusive<u32>,
        cases: &[Case],
        served: Served,
    ) -> Result<(), String> {
        let mut running = Running::new();
        let last = *rounds.end();
        for round in rounds {
            for point in cases.chunk_by(|one, other| one.point == other.point) {
                let mut order: Vec<&Case> = point.iter().collect();
                if round % 2 == 0 {
                    order.reverse();
                }
                for case in order {
                    let result = self.measure(case, &mut running)?;
                    if served == Served::Anew {
                        end(std::mem::take(&mut running))?;
                        Spdk::clean(self.run.folder());
                    }
                    self.note(suite, case, round, result)?;
                }
            }
            if self.pace != Pace::Smoke {
                println!("{suite}: round {round} of {last} done");
            }
        }
        end(running)
    }

    fn note(&mut self, suite: &str, case: &Case, round: u32, result: Value) -> Result<(), String> {
        let Load {
            depth,
            queues,
            block_bytes,
            read_percent,
            wait,
            ..
        } = &case.load;
        let facts = match round {
            0 | 1 => merged(
                json!({ "command": self.command_of(case), "driver": case.load.words() }),
                &case.facts,
            ),
            // The same in every round.
            _ => case.facts.clone(),
        };
        let line = json!({
            "round": round, "is_warm_up": round == 0, "point": case.point, "subject": case.subject, "depth": depth,
            "queues": queues, "block_bytes": block_bytes, "read_percent": read_percent, "wait": format!("{wait:?}"),
            "result": result,
        });
        self.run.note(suite, &merged(line, &facts))
    }

    /// What answered: a daemon, of several alike the first, or fio.
    fn command_of(&self, case: &Case) -> Vec<String> {
        match &case.disk {
            Some(disk) => self.job(disk, &case.load).words(),
            None => case.daemons.first().cloned().unwrap_or_default(),
        }
    }

    /// A case by itself, outside of the rounds.
    pub(super) fn once(&self, case: &Case) -> Result<Value, String> {
        let mut running = Running::new();
        let result = self.measure(case, &mut running)?;
        end(running).map(|()| result)
    }

    fn measure(&self, case: &Case, running: &mut Running) -> Result<Value, String> {
        if let Some(disk) = &case.disk {
            return self.job(disk, &case.load).run(self.run.folder());
        }
        if !running.contains_key(&case.daemons) {
            let mut daemons = Vec::new();
            for command in &case.daemons {
                let number = daemons.len() + running.values().map(Vec::len).sum::<usize>();
                daemons.push(self.start(command, number)?);
            }
            if case.learns > 0.0 {
                let load = Load {
                    seconds: case.learns,
                    ..case.load.clone()
                };
                self.drive(&daemons, &load.words())?;
            }
            running.insert(case.daemons.clone(), daemons);
        }
        self.drive(&running[&case.daemons], &case.load.words())
    }

    fn job<'a>(&'a self, disk: &'a Path, load: &'a Load) -> Job<'a> {
        Job {
            disk,
            load,
            cpus: &self.cpus.driver,
        }
    }

    /// A daemon on its CPU; `number` tells its socket from those of others that run.
    pub(super) fn start(&self, command: &[String], number: usize) -> Result<Daemon, String> {
        let socket = self.socket(number);
        let log = socket.with_extension("log");
        Daemon::start(self.command(command, number), socket, log)
    }

    /// Its command.
    pub(super) fn command(&self, words: &[String], number: usize) -> Command {
        let socket = self.socket(number).to_string_lossy().into_owned();
        let mut command = Command::new("taskset");
        let is_pinned = words.first().is_some_and(|word| word == "--cpu-list");
        if !is_pinned {
            command.args(["--cpu-list", &self.cpus.daemon]);
        }
        command.args(words.iter().map(|word| word.replace(SOCKET, &socket)));
        command
    }

    pub(super) fn socket(&self, number: usize) -> PathBuf {
        self.run.folder().join(format!("disk{number}.sock"))
    }

    /// The driver's output for a load on the disks of these daemons.
    pub(super) fn drive(&self, daemons: &[Daemon], load: &str) -> Result<Value, String> {
        let drive = self.drive.to_string_lossy();
        let sockets = daemons.iter().map(|daemon| daemon.socket.to_string_lossy());
        let sockets: Vec<_> = sockets.collect();
        let mut words = vec!["taskset", "--cpu-list", &self.cpus.driver, &drive, "--json"];
        for socket in &sockets {
            words.extend(["--socket", socket]);
        }
        words.extend(load.split(' '));
        let said = quietly(self.run.folder(), &words, &[])?;
        let result: Value = serde_json::from_str(&said)
            .map_err(|error| format!("the driver said {said}: {error}"))?;
        match result["failed"].as_f64() {
            Some(failed) if failed > 0.0 => Err(format!("requests failed: {result}")),
            _ => Ok(result),
        }
    }
}

fn end(running: Running) -> Result<(), String> {
    running.into_values().flatten().try_for_each(Daemon::stop)
}
