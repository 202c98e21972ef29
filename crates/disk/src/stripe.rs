//! Several files and devices, or several images, as one disk (RAID-0): open, check, create and show.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use cleave_blk::{Limits, Stripe};
use cleave_rbd::ImagePlace;

use crate::given::GivenFiles;
use crate::open::open_unlocked;
use crate::serial::hashed_serial;
use crate::size::format_size;
use crate::superblock::{self, Superblock, SuperblockState};
use crate::{
    Backing, ContentOrigin, Direct, Disk, DiskSpec, FileKind, Leg, Locking, OpenError, OpenOptions,
    rbd,
};

mod check;
mod error;

pub use error::StripeError;

use check::StripeMember;
use error::wrong_count;

/// `create_stripe` takes a leg without --force only if this many bytes at its beginning are zero. All common
/// partition tables, volume labels and file systems begin within them.
const CHECKED_BYTES: u64 = 128 << 10;

/// How the legs are known to belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StripeKind {
    /// Each has a superblock, written by `create_stripe`.
    Superblocks,
    /// By the operator's statement.
    Raw,
}

/// What `create_stripe` does with legs that contain data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overwrite {
    /// They are refused.
    No,
    /// They are taken, and their data is lost.
    Yes,
}

/// A stripe as it was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Created {
    /// The layout.
    pub stripe: Stripe,
    /// Bytes of data on each leg.
    pub data_bytes: u64,
    /// Unused bytes of the largest leg, superblock included.
    pub unused_bytes: u64,
}

/// Result of `show_stripe`.
#[derive(Debug)]
pub struct StripeListing {
    /// One line per leg.
    pub lines: Vec<String>,
    /// The stripe that the legs form in this order, or why they form none.
    pub whole: Result<Created, StripeError>,
}

impl Disk {
    /// Opens, locks and probes the legs of a stripe, in order. The disk's limits hold on every leg.
    pub fn open_stripe(
        specs: &[DiskSpec],
        chunk_bytes: u32,
        kind: StripeKind,
        options: &OpenOptions,
    ) -> Result<Disk, OpenError> {
        Disk::open_stripe_given(specs, chunk_bytes, kind, options, Vec::new())
    }

    /// Opens a stripe with files that another process has given ([`open_given`](Disk::open_given)).
    pub fn open_stripe_given(
        specs: &[DiskSpec],
        chunk_bytes: u32,
        kind: StripeKind,
        options: &OpenOptions,
        given: Vec<File>,
    ) -> Result<Disk, OpenError> {
        let stripe = layout(specs.len(), chunk_bytes)?;
        let mut given = GivenFiles::new(given, specs)?;
        let members = open_all(specs, |spec| {
            open_locked(spec, options.read_only, options.locking, &mut given)
        })?;
        let mut superblocks = Vec::new();
        let (data_bytes, serial) = match kind {
            StripeKind::Superblocks => {
                let whole = check::whole(&as_members(&members), Some(chunk_bytes))?;
                superblocks.extend(members.iter().filter_map(Opened::superblock));
                (whole.data_bytes, hashed_serial(&whole.set))
            }
            StripeKind::Raw => {
                // The last chunk of a leg belongs to the guest.
                if options.content == ContentOrigin::Unknown {
                    check::raw(&as_members(&members))?;
                }
                let least = members.iter().map(|member| member.size_bytes).min();
                let names: Vec<u8> = members.iter().flat_map(|m| m.name.bytes()).collect();
                (rounded(least.unwrap_or(0), stripe), hashed_serial(&names))
            }
        };
        let (limits, legs) = probe_all(members, data_bytes, stripe, options)?;
        let legs = given.put_into(legs)?;
        let first = legs.first().map(Leg::name).unwrap_or_default();
        let name = format!("stripe of {} ({first} …)", stripe.legs());
        let workers = options.workers;
        Ok(
            Disk::of_legs(name, serial, limits, Some(stripe), legs, workers)
                .with_superblocks(superblocks),
        )
    }
}

/// An opened leg and its superblock, if it has one.
struct Opened {
    name: String,
    backing: Backing,
    size_bytes: u64,
    found: SuperblockState,
}

impl Opened {
    /// Returns its superblock, if that is whole, and the place of it.
    fn superblock(&self) -> Option<(u64, Superblock)> {
        match (superblock::offset(self.size_bytes), self.found) {
            (Some(place), SuperblockState::Whole(found)) => Some((place, found)),
            _ => None,
        }
    }

