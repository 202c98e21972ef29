//! How long it takes until there is something to do again, learnt: a distribution, not a mean. In bursts
//! nearly all gaps are short and a few are very long, and their mean is one that never occurs.

/// Buckets per doubling.
const STEPS: u64 = 8;
const STEP_BITS: u32 = STEPS.ilog2();
/// Below this all gaps are one: 256 ns.
const FIRST_BITS: u32 = 8;
/// From here on they are one again: 33 ms.
const LAST_BITS: u32 = 25;
const BUCKETS: usize = 2 + ((LAST_BITS - FIRST_BITS) as usize) * STEPS as usize;
/// Observations kept; older ones fade by half.
const KEPT: u32 = 1024;
/// A gap of which there were fewer than this lately is an accident.
const SEEN_MIN: u32 = 3;

/// Longest that is spun for one event: what a wake-up saved may cost.
pub(crate) const HORIZON_NS: u64 = 400_000;
/// A device that takes as many wake-ups as this or more is slept for: each response is longer for that by
/// a sixteenth, or an eighth where an interrupt of the disk takes twice as long to wake somebody as the timer that
/// was measured; and a spin would cost many times what the request does.
const DEVICE_WAKES: u64 = 16;
/// With a device that takes as many as this the guest is slept for as well: his kick, the wake-up after it and the
/// one after the device make each response longer by a tenth at most.
const GUEST_WAKES: u64 = 32;
/// A guest is dozed for from the start when at least so many wake-ups are slept: a sleep ends late now and
/// then, and in short gaps that is much of a response.
const GUEST_DOZE_WAKES: u64 = 32;
/// Longest gap whose end is foreseen.
const FORESIGHT_NS: u64 = 24_000_000;
/// Shortest spin worth beginning: the clock is read less often than that.
const SPIN_MIN_NS: u64 = 20_000;

/// What to do in a gap, counted from its beginning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Spin so long; 0: not at all.
    pub(crate) spin_ns: u64,
    /// Then sleep until the first of these and spin until the second, where the end of the gap can be
    /// foreseen.
    pub(crate) doze: Option<(u64, u64)>,
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// The guest: its request is late by as much as we are.
    Guest,
    /// The device: late is late by a part of what it takes.
    Device,
}

/// Gaps of one kind.
#[derive(Debug, Clone)]
pub(crate) struct Gaps {
    counts: [u16; BUCKETS],
    total: u32,
    /// Observations since the plan was made.
    fresh: u32,
}

impl Gaps {
    pub(crate) fn new() -> Gaps {
        Gaps {
            counts: [0; BUCKETS],
            total: 0,
            fresh: 0,
        }
    }

    /// A gap of this length has ended; `true`: time for another plan.
    #[inline]
    pub(crate) fn note(&mut self, gap_ns: u64) -> bool {
        if let Some(count) = self.counts.get_mut(bucket(gap_ns)) {
            *count = count.saturating_add(1);
        }
        self.total += 1;
        self.fresh = self.fresh.saturating_add(1);
        if self.total >= KEPT {
            self.fade();
        }
        // Often at first, when each says much.
        self.fresh >= (self.total / 16).clamp(2, 32)
    }

    #[cold]
    fn fade(&mut self) {
        for count in &mut self.counts {
            *count /= 2;
        }
        self.total = self.counts.iter().map(|count| u32::from(*count)).sum();
    }

