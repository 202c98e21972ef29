use super::*;

const ONE: [u8; SECTOR] = [1; SECTOR];
const TWO: [u8; SECTOR] = [2; SECTOR];

/// Two legs of eight sectors, in chunks of one.
fn two_legs() -> Log {
    Log::new(Layout {
        legs: 2,
        leg_sectors: 8,
        chunk_sectors: 1,
        sectors: 16,
    })
}

fn write(sector: u64, bytes: &[u8]) -> Submission<'_> {
    Submission::Write { sector, bytes }
}

/// An I/O from start to completion.
fn done(log: &mut Log, sector: u64, bytes: &[u8], fua: bool) {
    let io = log.start_write(sector, bytes, fua);
    log.apply(io);
    log.complete_io(io);
}

/// A request from submission to completion, with the disk's events in between.
fn request(log: &mut Log, ask: Submission<'_>, disk: impl FnOnce(&mut Log)) {
    let number = log.submit(ask);
    disk(log);
    log.complete_request(number, true);
}

fn flush_leg(log: &mut Log, leg: u64) {
    let io = log.start_flush(leg);
    log.complete_io(io);
}

fn verdict(log: &Log) -> Result<Checked, String> {
    let mut state = 7_u64;
    let mut below = |n: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % n
    };
    check(
        log,
        Extent {
            subsets: 50,
            cached_above: false,
        },
        &mut below,
    )
}

/// The first broken promise, in short.
fn broken(log: &Log) -> String {
    let error = verdict(log).expect_err("this breaks a promise");
    println!("{error}");
    error
}

#[test]
fn a_disk_that_keeps_its_promises_passes() {
    let mut log = two_legs();
    request(&mut log, write(0, &[ONE, TWO].concat()), |log| {
        done(log, 0, &ONE, false);
        done(log, 8, &TWO, false);
    });
    request(&mut log, Submission::Flush, |log| {
        flush_leg(log, 0);
        flush_leg(log, 1);
    });
    let sector = 3;
    request(
        &mut log,
        Submission::Discard { sector, sectors: 1 },
        |log| {
            let io = log.start_discard(9, 1);
            log.apply(io);
            log.complete_io(io);
        },
    );
    log.write_through(true);
    request(&mut log, write(3, &TWO), |log| done(log, 9, &TWO, true));
    let checked = verdict(&log).unwrap();
    assert_eq!((checked.epochs, checked.promises), (2, 2), "{checked:?}");
    assert!(checked.lossy > 10 && checked.torn > 10, "{checked:?}");
}

#[test]
fn a_flush_that_is_answered_too_early_is_found() {
    let mut log = two_legs();
    request(&mut log, write(0, &ONE), |log| done(log, 0, &ONE, false));
    let flush = log.submit(Submission::Flush);
    let io = log.start_flush(0);
    log.complete_request(flush, true);
    log.complete_io(io);
    assert!(broken(&log).contains("sector 0 "));
}

#[test]
fn a_flush_that_leaves_a_leg_out_is_found() {
    let mut log = two_legs();
    request(&mut log, write(1, &ONE), |log| done(log, 8, &ONE, false));
    request(&mut log, Submission::Flush, |log| flush_leg(log, 0));
    assert!(broken(&log).contains("sector 1 "));
}

#[test]
fn a_flush_that_begins_before_a_write_has_ended_does_not_cover_it() {
    let mut log = two_legs();
    let written = log.submit(write(0, &ONE));
    let io = log.start_write(0, &ONE, false);
    log.apply(io);
    // For another request: one that is submitted later must not share the fsync.
    let shared = log.start_flush(0);
    log.complete_io(io);
    log.complete_request(written, true);
    request(&mut log, Submission::Flush, |log| {
        log.complete_io(shared);
        flush_leg(log, 1);
    });
    assert!(broken(&log).contains("sector 0 "));
}

#[test]
fn write_through_without_a_sync_is_found() {
    for fua in [false, true] {
        let mut log = two_legs();
        log.write_through(true);
        request(&mut log, write(0, &ONE), |log| done(log, 0, &ONE, fua));
        assert_eq!(verdict(&log).is_ok(), fua);
    }
    // Completed before the cache was switched off, so only the next flush makes it durable.
    let mut log = two_legs();
    request(&mut log, write(0, &ONE), |log| done(log, 0, &ONE, false));
    log.write_through(true);
    assert!(verdict(&log).is_ok());
}

#[test]
fn an_old_write_over_a_newer_one_is_found() {
    // A discard that is applied after its completion.
    let mut log = two_legs();
    request(&mut log, write(0, &ONE), |log| done(log, 0, &ONE, false));
    let discard = Submission::Discard {
        sector: 0,
        sectors: 1,
    };
    request(&mut log, discard, |_| ());
    assert!(broken(&log).contains("as readers see it"));

    // Two writes of one sector are applied in the wrong order: an error even without a crash.
    let mut log = two_legs();
    let old = log.submit(write(0, &ONE));
    let late = log.start_write(0, &ONE, false);
    log.complete_request(old, true);
    request(&mut log, write(0, &TWO), |log| done(log, 0, &TWO, false));
    log.apply(late);
    log.complete_io(late);
    assert!(broken(&log).contains("as readers see it"));
}

