//! A model of the disk's contents, and the seeded generator that drives random tests.

use cleave_client::{Error, Queue};

/// A small random generator; its seed replays a run.
#[derive(Debug, Clone)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator that prints its seed; `CLEAVE_TEST_SEED` sets it.
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

    /// A generator with this seed.
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

/// The expected contents of one part of the disk.
#[derive(Debug)]
pub struct Model {
    /// First byte of the part.
    pub offset: u64,
    /// Expected bytes.
    pub bytes: Vec<u8>,
}

impl Model {
    /// A part that has not been written yet.
    pub fn zeroed(offset: u64, len: usize) -> Model {
        Model {
            offset,
            bytes: vec![0; len],
        }
    }

    /// Does one random operation on the disk and on the model, or reads and compares.
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

    /// Compares the whole part.
    pub fn compare_all(&self, queue: &mut Queue) -> Result<(), Error> {
        let step = 1 << 20;
        (0..self.bytes.len())
            .step_by(step)
            .try_for_each(|from| self.compare(queue, from..self.bytes.len().min(from + step)))
    }
}
