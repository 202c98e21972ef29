//! Why legs form no stripe.

/// Why legs form no stripe: a message that names the leg and the remedy. Legs count from 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StripeError(pub(super) String);

impl StripeError {
    /// Makes the error for a leg that was opened and does not have its superblock any more.
    pub(crate) fn changed(leg: &str) -> StripeError {
        StripeError(format!(
            "leg {leg} does not have the superblock any more that it had when it was opened: it was cut short or belongs to \
             another stripe by now; see `cleave stripe show`, then open the disk again"
        ))
    }
}

/// Makes the error for too few legs, or too many.
pub(super) fn wrong_count(legs: u16) -> StripeError {
    StripeError(format!(
        "a stripe has 2 to 64 legs, but this one would have {legs}; name each of its legs"
    ))
}