#[test]
fn data_that_no_request_wrote_is_found() {
    let mut log = two_legs();
    request(&mut log, write(0, &ONE), |log| {
        done(log, 0, &ONE, false);
        // A neighbouring sector, as a read-modify-write could damage it.
        done(log, 8, &TWO, false);
    });
    assert!(broken(&log).contains("sector 1 "));
}

/// Reads the file as the format describes it, byte by byte, and shares no code with the writer.
struct Reader<'a>(&'a [u8]);

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    sector: u64,
    sectors: u64,
    flags: u64,
    data: Vec<u8>,
}

impl Reader<'_> {
    fn take(&mut self) -> Vec<u8> {
        let (sector, rest) = self.0.split_at(512);
        self.0 = rest;
        sector.to_vec()
    }

    fn number(sector: &[u8], at: usize, bytes: usize) -> u64 {
        let bytes = sector[at..at + bytes].iter().rev();
        bytes.fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    fn entries(mut self) -> Vec<Entry> {
        let head = self.take();
        // The characters "jsfwshr" (0x6a 0x73 0x66 ...) as one number, and version 1.
        assert_eq!(head[..8], [0x72, 0x68, 0x73, 0x77, 0x66, 0x73, 0x6a, 0]);
        assert_eq!(head[8..16], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Reader::number(&head, 24, 4), 512);
        assert!(head[28..].iter().all(|byte| *byte == 0));
        let count = Reader::number(&head, 16, 8);
        let entries: Vec<_> = (0..count).map(|_| self.entry()).collect();
        assert!(self.0.is_empty(), "{} bytes behind", self.0.len());
        entries
    }

    fn entry(&mut self) -> Entry {
        let head = self.take();
        let [sector, sectors, flags, bytes] = [0, 8, 16, 24].map(|at| Reader::number(&head, at, 8));
        assert!(
            flags < 16 && (flags != 0 || sectors != 0),
            "replay-log rejected it"
        );
        let (text, mut data) = match flags {
            8 => (bytes as usize, head[32..32 + bytes as usize].to_vec()),
            _ => (0, Vec::new()),
        };
        assert!(head[32 + text..].iter().all(|byte| *byte == 0));
        if flags & (4 | 8) == 0 {
            assert_eq!(bytes, sectors * 512);
            for _ in 0..sectors {
                data.extend(self.take());
            }
        } else if flags == 4 {
            assert_eq!(bytes, 0);
        }
        Entry {
            sector,
            sectors,
            flags,
            data,
        }
    }
}

#[test]
fn the_file_has_the_format_of_dm_log_writes() {
    let mut log = two_legs();
    request(&mut log, write(0, &[ONE, TWO].concat()), |log| {
        done(log, 0, &ONE, false);
        done(log, 8, &TWO, true);
    });
    let sector = 2;
    request(
        &mut log,
        Submission::Discard { sector, sectors: 3 },
        |log| {
            let io = log.start_discard(1, 2);
            log.apply(io);
            log.complete_io(io);
        },
    );
    request(&mut log, Submission::Flush, |log| flush_leg(log, 1));
    log.write_through(true);
    let failed = log.submit(Submission::Zero {
        sector: 5,
        sectors: 1,
    });
    log.complete_request(failed, false);

    let mut file = Vec::new();
    log.save(&mut file).unwrap();
    let mark = |text: &str| Entry {
        sector: 0,
        sectors: 0,
        flags: 8,
        data: text.into(),
    };
    let wrote = |sector, flags, data: &[u8]| Entry {
        sector,
        sectors: 1,
        flags,
        data: data.into(),
    };
    let expected = [
        mark("ask 0 write 0+2"),
        wrote(0, 0, &ONE),
        mark("end 0"),
        wrote(8, 2, &TWO),
        mark("end 1"),
        mark("told 0 ok"),
        mark("ask 1 discard 2+3"),
        Entry {
            sector: 1,
            sectors: 2,
            flags: 4,
            data: Vec::new(),
        },
        mark("end 2"),
        mark("told 1 ok"),
        mark("ask 2 flush 0+0"),
        mark("begin 3"),
        Entry {
            sector: 8,
            sectors: 0,
            flags: 1,
            data: Vec::new(),
        },
        mark("told 2 ok"),
        mark("write-through on"),
        mark("ask 3 zero 5+1"),
        mark("told 3 failed"),
    ];
    assert_eq!(Reader(&file).entries(), expected);
}
