//! What a splitter shows of itself.

use std::fmt;
use std::time::Duration;

use crate::Direction;

/// One cell of a splitter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SplitState {
    /// Which way the data goes.
    pub direction: Direction,
    /// Requests of this size up to four times as much.
    pub class_bytes: u64,
    /// Chunk in force; 0: whole.
    pub chunk_bytes: u32,
    /// Requests seen.
    pub requests: u64,
    /// What was found out last.
    pub tried: Option<SplitTried>,
}

/// What an experiment found: fewer ops against more.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SplitTried {
    /// Chunks of those with fewer ops (0: whole) and of those with more.
    pub chunks_bytes: [u32; 2],
    /// Share of the response time that more ops save: median, and quartiles, of its rounds. Negative: it takes
    /// longer.
    pub gain: [f32; 3],
    /// Cores that more ops kept busy more.
    pub cores: f32,
    /// When it ended, on the clock of the device.
    pub at: Duration,
}

impl fmt::Display for SplitState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.direction {
            Direction::Read => "reads",
            Direction::Write => "writes",
        };
        write!(f, "{way} from {}K on: ", self.class_bytes >> 10)?;
        match self.chunk_bytes {
            0 => write!(f, "whole")?,
            chunk_bytes => write!(f, "in pieces of {}K", chunk_bytes >> 10)?,
        }
        if let Some(tried) = &self.tried {
            let [gain, low, high] = tried.gain.map(|share| share * 100.0);
            let [fewer, more] = tried.chunks_bytes;
            write!(
                f,
                "; pieces of {}K saved {gain:.0} % ({low:.0} to {high:.0}) of ",
                more >> 10
            )?;
            match fewer {
                0 => write!(f, "whole requests' time")?,
                fewer => write!(f, "the time of {}K", fewer >> 10)?,
            }
        }
        write!(f, "; {} requests", self.requests)
    }
}
