//! The recording: one sequence of what guest and disk did.

use std::collections::HashMap;

use crate::{Layout, SECTOR};

/// Contents of a sector, each distinct one with a number; 0: zeroes.
pub(crate) type Value = u32;

/// A request of the guest, or an I/O of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Number(pub(crate) usize);

impl Number {
    /// Its place among all requests, or all I/O, of the log.
    pub fn index(self) -> usize {
        self.0
    }
}

/// A request that changes the disk or makes changes durable. Sectors are the guest's.
#[derive(Debug, Clone, Copy)]
pub enum Ask<'a> {
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
    /// Give space back: reads as zeroes afterwards. That is durable after a flush, but not by itself where the cache is off.
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
    /// The guest's first sector, and a value for each.
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

/// An I/O of the disk as recorded.
#[derive(Debug)]
pub(crate) struct Io {
    pub(crate) kind: IoKind,
    /// First sector, counted over all legs, and a value for each.
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
    /// The daemon has handed this I/O to the disk.
    Began(usize),
    /// Its data is in the disk's cache.
    Applied(usize),
    /// The disk has answered it, with success.
    Ended(usize),
    /// The guest has made this request available.
    Asked(usize),
    /// The guest has seen it answered.
    Told { request: usize, ok: bool },
    /// Writes answered from here on are promised to be durable, or not any more.
    WriteThrough(bool),
}

/// All that guest and disk did, in order.
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
    /// For a disk of zeroes whose cache is on.
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

    /// A write has begun on the disk. `sector` counts over all legs, the others' being in front; `fua`: it is durable when it
    /// has ended.
    pub fn write_begins(&mut self, sector: u64, bytes: &[u8], fua: bool) -> Number {
        let values = self.values(bytes);
        self.begin(IoKind::Write { fua }, sector, values)
    }

    /// A discard has begun.
    pub fn discard_begins(&mut self, sector: u64, sectors: u64) -> Number {
        self.begin(IoKind::Discard, sector, vec![0; sectors as usize])
    }

    /// A flush of a leg has begun.
    pub fn flush_begins(&mut self, leg: u64) -> Number {
        self.begin(
            IoKind::Flush { leg },
            leg * self.layout.leg_sectors,
            Vec::new(),
        )
    }

    /// The data of a write or discard is on the disk, as reads see it.
    pub fn applied(&mut self, io: Number) {
        self.events.push(Event::Applied(io.0));
    }

    /// The disk has answered with success.
    pub fn ended(&mut self, io: Number) {
        self.events.push(Event::Ended(io.0));
    }

    /// The guest asks.
    pub fn asked(&mut self, ask: Ask<'_>) -> Number {
        let zeroes = |sectors: u64| vec![0; sectors as usize];
        let (kind, sector, values) = match ask {
            Ask::Write { sector, bytes } => (RequestKind::Write, sector, self.values(bytes)),
            Ask::Zero { sector, sectors } => (RequestKind::Zero, sector, zeroes(sectors)),
            Ask::Discard { sector, sectors } => (RequestKind::Discard, sector, zeroes(sectors)),
            Ask::Flush => (RequestKind::Flush, 0, Vec::new()),
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

    /// The guest has seen the answer; `ok`: success.
    pub fn told(&mut self, request: Number, ok: bool) {
        let request = request.0;
        self.events.push(Event::Told { request, ok });
    }

    /// The cache mode that holds for all that is answered from here on.
    pub fn write_through(&mut self, on: bool) {
        self.events.push(Event::WriteThrough(on));
    }

    /// How much was recorded: requests and I/O.
    pub fn len(&self) -> (usize, usize) {
        (self.requests.len(), self.ios.len())
    }

    /// Whether nothing was.
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
