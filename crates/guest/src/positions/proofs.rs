//! Properties of a vring's positions, of its kicks and calls, and of the place at which it continues after its daemon
//! died. Each property is one function of plain values. The tests call it with every value if there are few and
//! otherwise with random ones; the harnesses (`cargo kani -p cleave-guest`) call it with all values at once.

use std::cell::Cell;

use super::Positions;
use crate::inflight::{goes_on_at, shown_since};
use crate::signals::{RingWords, VringSignals};

/// Returns the distance from one free-running index to another that is not behind it, computed differently from the code under
/// test.
fn distance(from: u16, to: u16) -> u32 {
    (i32::from(to) - i32::from(from)).rem_euclid(1 << 16) as u32
}

/// Returns true if `event` is one of `count` entries from `from` on, which are the only ones for which a notification was
/// requested.
fn is_among(event: u16, from: u16, count: u16) -> bool {
    distance(from, event) < u32::from(count)
}

impl Positions {
    fn size(&self) -> u16 {
        self.mask + 1
    }

    /// Holds between any two steps of a vring whose worker returns no more chains than it took.
    fn is_sound(&self) -> bool {
        u32::from(self.left()) == distance(self.next_avail, self.seen_avail)
            && self.size().is_power_of_two()
            && self.outstanding <= self.size()
            && self.left() <= self.size() - self.outstanding
            && self.added() <= self.outstanding
    }

    /// Returns true if every chain before the next one is either published as used or outstanding. Holds if both rings began at
    /// the same index.
    fn is_level(&self) -> bool {
        distance(self.published, self.next_avail) == u32::from(self.outstanding)
    }
}

/// Returns a sound state, made from any values. `outstanding`, `left` and `added` are reduced to possible values.
fn sound(size_log: u8, [next_avail, published]: [u16; 2], counts: [u16; 3]) -> Positions {
    let size = 1 << (size_log % 16);
    let [outstanding, left, added] = counts;
    let outstanding = outstanding % (size + 1);
    let left = left % (size - outstanding + 1);
    let added = added % (outstanding + 1);
    let positions = Positions {
        mask: size - 1,
        next_avail,
        seen_avail: next_avail.wrapping_add(left),
        next_used: published.wrapping_add(added),
        published,
        outstanding,
    };
    assert!(positions.is_sound());
    positions
}

/// Returns a sound state of a vring both of whose rings began at the same index.
fn sound_and_level(size_log: u8, next_avail: u16, counts: [u16; 3]) -> Positions {
    let positions = sound(size_log, [next_avail, 0], counts);
    let published = next_avail.wrapping_sub(positions.outstanding);
    let positions = Positions {
        next_used: published.wrapping_add(positions.added()),
        published,
        ..positions
    };
    assert!(positions.is_sound() && positions.is_level());
    positions
}

/// A check accepts an index exactly when the guest has room for the chains that it implies, and changes nothing else.
fn a_check_accepts_what_the_guest_has_room_for(before: Positions, found: u16) {
    // A vring checks the index when nothing is left.
    let mut before = before;
    before.forget_seen();
    let mut after = before;
    let fresh = distance(before.next_avail, found);
    let room = u32::from(before.size() - before.outstanding);
    let answer = after.look(found);
    assert_eq!(answer.map(u32::from), (fresh <= room).then_some(fresh));
    let seen_avail = match answer {
        Some(_) => found,
        None => before.seen_avail,
    };
    assert_eq!(
        after,
        Positions {
            seen_avail,
            ..before
        }
    );
    assert_eq!(u32::from(after.left()), answer.map_or(0, |_| fresh));
    assert!(after.is_sound());
}

