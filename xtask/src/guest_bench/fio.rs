//! fio in the guest: its job files, the same with the same seeds for every subject, and its output.

use std::fmt::Write;

use serde_json::{Value, json};

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
/// Of one dot of the figures.
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

    /// Unmeasured: translates the guest's code, wakes what sleeps.
    pub(super) fn warm_up(&mut self, disk: &str) {
        self.job(
            "warm",
            0.4,
            &format!("filename=/dev/{disk}\n{MIXED}iodepth=32\n"),
        );
    }

    /// Requests that arrive by chance (Poisson) at so many a second, whatever the disk does.
    pub(super) fn rate(&mut self, disk: &str, iops: u32, seconds: f64) {
        let reads = iops * 6 / 10;
        let name = format!("rate-{iops}");
        let lines = format!(
            "filename=/dev/{disk}\n{MIXED}iodepth={RATE_DEPTH}\nrate_process=poisson\nrate_iops={reads},{}\n\
             write_lat_log=/tmp/{name}\nlog_avg_msec={INTERVAL_MS}\n",
            iops - reads
        );
        self.measured(&name, seconds, &lines);
    }

    /// As many mixed requests as the disk takes, 32 in flight.
    pub(super) fn mixed(&mut self, disk: &str, seconds: f64) {
        let lines = format!("filename=/dev/{disk}\n{MIXED}iodepth=32\n");
        self.measured(MIXED_DEPTH, seconds, &lines);
    }

    /// 4 KiB random reads.
    pub(super) fn reads(&mut self, name: &str, disk: &str, depth: u32, seconds: f64) {
        let lines = format!("filename=/dev/{disk}\nrw=randread\nbs=4k\niodepth={depth}\n");
        self.measured(name, seconds, &lines);
    }

    /// Threads that each have one request in flight, 60 % reads.
    pub(super) fn threads(&mut self, disk: &str, count: u32, seconds: f64) {
        let lines = format!(
            "filename=/dev/{disk}\nrw=randrw\nrwmixread=60\nbs=4k\nioengine=psync\nnumjobs={count}\n"
        );
        self.job(&format!("threads-{count}"), seconds, &lines);
    }

    /// One job that reads all disks in turn.
    pub(super) fn over_all(&mut self, disks: &[String], depth: u32, seconds: f64) {
        let paths: Vec<String> = disks.iter().map(|disk| format!("/dev/{disk}")).collect();
        let paths = paths.join(":");
        let lines = format!(
            "filename={paths}\nfile_service_type=roundrobin\nrw=randread\nbs=4k\niodepth={depth}\n"
        );
        self.job("over-all", seconds, &lines);
    }

    /// A job for each disk, all at once.
    pub(super) fn one_each(&mut self, disks: &[String], depth: u32, seconds: f64) {
        for disk in disks {
            let name = format!("disk-{disk}");
            let lines = format!("filename=/dev/{disk}\nrw=randread\nbs=4k\niodepth={depth}\n");
            self.add(&name, "new_group", seconds, &lines);
        }
        self.seconds += seconds + JOB_OVERHEAD_S;
    }

    fn measured(&mut self, name: &str, seconds: f64, lines: &str) {
        let hooks = format!("exec_prerun=/begin {name}\nexec_postrun=/end {name}\n");
        self.job(name, seconds, &format!("{hooks}{lines}"));
    }

    fn job(&mut self, name: &str, seconds: f64, lines: &str) {
        self.add(name, "stonewall", seconds, lines);
        self.seconds += seconds + JOB_OVERHEAD_S;
    }

    fn add(&mut self, name: &str, order: &str, seconds: f64, lines: &str) {
        self.names.push(name.to_owned());
        let ms = seconds * 1e3;
        // Writing to a String does not fail.
        let _ = write!(self.text, "[{name}]\n{order}\nruntime={ms}ms\n{lines}");
    }
}

/// A run's output, and each job's name and figures.
#[derive(Default)]
pub(super) struct Output {
    pub(super) whole: Value,
    pub(super) jobs: Vec<(String, Value)>,
}

impl Output {
    /// Behind what the hooks said before. A job that met errors is no measurement.
    pub(super) fn parse(text: &str) -> Result<Output, String> {
        let start = text.find('{').unwrap_or(0);
        let whole: Value = serde_json::from_str(&text[start..])
            .map_err(|error| format!("fio's result: {error}"))?;
        let list = whole["jobs"].as_array().ok_or("fio wrote no jobs")?;
        let jobs = list.iter().map(job).collect::<Result<_, String>>()?;
        Ok(Output { whole, jobs })
    }

    /// Completed reads of a disk, as fio took them from the guest's kernel.
    pub(super) fn reads_of_disk(&self, disk: &str) -> Option<f64> {
        let disks = self.whole["disk_util"].as_array()?;
        let own = disks.iter().find(|one| one["name"] == disk)?;
        own["read_ios"].as_f64()
    }
}

fn job(job: &Value) -> Result<(String, Value), String> {
    let name = job["jobname"].as_str().unwrap_or_default();
    if job["error"].as_i64() != Some(0) {
        return Err(format!(
            "fio's job `{name}` ended with error {}",
            job["error"]
        ));
    }
    // With `unified_rw_reporting` reads and writes are one.
    let (all, latency) = (&job["mixed"], &job["mixed"]["lat_ns"]);
    let number = |value: &Value, what: &str| value.as_f64().ok_or(format!("no {what} of `{name}`"));
    let percentile = |which: &str| latency["percentile"][which].as_f64().unwrap_or(0.0) / 1e3;
    let figures = json!({
        "ios": number(&all["total_ios"], "total_ios")?,
        "iops": number(&all["iops"], "iops")?,
        "bytes_per_s": number(&all["bw_bytes"], "bw_bytes")?,
        "mean_us": number(&latency["mean"], "lat_ns.mean")? / 1e3,
        "p50_us": percentile("50.000000"),
        "p99_us": percentile("99.000000"),
        "p999_us": percentile("99.900000"),
        "max_us": number(&latency["max"], "lat_ns.max")? / 1e3,
    });
    Ok((name.to_owned(), figures))
}

/// Response times over time, in ms and us: lines of `time in ms, latency in ns, direction, …`, one an interval and
/// direction.
pub(super) fn dots(log: &str) -> Vec<[f64; 2]> {
    let dot = |line: &str| {
        let mut fields = line
            .split(',')
            .map(|field| field.trim().parse::<f64>().ok());
        Some([fields.next()??, fields.next()?? / 1e3])
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
    fn a_job_is_read_behind_what_was_said_before() {
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
