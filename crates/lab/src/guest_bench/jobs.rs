//! fio in the guest: its job files, the same with the same seeds for every subject, and its output.

use std::fmt::Write;

use cleave_rig::Result;
use serde_json::{Value, json};

use crate::fio::{figure, report};

/// Loads on a disk, one after the other in a single run of fio.
pub(super) struct Jobs {
    pub(super) text: String,
    /// How long it takes where nothing stalls.
    pub(super) seconds: f64,
    pub(super) names: Vec<String>,
}

/// 60 % reads of 4 to 64 KiB: small ones most often, as files and databases do.
const MIXED: &str =
    "rw=randrw\nrwmixread=60\nbssplit=4k/40:8k/20:16k/20:32k/10:64k/10\nblockalign=4k\n";
pub(super) const MIXED_DEPTH: &str = "mixed-32";
/// Requests in flight at an offered rate: so many that a fast disk never has them all, and arrivals do not wait.
const RATE_DEPTH: u32 = 64;
/// Time that one dot of the figures stands for.
const INTERVAL_MS: u32 = 50;
/// Between the beginning and the end of a job besides its own time, under translation.
const JOB_OVERHEAD_S: f64 = 0.5;

impl Jobs {
    /// `seed` is the same for all subjects of a round, so that they see the same requests.
    pub(super) fn new(seed: u32) -> Jobs {
        let text = format!(
            "[global]\ndirect=1\nioengine=libaio\nthread\ntime_based\nallrandrepeat=1\nrandseed={seed}\nnorandommap\n\
             group_reporting\nunified_rw_reporting=mixed\nper_job_logs=0\ndisable_clat=1\ndisable_slat=1\n\
             clat_percentiles=0\nlat_percentiles=1\npercentile_list=50:99:99.9\n"
        );
        Jobs {
            text,
            seconds: 0.0,
            names: Vec::new(),
        }
    }

    /// A job that is not measured: it has the guest's code translated and wakes threads that sleep.
    pub(super) fn warm_up(&mut self, disk: &str) {
        self.job("warm", disk, 0.4, &format!("{MIXED}iodepth=32\n"));
    }

    /// Requests that arrive by chance (Poisson) at so many a second, whatever the disk does.
    pub(super) fn rate(&mut self, disk: &str, iops: u32, seconds: f64) {
        let (reads, name) = (iops * 6 / 10, format!("rate-{iops}"));
        let writes = iops - reads;
        let lines = format!(
            "{MIXED}iodepth={RATE_DEPTH}\nrate_process=poisson\nrate_iops={reads},{writes}\n\
             write_lat_log=/tmp/{name}\nlog_avg_msec={INTERVAL_MS}\n"
        );
        self.measured(&name, disk, seconds, &lines);
    }

    /// Adds a job of as many mixed requests as the disk takes, 32 in flight.
    pub(super) fn mixed(&mut self, disk: &str, seconds: f64) {
        self.measured(MIXED_DEPTH, disk, seconds, &format!("{MIXED}iodepth=32\n"));
    }

    /// 4 KiB random reads.
    pub(super) fn reads(&mut self, name: &str, disk: &str, depth: u32, seconds: f64) {
        self.measured(name, disk, seconds, &reads(depth));
    }

    /// Threads that each have one request in flight, 60 % reads.
    pub(super) fn threads(&mut self, disk: &str, count: u32, seconds: f64) {
        let lines = format!("rw=randrw\nrwmixread=60\nbs=4k\nioengine=psync\nnumjobs={count}\n");
        self.job(&format!("threads-{count}"), disk, seconds, &lines);
    }

    /// Adds a job that reads all disks in turn.
    pub(super) fn over_all(&mut self, disks: &[String], depth: u32, seconds: f64) {
        let lines = format!("file_service_type=roundrobin\n{}", reads(depth));
        self.job("over-all", &disks.join(":/dev/"), seconds, &lines);
    }

    /// A job for each disk, all at once.
    pub(super) fn one_each(&mut self, disks: &[String], depth: u32, seconds: f64) {
        for disk in disks {
            let lines = format!("new_group\n{}", reads(depth));
            self.add(&format!("disk-{disk}"), disk, seconds, &lines);
        }
        self.seconds += seconds + JOB_OVERHEAD_S;
    }

    fn measured(&mut self, name: &str, disk: &str, seconds: f64, lines: &str) {
        let hooks = format!("exec_prerun=/begin {name}\nexec_postrun=/end {name}\n");
        self.job(name, disk, seconds, &format!("{hooks}{lines}"));
    }

    fn job(&mut self, name: &str, disk: &str, seconds: f64, lines: &str) {
        self.add(name, disk, seconds, &format!("stonewall\n{lines}"));
        self.seconds += seconds + JOB_OVERHEAD_S;
    }

    fn add(&mut self, name: &str, disk: &str, seconds: f64, lines: &str) {
        self.names.push(name.to_owned());
        let ms = seconds * 1e3;
        // Writing to a String does not fail.
        let _ = write!(
            self.text,
            "[{name}]\nruntime={ms}ms\nfilename=/dev/{disk}\n{lines}"
        );
    }
}

fn reads(depth: u32) -> String {
    format!("rw=randread\nbs=4k\niodepth={depth}\n")
}

