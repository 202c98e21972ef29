//! What a splitter shows of itself.

use std::fmt;

use crate::Direction;

/// Why a cell's chunk is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Nothing was learnt yet: whole requests.
    Start,
    /// A probe's profile named it.
    Profile,
    /// It looked faster when explored, and is being tried on all requests.
    Trial,
    /// It proved faster than what was in force before.
    Faster,
    /// Splitting gained too little to be worth its ops.
    NoGain,
}

impl Reason {
    /// All of them, in order.
    pub(super) const ALL: [Reason; 5] = [
        Reason::Start,
        Reason::Profile,
        Reason::Trial,
        Reason::Faster,
        Reason::NoGain,
    ];

    /// One word.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Start => "start",
            Reason::Profile => "profile",
            Reason::Trial => "trial",
            Reason::Faster => "faster",
            Reason::NoGain => "no_gain",
        }
    }
}

/// One cell of a splitter.
#[derive(Debug, Clone, PartialEq)]
pub struct SplitState {
    /// Which way the data goes.
    pub direction: Direction,
    /// Requests of this size up to twice as much.
    pub class_bytes: u64,
    /// Fewest requests in flight in this cell, the new one included.
    pub requests_min: u32,
    /// Chunk in force; 0: whole.
    pub chunk_bytes: u32,
    /// Why.
    pub reason: Reason,
    /// Estimated latency of a whole request over that of a split one; 1 while unknown.
    pub gain: f64,
    /// Share of requests spent on exploring.
    pub explored: f64,
    /// Requests seen.
    pub seen: u64,
}

impl fmt::Display for SplitState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        write!(
            f,
            "{way} ≥{}K with ≥{} in flight: ",
            self.class_bytes >> 10,
            self.requests_min
        )?;
        match self.chunk_bytes {
            0 => write!(f, "whole")?,
            chunk => write!(f, "{}K chunks", chunk >> 10)?,
        }
        let why = match self.reason {
            Reason::Start => "nothing learnt yet",
            Reason::Profile => "from the profile",
            Reason::Trial => "on trial",
            Reason::Faster => "proved faster",
            Reason::NoGain => "splitting gained nothing",
        };
        let percent = self.explored * 100.0;
        write!(
            f,
            " ({why}; gain {:.2}; {percent:.1} % of {} explored)",
            self.gain, self.seen
        )
    }
}
