//! The raw lines of a run, asked for by point and subject.

use std::collections::BTreeMap;

use serde_json::Value;

use super::rounds::SUITE;
use super::subject::{ALL, Subject};
use crate::report::{Recorded, Spread};

/// Measurements in guests, of one run.
pub(super) struct Lines<'a> {
    lines: Vec<&'a Value>,
    accelerator: String,
    kernel: String,
}

impl<'a> Lines<'a> {
    /// None where nothing was measured in guests.
    pub(super) fn of(run: &'a Recorded) -> Option<Lines<'a>> {
        let lines = run.of(SUITE);
        if lines.is_empty() {
            return None;
        }
        let said = |name: &str| {
            run.environment[name]
                .as_str()
                .unwrap_or("unknown")
                .to_owned()
        };
        Some(Lines {
            lines,
            accelerator: said("accelerator"),
            kernel: said("guest_kernel"),
        })
    }

    /// All lines of a point, in the order of measuring.
    pub(super) fn at(&self, point: &str) -> impl Iterator<Item = &'a Value> {
        self.lines
            .iter()
            .copied()
            .filter(move |line| line["point"] == point)
    }

    /// A subject's values at a point by round; `path` is a JSON pointer.
    pub(super) fn rounds(&self, point: &str, subject: &str, path: &str) -> BTreeMap<u64, f64> {
        let own = self.at(point).filter(|line| line["subject"] == subject);
        own.filter_map(|line| Some((line["round"].as_u64()?, line.pointer(path)?.as_f64()?)))
            .collect()
    }

    pub(super) fn spread(&self, point: &str, subject: &str, path: &str) -> Option<Spread> {
        let values: Vec<f64> = self.rounds(point, subject, path).into_values().collect();
        Spread::of(&values)
    }

    /// Of the same rounds, one by one.
    pub(super) fn ratio(&self, point: &str, own: &str, base: &str, path: &str) -> Option<Spread> {
        let base = self.rounds(point, base, path);
        let own = self.rounds(point, own, path);
        let ratios: Vec<f64> = own
            .iter()
            .filter_map(|(round, own)| Some(own / base.get(round)?))
            .filter(|ratio| ratio.is_finite())
            .collect();
        Spread::of(&ratios)
    }

    /// Subjects that were measured at a point.
    pub(super) fn subjects(&self, point: &str) -> Vec<&'static Subject> {
        let measured = |one: &&Subject| self.at(point).any(|line| line["subject"] == one.name);
        ALL.iter().filter(measured).collect()
    }

    /// The offered rates, from low to high.
    pub(super) fn offered(&self) -> Vec<u64> {
        let limit = self.at("limit").next();
        let rates = limit.and_then(|line| line["offered"].as_array());
        rates
            .into_iter()
            .flatten()
            .filter_map(Value::as_u64)
            .collect()
    }

    /// Numbers behind the name of points: `threads-8` is 8.
    pub(super) fn numbers_of(&self, prefix: &str) -> Vec<u32> {
        let number = |line: &&Value| line["point"].as_str()?.strip_prefix(prefix)?.parse().ok();
        let mut found: Vec<u32> = self.lines.iter().filter_map(number).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    pub(super) fn is_translated(&self) -> bool {
        self.accelerator == "tcg"
    }

    /// A figure's title; whoever takes it out of its page must see what it was measured on.
    pub(super) fn title(&self, words: &str) -> String {
        match self.is_translated() {
            true => format!("{words} (emulated CPU)"),
            false => words.to_owned(),
        }
    }

    /// Under each title.
    pub(super) fn subtitle(&self) -> String {
        let Lines {
            accelerator,
            kernel,
            ..
        } = self;
        format!(
            "Guest of one CPU, Linux {kernel}, accelerator {accelerator}; the guest's CPU pinned to one CPU, all that \
             serves its disk to another; medians with least and most of the rounds"
        )
    }

    /// The sentence that figures of response times at low depth need.
    pub(super) fn caveat(&self) -> &'static str {
        match self.is_translated() {
            true => {
                "what a register access costs with KVM: translated guests pay no VM exit for it, which flatters the \
                 emulated controllers, most of all at low load and depth 1"
            }
            false => "guests of more CPUs and queues, nor other disks than this machine's",
        }
    }
}
