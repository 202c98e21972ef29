//! What a disk consists of.

use cleave_blk::Stripe;
use cleave_disk::{DiskSpec, StripeKind, format_size};

use crate::names::Names;

/// The storage of a disk: one spec, or several as one stripe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Storage {
    /// A disk of one leg.
    One(DiskSpec),
    /// Several disks as one.
    Stripe {
        /// The legs, in order.
        legs: Vec<DiskSpec>,
        /// Bytes that lie together on a leg.
        chunk_bytes: u32,
        /// How the legs are identified: by superblocks, or by their order alone.
        kind: StripeKind,
    },
}

impl Storage {
    /// Makes the storage of one disk, or of a stripe with as many legs.
    pub fn new(
        disks: &[DiskSpec],
        chunk_bytes: Option<u32>,
        kind: StripeKind,
        names: Names,
    ) -> Result<Storage, String> {
        match (disks, chunk_bytes) {
            ([], _) => Err(match names {
                Names::Options => "no disk: give --disk SPEC".to_owned(),
                Names::Fields => "no disk: name it in the list `disk`".to_owned(),
            }),
            (_, None) if kind == StripeKind::Raw => {
                let [raw, stripe] = ["stripe_raw", "stripe"].map(|field| names.of(field));
                Err(format!("{raw} is for a stripe: also give {stripe}"))
            }
            ([disk], None) => Ok(Storage::One(disk.clone())),
            ([_], Some(_)) => Err(format!(
                "a stripe of one leg is a disk: leave {} out, or name all its legs",
                names.of("stripe")
            )),
            (more, None) => Err(format!(
                "{} disks were given: make them one disk with {}, or serve each by itself",
                more.len(),
                match names {
                    Names::Options => "--stripe SIZE",
                    Names::Fields => "stripe",
                },
            )),
            (legs, Some(_)) if legs.len() > usize::from(Stripe::LEGS_MAX) => Err(format!(
                "{} legs were given, and a stripe has at most {} legs",
                legs.len(),
                Stripe::LEGS_MAX
            )),
            (legs, Some(chunk_bytes)) => Ok(Storage::Stripe {
                legs: legs.to_vec(),
                chunk_bytes,
                kind,
            }),
        }
    }

    /// Refuses a chunk that does not hold whole blocks.
    pub(crate) fn check_block(&self, block_bytes: u32, names: Names) -> Result<(), String> {
        match self {
            Storage::Stripe { chunk_bytes, .. } if block_bytes > *chunk_bytes => Err(format!(
                "{} {} is below {} {}; a chunk holds whole blocks",
                names.of("stripe"),
                format_size(u64::from(*chunk_bytes)),
                names.of("block_size"),
                format_size(block_bytes.into())
            )),
            _ => Ok(()),
        }
    }

    /// Returns the specs of its legs.
    pub fn specs(&self) -> &[DiskSpec] {
        match self {
            Storage::One(spec) => std::slice::from_ref(spec),
            Storage::Stripe { legs, .. } => legs,
        }
    }

    /// Returns its specs as one line.
    pub fn line(&self) -> String {
        let names = self.specs().iter().map(ToString::to_string);
        names.collect::<Vec<_>>().join(", ")
    }

    /// Returns the chunk of a stripe whose legs do not tell it.
    pub fn raw_chunk_bytes(&self) -> Option<u32> {
        match self {
            Storage::Stripe {
                chunk_bytes,
                kind: StripeKind::Raw,
                ..
            } => Some(*chunk_bytes),
            _ => None,
        }
    }

    /// Returns true if librbd opens it.
    pub fn needs_ceph(&self) -> bool {
        let is_rbd = |spec: &DiskSpec| matches!(spec, DiskSpec::Rbd(_));
        self.specs().iter().any(is_rbd)
    }
}
