//! What goes on with a session if this process is killed.

use crate::recorded::Handover;

/// Keeps a session for the next process, outside of this one.
///
/// A session is kept while it waits for its frontend, and only then: a message that was read and has not had its effect on what is kept
/// would be lost.
pub trait Keeper: Send {
    /// Keeps the session as it is now.
    fn keep(&mut self, session: Handover);

    /// Forgets it. Returns when nothing can bring it back.
    fn forget(&mut self);
}