/// Every other step, from any sound state: the state stays sound, so no sequence of steps can break it.
/// Available entries are taken in order, and no used entry is overwritten before it was published.
fn a_step_does_one_thing(before: Positions, step: u8) {
    let mut after = before;
    match step % 5 {
        0 if before.left() > 0 => {
            assert_eq!(after.entry(0), before.next_avail % before.size());
            after.take();
            assert_eq!(after.left(), before.left() - 1);
            let expected = Positions {
                next_avail: before.next_avail.wrapping_add(1),
                outstanding: before.outstanding + 1,
                ..before
            };
            assert_eq!(after, expected);
        }
        1 if before.added() < before.outstanding => {
            let entry = after.push_used();
            assert_eq!(entry, before.next_used % before.size());
            // Consecutive entries are distinct if there are no more of them than the ring has.
            assert!(after.added() == before.added() + 1 && after.added() <= before.size());
            let next_used = after.next_used;
            assert_eq!(
                after,
                Positions {
                    next_used,
                    ..before
                }
            );
        }
        2 => {
            let (old, new) = (before.published, before.next_used);
            assert_eq!(after.publish(), (before.added() > 0).then_some((old, new)));
            let expected = Positions {
                published: new,
                outstanding: before.outstanding - before.added(),
                ..before
            };
            assert_eq!(after, expected);
            assert_eq!(after.publish(), None, "all were published");
        }
        3 => {
            after.forget_seen();
            let seen_avail = before.next_avail;
            assert_eq!(
                after,
                Positions {
                    seen_avail,
                    ..before
                }
            );
        }
        4 => {
            after.forget_added();
            let next_used = before.published;
            assert_eq!(
                after,
                Positions {
                    next_used,
                    ..before
                }
            );
        }
        _ => {}
    }
    assert!(after.is_sound());
    assert!(after.is_level() || !before.is_level());
}

/// The first of the added entries are published, and the others stay added.
fn a_part_is_published_first(before: Positions, count: u16) {
    let count = count.min(before.added());
    let mut after = before;
    let rest = after.hold_back(count);
    assert_eq!(rest, before.added() - count);
    let new = before.published.wrapping_add(count);
    let shown = (count > 0).then_some((before.published, new));
    assert_eq!(after.publish(), shown);
    after.add_again(rest);
    let expected = Positions {
        published: new,
        outstanding: before.outstanding - count,
        ..before
    };
    assert_eq!(after, expected);
    assert_eq!(after.added(), rest);
    assert!(after.is_sound());
    assert!(after.is_level() || !before.is_level());
}

/// A vring continues where the dead daemon stopped, whichever of its stores was the last. `is_shown`: the
/// daemon died after it stored the used index of its last batch and before it recorded that.
fn a_restart_continues_where_the_dead_daemon_stopped(dead: Positions, is_shown: bool) {
    let size = dead.size();
    let (noted, shown) = match is_shown {
        true => (dead.published, dead.added()),
        false => (dead.published, 0),
    };
    let used = noted.wrapping_add(shown);
    assert_eq!(shown_since(noted, used, size), Some(shown));
    // Chains that were not published are still marked, completed or not.
    let again = dead.outstanding - shown;
    let next_avail = goes_on_at(used, again);
    assert_eq!(next_avail, dead.next_avail);
    let mut positions = Positions::new(size, 0);
    positions.resume(next_avail, used, again);
    assert!(positions.is_sound() && positions.is_level());
    assert_eq!((positions.left(), positions.added()), (0, 0));
    // The worker takes everything that the guest has added meanwhile; the guest can have added no more than this.
    let room = size - again;
    let ahead = |count: u16| next_avail.wrapping_add(count);
    assert_eq!(positions.look(ahead(room)), Some(room));
    assert_eq!(positions.look(ahead(room + 1)), None);
}

/// A part that belongs to another ring is recognised by a used index that its daemon cannot have left.
fn a_part_is_of_another_ring_beyond_its_entries(noted: u16, used: u16, entries: u16) {
    let shown = distance(noted, used);
    let expected = (shown <= u32::from(entries)).then_some(shown);
    assert_eq!(shown_since(noted, used, entries).map(u32::from), expected);
}

/// The shared words of a vring while no other thread writes them.
#[derive(Default)]
struct Still {
    avail_index: u16,
    avail_flags: u16,
    used_event: u16,
    used_index: Cell<u16>,
    used_flags: Cell<u16>,
    avail_event: Cell<u16>,
    /// Something was stored, and no fence has followed.
    is_unfenced: Cell<bool>,
}

