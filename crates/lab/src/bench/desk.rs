//! Everything that suites share: built programs, CPUs to be pinned to, the run's folder, and the rounds.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use cleave_rig::daemon::DaemonProcess;
use cleave_rig::setup::MissingProgram;
use cleave_rig::{At, Result, execute, words};
use itertools::Itertools;
use serde_json::{Value, json};

use super::bare;
use super::cpus::Cpus;
use super::distance;
use super::load::{Case, RandomLoad};
use super::options::{BenchOptions, Suite};
use super::subject::{BARE, QSD, QSD_IO_THREAD, SOCKET, SPDK, ServedDisk, Spdk, line};
use crate::equipment::Equipment;
use crate::filled;
use crate::pace::BenchPace;
use crate::run_folder::{Run, environment, merged};

/// Programs of others that are measured, or that serve.
pub(crate) const PROGRAMS: [&str; 3] = [FIO, QSD, QEMU_NBD];
const FIO: &str = "fio";
const QEMU_NBD: &str = "qemu-nbd";
const FILE_BYTES: u64 = 2 << 30;
const SMOKE_FILE_BYTES: u64 = 32 << 20;

/// Programs, and where the results go.
pub(super) struct Desk {
    pub(super) equipment: Equipment,
    /// Programs of others that are not there: their subjects are left out.
    missing: Vec<MissingProgram>,
    pub(super) cleave: PathBuf,
    drive: PathBuf,
    pub(super) cpus: Cpus,
    pub(super) pace: BenchPace,
    pub(super) rounds: u32,
    pub(super) seconds: f64,
    pub(super) run: Run,
    pub(super) spdk: Option<Spdk>,
    pub(super) options: BenchOptions,
}

/// How long a daemon runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DaemonLifetime {
    /// For one measurement.
    Anew,
    /// To the end of the rounds: idle daemons cost nothing.
    Throughout,
}

/// Running daemons and their sockets, by their command lines.
type Running = BTreeMap<Vec<Vec<String>>, Vec<DaemonProcess>>;

