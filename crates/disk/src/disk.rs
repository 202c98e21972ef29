//! An opened disk.

mod possession;

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use cleave_blk::spec::ID_BYTES;
use cleave_blk::{Limits, Stripe};
use vm_memory::MmapRegion;

use crate::detect::{granule, probe_memory};
use crate::format::{image_format, other_partition_block};
use crate::given::GivenFiles;
use crate::model::SharedDrive;
use crate::serial::{ascii_serial, hashed_serial, path_serial};
use crate::superblock::{self, Superblock, SuperblockState};
use crate::{
    Backing, ContentOrigin, DiskSpec, FileKind, Leg, OpenError, OpenOptions, format_size, nbd, rbd,
};

/// An opened, locked and probed disk, shared by the engines of all its workers.
#[derive(Debug)]
pub struct Disk {
    name: String,
    serial: [u8; ID_BYTES],
    limits: Limits,
    capacity_bytes: AtomicU64,
    sync_failed: AtomicBool,
    /// The guest knows of the failed sync. Of an NBD disk, its client knows that.
    is_failure_told: AtomicBool,
    /// Syncs of its files that are under way, or whose result is not recorded yet.
    syncs: Arc<AtomicU32>,
    /// Where a failed sync is noted, and the line that says it.
    failure_note: Option<(File, &'static str)>,
    stripe: Option<Stripe>,
    /// Never empty.
    legs: Box<[Leg]>,
    /// The superblock of each leg, with its place, if the legs were opened by their superblocks.
    superblocks: Vec<(u64, Superblock)>,
    /// Locked while anything is in flight.
    barriers: Vec<File>,
    predecessor_died: bool,
    reopen_error: Option<io::Error>,
}

impl Drop for Disk {
    /// Closes the legs. Those that take long to close do so at the same time: a cluster that does not answer holds this up once.
    fn drop(&mut self) {
        let legs = std::mem::take(&mut self.legs).into_iter();
        drop(legs.filter_map(Leg::start_closing).collect::<Vec<_>>());
    }
}

/// A sync of a disk's files, which is under way until this is dropped.
#[derive(Debug)]
pub struct SyncUnderWay(Arc<AtomicU32>);

impl Drop for SyncUnderWay {
    fn drop(&mut self) {
        // Release, with the Acquire of `is_syncing`: the failure is seen by whoever does not see the sync any more.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// What the guest knows of a failed sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncFailure {
    /// No flush of the guest has been answered with an error since then.
    Untold,
    /// A flush of the guest has been answered with an error.
    Told,
}

/// Result of checking the size of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resized {
    /// The size has not changed.
    No,
    /// The disk has grown to this many bytes, and the guest can be told.
    Grown(u64),
    /// The leg with this index ends after this many bytes, before the size that the guest knows.
    Short(u16, u64),
}

impl Disk {
    /// Opens, locks (advisory: exclusive, or shared when read-only; unless [`Locking::Later`](crate::Locking::Later)) and probes.
    pub fn open(spec: &DiskSpec, options: &OpenOptions) -> Result<Disk, OpenError> {
        Disk::open_given(spec, options, Vec::new())
    }