impl RingWords for Still {
    fn avail_index(&self) -> u16 {
        assert!(!self.is_unfenced.get(), "reads without a fence");
        self.avail_index
    }
    fn avail_flags(&self) -> u16 {
        assert!(!self.is_unfenced.get(), "reads without a fence");
        self.avail_flags
    }
    fn used_event(&self) -> u16 {
        assert!(!self.is_unfenced.get(), "reads without a fence");
        self.used_event
    }
    fn set_used_index(&self, index: u16) {
        self.used_index.set(index);
        self.is_unfenced.set(true);
    }
    fn set_used_flags(&self, flags: u16) {
        self.used_flags.set(flags);
        self.is_unfenced.set(true);
    }
    fn set_avail_event(&self, position: u16) {
        self.avail_event.set(position);
        self.is_unfenced.set(true);
    }
    fn fence(&self) {
        self.is_unfenced.set(false);
    }
}

impl Still {
    /// Returns true if a driver that adds `count` entries from `from` on has to kick (virtio 1.3 §2.7.10).
    fn wants_kick(&self, event_idx: bool, from: u16, count: u16) -> bool {
        match event_idx {
            true => is_among(self.avail_event.get(), from, count),
            false => self.used_flags.get() & 1 == 0,
        }
    }
}

/// The guest is called exactly when it asked for one of the published entries, or by its flag (virtio 1.3 §2.7.7);
/// the first batch is always followed by a call. `count`: entries of a batch, from one to the ring's size.
fn a_call_is_made_exactly_when_it_is_asked_for(
    event_idx: bool,
    old: u16,
    count: u16,
    used_event: u16,
    avail_flags: u16,
) {
    let words = Still {
        used_event,
        avail_flags,
        ..Still::default()
    };
    let mut signals = VringSignals::new(&words, event_idx, 0);
    let new = old.wrapping_add(count);
    let is_asked = match event_idx {
        true => is_among(used_event, old, count),
        false => avail_flags & 1 == 0,
    };
    let first = signals.publish(&words, old.wrapping_sub(1), old);
    assert_eq!(first, event_idx || is_asked);
    assert_eq!(signals.publish(&words, old, new), is_asked);
    assert_eq!(words.used_index.get(), new);
}

/// The guest kicks for an added entry if the vring is armed, and does not if it is disarmed, until the index has gone
/// all the way round. `taken`: entries taken in between; `ahead` and `count`: entries that the guest adds meanwhile,
/// and afterwards. All three together are at most 2^16, and the last two at most the ring's size.
fn kicks_come_only_where_they_are_asked_for(
    event_idx: bool,
    position: u16,
    [taken, ahead, count]: [u16; 3],
) {
    // The vring may have been armed at any position before.
    for before in [position, position.wrapping_sub(1), position.wrapping_add(9)] {
        let still = Still {
            avail_index: position,
            used_flags: Cell::new(1),
            ..Still::default()
        };
        let mut signals = VringSignals::new(&still, event_idx, before);
        signals.disarm(&still, before);
        signals.ask(&still, position);
        still.fence();
        assert!(!VringSignals::has_come(&still, position), "nothing came");
        assert!(still.wants_kick(event_idx, position, count));
        let next = position.wrapping_add(taken);
        signals.disarm(&still, next);
        assert!(!still.wants_kick(event_idx, next.wrapping_add(ahead), count));
        signals.ask(&still, next);
        still.fence();
        assert_eq!(
            VringSignals::has_come(&still, next),
            next != position,
            "came meanwhile"
        );
        assert!(still.wants_kick(event_idx, next, count));
    }
}

/// A ring of a few entries, with both of its sides.
trait SharedRing {
    /// Makes a chain available, as the guest.
    fn offer(&mut self, head: u16);
    /// Takes a chain, as the worker; see [`crate::Vring`].
    fn take(&mut self) -> Option<u16>;
    fn push_used(&mut self, head: u16);
    fn publish(&mut self);
    /// Takes the next used entry, as the guest.
    fn reap(&mut self) -> Option<u16>;
    /// Replaces the worker, which dies, by another one.
    fn restart(&mut self);
}