    fn too_small(&self) -> StripeError {
        StripeError(format!(
            "leg {} has {} bytes, too few for a chunk and a superblock; make it larger",
            self.name, self.size_bytes
        ))
    }
}

fn as_members(members: &[Opened]) -> Vec<StripeMember<'_>> {
    members
        .iter()
        .map(|opened| StripeMember {
            name: &opened.name,
            size_bytes: opened.size_bytes,
            found: opened.found,
        })
        .collect()
}

/// Rounds a size down to whole chunks.
fn rounded(bytes: u64, stripe: Stripe) -> u64 {
    bytes - bytes % u64::from(stripe.chunk_bytes())
}

fn layout(legs: usize, chunk_bytes: u32) -> Result<Stripe, StripeError> {
    let legs = u16::try_from(legs).unwrap_or(u16::MAX);
    if !(Stripe::LEGS_MIN..=Stripe::LEGS_MAX).contains(&legs) {
        return Err(wrong_count(legs));
    }
    Stripe::new(legs, chunk_bytes).ok_or_else(|| {
        StripeError(format!(
            "a stripe's chunk is a power of two from 4K to 4M, not {chunk_bytes} bytes"
        ))
    })
}

/// Opens all legs in order, and reads their possible superblocks before anything bypasses the page cache.
fn open_all(
    specs: &[DiskSpec],
    mut open: impl FnMut(&DiskSpec) -> Result<Backing, OpenError>,
) -> Result<Vec<Opened>, OpenError> {
    refuse_mix(specs)?;
    refuse_duplicates(specs)?;
    specs
        .iter()
        .map(|spec| {
            let name = spec.name();
            let backing = open(spec)?;
            match superblock::read(&backing) {
                Ok((size_bytes, found)) => Ok(Opened {
                    name,
                    backing,
                    size_bytes,
                    found,
                }),
                Err(error) => Err(OpenError::Io(name, error)),
            }
        })
        .collect()
}

/// Opens what can be a leg, and locks it if that is due.
fn open_locked(
    spec: &DiskSpec,
    read_only: bool,
    locking: Locking,
    given: &mut GivenFiles,
) -> Result<Backing, OpenError> {
    let open_file = |path: &Path| given.open(path, read_only, locking);
    open_leg(spec, read_only, locking, open_file)
}

/// Opens what can be a leg for reading, without disturbing a program that serves it. An image that is read is never locked.
fn open_to_look(spec: &DiskSpec) -> Result<Backing, OpenError> {
    let open_file = |path: &Path| open_unlocked(path, true);
    open_leg(spec, true, Locking::Later, open_file)
}

fn open_leg(
    spec: &DiskSpec,
    read_only: bool,
    locking: Locking,
    open_file: impl FnOnce(&Path) -> Result<(File, FileKind), OpenError>,
) -> Result<Backing, OpenError> {
    match (spec, spec.path()) {
        (_, Some(path)) => open_file(path).map(|(file, kind)| Backing::file(file, kind)),
        (DiskSpec::Rbd(rbd), None) => {
            let image = rbd::open(rbd, &spec.name(), read_only, locking)?;
            Ok(Backing::Rbd(Box::new(image)))
        }
        (_, None) => Err(no_leg(spec).into()),
    }
}

fn no_leg(spec: &DiskSpec) -> StripeError {
    StripeError(format!(
        "{spec} cannot be a leg of a stripe; name files and block devices, or images of a Ceph cluster (rbd:POOL/IMAGE)"
    ))
}

/// Refuses legs of several kinds. One kind of store runs all ops of a disk, so its legs are all files and devices, or all images.
fn refuse_mix(specs: &[DiskSpec]) -> Result<(), StripeError> {
    let is_image = |spec: &&DiskSpec| matches!(spec, DiskSpec::Rbd(_));
    let is_file = |spec: &&DiskSpec| spec.path().is_some();
    if let Some(other) = specs.iter().find(|spec| !is_image(spec) && !is_file(spec)) {
        return Err(no_leg(other));
    }
    match (specs.iter().find(is_image), specs.iter().find(is_file)) {
        (Some(image), Some(file)) => Err(StripeError(format!(
            "{image} and {file} cannot be legs of one stripe; name only images of a Ceph cluster, or only files and block \
             devices (`rbd map` makes a block device of an image)"
        ))),
        _ => Ok(()),
    }
}

