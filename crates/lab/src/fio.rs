//! fio's output.

use cleave_rig::{At, Result};
use serde_json::Value;

/// fio's report, which follows the messages of fio and its hooks.
pub(crate) fn report(said: &str) -> Result<Value> {
    let report = &said[said.find('{').unwrap_or(0)..];
    serde_json::from_str(report).at(format!("fio said {said}"))
}

/// Returns a figure of a job, by its place.
pub(crate) fn figure(job: &Value, place: &str) -> Result<f64> {
    let found = job.pointer(place).and_then(Value::as_f64);
    found.ok_or_else(|| format!("fio's job has no {place}: {job}"))
}
