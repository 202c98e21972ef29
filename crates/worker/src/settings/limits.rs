//! The operator's limits on what a disk may do in a second, with QEMU's names and meaning (`throttling.*` of its drives).

use std::fmt;
use std::str::FromStr;

/// The rate of one kind, and how far it may be exceeded. Zero: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limit {
    /// Units a second, over time.
    pub average: u64,
    /// Units a second in a burst; zero: a tenth of a second's worth may come at once, and no more.
    pub max: u64,
    /// How many seconds a burst may last; zero: one.
    pub max_length: u64,
}

/// The limits of a disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// By [`LimitKind`].
    limits: [Limit; LimitKind::COUNT],
    /// Bytes of one operation: a larger request counts as several. Zero: each request is one.
    pub iops_size: u64,
}

/// The unit that a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitKind {
    /// Bytes of reads and writes.
    BpsTotal,
    /// Bytes of reads.
    BpsRead,
    /// Bytes of writes.
    BpsWrite,
    /// Operations, reading or not.
    IopsTotal,
    /// Reads.
    IopsRead,
    /// Writes, discards and write-zeroes.
    IopsWrite,
}

impl LimitKind {
    /// The number of kinds.
    pub const COUNT: usize = 6;
    /// All of them.
    pub const ALL: [LimitKind; LimitKind::COUNT] = [
        LimitKind::BpsTotal,
        LimitKind::BpsRead,
        LimitKind::BpsWrite,
        LimitKind::IopsTotal,
        LimitKind::IopsRead,
        LimitKind::IopsWrite,
    ];

    /// Returns QEMU's name of the limit.
    pub fn name(self) -> &'static str {
        match self {
            LimitKind::BpsTotal => "bps-total",
            LimitKind::BpsRead => "bps-read",
            LimitKind::BpsWrite => "bps-write",
            LimitKind::IopsTotal => "iops-total",
            LimitKind::IopsRead => "iops-read",
            LimitKind::IopsWrite => "iops-write",
        }
    }
}

impl RateLimits {
    /// QEMU's bound of every value.
    pub const VALUE_MAX: u64 = 1_000_000_000_000_000;

    /// Returns the limit of a kind.
    pub fn of(&self, kind: LimitKind) -> Limit {
        self.limits[kind as usize]
    }

    /// Returns true if anything is limited.
    pub fn any(&self) -> bool {
        self.limits.iter().any(|limit| limit.average > 0)
    }

    /// Returns the names of all settings.
    pub fn names() -> impl Iterator<Item = String> {
        let of_kinds = LimitKind::ALL.into_iter().flat_map(|kind| {
            ["", "-max", "-max-length"].map(|end| format!("{}{end}", kind.name()))
        });
        of_kinds.chain(["iops-size".to_owned()])
    }

    /// Returns names and values of the settings that are not zero.
    pub fn settings(&self) -> Vec<(String, u64)> {
        let mut settings = Vec::new();
        for kind in LimitKind::ALL {
            let (name, limit) = (kind.name(), self.of(kind));
            settings.push((name.to_owned(), limit.average));
            settings.push((format!("{name}-max"), limit.max));
            settings.push((format!("{name}-max-length"), limit.max_length));
        }
        settings.push(("iops-size".to_owned(), self.iops_size));
        settings.retain(|(_, value)| *value > 0);
        settings
    }

    /// Changes one setting; zero takes it away. [`check`](RateLimits::check) refuses a whole that does not make sense.
    pub fn set(&mut self, name: &str, value: u64) -> Result<(), String> {
        if value > RateLimits::VALUE_MAX {
            return Err(format!("{name} is at most {}", RateLimits::VALUE_MAX));
        }
        if name == "iops-size" {
            self.iops_size = value;
            return Ok(());
        }
        for kind in LimitKind::ALL {
            let limit = &mut self.limits[kind as usize];
            match name.strip_prefix(kind.name()) {
                Some("") => limit.average = value,
                Some("-max") => limit.max = value,
                Some("-max-length") => limit.max_length = value,
                _ => continue,
            }
            return Ok(());
        }
        Err(format!(
            "{:?} is not a limit; there are iops-total, iops-read, iops-write, bps-total, bps-read, bps-write, each also with \
             -max and -max-length, and iops-size",
            name.chars().take(40).collect::<String>()
        ))
    }

