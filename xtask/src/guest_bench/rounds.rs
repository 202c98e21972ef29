//! The rounds: subjects take turns, each boots anew and does all that is asked of it, and the order turns round by round.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::Effort;
use super::fio::{Jobs, MIXED_DEPTH};
use super::guest::{Guest, Ran};
use super::lab::Lab;
use super::subject::{Attached, Subject};
use crate::report::{Run, merged};

/// Under which the raw data says what belongs here.
pub(super) const SUITE: &str = "guest";

/// After so many a controller is left out: each costs its time limit.
const TROUBLES_MAX: u32 = 2;

/// Whose CPU time, interrupts and kicks are taken apart (study B).
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

/// Of the slow disk among several.
const SLOW_IOPS: u32 = 200;
/// Requests in flight over all disks, and for each where each has a job.
const TOGETHER_DEPTH: u32 = 16;

/// A run under way.
pub(super) struct Rounds<'a> {
    lab: &'a Lab,
    effort: &'a Effort,
    subjects: Vec<&'static Subject>,
    run: &'a mut Run,
    troubles: BTreeMap<&'static str, u32>,
}

impl<'a> Rounds<'a> {
    pub(super) fn new(
        lab: &'a Lab,
        effort: &'a Effort,
        subjects: Vec<&'static Subject>,
        run: &'a mut Run,
    ) -> Rounds<'a> {
        Rounds {
            lab,
            effort,
            subjects,
            run,
            troubles: BTreeMap::new(),
        }
    }

    /// Everything; the caller draws it.
    pub(super) fn measure(&mut self) -> Result<(), String> {
        let rates = self.calibrate()?;
        for round in 1..=self.effort.rounds {
            // Forth and back, so that whatever drifts meets each as often early as late.
            let mut order = self.subjects.clone();
            if round.is_multiple_of(2) {
                order.reverse();
            }
            for subject in &order {
                self.attempt(subject, round, |rounds| {
                    rounds.alone(subject, round, &rates)
                })?;
            }
            if round <= self.effort.together_rounds {
                for subject in order.iter().filter(|one| TOGETHER.contains(&&*one.name)) {
                    self.attempt(subject, round, |rounds| rounds.together(subject, round))?;
                }
            }
            println!("round {round} of {} done", self.effort.rounds);
        }
        Ok(())
    }

    /// How many turns failed.
    pub(super) fn troubles(&self) -> usize {
        self.troubles.values().map(|count| *count as usize).sum()
    }

    /// A subject's turn; one that fails is written down and costs only itself.
    fn attempt(
        &mut self,
        subject: &'static Subject,
        round: u32,
        turn: impl FnOnce(&mut Self) -> Result<(), Trouble>,
    ) -> Result<(), String> {
        let count = self.troubles.get(&*subject.name).copied().unwrap_or(0);
        if count >= TROUBLES_MAX {
            return Ok(());
        }
        match turn(self) {
            Ok(()) => Ok(()),
            Err(Trouble::Harness(why)) => Err(why),
            Err(Trouble::Subject(why)) => {
                self.troubles.insert(&subject.name, count + 1);
                let left_out = match count + 1 >= TROUBLES_MAX {
                    true => "; it is left out from here on",
                    false => "",
                };
                let text = format!("{}, round {round}: {why}{left_out}", subject.title);
                self.run.warn(SUITE, &text)
            }
        }
    }

    /// Rates in steps up to that of the slowest emulated controller, or of the slowest subject if none is emulated.
    fn calibrate(&mut self) -> Result<Vec<u32>, String> {
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
        self.run
            .note(SUITE, &json!({ "point": "limit", "text": text }))?;
        Ok(rates)
    }

    /// The fewest mixed requests at 32 in flight, and whose they are.
    fn slowest_of(
        &mut self,
        subjects: Vec<&'static Subject>,
    ) -> Result<Option<(f64, &'static str)>, String> {
        let mut slowest: Option<(f64, &'static str)> = None;
        for subject in subjects {
            self.attempt(subject, 0, |rounds| {
                let iops = rounds.limit_of(subject)?;
                if slowest.is_none_or(|(known, _)| iops < known) {
                    slowest = Some((iops, &subject.title));
                }
                Ok(())
            })?;
        }
        Ok(slowest)
    }

    fn limit_of(&mut self, subject: &'static Subject) -> Result<f64, Trouble> {
        let (mut guest, disk) = self.boot_alone(subject)?;
        let mut jobs = Jobs::new(0);
        jobs.warm_up(&disk);
        jobs.mixed(&disk, self.effort.seconds.min(1.5));
        let ran = guest.run(jobs)?;
        guest.end()?;
        let found = ran.output.jobs.iter().find(|(name, _)| name == MIXED_DEPTH);
        let iops = found.and_then(|(_, figures)| figures["iops"].as_f64());
        iops.ok_or_else(|| Trouble::Subject("fio ran no mixed job".to_owned()))
    }

    /// A guest with the filled disk, and the disk's name in it.
    fn boot_alone(&self, subject: &Subject) -> Result<(Guest, String), Trouble> {
        let disk = Attached {
            image: &self.lab.filled,
            throttle: None,
            is_shared: false,
        };
        let guest = Guest::boot(self.lab, subject, vec![disk])?;
        let (name, _) = guest.disks.first().cloned().unwrap_or_default();
        Ok((guest, name))
    }

    /// A guest with one disk: offered rates, depth, and what else is asked of this subject.
    fn alone(
        &mut self,
        subject: &'static Subject,
        round: u32,
        rates: &[u32],
    ) -> Result<(), Trouble> {
        let (mut guest, disk) = self.boot_alone(subject)?;
        let seconds = self.effort.seconds;
        let mut jobs = Jobs::new(round);
        jobs.warm_up(&disk);
        for rate in rates {
            jobs.rate(&disk, *rate, seconds);
        }
        let is_taken_apart = TAKEN_APART.contains(&&*subject.name);
        if is_taken_apart {
            jobs.reads("reads-1", &disk, 1, seconds);
            jobs.reads("reads-32", &disk, 32, seconds);
        }
        if BY_THREADS.contains(&&*subject.name) {
            for count in self.effort.threads {
                jobs.threads(&disk, *count, seconds);
            }
        }
        // Last, for this is where a controller that loses requests shows it.
        jobs.mixed(&disk, seconds);
        let ran = guest.run(jobs)?;
        self.note_jobs(&guest, &ran, subject, round)?;
        // Kicks are the same in every round; counting them takes time, so they have a run of their own.
        if is_taken_apart && round == 1 {
            self.kicks(&mut guest, &disk, subject)?;
        }
        self.put_away(guest, subject, round)
    }

    /// Kicks for each request.
    fn kicks(&mut self, guest: &mut Guest, disk: &str, subject: &Subject) -> Result<(), Trouble> {
        if let Err(why) = guest.count_kicks() {
            let text = format!("{}: {why}", subject.title);
            return self.run.warn(SUITE, &text).map_err(Trouble::Harness);
        }
        let mut jobs = Jobs::new(1);
        for depth in [1, 32] {
            let seconds = self.effort.seconds.min(1.0) / 2.0;
            jobs.reads(&format!("kicks-{depth}"), disk, depth, seconds);
        }
        let ran = guest.run(jobs)?;
        for (name, figures) in &ran.output.jobs {
            let counted = ran.counted(name).zip(figures["ios"].as_f64());
            if let Some(([_, kicks, _], ios)) = counted {
                let result = json!({ "kicks_per_io": kicks / ios.max(1.0), "ios": ios });
                self.note(subject, 1, name, &json!({ "result": result }))?;
            }
        }
        Ok(())
    }

    /// A guest with five disks: three alike, one that is slow, one that was never written.
    fn together(&mut self, subject: &'static Subject, round: u32) -> Result<(), Trouble> {
        // Told apart by their sizes: a guest finds its disks in any order.
        let bytes = self.effort.disk_bytes;
        let (slow_bytes, thin_bytes) = (bytes / 2, bytes / 4);
        let thin = self.lab.thin(thin_bytes)?;
        let attached = |image, throttle| Attached {
            image,
            throttle,
            is_shared: true,
        };
        let mut disks: Vec<Attached<'_>> =
            (0..3).map(|_| attached(&*self.lab.filled, None)).collect();
        disks.push(attached(&self.lab.filled, Some((SLOW_IOPS, slow_bytes))));
        disks.push(attached(&thin, None));
        let mut guest = Guest::boot(self.lab, subject, disks)?;
        let mut disks = guest.disks_of(bytes);
        disks.extend(guest.disks_of(slow_bytes));
        let thin = guest.disks_of(thin_bytes);
        let ([filled, _, _, _], [thin]) = (disks.as_slice(), thin.as_slice()) else {
            return Err(Trouble::Subject(
                "the guest's disks have other sizes".to_owned(),
            ));
        };
        self.two_forms(&mut guest, subject, round, &disks)?;
        let mut jobs = Jobs::new(round);
        jobs.reads("filled", filled, 8, self.effort.seconds);
        jobs.reads("thin", thin, 8, self.effort.seconds);
        let ran = guest.run(jobs)?;
        self.note_jobs(&guest, &ran, subject, round)?;
        self.put_away(guest, subject, round)
    }

    /// One job over all disks, which share its depth; then a job for each, with its part of the depth.
    fn two_forms(
        &mut self,
        guest: &mut Guest,
        subject: &Subject,
        round: u32,
        disks: &[String],
    ) -> Result<(), Trouble> {
        let mut jobs = Jobs::new(round);
        jobs.over_all(disks, TOGETHER_DEPTH, self.effort.seconds);
        let over_all = guest.run(jobs)?;
        let mut jobs = Jobs::new(round);
        jobs.one_each(disks, TOGETHER_DEPTH / 4, self.effort.seconds);
        let one_each = guest.run(jobs)?;
        for (number, name) in disks.iter().enumerate() {
            let number_of = |ran: &Ran, job: usize, field: &str| {
                let job = ran.output.jobs.get(job);
                job.and_then(|(_, figures)| figures[field].as_f64())
                    .unwrap_or(0.0)
            };
            let reads = over_all.output.reads_of_disk(name).unwrap_or(0.0);
            // fio names a disk's requests, not their rate; the job's time is its requests by its rate.
            let [ios, rate] = ["ios", "iops"].map(|field| number_of(&over_all, 0, field));
            let disk = match number {
                3 => "slow disk".to_owned(),
                _ => format!("disk {}", number + 1),
            };
            let is_modelled = number == 3 && subject.is_cleave();
            for (form, iops) in [
                ("one job over all disks", reads * rate / ios.max(1.0)),
                ("a job for each disk", number_of(&one_each, number, "iops")),
            ] {
                let facts =
                    json!({ "disk": disk, "is_modelled": is_modelled, "result": { "iops": iops } });
                self.note(subject, round, form, &facts)?;
            }
        }
        Ok(())
    }

    fn note(
        &mut self,
        subject: &Subject,
        round: u32,
        point: &str,
        facts: &Value,
    ) -> Result<(), Trouble> {
        let line = json!({
            "point": point, "subject": subject.title, "class": subject.class, "round": round,
            "seconds": self.effort.seconds,
        });
        self.run
            .note(SUITE, &merged(line, facts))
            .map_err(Trouble::Harness)
    }

    fn note_jobs(
        &mut self,
        guest: &Guest,
        ran: &Ran,
        subject: &Subject,
        round: u32,
    ) -> Result<(), Trouble> {
        for (name, figures) in ran.output.jobs.iter().filter(|(name, _)| name != "warm") {
            let ios = figures["ios"].as_f64().unwrap_or(0.0).max(1.0);
            let mut result = figures.clone();
            if let Some(stages) = guest.stages(ran, name) {
                result = merged(result, &stages.per_io(ios));
            }
            if let Some([interrupts, _, busy]) = ran.counted(name) {
                let counted =
                    json!({ "interrupts_per_io": interrupts / ios, "guest_busy_ticks": busy });
                result = merged(result, &counted);
            }
            let number_behind = |front: &str| name.strip_prefix(front)?.parse::<u32>().ok();
            let facts = json!({
                "result": result, "dots": ran.dots(name), "rate": number_behind("rate-"),
                "threads": number_behind("threads-"), "commands": guest.commands,
            });
            self.note(subject, round, name, &facts)?;
        }
        Ok(())
    }

    fn put_away(&mut self, guest: Guest, subject: &Subject, round: u32) -> Result<(), Trouble> {
        let Some(complaint) = guest.end()? else {
            return Ok(());
        };
        let text = format!(
            "{}, round {round}: the guest's kernel complained: {complaint}",
            subject.title
        );
        self.run.warn(SUITE, &text).map_err(Trouble::Harness)
    }
}

/// Whose fault ends a turn.
enum Trouble {
    /// The controller's or its daemon's: said in the report, and the run goes on.
    Subject(String),
    /// Ours, or the machine's: nothing more can be written down.
    Harness(String),
}

impl From<String> for Trouble {
    fn from(why: String) -> Trouble {
        Trouble::Subject(why)
    }
}

/// Some per cent of a limit, of two figures: nobody needs more.
fn rate(limit: f64, percent: u32) -> u32 {
    let exact = (limit * f64::from(percent) / 100.0).max(10.0);
    let digit = 10_f64.powf(exact.log10().floor() - 1.0);
    ((exact / digit).round() * digit) as u32
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