/// Largest ring of a schedule.
const ENTRIES: usize = 8;

/// The progress of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeadState {
    Free,
    Offered,
    Taken,
    Ended,
    Shown,
}

/// Guest and worker take these steps in any order, and the worker completes the chains in any order. Each
/// offered head is taken once by each worker that lives until it is published, and the guest sees it as used
/// once, after that. `steps`: the step, and its head.
fn each_chain_is_served_once(ring: &mut impl SharedRing, size: u16, steps: &[(u8, u8)]) {
    let mut states = [HeadState::Free; ENTRIES];
    for (kind, head) in steps {
        do_step(ring, &mut states, kind % 6, u16::from(*head) % size);
    }
    // All outstanding chains are served.
    for _ in 0..size {
        do_step(ring, &mut states, 1, 0);
    }
    for head in 0..size {
        do_step(ring, &mut states, 2, head);
    }
    do_step(ring, &mut states, 3, 0);
    for _ in 0..size {
        do_step(ring, &mut states, 4, 0);
    }
    assert_eq!(states, [HeadState::Free; ENTRIES]);
    assert!(ring.take().is_none() && ring.reap().is_none());
}

fn do_step(ring: &mut impl SharedRing, states: &mut [HeadState; ENTRIES], kind: u8, head: u16) {
    let state = &mut states[usize::from(head)];
    match kind {
        0 if *state == HeadState::Free => {
            *state = HeadState::Offered;
            ring.offer(head);
        }
        1 => match ring.take() {
            Some(head) => {
                let state = &mut states[usize::from(head)];
                assert_eq!(*state, HeadState::Offered, "{head} is taken");
                *state = HeadState::Taken;
            }
            None => assert!(!states.contains(&HeadState::Offered)),
        },
        2 if *state == HeadState::Taken => {
            *state = HeadState::Ended;
            ring.push_used(head);
        }
        3 => {
            ring.publish();
            for state in states
                .iter_mut()
                .filter(|state| **state == HeadState::Ended)
            {
                *state = HeadState::Shown;
            }
        }
        4 => match ring.reap() {
            Some(head) => {
                let state = &mut states[usize::from(head)];
                assert_eq!(*state, HeadState::Shown, "{head} is answered");
                *state = HeadState::Free;
            }
            None => assert!(!states.contains(&HeadState::Shown)),
        },
        5 => {
            ring.restart();
            let out = [HeadState::Taken, HeadState::Ended];
            for state in states.iter_mut().filter(|state| out.contains(state)) {
                *state = HeadState::Offered;
            }
        }
        _ => {}
    }
}

/// A ring that consists only of its positions and its entries.
struct BareRing {
    positions: Positions,
    avail: [u16; ENTRIES],
    used: [u16; ENTRIES],
    avail_index: u16,
    used_index: u16,
    reaped: u16,
    /// Heads that were taken and not published; those of them that have completed; and those to be taken again.
    is_out: [bool; ENTRIES],
    is_ended: [bool; ENTRIES],
    is_again: [bool; ENTRIES],
}

impl BareRing {
    /// Makes a vring both rings of which begin at `base`.
    fn new(size: u16, base: u16) -> BareRing {
        let mut positions = Positions::new(size, base);
        positions.begin(base);
        BareRing {
            positions,
            avail: [0; ENTRIES],
            used: [0; ENTRIES],
            avail_index: base,
            used_index: base,
            reaped: base,
            is_out: [false; ENTRIES],
            is_ended: [false; ENTRIES],
            is_again: [false; ENTRIES],
        }
    }
}