    /// What costs least if gaps go on as they were. A wake-up counts as [`HORIZON_NS`] of spinning: that
    /// is what it may cost to be rid of one, unless it is a small part of what a response takes anyway.
    /// `takes_ns`: the device's mean response time, 0 where it is not known.
    pub(crate) fn plan(&mut self, waiting: Waiting, takes_ns: u64, wake_ns: u64) -> Plan {
        self.fresh = 0;
        if self.total == 0 {
            // Nothing known: as long as a wake-up takes is never more than twice too much.
            let spin_ns = wake_ns.clamp(SPIN_MIN_NS, HORIZON_NS);
            return Plan {
                spin_ns,
                doze: None,
            };
        }
        let spin_below = |wakes| match takes_ns < wakes * wake_ns {
            true => self.spin_ns(wake_ns),
            false => 0,
        };
        match waiting {
            // Who comes earlier than expected is served as ever, for he kicks; so it is worth being awake
            // for half of them.
            Waiting::Guest => {
                let spin_ns = spin_below(GUEST_WAKES);
                let window = |from_ns, early| self.window(from_ns, 3 * wake_ns, wake_ns, early);
                match window(0, (|total| total / 64) as fn(u32) -> u32) {
                    // Requests that come as regularly as that are met awake for a part of the CPU time. The
                    // few that come early have to wait for a wake-up that a spin would have saved them.
                    Some(doze) if doze.0 >= GUEST_DOZE_WAKES * wake_ns => Plan {
                        spin_ns: 0,
                        doze: Some(doze),
                    },
                    _ => Plan {
                        spin_ns,
                        doze: window(spin_ns, total_sixteenth)
                            .or_else(|| window(spin_ns, |total| total / 4))
                            .or_else(|| window(spin_ns, |total| total / 2)),
                    },
                }
            }
            Waiting::Device => {
                let spin_ns = spin_below(DEVICE_WAKES);
                let window = |from_ns| {
                    self.window(from_ns, 2 * wake_ns, wake_ns, total_sixteenth)
                        // A wake-up saved is a small part of such a gap, so the spin must not be a large one.
                        .filter(|(from_ns, to_ns)| 3 * (to_ns - from_ns - wake_ns) <= *to_ns)
                };
                // One that is always slow is slept for from the start.
                match window(0) {
                    Some(doze) if doze.0 >= 3 * wake_ns => Plan {
                        spin_ns: 0,
                        doze: Some(doze),
                    },
                    _ => Plan {
                        spin_ns,
                        doze: window(spin_ns).filter(|doze| doze.1 <= 4 * HORIZON_NS),
                    },
                }
            }
        }
    }

    /// How long to spin from the beginning.
    fn spin_ns(&self, wake_ns: u64) -> u64 {
        let total = u64::from(self.total);
        let (mut best_cost, mut best_ns) = (total * HORIZON_NS, 0);
        let (mut seen, mut spun) = (0, 0);
        for (at, count) in self.counts.iter().enumerate() {
            let upper_ns = lower_ns(at + 1);
            if upper_ns > HORIZON_NS {
                break;
            }
            if *count == 0 {
                continue;
            }
            seen += u64::from(*count);
            spun += u64::from(*count) * upper_ns;
            let cost = spun + (total - seen.min(total)) * (upper_ns + HORIZON_NS);
            if cost < best_cost {
                (best_cost, best_ns) = (cost, upper_ns);
            }
        }
        match best_ns {
            0 => 0,
            // Somewhat more than was seen: gaps vary, and what a little more costs is counted.
            best_ns => (best_ns + best_ns / 4).clamp(wake_ns.max(SPIN_MIN_NS), HORIZON_NS),
        }
    }

    /// When gaps longer than `from_ns` end: between these two, if that can be told. The first is earlier by
    /// a `margin`. `early` of them, of so many, may end before.
    fn window(
        &self,
        from_ns: u64,
        margin_ns: u64,
        wake_ns: u64,
        early: fn(u32) -> u32,
    ) -> Option<(u64, u64)> {
        let first = bucket(from_ns) + usize::from(from_ns > 0);
        let later = self.counts.get(first..)?;
        let total: u32 = later.iter().map(|count| u32::from(*count)).sum();
        if total < SEEN_MIN {
            return None;
        }
        let begin = first + skip(later.iter(), early(total));
        let end = first + later.len() - skip(later.iter().rev(), (total + 4) / 8);
        let begin_ns = lower_ns(begin);
        // A little more, for what lies at the very end of its bucket.
        let to_ns = lower_ns(end).saturating_add(lower_ns(end) / 16);
        // Woken earlier than needed by as much as a wake-up takes, and by its spread; somewhat more after a
        // long sleep, as the deeper the CPU sleeps the longer it takes to wake.
        let wake_at_ns = begin_ns.saturating_sub(margin_ns.max(begin_ns / 16));
        let is_foreseen = to_ns <= FORESIGHT_NS && 3 * begin_ns >= 2 * to_ns;
        let pays = 3 * wake_at_ns >= to_ns && wake_at_ns >= from_ns + 2 * wake_ns;
        (is_foreseen && pays).then_some((wake_at_ns, to_ns))
    }
}

