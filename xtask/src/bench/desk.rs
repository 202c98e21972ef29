//! Everything that suites share: built programs, CPUs to be pinned to, the run's folder, one measurement.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::cpus::Cpus;
use super::image;
use super::load::Load;
use super::options::{Effort, Options, Pace};
use super::spdk::Spdk;
use super::subject::{Store, Subject};
use crate::built;
use crate::daemon::Daemon;
use crate::report::{Run, environment};
use crate::setup;
use crate::step::quietly;

const FILE_BYTES: u64 = 2 << 30;
const SMOKE_FILE_BYTES: u64 = 32 << 20;

/// Programs, and where the results go.
pub(super) struct Desk {
    pub(super) root: PathBuf,
    pub(super) cleave: PathBuf,
    pub(super) drive: PathBuf,
    pub(super) cpus: Cpus,
    pub(super) effort: Effort,
    pub(super) run: Run,
    /// Given by the operator.
    pub(super) spdk: Option<Spdk>,
    disk: Option<PathBuf>,
    allows_thin: bool,
    is_destructive: bool,
}

impl Desk {
    /// Provides and builds the programs, begins the run.
    pub(super) fn set_up(root: &Path, options: &Options, asked: &[&str]) -> Result<Desk, String> {
        // Before a build of minutes, not after it.
        if let Some(disk) = &options.disk {
            std::fs::metadata(disk)
                .map_err(|error| format!("--disk {}: {error}", disk.display()))?;
        }
        let spdk = options.spdk.as_deref().map(Spdk::find).transpose()?;
        setup::provide_programs(root, &["fio", "qemu-storage-daemon"])?;
        let cpus = Cpus::choose()?;
        let release = options.effort().pace != Pace::Smoke;
        println!("building");
        let [cleave, drive] = match release {
            true => built_for_release(root)?,
            false => built::programs(root)?,
        };
        let facts = json!({
            "driver_cpu": cpus.driver, "daemon_cpu": cpus.daemon, "caveat": cpus.caveat,
            "built_for": if release { "release" } else { "tests: its figures say nothing" },
            "spdk": spdk.as_ref().map_or("not measured: --spdk was not given", |spdk| &spdk.version),
        });
        let environment = environment::describe(root, &cleave, &facts);
        let folder = match &options.out {
            Some(folder) => std::path::absolute(folder).map_err(|error| error.to_string())?,
            None => root.join("target/bench").join(options.name()),
        };
        let effort = options.effort();
        let begin = json!({
            "words": asked, "suites": options.suites().iter().map(|suite| suite.name()).collect::<Vec<_>>(),
            "rounds": effort.rounds, "seconds": effort.seconds, "pace": format!("{:?}", effort.pace),
        });
        let mut run = Run::create(&folder, &environment, &begin)?;
        if let Some(caveat) = &cpus.caveat {
            run.warn("all", caveat)?;
        }
        if !release {
            run.warn(
                "all",
                "a smoke run: it shows that the suites work, its figures say nothing",
            )?;
        }
        Ok(Desk {
            root: root.to_owned(),
            drive,
            cleave,
            cpus,
            effort,
            run,
            spdk,
            disk: options.disk.clone(),
            allows_thin: options.allow_thin,
            is_destructive: options.destructive,
        })
    }

    /// The file or device that suites read: the operator's, or a filled file of ours.
    pub(super) fn disk(&mut self, suite: &str) -> Result<Store, String> {
        let Some(disk) = self.disk.clone() else {
            return self.own_file().map(Store::Disk);
        };
        let disk = std::path::absolute(&disk).map_err(|error| error.to_string())?;
        if let Err(why) = image::check(&disk) {
            if !self.allows_thin {
                return Err(format!(
                    "{why}.\nSuch a disk answers without its device. Fill it, or say --allow-thin"
                ));
            }
            self.run.warn(suite, &why)?;
        }
        Ok(Store::Disk(disk))
    }

