//! The rules by which the fields of a description must agree. A refusal names the field, and says what to do.

use cleave_disk::StripeKind;

use crate::disk::DiskConfig;
use crate::names::Names;
use crate::storage::Storage;
use crate::values::split::SplitOption;

impl DiskConfig {
    /// Checks that the fields agree.
    pub fn check(&self, names: Names) -> Result<(), String> {
        self.storage(names)?;
        let max = self.coalesce_max.get().get();
        if max > 0 && self.coalesce_us.get().get() == 0 {
            let (about, us) = (names.about("coalesce_max"), names.of("coalesce_us"));
            return Err(format!(
                "{about}{max} has no effect without a time: also set {us}"
            ));
        }
        if let Some(profile) = &self.profile
            && self.split.get() != SplitOption::Auto
        {
            return Err(format!(
                "{}{} is for {} auto; leave one of the two out",
                names.about("profile"),
                profile.display(),
                names.of("split")
            ));
        }
        let threads = [
            ("workers", self.workers.is_some()),
            ("cpus", self.cpus.is_some()),
        ];
        if let Some((own, _)) = threads.into_iter().find(|(_, is_given)| *is_given)
            && self.pool.is_some()
        {
            return Err(format!(
                "pool: a disk in a pool has no threads of its own: leave {own} out"
            ));
        }
        Ok(())
    }

    /// Returns the storage that is to be opened.
    pub fn storage(&self, names: Names) -> Result<Storage, String> {
        let kind = match self.stripe_raw {
            true => StripeKind::Raw,
            false => StripeKind::Superblocks,
        };
        let chunk_bytes = self.stripe.map(|size| size.bytes());
        let specs: Vec<_> = self.disk.iter().map(|disk| disk.spec().clone()).collect();
        let storage = Storage::new(&specs, chunk_bytes, kind, names)?;
        storage.check_block(self.block_size.get().bytes(), names)?;
        Ok(storage)
    }
}