impl Desk {
    /// Provides and builds the programs, begins the run.
    pub(super) fn set_up(equipment: &Equipment, options: &BenchOptions) -> Result<Desk> {
        // Before a build of minutes, not after it.
        let (pace, rounds) = (options.pace(), options.rounds()?);
        options.disk.check()?;
        let spdk = options.spdk.as_deref().map(Spdk::find).transpose()?;
        let missing = equipment.provide(&PROGRAMS)?;
        let cpus = Cpus::choose()?;
        let [cleave, drive] = equipment.programs(pace)?;
        let facts = json!({ "pinning": {
            "driver_cpu": cpus.driver, "daemon_cpu": cpus.daemon, "caveat": cpus.caveat, "built_for": equipment.built_for(pace),
            "spdk": spdk.as_ref().map_or("not measured: --spdk was not given", |spdk| &spdk.version),
        }});
        let folder = match &options.out {
            Some(folder) => std::path::absolute(folder).at(folder)?,
            None => equipment.folder().join("bench").join(options.name()),
        };
        let seconds = options.seconds.unwrap_or(pace.pick(1.5, 0.4, 0.05));
        let suites = options.suites().into_iter().map(Suite::name).collect_vec();
        let asked = json!({
            "suites": suites, "rounds": rounds, "seconds": seconds, "pace": format!("{pace:?}"),
        });
        let mut run = Run::create(&folder, &environment(equipment, &cleave, &facts), asked)?;
        if let Some(caveat) = &cpus.caveat {
            run.warn("all", caveat)?;
        }
        for MissingProgram { program, package } in &missing {
            let text =
                format!("{program} is missing (package {package}): what it measures is left out");
            run.warn("all", &text)?;
        }
        if pace == BenchPace::Smoke {
            let text = "a smoke run: it shows that the suites work, its figures say nothing";
            run.warn("all", text)?;
        }
        let (driver, daemon, shown) = (&cpus.driver, &cpus.daemon, folder.display());
        println!(
            "driver on CPU {driver}, daemon on CPU {daemon}; {rounds} rounds of {seconds} s; raw data: {shown}"
        );
        Ok(Desk {
            equipment: equipment.clone(),
            missing,
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

    /// Returns true if the program of a subject is there.
    pub(super) fn has(&self, subject: &str) -> bool {
        match subject {
            BARE => self.has_program(FIO),
            QSD | QSD_IO_THREAD => self.has_program(QSD),
            _ => true,
        }
    }

    fn has_program(&self, program: &str) -> bool {
        !self.missing.iter().any(|one| one.program == program)
    }

    /// Returns why a suite cannot be measured with this equipment.
    pub(super) fn lacks_for(&self, suite: Suite) -> Option<String> {
        match suite {
            Suite::Network if !self.has_program(QEMU_NBD) => {
                Some(format!("not measured: {QEMU_NBD} is missing"))
            }
            Suite::Instructions => {
                let why = self.equipment.sources().err()?;
                Some(format!("not measured: {why}"))
            }
            _ => None,
        }
    }

    /// Returns the file or device that suites read: the operator's, or a filled file of ours.
    pub(super) fn disk(&mut self, suite: &str) -> Result<PathBuf> {
        let Some(disk) = self.options.disk.path() else {
            return self.own_file();
        };
        let disk = std::path::absolute(disk).at(disk)?;
        match filled::check(&disk) {
            Ok(()) => {}
            Err(why) if self.options.disk.allow_thin => self.run.warn(suite, &why)?,
            Err(_) if self.options.disk.may_be_written() => filled::fill(&disk)?,
            Err(why) => {
                let remedy = "Such a disk answers without its device. Fill it, or say --destructive or --allow-thin";
                return Err(format!("{why}.\n{remedy}"));
            }
        }
        Ok(disk)
    }

    /// Returns the file or device for suites that write: the operator's disk only when that was allowed.
    pub(super) fn disk_to_write(&mut self, suite: &str) -> Result<PathBuf> {
        if self.options.disk.path().is_none() || self.options.disk.may_be_written() {
            return self.disk(suite);
        }
        let remedy = "--destructive lets it write on --disk";
        let why = format!("it writes, so it ran on a file of its own; {remedy}");
        self.run.warn(suite, &why)?;
        self.own_file()
    }

    fn own_file(&self) -> Result<PathBuf> {
        let (name, bytes) = match self.pace {
            BenchPace::Smoke => ("smoke.img", SMOKE_FILE_BYTES),
            BenchPace::Full | BenchPace::Quick => ("random.img", FILE_BYTES),
        };
        filled::random_file(&self.equipment.folder().join("bench").join(name), bytes)
    }

    /// Returns the cases of these subjects at a point, and SPDK if there is one.
    pub(super) fn cases(
        &self,
        point: &str,
        store: &ServedDisk,
        load: &RandomLoad,
        subjects: &[&str],
    ) -> Result<Vec<Case>> {
        let subjects = subjects.iter().copied().filter(|subject| self.has(subject));
        let subjects = subjects.chain(self.spdk.as_ref().map(|_| SPDK));
        let cases = subjects.map(|subject| self.case(point, store, load, subject));
        cases.collect()
    }

    pub(super) fn case(
        &self,
        point: &str,
        store: &ServedDisk,
        load: &RandomLoad,
        subject: &str,
    ) -> Result<Case> {
        let line = match (subject, store, &self.spdk) {
            (SPDK, _, Some(spdk)) => spdk.line(self.run.folder(), &self.cpus.daemon, store)?,
            (BARE, ServedDisk::Disk(disk), _) => bare::line(disk, load, &self.cpus.driver),
            _ => line(&self.cleave, subject, &store.words(), load.queues),
        };
        Ok(Case {
            facts: json!({ "store": format!("{store:?}") }),
            ..Case::new(
                point.to_owned(),
                subject.to_owned(),
                vec![line],
                load.clone(),
            )
        })
    }

    /// Measures all cases with fresh daemons, after a warm-up unless that would take longer than all the rest.
    pub(super) fn rounds_anew(&mut self, suite: &str, cases: &[Case]) -> Result {
        let first = self.pace.pick(0, 0, 1);
        self.rounds(suite, first..=self.rounds, cases, DaemonLifetime::Anew)
    }

    /// Measures all cases in each of the rounds, the cases of a point forth and back, so that whatever drifts meets each as
    /// often early as late. Round 0 is a warm-up and marked so.
    pub(super) fn rounds(
        &mut self,
        suite: &str,
        rounds: RangeInclusive<u32>,
        cases: &[Case],
        served: DaemonLifetime,
    ) -> Result {
        let mut running = Running::new();
        let last = *rounds.end();
        for round in rounds {
            for point in cases.chunk_by(|one, other| one.point == other.point) {
                let mut order: Vec<&Case> = point.iter().collect();
                if round % 2 == 0 {
                    order.reverse();
                }
                for case in order {
                    let before = self.exchange(served);
                    let result = self.measure(case, &mut running)?;
                    if served == DaemonLifetime::Anew {
                        end(std::mem::take(&mut running))?;
                        Spdk::clean(self.run.folder());
                    }
                    let distance = distance::facts(before, self.exchange(served));
                    self.note(suite, case, round, &result, &distance)?;
                }
            }
            if self.pace != BenchPace::Smoke {
                println!("{suite}: round {round} of {last} done");
            }
        }
        end(running)
    }

    /// Returns how far its CPUs are from each other while no daemon can spin on one of them.
    fn exchange(&self, served: DaemonLifetime) -> Option<Duration> {
        let pair = self.cpus.pair();
        let pair = pair.filter(|_| served == DaemonLifetime::Anew && self.pace != BenchPace::Smoke);
        pair.and_then(distance::exchange)
    }

    fn note(
        &mut self,
        suite: &str,
        case: &Case,
        round: u32,
        result: &Value,
        distance: &Value,
    ) -> Result {
        let mut line = json!({
            "round": round, "is_warm_up": round == 0, "point": case.point, "subject": case.subject, "result": result,
        });
        // The same in every round. Of several daemons alike the first.
        if round <= 1 {
            line["command"] = json!(case.daemons.first());
            line["driver"] = json!(case.load.words());
        }
        let line = merged(merged(line, &json!(case.load)), distance);
        let line = merged(line, &case.facts);
        self.run.note(suite, &line)
    }

    /// Measures a case by itself, outside of the rounds.
    pub(super) fn once(&self, case: &Case) -> Result<Value> {
        let mut running = Running::new();
        let result = self.measure(case, &mut running)?;
        end(running).map(|()| result)
    }

    fn measure(&self, case: &Case, running: &mut Running) -> Result<Value> {
        if case.subject == BARE {
            return bare::run(self.run.folder(), &case.daemons.concat(), &case.load);
        }
        if !running.contains_key(&case.daemons) {
            let first = running.values().map(Vec::len).sum::<usize>();
            let daemons = case.daemons.iter().zip(first..);
            let daemons = daemons.map(|(line, number)| self.start(line, number));
            let daemons = daemons.collect::<Result<Vec<_>>>()?;
            if case.learns > 0.0 {
                let load = RandomLoad {
                    seconds: case.learns,
                    ..case.load.clone()
                };
                self.drive(&daemons, &load.words())?;
            }
            running.insert(case.daemons.clone(), daemons);
        }
        self.drive(&running[&case.daemons], &case.load.words())
    }

    /// A daemon on its CPU; `number` tells its socket from those of others that run.
    pub(super) fn start(&self, line: &[String], number: usize) -> Result<DaemonProcess> {
        DaemonProcess::start(&self.pinned(line, number), self.socket(number))
    }

    /// Returns its command line on its CPU.
    pub(super) fn pinned(&self, line: &[String], number: usize) -> Vec<String> {
        let socket = self.socket(number).display().to_string();
        let mut pinned = words("taskset --cpu-list {}", &[&self.cpus.daemon]);
        pinned.extend(line.iter().map(|word| word.replace(SOCKET, &socket)));
        pinned
    }

    pub(super) fn socket(&self, number: usize) -> PathBuf {
        self.run.folder().join(format!("disk{number}.sock"))
    }

    /// Runs the driver, and returns its output for a load on the disks of these daemons.
    pub(super) fn drive(&self, daemons: &[DaemonProcess], load: &str) -> Result<Value> {
        let sockets = daemons.iter().map(|daemon| daemon.socket.clone());
        self.drive_at(&sockets.collect_vec(), load)
    }

    /// Runs it on the disks at these sockets.
    pub(super) fn drive_at(&self, sockets: &[PathBuf], load: &str) -> Result<Value> {
        let line = "taskset --cpu-list {} {} --json";
        let mut line = words(line, &[&self.cpus.driver, &self.drive.display()]);
        for socket in sockets {
            line.extend(words("--socket {}", &[&socket.display()]));
        }
        line.extend(words(load, &[]));
        let said = execute(self.run.folder(), &line)?;
        let result: Value = serde_json::from_str(&said).at(format!("the driver said {said}"))?;
        match result["failed"].as_f64() {
            Some(failed) if failed > 0.0 => Err(format!("requests failed: {result}")),
            _ => Ok(result),
        }
    }
}

fn end(running: Running) -> Result {
    running
        .into_values()
        .flatten()
        .try_for_each(DaemonProcess::stop)
}
