use std::collections::HashMap;
use std::io::Write as _;

use cleave_disk::{DiskSpec, OpenOptions};

use super::*;
use crate::judge::judge;

/// Longer than any test takes.
const AGES: Duration = Duration::from_secs(600);

fn open(spec: &str) -> Arc<Disk> {
    let options = OpenOptions::default();
    let spec: DiskSpec = spec.parse().unwrap();
    Arc::new(Disk::open(&spec, &options).unwrap())
}

/// Makes settings that limit the time of each point, not of the whole, so that a stalled machine costs no points.
fn settings(directions: &[DataDirection], ms: u64) -> ProbeSettings {
    let time = Duration::from_millis(ms);
    ProbeSettings {
        directions: directions.to_vec(),
        pace: Pace {
            point_min: time / 500,
            point_max: time / 105 / directions.len() as u32,
            total: AGES,
        },
        seed: 1,
    }
}

fn go(disk: &Arc<Disk>, settings: &ProbeSettings) -> (Vec<Matrix>, bool) {
    run(disk, settings, &AtomicBool::new(false), &mut |_| {}).unwrap()
}

#[test]
fn a_ram_disk_is_measured_at_every_point() {
    let disk = open("ram:8M");
    let (matrices, whole) = go(
        &disk,
        &settings(&[DataDirection::Read, DataDirection::Write], 6000),
    );
    assert!(whole);
    assert_eq!(matrices.len(), 2);
    for matrix in &matrices {
        assert_eq!(matrix.measured.len(), 105);
        assert!(
            matrix
                .measured
                .iter()
                .all(|m| m.requests > 0 && m.elapsed_ns > 0)
        );
    }
    // Reads are measured first, before anything is written. Writes are not checked.
    assert_eq!(matrices[0].zero_share(), Some(1.0));
    assert_eq!(matrices[1].zero_share(), None);
}

#[test]
fn a_small_file_is_measured_and_its_zeroes_are_detected() {
    let mut file = tempfile::NamedTempFile::new_in(".").unwrap();
    // Half data, half hole.
    file.write_all(&vec![7; 4 << 20]).unwrap();
    file.as_file().set_len(8 << 20).unwrap();
    let disk = open(file.path().to_str().unwrap());
    let (matrices, _) = go(&disk, &settings(&[DataDirection::Read], 3000));
    let matrix = &matrices[0];
    let row: Vec<u32> = matrix.row(512 << 10).map(|m| m.point.depth).collect();
    assert!(row.starts_with(&[1, 2, 4, 8]), "{row:?}");
    let share = matrix.zero_share().unwrap();
    assert!((0.4..0.6).contains(&share), "{share}");
}

#[test]
fn writing_leaves_random_bytes_and_reading_none() {
    for (direction, changed) in [(DataDirection::Read, false), (DataDirection::Write, true)] {
        let file = tempfile::NamedTempFile::new_in(".").unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let disk = open(file.path().to_str().unwrap());
        go(&disk, &settings(&[direction], 500));
        drop(disk);
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!(
            bytes.iter().any(|byte| *byte != 0),
            changed,
            "{direction:?}"
        );
        assert_eq!(bytes.len(), 1 << 20);
    }
}

#[test]
fn measurements_before_a_stop_are_kept() {
    let disk = open("null:1G");
    let stop = AtomicBool::new(false);
    let mut reports = Vec::new();
    let mut report = |progress: &ProbeProgress| {
        reports.push(*progress);
        stop.store(progress.done == 3, Ordering::Relaxed);
    };
    let (matrices, whole) = run(
        &disk,
        &settings(&[DataDirection::Read], 5000),
        &stop,
        &mut report,
    )
    .unwrap();
    assert!(!whole);
    assert_eq!(matrices[0].measured.len(), 3);
    assert!(reports.iter().all(|p| p.total == 105 && p.left <= AGES));
    // Stopped at once: no points at all.
    let (matrices, whole) = run(
        &disk,
        &settings(&[DataDirection::Read], 5000),
        &stop,
        &mut |_| {},
    )
    .unwrap();
    assert_eq!((matrices.len(), whole), (0, false));
}

#[test]
fn the_time_limit_ends_the_measurement() {
    let disk = open("null:1G");
    // A fifth of a second, of the hundred that its points would take.
    let mut brief = settings(&[DataDirection::Read], 0);
    brief.pace = Pace {
        point_min: Duration::from_secs(1),
        point_max: Duration::from_secs(1),
        total: Duration::from_millis(200),
    };
    let start = Instant::now();
    go(&disk, &brief);
    assert!(start.elapsed() < Duration::from_secs(50));
    brief.pace.total = Duration::ZERO;
    assert!(!go(&disk, &brief).1);
}