impl SharedRing for BareRing {
    fn offer(&mut self, head: u16) {
        self.avail[usize::from(self.avail_index % self.positions.size())] = head;
        self.avail_index = self.avail_index.wrapping_add(1);
    }
    fn take(&mut self) -> Option<u16> {
        if self.positions.left() == 0 {
            if let Some(head) = self.is_again.iter().position(|is| *is) {
                self.is_again[head] = false;
                return Some(head as u16);
            }
            let fresh = self.positions.look(self.avail_index);
            assert!(fresh.is_some(), "the guest did not break its ring");
            if fresh == Some(0) {
                return None;
            }
        }
        let head = self.avail[usize::from(self.positions.entry(0))];
        self.positions.take();
        self.is_out[usize::from(head)] = true;
        Some(head)
    }
    fn push_used(&mut self, head: u16) {
        self.is_ended[usize::from(head)] = true;
        self.used[usize::from(self.positions.push_used())] = head;
    }
    fn publish(&mut self) {
        if let Some((old, new)) = self.positions.publish() {
            assert_eq!(old, self.used_index);
            self.used_index = new;
        }
        for (is_out, is_ended) in self.is_out.iter_mut().zip(&mut self.is_ended) {
            *is_out &= !std::mem::take(is_ended);
        }
    }
    fn reap(&mut self) -> Option<u16> {
        if self.reaped == self.used_index {
            return None;
        }
        let head = self.used[usize::from(self.reaped % self.positions.size())];
        self.reaped = self.reaped.wrapping_add(1);
        Some(head)
    }
    fn restart(&mut self) {
        let again = self.is_out.iter().filter(|is| **is).count() as u16;
        let next_avail = goes_on_at(self.used_index, again);
        self.positions = Positions::new(self.positions.size(), 0);
        self.positions.resume(next_avail, self.used_index, again);
        self.is_again = self.is_out;
        self.is_ended = [false; ENTRIES];
    }
}

/// The properties with all values at once.
#[cfg(kani)]
mod harnesses {
    use super::*;

    #[kani::proof]
    fn looks() {
        let before = sound(kani::any(), kani::any(), kani::any());
        a_check_accepts_what_the_guest_has_room_for(before, kani::any());
    }

    #[kani::proof]
    fn steps() {
        a_step_does_one_thing(sound(kani::any(), kani::any(), kani::any()), kani::any());
    }

    #[kani::proof]
    fn parts_of_what_was_added() {
        a_part_is_published_first(sound(kani::any(), kani::any(), kani::any()), kani::any());
    }

    #[kani::proof]
    fn steps_of_rings_that_are_level() {
        let before = sound_and_level(kani::any(), kani::any(), kani::any());
        a_step_does_one_thing(before, kani::any());
    }

    #[kani::proof]
    fn restarts() {
        let dead = sound_and_level(kani::any(), kani::any(), kani::any());
        a_restart_continues_where_the_dead_daemon_stopped(dead, kani::any());
        a_part_is_of_another_ring_beyond_its_entries(kani::any(), kani::any(), kani::any());
    }

    #[kani::proof]
    fn calls() {
        let count = kani::any();
        kani::assume(1 <= count && count <= 32_768);
        let (event_idx, old) = (kani::any(), kani::any());
        let (event, flags) = (kani::any(), kani::any());
        a_call_is_made_exactly_when_it_is_asked_for(event_idx, old, count, event, flags);
    }

    #[kani::proof]
    #[kani::unwind(4)]
    fn kicks() {
        let [taken, ahead, count]: [u16; 3] = kani::any();
        let in_ring = u32::from(ahead) + u32::from(count);
        kani::assume(1 <= count && in_ring <= 32_768 && u32::from(taken) + in_ring <= 1 << 16);
        kicks_come_only_where_they_are_asked_for(kani::any(), kani::any(), [taken, ahead, count]);
    }

    /// From any index, so across the wrap too. Unwound beyond the longest loop, which is over the heads.
    #[kani::proof]
    #[kani::unwind(10)]
    fn schedules() {
        let steps: [(u8, u8); 6] = kani::any();
        each_chain_is_served_once(&mut BareRing::new(2, kani::any()), 2, &steps);
    }
}

#[cfg(test)]
mod tests;
