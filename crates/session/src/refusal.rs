//! Why a message is refused, and how far that reaches.

/// Why a message is refused, and what else ends with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MessageRefusal {
    /// Only the message, which has changed nothing. The frontend gets a negative acknowledgement if it asked
    /// for one. Otherwise it would assume success, so the connection ends.
    Message(String),
    /// Only the vring, which does not start. The frontend gets a negative acknowledgement and a signal on the
    /// vring's err descriptor. The other vrings continue.
    Vring(String),
    /// The connection: the two sides no longer agree on its state.
    Connection(String),
    /// The frontend left before its answer was written, or we were asked to hang up.
    Gone,
    /// The session goes on in another process.
    HandOver,
    /// Not the frontend's fault: a worker or the host failed.
    Lost(String),
}

impl MessageRefusal {
    pub(crate) fn message(why: impl Into<String>) -> MessageRefusal {
        MessageRefusal::Message(why.into())
    }

    pub(crate) fn connection(why: impl Into<String>) -> MessageRefusal {
        MessageRefusal::Connection(why.into())
    }

    pub(crate) fn lost(why: impl Into<String>) -> MessageRefusal {
        MessageRefusal::Lost(why.into())
    }

    /// Makes the refusal for a process that has no descriptor left.
    pub(crate) fn not_copied(error: &std::io::Error) -> MessageRefusal {
        MessageRefusal::lost(format!(
            "cannot copy a descriptor: {error} (raise LimitNOFILE)"
        ))
    }

    /// Makes it the refusal of a frontend that another process has handed over, and that is not to blame.
    pub(crate) fn of_take_over(self) -> MessageRefusal {
        match self {
            MessageRefusal::Message(why)
            | MessageRefusal::Vring(why)
            | MessageRefusal::Connection(why)
            | MessageRefusal::Lost(why) => {
                MessageRefusal::lost(format!("it has to connect again: {why}"))
            }
            MessageRefusal::Gone | MessageRefusal::HandOver => self,
        }
    }

    /// Makes the refusal for a worker that did not answer.
    pub(crate) fn worker_gone() -> MessageRefusal {
        MessageRefusal::lost("a worker ended before it answered")
    }
}
