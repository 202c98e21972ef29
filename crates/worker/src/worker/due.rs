//! Work that is due at a time: calls that are held back, stalled requests, and warnings.

use std::sync::atomic::Ordering;

use cleave_engine::Store;

use super::{Worker, call_bell};

/// Time from a vring's kicks until the disk counts as hanging if no request was seen meanwhile. A guest's firmware
/// may start a disk that nothing reads until the menu of the boot loader ends.
const DOUBT_NS: u64 = 20_000_000_000;

impl<S: Store> Worker<S> {
    /// Sends calls that were held back and repeats stalled requests, if any are due.
    #[inline]
    pub(crate) fn run_due(&mut self) {
        if self.waiting.for_room {
            self.look_for_room();
        }
        if self.waiting.due_ns.is_some() {
            self.check_due();
        }
    }

    fn check_due(&mut self) {
        let now_ns = self.now_ns();
        if self.waiting.due_ns.is_none_or(|due_ns| now_ns < due_ns) {
            return;
        }
        self.waiting.due_ns = None;
        self.send_due_calls(now_ns);
        self.redo_due(now_ns);
        self.warn_of_unshared(now_ns);
        self.open_settled(now_ns);
        // For requests that completed inline.
        self.publish();
    }

    fn send_due_calls(&mut self, now_ns: u64) {
        let coalesce = self.active.tuning.coalesce;
        for (slot, lane) in (0..).zip(&mut self.lanes) {
            let Some(lane) = lane else { continue };
            match lane.caller.due_ns(coalesce) {
                Some(due_ns) if due_ns <= now_ns => {
                    let since_ns = lane.caller.held_since_ns().unwrap_or(now_ns);
                    lane.record.called(now_ns.saturating_sub(since_ns));
                    lane.caller.clear();
                    self.reactor.ring(call_bell(slot));
                }
                due_ns => self.waiting.due_ns = self.waiting.due_ns.into_iter().chain(due_ns).min(),
            }
        }
    }

    pub(super) fn kicked(&mut self, slot: u16) {
        if let Some(Some(lane)) = self.lanes.get_mut(usize::from(slot))
            && lane.kicked(&self.device.has_shown)
        {
            let due_ns = self.device.now_ns() + DOUBT_NS;
            lane.doubted_ns = Some(due_ns);
            self.waiting.due_ns = self.waiting.due_ns.into_iter().chain([due_ns]).min();
        }
    }

    /// Warns of vrings that were kicked and have shown no request for a while, unless another vring of the device has.
    pub(crate) fn warn_of_unshared(&mut self, now_ns: u64) {
        let mut empty = None;
        for lane in self.lanes.iter_mut().flatten() {
            let Some(due_ns) = lane.doubted_ns else {
                continue;
            };
            if lane.has_shown(&self.device.has_shown) {
                lane.doubted_ns = None;
            } else if due_ns <= now_ns {
                (lane.doubted_ns, empty) = (None, empty.or(Some(lane.index)));
            } else {
                self.waiting.due_ns = self.waiting.due_ns.into_iter().chain([due_ns]).min();
            }
        }
        if let Some(index) = empty.filter(|_| !self.device.has_shown.load(Ordering::Relaxed)) {
            self.log_rarely(|name| {
                tracing::warn!(
                    "{name}: vring {index}: the guest kicked and its ring has shown no request for {} s. If the disk hangs \
                     in the guest, its memory is not shared: give the VMM's memory backend share=on (libvirt: \
                     <access mode='shared'/>)",
                    DOUBT_NS / 1_000_000_000
                );
            });
        }
    }
}
