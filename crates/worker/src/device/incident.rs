//! Incidents that are reported to the operator at once: the first of each kind, then as seldom as the log has it.

/// Something that happened to a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incident {
    /// A request failed and is held, and its vring with it.
    Held {
        /// The vring.
        vring: u16,
        /// `read`, `write`, `discard`, `write-zeroes` or `flush`.
        verb: &'static str,
        /// The first sector, of 512 bytes.
        sector: u64,
        /// How it failed.
        errno: i32,
    },
    /// Held requests are repeated, because the way to the storage is there again.
    Released {
        /// Number of requests.
        requests: u32,
    },
    /// The guest was told that a request failed.
    Failed {
        /// Where the request begins.
        offset_bytes: u64,
        /// How long it is.
        len_bytes: u64,
        /// How it failed.
        errno: i32,
    },
    /// A guest broke a vring, which is no longer served.
    Retired {
        /// The vring.
        vring: u16,
        /// The guest's fault.
        why: String,
    },
    /// Another frontend has the disk now, the one that was parked.
    TakenOver,
}

/// Called with each incident, by a worker or a session. It must not wait.
#[derive(Default)]
pub(crate) struct IncidentHook(pub(crate) Option<Box<dyn Fn(Incident) + Send + Sync>>);

impl IncidentHook {
    pub(crate) fn call(&self, incident: Incident) {
        if let Some(hook) = &self.0 {
            hook(incident);
        }
    }
}

impl std::fmt::Debug for IncidentHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("IncidentHook")
            .field(&self.0.is_some())
            .finish()
    }
}
