//! The promises to the guest: which values a sector may hold.

use crate::log::{Event, RequestKind, Value};
use crate::{Log, Number};

/// The value of a sector before the first write, as if it had been written and flushed long before.
const INITIAL: usize = usize::MAX;
/// A request that has not completed, or has failed: no request was submitted after it.
const NEVER: usize = usize::MAX;

#[derive(Debug, Clone, Copy)]
struct Candidate {
    value: Value,
    /// The request that wrote it.
    request: usize,
}

/// For each of the guest's sectors, the values that it may hold.
#[derive(Debug)]
struct Candidates(Vec<Vec<Candidate>>);

/// Submission and completion of a request, as indices of events.
#[derive(Debug, Clone, Copy)]
struct Times {
    asked: usize,
    told: usize,
}

/// The promises at one moment of a log.
#[derive(Debug)]
pub(crate) struct Model {
    /// All values that a crash may leave, and that a reader may see without a crash.
    crash: Candidates,
    live: Candidates,
    times: Vec<Times>,
    /// Completed and not safe yet.
    unsafe_yet: Vec<usize>,
    write_through: bool,
}

impl Candidates {
    fn new(sectors: u64) -> Candidates {
        let initial = Candidate {
            value: 0,
            request: INITIAL,
        };
        Candidates(vec![vec![initial]; sectors as usize])
    }

    #[inline]
    fn allow(&self, sector: usize, value: Value) -> bool {
        self.0[sector].iter().any(|one| one.value == value)
    }

    fn add(&mut self, log: &Log, request: usize) {
        let asked = &log.requests[request];
        for (sector, value) in (asked.sector as usize..).zip(&asked.values) {
            self.0[sector].push(Candidate {
                value: *value,
                request,
            });
        }
    }

    /// Values whose writes completed before `request` was submitted cannot come back.
    fn promise(&mut self, log: &Log, request: usize, times: &[Times]) {
        let asked = &log.requests[request];
        let is_older = |one: &Candidate| match one.request {
            INITIAL => true,
            other => times[other].told < times[request].asked,
        };
        let sectors = asked.sector as usize..;
        for (sector, _) in sectors.zip(&asked.values) {
            self.0[sector].retain(|one| !is_older(one));
        }
    }
}

impl Model {
    pub(crate) fn new(log: &Log) -> Model {
        Model {
            crash: Candidates::new(log.layout.sectors),
            live: Candidates::new(log.layout.sectors),
            times: Vec::with_capacity(log.requests.len()),
            unsafe_yet: Vec::new(),
            write_through: false,
        }
    }

    /// Applies an event of the guest; returns whether it adds a promise.
    pub(crate) fn apply(&mut self, log: &Log, at: usize, event: Event) -> bool {
        match event {
            Event::Asked(request) => {
                self.times.push(Times {
                    asked: at,
                    told: NEVER,
                });
                self.crash.add(log, request);
                self.live.add(log, request);
                false
            }
            Event::Told { request, ok: true } => {
                self.times[request].told = at;
                self.live.promise(log, request, &self.times);
                self.answered(log, request)
            }
            Event::WriteThrough(on) => {
                self.write_through = on;
                false
            }
            // A failed request may or may not have left its values, which the model allows already.
            Event::Told { ok: false, .. }
            | Event::Began(_)
            | Event::Applied(_)
            | Event::Ended(_) => false,
        }
    }

    fn answered(&mut self, log: &Log, request: usize) -> bool {
        match log.requests[request].kind {
            RequestKind::Flush => {
                let (crash, times) = (&mut self.crash, &self.times);
                let before = self.unsafe_yet.len();
                self.unsafe_yet.retain(|one| {
                    let is_covered = times[*one].told < times[request].asked;
                    if is_covered {
                        crash.promise(log, *one, times);
                    }
                    !is_covered
                });
                before > self.unsafe_yet.len()
            }
            RequestKind::Write | RequestKind::Zero if self.write_through => {
                self.crash.promise(log, request, &self.times);
                true
            }
            _ => {
                self.unsafe_yet.push(request);
                false
            }
        }
    }

    /// Number of requests so far.
    pub(crate) fn asked(&self) -> usize {
        self.times.len()
    }

    /// Returns true if a crash at this moment may leave this value.
    #[inline]
    pub(crate) fn may_be_left(&self, sector: usize, value: Value) -> bool {
        self.crash.allow(sector, value)
    }

    /// Returns true if a reader may see this value now.
    #[inline]
    pub(crate) fn may_be_read(&self, sector: usize, value: Value) -> bool {
        self.live.allow(sector, value)
    }

    /// The permitted contents of a sector in words: the requests that wrote them.
    pub(crate) fn tell(&self, sector: usize, after_crash: bool) -> String {
        let candidates = if after_crash { &self.crash } else { &self.live };
        let words = candidates.0[sector].iter().map(|one| match one.request {
            INITIAL => "its first content".to_owned(),
            request => format!("that of {:?}", Number(request)),
        });
        words.collect::<Vec<_>>().join(" or ")
    }
}