    /// Opens a disk like `open`, and uses `given`, if there are any, in place of opening its files. They are the
    /// [`held_files`](Disk::held_files) of another process, which may go on with the disk if this one refuses it: an error releases
    /// no lock and leaves the flags of the files as they are. While the other process runs, the disk is opened with
    /// [`Locking::Given`](crate::Locking::Given). If it has released the disk, it is opened with
    /// [`Locking::Later`](crate::Locking::Later), and acquired when that process has ended.
    pub fn open_given(
        spec: &DiskSpec,
        options: &OpenOptions,
        given: Vec<File>,
    ) -> Result<Disk, OpenError> {
        let mut given = GivenFiles::new(given, slice::from_ref(spec))?;
        let name = spec.name();
        let (serial, limits, backing) = match spec {
            DiskSpec::Path(path) | DiskSpec::Raw(path) => {
                let (file, kind) = given.open(path, options.read_only, options.locking)?;
                if matches!(spec, DiskSpec::Path(_)) {
                    options.content.judge(refuse_format(path, &file))?;
                }
                let is_judged = matches!(spec, DiskSpec::Path(_)) && !options.read_only;
                if is_judged {
                    let blocks = refuse_partitions(&name, &file, options.block_bytes);
                    options.content.judge(blocks)?;
                }
                let mut backing = Backing::file(file, kind);
                if is_judged {
                    let raw = format!("raw:{name}");
                    options.content.judge(refuse_leg(&name, &backing, &raw))?;
                }
                let limits = backing.probe(&name, options)?;
                (path_serial(path), limits, backing)
            }
            DiskSpec::Ram(bytes) => {
                let limits = probe_memory(&name, *bytes, options)?;
                let region = map_ram(&name, *bytes)?;
                (ascii_serial("cleave-ram"), limits, Backing::Ram(region))
            }
            DiskSpec::Null(bytes) | DiskSpec::Untouched(bytes) => {
                let limits = probe_memory(&name, *bytes, options)?;
                let zeroes = matches!(spec, DiskSpec::Null(_));
                (
                    ascii_serial("cleave-null"),
                    limits,
                    Backing::Null { zeroes },
                )
            }
            DiskSpec::Model(model) => {
                let limits = probe_memory(&name, model.size_bytes(), options)?;
                let backing = Backing::Model {
                    ram: map_ram(&name, model.size_bytes())?,
                    drive: Arc::new(Mutex::new(SharedDrive::new(model.drive()))),
                };
                let serial = ascii_serial(&format!("cleave-{}", model.preset()));
                (serial, limits, backing)
            }
            DiskSpec::Nbd(spec) => {
                let (nbd, limits) = nbd::open(spec, &name, options)?;
                let serial = hashed_serial(spec.place().as_bytes());
                (serial, limits, Backing::Nbd(Box::new(nbd)))
            }
            DiskSpec::Rbd(spec) => {
                let image = rbd::open(spec, &name, options.read_only, options.locking)?;
                let mut backing = Backing::Rbd(Box::new(image));
                if !spec.is_raw && !options.read_only {
                    let raw = format!("{name},raw=on");
                    options.content.judge(refuse_leg(&name, &backing, &raw))?;
                }
                let limits = backing.probe(&name, options)?;
                let serial = hashed_serial(spec.place.image_name().as_bytes());
                (serial, limits, backing)
            }
        };
        let legs = given.put_into(vec![Leg::new(name.clone(), backing)])?;
        Ok(Disk::of_legs(
            name,
            serial,
            limits,
            None,
            legs,
            options.workers,
        ))
    }

    /// Makes a disk of these legs. `stripe`: given if there is more than one leg. There is at least one.
    pub(crate) fn of_legs(
        name: String,
        serial: [u8; ID_BYTES],
        limits: Limits,
        stripe: Option<Stripe>,
        mut legs: Vec<Leg>,
        workers: u16,
    ) -> Disk {
        debug_assert_eq!(legs.len(), stripe.map_or(1, |stripe| stripe.legs().into()));
        // Opened now, not when a worker starts: if a failed write-back was already reported to one
        // description, the kernel does not report it to a description that is opened later.
        let opened = legs.iter_mut().try_for_each(|leg| leg.open_for(workers));
        if opened.is_err() {
            legs.iter_mut().for_each(Leg::close_more_files);
        }
        let share = limits.capacity_bytes / legs.len().max(1) as u64;
        legs.iter().for_each(|leg| leg.serve_bytes(share));
        Disk {
            name,
            serial,
            capacity_bytes: AtomicU64::new(limits.capacity_bytes),
            limits,
            sync_failed: AtomicBool::new(false),
            is_failure_told: AtomicBool::new(false),
            syncs: Arc::default(),
            failure_note: None,
            stripe,
            legs: legs.into_boxed_slice(),
            superblocks: Vec::new(),
            barriers: Vec::new(),
            predecessor_died: false,
            reopen_error: opened.err(),
        }
    }

