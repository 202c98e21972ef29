//! Reads the output of fio: its JSON, and its log of latencies.

use serde_json::Value;

/// One job's figures.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) ios: f64,
    pub(super) iops: f64,
    pub(super) bytes_per_s: f64,
    pub(super) mean_us: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) p999_us: f64,
    pub(super) max_us: f64,
}

/// The mean response time of an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Dot {
    pub(super) ms: f64,
    pub(super) us: f64,
}

/// All jobs of a run. One that met errors is no measurement.
pub(super) fn jobs(result: &Value) -> Result<Vec<Job>, String> {
    let list = result["jobs"].as_array().ok_or("fio wrote no jobs")?;
    list.iter().map(job).collect()
}

/// Lines of fio's result behind what its hooks made it say before.
pub(super) fn json(text: &str) -> Result<Value, String> {
    let start = text.find('{').unwrap_or(0);
    serde_json::from_str(&text[start..]).map_err(|error| format!("fio's result: {error}"))
}

/// Completed reads of a disk, as fio took them from the guest's kernel.
pub(super) fn reads_of_disk(result: &Value, disk: &str) -> Option<f64> {
    let disks = result["disk_util"].as_array()?;
    let own = disks.iter().find(|one| one["name"] == disk)?;
    own["read_ios"].as_f64()
}

/// Lines of `time in ms, latency in ns, direction, …`, one an interval and direction.
pub(super) fn dots(log: &str) -> Vec<Dot> {
    let dot = |line: &str| {
        let mut fields = line.split(',').map(str::trim);
        let ms: f64 = fields.next()?.parse().ok()?;
        let ns: f64 = fields.next()?.parse().ok()?;
        Some(Dot { ms, us: ns / 1e3 })
    };
    log.lines().filter_map(dot).collect()
}

fn job(job: &Value) -> Result<Job, String> {
    let name = job["jobname"].as_str().unwrap_or_default().to_owned();
    if job["error"].as_i64() != Some(0) {
        return Err(format!(
            "fio's job `{name}` ended with error {}",
            job["error"]
        ));
    }
    // With `unified_rw_reporting` reads and writes are one.
    let all = &job["mixed"];
    let number = |value: &Value, what: &str| value.as_f64().ok_or(format!("no {what} of `{name}`"));
    let latency = &all["lat_ns"];
    let percentile = |which: &str| latency["percentile"][which].as_f64().unwrap_or(0.0) / 1e3;
    Ok(Job {
        ios: number(&all["total_ios"], "total_ios")?,
        iops: number(&all["iops"], "iops")?,
        bytes_per_s: number(&all["bw_bytes"], "bw_bytes")?,
        mean_us: number(&latency["mean"], "lat_ns.mean")? / 1e3,
        p50_us: percentile("50.000000"),
        p99_us: percentile("99.000000"),
        p999_us: percentile("99.900000"),
        max_us: number(&latency["max"], "lat_ns.max")? / 1e3,
        name,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESULT: &str = r#"rate : Saving output of prerun
    {"jobs": [{"jobname": "rate-500", "error": 0, "mixed": {"total_ios": 1433, "iops": 477.5, "bw_bytes": 1000,
      "lat_ns": {"mean": 2000.0, "max": 9000, "percentile": {"50.000000": 1500, "99.000000": 8000, "99.900000": 8500}}}}],
     "disk_util": [{"name": "sda", "read_ios": 7}]}"#;

    #[test]
    fn a_job_is_read_behind_what_was_said_before() {
        let result = json(RESULT).unwrap();
        let found = jobs(&result).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].name.as_str(), found[0].ios), ("rate-500", 1433.0));
        assert_eq!((found[0].mean_us, found[0].p99_us), (2.0, 8.0));
        assert_eq!(reads_of_disk(&result, "sda"), Some(7.0));
        assert_eq!(reads_of_disk(&result, "sdb"), None);
    }

    #[test]
    fn a_job_with_errors_or_without_figures_is_no_measurement() {
        let failed = json(&RESULT.replace("\"error\": 0", "\"error\": 5")).unwrap();
        assert!(jobs(&failed).is_err());
        let empty = json(&RESULT.replace("total_ios", "other")).unwrap();
        assert!(jobs(&empty).is_err());
        assert!(json("fio: cannot open").is_err());
    }

    #[test]
    fn a_log_is_a_dot_a_line() {
        let found = dots("101, 4718, 0, 0, 0\n103, 2503, 1, 0, 0\nrubbish\n");
        assert_eq!(
            found,
            [
                Dot {
                    ms: 101.0,
                    us: 4.718
                },
                Dot {
                    ms: 103.0,
                    us: 2.503
                }
            ]
        );
    }
}
