//! Room for mappings, which all frontends of a process share: its address space, and the entries of the table of the SIGBUS handler.
//!
//! A memory table may have a sixteenth of the room that the other tables leave. So a frontend that maps all that it can leaves most of
//! the room, and many of them leave enough for the next one: after 32 of them there is still room for a table of 1 TiB. Without this,
//! a sparse file as long as the address space would keep all other guests of a node from memory, and the node from its own.
//!
//! The share of a table depends on those that came before. So a table that another process has accepted may have all that is left: its
//! guest runs, and here the tables may come in another order.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Address space of a process, in bytes: 47 bits on x86-64. The kernels of distributions for arm64 have 48 bits.
pub(crate) const BYTES_MAX: u64 = 1 << 47;
/// Mappings at a time: a quarter of those that Linux lets a process have by default (`vm.max_map_count`).
pub(crate) const MAPPINGS_MAX: usize = 16384;
/// One table may have one part of so many.
const PARTS: u64 = 16;

/// The room that all mappings of the process take.
static ALL: Mutex<Taken> = Mutex::new(Taken {
    bytes: 0,
    mappings: 0,
});

/// How much of the room that others leave a memory table may have, and whatever else a frontend shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allowance {
    /// A sixteenth.
    Share,
    /// All of it, for what another process has accepted.
    Rest,
}

/// The room that mappings take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    bytes: u64,
    mappings: u64,
}

impl Taken {
    /// Returns the room that one mapping takes.
    pub(crate) fn by_one(bytes: u64) -> Taken {
        Taken { bytes, mappings: 1 }
    }

    /// Returns the sum of both.
    pub(crate) fn and(self, other: Taken) -> Taken {
        Taken {
            bytes: self.bytes.saturating_add(other.bytes),
            mappings: self.mappings + other.mappings,
        }
    }

    fn without(self, part: Taken) -> Taken {
        Taken {
            bytes: self.bytes.saturating_sub(part.bytes),
            mappings: self.mappings.saturating_sub(part.mappings),
        }
    }

    /// Returns the room that is taken with one more mapping in a table that takes `own` already; `None` if the table may not have it.
    fn with(self, one: Taken, own: Taken, allowance: Allowance) -> Option<Taken> {
        let (table, others) = (own.and(one), self.without(own));
        let parts = match allowance {
            Allowance::Share => PARTS,
            Allowance::Rest => 1,
        };
        let share = |all: u64, others: u64| all.saturating_sub(others) / parts;
        let fits = table.bytes <= share(BYTES_MAX, others.bytes)
            && table.mappings <= share(MAPPINGS_MAX as u64, others.mappings);
        fits.then(|| self.and(one))
    }
}

/// The room of one mapping, until this is dropped.
#[derive(Debug)]
pub(crate) struct Place(Taken);

impl Place {
    /// Takes room for a mapping of a table whose mappings take `own` already. `None`: the table may have no more.
    pub(crate) fn take(bytes: u64, own: Taken, allowance: Allowance) -> Option<Place> {
        let one = Taken::by_one(bytes);
        let mut all = lock();
        *all = all.with(one, own, allowance)?;
        Some(Place(one))
    }

    /// Returns the room that it takes.
    pub(crate) fn taken(&self) -> Taken {
        self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = lock();
        *all = all.without(self.0);
    }
}

fn lock() -> MutexGuard<'static, Taken> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::Allowance::{Rest, Share};
    use super::*;

    const NONE: Taken = Taken {
        bytes: 0,
        mappings: 0,
    };

    #[test]
    fn frontends_that_map_all_they_can_leave_room_for_others() {
        let mut all = NONE;
        for left_bytes in [1 << 40, 128 << 30] {
            for _ in 0..32 {
                let most_bytes = (BYTES_MAX - all.bytes) / PARTS;
                assert_eq!(all.with(Taken::by_one(most_bytes + 1), NONE, Share), None);
                all = all.with(Taken::by_one(most_bytes), NONE, Share).unwrap();
            }
            assert!(all.with(Taken::by_one(left_bytes), NONE, Share).is_some());
        }
    }

    #[test]
    fn frontends_that_use_all_slots_leave_some_for_others() {
        let fill = |all: &mut Taken, slots: usize| {
            let mut own = NONE;
            for slot in 0..slots {
                let Some(next) = all.with(Taken::by_one(4096), own, Share) else {
                    return slot;
                };
                (*all, own) = (next, own.and(Taken::by_one(4096)));
            }
            slots
        };
        let mut all = NONE;
        let slots_max = crate::Memory::REGIONS_MAX;
        for _ in 0..16 {
            assert_eq!(fill(&mut all, slots_max), slots_max);
        }
        for _ in 16..64 {
            fill(&mut all, slots_max);
        }
        assert_eq!(fill(&mut all, 16), 16);
    }

    #[test]
    fn tables_that_were_accepted_fit_in_any_order_and_no_more_than_there_is() {
        let mut tables = Vec::new();
        let mut all = NONE;
        for _ in 0..64 {
            let most = Taken::by_one((BYTES_MAX - all.bytes) / PARTS);
            all = all.with(most, NONE, Share).unwrap();
            tables.push(most);
        }
        let mut again = NONE;
        for table in tables.into_iter().rev() {
            again = again.with(table, NONE, Rest).unwrap();
        }
        assert_eq!(again, all);
        let left_bytes = BYTES_MAX - all.bytes;
        assert_eq!(all.with(Taken::by_one(left_bytes + 1), NONE, Rest), None);
        assert!(all.with(Taken::by_one(left_bytes), NONE, Rest).is_some());
        let slots = Taken {
            bytes: 0,
            mappings: MAPPINGS_MAX as u64,
        };
        assert_eq!(slots.with(Taken::by_one(1), NONE, Rest), None);
    }

    #[test]
    fn room_comes_back() {
        let place = Place::take(1 << 42, NONE, Share).unwrap();
        let own = place.taken();
        assert!(Place::take(1 << 43, own, Share).is_none());
        drop(place);
        drop(Place::take(1 << 42, NONE, Share).unwrap());
    }
}
