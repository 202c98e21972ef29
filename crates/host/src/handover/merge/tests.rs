use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cleave_session::Handover;

use super::super::parcel::DiskRecord;
use super::DiskUse::{MaybeUsed, Unused};
use super::*;

fn session(mark: u8) -> Handover {
    let (connection, _) = UnixStream::pair().unwrap();
    Handover {
        connection,
        owns: true,
        has_owned: true,
        needs_reset: false,
        writeback: None,
        device: vec![mark],
        messages: Vec::new(),
    }
}

fn record(id: &str, storage: &str) -> DiskRecord {
    DiskRecord {
        id: id.to_owned(),
        storage: storage.to_owned(),
        ..DiskRecord::default()
    }
}

/// A session of a disk on this storage, kept by a process that was killed.
fn killed(storage: &str, mark: u8) -> LeftParcel {
    LeftParcel {
        parcel: Parcel {
            disk: record("a", storage),
            sessions: vec![session(mark)].into(),
            ..Parcel::default()
        },
        disk_use: MaybeUsed,
    }
}

/// The disk with sessions of these marks, left at this second by a process that ended in order.
fn left(second: u64, disk_use: DiskUse, marks: &[u8]) -> LeftParcel {
    LeftParcel {
        parcel: Parcel {
            disk: record("a", "x"),
            sessions: Vec::from_iter(marks.iter().copied().map(session)).into(),
            since: Some(Duration::from_secs(second)),
            ..Parcel::default()
        },
        disk_use,
    }
}

fn marks(parcels: &[Parcel]) -> Vec<u8> {
    let sessions = parcels.iter().flat_map(|parcel| parcel.sessions.iter());
    let mut marks: Vec<u8> = sessions
        .flat_map(|session| session.device.clone())
        .collect();
    marks.sort_unstable();
    marks
}

/// The parcels; the sessions that go on, and since which second their guests wait; the sessions that end.
type Row = (
    fn() -> Vec<LeftParcel>,
    &'static [u8],
    Option<u64>,
    &'static [u8],
);

const ROWS: [Row; 11] = [
    (|| vec![killed("x", 1)], &[1], None, &[]),
    (|| vec![left(5, MaybeUsed, &[1, 2])], &[1, 2], Some(5), &[]),
    // It was killed while another process took over, which opened the disk without its session.
    (
        || vec![killed("x", 1), left(5, Unused, &[])],
        &[1],
        None,
        &[],
    ),
    // That process has served somebody.
    (
        || vec![killed("x", 1), left(5, MaybeUsed, &[])],
        &[],
        Some(5),
        &[1],
    ),
    (
        || vec![killed("x", 1), left(5, MaybeUsed, &[2])],
        &[2],
        Some(5),
        &[1],
    ),
    // Another disk, or another file of it.
    (
        || vec![killed("y", 1), left(5, Unused, &[])],
        &[],
        Some(5),
        &[1],
    ),
    // Both ended in order.
    (
        || vec![left(4, MaybeUsed, &[1]), left(5, Unused, &[])],
        &[1],
        Some(4),
        &[],
    ),
    (
        || vec![left(4, MaybeUsed, &[1]), left(5, MaybeUsed, &[2])],
        &[2],
        Some(5),
        &[1],
    ),
    // Nothing tells which was served last.
    (|| vec![killed("x", 1), killed("x", 2)], &[], None, &[1, 2]),
    (
        || vec![killed("x", 1), killed("x", 2), left(5, Unused, &[])],
        &[],
        Some(5),
        &[1, 2],
    ),
    (
        || {
            let before = left(4, MaybeUsed, &[2]);
            vec![killed("x", 1), before, left(5, Unused, &[])]
        },
        &[],
        Some(5),
        &[1, 2],
    ),
];

#[test]
fn the_sessions_that_go_on_are_those_after_which_nobody_was_served() {
    for (number, (all, go_on, since, end)) in ROWS.into_iter().enumerate() {
        // In whatever order the manager passes them.
        for turn in 0..all().len() {
            for is_reversed in [false, true] {
                let mut all = all();
                all.rotate_left(turn);
                if is_reversed {
                    all.reverse();
                }
                let MergedParcels { parcels, surplus } = of_disk(all);
                let [whole] = &parcels[..] else {
                    panic!("row {number}: {parcels:?}");
                };
                let found = (marks(&parcels), whole.since, marks(&surplus));
                let since = since.map(Duration::from_secs);
                let expected = (go_on.to_vec(), since, end.to_vec());
                assert_eq!(found, expected, "row {number}");
                assert_eq!(whole.disk.id, "a");
            }
        }
    }
}

/// The operator has not had the disk opened anew.
#[test]
fn a_failed_sync_of_any_parcel_is_kept() {
    use SyncFailure::{Told, Untold};
    for (earlier, later, expected) in [
        (None, None, None),
        (Some(Told), None, Some(Told)),
        (None, Some(Told), Some(Told)),
        (Some(Untold), Some(Told), Some(Untold)),
        (Some(Told), Some(Untold), Some(Untold)),
    ] {
        let mut all = [4, 5].map(|second| left(second, MaybeUsed, &[]));
        all[0].parcel.sync_failure = earlier;
        all[1].parcel.sync_failure = later;
        let merged = of_disk(all.into());
        assert_eq!(merged.parcels[0].sync_failure, expected);
    }
}

#[test]
fn each_disk_has_its_own() {
    assert!(by_disk(Vec::new()).parcels.is_empty());
    let mut other = left(5, MaybeUsed, &[2]);
    other.parcel.disk = record("b", "x");
    let all = vec![killed("x", 1), other, left(5, Unused, &[])];
    let MergedParcels { parcels, surplus } = by_disk(all);
    let found: Vec<_> = parcels
        .iter()
        .map(|parcel| (parcel.disk.id.as_str(), parcel.sessions[0].device[0]))
        .collect();
    assert_eq!(found, [("a", 1), ("b", 2)]);
    assert!(marks(&surplus).is_empty());
}

#[test]
fn what_is_closed_shows_its_frontends_an_end() {
    let (mut end, connection) = UnixStream::pair().unwrap();
    end.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut closed = killed("x", 1).parcel;
    closed.sessions[0].connection = connection;
    close(vec![Parcel::default(), closed]);
    assert_eq!(end.read(&mut [0]).unwrap(), 0);
}