    /// Has these superblocks be the ones that the legs must have when they are acquired.
    pub(crate) fn with_superblocks(mut self, superblocks: Vec<(u64, Superblock)>) -> Disk {
        self.superblocks = superblocks;
        self
    }

    /// Returns the name that an operator uses: the path or the spec.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the default serial number: printable ASCII, padded with zero bytes, the same at every start for the same path
    /// (after following links).
    pub fn serial(&self) -> [u8; ID_BYTES] {
        self.serial
    }

    /// Returns the disk's limits. `limits().capacity_bytes` is the size when it was opened; see `capacity_bytes`.
    #[inline]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the size that the guest sees now.
    #[inline]
    pub fn capacity_bytes(&self) -> u64 {
        // Acquire: a reader of a larger size must also see the larger legs (`refresh`).
        self.capacity_bytes.load(Ordering::Acquire)
    }

    /// Checks the sizes of the files or devices again. If a disk of one leg grew, `capacity_bytes` grows. A
    /// disk that shrank keeps the size that the guest knows, and I/O beyond the end of the leg that shrank fails
    /// ([`Leg::served_bytes`]). A stripe does not grow, because its superblocks are at the original ends of its legs.
    pub fn refresh(&self) -> io::Result<Resized> {
        let granule = granule(self.limits.block_bytes, self.limits.offset_align_bytes);
        let usable = |size| size - size % u64::from(granule);
        let known = self.leg_share_bytes(self.capacity_bytes());
        let grows = |size| self.stripe.is_none() && usable(size) > known;
        let mut least: Option<(u64, u16)> = None;
        for (leg, number) in self.legs.iter().zip(0..) {
            let size = leg.backing().size_bytes()?;
            if let Some(size) = size.map(|size| size.min(i64::MAX as u64)) {
                leg.serve_bytes(match grows(size) {
                    true => usable(size),
                    false => usable(size).min(known),
                });
                least = Some(least.map_or((size, number), |least| least.min((size, number))));
            }
        }
        let Some((size, number)) = least else {
            return Ok(Resized::No);
        };
        let (usable, grows) = (usable(size), grows(size));
        if usable < known {
            return Ok(Resized::Short(number, size));
        }
        // The first caller that sees the larger size publishes it; others get `No`. Release: see `capacity_bytes`.
        let first = grows && self.capacity_bytes.fetch_max(usable, Ordering::Release) < usable;
        Ok(if first {
            Resized::Grown(usable)
        } else {
            Resized::No
        })
    }

    /// Returns the bytes that are missing at the end of the shortest leg, because it shrank: I/O there fails.
    pub fn short_bytes(&self) -> u64 {
        let known = self.leg_share_bytes(self.capacity_bytes());
        let served = self.legs.iter().map(Leg::served_bytes).min();
        // A disk that grows has the larger leg before the larger size.
        known.saturating_sub(served.unwrap_or(known))
    }

    /// Returns the bytes that a disk of this size uses of each leg.
    fn leg_share_bytes(&self, capacity_bytes: u64) -> u64 {
        capacity_bytes / self.stripe.map_or(1, |stripe| stripe.legs().into())
    }

    /// Returns the layout over the legs, if there are several.
    #[inline]
    pub fn stripe(&self) -> Option<Stripe> {
        self.stripe
    }

    /// Returns the legs, in order. At least one.
    #[inline]
    pub fn legs(&self) -> &[Leg] {
        &self.legs
    }

    pub(crate) fn legs_mut(&mut self) -> &mut [Leg] {
        &mut self.legs
    }