/// Accidents that a device is allowed.
fn total_sixteenth(total: u32) -> u32 {
    total / 16
}

/// How many buckets hold no more than `few` observations together.
fn skip<'a>(counts: impl Iterator<Item = &'a u16>, few: u32) -> usize {
    let mut seen = 0;
    counts
        .take_while(|count| {
            seen += u32::from(**count);
            seen <= few
        })
        .count()
}

fn bucket(gap_ns: u64) -> usize {
    let Some(log) = gap_ns.checked_ilog2().filter(|log| *log >= FIRST_BITS) else {
        return 0;
    };
    if log >= LAST_BITS {
        return BUCKETS - 1;
    }
    let step = (gap_ns >> (log - STEP_BITS)) & (STEPS - 1);
    1 + (log - FIRST_BITS) as usize * STEPS as usize + step as usize
}

/// Where a bucket begins; beyond the last it never does.
fn lower_ns(at: usize) -> u64 {
    match at {
        0 => 0,
        at if at >= BUCKETS => u64::MAX,
        at => {
            let log = FIRST_BITS + ((at - 1) as u64 / STEPS) as u32;
            let step = (at - 1) as u64 % STEPS;
            (STEPS + step) << (log - STEP_BITS)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;
    const WAKE: u64 = 30 * US;

    fn learnt(gaps: impl IntoIterator<Item = u64>) -> Gaps {
        let mut learnt = Gaps::new();
        for gap_ns in gaps {
            learnt.note(gap_ns);
        }
        learnt
    }

    #[test]
    fn every_length_lies_in_its_bucket() {
        for gap_ns in
            (0..40).flat_map(|log| [(1u64 << log) - 1, 1 << log, (1 << log) + 7, 3 << log])
        {
            let at = bucket(gap_ns);
            assert!(at < BUCKETS);
            assert!(
                lower_ns(at) <= gap_ns && gap_ns < lower_ns(at + 1),
                "{gap_ns}"
            );
        }
    }

    /// Every fifth is a third shorter than the others, so that their end cannot be foreseen.
    fn uneven(gap_us: u64) -> Gaps {
        learnt((0..100).map(|n| gap_us * US - u64::from(n % 5 == 0) * gap_us * US / 3))
    }

    #[test]
    fn gaps_are_spun_through_up_to_the_horizon() {
        for (gap_us, spun) in [
            (1, true),
            (10, true),
            (100, true),
            (330, true),
            (500, false),
            (900, false),
        ] {
            let plan = uneven(gap_us).plan(Waiting::Guest, 0, WAKE);
            assert_eq!(plan.spin_ns > gap_us * US, spun, "{gap_us} us: {plan:?}");
        }
    }

    #[test]
    fn even_gaps_are_dozed_through_where_that_saves_something() {
        for (gap_us, wake_us, dozed) in [
            (333, 3, true),
            (333, 8, true),
            (333, 20, false),
            (125, 3, true),
            (66, 3, false),
            (5, 3, false),
        ] {
            let plan = learnt([gap_us * US; 100]).plan(Waiting::Guest, 0, wake_us * US);
            let (slept, until) = plan.doze.unwrap_or_default();
            assert_eq!(plan.spin_ns == 0, dozed, "{gap_us} us, {wake_us}: {plan:?}");
            if dozed {
                let gap_ns = gap_us * US;
                assert!(
                    slept + 3 * wake_us * US <= gap_ns && gap_ns < until,
                    "{plan:?}"
                );
                assert!(slept > gap_ns / 2, "{plan:?}");
            }
        }
    }

    #[test]
    fn of_bursts_the_short_gaps_are_spun_and_the_long_one_is_slept_until_shortly_before_its_end() {
        // 1 ms at 100/ms, 9 ms of nothing.
        let gaps = (0..1000).map(|n| if n % 100 == 99 { 9000 * US } else { 10 * US });
        let plan = learnt(gaps).plan(Waiting::Guest, 0, WAKE);
        assert!((10 * US..=40 * US).contains(&plan.spin_ns), "{plan:?}");
        let (from_ns, to_ns) = plan.doze.unwrap();
        assert!(
            (7000 * US..9000 * US).contains(&from_ns) && to_ns > 9000 * US,
            "{plan:?}"
        );
    }

    #[test]
    fn hiccups_between_do_not_hide_when_bursts_come() {
        let gap = |n: u64| match n % 100 {
            99 => 9000 * US,
            50 => 60 * US + n * US / 10,
            _ => 10 * US,
        };
        let plan = learnt((0..1000).map(gap)).plan(Waiting::Guest, 0, WAKE);
        let (from_ns, to_ns) = plan.doze.unwrap();
        assert!(
            (7000 * US..9000 * US).contains(&from_ns) && to_ns > 9000 * US,
            "{plan:?}"
        );
    }

    #[test]
    fn what_cannot_be_foreseen_is_not_dozed_for() {
        // As Poisson arrivals have them: lengths from nothing to many times their mean.
        let gaps = (1..500u64).map(|n| (n * 7919 % 500) * 20 * US);
        assert_eq!(learnt(gaps).plan(Waiting::Guest, 0, WAKE).doze, None);
    }

    #[test]
    fn a_slow_and_even_device_is_dozed_for_and_a_fast_one_spun_for() {
        let slow =
            learnt((0..200).map(|n| (360 + n % 5) * US)).plan(Waiting::Device, 360 * US, WAKE);
        assert_eq!(slow.spin_ns, 0);
        let (from_ns, to_ns) = slow.doze.unwrap();
        assert!(
            from_ns < 320 * US && from_ns > 200 * US && to_ns > 364 * US,
            "{slow:?}"
        );
        let fast = learnt([80 * US; 200]).plan(Waiting::Device, 80 * US, WAKE);
        assert!(fast.spin_ns > 80 * US && fast.doze.is_none(), "{fast:?}");
        let disk = learnt((1..200).map(|n| 2000 * US + n * n * US)).plan(
            Waiting::Device,
            15_000 * US,
            WAKE,
        );
        assert_eq!(disk, Plan::default(), "milliseconds, and scattered");
    }

    /// As at depth 32, where most of what is in flight ends at once and the rest dribbles in.
    #[test]
    fn a_device_that_takes_many_wake_ups_is_not_spun_for_even_where_gaps_are_short() {
        let gap = |n: u64| {
            if n.is_multiple_of(2) {
                4 * US
            } else {
                (180 + n * 37 % 300) * US
            }
        };
        let mut gaps = learnt((0..400).map(gap));
        let cheap = gaps.plan(Waiting::Device, 320 * US, 3 * US);
        assert_eq!(cheap, Plan::default());
        let dear = gaps.plan(Waiting::Device, 320 * US, 60 * US);
        assert!(dear.spin_ns > 0, "{dear:?}");
    }

    #[test]
    fn a_guest_on_a_device_that_takes_very_many_wake_ups_is_not_spun_for() {
        let mut gaps = learnt([8 * US; 400]);
        for (takes_us, spun) in [
            (0, true),
            (30, true),
            (90, true),
            (100, false),
            (300, false),
        ] {
            let plan = gaps.plan(Waiting::Guest, takes_us * US, 3 * US);
            assert_eq!(plan.spin_ns > 0, spun, "{takes_us} us: {plan:?}");
        }
    }

    /// Where spinning is not considered, no plan is asked for, for as long as the daemon runs.
    #[test]
    fn any_number_of_gaps_is_noted_without_a_plan() {
        let mut gaps = learnt([8 * US; 400]);
        gaps.fresh = u32::MAX;
        assert!(gaps.note(8 * US));
    }

    #[test]
    fn nothing_known_is_spun_for_as_long_as_a_wake_up_takes() {
        let plan = Gaps::new().plan(Waiting::Guest, 0, WAKE);
        assert_eq!((plan.spin_ns, plan.doze), (WAKE, None));
    }
}
