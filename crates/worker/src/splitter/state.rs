//! The state of a splitter, for display.

use std::fmt;
use std::time::Duration;

use super::direction::DataDirection;

/// The state of one cell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SplitState {
    /// Direction of the data.
    pub direction: DataDirection,
    /// Minimum request size; the class extends to four times as much.
    pub class_bytes: u64,
    /// Chunk in force; 0: whole requests.
    pub chunk_bytes: u32,
    /// Number of requests.
    pub requests: u64,
    /// Result of the latest experiment.
    pub tried: Option<SplitResult>,
}

/// Result of an experiment that compares fewer ops with more.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SplitResult {
    /// The two chunks: of the arm with fewer ops (0: whole requests), and of the one with more.
    pub chunks_bytes: [u32; 2],
    /// Share of the response time that more ops save: median and quartiles of the rounds. Negative if they take
    /// longer.
    pub gain: [f32; 3],
    /// Additional cores that more ops kept busy.
    pub cores: f32,
    /// When the experiment ended, on the device's clock.
    pub at: Duration,
}

impl fmt::Display for SplitState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.direction {
            DataDirection::Read => "reads",
            DataDirection::Write => "writes",
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