    /// Returns true if its reads and writes bypass the page cache (O_DIRECT); of a stripe, those of all its legs. `None`: it is
    /// in memory and has no page cache.
    pub fn is_direct(&self) -> Option<bool> {
        let each = self.legs.iter().map(|leg| match leg.backing() {
            Backing::File { direct, .. } => Some(*direct),
            _ => None,
        });
        each.reduce(|a, b| Some(a? && b?))?
    }

    /// Returns the first leg's backing. All legs have the same kind.
    #[inline]
    pub fn backing(&self) -> &Backing {
        // There is a leg (`of_legs`).
        self.legs
            .first()
            .map_or(&Backing::Null { zeroes: true }, Leg::backing)
    }

    /// Adds a locked file that every io_uring of the disk will hold. The I/O of a process continues after its
    /// death, and locks on files that its rings hold are released only when that I/O has ended. So a daemon
    /// that gets the lock may begin.
    pub fn add_barrier(&mut self, locked: File) {
        self.barriers.push(locked);
    }

    /// Returns the locked files that every io_uring of the disk holds: those of the legs, and those added.
    pub fn barriers(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.held_files().chain(&self.barriers).map(File::as_fd)
    }

    /// Returns the files that have the disk's locks and claims, in the order of its legs, for a process that goes on with the disk
    /// ([`open_given`](Disk::open_given)). A disk that is not a file or a device has none.
    pub fn held_files(&self) -> impl Iterator<Item = &File> {
        self.legs.iter().filter_map(|leg| match leg.backing() {
            Backing::File { file, .. } => Some(file),
            _ => None,
        })
    }

    /// Returns the most workers that may serve it at once: as many as its files were opened for. If they could not be opened
    /// again (`reopen_error`) it is one, so that at most one fsync of a file is in flight.
    pub fn workers_max(&self) -> u16 {
        let least = self.legs.iter().map(Leg::workers_max).min();
        least.map_or(1, |least| u16::try_from(least).unwrap_or(u16::MAX))
    }

    /// Returns why its files could not be opened once for each worker.
    pub fn reopen_error(&self) -> Option<&io::Error> {
        self.reopen_error.as_ref()
    }

    /// Returns the bytes of this leg that may be read and written ([`Leg::served_bytes`]); of one that there is not, 0.
    #[inline]
    pub fn leg_bytes(&self, leg: u16) -> u64 {
        self.legs.get(usize::from(leg)).map_or(0, Leg::served_bytes)
    }

    /// Makes everything durable that was written so far. It may block for as long as the storage does. A failure is
    /// recorded as that of a guest's flush is. An NBD disk that a worker serves has to be flushed by the worker, which has the
    /// connections.
    pub fn sync(&self) -> io::Result<()> {
        if self.sync_failed() {
            return Err(io::Error::other(
                "an earlier flush failed, so nothing can be said of what was written: open the disk again",
            ));
        }
        let _under_way = self.begin_sync();
        for leg in &self.legs {
            // Nobody else flushes before a failure is recorded.
            let (synced, _turn) = match leg.backing() {
                Backing::Nbd(nbd) => nbd.sync_at_rest()?,
                _ => (leg.sync(), None),
            };
            synced.inspect_err(|_| self.mark_sync_failed())?;
        }
        Ok(())
    }

    /// Returns why no copy of this disk can share its blocks; `None`: it is one regular file.
    pub fn why_not_cloned(&self) -> Option<&'static str> {
        match (self.backing(), self.legs.len()) {
            (
                Backing::File {
                    kind: FileKind::Regular,
                    ..
                },
                1,
            ) => None,
            (
                Backing::File {
                    kind: FileKind::Regular,
                    ..
                },
                _,
            ) => Some("a stripe has several files: quiesce it, and copy each leg"),
            (Backing::File { .. }, _) => Some(
                "a block device has no file system to share blocks: quiesce it, and use its own snapshots (LVM, ZFS)",
            ),
            (Backing::Nbd(_), _) => Some(
                "the file of an NBD disk is its server's: quiesce the disk, and take the snapshot there",
            ),
            (Backing::Rbd(_), _) => Some(
                "an image of a Ceph cluster has snapshots of its own: quiesce the disk, and use rbd snap create",
            ),
            (Backing::Ram(_) | Backing::Null { .. } | Backing::Model { .. }, _) => {
                Some("a disk in memory has no file to copy: copy its content in the guest")
            }
        }
    }

