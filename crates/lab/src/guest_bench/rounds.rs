//! The rounds: subjects take turns, each boots anew and does all that is asked of it, and the order turns round by round.

use std::collections::BTreeMap;

use cleave_rig::Result;
use serde_json::{Value, json};

use super::guest::{Ran, WaitingGuest};
use super::jobs::{Jobs, MIXED_DEPTH};
use super::kit::GuestKit;
use super::options::Effort;
use super::subject::{AttachedDisk, Subject};
use crate::offered::two_digits;
use crate::run_folder::{Run, merged};

/// The name of this suite in the raw data.
pub(super) const SUITE: &str = "guest";

/// After so many a controller is left out: each costs its time limit.
const TROUBLES_MAX: usize = 2;

/// Subjects whose CPU time, interrupts and kicks are told apart (study B).
const TAKEN_APART: [&str; 5] = [
    "virtio-blk",
    "qsd",
    "cleave",
    "cleave-poll",
    "cleave-adaptive",
];
/// Subjects that are driven by more and more threads (study D).
const BY_THREADS: [&str; 4] = ["virtio-blk", "qsd", "cleave", "cleave-adaptive"];
/// Subjects that serve several disks at once (study C).
const TOGETHER: [&str; 3] = ["ahci", "virtio-blk", "cleave"];

/// Rate of the slow disk among several.
const SLOW_IOPS: u32 = 200;
/// Requests in flight over all disks, and for each where each has a job.
const TOGETHER_DEPTH: u32 = 16;

/// A run under way.
pub(super) struct GuestRun<'a> {
    pub(super) kit: &'a GuestKit,
    pub(super) effort: &'a Effort,
    pub(super) subjects: Vec<&'static Subject>,
    pub(super) run: &'a mut Run,
    /// Turns that failed.
    pub(super) troubles: BTreeMap<&'static str, usize>,
}

/// A subject in a round; in round 0 only its limit is looked for.
#[derive(Clone, Copy)]
struct Turn {
    subject: &'static Subject,
    round: u32,
}