    /// Refuses settings that do not make sense together, by QEMU's rules.
    pub fn check(&self) -> Result<(), String> {
        for [total, read, write] in [
            [LimitKind::BpsTotal, LimitKind::BpsRead, LimitKind::BpsWrite],
            [
                LimitKind::IopsTotal,
                LimitKind::IopsRead,
                LimitKind::IopsWrite,
            ],
        ] {
            let is_set = |kind| self.of(kind).average > 0;
            if is_set(total) && (is_set(read) || is_set(write)) {
                let (total, read, write) = (total.name(), read.name(), write.name());
                return Err(format!(
                    "{total} excludes {read} and {write}: set one or the others"
                ));
            }
        }
        let iops = [
            LimitKind::IopsTotal,
            LimitKind::IopsRead,
            LimitKind::IopsWrite,
        ];
        if self.iops_size > 0 && iops.iter().all(|kind| self.of(*kind).average == 0) {
            return Err(
                "iops-size needs an iops limit: iops-total, iops-read or iops-write".to_owned(),
            );
        }
        LimitKind::ALL
            .into_iter()
            .try_for_each(|kind| self.check_one(kind))
    }

    fn check_one(&self, kind: LimitKind) -> Result<(), String> {
        let (name, limit) = (kind.name(), self.of(kind));
        match limit {
            Limit {
                average: 0,
                max: 1..,
                ..
            } => Err(format!("{name}-max needs {name}")),
            Limit {
                average,
                max: max @ 1..,
                ..
            } if max < average => Err(format!("{name}-max is at least {name}: {average}")),
            Limit {
                max: 0,
                max_length: 2..,
                ..
            } => Err(format!("{name}-max-length above 1 needs {name}-max")),
            Limit {
                max, max_length, ..
            } if max.saturating_mul(max_length) > RateLimits::VALUE_MAX => Err(format!(
                "{name}-max times {name}-max-length is at most {}",
                RateLimits::VALUE_MAX
            )),
            _ => Ok(()),
        }
    }
}

/// Writes the limits as the option takes them; `none` where nothing is set.
impl fmt::Display for RateLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = self.settings().into_iter();
        let settings: Vec<String> = settings
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        match settings.is_empty() {
            true => f.write_str("none"),
            false => f.write_str(&settings.join(",")),
        }
    }
}

impl FromStr for RateLimits {
    type Err = String;

    /// Parses a text such as `iops-total=5000,bps-write=100M`: numbers, with K, M, G, T for powers of 1024.
    fn from_str(text: &str) -> Result<RateLimits, String> {
        let mut limits = RateLimits::default();
        if text == "none" {
            return Ok(limits);
        }
        let mut names = Vec::new();
        for part in text.split(',') {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let number = number(value);
            // An unknown name is the more helpful complaint.
            limits.set(name, number.unwrap_or(0))?;
            if number.is_none() {
                return Err(format!(
                    "{name} takes a whole number, followed by K, M, G or T if need be"
                ));
            }
            if names.contains(&name) {
                return Err(format!("{name} is there twice"));
            }
            names.push(name);
        }
        limits.check().map(|()| limits)
    }
}

fn number(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(['K', 'M', 'G', 'T']);
    let shift = match text.strip_prefix(digits)? {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = digits.parse().ok().filter(|_| is_number)?;
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_and_shown_with_qemus_names() {
        let text =
            "bps-write=100M,bps-write-max=1G,bps-write-max-length=5,iops-total=5000,iops-size=8K";
        let limits: RateLimits = text.parse().unwrap();
        assert_eq!(
            limits.of(LimitKind::BpsWrite),
            Limit {
                average: 100 << 20,
                max: 1 << 30,
                max_length: 5
            }
        );
        assert_eq!(limits.to_string().parse(), Ok(limits));
        assert!(limits.any() && limits.iops_size == 8192);
        assert_eq!(
            RateLimits::default().to_string().parse(),
            Ok(RateLimits::default())
        );
    }

    #[test]
    fn what_qemu_refuses_is_refused_with_the_reason() {
        for (text, why) in [
            ("iops-total=1,iops-read=1", "excludes"),
            ("bps-total=1,bps-write=1", "excludes"),
            ("iops-read-max=5", "needs iops-read"),
            ("iops-read=5,iops-read-max=4", "at least"),
            ("iops-read=5,iops-read-max-length=2", "needs iops-read-max"),
            (
                "iops-read=5,iops-read-max=1T,iops-read-max-length=1000",
                "at most",
            ),
            ("iops-size=8K", "needs an iops limit"),
            ("iops-size=8K,bps-total=1M", "needs an iops limit"),
            ("iops=5", "is not a limit"),
            ("iops-read", "whole number"),
            ("iops-read=-1", "whole number"),
            ("iops-read=1KK", "whole number"),
            ("iops-read=2000T", "at most"),
            ("iops-read=1,iops-read=2", "twice"),
            ("", "is not a limit"),
        ] {
            let said = text.parse::<RateLimits>().unwrap_err();
            assert!(said.contains(why), "{text}: {said}");
        }
    }
}
