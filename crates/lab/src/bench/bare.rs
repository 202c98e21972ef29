//! fio on the disk itself: the most that the disk can do, in the words of our own driver.

use std::path::Path;

use cleave_rig::{Result, execute, words};
use serde_json::{Value, json};

use super::load::RandomLoad;
use crate::fio::{figure, report};

/// How often fio runs until it has measured something.
const ATTEMPTS: usize = 20;

/// fio's command line for a load on a disk, with as many in flight as of the driver, from one thread for each vring. Its
/// engine is io_uring, with the file and the buffers registered.
pub(super) fn line(disk: &Path, load: &RandomLoad, cpu: &str) -> Vec<String> {
    let (bytes, depth, queues) = (load.block_bytes, load.depth, load.queues);
    let mix = match load.read_percent {
        100 => "--rw=randread".to_owned(),
        percent => format!("--rw=randrw --rwmixread={percent}"),
    };
    let ramp_ms = (load.warm_up * 1e3) as u64;
    let ms = (load.seconds * 1e3).max(1.0) as u64;
    let line = format!(
        "taskset --cpu-list {cpu} fio --name=bare --output-format=json --ioengine=io_uring --direct=1 --registerfiles=1 \
         --fixedbufs=1 {mix} --bs={bytes} --iodepth={depth} --numjobs={queues} --thread --group_reporting \
         --unified_rw_reporting=1 --time_based --ramp_time={ramp_ms}ms --runtime={ms}ms --randrepeat=1 --norandommap \
         --random_generator=tausworthe64 --percentile_list=50:99:99.9 --filename={{}}"
    );
    // fio takes a colon for a separator of several files.
    words(&line, &[&disk.to_string_lossy().replace(':', "\\:")])
}

/// Runs such a line; the result has the names of the driver's. A machine that is late may do no request in a short time, so that is
/// tried again.
pub(super) fn run(folder: &Path, line: &[String], load: &RandomLoad) -> Result<Value> {
    let mut job = Value::Null;
    for _ in 0..ATTEMPTS {
        job = report(&execute(folder, line)?)?["jobs"][0].take();
        if figure(&job, "/mixed/total_ios")? >= 1.0 {
            break;
        }
    }
    result(&job, load.depth * load.queues)
}

/// Returns a job's figures in the driver's words.
///
/// The mean response time is the number in flight divided by the rate: fio makes each request anew when it ends. Its own
/// mean agrees to a per cent at depths that are powers of two, and is too long by a quarter at others (20 in flight at
/// 84 000 a second, each 294 µs, would be 24.6 in flight; the kernel counted 18.7), so percentiles of such depths are too
/// long as well.
fn result(job: &Value, in_flight: u32) -> Result<Value> {
    let of = |place: &str| figure(job, place);
    // Reads and writes together, so that percentiles are of all requests.
    let (requests, wall_ms) = (of("/mixed/total_ios")?, of("/mixed/runtime")?);
    if requests < 1.0 || wall_ms < 1.0 {
        return Err(format!("fio measured nothing: {job}"));
    }
    let (user, kernel) = (of("/usr_cpu")?, of("/sys_cpu")?);
    // Those are per cent of this, which is summed over threads.
    let cpu_us = (user + kernel) / 100.0 * of("/job_runtime")? * 1e3;
    let iops = of("/mixed/iops")?;
    Ok(json!({
        "iops": iops,
        "requests": requests,
        "failed": of("/error")?,
        "mean_us": f64::from(in_flight) / iops * 1e6,
        "mean_by_fio_us": of("/mixed/lat_ns/mean")? / 1e3,
        "p50_us": of("/mixed/clat_ns/percentile/50.000000")? / 1e3,
        "p99_us": of("/mixed/clat_ns/percentile/99.000000")? / 1e3,
        "p999_us": of("/mixed/clat_ns/percentile/99.900000")? / 1e3,
        "max_us": of("/mixed/lat_ns/max")? / 1e3,
        "driver_cpu_us": cpu_us / requests,
        "driver_user_share": user / (user + kernel).max(1e-9),
        "driver_busy": cpu_us / 1e3 / wall_ms,
        "driver_wakes_s": of("/ctx")? / wall_ms * 1e3,
        "seconds": wall_ms / 1e3,
    }))
}

#[cfg(test)]
mod tests {
    use super::super::load::LoadWait;
    use super::*;

    #[test]
    fn fios_report_is_told_in_the_drivers_words() {
        let whole = json!({"jobs": [{"error": 0, "job_runtime": 1000, "usr_cpu": 1.0, "sys_cpu": 3.0, "ctx": 40, "mixed": {
            "total_ios": 100, "runtime": 1000, "iops": 100, "lat_ns": {"mean": 2800, "max": 9000},
            "clat_ns": {"percentile": {"50.000000": 3000, "99.000000": 5000, "99.900000": 7000}}}}]});
        let whole = report(&format!("fio: a warning\n{whole}")).unwrap();
        let found = result(&whole["jobs"][0], 2).unwrap();
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
        assert!(result(&json!({"mixed": {}}), 1).is_err());
    }

    #[test]
    fn a_time_without_a_request_is_tried_again() {
        let folder = std::env::temp_dir().join(format!("cleave-bare-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let script = r#"echo >>runs
            echo "{\"jobs\": [{\"error\": 0, \"job_runtime\": 1, \"usr_cpu\": 1, \"sys_cpu\": 1, \"ctx\": 1, \"mixed\": {
            \"total_ios\": $(($(wc -l <runs) / 3)), \"runtime\": 1, \"iops\": 1, \"lat_ns\": {\"mean\": 1, \"max\": 1},
            \"clat_ns\": {\"percentile\": {\"50.000000\": 1, \"99.000000\": 1, \"99.900000\": 1}}}}]}""#;
        let line = words("sh -c {}", &[&script]);
        let load = RandomLoad::reads(1, LoadWait::Sleep, 1.0);
        let found = run(&folder, &line, &load);
        let runs = std::fs::read_to_string(folder.join("runs"));
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(
            (found.unwrap()["requests"].as_f64(), runs.unwrap().len()),
            (Some(1.0), 3)
        );
    }
}
