//! `cleave stripe create` and `cleave stripe show`.

use std::fmt::Write as _;

use cleave_disk::{Created, DiskSpec, Overwrite, create_stripe, format_size, show_stripe};
use cleave_host::Failure;

use crate::output::print;

/// The stripe command to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StripeAction {
    /// Write superblocks.
    Create {
        legs: Vec<DiskSpec>,
        chunk_bytes: u32,
        overwrite: Overwrite,
    },
    /// Read them.
    Show { legs: Vec<DiskSpec> },
}

/// Runs the command and prints its result.
pub(crate) fn run(stripe: &StripeAction) -> Result<(), Failure> {
    match stripe {
        StripeAction::Create {
            legs,
            chunk_bytes,
            overwrite,
        } => {
            let created = create_stripe(legs, *chunk_bytes, *overwrite).map_err(Failure::open)?;
            print(&describe(&created, legs))
        }
        StripeAction::Show { legs } => {
            let shown = show_stripe(legs).map_err(Failure::open)?;
            print(&(shown.lines.join("\n") + "\n"))?;
            print(&describe(&shown.whole.map_err(Failure::run)?, legs))
        }
    }
}

/// The stripe in a few lines, and how to serve it.
fn describe(stripe: &Created, legs: &[DiskSpec]) -> String {
    let chunk = format_size(stripe.stripe.chunk_bytes().into());
    let count = stripe.stripe.legs();
    let bytes = stripe.data_bytes.saturating_mul(count.into());
    let mut text = format!("a stripe of {count} legs, chunk {chunk}, {bytes} bytes\n");
    // Less than a chunk and the superblock is what rounding costs.
    if stripe.unused_bytes > u64::from(stripe.stripe.chunk_bytes()) + 8192 {
        let _ = writeln!(
            text,
            "legs of unequal size: each is used for {} bytes, and the largest leaves {} unused",
            stripe.data_bytes, stripe.unused_bytes
        );
    }
    let _ = write!(
        text,
        "serve it: cleave serve --socket-path PATH --stripe {chunk}"
    );
    for leg in legs {
        let _ = write!(text, " --disk {leg}");
    }
    text.push('\n');
    text
}