#[test]
fn an_error_of_the_disk_names_the_place() {
    let file = tempfile::NamedTempFile::new_in(".").unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let disk = open(file.path().to_str().unwrap());
    // Truncated meanwhile: reads beyond the end are errors, not zeroes.
    file.as_file().set_len(0).unwrap();
    let stop = AtomicBool::new(false);
    let error = run(
        &disk,
        &settings(&[DataDirection::Read], 500),
        &stop,
        &mut |_| {},
    )
    .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("read of") && text.contains(disk.name()),
        "{text}"
    );
}

/// Only properties that hold on a busy machine: a model may be late, but never early.
#[test]
fn a_model_is_measured_by_its_own_arithmetic() {
    let disk = open("model:p3700,size=64M");
    let (matrices, _) = go(&disk, &settings(&[DataDirection::Read], 4000));
    let measured = &matrices[0].measured;
    assert!(measured.len() > 50, "{}", measured.len());
    let alone = measured
        .iter()
        .filter(|m| m.point.depth == 1 && m.point.block_bytes() == 4096);
    for m in alone {
        assert!(m.latency_us() > 60.0, "{m:?}");
    }
    for m in measured.iter().filter(|m| m.requests > 1000) {
        assert!(m.bytes_per_second() < 3.5e9, "{m:?}");
    }
}

/// Measures a disk of 1.2 GB/s at every point by arithmetic. `rate` returns the rate at a point that is measured for
/// the n-th time, if it is another one. Returns the matrix and how often each point was measured.
fn measured_by(rate: impl Fn(Point, u32) -> Option<f64>) -> (Matrix, HashMap<(u64, u32), u32>) {
    let points = points(512, 1 << 30);
    let mut clock = Clock::new(settings(&[DataDirection::Read], 6000).pace, points.len());
    let mut matrix = Matrix::new(DataDirection::Read);
    let mut times: HashMap<(u64, u32), u32> = HashMap::new();
    measure_all(
        &mut matrix,
        &points,
        &mut clock,
        &mut |_, matrix, point, _| {
            let key = (point.outstanding_bytes, point.depth);
            let time = times.entry(key).or_default();
            *time += 1;
            let rate = rate(point, *time).unwrap_or(1.2e9);
            matrix.add(Measured {
                point,
                requests: 1000,
                elapsed_ns: (1e12 * point.block_bytes() as f64 / rate) as u64,
                error: 0.02,
            });
            Ok(true)
        },
    )
    .unwrap();
    assert_eq!(clock.done, clock.total);
    assert_eq!(
        matrix.measured.len(),
        points.len(),
        "each point has one result"
    );
    (matrix, times)
}

#[test]
fn a_gain_between_two_sizes_without_one_is_measured_again() {
    let is_whole = |p: Point, size| p.outstanding_bytes == size && p.depth == 1;
    // A moment in which the disk was slow.
    let (matrix, times) =
        measured_by(|p, time| (is_whole(p, 512 << 10) && time == 1).then_some(0.72e9));
    assert!(!judge(&matrix).pays, "{:?}", judge(&matrix).chunks);
    assert_eq!(times[&(512 << 10, 1)], 2);
    assert_eq!(times[&(256 << 10, 1)], 1, "its neighbours are not in doubt");
    // A moment in which it was fast.
    let (matrix, times) = measured_by(|p, time| {
        ((p.outstanding_bytes, p.depth, time) == (512 << 10, 4, 1)).then_some(2e9)
    });
    assert!(!judge(&matrix).pays, "{:?}", judge(&matrix).chunks);
    assert_eq!(times[&(512 << 10, 4)], 2);
    // The second measurement agrees with the first.
    let (matrix, _) = measured_by(|p, _| is_whole(p, 512 << 10).then_some(0.72e9));
    assert_eq!(judge(&matrix).best().unwrap().request_bytes, 512 << 10);
    // Two sizes that agree confirm each other.
    let (matrix, times) =
        measured_by(|p, _| (is_whole(p, 512 << 10) || is_whole(p, 256 << 10)).then_some(0.72e9));
    assert!(judge(&matrix).pays);
    assert!(times.values().all(|time| *time == 1));
}
