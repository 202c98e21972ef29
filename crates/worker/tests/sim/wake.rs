//! A guest that acts at any moment of a lap, and kicks only when it is asked to: whatever the worker does
//! then, it does not fall asleep on a request, and an idle one sleeps without a timer.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_blk::spec::feature;
use cleave_blk::{Op, Plan};
use cleave_engine::{Done, Reactor, Store, Wait};
use cleave_guest::Epoch;
use cleave_worker::{
    Coalesce, Completion, Control, Device, Totals, Tuning, VringStart, Worker, reactor,
};

use crate::driver::{Ask, Driver, SIZE};
use crate::{FEATURES, Random, device, event};

/// Moments at which the guest may act, over all runs.
const MOMENTS: u64 = 1_000_000;

/// The guest, and what the worker sees of it.
struct World {
    driver: Driver,
    random: Random,
    event_idx: bool,
    moments: u64,
    /// Until then the guest asks for nothing by itself: long enough for a worker to notice.
    lull: u64,
    /// The guest has kicked, and that has ended no sleep yet.
    kicked: bool,
    /// The guest says no more: what is under way ends, and then nothing happens.
    quiet: bool,
    /// Sleeps without an end.
    sleeps: u64,
    dozes: u64,
    /// Sleeps on what never ends, and how long they were to be.
    naps: Vec<Duration>,
}

impl World {
    /// Something may happen now.
    fn moment(&mut self) {
        self.moments += 1;
        if self.quiet || self.moments < self.lull || self.random.below(8) > 0 {
            return;
        }
        if self.random.below(64) == 0 {
            self.lull = self.moments + 2000;
        }
        self.driver.collect(|_| 0);
        self.add();
    }

    /// One more request, and a kick if one is wanted.
    fn add(&mut self) {
        if self.driver.in_flight() < usize::from(SIZE) / 3
            && self.driver.submit(&Ask::flush()).is_some()
        {
            self.kicked |= self.driver.wants_kick(self.event_idx);
        }
    }
}

/// A disk that lets the guest act whenever the worker asks it for anything.
struct Stage {
    world: Rc<RefCell<World>>,
    flying: Vec<u64>,
    ends: Ends,
}

/// How the worker hears of the end of what flies.
#[derive(Clone, Copy, PartialEq)]
enum Ends {
    Told,
    /// It has to ask.
    Asked,
    /// It has to ask, and there is none.
    Never,
}

impl Stage {
    fn moment(&self) {
        self.world.borrow_mut().moment();
    }
}

impl Store for Stage {
    fn room(&self) -> usize {
        self.moment();
        4 * Plan::OPS_MAX
    }
    fn in_flight(&self) -> usize {
        self.moment();
        self.flying.len()
    }
    fn push(&mut self, _: &mut Reactor, _: &Epoch, _: Op<'_>, token: u64) {
        self.moment();
        self.flying.push(token);
    }
    fn reap(&mut self) -> Option<Done> {
        self.moment();
        let due = self.ends != Ends::Never && self.world.borrow_mut().random.below(3) > 0;
        let token = self.flying.pop_if(|_| due)?;
        Some(Done {
            token,
            result: Ok(()),
        })
    }
    fn is_ready(&self) -> bool {
        false
    }
    /// The sleep itself: the reactor's own is over at once.
    fn before_enter(&mut self, _: &mut Reactor, wait: Wait) -> Option<Duration> {
        self.moment();
        let mut world = self.world.borrow_mut();
        let over = Some(Duration::ZERO);
        let Wait::Until(until) = wait else {
            return over;
        };
        match self.ends {
            _ if self.flying.is_empty() => {}
            Ends::Told => {}
            Ends::Asked => panic!("asleep on an op that has to be asked for"),
            Ends::Never => {
                let until = until.expect("asleep for ever on an op that has to be asked for");
                world
                    .naps
                    .push(until.saturating_duration_since(Instant::now()));
            }
        }
        // The disk or the guest ends the sleep.
        if std::mem::take(&mut world.kicked) || !self.flying.is_empty() {
            return over;
        }
        if until.is_some() {
            world.dozes += 1;
            if let Some(until) = until {
                std::thread::sleep(until.saturating_duration_since(Instant::now()));
            }
            return over;
        }
        world.sleeps += 1;
        world.driver.collect(|_| 0);
        assert_eq!(
            world.driver.in_flight(),
            0,
            "asleep on a request that nobody kicks for, after {} moments",
            world.moments
        );
        if !world.quiet {
            world.add();
            assert!(world.kicked, "a sleeping worker has to be kicked");
        }
        over
    }
    fn polls(&self) -> bool {
        self.moment();
        self.ends != Ends::Told && !self.flying.is_empty()
    }
}

