//! How a check ended.

/// `Err` says how a case failed.
pub type Outcome = Result<(), String>;

/// Fails with this text if the condition does not hold.
pub fn ensure(holds: bool, what: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(what()) }
}