/// A run's output, and each job's name and figures.
#[derive(Default)]
pub(super) struct Output {
    whole: Value,
    pub(super) jobs: Vec<(String, Value)>,
}

impl Output {
    /// Reads what fio wrote. A job that met errors measured nothing.
    pub(super) fn parse(text: &str) -> Result<Output> {
        let whole = report(text)?;
        let list = whole["jobs"].as_array().ok_or("fio wrote no jobs")?;
        let jobs = list.iter().map(job).collect::<Result<_>>()?;
        Ok(Output { whole, jobs })
    }

    /// Returns a figure of a job.
    pub(super) fn figure(&self, job: &str, name: &str) -> Option<f64> {
        let found = self.jobs.iter().find(|found| found.0 == job);
        found.and_then(|(_, figures)| figures[name].as_f64())
    }

    /// Completed reads of a disk, as fio took them from the guest's kernel.
    pub(super) fn reads_of_disk(&self, disk: &str) -> Option<f64> {
        let disks = self.whole["disk_util"].as_array()?;
        let own = disks.iter().find(|one| one["name"] == disk)?;
        own["read_ios"].as_f64()
    }
}

fn job(job: &Value) -> Result<(String, Value)> {
    let name = job["jobname"].as_str().unwrap_or_default();
    match job["error"].as_i64() {
        Some(0) => {}
        _ => {
            return Err(format!(
                "fio's job `{name}` ended with error {}",
                job["error"]
            ));
        }
    }
    // With `unified_rw_reporting` reads and writes are one. A job too short for percentiles has none.
    let of = |place: &str| figure(job, &format!("/mixed/{place}"));
    let percentile = |which: &str| of(&format!("lat_ns/percentile/{which}")).unwrap_or(0.0) / 1e3;
    let figures = json!({
        "ios": of("total_ios")?,
        "iops": of("iops")?,
        "bytes_per_s": of("bw_bytes")?,
        "mean_us": of("lat_ns/mean")? / 1e3,
        "p50_us": percentile("50.000000"),
        "p99_us": percentile("99.000000"),
        "p999_us": percentile("99.900000"),
        "max_us": of("lat_ns/max")? / 1e3,
    });
    Ok((name.to_owned(), figures))
}

/// Response times over time, in ms and us: lines of `time in ms, latency in ns, direction, …`, one an interval and
/// direction.
pub(super) fn dots(log: &str) -> Vec<[f64; 2]> {
    let dot = |line: &str| {
        let mut fields = line.split(',').map(|field| field.trim().parse::<f64>());
        Some([fields.next()?.ok()?, fields.next()?.ok()? / 1e3])
    };
    log.lines().filter_map(dot).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offered_rate_is_dealt_out_to_reads_and_writes_without_loss() {
        for (iops, split) in [(500, "rate_iops=300,200"), (7, "rate_iops=4,3")] {
            let mut jobs = Jobs::new(1);
            jobs.rate("vda", iops, 1.0);
            assert!(jobs.text.contains(split), "{}", jobs.text);
        }
    }

    #[test]
    fn jobs_follow_each_other_and_their_time_adds_up() {
        let mut jobs = Jobs::new(1);
        jobs.warm_up("sda");
        jobs.mixed("sda", 1.5);
        assert_eq!(jobs.text.matches("stonewall").count(), 2);
        assert!(jobs.text.contains("runtime=1500ms") && jobs.seconds > 1.9);
        assert_eq!(jobs.names, ["warm", MIXED_DEPTH]);
    }

    const RESULT: &str = r#"rate : Saving output of prerun
    {"jobs": [{"jobname": "rate-500", "error": 0, "mixed": {"total_ios": 1433, "iops": 477.5, "bw_bytes": 1000,
      "lat_ns": {"mean": 2000.0, "max": 9000, "percentile": {"50.000000": 1500, "99.000000": 8000, "99.900000": 8500}}}}],
     "disk_util": [{"name": "sda", "read_ios": 7}]}"#;

    #[test]
    fn a_job_is_read_behind_earlier_messages() {
        let found = Output::parse(RESULT).unwrap();
        let (name, figures) = &found.jobs[0];
        assert_eq!(
            (name.as_str(), &figures["mean_us"]),
            ("rate-500", &json!(2.0))
        );
        assert_eq!(
            (&figures["ios"], &figures["p99_us"]),
            (&json!(1433.0), &json!(8.0))
        );
        assert_eq!(
            [found.reads_of_disk("sda"), found.reads_of_disk("sdb")],
            [Some(7.0), None]
        );
    }

    #[test]
    fn a_job_with_errors_or_without_figures_is_no_measurement() {
        for (from, to) in [
            ("\"error\": 0", "\"error\": 5"),
            ("total_ios", "other"),
            ("{\"jobs\"", "x"),
        ] {
            assert!(Output::parse(&RESULT.replace(from, to)).is_err(), "{to}");
        }
    }

    #[test]
    fn a_log_is_a_dot_a_line() {
        let found = dots("101, 4718, 0, 0, 0\n103, 2503, 1, 0, 0\nrubbish\n");
        assert_eq!(found, [[101.0, 4.718], [103.0, 2.503]]);
    }
}
