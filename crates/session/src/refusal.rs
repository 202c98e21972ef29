//! How far the harm of a refused message goes.

/// Why a message is not obeyed, and what that costs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The message alone: it has changed nothing. The frontend is told so where it asked for an
    /// acknowledgement; where it did not, it would go on in a false belief, so the connection ends.
    Message(String),
    /// The vring alone, which does not start: told by a negative acknowledgement and by its err
    /// descriptor, and no more than that, since the other vrings are sound.
    Vring(String),
    /// The connection: after this the two sides no longer agree.
    Connection(String),
    /// The frontend went while it was owed an answer, or we were told to go.
    Gone,
    /// Not the frontend's fault: a worker or the host failed.
    Lost(String),
}

impl Refusal {
    pub(crate) fn message(why: impl Into<String>) -> Refusal {
        Refusal::Message(why.into())
    }

    pub(crate) fn connection(why: impl Into<String>) -> Refusal {
        Refusal::Connection(why.into())
    }

    pub(crate) fn lost(why: impl Into<String>) -> Refusal {
        Refusal::Lost(why.into())
    }

    /// What a worker's silence means.
    pub(crate) fn worker_gone() -> Refusal {
        Refusal::lost("a worker ended before it answered")
    }
}
