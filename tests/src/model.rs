//! What a disk should hold.

use cleave_client::{Error, Queue};

/// A small generator; its seed replays a run.
#[derive(Debug, Clone)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator whose seed is printed; `CLEAVE_TEST_SEED` sets it.
    pub fn announced(test: &str) -> Random {
        let given = std::env::var("CLEAVE_TEST_SEED")
            .ok()
            .and_then(|text| text.parse().ok());
        let seed = given.unwrap_or_else(|| {
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap();
            now.as_nanos() as u64
        });
        println!("{test}: CLEAVE_TEST_SEED={seed}");
        Random::new(seed)
    }

    /// A generator from a seed.
    pub fn new(seed: u64) -> Random {
        Random {
            state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        }
    }

    /// The next number.
    pub fn word(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.word()) * u128::from(end)) >> 64) as u64
    }

    /// Random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len.next_multiple_of(8)];
        for place in bytes.chunks_exact_mut(8) {
            place.copy_from_slice(&self.word().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}

/// The bytes that a part of the disk must hold.
#[derive(Debug)]
pub struct Model {
    /// First byte of the part.
    pub offset: u64,
    /// What it holds.
    pub bytes: Vec<u8>,
}

impl Model {
    /// A part of which nothing has been written yet.
    pub fn zeroed(offset: u64, len: usize) -> Model {
        Model {
            offset,
            bytes: vec![0; len],
        }
    }

    /// Does one random operation on the disk and here, or reads and compares.
    pub fn step(
        &mut self,
        queue: &mut Queue,
        random: &mut Random,
        most: usize,
    ) -> Result<(), Error> {
        let sectors = self.bytes.len() as u64 / 512;
        let from = random.below(sectors) as usize * 512;
        let room = (self.bytes.len() - from).min(most);
        let len = (random.below(room as u64 / 512) as usize + 1) * 512;
        let range = from..from + len;
        let offset = self.offset + from as u64;
        match random.below(16) {
            0..=6 => {
                let bytes = random.bytes(len);
                queue.write(offset, &bytes)?;
                self.bytes[range].copy_from_slice(&bytes);
            }
            7..=13 => self.compare(queue, range)?,
            14 => {
                queue.write_zeroes(offset, len as u64, random.below(2) == 0)?;
                self.bytes[range].fill(0);
            }
            _ => queue.flush()?,
        }
        Ok(())
    }

    /// Reads a range and compares it.
    pub fn compare(&self, queue: &mut Queue, range: std::ops::Range<usize>) -> Result<(), Error> {
        let mut back = vec![0xcc; range.len()];
        queue.read(self.offset + range.start as u64, &mut back)?;
        let wanted = &self.bytes[range.clone()];
        match back
            .iter()
            .zip(wanted)
            .position(|(found, wanted)| found != wanted)
        {
            None => Ok(()),
            Some(at) => Err(Error::Verify {
                offset_bytes: self.offset + (range.start + at) as u64,
                found: back[at].into(),
                wanted: wanted[at].into(),
            }),
        }
    }

    /// Compares all of it.
    pub fn compare_all(&self, queue: &mut Queue) -> Result<(), Error> {
        let step = 1 << 20;
        (0..self.bytes.len())
            .step_by(step)
            .try_for_each(|from| self.compare(queue, from..self.bytes.len().min(from + step)))
    }
}
