//! A guest that acts at any moment of a lap, and kicks only if asked to. The worker never sleeps while there is
//! a request, and sleeps without a timer when it is idle.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_blk::spec::feature;
use cleave_blk::{Op, PLAIN_OPS_MAX};
use cleave_engine::{Done, Reactor, Store, Wait};
use cleave_guest::Epoch;
use cleave_worker::{
    Coalesce, CompletionPolicy, Control, Device, Totals, Tuning, VringStart, Worker, reactor,
};

use crate::driver::{Ask, Driver, SIZE};
use crate::{FEATURES, Random, device, event, vring};

/// Number of moments at which the guest may act, over all runs.
const MOMENTS: u64 = 1_000_000;

/// The guest, and the part of it that the worker sees.
struct World {
    driver: Driver,
    random: Random,
    event_idx: bool,
    moments: u64,
    /// Until then the guest adds no request by itself: long enough for a worker to notice.
    lull: u64,
    /// The guest has kicked, and no sleep has ended for it yet.
    kicked: bool,
    /// The guest is silent: requests in flight complete, and then nothing happens.
    quiet: bool,
    /// Number of sleeps without a time-out.
    sleeps: u64,
    dozes: u64,
    /// Durations of sleeps while an op is in flight that never completes.
    naps: Vec<Duration>,
    /// How much later a worker that sleeps learns of a completion.
    late: Duration,
    /// Number of requests that the guest adds each time one is pushed to the store, until none is left.
    follow_ups: u32,
    /// Kicks that it was asked for with those.
    follow_up_kicks: u32,
}

impl World {
    /// A moment at which something may happen.
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

    /// Adds a request, and kicks if the device wants a kick.
    fn add(&mut self) {
        if self.driver.in_flight() < usize::from(SIZE) / 3
            && self.driver.submit(&Ask::flush()).is_some()
        {
            self.kicked |= self.driver.wants_kick(self.event_idx);
        }
    }
}

/// A store that lets the guest act at each call by the worker.
struct Stage {
    world: Rc<RefCell<World>>,
    flying: Vec<u64>,
    ends: Ends,
}

/// How the worker learns of a completion.
#[derive(Clone, Copy, PartialEq)]
enum Ends {
    Told,
    /// By polling.
    Asked,
    /// By polling, and there never is one.
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
        4 * PLAIN_OPS_MAX
    }
    fn in_flight(&self) -> usize {
        self.moment();
        self.flying.len()
    }
    fn push(&mut self, _: &mut Reactor, _: &Epoch, _: Op<'_>, token: u64) {
        self.moment();
        self.flying.push(token);
        let mut world = self.world.borrow_mut();
        if world.follow_ups > 0 {
            world.follow_ups -= 1;
            world.driver.submit(&Ask::flush()).unwrap();
            world.follow_up_kicks += u32::from(world.driver.wants_kick(world.event_idx));
        }
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
    /// The sleep itself: the reactor's own sleep returns at once.
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
            Ends::Asked => panic!("asleep on an op that has to be polled"),
            Ends::Never => {
                let until = until.expect("asleep without end on an op that has to be polled");
                world
                    .naps
                    .push(until.saturating_duration_since(Instant::now()));
            }
        }
        // The disk or the guest ends the sleep.
        if std::mem::take(&mut world.kicked) || !self.flying.is_empty() {
            std::thread::sleep(world.late);
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
            "asleep on a request without a kick, after {} moments",
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

fn tuning(completion: CompletionPolicy) -> Tuning {
    Tuning {
        completion,
        ..Tuning::new(cleave_worker::Split::Off)
    }
}

/// A worker with its guest: the worker, its device, the guest, and the control.
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
        late: Duration::ZERO,
        follow_ups: 0,
        follow_up_kicks: 0,
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
        features,
        kick,
        ..vring(0)
    });
    worker.lap().unwrap();
    (worker, device, world, control)
}