fn tuning(completion: Completion) -> Tuning {
    Tuning {
        completion,
        ..Tuning::new(cleave_worker::Split::Off)
    }
}

/// A worker whose guest acts, its device, the guest, and who controls it.
type Staged = (Worker<Stage>, Arc<Device>, Rc<RefCell<World>>, Control);

fn stage(seed: u64, event_idx: bool, tuning: Tuning, ends: Ends) -> Staged {
    stage_with(seed, event_idx, tuning, ends, Some(event()))
}

fn stage_with(
    seed: u64,
    event_idx: bool,
    tuning: Tuning,
    ends: Ends,
    kick: Option<OwnedFd>,
) -> Staged {
    let device: Arc<Device> = device(cleave_worker::Split::Off);
    device.tune(tuning);
    let features = match event_idx {
        true => FEATURES,
        false => FEATURES & !feature::EVENT_IDX,
    };
    let driver = Driver::new();
    let memory = driver.memory();
    let world = Rc::new(RefCell::new(World {
        driver,
        random: Random::new(seed),
        event_idx,
        moments: 0,
        lull: 0,
        kicked: false,
        quiet: false,
        sleeps: 0,
        dozes: 0,
        naps: Vec::new(),
    }));
    let store = Stage {
        world: world.clone(),
        flying: Vec::new(),
        ends,
    };
    let (control, commands) = Control::channel().unwrap();
    let alarm = Arc::new(event());
    let reactor = reactor(&device.disk, 64).unwrap();
    let worker = Worker::new(reactor, store, device.clone(), memory, commands, alarm);
    let mut worker = worker.unwrap();
    let _started = control.start(VringStart {
        index: 0,
        layout: Driver::layout(),
        base: 0,
        journal: None,
        features,
        kick,
        call: Some(event()),
        err: None,
        enabled: true,
    });
    worker.lap().unwrap();
    (worker, device, world, control)
}

/// Runs for so many moments and then falls silent; what the worker counted, what the guest saw.
fn run(
    seed: u64,
    moments: u64,
    event_idx: bool,
    tuning: Tuning,
    ends: Ends,
) -> (Totals, Rc<RefCell<World>>) {
    let (mut worker, device, world, _control) = stage(seed, event_idx, tuning, ends);
    while world.borrow().moments < moments {
        worker.lap().unwrap();
    }
    world.borrow_mut().quiet = true;
    let asleep = world.borrow().sleeps + 3;
    for lap in 0.. {
        worker.lap().unwrap();
        if world.borrow().sleeps >= asleep {
            break;
        }
        assert!(lap < 10_000_000, "seed {seed}: it never comes to rest");
    }
    let timers = world.borrow().dozes;
    for _ in 0..100 {
        worker.lap().unwrap();
    }
    assert_eq!(
        world.borrow().dozes,
        timers,
        "seed {seed}: no timer at rest"
    );
    (device.totals(), world)
}

#[test]
fn a_request_is_never_slept_on() {
    let seed = std::env::var("CLEAVE_SEED").map_or(7, |seed| seed.parse().unwrap());
    println!("CLEAVE_SEED={seed}");
    let held = Tuning {
        coalesce: Coalesce { us: 20, max: 3 },
        ..tuning(Completion::Adaptive)
    };
    for (name, tuning) in [
        ("interrupt", tuning(Completion::Interrupt)),
        ("adaptive", tuning(Completion::Adaptive)),
        ("calls held back", held),
    ] {
        for event_idx in [true, false] {
            let (totals, _) = run(seed, MOMENTS / 6, event_idx, tuning.clone(), Ends::Told);
            let slept = totals.sleeps + totals.dozes;
            assert!(slept > 50, "{name}: {totals:?}");
            let spun = totals.spin_hit_ns + totals.spin_wasted_ns > 0;
            assert_eq!(spun, name != "interrupt", "{name}: {totals:?}");
            assert!(totals.calls > 0, "{name}");
        }
    }
}

