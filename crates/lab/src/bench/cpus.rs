//! Chooses the CPUs of driver and daemon.

use std::collections::BTreeSet;

use cleave_rig::Result;

/// A CPU each, as `taskset --cpu-list` names them.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cpus {
    pub(super) driver: String,
    pub(super) daemon: String,
    /// A caveat for the reader.
    pub(super) caveat: Option<String>,
}

impl Cpus {
    /// Two cores where there are two: the two threads of one core slow each other down.
    pub(super) fn choose() -> Result<Cpus> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let status = read("/proc/self/status");
        let allowed = status.split_once("Cpus_allowed_list:");
        let allowed = listed(
            allowed
                .and_then(|(_, rest)| rest.lines().next())
                .unwrap_or(""),
        );
        let first = allowed.first().copied().unwrap_or(0);
        let path = format!("/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list");
        Cpus::among(&allowed, &listed(&read(&path)))
    }

    /// Returns both CPUs for each side, so that the scheduler places them as it likes.
    pub(super) fn shared(&self) -> Cpus {
        let both = format!("{},{}", self.driver, self.daemon);
        Cpus {
            driver: both.clone(),
            daemon: both,
            caveat: self.caveat.clone(),
        }
    }

    /// Returns their numbers where each side has one.
    pub(super) fn pair(&self) -> Option<[usize; 2]> {
        Some([self.driver.parse().ok()?, self.daemon.parse().ok()?])
    }

    fn among(allowed: &BTreeSet<u32>, siblings: &BTreeSet<u32>) -> Result<Cpus> {
        let mut rest = allowed.iter();
        let (Some(driver), Some(second)) = (rest.next(), rest.next()) else {
            return Err("driver and daemon need a CPU each; this machine has one".to_owned());
        };
        let apart = allowed.difference(siblings).find(|cpu| *cpu != driver);
        let caveat = match (apart, allowed.len()) {
            (None, _) => Some("driver and daemon run on two threads of one core"),
            (_, 2) => Some(
                "two CPUs in all: whatever else the machine does, interrupts and kernel threads included, is \
                 done on the driver's or the daemon's",
            ),
            _ => None,
        };
        Ok(Cpus {
            driver: driver.to_string(),
            daemon: apart.unwrap_or(second).to_string(),
            caveat: caveat.map(str::to_owned),
        })
    }
}

/// `0,2-3` as numbers.
fn listed(text: &str) -> BTreeSet<u32> {
    let ranges = text.trim().split(',').filter_map(|part| {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        Some(from.parse::<u32>().ok()?..=to.parse::<u32>().ok()?)
    });
    ranges.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_cores_are_preferred_to_two_threads_of_one() {
        let table = [
            ("0-1", "0", Some(("0", "1")), true),
            ("0-1", "0-1", Some(("0", "1")), true),
            ("0-7", "0,4", Some(("0", "1")), false),
            ("0-7", "0-1", Some(("0", "2")), false),
            ("2,6", "2", Some(("2", "6")), true),
            ("3", "3", None, false),
        ];
        for (allowed, siblings, chosen, has_caveat) in table {
            let cpus = Cpus::among(&listed(allowed), &listed(siblings)).ok();
            let found = cpus
                .as_ref()
                .map(|cpus| (cpus.driver.as_str(), cpus.daemon.as_str()));
            assert_eq!(found, chosen, "{allowed}");
            let caveat = cpus.and_then(|cpus| cpus.caveat);
            assert_eq!(caveat.is_some(), has_caveat, "{allowed}");
        }
    }
}