impl GuestRun<'_> {
    /// Everything; the caller draws it.
    pub(super) fn measure(&mut self) -> Result {
        let rates = self.calibrate()?;
        for round in 1..=self.effort.rounds {
            // Forth and back, so that whatever drifts meets each as often early as late.
            let mut order = self.subjects.clone();
            if round.is_multiple_of(2) {
                order.reverse();
            }
            for subject in &order {
                let turn = Turn { subject, round };
                self.attempt(turn, |rounds| rounds.alone(turn, &rates))?;
            }
            if round <= self.effort.together_rounds {
                for subject in order.iter().filter(|one| TOGETHER.contains(&&*one.name)) {
                    let turn = Turn { subject, round };
                    self.attempt(turn, |rounds| rounds.together(turn))?;
                }
            }
            println!("round {round} of {} done", self.effort.rounds);
        }
        Ok(())
    }

    /// Attempts a subject's turn; one that fails is written down and costs only itself. Where the cause is that nothing more can
    /// be written down, that fails too, and ends the run.
    fn attempt<T>(
        &mut self,
        turn: Turn,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<Option<T>> {
        let name = &*turn.subject.name;
        let count = self.troubles.get(name).copied().unwrap_or(0);
        if count >= TROUBLES_MAX {
            return Ok(None);
        }
        match work(self) {
            Ok(done) => Ok(Some(done)),
            Err(why) => {
                self.troubles.insert(name, count + 1);
                let left_out = match count + 1 >= TROUBLES_MAX {
                    true => "; it is left out from here on",
                    false => "",
                };
                self.warn(turn, &format!("{why}{left_out}")).map(|()| None)
            }
        }
    }

    fn warn(&mut self, Turn { subject, round }: Turn, text: &str) -> Result {
        let text = format!("{}, round {round}: {text}", subject.title);
        self.run.warn(SUITE, &text)
    }

    /// Rates in steps up to that of the slowest emulated controller, or of the slowest subject if none is emulated.
    fn calibrate(&mut self) -> Result<Vec<u32>> {
        let all = self.subjects.clone();
        let (emulated, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|one| one.class == "emulated");
        let mut slowest = self.slowest_of(emulated)?;
        if slowest.is_none() {
            slowest = self.slowest_of(others)?;
        }
        let (limit, name) = slowest.ok_or("no controller could be measured at all")?;
        let rates = self.effort.steps.iter().map(|step| rate(limit, *step));
        let rates: Vec<u32> = rates.collect();
        let text = format!(
            "The slowest controller, {name}, takes {limit:.0} mixed requests (4–64 KiB, 60 % reads) a second with 32 in flight; \
             the offered rates are steps up to that: {rates:?}. Arrivals are random (Poisson); up to 64 requests wait in the \
             guest's queue, and a request's clock starts when fio submits it."
        );
        println!("{text}");
        let line = json!({ "point": "limit", "text": text });
        self.run.note(SUITE, &line)?;
        Ok(rates)
    }

    /// Finds the fewest mixed requests at 32 in flight, and whose they are.
    fn slowest_of(
        &mut self,
        subjects: Vec<&'static Subject>,
    ) -> Result<Option<(f64, &'static str)>> {
        let mut limits = Vec::new();
        for subject in subjects {
            let turn = Turn { subject, round: 0 };
            let iops = self.attempt(turn, |rounds| rounds.limit_of(subject))?;
            limits.extend(iops.map(|iops| (iops, &*subject.title)));
        }
        let slowest = limits
            .into_iter()
            .min_by(|one, other| one.0.total_cmp(&other.0));
        Ok(slowest)
    }

    fn limit_of(&mut self, subject: &'static Subject) -> Result<f64> {
        let (mut guest, disk) = self.boot_alone(subject)?;
        let mut jobs = Jobs::new(0);
        jobs.warm_up(&disk);
        jobs.mixed(&disk, self.effort.seconds.min(1.5));
        let ran = guest.run(&jobs)?;
        guest.end()?;
        let iops = ran.output.figure(MIXED_DEPTH, "iops");
        iops.ok_or("fio ran no mixed job".to_owned())
    }

    /// Boots a guest with the filled disk, and the disk's name in it.
    fn boot_alone(&self, subject: &Subject) -> Result<(WaitingGuest, String)> {
        let disk = AttachedDisk {
            image: &self.kit.filled,
            throttle: None,
            is_shared: false,
        };
        let guest = WaitingGuest::boot(self.kit, subject, vec![disk])?;
        let (name, _) = guest.disks.first().cloned().unwrap_or_default();
        Ok((guest, name))
    }

    /// A guest with one disk: offered rates, depth, and the further questions to this subject.
    fn alone(&mut self, turn: Turn, rates: &[u32]) -> Result {
        let (mut guest, disk) = self.boot_alone(turn.subject)?;
        let seconds = self.effort.seconds;
        let is_among = |names: &[&str]| names.contains(&&*turn.subject.name);
        let mut jobs = Jobs::new(turn.round);
        jobs.warm_up(&disk);
        for rate in rates {
            jobs.rate(&disk, *rate, seconds);
        }
        if is_among(&TAKEN_APART) {
            jobs.reads("reads-1", &disk, 1, seconds);
            jobs.reads("reads-32", &disk, 32, seconds);
        }
        if is_among(&BY_THREADS) {
            for count in self.effort.threads {
                jobs.threads(&disk, *count, seconds);
            }
        }
        // Last, for this is where a controller that loses requests shows it.
        jobs.mixed(&disk, seconds);
        let ran = guest.run(&jobs)?;
        self.note_jobs(&guest, &ran, turn)?;
        // Kicks are the same in every round; counting them takes time, so they have a run of their own.
        if is_among(&TAKEN_APART) && turn.round == 1 {
            self.kicks(&mut guest, &disk, turn)?;
        }
        self.put_away(guest, turn)
    }

    /// Kicks for each request.
    fn kicks(&mut self, guest: &mut WaitingGuest, disk: &str, turn: Turn) -> Result {
        if let Err(why) = guest.count_kicks() {
            return self.warn(turn, &why);
        }
        let mut jobs = Jobs::new(1);
        for depth in [1, 32] {
            let seconds = self.effort.seconds.min(1.0) / 2.0;
            jobs.reads(&format!("kicks-{depth}"), disk, depth, seconds);
        }
        let ran = guest.run(&jobs)?;
        for (name, figures) in &ran.output.jobs {
            let counted = ran.counted(name).zip(figures["ios"].as_f64());
            if let Some(([_, kicks, _], ios)) = counted {
                let result = json!({ "kicks_per_io": kicks / ios.max(1.0), "ios": ios });
                self.note(turn, name, &json!({ "result": result }))?;
            }
        }
        Ok(())
    }

    /// A guest with five disks: three alike, one that is slow, one that was never written.
    fn together(&mut self, turn: Turn) -> Result {
        // Told apart by their sizes: a guest finds its disks in any order.
        let bytes = self.effort.disk_bytes;
        let (slow_bytes, thin_bytes) = (bytes / 2, bytes / 4);
        let (filled, thin) = (&*self.kit.filled, self.kit.thin(thin_bytes)?);
        let disks = [(filled, None), (filled, None), (filled, None)];
        let slow = (filled, Some((SLOW_IOPS, slow_bytes)));
        let disks = disks.into_iter().chain([slow, (&*thin, None)]);
        let disks = disks.map(|(image, throttle)| AttachedDisk {
            image,
            throttle,
            is_shared: true,
        });
        let mut guest = WaitingGuest::boot(self.kit, turn.subject, disks.collect())?;
        let disks = [guest.disks_of(bytes), guest.disks_of(slow_bytes)].concat();
        let thin = guest.disks_of(thin_bytes);
        let ([filled, _, _, _], [thin]) = (disks.as_slice(), thin.as_slice()) else {
            return Err("the guest's disks have other sizes".to_owned());
        };
        self.two_forms(&mut guest, turn, &disks)?;
        let mut jobs = Jobs::new(turn.round);
        jobs.reads("filled", filled, 8, self.effort.seconds);
        jobs.reads("thin", thin, 8, self.effort.seconds);
        let ran = guest.run(&jobs)?;
        self.note_jobs(&guest, &ran, turn)?;
        self.put_away(guest, turn)
    }

    /// Runs one job over all disks, which share its depth; then a job for each, with its part of the depth.
    fn two_forms(&mut self, guest: &mut WaitingGuest, turn: Turn, disks: &[String]) -> Result {
        let mut jobs = Jobs::new(turn.round);
        jobs.over_all(disks, TOGETHER_DEPTH, self.effort.seconds);
        let over_all = guest.run(&jobs)?.output;
        let mut jobs = Jobs::new(turn.round);
        jobs.one_each(disks, TOGETHER_DEPTH / 4, self.effort.seconds);
        let one_each = guest.run(&jobs)?.output;
        for (number, name) in disks.iter().enumerate() {
            let reads = over_all.reads_of_disk(name).unwrap_or(0.0);
            // fio names a disk's requests, not their rate; the job's time is its requests by its rate.
            let [ios, rate] =
                ["ios", "iops"].map(|of| over_all.figure("over-all", of).unwrap_or(0.0));
            let alone = one_each.figure(&format!("disk-{name}"), "iops");
            let disk = match number {
                3 => "slow disk".to_owned(),
                _ => format!("disk {}", number + 1),
            };
            let is_modelled = number == 3 && turn.subject.is_cleave();
            for (form, iops) in [
                ("one job over all disks", reads * rate / ios.max(1.0)),
                ("a job for each disk", alone.unwrap_or(0.0)),
            ] {
                let facts =
                    json!({ "disk": disk, "is_modelled": is_modelled, "result": { "iops": iops } });
                self.note(turn, form, &facts)?;
            }
        }
        Ok(())
    }

    fn note(&mut self, Turn { subject, round }: Turn, point: &str, facts: &Value) -> Result {
        let line = json!({
            "point": point, "subject": subject.title, "class": subject.class, "round": round,
            "seconds": self.effort.seconds,
        });
        self.run.note(SUITE, &merged(line, facts))
    }

    fn note_jobs(&mut self, guest: &WaitingGuest, ran: &Ran, turn: Turn) -> Result {
        for (name, figures) in ran.output.jobs.iter().filter(|(name, _)| name != "warm") {
            let ios = figures["ios"].as_f64().unwrap_or(0.0).max(1.0);
            let stages = guest.stages(ran, name, ios).unwrap_or_default();
            let mut result = merged(figures.clone(), &stages);
            if let Some([interrupts, _, busy]) = ran.counted(name) {
                result["interrupts_per_io"] = json!(interrupts / ios);
                result["guest_busy_ticks"] = json!(busy);
            }
            let number_behind = |front: &str| name.strip_prefix(front)?.parse::<u32>().ok();
            let facts = json!({
                "result": result, "dots": ran.dots(name), "rate": number_behind("rate-"),
                "threads": number_behind("threads-"), "commands": guest.commands,
            });
            self.note(turn, name, &facts)?;
        }
        Ok(())
    }

    fn put_away(&mut self, guest: WaitingGuest, turn: Turn) -> Result {
        match guest.end()? {
            None => Ok(()),
            Some(why) => self.warn(turn, &format!("the guest's kernel complained: {why}")),
        }
    }
}

/// Some per cent of a limit, rounded to two figures.
fn rate(limit: f64, percent: u32) -> u32 {
    two_digits((limit * f64::from(percent) / 100.0).max(10.0)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offered_rates_have_two_figures() {
        for (limit, percent, offered) in [
            (1437.0, 100, 1400),
            (1437.0, 33, 470),
            (3.0, 50, 10),
            (98_765.0, 67, 66_000),
        ] {
            assert_eq!(rate(limit, percent), offered);
        }
    }
}
