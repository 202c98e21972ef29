//! The rounds: subjects take turns, each boots anew and does all that is asked of it, and the order turns
//! round by round.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::fio::{self, Job};
use super::job::{self, Jobs};
use super::lab::Lab;
use super::options::Plan;
use super::subject::{Attached, BASE, Class, Pace, Subject};
use super::turn::{Ran, Turn};
use crate::report::Run;

/// Under which the raw data says what belongs here.
pub(super) const SUITE: &str = "guest";

/// After so many a controller is left out: each costs its time limit.
const TROUBLES_MAX: u32 = 2;

/// Whose CPU time, interrupts and kicks are taken apart (study B).
const TAKEN_APART: [&str; 5] = [BASE, "qsd", "cleave", "cleave-poll", "cleave-adaptive"];
/// Subjects that are driven by more and more threads (study D).
const BY_THREADS: [&str; 4] = [BASE, "qsd", "cleave", "cleave-adaptive"];
/// Subjects that serve several disks at once (study C).
const TOGETHER: [&str; 3] = ["ahci", BASE, "cleave"];

/// Of the slow disk among several.
pub(super) const SLOW_IOPS: u32 = 200;
/// Requests in flight over all disks, and for each where each has a job.
const TOGETHER_DEPTH: u32 = 16;

/// A run under way.
pub(super) struct Rounds<'a> {
    pub(super) lab: &'a Lab,
    pub(super) plan: &'a Plan,
    pub(super) subjects: Vec<&'static Subject>,
    pub(super) run: &'a mut Run,
    troubles: BTreeMap<&'static str, u32>,
}