/// Runs for this many moments, and until an adaptive worker has tried both ways; then lets the guest fall silent. Returns the worker's
/// and the guest's counters.
fn run(
    seed: u64,
    moments: u64,
    event_idx: bool,
    tuning: Tuning,
    ends: Ends,
) -> (Totals, Rc<RefCell<World>>) {
    let completion = tuning.completion;
    let (mut worker, device, world, _control) = stage(seed, event_idx, tuning, ends);
    let is_tried = |device: &Device| {
        completion != CompletionPolicy::Adaptive
            || ends == Ends::Asked
            || device.totals().experiments > 0
    };
    let mut laps = 0_u32;
    // The clock is read seldom.
    while world.borrow().moments < moments || !laps.is_multiple_of(1024) || !is_tried(&device) {
        worker.lap().unwrap();
        laps += 1;
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
fn the_worker_never_sleeps_on_a_request() {
    let seed = std::env::var("CLEAVE_SEED").map_or(7, |seed| seed.parse().unwrap());
    println!("CLEAVE_SEED={seed}");
    let held = Tuning {
        coalesce: Coalesce { us: 20, max: 3 },
        ..tuning(CompletionPolicy::Adaptive)
    };
    for (name, tuning) in [
        ("interrupt", tuning(CompletionPolicy::Interrupt)),
        ("adaptive", tuning(CompletionPolicy::Adaptive)),
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

/// A kick costs the guest an exit, so it is asked for none while the worker is awake (virtio 1.3 §2.7.10).
#[test]
fn a_guest_that_adds_requests_while_it_is_served_is_not_asked_to_kick() {
    for completion in [CompletionPolicy::Interrupt, CompletionPolicy::Adaptive] {
        for event_idx in [true, false] {
            let (mut worker, device, world, _control) =
                stage(9, event_idx, tuning(completion), Ends::Told);
            // It adds one request while the worker sleeps, and the others in the lap that serves it.
            world.borrow_mut().lull = u64::MAX;
            for sleeps in 2..=52 {
                while world.borrow().sleeps < sleeps {
                    worker.lap().unwrap();
                }
                assert_eq!(world.borrow().follow_ups, 0);
                world.borrow_mut().follow_ups = 3;
            }
            assert!(device.totals().others >= 4 * 50, "{:?}", device.totals());
            let kicks = world.borrow().follow_up_kicks;
            assert_eq!(kicks, 0, "{completion:?}, EVENT_IDX {event_idx}");
        }
    }
}

/// A store that has to be polled while an op is in flight. In every mode the worker does not sleep then, and
/// sleeps as usual when nothing is in flight.
#[test]
fn the_worker_never_sleeps_on_polled_ops() {
    for completion in [CompletionPolicy::Interrupt, CompletionPolicy::Adaptive] {
        let (totals, _) = run(11, MOMENTS / 10, true, tuning(completion), Ends::Asked);
        assert!(totals.sleeps > 50, "{completion:?}: {totals:?}");
        assert!(totals.calls > 0, "{completion:?}");
    }
}

/// Polling a device that hangs would cost a core. It is polled less and less often, down to a limit, and as
/// often as before once the guest has a new request.
#[test]
fn a_polled_device_that_hangs_is_polled_less_and_less_often() {
    for completion in [CompletionPolicy::Interrupt, CompletionPolicy::Adaptive] {
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
        // It armed the vring meanwhile.
        ask();
        assert!(world.borrow().kicked, "{completion:?}");
        let laps = laps_to_nap(&mut worker);
        assert!(laps.is_some_and(|laps| laps > 4000), "{laps:?}");
    }
}

/// A ring without a kick has to be polled, within the budget. When that is spent the worker sleeps between
/// checks, longer and longer, and polls as often as before once there is work.
#[test]
fn a_guest_that_never_kicks_is_polled_within_the_budget() {
    for completion in [CompletionPolicy::Interrupt, CompletionPolicy::Adaptive] {
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
            // The store takes some laps, as chance has it.
            let ends = (0..1000).any(|_| {
                worker.lap().unwrap();
                device.totals().others > done
            });
            assert!(ends, "it is not served");
            assert_eq!(device.totals().others, done + 1);
            world.borrow_mut().driver.collect(|_| 0);
            // The budget recovers.
            std::thread::sleep(Duration::from_millis(40));
        }
    }
    let (mut worker, device, world, _control) =
        stage_with(6, true, tuning(CompletionPolicy::Poll), Ends::Told, None);
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

/// While the next request waits for the disk's limits and nothing is in flight, the worker sleeps, which does not count as spinning.
/// Spinning pays here, because a worker that sleeps learns of each completion a millisecond late. Asleep it stays below the limits.
#[test]
fn a_worker_that_sleeps_for_the_limits_is_not_said_to_spin() {
    let limited = Tuning {
        limits: "iops-read=2000".parse().unwrap(),
        spin_rate_min: 10,
        spin_cpu_max: 100,
        ..tuning(CompletionPolicy::Adaptive)
    };
    let (mut worker, device, world, _control) = stage(3, true, limited, Ends::Told);
    world.borrow_mut().quiet = true;
    world.borrow_mut().late = Duration::from_millis(1);
    let mut lap_until = |is_so: &dyn Fn() -> bool| {
        let began = Instant::now();
        while !is_so() {
            let mut guest = world.borrow_mut();
            guest.driver.collect(|_| 512);
            if guest.driver.in_flight() == 0 {
                guest.driver.submit(&Ask::read(1, 512, 512, true)).unwrap();
            }
            drop(guest);
            worker.lap().unwrap();
            let took = began.elapsed();
            assert!(took < Duration::from_secs(240), "{:?}", device.tried());
        }
        began.elapsed()
    };
    lap_until(&|| device.tried().iter().flatten().any(|tried| tried.0.spins));
    let before = device.totals();
    let took = lap_until(&|| device.totals().throttled >= before.throttled + 400);
    let totals = device.totals().since(before);
    let spun = Duration::from_nanos(totals.spin_hit_ns + totals.spin_wasted_ns);
    assert_eq!(
        totals.experiments, 0,
        "the verdict was in force: {totals:?}"
    );
    assert!(spun < took / 5, "{spun:?} of {took:?}");
}