    /// Makes an empty file share all blocks of the disk (FICLONE).
    pub fn clone_to(&self, to: &File) -> io::Result<()> {
        let Backing::File { file, .. } = self.backing() else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        rustix::fs::ioctl_ficlone(to, file).map_err(|errno| match errno {
            rustix::io::Errno::XDEV => io::Error::other("the copy must be on the file system of the disk"),
            rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOTTY | rustix::io::Errno::INVAL => {
                io::Error::other("its file system cannot share blocks (XFS and Btrfs can): quiesce it, and copy it by other means")
            }
            errno => errno.into(),
        })
    }

    /// Records that the daemon which served this disk before did not end in order. What it sent may be under way even if the guest
    /// brings no list of it.
    pub fn mark_predecessor_died(&mut self) {
        self.predecessor_died = true;
    }

    /// Returns true if the daemon that served this disk before is known not to have ended in order.
    pub fn predecessor_died(&self) -> bool {
        self.predecessor_died
    }

    /// Returns when the requests that a killed daemon left in flight have ended, which may be under way until then. `None`: they ended
    /// before the locks (`barriers`) could be taken.
    pub fn settled_at(&self) -> Option<Instant> {
        match self.backing() {
            Backing::Nbd(nbd) => nbd.settled_at(),
            _ => None,
        }
    }

    /// Returns true if its store connects again to a server that it has lost.
    pub fn reconnects(&self) -> bool {
        matches!(self.backing(), Backing::Nbd(_))
    }

    /// Returns true if its store has lost its server, and has not connected to it again.
    pub fn is_cut_off(&self) -> bool {
        matches!(self.backing(), Backing::Nbd(nbd) if nbd.is_cut_off())
    }

    /// Returns true if an NBD server may have lost what it answered and was not sent it again, and no flush of the guest has failed
    /// since.
    pub fn owes_changes(&self) -> bool {
        matches!(self.backing(), Backing::Nbd(nbd) if nbd.owes_changes())
    }

    /// Returns true if an NBD server has answered changes and not flushed them. If no store runs, the first that does sends them again.
    pub fn has_unflushed(&self) -> bool {
        matches!(self.backing(), Backing::Nbd(nbd) if nbd.has_unflushed())
    }

    /// Records that the daemon which served this disk before owed changes when it ended ([`Disk::owes_changes`]), or that a sync had
    /// failed of which the guest may not know. They are gone, so every flush fails.
    pub fn mark_changes_lost(&self) {
        let Backing::Nbd(nbd) = self.backing() else {
            return self.inherit_sync_failure(SyncFailure::Untold);
        };
        tracing::error!(
            "{}: the daemon before this one ended before the guest was told of a loss: what its NBD server had answered and \
             not flushed may be gone; every flush fails until the disk is reopened",
            self.name()
        );
        nbd.mark_changes_lost();
    }

    /// Records that the guest was answered that a flush failed. The next daemon need not tell it of earlier losses.
    pub fn mark_loss_told(&self) {
        self.is_failure_told.store(true, Ordering::Release);
        if let Backing::Nbd(nbd) = self.backing() {
            nbd.mark_loss_told();
        }
    }

    /// Returns true if the guest does not know yet that changes are lost, or may be. If this process ends while a sync is under way, nobody
    /// hears how that ends: the kernel or the server may tell it alone of a loss.
    pub fn is_loss_untold(&self) -> bool {
        // First, because a failure is recorded before the sync counts as ended.
        self.is_syncing() || self.owes_changes() || self.sync_failure() == Some(SyncFailure::Untold)
    }