impl<'a> Rounds<'a> {
    pub(super) fn new(
        lab: &'a Lab,
        plan: &'a Plan,
        subjects: Vec<&'static Subject>,
        run: &'a mut Run,
    ) -> Rounds<'a> {
        Rounds {
            lab,
            plan,
            subjects,
            run,
            troubles: BTreeMap::new(),
        }
    }

    /// Everything; the caller draws it.
    pub(super) fn measure(&mut self) -> Result<(), String> {
        let rates = self.calibrate()?;
        for round in 1..=self.plan.rounds {
            for subject in self.in_order(round) {
                let seed = round;
                self.attempt(subject, round, |rounds| {
                    rounds.alone(subject, round, &rates, seed)
                })?;
            }
            if round <= self.plan.together_rounds {
                for subject in self.in_order(round) {
                    if TOGETHER.contains(&subject.name) {
                        self.attempt(subject, round, |rounds| rounds.together(subject, round))?;
                    }
                }
            }
            println!("round {round} of {} done", self.plan.rounds);
        }
        Ok(())
    }

    /// How many turns failed.
    pub(super) fn troubles(&self) -> usize {
        self.troubles.values().map(|count| *count as usize).sum()
    }

    /// Forth and back, so that whatever drifts meets each as often early as late.
    fn in_order(&self, round: u32) -> Vec<&'static Subject> {
        let mut order = self.subjects.clone();
        if round.is_multiple_of(2) {
            order.reverse();
        }
        order
    }

    /// A turn; one that fails is written down and costs only itself.
    fn attempt(
        &mut self,
        subject: &'static Subject,
        round: u32,
        turn: impl FnOnce(&mut Self) -> Result<(), Trouble>,
    ) -> Result<(), String> {
        let count = self.troubles.get(subject.name).copied().unwrap_or(0);
        if count >= TROUBLES_MAX {
            return Ok(());
        }
        match turn(self) {
            Ok(()) => Ok(()),
            Err(Trouble::Harness(why)) => Err(why),
            Err(Trouble::Subject(why)) => {
                self.troubles.insert(subject.name, count + 1);
                let left_out = match count + 1 >= TROUBLES_MAX {
                    true => "; it is left out from here on",
                    false => "",
                };
                let text = format!("{}, round {round}: {why}{left_out}", subject.name);
                self.run.note(
                    SUITE,
                    &json!({ "point": "trouble", "subject": subject.name, "round": round, "why": why }),
                )?;
                self.run.warn(SUITE, &text)
            }
        }
    }

    /// Rates in steps up to that of the slowest emulated controller, or of the slowest subject if none is emulated.
    fn calibrate(&mut self) -> Result<Vec<u32>, String> {
        let (emulated, others): (Vec<_>, Vec<_>) = self
            .subjects
            .iter()
            .copied()
            .partition(|one| one.class == Class::Emulated);
        let mut slowest = self.slowest_of(emulated)?;
        if slowest.is_none() {
            slowest = self.slowest_of(others)?;
        }
        let (limit, name) = slowest.ok_or("no controller could be measured at all")?;
        let rates: Vec<u32> = self
            .plan
            .steps
            .iter()
            .map(|step| rate(limit, *step))
            .collect();
        println!(
            "the slowest is {name} with {limit:.0} mixed requests a second; offered are {rates:?}"
        );
        self.run.note(
            SUITE,
            &json!({ "point": "limit", "subject": name, "iops": limit, "offered": rates }),
        )?;
        Ok(rates)
    }

    /// The subject with the fewest mixed requests at 32 in flight, and their rate.
    fn slowest_of(
        &mut self,
        subjects: Vec<&'static Subject>,
    ) -> Result<Option<(f64, &'static str)>, String> {
        let mut slowest: Option<(f64, &'static str)> = None;
        for subject in subjects {
            self.attempt(subject, 0, |rounds| {
                let iops = rounds.limit_of(subject)?;
                if slowest.is_none_or(|(known, _)| iops < known) {
                    slowest = Some((iops, subject.name));
                }
                Ok(())
            })?;
        }
        Ok(slowest)
    }

    fn limit_of(&mut self, subject: &'static Subject) -> Result<f64, Trouble> {
        let mut turn = Turn::boot(self.lab, subject, vec![self.alone_disk()])?;
        let disk = disk_name(&turn, 0)?;
        let mut jobs = Jobs::new(0);
        jobs.warm_up(&disk);
        jobs.mixed(&disk, self.plan.seconds.min(1.5));
        let ran = turn.run(jobs)?;
        turn.end()?;
        let found = ran.jobs.iter().find(|job| job.name == job::MIXED_DEPTH);
        Ok(found.ok_or("fio ran no mixed job")?.iops)
    }

    fn alone_disk(&self) -> Attached<'a> {
        Attached {
            image: &self.lab.filled,
            pace: Pace::Full,
            is_shared: false,
        }
    }

    /// A guest with one disk: offered rates, depth, and what else is asked of this subject.
    fn alone(
        &mut self,
        subject: &'static Subject,
        round: u32,
        rates: &[u32],
        seed: u32,
    ) -> Result<(), Trouble> {
        let mut turn = Turn::boot(self.lab, subject, vec![self.alone_disk()])?;
        let disk = disk_name(&turn, 0)?;
        let seconds = self.plan.seconds;
        let mut jobs = Jobs::new(seed);
        jobs.warm_up(&disk);
        for rate in rates {
            jobs.rate(&disk, *rate, seconds);
        }
        if TAKEN_APART.contains(&subject.name) {
            jobs.reads("reads-1", &disk, 1, seconds);
            jobs.reads("reads-32", &disk, 32, seconds);
        }
        if BY_THREADS.contains(&subject.name) {
            for count in self.plan.threads {
                jobs.threads(&disk, *count, seconds);
            }
        }
        // Last, for this is where a controller that loses requests shows it.
        jobs.mixed(&disk, seconds);
        self.note_turn(&turn, subject, round)?;
        let ran = turn.run(jobs)?;
        for job in &ran.jobs {
            self.note_job(&turn, &ran, job, subject, round)?;
        }
        // They are the same in every round.
        if TAKEN_APART.contains(&subject.name) && round == 1 {
            self.kicks(&mut turn, &disk, subject, round)?;
        }
        self.put_away(turn, subject, round)
    }

    /// Kicks for each request, in a run of their own, for counting takes time.
    fn kicks(
        &mut self,
        turn: &mut Turn,
        disk: &str,
        subject: &Subject,
        round: u32,
    ) -> Result<(), Trouble> {
        if let Err(why) = turn.count_kicks() {
            self.warn(&format!("{}: {why}", subject.name))?;
            return Ok(());
        }
        let mut jobs = Jobs::new(round);
        for depth in [1, 32] {
            jobs.reads(
                &format!("kicks-{depth}"),
                disk,
                depth,
                self.plan.seconds.min(1.0) / 2.0,
            );
        }
        let ran = turn.run(jobs)?;
        for job in &ran.jobs {
            let Some([_, kicks, _]) = ran.counted(&job.name) else {
                continue;
            };
            self.note(&json!({
                "point": job.name, "subject": subject.name, "round": round,
                "kicks_per_io": kicks / job.ios.max(1.0), "ios": job.ios,
            }))?;
        }
        Ok(())
    }

    /// A guest with five disks: three alike, one that is slow, one that was never written.
    fn together(&mut self, subject: &'static Subject, round: u32) -> Result<(), Trouble> {
        // Told apart by their sizes: a guest finds its disks in any order.
        let bytes = self.plan.disk_bytes;
        let (slow_bytes, thin_bytes) = (bytes / 2, bytes / 4);
        let thin = self.lab.thin(thin_bytes)?;
        let attached = |image, pace| Attached {
            image,
            pace,
            is_shared: true,
        };
        let filled = self.lab.filled.as_path();
        let slow = Pace::Throttled {
            iops: SLOW_IOPS,
            bytes: slow_bytes,
        };
        let mut turn = Turn::boot(
            self.lab,
            subject,
            vec![
                attached(filled, Pace::Full),
                attached(filled, Pace::Full),
                attached(filled, Pace::Full),
                attached(filled, slow),
                attached(&thin, Pace::Full),
            ],
        )?;
        self.note_turn(&turn, subject, round)?;
        let mut disks = turn.disks_of(bytes);
        disks.extend(turn.disks_of(slow_bytes));
        let thin = turn.disks_of(thin_bytes);
        let ([.., _], [thin]) = (disks.as_slice(), thin.as_slice()) else {
            return Err(Trouble::from("the guest's disks have other sizes"));
        };
        self.over_all(&mut turn, subject, round, &disks)?;
        self.one_each(&mut turn, subject, round, &disks)?;
        self.thin(&mut turn, subject, round, [&disks[0], thin])?;
        self.put_away(turn, subject, round)
    }

    /// One job over all disks: they share its depth.
    fn over_all(
        &mut self,
        turn: &mut Turn,
        subject: &Subject,
        round: u32,
        disks: &[String],
    ) -> Result<(), Trouble> {
        let mut jobs = Jobs::new(round);
        jobs.over_all(disks, TOGETHER_DEPTH, self.plan.seconds);
        let ran = turn.run(jobs)?;
        let all = ran.jobs.first().ok_or("fio ran no job over all disks")?;
        for (number, name) in disks.iter().enumerate() {
            let reads = fio::reads_of_disk(&ran.result, name).unwrap_or(0.0);
            // fio names a disk's requests, not their rate; the job's time is its requests by its rate.
            let iops = reads * all.iops / all.ios.max(1.0);
            self.note_disk(subject, round, "over-all", number, iops)?;
        }
        Ok(())
    }

    /// A job for each disk, with its share of the depth.
    fn one_each(
        &mut self,
        turn: &mut Turn,
        subject: &Subject,
        round: u32,
        disks: &[String],
    ) -> Result<(), Trouble> {
        let mut jobs = Jobs::new(round);
        jobs.one_each(disks, TOGETHER_DEPTH / 4, self.plan.seconds);
        let ran = turn.run(jobs)?;
        for (number, job) in ran.jobs.iter().enumerate() {
            self.note_disk(subject, round, "one-each", number, job.iops)?;
        }
        Ok(())
    }

    /// A disk that was written all over, and one that never was.
    fn thin(
        &mut self,
        turn: &mut Turn,
        subject: &Subject,
        round: u32,
        [filled, thin]: [&str; 2],
    ) -> Result<(), Trouble> {
        let mut jobs = Jobs::new(round);
        jobs.reads("filled", filled, 8, self.plan.seconds);
        jobs.reads("thin", thin, 8, self.plan.seconds);
        let ran = turn.run(jobs)?;
        for job in &ran.jobs {
            self.note_job(turn, &ran, job, subject, round)?;
        }
        Ok(())
    }

    fn note(&mut self, line: &Value) -> Result<(), Trouble> {
        self.run.note(SUITE, line).map_err(Trouble::Harness)
    }

    fn warn(&mut self, text: &str) -> Result<(), Trouble> {
        self.run.warn(SUITE, text).map_err(Trouble::Harness)
    }

    fn put_away(&mut self, turn: Turn, subject: &Subject, round: u32) -> Result<(), Trouble> {
        if let Some(complaint) = turn.end()? {
            self.warn(&format!(
                "{}, round {round}: the guest's kernel complained: {complaint}",
                subject.name
            ))?;
        }
        Ok(())
    }

    fn note_turn(&mut self, turn: &Turn, subject: &Subject, round: u32) -> Result<(), Trouble> {
        self.note(&json!({
            "point": "turn", "subject": subject.name, "round": round, "commands": turn.commands,
            "disks": turn.disks,
        }))
    }

    fn note_disk(
        &mut self,
        subject: &Subject,
        round: u32,
        form: &str,
        number: usize,
        iops: f64,
    ) -> Result<(), Trouble> {
        self.note(&json!({
            "point": form, "subject": subject.name, "round": round, "disk": number,
            "is_slow": number == 3, "is_modelled": number == 3 && !subject.is_throttled_by_qemu(),
            "iops": iops,
        }))
    }

    fn note_job(
        &mut self,
        turn: &Turn,
        ran: &Ran,
        job: &Job,
        subject: &Subject,
        round: u32,
    ) -> Result<(), Trouble> {
        if job.name == "warm" {
            return Ok(());
        }
        let mut line = json!({
            "point": job.name, "subject": subject.name, "class": subject.class.name(), "round": round,
            "ios": job.ios, "iops": job.iops, "bytes_per_s": job.bytes_per_s,
            "mean_us": job.mean_us, "p50_us": job.p50_us, "p99_us": job.p99_us,
            "p999_us": job.p999_us, "max_us": job.max_us,
        });
        let mut put = |name: &str, value: Value| {
            if let Some(line) = line.as_object_mut() {
                line.insert(name.to_owned(), value);
            }
        };
        if let Some(stages) = turn.stages(ran, &job.name) {
            put("cpu_per_io", stages.per_io(job.ios));
            put("watched_s", json!(stages.seconds));
        }
        if let Some([interrupts, _, busy]) = ran.counted(&job.name) {
            put("interrupts_per_io", json!(interrupts / job.ios.max(1.0)));
            put("guest_busy_ticks", json!(busy));
        }
        let dots: Vec<Value> = ran
            .dots(&job.name)
            .iter()
            .map(|dot| json!([dot.ms, dot.us]))
            .collect();
        if !dots.is_empty() {
            put("dots", json!(dots));
        }
        self.note(&line)
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

impl From<&str> for Trouble {
    fn from(why: &str) -> Trouble {
        Trouble::Subject(why.to_owned())
    }
}

fn disk_name(turn: &Turn, number: usize) -> Result<String, String> {
    let (name, _) = turn
        .disks
        .get(number)
        .ok_or("the guest has too few disks")?;
    Ok(name.clone())
}

/// Some per cent of a limit, of two figures: nobody needs more.
fn rate(limit: f64, percent: u32) -> u32 {
    let exact = (limit * f64::from(percent) / 100.0).max(10.0);
    let digit = 10_f64.powf(exact.log10().floor() - 1.0);
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a float's cast saturates"
    )]
    let rounded = ((exact / digit).round() * digit) as u32;
    rounded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offered_rates_have_two_figures() {
        let table = [
            (1437.0, 100, 1400),
            (1437.0, 33, 470),
            (3.0, 50, 10),
            (98_765.0, 67, 66_000),
        ];
        for (limit, percent, offered) in table {
            assert_eq!(rate(limit, percent), offered);
        }
    }
}
