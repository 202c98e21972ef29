//! A model of the disk's contents, and the seed of random tests.

use cleave_client::{Error, Queue};

use crate::{Daemon, Random, small};

/// A random generator that prints its seed; `CLEAVE_TEST_SEED` sets it.
pub fn seeded(test: &str) -> Random {
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

/// Random operations on two vrings of a disk that is zeroed, each byte compared with a model. Part of the disk is discarded, too:
/// what that does depends on the server.
pub fn compare_bytes(daemon: &Daemon, test: &str, steps: u64) {
    let mut random = seeded(test);
    let mut client = daemon.open(&small(2));
    for index in 0..2 {
        let mut model = Model::zeroed(index as u64 * (32 << 20), 8 << 20);
        let queue = client.queue(index);
        for _ in 0..steps {
            model.step(queue, &mut random, 512 << 10).unwrap();
        }
        queue.discard(model.offset + (16 << 20), 8 << 20).unwrap();
        queue.flush().unwrap();
        model.compare_all(queue).unwrap();
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
