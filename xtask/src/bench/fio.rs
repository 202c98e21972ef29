//! fio on the disk itself: what is physically possible here, in the words of our own driver.

use std::path::Path;

use serde_json::{Value, json};

use super::desk::Load;
use crate::step::quietly;

/// A job for fio; its engine is io_uring, with the file and the buffers registered.
pub(super) struct Job<'a> {
    pub(super) disk: &'a Path,
    /// As many in flight as of the driver, from one thread for each vring.
    pub(super) load: &'a Load,
    /// As `taskset` names them.
    pub(super) cpus: &'a str,
}

impl Job<'_> {
    /// The command line.
    pub(super) fn words(&self) -> Vec<String> {
        let Load {
            block_bytes,
            depth,
            queues,
            ..
        } = self.load;
        let mix = match self.load.read_percent {
            100 => "--rw=randread".to_owned(),
            percent => format!("--rw=randrw --rwmixread={percent}"),
        };
        let text = format!(
            "taskset --cpu-list {} fio --name=bare --output-format=json --ioengine=io_uring --direct=1 --registerfiles=1 \
             --fixedbufs=1 {mix} --bs={block_bytes} --iodepth={depth} --numjobs={queues} --thread --group_reporting \
             --unified_rw_reporting=1 --time_based --ramp_time={}ms --runtime={}ms --randrepeat=1 --norandommap \
             --random_generator=tausworthe64 --percentile_list=50:99:99.9",
            self.cpus,
            (self.load.warm_up * 1e3) as u64,
            (self.load.seconds * 1e3).max(1.0) as u64,
        );
        let mut words: Vec<String> = text.split(' ').map(str::to_owned).collect();
        // fio takes a colon for a separator of several files.
        let name = self.disk.to_string_lossy().replace(':', "\\:");
        words.push(format!("--filename={name}"));
        words
    }

    /// Runs it; the result has the names of the driver's.
    pub(super) fn run(&self, folder: &Path) -> Result<Value, String> {
        let words = self.words();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let said = quietly(folder, &words, &[])?;
        // Warnings may stand before the object.
        let from = said.find('{').ok_or(format!("fio said {said}"))?;
        let whole: Value = serde_json::from_str(&said[from..])
            .map_err(|error| format!("fio said {said}: {error}"))?;
        result(&whole, self.load.depth * self.load.queues).ok_or(format!("fio said {said}"))
    }
}

/// fio's own report in the driver's words; none where a figure is missing.
///
/// The mean response time is what is in flight by the rate: fio makes each request anew when it ends. Its own mean agrees
/// to a per cent at depths that are powers of two, and is too long by a quarter at others (20 in flight at 84 000 a second,
/// each 294 µs, would be 24.6 in flight; the kernel counted 18.7), so percentiles of such depths are too long as well.
fn result(whole: &Value, in_flight: u32) -> Option<Value> {
    let job = whole["jobs"].get(0)?;
    let number = |value: &Value| value.as_f64();
    // Reads and writes together, so that percentiles are of all requests.
    let all = &job["mixed"];
    let requests = number(&all["total_ios"])?;
    // The shares below are of it, summed over threads.
    let run_ms = number(&job["job_runtime"])?;
    let wall_ms = number(&all["runtime"])?;
    let share = |name: &str| number(&job[name]).map(|percent| percent / 100.0);
    let cpu_us = (share("usr_cpu")? + share("sys_cpu")?) * run_ms * 1e3;
    let percentile = |name: &str| Some(number(&all["clat_ns"]["percentile"][name])? / 1e3);
    if requests < 1.0 || wall_ms < 1.0 {
        return None;
    }
    let user = share("usr_cpu")?;
    let iops = number(&all["iops"])?;
    Some(json!({
        "iops": iops,
        "requests": requests,
        "failed": number(&job["error"])?,
        "mean_us": f64::from(in_flight) / iops * 1e6,
        "mean_by_fio_us": number(&all["lat_ns"]["mean"])? / 1e3,
        "p50_us": percentile("50.000000")?,
        "p99_us": percentile("99.000000")?,
        "p999_us": percentile("99.900000")?,
        "max_us": number(&all["lat_ns"]["max"])? / 1e3,
        "driver_cpu_us": cpu_us / requests,
        "driver_user_share": user / (user + share("sys_cpu")?).max(1e-9),
        "driver_busy": cpu_us / 1e3 / wall_ms,
        "driver_wakes_s": number(&job["ctx"])? / wall_ms * 1e3,
        "seconds": wall_ms / 1e3,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fios_report_is_told_in_the_drivers_words() {
        let whole = json!({"jobs": [{"error": 0, "job_runtime": 1000, "usr_cpu": 1.0, "sys_cpu": 3.0, "ctx": 40, "mixed": {
            "total_ios": 100, "runtime": 1000, "iops": 100, "lat_ns": {"mean": 2800, "max": 9000},
            "clat_ns": {"percentile": {"50.000000": 3000, "99.000000": 5000, "99.900000": 7000}}}}]});
        let found = result(&whole, 2).unwrap();
        let table = [
            ("iops", 100.0),
            // Two in flight at 100 a second.
            ("mean_us", 20_000.0),
            ("mean_by_fio_us", 2.8),
            ("p99_us", 5.0),
            // 4 % of a second over 100 requests.
            ("driver_cpu_us", 400.0),
            ("driver_user_share", 0.25),
            ("driver_wakes_s", 40.0),
        ];
        for (name, value) in table {
            let found = found[name].as_f64().unwrap();
            assert!((found - value).abs() < 1e-9, "{name}: {found}");
        }
        assert_eq!(result(&json!({"jobs": []}), 1), None);
    }
}
