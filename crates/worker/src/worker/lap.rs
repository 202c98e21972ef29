//! One lap, from top to bottom: completions are collected and shown to the guests, new requests are taken, and then one system call
//! submits, and sleeps if the pacer decides so.

use std::io;
use std::time::Instant;

use cleave_engine::{LapEnd, Rest, Store, Wait};
use cleave_guest::{MarkingBudget, Memory};

use super::Worker;
use super::take::DESCRIPTORS_MAX;
use crate::policy::LapWork;

/// Result of a lap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lap {
    /// Call `lap` again.
    Again,
    /// Control asked the worker to exit, and everything is drained.
    Ended,
}

impl<S: Store> Worker<S> {
    /// Makes one pass: reap, publish, accept, and publish what completed inline. Then at most one system call, which sleeps if
    /// the pacer decides so and nothing has arrived meanwhile.
    pub fn lap(&mut self) -> io::Result<Lap> {
        self.taking.allowance.renew(DESCRIPTORS_MAX);
        let (wait, worked) = self.work();
        if wait == Wait::No && !worked {
            std::hint::spin_loop();
        }
        self.reactor.enter(&mut self.store, wait)?;
        self.entered(wait);
        Ok(self.end_lap())
    }

    /// Makes a lap that began at this time on a thread that disks share. It ends by the clock too, and does not sleep. Returns how long
    /// the worker may be left alone, and true if there was work.
    pub(crate) fn lap_beside_others(&mut self, began: Instant) -> io::Result<(Lap, Rest, bool)> {
        self.taking.allowance.renew_until(LapEnd::after(began));
        let (wait, worked) = self.work();
        let rest = match wait {
            Wait::No => {
                self.reactor.enter(&mut self.store, wait)?;
                Rest::None
            }
            Wait::Until(deadline) => self.reactor.settle(&mut self.store, deadline)?,
        };
        Ok((self.end_lap(), rest, worked))
    }

    /// Makes a lap without its system call. Returns how to enter the reactor, and true if there was work.
    #[inline(always)]
    fn work(&mut self) -> (Wait, bool) {
        self.publishing.marking = MarkingBudget::of_a_turn();
        let reaped = self.reap();
        if reaped > 0 {
            self.publish();
        }
        self.run_due();
        let accepted = self.accept();
        // Ops that completed in `push`. The kernel's completions wait for the next lap.
        let at_once = match self.store().is_ready() {
            true => self.reap(),
            false => 0,
        };
        if accepted.chains + at_once > 0 {
            self.publish();
        }
        let worked = accepted.chains + reaped + at_once > 0;
        let polled = self.reactor.polled();
        self.meters.lap_ended(worked, polled, &mut self.lanes);
        if Memory::any_is_lost() && self.has_lost_memory() {
            self.lose_memory();
        }
        // The requests that failed before the storage was back are known by now.
        let [store] = &mut self.store;
        if store.came_back() {
            self.resume_unsent();
        }
        if worked {
            self.waiting.empty_checks = 0;
            if self.waiting.for_room {
                // What completed in this lap made room, and nothing else may end the sleep.
                self.look_for_room();
            }
        }
        let wait = self.pace(LapWork {
            arrived: accepted.awaited as u32,
            ended: (reaped + at_once + accepted.ended) as u32,
            in_flight: self.store().in_flight() as u32,
            more: accepted.more,
        });
        (wait, worked)
    }

    /// Handles commands at the end of a lap.
    #[inline]
    fn end_lap(&mut self) -> Lap {
        match self.inbox.is_pending || self.has_waiters() {
            true => self.handle_commands(),
            false => Lap::Again,
        }
    }
}