/// The identity of a leg, whatever name it was given.
#[derive(Debug, PartialEq, Eq)]
enum Identity {
    /// File system and number of a file, or a device.
    File(u64, u64),
    /// Without the user, because the image is the same for every user.
    Image(ImagePlace),
}

/// Finds out the identity of a leg. `None`: it cannot be found out, which is reported when the leg is opened.
fn identity(spec: &DiskSpec) -> Option<Identity> {
    if let DiskSpec::Rbd(rbd) = spec {
        let place = rbd.place.clone();
        return Some(Identity::Image(ImagePlace {
            user: None,
            ..place
        }));
    }
    let found = spec.path()?.metadata().ok()?;
    Some(match found.rdev() {
        0 => Identity::File(found.dev(), found.ino()),
        device => Identity::File(u64::MAX, device),
    })
}

/// Refuses a leg that is named twice. It would be refused by its own lock, and the error would blame another program.
fn refuse_duplicates(specs: &[DiskSpec]) -> Result<(), StripeError> {
    let mut seen: Vec<(Identity, &DiskSpec)> = Vec::new();
    for spec in specs {
        let Some(id) = identity(spec) else {
            continue;
        };
        if let Some((_, other_name)) = seen.iter().find(|(other, _)| *other == id) {
            return Err(StripeError(format!(
                "leg {spec} is the same as leg {other_name}; name each leg once"
            )));
        }
        seen.push((id, spec));
    }
    Ok(())
}

/// Probes each leg, and combines their limits.
fn probe_all(
    members: Vec<Opened>,
    data_bytes: u64,
    stripe: Stripe,
    options: &OpenOptions,
) -> Result<(Limits, Vec<Leg>), OpenError> {
    let mut all: Option<Limits> = None;
    let mut legs = Vec::with_capacity(members.len());
    for mut member in members {
        let limits = member.backing.probe(&member.name, options)?;
        refuse_large_block(&member.name, &limits, stripe)?;
        if data_bytes == 0 {
            return Err(member.too_small().into());
        }
        all = Some(match all {
            None => limits,
            Some(all) => combined(all, &limits),
        });
        let unused_bytes = member.size_bytes.saturating_sub(data_bytes);
        legs.push(Leg::new(member.name, member.backing).with_unused(unused_bytes));
    }
    let limits = all.ok_or_else(|| wrong_count(0))?;
    Ok((over_all(limits, data_bytes, stripe)?, legs))
}

/// Refuses a leg with blocks larger than a chunk, which must consist of whole blocks of each leg.
fn refuse_large_block(name: &str, limits: &Limits, stripe: Stripe) -> Result<(), StripeError> {
    let least = limits.block_bytes.max(limits.offset_align_bytes);
    if stripe.chunk_bytes() >= least {
        return Ok(());
    }
    let (chunk, block) = (stripe.chunk_bytes().into(), format_size(least.into()));
    Err(StripeError(format!(
        "a chunk of {} is smaller than the block of leg {name}, {block}; \
         create the stripe with --chunk {block} or more",
        format_size(chunk)
    )))
}

/// Returns the limits that satisfy both legs.
fn combined(a: Limits, b: &Limits) -> Limits {
    Limits {
        capacity_bytes: a.capacity_bytes.min(b.capacity_bytes),
        block_bytes: a.block_bytes.max(b.block_bytes),
        offset_align_bytes: a.offset_align_bytes.max(b.offset_align_bytes),
        memory_align_bytes: a.memory_align_bytes.max(b.memory_align_bytes),
        read_only: a.read_only || b.read_only,
        discard: a.discard && b.discard,
        discard_align_bytes: a.discard_align_bytes.max(b.discard_align_bytes),
        rotational: a.rotational || b.rotational,
    }
}

/// Returns the stripe's limits, from the limits that hold on every leg.
fn over_all(leg: Limits, data_bytes: u64, stripe: Stripe) -> Result<Limits, StripeError> {
    let capacity_bytes = data_bytes
        .checked_mul(stripe.legs().into())
        .filter(|bytes| *bytes <= i64::MAX as u64)
        .ok_or_else(|| {
            StripeError(
                "the legs together have 2^63 bytes or more; use smaller or fewer ones".to_owned(),
            )
        })?;
    Ok(Limits {
        capacity_bytes,
        ..leg
    })
}

