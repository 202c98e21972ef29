//! Limits of this process, and memory that guests may lie in.

use std::fs;

use cleave_host::DESCRIPTORS_MIN;
use rustix::process::{Resource, getrlimit};

use super::finding::Finding;

/// Containers often have this much or less in /dev/shm.
const SHM_SMALL: u64 = 64 << 20;

/// Open files, huge pages, shared memory.
pub(super) fn check() -> Vec<Finding> {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    vec![
        open_files(getrlimit(Resource::Nofile).maximum),
        huge_pages(&meminfo),
        shared_memory(),
    ]
}

/// The daemon raises the limit itself, up to the hard one.
fn open_files(most: Option<u64>) -> Finding {
    let check = "open files";
    match most {
        Some(most) if most < DESCRIPTORS_MIN => Finding::problem(
            check,
            format!("at most {most} may be open, and a disk needs {DESCRIPTORS_MIN} or more"),
            "raise the hard limit (ulimit -Hn, LimitNOFILE=)",
        ),
        Some(most) => Finding::ok(check, format!("up to {most} (hard limit)")),
        None => Finding::ok(check, "no limit"),
    }
}

fn huge_pages(meminfo: &str) -> Finding {
    let check = "huge pages";
    let value = |key: &str| {
        let mut lines = meminfo.lines();
        let line = lines.find_map(|line| line.strip_prefix(key))?;
        line.trim_start_matches(':')
            .split_whitespace()
            .next()?
            .parse::<u64>()
            .ok()
    };
    let total = value("HugePages_Total").unwrap_or(0);
    let free = value("HugePages_Free").unwrap_or(0);
    let free = free.saturating_sub(value("HugePages_Rsvd").unwrap_or(0));
    match (total, free) {
        (0, _) => Finding::ok(check, "none; guests in ordinary memory need none"),
        (total, 0) => Finding::warning(
            check,
            format!("all {total} are in use: another guest in huge pages does not start"),
            "sysctl vm.nr_hugepages=N",
        ),
        (total, free) => Finding::ok(check, format!("{free} of {total} are free")),
    }
}

fn shared_memory() -> Finding {
    let check = "shared memory";
    match rustix::fs::statvfs("/dev/shm") {
        Ok(found) if found.f_blocks.saturating_mul(found.f_frsize) <= SHM_SMALL => {
            Finding::warning(
                check,
                format!(
                    "/dev/shm holds {} MiB",
                    found.f_blocks.saturating_mul(found.f_frsize) >> 20
                ),
                "give guests memory-backend-memfd, or enlarge it: mount -o remount,size=N /dev/shm",
            )
        }
        Ok(found) => {
            let free = found.f_bavail.saturating_mul(found.f_frsize) >> 20;
            Finding::ok(check, format!("{free} MiB are free in /dev/shm"))
        }
        Err(error) => Finding::warning(
            check,
            format!("/dev/shm: {error}"),
            "give guests memory-backend-memfd, which does not need it",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    #[test]
    fn limits_are_judged() {
        assert_eq!(
            open_files(Some(DESCRIPTORS_MIN - 1)).level,
            Severity::Problem
        );
        assert_eq!(open_files(Some(DESCRIPTORS_MIN)).level, Severity::Ok);
        assert_eq!(open_files(None).level, Severity::Ok);
        let pages = |total, free, reserved| {
            huge_pages(&format!(
                "HugePages_Total: {total}\nHugePages_Free:  {free}\nHugePages_Rsvd: {reserved}\n"
            ))
        };
        assert_eq!(pages(0, 0, 0).level, Severity::Ok);
        assert_eq!(pages(8, 3, 0).level, Severity::Ok);
        assert_eq!(
            pages(8, 3, 3).level,
            Severity::Warning,
            "promised to a guest"
        );
        assert_eq!(pages(8, 0, 0).level, Severity::Warning);
    }
}
