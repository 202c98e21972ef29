//! One drive with several owners; each receives only its own completions.

use std::collections::VecDeque;

use super::timing::CommandId;
use super::{Drive, DriveWork, Timing};

/// A submitter to a drive; ended by [`SharedDrive::leave`].
#[derive(Debug, PartialEq, Eq)]
pub struct Owner(u16);

/// A drive and its completed commands for each owner. A call that advances the time does so for all owners:
/// completions of others wait in their queues.
#[derive(Debug)]
pub struct SharedDrive {
    timing: Timing,
    /// `None`: the number is free.
    completions: Vec<Option<VecDeque<u32>>>,
}

impl SharedDrive {
    /// Makes an idle drive.
    pub fn new(drive: Drive) -> SharedDrive {
        SharedDrive {
            timing: Timing::new(drive),
            completions: Vec::new(),
        }
    }

    /// Adds an owner. `None`: there are 65536 already.
    pub fn join(&mut self) -> Option<Owner> {
        let number = match self.completions.iter().position(Option::is_none) {
            Some(number) => number,
            None => {
                self.completions.push(None);
                self.completions.len() - 1
            }
        };
        let owner = u16::try_from(number).ok()?;
        *self.completions.get_mut(number)? = Some(VecDeque::new());
        Some(Owner(owner))
    }

    /// Removes an owner that has nothing in flight. Its number is reused.
    pub fn leave(&mut self, owner: &Owner) {
        if let Some(place) = self.completions.get_mut(usize::from(owner.0)) {
            *place = None;
        }
    }

    /// Submits a command. [`SharedDrive::floor_ns`] accepts the returned number until the command has completed.
    pub fn submit(
        &mut self,
        now_ns: u64,
        (owner, token): (&Owner, u32),
        work: DriveWork,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> u32 {
        let id = CommandId {
            owner: owner.0,
            token,
        };
        self.timing
            .submit_for(now_ns, id, work, offset_bytes, len_bytes)
    }

    /// Advances the time, and appends this owner's completions to `tokens` in order of completion.
    pub fn collect(&mut self, now_ns: u64, owner: &Owner, tokens: &mut VecDeque<u32>) {
        self.timing.advance(now_ns);
        while let Some(id) = self.timing.finished_for_any() {
            if let Some(Some(place)) = self.completions.get_mut(usize::from(id.owner)) {
                place.push_back(id.token);
            }
        }
        if let Some(Some(place)) = self.completions.get_mut(usize::from(owner.0)) {
            tokens.append(place);
        }
    }

    /// Returns a lower bound for the command's completion time; later submissions can only delay it. `None`: the command has
    /// completed.
    pub fn floor_ns(&self, number: u32) -> Option<u64> {
        self.timing.floor_ns(number)
    }

    /// Changes the drive's parameters, like [`Timing::change`].
    pub fn change(&mut self, drive: Drive) {
        self.timing.change(drive);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelSpec;

    fn shared() -> SharedDrive {
        let spec: ModelSpec = "p3700,jitter=0".parse().unwrap();
        SharedDrive::new(spec.drive())
    }

    #[test]
    fn each_owner_gets_its_own_completions_whoever_advances_time() {
        let mut shared = shared();
        let (a, b) = (shared.join().unwrap(), shared.join().unwrap());
        shared.submit(0, (&a, 1), DriveWork::Read, 0, 4096);
        shared.submit(0, (&b, 2), DriveWork::Read, 1 << 20, 4096);
        shared.submit(0, (&a, 3), DriveWork::Read, 8 << 20, 4096);
        let (mut of_a, mut of_b) = (VecDeque::new(), VecDeque::new());
        shared.collect(1_000_000, &b, &mut of_b);
        assert_eq!((&of_a.len(), Vec::from(of_b)), (&0, vec![2]));
        shared.collect(0, &a, &mut of_a);
        assert_eq!(Vec::from(of_a), [1, 3]);
    }

    #[test]
    fn a_released_number_is_reused_without_old_completions() {
        let mut shared = shared();
        let a = shared.join().unwrap();
        shared.submit(0, (&a, 1), DriveWork::Read, 0, 4096);
        let mut tokens = VecDeque::new();
        let b = shared.join().unwrap();
        shared.collect(1_000_000, &b, &mut tokens);
        shared.leave(&a);
        let c = shared.join().unwrap();
        assert_eq!(c, a);
        shared.collect(1_000_000, &c, &mut tokens);
        assert!(tokens.is_empty());
    }
}