    /// Has a sync of its files count as under way, from before it begins. If it fails, that is recorded before the result is dropped.
    pub fn begin_sync(&self) -> SyncUnderWay {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        SyncUnderWay(Arc::clone(&self.syncs))
    }

    /// Returns true while a sync is under way whose result is not recorded yet.
    pub fn is_syncing(&self) -> bool {
        self.syncs.load(Ordering::Acquire) > 0
            || matches!(self.backing(), Backing::Nbd(nbd) if nbd.has_flush_out())
    }

    /// Has this line appended to a file when a sync fails, before anybody learns of it: a process that follows this one finds the
    /// line, however this one ends.
    pub fn note_sync_failure(&mut self, file: File, line: &'static str) {
        self.failure_note = Some((file, line));
    }

    /// Goes on with the failed sync of the process that served this disk before, from which this one has taken it.
    pub fn inherit_sync_failure(&self, failure: SyncFailure) {
        if !self.sync_failed() {
            let disk = self.name();
            tracing::error!(
                "{disk}: a sync failed in the daemon before this one, and data may be lost; every flush fails until the disk is reopened"
            );
        }
        self.mark_sync_failed();
        if failure == SyncFailure::Told {
            self.mark_loss_told();
        }
    }

    /// Gives up what is in flight: no request is sent to an NBD server any more, and those that wait for it fail. Nobody waits for
    /// them, and the guest may be served elsewhere.
    pub fn abandon(&self) {
        if let Backing::Nbd(nbd) = self.backing() {
            nbd.abandon();
        }
    }

    /// Returns true if the disk was given up, so that a request which fails was not done.
    pub fn is_abandoned(&self) -> bool {
        matches!(self.backing(), Backing::Nbd(nbd) if nbd.is_abandoned())
    }

    /// Records a failed fsync: the kernel may have dropped dirty pages, so no later fsync can vouch for them.
    /// Permanent until the disk is reopened.
    pub fn mark_sync_failed(&self) {
        if let Some((file, line)) = &self.failure_note
            && !self.sync_failed.load(Ordering::Acquire)
        {
            // Without the note, a process that follows the death of this one does not know.
            let mut file = file;
            if let Err(error) = file.write_all(line.as_bytes()) {
                let disk = self.name();
                tracing::error!(disk, %error, "a failed sync cannot be noted beside the socket");
            }
        }
        // Release, with the Acquire below: a worker that learns of a failed sync from the guest's next
        // request must also see it here, whichever worker it failed on.
        self.sync_failed.store(true, Ordering::Release);
        if let Backing::Nbd(nbd) = self.backing() {
            nbd.mark_loss_untold();
        }
    }

    /// Returns true if an fsync ever failed, or a server lost what it had answered.
    pub fn sync_failed(&self) -> bool {
        self.sync_failed.load(Ordering::Acquire)
            || matches!(self.backing(), Backing::Nbd(nbd) if nbd.has_lost_data())
    }

    /// Returns what the guest knows of it, if a sync has failed.
    pub fn sync_failure(&self) -> Option<SyncFailure> {
        let is_told = match self.backing() {
            Backing::Nbd(nbd) => !nbd.owes_changes(),
            _ => self.is_failure_told.load(Ordering::Acquire),
        };
        self.sync_failed().then_some(match is_told {
            true => SyncFailure::Told,
            false => SyncFailure::Untold,
        })
    }

