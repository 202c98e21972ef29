//! The recording: one sequence of the events of guest and disk.

use std::collections::HashMap;

use crate::{Layout, SECTOR};

/// Contents of a sector; each distinct content has a number; 0: zeroes.
pub(crate) type Value = u32;

/// A request of the guest, or an I/O of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Number(pub(crate) usize);

impl Number {
    /// Its index among all requests, or all I/Os, of the log.
    pub fn index(self) -> usize {
        self.0
    }
}

/// A request that changes the disk or makes changes durable. Sectors are those of the guest's disk.
#[derive(Debug, Clone, Copy)]
pub enum Submission<'a> {
    /// Write these bytes.
    Write {
        /// First sector.
        sector: u64,
        /// Whole sectors.
        bytes: &'a [u8],
    },
    /// Write zeroes.
    Zero {
        /// First sector.
        sector: u64,
        /// How many.
        sectors: u64,
    },
    /// Discard: reads as zeroes afterwards. A flush makes that durable; switching the cache off does not.
    Discard {
        /// First sector.
        sector: u64,
        /// How many.
        sectors: u64,
    },
    /// Make completed writes durable.
    Flush,
}

/// A request as recorded.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) kind: RequestKind,
    /// The first sector on the guest's disk, and a value for each sector.
    pub(crate) sector: u64,
    pub(crate) values: Vec<Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Write,
    Zero,
    Discard,
    Flush,
}

/// A recorded I/O of the disk.
#[derive(Debug)]
pub(crate) struct Io {
    pub(crate) kind: IoKind,
    /// The first sector, counted over all legs, and a value for each sector.
    pub(crate) sector: u64,
    pub(crate) values: Vec<Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IoKind {
    Write { fua: bool },
    Discard,
    Flush { leg: u64 },
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Event {
    /// The daemon has submitted this I/O to the disk.
    Began(usize),
    /// Its data is in the disk's cache.
    Applied(usize),
    /// The disk has completed it successfully.
    Ended(usize),
    /// The guest has made this request available.
    Asked(usize),
    /// The guest has seen it completed.
    Told { request: usize, ok: bool },
    /// Writes that complete from here on are promised to be durable, or no longer so.
    WriteThrough(bool),
}

/// All events of guest and disk, in order.
#[derive(Debug)]
pub struct Log {
    pub(crate) layout: Layout,
    pub(crate) events: Vec<Event>,
    pub(crate) ios: Vec<Io>,
    pub(crate) requests: Vec<Request>,
    numbers: HashMap<[u8; SECTOR], Value>,
    contents: Vec<[u8; SECTOR]>,
}

impl Log {
    /// A log for a disk of zeroes whose cache is on.
    pub fn new(layout: Layout) -> Log {
        let zeroes = [0; SECTOR];
        Log {
            layout,
            events: Vec::new(),
            ios: Vec::new(),
            requests: Vec::new(),
            numbers: HashMap::from([(zeroes, 0)]),
            contents: vec![zeroes],
        }
    }

    /// A write has started on the disk. `sector` counts over all legs, so preceding legs are included; `fua`: the
    /// write is durable once it completes.
    pub fn start_write(&mut self, sector: u64, bytes: &[u8], fua: bool) -> Number {
        let values = self.values(bytes);
        self.begin(IoKind::Write { fua }, sector, values)
    }

    /// A discard has started.
    pub fn start_discard(&mut self, sector: u64, sectors: u64) -> Number {
        self.begin(IoKind::Discard, sector, vec![0; sectors as usize])
    }

    /// A flush of a leg has started.
    pub fn start_flush(&mut self, leg: u64) -> Number {
        self.begin(
            IoKind::Flush { leg },
            leg * self.layout.leg_sectors,
            Vec::new(),
        )
    }

    /// The data of a write or discard is stored, and readers see it.
    pub fn apply(&mut self, io: Number) {
        self.events.push(Event::Applied(io.0));
    }

    /// The disk has completed the I/O successfully.
    pub fn complete_io(&mut self, io: Number) {
        self.events.push(Event::Ended(io.0));
    }

    /// The guest submits a request.
    pub fn submit(&mut self, ask: Submission<'_>) -> Number {
        let zeroes = |sectors: u64| vec![0; sectors as usize];
        let (kind, sector, values) = match ask {
            Submission::Write { sector, bytes } => (RequestKind::Write, sector, self.values(bytes)),
            Submission::Zero { sector, sectors } => (RequestKind::Zero, sector, zeroes(sectors)),
            Submission::Discard { sector, sectors } => {
                (RequestKind::Discard, sector, zeroes(sectors))
            }
            Submission::Flush => (RequestKind::Flush, 0, Vec::new()),
        };
        self.requests.push(Request {
            kind,
            sector,
            values,
        });
        let number = self.requests.len() - 1;
        self.events.push(Event::Asked(number));
        Number(number)
    }

    /// The guest has seen the completion; `ok`: it succeeded.
    pub fn complete_request(&mut self, request: Number, ok: bool) {
        let request = request.0;
        self.events.push(Event::Told { request, ok });
    }

    /// The cache mode for everything that completes from here on.
    pub fn write_through(&mut self, on: bool) {
        self.events.push(Event::WriteThrough(on));
    }

    /// Number of recorded requests and I/Os.
    pub fn len(&self) -> (usize, usize) {
        (self.requests.len(), self.ios.len())
    }

    /// Returns true if nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    pub(crate) fn content(&self, value: Value) -> &[u8; SECTOR] {
        &self.contents[value as usize]
    }

    fn begin(&mut self, kind: IoKind, sector: u64, values: Vec<Value>) -> Number {
        self.ios.push(Io {
            kind,
            sector,
            values,
        });
        let number = self.ios.len() - 1;
        self.events.push(Event::Began(number));
        Number(number)
    }

    fn values(&mut self, bytes: &[u8]) -> Vec<Value> {
        let (sectors, rest) = bytes.as_chunks::<SECTOR>();
        assert!(
            rest.is_empty(),
            "{} bytes are not whole sectors",
            bytes.len()
        );
        let number = |bytes: &[u8; SECTOR]| {
            *self.numbers.entry(*bytes).or_insert_with(|| {
                self.contents.push(*bytes);
                (self.contents.len() - 1) as Value
            })
        };
        sectors.iter().map(number).collect()
    }
}