/// An engine that has to be looked at while something flies (a polled queue): whatever was asked for, the
/// worker does not sleep then, and sleeps as ever when nothing does.
#[test]
fn what_has_to_be_asked_for_is_never_slept_on() {
    for completion in [Completion::Interrupt, Completion::Adaptive] {
        let (totals, _) = run(11, MOMENTS / 10, true, tuning(completion), Ends::Asked);
        assert!(totals.sleeps > 50, "{completion:?}: {totals:?}");
        assert!(totals.calls > 0, "{completion:?}");
    }
}

/// One that hangs would cost a core for as long as it does: it is asked ever less often, up to a limit, and as
/// often as ever once the guest has something new.
#[test]
fn a_polled_device_that_hangs_is_asked_ever_less_often() {
    for completion in [Completion::Interrupt, Completion::Adaptive] {
        let (mut worker, device, world, _control) = stage(3, true, tuning(completion), Ends::Never);
        world.borrow_mut().quiet = true;
        let ask = || {
            let mut world = world.borrow_mut();
            world.add();
            world.naps.clear();
        };
        let laps_to_nap = |worker: &mut Worker<Stage>| {
            let lap = |_: &u32| {
                worker.lap().unwrap();
                !world.borrow().naps.is_empty()
            };
            (0..1_000_000).find(lap)
        };
        ask();
        let laps = laps_to_nap(&mut worker);
        assert!(laps.is_some_and(|laps| laps > 4000), "{laps:?}");
        for _ in 0..200 {
            worker.lap().unwrap();
        }
        let naps = world.borrow().naps.clone();
        let [first, longest] = [naps.first(), naps.iter().max()].map(|nap| nap.copied().unwrap());
        let ms = Duration::from_millis(1);
        assert!(
            first < ms && longest > 4 * ms && longest <= 5 * ms,
            "{first:?} {longest:?}"
        );
        assert!(device.totals().dozes > 200);
        // It asked for kicks meanwhile.
        ask();
        assert!(world.borrow().kicked, "{completion:?}");
        let laps = laps_to_nap(&mut worker);
        assert!(laps.is_some_and(|laps| laps > 4000), "{laps:?}");
    }
}

/// A ring without a kick has to be looked at. That may cost what the budget allows; then the worker naps
/// between looks, longer and longer, and looks on as often as before once there is work.
#[test]
fn a_guest_that_never_kicks_is_looked_at_within_the_budget() {
    for completion in [Completion::Interrupt, Completion::Adaptive] {
        let (mut worker, device, world, _control) =
            stage_with(5, true, tuning(completion), Ends::Told, None);
        world.borrow_mut().quiet = true;
        let dozes = || device.totals().dozes;
        for _ in 0..2 {
            let before = dozes();
            let looks = (0..10_000_000_u32).find(|_| {
                worker.lap().unwrap();
                dozes() > before
            });
            assert!(looks.is_some_and(|looks| looks > 16), "{looks:?}");
            let start = Instant::now();
            for _ in 0..20 {
                worker.lap().unwrap();
            }
            assert!(dozes() >= before + 20);
            // 50, 100, 150 ... microseconds.
            assert!(start.elapsed() > Duration::from_millis(10));
            let done = device.totals().others;
            world.borrow_mut().add();
            for _ in 0..10 {
                worker.lap().unwrap();
            }
            assert_eq!(device.totals().others, done + 1);
            world.borrow_mut().driver.collect(|_| 0);
            // The budget recovers.
            std::thread::sleep(Duration::from_millis(40));
        }
    }
    let (mut worker, device, world, _control) =
        stage_with(6, true, tuning(Completion::Poll), Ends::Told, None);
    world.borrow_mut().quiet = true;
    for _ in 0..20_000 {
        worker.lap().unwrap();
    }
    assert_eq!(
        device.totals().sleeps + device.totals().dozes,
        0,
        "it was asked to poll"
    );
}