    /// The same for suites that write: the operator's disk only when that was allowed.
    pub(super) fn disk_to_write(&mut self, suite: &str) -> Result<Store, String> {
        match &self.disk {
            Some(_) if !self.is_destructive => {
                self.run.warn(
                    suite,
                    "it writes, so it ran on a file of its own; --destructive lets it write on --disk",
                )?;
                self.own_file().map(Store::Disk)
            }
            _ => self.disk(suite),
        }
    }

    fn own_file(&self) -> Result<PathBuf, String> {
        let (name, bytes) = match self.effort.pace {
            Pace::Smoke => ("smoke.img", SMOKE_FILE_BYTES),
            Pace::Full | Pace::Quick => ("random.img", FILE_BYTES),
        };
        let folder = self.root.join("target/bench");
        image::random_file(&folder.join(name), bytes)
    }

    /// These subjects, and SPDK if there is one.
    pub(super) fn with_spdk(&self, subjects: &[Subject]) -> Vec<Subject> {
        let spdk = self.spdk.as_ref().map(|_| Subject::SPDK);
        subjects.iter().copied().chain(spdk).collect()
    }

    /// One figure: a fresh daemon, driven; or fio on the disk itself.
    pub(super) fn measure(
        &self,
        subject: Subject,
        store: &Store,
        load: &Load,
    ) -> Result<(Vec<String>, Value), String> {
        let socket = self.socket();
        let command = match (subject, &self.spdk) {
            (Subject::Spdk, Some(spdk)) => {
                Some(spdk.command(self.run.folder(), &self.cpus.daemon, store)?)
            }
            _ => subject.command(&self.cleave, store, load.queues, &socket),
        };
        match (command, store) {
            (Some(daemon), _) => {
                let result = self.measure_daemon(&daemon, &load.words())?;
                Ok((daemon, result))
            }
            (None, Store::Disk(path)) => {
                let job = load.job(path, &self.cpus);
                Ok((job.words(), job.run(self.run.folder())?))
            }
            (None, Store::Null) => Err("there is no bare null disk".to_owned()),
        }
    }

    /// A fresh daemon of any command line, driven once.
    pub(super) fn measure_daemon(&self, daemon: &[String], load: &str) -> Result<Value, String> {
        let running = self.start(daemon, &self.socket())?;
        let result = self.drive(&self.socket(), load)?;
        running.stop()?;
        Spdk::clean(self.run.folder());
        Ok(result)
    }

    /// A daemon on its CPU.
    pub(super) fn start(&self, daemon: &[String], socket: &Path) -> Result<Daemon, String> {
        let name = socket
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let log = self.run.folder().join(format!("{name}.log"));
        Daemon::start(pinned(&self.cpus.daemon, daemon), socket.to_owned(), log)
    }

    /// Socket of a single daemon.
    pub(super) fn socket(&self) -> PathBuf {
        self.run.folder().join("disk.sock")
    }

    /// The driver's output for a load.
    pub(super) fn drive(&self, socket: &Path, load: &str) -> Result<Value, String> {
        self.drive_all(&[socket.to_owned()], load)
    }

    /// The same of several disks at once.
    pub(super) fn drive_all(&self, sockets: &[PathBuf], load: &str) -> Result<Value, String> {
        let drive = self.drive.to_string_lossy();
        let sockets: Vec<_> = sockets
            .iter()
            .map(|socket| socket.to_string_lossy())
            .collect();
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

/// A command line, pinned.
pub(super) fn pinned(cpus: &str, words: &[String]) -> Command {
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", cpus]).args(words);
    command
}

/// The daemon with the features that it ships with, and the driver.
fn built_for_release(root: &Path) -> Result<[PathBuf; 2], String> {
    let daemon = built::released(root, "-p cleave-daemon")?;
    let examples = built::released(root, "-p cleave-client --example drive")?;
    Ok([daemon.join("cleave"), examples.join("examples/drive")])
}