/// Writes a superblock to the end of each leg, which makes them a stripe in this order. Their data becomes
/// unreadable.
pub fn create_stripe(
    specs: &[DiskSpec],
    chunk_bytes: u32,
    overwrite: Overwrite,
) -> Result<Created, OpenError> {
    let stripe = layout(specs.len(), chunk_bytes)?;
    let mut given = GivenFiles::default();
    let mut members = open_all(specs, |spec| {
        open_locked(spec, false, Locking::AtOpen, &mut given)
    })?;
    let mut data_bytes = u64::MAX;
    for member in &mut members {
        if overwrite == Overwrite::No {
            refuse_in_use(member)?;
        }
        let most = superblock::offset(member.size_bytes).unwrap_or(0);
        data_bytes = data_bytes.min(rounded(most, stripe));
        if data_bytes == 0 {
            return Err(member.too_small().into());
        }
        refuse_unservable(member, stripe)?;
    }
    let mut set = [0; 16];
    File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut set))
        .map_err(|error| OpenError::io(Path::new("/dev/urandom"), error))?;
    for (member, leg) in members.iter().zip(0..) {
        let superblock = Superblock {
            set,
            leg,
            stripe,
            data_bytes,
            leg_bytes: member.size_bytes,
        };
        write_superblock(member, superblock)
            .map_err(|error| OpenError::Io(member.name.clone(), error))?;
    }
    let largest = members.iter().map(|member| member.size_bytes).max();
    Ok(Created {
        stripe,
        data_bytes,
        unused_bytes: largest.unwrap_or(0).saturating_sub(data_bytes),
    })
}

/// Refuses a leg that could not be served afterwards, before any data is lost. Probed through the page cache,
/// like the superblock is written: a leg that does not support O_DIRECT is not refused for it.
fn refuse_unservable(member: &mut Opened, stripe: Stripe) -> Result<(), OpenError> {
    let options = OpenOptions {
        direct: Direct::Off,
        ..OpenOptions::default()
    };
    let limits = member.backing.probe(&member.name, &options)?;
    Ok(refuse_large_block(&member.name, &limits, stripe)?)
}

/// Refuses a leg that contains data, as far as this can be seen.
fn refuse_in_use(member: &Opened) -> Result<(), OpenError> {
    let name = &member.name;
    if member.found != SuperblockState::Nothing {
        return Err(StripeError(format!(
            "{name} is already a leg of a stripe; with --force it becomes part of a new stripe, and all data of \
             the old one is lost"
        ))
        .into());
    }
    let mut head = vec![0; member.size_bytes.min(CHECKED_BYTES) as usize];
    let read = member.backing.read_exact_at(&mut head, 0);
    read.map_err(|error| OpenError::Io(name.clone(), error))?;
    match head.iter().all(|byte| *byte == 0) {
        true => Ok(()),
        false => Err(StripeError(format!(
            "{name} holds data at its beginning; with --force it becomes a leg, and all its data is lost"
        ))
        .into()),
    }
}

fn write_superblock(member: &Opened, superblock: Superblock) -> io::Result<()> {
    let offset = superblock::offset(member.size_bytes)
        .ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    let block = superblock.to_bytes();
    member.backing.write_durably_at(&block, offset)
}

/// Reads the superblocks of legs, even while the legs are being served.
pub fn show_stripe(specs: &[DiskSpec]) -> Result<StripeListing, OpenError> {
    let members = open_all(specs, open_to_look)?;
    let members = as_members(&members);
    let lines = members.iter().map(line).collect();
    let largest = members.iter().map(|member| member.size_bytes).max();
    let whole = check::whole(&members, None).map(|whole| Created {
        stripe: whole.stripe,
        data_bytes: whole.data_bytes,
        unused_bytes: largest.unwrap_or(0).saturating_sub(whole.data_bytes),
    });
    Ok(StripeListing { lines, whole })
}

fn line(member: &StripeMember<'_>) -> String {
    let name = member.name;
    match member.found {
        SuperblockState::Nothing => format!("{name}: no superblock"),
        SuperblockState::Damaged => format!("{name}: a damaged superblock"),
        SuperblockState::Version(version) => {
            format!("{name}: a superblock of version {version}, which this cleave does not know")
        }
        SuperblockState::Whole(leg) => format!(
            "{name}: leg {} of {}, chunk {}, {} bytes of data, set {}",
            leg.leg + 1,
            leg.stripe.legs(),
            format_size(leg.stripe.chunk_bytes().into()),
            leg.data_bytes,
            leg.set
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>(),
        ),
    }
}

#[cfg(test)]
mod tests;
