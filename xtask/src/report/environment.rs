//! On what a measurement was made: written beside its results, for a figure without its machine says little.

use std::path::Path;

use serde_json::{Value, json};

use crate::step::quietly;

/// Kernel, processor, memory, versions, revision, and who ran where.
pub(crate) fn describe(root: &Path, program: &Path, pinning: &Value) -> Value {
    let said = |words: &[&str]| {
        let text = quietly(root, words, &[]).unwrap_or_else(|why| format!("unknown: {why}"));
        text.lines().next().unwrap_or_default().to_owned()
    };
    let changes = quietly(root, &["git", "status", "--porcelain"], &[]);
    json!({
        "kernel": said(&["uname", "-srvm"]),
        "cpu": field("/proc/cpuinfo", "model name"),
        "cpus_online": said(&["nproc", "--all"]),
        "memory": field("/proc/meminfo", "MemTotal"),
        "hypervisor": std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default().contains(" hypervisor"),
        "io_uring_disabled": std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok().map(|text| text.trim().to_owned()),
        "load_at_start": std::fs::read_to_string("/proc/loadavg").unwrap_or_default().trim(),
        "cleave": said(&[&program.to_string_lossy(), "--version"]),
        "revision": said(&["git", "rev-parse", "HEAD"]),
        "has_uncommitted_changes": changes.map_or(Value::Null, |text| json!(!text.is_empty())),
        "rustc": said(&["rustc", "--version"]),
        "not_measured": "ublk and vhost-blk: no suite drives them",
        "qemu_storage_daemon": said(&["qemu-storage-daemon", "--version"]),
        "pinning": pinning,
    })
}

/// The first value of a `name : value` file.
fn field(path: &str, name: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    let value = pairs.find(|(key, _)| key.trim() == name);
    value.map_or_else(
        || "unknown".to_owned(),
        |(_, value)| value.trim().to_owned(),
    )
}
