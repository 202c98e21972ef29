//! A vring while its guest moves: what it writes is marked in a dirty log.

use cleave_blk::Segment;

use super::{ENTRIES_OFFSET, INDEX_OFFSET, RingPlace, USED_ENTRY_BYTES, Vring, used_entry_offset};
use crate::Epoch;
use crate::dirty::{MarkingBudget, VringLog};

impl Vring {
    /// Marks what is written from now on in this log, and in no other. Answers that were added and are not published yet are
    /// written from now on too.
    pub fn set_log(&mut self, log: Option<Box<VringLog>>) {
        if log.is_none() {
            self.earlier.clear();
        }
        self.log = log;
    }

    /// Returns true if a log is in force: then [`Vring::log_written`] spares it time.
    #[inline]
    pub fn is_logged(&self) -> bool {
        self.log.is_some()
    }

    /// Notes what was written for the answer that is added next: all of it.
    #[inline]
    pub fn log_written(&mut self, data: &[Segment], status_addr: u64) {
        if let Some(log) = &mut self.log {
            log.tell(data, status_addr);
        }
    }

    /// Notes in which memory table the request was taken whose answer is added next. The table in force may lack its indirect
    /// table.
    #[inline]
    pub fn log_answer(&mut self, epoch: &Epoch) {
        if self.log.is_some()
            && let Some(place) = &self.place
            && place.epoch != *epoch
        {
            let used_index = self.positions.next_used();
            self.earlier.push_back((used_index, epoch.clone()));
        }
    }

    /// Notes the table in force for the added answers that are not marked, because another one follows.
    pub(super) fn note_unmarked(&mut self) {
        let (Some(place), true) = (&self.place, self.log.is_some()) else {
            return;
        };
        let mut before = std::mem::take(&mut self.earlier).into_iter().peekable();
        for step in 0..self.positions.added() {
            let used_index = self.positions.added_index(step);
            let noted = before.next_if(|(index, _)| *index == used_index);
            let epoch = noted.map_or_else(|| place.epoch.clone(), |(_, epoch)| epoch);
            self.earlier.push_back((used_index, epoch));
        }
    }

    /// Publishes what was added, as far as the budget allows to mark all that was written for it. Answers before the index: as
    /// soon as the guest sees that, it may use their descriptors for other chains, and its memory may be copied for the last time.
    #[inline(never)]
    pub(super) fn log_and_show(&mut self, budget: &mut MarkingBudget) -> bool {
        let before = self.positions;
        let marked = self.mark_added(budget);
        // It makes a full fence after it has stored the index.
        let call = match marked == before.added() {
            true => self.show(),
            false => self.show_first(marked),
        };
        if let Some(log) = &self.log
            && marked > 0
        {
            // They may go on at the beginning of the ring.
            let first = before.added_entry(0);
            let until_end = marked.min(self.layout.size - first);
            let bytes = |entries| USED_ENTRY_BYTES * usize::from(entries);
            log.used(used_entry_offset(first), bytes(until_end));
            if until_end < marked {
                log.used(ENTRIES_OFFSET, bytes(marked - until_end));
            }
            log.used(INDEX_OFFSET, 2);
        }
        call
    }

    /// Marks what was written for the added answers, in their order, until the budget is used up. Returns for how many.
    fn mark_added(&mut self, budget: &mut MarkingBudget) -> u16 {
        let added = self.positions.added();
        let (Some(log), Some(RingPlace { epoch, parts })) = (&mut self.log, &self.place) else {
            return added;
        };
        log.begin();
        if log.mark_told(added) || !log.marks_answers() {
            self.earlier.clear();
            return added;
        }
        for step in 0..added {
            if budget.is_used_up() {
                return step;
            }
            let used_index = self.positions.added_index(step);
            let front = self.earlier.front();
            let is_earlier = front.is_some_and(|(index, _)| *index == used_index);
            let earlier = match is_earlier {
                true => self.earlier.pop_front(),
                false => None,
            };
            let memory = earlier.as_ref().map_or(epoch, |(_, epoch)| epoch);
            let head = parts.used_head_at(self.positions.added_entry(step));
            log.answer(parts.table(memory), head, budget);
        }
        added
    }

    /// Shows the guest the first `count` of the added entries.
    #[cold]
    fn show_first(&mut self, count: u16) -> bool {
        let rest = self.positions.hold_back(count);
        let last = self.journal.as_mut().map(|journal| journal.hold_back(rest));
        let call = self.show();
        self.positions.add_again(rest);
        if let (Some(journal), Some(last)) = (&mut self.journal, last) {
            journal.add_again(last);
        }
        call
    }

    /// Marks the whole used ring, for a start: a daemon that was killed may have shown answers there and not marked them.
    pub fn log_ring(&mut self) {
        if let Some(log) = &mut self.log {
            log.begin();
            log.used(0, used_entry_offset(self.layout.size) + 2);
        }
    }

    /// Marks the fields of the used ring by which we say if we want kicks.
    #[inline]
    pub(super) fn log_fields(&mut self) {
        if let Some(log) = &self.log {
            log_fields(log, self.layout.size);
        }
    }
}

/// Apart, so that it costs a vring without a log nothing.
#[cold]
fn log_fields(log: &VringLog, size: u16) {
    log.begin();
    log.used(0, 2);
    log.used(used_entry_offset(size), 2);
}
