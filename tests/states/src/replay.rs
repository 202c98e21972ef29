//! The states that a crash may leave, built from the log and compared with the model.

use crate::Log;
use crate::log::{Event, IoKind, RequestKind, Value};
use crate::model::Model;

/// How many states to build.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    /// Random states at each moment at which the disk may lose something new, besides the state in which it loses
    /// everything that it may.
    pub subsets: usize,
    /// A layer above the recorded disk (the page cache) serves readers, so the check that completed writes are
    /// readable is skipped.
    pub cached_above: bool,
}

/// Counts of the checks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Checked {
    /// States of the disk that were compared with the model, sector by sector.
    pub states: u64,
    /// States, of those, that differ from what a reader would have seen at that moment.
    pub lossy: u64,
    /// States, of those, with a torn write.
    pub torn: u64,
    /// Flushes that completed on a leg.
    pub epochs: u64,
    /// How often the guest was promised that something is safe.
    pub promises: u64,
}

/// Builds the states after each event of the log: the one in which the disk has lost everything that it may lose, and
/// random ones (`below(n)`: a number from 0 to below `n`). `Err` names the first that breaks a promise.
pub fn check(
    log: &Log,
    extent: Extent,
    below: &mut dyn FnMut(u64) -> u64,
) -> Result<Checked, String> {
    let mut replay = Replay::new(log);
    for (at, event) in log.events.iter().enumerate() {
        let may_lose = replay.disk.apply(log, *event);
        let is_promise = replay.model.apply(log, at, *event);
        replay.checked.promises += u64::from(is_promise);
        if let (Event::Told { request, ok: true }, false) = (*event, extent.cached_above) {
            replay.look(at, request)?;
        }
        if is_promise || replay.disk.kept {
            replay.compare_least(at)?;
            replay.disk.kept = false;
        }
        if is_promise || may_lose {
            for _ in 0..extent.subsets {
                replay.compare_subset(at, below)?;
            }
        }
    }
    if !extent.cached_above {
        replay.look_at_all(log.events.len())?;
    }
    Ok(replay.checked)
}

/// Contents of a sector and when they were applied; later contents replace earlier ones.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    value: Value,
    step: u64,
}

/// A write that the disk has, or is about to have, and may lose.
#[derive(Debug)]
struct Pending {
    io: usize,
    /// When it was applied; `None`: it is in flight.
    step: Option<u64>,
    ended: bool,
}

/// The disk at one moment of the log.
#[derive(Debug)]
struct Disk {
    /// The disk without everything that it may lose.
    least: Vec<Cell>,
    /// The disk as readers see it.
    live: Vec<Value>,
    pending: Vec<Pending>,
    /// Flushes in flight, and the writes that they cover.
    flushes: Vec<(usize, Vec<usize>)>,
    step: u64,
    epochs: u64,
    /// `least` has changed since it was last compared.
    kept: bool,
}

struct Replay<'a> {
    log: &'a Log,
    disk: Disk,
    model: Model,
    /// The recorded position of each of the guest's sectors.
    places: Vec<usize>,
    /// Buffer for a state.
    state: Vec<Cell>,
    checked: Checked,
}

impl Disk {
    fn new(sectors: u64) -> Disk {
        Disk {
            least: vec![Cell::default(); sectors as usize],
            live: vec![0; sectors as usize],
            pending: Vec::new(),
            flushes: Vec::new(),
            step: 0,
            epochs: 0,
            kept: false,
        }
    }

    /// Applies an event of the disk; returns whether it may lose more now.
    fn apply(&mut self, log: &Log, event: Event) -> bool {
        match event {
            Event::Began(io) => {
                self.begin(log, io);
                false
            }
            Event::Applied(io) => {
                self.step += 1;
                let pending = self.pending.iter_mut().find(|pending| pending.io == io);
                pending
                    .into_iter()
                    .for_each(|one| one.step = Some(self.step));
                let sectors = log.ios[io].sector as usize..;
                for (sector, value) in sectors.zip(&log.ios[io].values) {
                    self.live[sector] = *value;
                }
                true
            }
            Event::Ended(io) => {
                self.end(log, io);
                false
            }
            _ => false,
        }
    }

    fn begin(&mut self, log: &Log, io: usize) {
        let IoKind::Flush { leg } = log.ios[io].kind else {
            return self.pending.push(Pending {
                io,
                step: None,
                ended: false,
            });
        };
        let is_on_leg = |io: usize| log.ios[io].sector / log.layout.leg_sectors == leg;
        let covered = self
            .pending
            .iter()
            .filter(|one| one.ended && is_on_leg(one.io));
        self.flushes.push((io, covered.map(|one| one.io).collect()));
    }

    fn end(&mut self, log: &Log, io: usize) {
        match log.ios[io].kind {
            IoKind::Flush { .. } => {
                let at = self.flushes.iter().position(|(flush, _)| *flush == io);
                let Some(at) = at else { return };
                let (_, covered) = self.flushes.swap_remove(at);
                self.epochs += 1;
                self.keep(log, &covered);
            }
            IoKind::Write { fua: true } => self.keep(log, &[io]),
            IoKind::Write { fua: false } | IoKind::Discard => {
                let pending = self.pending.iter_mut().find(|pending| pending.io == io);
                pending.into_iter().for_each(|one| one.ended = true);
            }
        }
    }

