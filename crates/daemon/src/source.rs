//! What a disk consists of: a spec, or several as one stripe.

use cleave_disk::{Disk, DiskSpec, OpenError, OpenOptions, StripeKind};

/// Most ops that a worker keeps in flight, and least, whatever the size of its vrings: the upper bound
/// keeps a worker's tables small, and devices are at their best far below it.
const OPS_MAX: u16 = 1024;
const OPS_MIN: u16 = 128;
/// The same for a stripe: a request is taken while there is room for the longest, so this has to be
/// several of those.
const STRIPE_OPS: u16 = 4096;

/// The disk to serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// A disk of one leg.
    One(DiskSpec),
    /// Several as one.
    Stripe {
        legs: Vec<DiskSpec>,
        chunk_bytes: u32,
        kind: StripeKind,
    },
}

impl Source {
    /// Opens, locks and probes it.
    pub(crate) fn open(&self, options: &OpenOptions) -> Result<Disk, OpenError> {
        match self {
            Source::One(spec) => Disk::open(spec, options),
            Source::Stripe {
                legs,
                chunk_bytes,
                kind,
            } => Disk::open_stripe(legs, *chunk_bytes, *kind, options),
        }
    }

    /// A warning for the log that it takes long to open. A cluster or a file server that does not answer is waited for without end.
    pub(crate) fn slow(&self) -> String {
        let names = self.line();
        format!("still waiting for {names} to open: see whether its storage answers")
    }

    /// Its specs as one line.
    pub(crate) fn line(&self) -> String {
        let names = self.specs().iter().map(ToString::to_string);
        names.collect::<Vec<_>>().join(", ")
    }

    /// The specs of its legs.
    pub(crate) fn specs(&self) -> &[DiskSpec] {
        match self {
            Source::One(spec) => std::slice::from_ref(spec),
            Source::Stripe { legs, .. } => legs,
        }
    }

    /// Returns true if librbd opens it.
    pub(crate) fn needs_ceph(&self) -> bool {
        let is_rbd = |spec: &DiskSpec| matches!(spec, DiskSpec::Rbd(_));
        self.specs().iter().any(is_rbd)
    }

    /// Most ops that a worker keeps in flight.
    pub(crate) fn ops(&self, queue_size: u16) -> u16 {
        match self {
            Source::One(_) => queue_size.clamp(OPS_MIN, OPS_MAX),
            Source::Stripe { .. } => STRIPE_OPS,
        }
    }
}