    /// Returns this disk, for tests of engines, with larger alignments (powers of two). A stricter alignment than the real one is
    /// always safe; bytes beyond the last whole unit are cut off.
    #[doc(hidden)]
    #[must_use]
    pub fn with_alignment(mut self, offset_align_bytes: u32, memory_align_bytes: u32) -> Disk {
        let offset_align = offset_align_bytes
            .max(self.limits.offset_align_bytes)
            .max(1);
        self.limits.offset_align_bytes = offset_align;
        self.limits.discard_align_bytes = self.limits.discard_align_bytes.max(offset_align);
        self.limits.memory_align_bytes = memory_align_bytes
            .max(self.limits.memory_align_bytes)
            .max(1);
        self.limits.capacity_bytes -= self.limits.capacity_bytes % u64::from(offset_align);
        self.capacity_bytes = AtomicU64::new(self.limits.capacity_bytes);
        let share = self.leg_share_bytes(self.limits.capacity_bytes);
        self.legs.iter().for_each(|leg| leg.serve_bytes(share));
        self
    }

    /// For tests: acts as if its files were on a file system that may write through the page cache in spite of O_DIRECT. That is
    /// always safe.
    #[doc(hidden)]
    #[must_use]
    pub fn with_cached_writes(mut self) -> Disk {
        self.legs.iter_mut().for_each(Leg::set_caches_writes);
        self
    }
}

impl ContentOrigin {
    /// Refuses a disk because of what it holds, unless its guest wrote that.
    fn judge(self, verdict: Result<(), OpenError>) -> Result<(), OpenError> {
        let (name, what) = match (self, &verdict) {
            (ContentOrigin::Guest, Err(OpenError::Format(name, format))) => {
                (name, format!("a {format} image"))
            }
            (
                ContentOrigin::Guest,
                Err(OpenError::Leg {
                    name, leg, legs, ..
                }),
            ) => (name, format!("leg {leg} of {legs} of a stripe")),
            (ContentOrigin::Guest, Err(OpenError::Partitions(name, block, _))) => (
                name,
                format!("one with partitions in blocks of {block} bytes"),
            ),
            _ => return verdict,
        };
        tracing::warn!(
            "disk {name} looks like {what}, which its guest wrote: it was served before, and is served as it is"
        );
        Ok(())
    }
}

fn refuse_format(path: &Path, file: &File) -> Result<(), OpenError> {
    match image_format(file) {
        Ok(None) => Ok(()),
        Ok(Some(format)) => Err(OpenError::Format(path.display().to_string(), format)),
        Err(error) => Err(OpenError::io(path, error)),
    }
}

/// Refuses partitions that the guest would not find. A guest with other blocks might take the disk for an empty one.
fn refuse_partitions(name: &str, file: &File, block_bytes: u32) -> Result<(), OpenError> {
    match other_partition_block(file, block_bytes) {
        Ok(Some(other)) => Err(OpenError::Partitions(name.to_owned(), other, block_bytes)),
        // An error of this read is reported when the limits of the disk are found.
        _ => Ok(()),
    }
}

/// Refuses to write to one leg of a stripe: that would damage the data of the stripe. `raw`: the word for `--disk` that does it
/// nevertheless.
fn refuse_leg(name: &str, backing: &Backing, raw: &str) -> Result<(), OpenError> {
    match superblock::read(backing) {
        Ok((_, SuperblockState::Whole(superblock))) => Err(OpenError::Leg {
            name: name.to_owned(),
            leg: superblock.leg + 1,
            legs: superblock.stripe.legs(),
            chunk: format_size(superblock.stripe.chunk_bytes().into()),
            raw: raw.to_owned(),
        }),
        // A superblock that cannot be read is not needed to serve a disk of one leg.
        _ => Ok(()),
    }
}

fn map_ram(name: &str, bytes: u64) -> Result<MmapRegion, OpenError> {
    let failed = |source| OpenError::Ram(name.to_owned(), source);
    let size = usize::try_from(bytes).map_err(|_| failed(io::ErrorKind::OutOfMemory.into()))?;
    MmapRegion::new(size).map_err(|error| failed(io::Error::other(error.to_string())))
}

#[cfg(test)]
mod tests;