    /// From here on these writes cannot be lost.
    fn keep(&mut self, log: &Log, ios: &[usize]) {
        let Disk { least, pending, .. } = self;
        pending.retain(|one| {
            let is_kept = ios.contains(&one.io);
            if is_kept {
                put(least, log, one, |_| true);
            }
            !is_kept
        });
        self.kept = true;
    }
}

/// Stores the chosen sectors of a write on a disk. Writes in flight are applied last.
fn put(cells: &mut [Cell], log: &Log, write: &Pending, mut chosen: impl FnMut(usize) -> bool) {
    let io = &log.ios[write.io];
    let step = write.step.unwrap_or(u64::MAX);
    let (from, to) = (io.sector as usize, io.sector as usize + io.values.len());
    for (nth, (cell, value)) in cells[from..to].iter_mut().zip(&io.values).enumerate() {
        if step > cell.step && chosen(nth) {
            *cell = Cell {
                value: *value,
                step,
            };
        }
    }
}

impl<'a> Replay<'a> {
    fn new(log: &'a Log) -> Replay<'a> {
        let layout = log.layout;
        let sectors = layout.legs * layout.leg_sectors;
        Replay {
            log,
            disk: Disk::new(sectors),
            model: Model::new(log),
            places: (0..layout.sectors)
                .map(|sector| layout.place(sector) as usize)
                .collect(),
            state: Vec::with_capacity(sectors as usize),
            checked: Checked::default(),
        }
    }

    /// Compares the state in which the disk has lost everything that it may.
    fn compare_least(&mut self, at: usize) -> Result<(), String> {
        self.state.clone_from(&self.disk.least);
        self.compare(at, "after it lost everything that it may")
    }

    /// Compares a state in which the disk has lost some of that: either the writes up to a point of the epoch
    /// survive, with the last one torn, or any subset of the writes does, whole or torn.
    fn compare_subset(
        &mut self,
        at: usize,
        below: &mut dyn FnMut(u64) -> u64,
    ) -> Result<(), String> {
        self.state.clone_from(&self.disk.least);
        let count = self.disk.pending.len() as u64;
        let (is_prefix, cut, tears) = (below(3) == 0, below(count + 1), below(3));
        let mut torn = false;
        for (nth, write) in (0..).zip(&self.disk.pending) {
            let is_there = if is_prefix { nth <= cut } else { below(2) == 0 };
            let is_torn = write.step.is_none()
                || match is_prefix {
                    true => nth == cut,
                    false => below(3) < tears,
                };
            if is_there && is_torn {
                torn = true;
                put(&mut self.state, self.log, write, |_| below(2) == 0);
            } else if is_there {
                put(&mut self.state, self.log, write, |_| true);
            }
        }
        self.checked.torn += u64::from(torn);
        self.compare(at, "after it lost a part of what it may")
    }

    fn compare(&mut self, at: usize, which: &str) -> Result<(), String> {
        self.checked.states += 1;
        self.checked.epochs = self.disk.epochs;
        let mut is_lossy = false;
        for (sector, place) in self.places.iter().enumerate() {
            let value = self.state[*place].value;
            is_lossy |= value != self.disk.live[*place];
            if !self.model.may_be_left(sector, value) {
                return Err(self.tell(at, sector, value, true, which));
            }
        }
        self.checked.lossy += u64::from(is_lossy);
        Ok(())
    }

    /// A completed request has been applied, even without a crash.
    fn look(&self, at: usize, request: usize) -> Result<(), String> {
        let asked = &self.log.requests[request];
        if asked.kind == RequestKind::Flush {
            return Ok(());
        }
        let from = asked.sector as usize;
        self.look_in(at, from..from + asked.values.len())
    }

    fn look_at_all(&self, at: usize) -> Result<(), String> {
        self.look_in(at, 0..self.places.len())
    }

    fn look_in(&self, at: usize, mut sectors: std::ops::Range<usize>) -> Result<(), String> {
        let value = |sector: usize| self.disk.live[self.places[sector]];
        match sectors.find(|sector| !self.model.may_be_read(*sector, value(*sector))) {
            Some(sector) => Err(self.tell(at, sector, value(sector), false, "as readers see it")),
            None => Ok(()),
        }
    }

    fn tell(
        &self,
        at: usize,
        sector: usize,
        value: Value,
        after_crash: bool,
        which: &str,
    ) -> String {
        let asked = self
            .log
            .requests
            .iter()
            .enumerate()
            .take(self.model.asked());
        let writers = asked.filter(|(_, request)| {
            let inside = sector.checked_sub(request.sector as usize);
            inside.and_then(|inside| request.values.get(inside)) == Some(&value)
        });
        let writers: Vec<_> = writers.map(|(number, _)| number).collect();
        let event = match at.checked_sub(1).and(self.log.events.get(at)) {
            Some(event) => format!("{event:?}"),
            None => "its end".to_owned(),
        };
        format!(
            "after event {at} ({event}) the disk {which} holds in sector {sector} what requests {writers:?} wrote \
             (none: zeroes at first, or bytes of nobody), and should hold {}",
            self.model.tell(sector, after_crash),
        )
    }
}
