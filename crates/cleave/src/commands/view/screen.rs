//! Formats reports for people: lines of at most eighty columns for `top`, a page for `stats`.

use cleave_api::{
    DiskReport, LatencySummary, PossessionState, SizeClass, SpinExperiment, SplitReport, WorkerMode,
};
use cleave_config::CompletionOption;

use super::rates::Rates;
use crate::commands::remote::Listed;
use crate::output::size;

/// Heads of the columns, as wide as `line` makes them.
pub(super) const HEAD: &str =
    "disk             read/s  write/s    MB/s  p50 us  p99 us  mode       spin%  CPU%";

/// A socket and what was heard from it.
#[derive(Debug)]
pub(super) enum Row<'a> {
    /// A disk; without rates on the first look.
    Disk(&'a DiskReport, Option<Rates>),
    /// A disk that is not served.
    Away(&'a Listed),
    /// The socket's name, and why nothing was heard.
    Gone(String, &'a str),
}

/// A drawn table.
pub(super) struct Picture {
    pub(super) lines: Vec<String>,
    /// The line of each row.
    pub(super) starts: Vec<usize>,
    /// There was room for one line of each disk only.
    pub(super) is_short: bool,
}

/// Draws a whole table; with details where there is room for them, and then with what adaptive found out.
pub(super) fn picture(rows: &[&Row<'_>], lines_max: usize) -> Picture {
    let mut lines = vec![HEAD.to_owned()];
    let mut starts = Vec::with_capacity(rows.len());
    let has_room = |each| 1 + each * rows.len() < lines_max;
    for row in rows {
        starts.push(lines.len());
        match row {
            Row::Disk(report, rates) => {
                lines.push(line(report, rates.unwrap_or_default()));
                if has_room(2) {
                    lines.push(cut(&format!("  {}", detail(report)), 80));
                }
                let stalled = stalled(report).next();
                let each = 4 + usize::from(stalled.is_some());
                let found = [stalled, verdict(report, ""), split_verdict(report)];
                for found in found.into_iter().flatten().filter(|_| has_room(each)) {
                    lines.push(cut(&format!("  {found}"), 80));
                }
            }
            Row::Away(away) => lines.push(cut(&unserved(away), 80)),
            Row::Gone(socket, why) => lines.push(cut(&format!("{socket}: {why}"), 80)),
        }
    }
    if lines.len() > lines_max {
        // Without details: a line a row, and one for the head.
        lines.truncate(lines_max.saturating_sub(1));
        let missing = 1 + rows.len() - lines.len();
        lines.extend(
            (lines_max > 0).then(|| format!("… and {missing} more: make the window higher")),
        );
    }
    Picture {
        lines,
        starts,
        is_short: !rows.is_empty() && !has_room(2),
    }
}

/// The line of a disk that is not served.
fn unserved(away: &Listed) -> String {
    format!("{}: {}", away.id, state(away))
}

fn state(away: &Listed) -> String {
    match &away.error {
        Some(why) => format!("{}: {why}", away.state),
        None => away.state.clone(),
    }
}

/// The line of a node above its disks.
pub(super) fn title(socket: &str, disks: usize, away: usize, cpu: Option<f64>) -> String {
    let away = match away {
        0 => String::new(),
        away => format!(", {away} not served"),
    };
    let cpu = cpu.map(|cpu| format!("; CPU {} %", percent(cpu)));
    format!(
        "{}: {disks} disks{away}{}",
        cut(socket, 42),
        cpu.unwrap_or_default()
    )
}

fn line(report: &DiskReport, rates: Rates) -> String {
    let us = |us: Option<f64>| us.map_or_else(|| "-".to_owned(), micros);
    format!(
        "{:<14} {:>8} {:>8} {:>7} {:>7} {:>7}  {:<9}{}{:>6} {:>5}",
        cut(&report.id, 14),
        count(rates.reads),
        count(rates.writes),
        megabytes(rates.bytes),
        us(rates.p50_us),
        us(rates.p99_us),
        mode(report),
        limit_mark(report, rates),
        percent(rates.spin),
        percent(rates.cpu),
    )
}

/// Returns how the disk waits, or that its guest does, or why it has none.
fn mode(report: &DiskReport) -> String {
    match report.possession {
        PossessionState::Active => {}
        PossessionState::Inactive => return "INACTIVE".to_owned(),
        PossessionState::HandedOver => return "MOVED".to_owned(),
        PossessionState::Waiting => return "WAITING".to_owned(),
    }
    match (held(report), report.quiesced_seconds) {
        (0, None) => report.tuning.completion.to_string(),
        (0, Some(_)) => "QUIESCED".to_owned(),
        (held, _) => cut(&format!("{held} HELD"), 9),
    }
}

/// Marks a disk that has limits, and one at which requests wait for them.
fn limit_mark(report: &DiskReport, rates: Rates) -> char {
    match report.tuning.limits.is_empty() {
        true => ' ',
        false if rates.throttled > 0.0 => '!',
        false => '*',
    }
}

fn held(report: &DiskReport) -> u64 {
    let each = report.stalled.iter();
    each.map(|stalled| u64::from(stalled.held)).sum()
}

/// The second line of a disk.
fn detail(report: &DiskReport) -> String {
    let mut parts = Vec::new();
    // First: the line may be cut.
    match report.possession {
        PossessionState::Active => {}
        PossessionState::Inactive => parts.push("INACTIVE until a guest comes".to_owned()),
        PossessionState::HandedOver => parts.push("MOVED to another host".to_owned()),
        PossessionState::Waiting => parts.push("WAITING for its locks".to_owned()),
    }
    match held(report) {
        0 => {}
        held => parts.push(format!("{held} HELD")),
    }
    if let Some(seconds) = report.quiesced_seconds {
        parts.push(format!("QUIESCED for {seconds:.0} s more"));
    }
    match report.session.connected {
        true => parts.push(counted(report.session.vrings.len() as u64, "vring")),
        false => parts.push("no frontend".to_owned()),
    }
    for mode in WorkerMode::ALL {
        let workers = report
            .pacing
            .workers
            .iter()
            .filter(|worker| *worker == mode);
        match workers.count() {
            0 => {}
            count => parts.push(format!("{count} {}", mode.name().trim_end_matches('s'))),
        }
    }
    if let Some(oldest) = report.in_flight.oldest_seconds {
        let unit = if oldest < 1.0 { " us" } else { "" };
        parts.push(format!(
            "{} in flight, oldest {}{unit}",
            report.in_flight.requests,
            micros(oldest * 1e6)
        ));
    }
    let zero = report.zero_reads;
    if zero.zero > 0 {
        let share = zero.zero as f64 * 100.0 / zero.sampled.max(1) as f64;
        parts.push(format!("{share:.0} % of reads zero"));
    }
    let totals = &report.totals;
    match totals.failed + totals.refused + totals.broken {
        0 => {}
        errors => parts.push(counted(errors, "error")),
    }
    if report.store.sync_failed {
        parts.push("A SYNC FAILED".to_owned());
    }
    parts.join(", ")
}

/// One sentence for each vring with requests that the disk failed and that wait.
fn stalled(report: &DiskReport) -> impl Iterator<Item = String> {
    report.stalled.iter().map(|stalled| {
        let (count, does) = match stalled.held {
            0 => (stalled.retrying, "retried"),
            held => (held, "held"),
        };
        format!(
            "vring {}: {count} {does} for {}, {} at sector {}: {}",
            stalled.vring,
            age(stalled.seconds),
            stalled.verb,
            stalled.sector,
            stalled.error,
        )
    })
}

/// The disk's limits, where it has any, and how many requests waited for them.
fn limits(report: &DiskReport) -> Option<String> {
    let limits = report.tuning.limits.iter();
    let limits: Vec<String> = limits
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let waited = counted(report.totals.throttled, "request");
    (!limits.is_empty()).then(|| format!("{}; {waited} waited", limits.join(",")))
}

/// Result of the last experiment with spinning, as a sentence. `of` follows the percentage (" of the response time").
/// `None`: no vring is adaptive, or no experiment has ended yet.
fn verdict(report: &DiskReport, of: &str) -> Option<String> {
    let tuning = &report.tuning;
    let mut ways = tuning.vrings.values().chain([&tuning.completion]);
    if !ways.any(|way| *way == CompletionOption::Adaptive) {
        return None;
    }
    let tried: Vec<&SpinExperiment> = report.pacing.tried.iter().flatten().collect();
    let each_ago = tried.iter().map(|tried| tried.seconds_ago);
    let last_ago = each_ago.min_by(f64::total_cmp)?;
    let found = match tried.as_slice() {
        [alone] => found(alone, of),
        _ => {
            let spin = tried.iter().filter(|tried| tried.spins).count();
            format!("spinning pays for {spin} of {} workers", tried.len())
        }
    };
    Some(format!("{found}, tried {} ago", age(last_ago)))
}

fn found(tried: &SpinExperiment, of: &str) -> String {
    let [gain, ..] = tried.gain_percent;
    let price = tried.price_percent.abs();
    let link = if tried.price_percent < 0.0 {
        "and"
    } else {
        "for"
    };
    let saves = match gain >= 0.5 {
        true => format!("saves {gain:.0} %{of} {link} {price:.0} % of a core"),
        false => "saves nothing".to_owned(),
    };
    match tried.spins {
        true => format!("spinning {saves}"),
        false => format!("sleeping: spinning {saves}"),
    }
}

/// Result of the last experiment with splitting, as a sentence, for the most frequent kind of large request. `None`:
/// splitting is not automatic, or no experiment has ended yet.
fn split_verdict(report: &DiskReport) -> Option<String> {
    let tried = split_verdicts(report);
    tried
        .max_by_key(|(requests, _)| *requests)
        .map(|(_, found)| found)
}

/// Results of the last experiments, one for each kind of large request, with its number of requests.
fn split_verdicts(report: &DiskReport) -> impl Iterator<Item = (u64, String)> {
    let cells = report.splitting.iter();
    let cells = cells.filter(|_| report.tuning.split == "auto");
    cells.filter_map(|cell| Some((cell.requests, split_found(cell)?)))
}

fn split_found(cell: &SplitReport) -> Option<String> {
    let tried = cell.tried?;
    let size = |bytes: u32| cleave_disk::format_size(bytes.into());
    let whole_or = |bytes: u32, prefix: &str| match bytes {
        0 => "whole".to_owned(),
        bytes => [prefix, &size(bytes)].concat(),
    };
    let [gain, ..] = tried.gain_percent;
    let saves = match gain >= 0.5 {
        true => format!("saves {gain:.0} %"),
        false => "saves nothing".to_owned(),
    };
    Some(format!(
        "{}s from {} {}: {} {saves} on {}, tried {} ago",
        cell.direction,
        cleave_disk::format_size(cell.from_bytes),
        whole_or(cell.chunk_bytes, "in pieces of "),
        size(tried.chunk_bytes),
        whole_or(tried.against_bytes, ""),
        age(tried.seconds_ago),
    ))
}

/// A time in one unit.
fn age(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 100.0 => format!("{seconds:.0} s"),
        seconds if seconds < 6000.0 => format!("{:.0} min", seconds / 60.0),
        seconds => format!("{:.0} h", seconds / 3600.0),
    }
}

/// A disk that is not served.
pub(super) fn away_sheet(away: &Listed) -> String {
    let title = cut(&format!("{}: {}", away.id, away.name), usize::MAX);
    format!("{title}\n  {}\n", cut(&state(away), usize::MAX))
}

/// All of a disk, once.
pub(super) fn sheet(report: &DiskReport) -> String {
    let store = &report.store;
    let access = if store.read_only { ", read-only" } else { "" };
    let direct = match store.direct {
        Some(true) => ", O_DIRECT",
        Some(false) => ", through the page cache",
        None => "",
    };
    let title = match report.id == report.name {
        true => report.name.clone(),
        false => format!("{}: {}", report.id, report.name),
    };
    let mut lines = vec![
        title,
        format!(
            "  disk      {}, {}, blocks of {}, {}{direct}{access}",
            store.kind,
            size(store.size_bytes),
            store.block_bytes,
            store.cache
        ),
        format!("  frontend  {}", frontend(report)),
        format!("  waiting   {}", waiting(report)),
    ];
    lines.extend(server(report).map(|server| format!("  server    {server}")));
    lines.extend(stalled(report).map(|stalled| format!("  stalled   {stalled}")));
    lines.extend(limits(report).map(|limits| format!("  limits    {limits}")));
    let verdict = verdict(report, " of the response time");
    lines.extend(verdict.map(|verdict| format!("  verdict   {verdict}")));
    lines.extend(split_verdicts(report).map(|(_, found)| format!("  pieces    {found}")));
    lines.extend([
        format!(
            "  process   {} for {:.0} s, {:.2} s of CPU, {:.1} MiB",
            report.process.version,
            report.process.uptime_seconds,
            report.process.cpu_seconds,
            report.process.resident_bytes as f64 / f64::from(1 << 20),
        ),
        format!("  now       {}", detail(report)),
    ]);
    if report.requests.is_empty() {
        let totals = &report.totals;
        lines.push(format!(
            "  totals    {} reads, {} writes, {} others",
            totals.reads, totals.writes, totals.others
        ));
    } else {
        lines.push(
            "  requests            count        MiB  mean us      p50      p99    p99.9".to_owned(),
        );
    }
    for row in &report.requests {
        lines.push(format!(
            "  {:<5} {:<6} {:>12} {:>10.0} {}",
            row.direction,
            // A flush has no size.
            match row.size {
                SizeClass::None => "",
                size => size.name(),
            },
            row.requests,
            row.bytes as f64 / f64::from(1 << 20),
            row.stages.get("device").map_or_else(String::new, quantiles),
        ));
    }
    lines.push(String::new());
    let plain: Vec<String> = lines.iter().map(|line| cut(line, usize::MAX)).collect();
    plain.join("\n")
}

/// How the connections to the disk's server are.
fn server(report: &DiskReport) -> Option<String> {
    let server = report.store.connections.as_ref()?;
    let missing = match (server.waiting, server.held) {
        (0, 0) => String::new(),
        (missing, held) => format!(", {missing} missing, {held} requests wait for one"),
    };
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    Some(format!(
        "{} up{missing}; {} lost and {} made again so far; {:.1} MiB sent, {:.1} received",
        counted(server.connected, "connection"),
        server.lost,
        server.reconnects,
        mib(server.sent_bytes),
        mib(server.received_bytes),
    ))
}

fn frontend(report: &DiskReport) -> String {
    let session = &report.session;
    let now = match (session.connected, session.parked) {
        (true, true) => "connected, another is parked",
        (true, false) => "connected",
        (false, _) => "none now",
    };
    format!("{now}, {} so far", session.count)
}

/// `1 error`, `2 errors`.
fn counted(count: u64, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

fn waiting(report: &DiskReport) -> String {
    let pacing = &report.pacing;
    let profile = report.tuning.profile.as_ref();
    let profile = profile.map(|path| format!(" by profile {path}"));
    format!(
        "{}, split {}{}; {} sleeps, {} dozes; spun {:.2} s well and {:.2} s in vain",
        report.tuning.completion,
        report.tuning.split,
        profile.unwrap_or_default(),
        pacing.sleeps,
        pacing.dozes,
        pacing.spin_hit_seconds,
        pacing.spin_wasted_seconds,
    )
}

fn quantiles(times: &LatencySummary) -> String {
    format!(
        "{:>8} {:>8} {:>8} {:>8}",
        micros(times.mean_us),
        micros(times.p50_us),
        micros(times.p99_us),
        micros(times.p999_us)
    )
}

/// Three digits or so.
pub(super) fn micros(us: f64) -> String {
    match us {
        us if us < 10.0 => format!("{us:.2}"),
        us if us < 100.0 => format!("{us:.1}"),
        us if us < 1e6 => format!("{us:.0}"),
        us => format!("{:.1} s", us / 1e6),
    }
}

fn count(each: f64) -> String {
    match each {
        each if each < 1e6 => format!("{each:.0}"),
        each => format!("{:.2}M", each / 1e6),
    }
}

fn percent(share: f64) -> String {
    match share * 100.0 {
        percent if percent < 1000.0 => format!("{percent:.1}"),
        percent => format!("{percent:.0}"),
    }
}

fn megabytes(bytes: f64) -> String {
    match bytes / 1e6 {
        mb if mb < 100.0 => format!("{mb:.1}"),
        mb => format!("{mb:.0}"),
    }
}

/// At most so many characters, none of them able to move a cursor: names come from elsewhere.
pub(super) fn cut(text: &str, most: usize) -> String {
    let plain = text.chars().map(|c| if c.is_control() { '?' } else { c });
    match text.chars().count() > most {
        true => plain.take(most.saturating_sub(1)).chain(['…']).collect(),
        false => plain.collect(),
    }
}

#[cfg(test)]
mod tests {
    use cleave_api::{RequestDirection, RequestVerb, SplitExperiment, StalledVring};

    use super::super::rates::tests::report;
    use super::*;

    fn drawn(rows: &[Row<'_>], lines_max: usize) -> Vec<String> {
        picture(&rows.iter().collect::<Vec<_>>(), lines_max).lines
    }

    #[test]
    fn a_picture_fits_eighty_columns() {
        let rates = Rates {
            reads: 12_345_678.0,
            writes: 999_999.4,
            others: 0.0,
            bytes: 98_765_432_109.0,
            p50_us: Some(999_999.4),
            p99_us: Some(8_600_000.0),
            throttled: 1.0,
            spin: 9.999,
            cpu: 15.0,
            process_cpu: 15.0,
        };
        let mut long = report("a-very-long-name-of-a-disk\x1b[2J.img", 5.0, 5, &[]);
        long.tuning.completion = CompletionOption::Interrupt;
        long.totals.failed = u64::MAX / 2;
        long.store.sync_failed = true;
        long.in_flight.oldest_seconds = Some(3.04);
        long.pacing.tried = vec![tried(false, [99.4, 60.0, 100.0], 9999.0, 99.4)];
        long.tuning.vrings.insert(1, CompletionOption::Adaptive);
        assert!(detail(&long).contains("3 in flight, oldest 3.0 s, "));
        let short = report("a.img", 5.0, 5, &[]);
        let rows = [
            Row::Disk(&long, Some(rates)),
            Row::Disk(&short, None),
            Row::Gone("/run/cleave/".repeat(20), "nobody listens"),
        ];
        let line = "  sleeping: spinning saves 99 % for 9999 % of a core, tried 99 s ago";
        assert_eq!(drawn(&rows, 100)[3], line, "whole");
        for lines_max in [1, 2, 5, 6, 7, 10, 11, 100] {
            let lines = drawn(&rows, lines_max);
            assert!(lines.len() <= lines_max);
            for line in lines {
                assert!(line.chars().count() <= 80, "{line}");
                assert!(!line.chars().any(char::is_control), "{line:?}");
            }
        }
    }

    #[test]
    fn a_picture_of_two_disks_and_one_that_is_gone() {
        let (before, now) = (
            report("a.img", 10.0, 0, &[]),
            report("a.img", 12.0, 4000, &[(65536, 100)]),
        );
        let first = report("new", 1.0, 0, &[]);
        let rows = [
            Row::Disk(&now, Rates::between(&before, &now)),
            Row::Disk(&first, None),
            Row::Gone("/run/b".to_owned(), "nobody listens"),
        ];
        let expected = "\
disk             read/s  write/s    MB/s  p50 us  p99 us  mode       spin%  CPU%
a.img              2000        0     8.2    69.6    73.6  adaptive    10.0  20.0
  1 vring, 1 sleep, 1 spin, 3 in flight, oldest 2000 us, 50 % of reads zero
  spinning saves 22 % for 40 % of a core, tried 3 s ago
  reads from 512K in pieces of 16K: 16K saves 48 % on whole, tried 9 s ago
new                   0        0     0.0       -       -  adaptive     0.0   0.0
  1 vring, 1 sleep, 1 spin, 3 in flight, oldest 2000 us, 50 % of reads zero
  spinning saves 22 % for 40 % of a core, tried 3 s ago
  reads from 512K in pieces of 16K: 16K saves 48 % on whole, tried 9 s ago
/run/b: nobody listens";
        assert_eq!(drawn(&rows, 24).join("\n"), expected);
        let mut expected: Vec<&str> = expected.lines().collect();
        expected.retain(|line| !line.contains("saves"));
        assert_eq!(drawn(&rows, 10), expected, "where there is less room");
    }

    fn tried(
        spins: bool,
        gain_percent: [f64; 3],
        price_percent: f64,
        ago: f64,
    ) -> Option<SpinExperiment> {
        Some(SpinExperiment {
            spins,
            gain_percent,
            price_percent,
            seconds_ago: ago,
        })
    }

    #[test]
    fn a_disk_that_another_host_may_have_says_so_first() {
        let mut report = report("a.img", 5.0, 5, &[]);
        report.quiesced_seconds = Some(3.0);
        for (possession, word, sentence) in [
            (
                PossessionState::Active,
                "QUIESCED ",
                "QUIESCED for 3 s more",
            ),
            (
                PossessionState::Inactive,
                "INACTIVE ",
                "INACTIVE until a guest comes",
            ),
            (
                PossessionState::HandedOver,
                "MOVED ",
                "MOVED to another host",
            ),
            (
                PossessionState::Waiting,
                "WAITING ",
                "WAITING for its locks",
            ),
        ] {
            report.possession = possession;
            let lines = drawn(&[Row::Disk(&report, None)], 24);
            assert!(lines[1].contains(word), "{}", lines[1]);
            assert!(lines[2].trim_start().starts_with(sentence), "{}", lines[2]);
        }
    }

    #[test]
    fn what_adaptive_found_out_is_said_in_a_sentence() {
        let mut report = report("a.img", 5.0, 5, &[]);
        let rows = [
            (
                vec![tried(true, [22.4, 20.0, 25.0], 17.2, 3.4)],
                "spinning saves 22 % for 17 % of a core, tried 3 s ago",
            ),
            (
                vec![tried(true, [8.0, 7.0, 9.0], -25.0, 130.0)],
                "spinning saves 8 % and 25 % of a core, tried 2 min ago",
            ),
            (
                vec![tried(false, [40.0, 38.0, 42.0], 310.0, 12.0)],
                "sleeping: spinning saves 40 % for 310 % of a core, tried 12 s ago",
            ),
            (
                vec![tried(false, [-3.0, -9.0, 0.0], 250.0, 7200.0)],
                "sleeping: spinning saves nothing, tried 2 h ago",
            ),
            (
                vec![
                    tried(true, [9.0; 3], 9.0, 14.0),
                    None,
                    tried(false, [0.0; 3], 9.0, 8.0),
                ],
                "spinning pays for 1 of 2 workers, tried 8 s ago",
            ),
        ];
        for (each, expected) in rows {
            report.pacing.tried = each;
            assert_eq!(verdict(&report, "").as_deref(), Some(expected));
        }
        report.tuning.completion = CompletionOption::Poll;
        assert_eq!(
            verdict(&report, ""),
            None,
            "an old finding is in force no more"
        );
        report.tuning.vrings.insert(0, CompletionOption::Adaptive);
        assert!(verdict(&report, "").is_some());
        report.pacing.tried = vec![None];
        assert_eq!(verdict(&report, ""), None, "nothing was tried yet");
    }

    #[test]
    fn what_was_found_out_about_pieces_is_said_in_a_sentence() {
        let mut report = report("a.img", 5.0, 5, &[]);
        for (chunk_bytes, against_bytes, gain, expected) in [
            (0, 0, -3.0, "whole: 8K saves nothing on whole"),
            (8192, 0, 47.6, "in pieces of 8K: 8K saves 48 % on whole"),
            (
                16384,
                16384,
                0.2,
                "in pieces of 16K: 8K saves nothing on 16K",
            ),
        ] {
            let cell = &mut report.splitting[0];
            cell.chunk_bytes = chunk_bytes;
            cell.tried = cell.tried.map(|tried| SplitExperiment {
                chunk_bytes: 8192,
                against_bytes,
                gain_percent: [gain; 3],
                ..tried
            });
            let expected = format!("reads from 512K {expected}, tried 9 s ago");
            assert_eq!(split_verdict(&report), Some(expected));
        }
        report.tuning.split = "off".to_owned();
        assert_eq!(split_verdict(&report), None, "it is in force no more");
        report.tuning.split = "auto".to_owned();
        report.splitting[0].tried = None;
        assert_eq!(split_verdict(&report), None, "nothing was tried yet");
    }

    #[test]
    fn what_waits_for_the_disk_is_said_of_each_vring() {
        let mut report = report("a.img", 5.0, 5, &[]);
        let stalled = |vring, held, retrying, error: &str| StalledVring {
            vring,
            held,
            retrying,
            verb: RequestVerb::Write,
            sector: 2048,
            errno: 28,
            error: error.to_owned(),
            seconds: 130.0,
        };
        report.stalled = vec![
            stalled(3, 0, 2, "Input/output error (os error 5)"),
            stalled(7, 12, 1, "No space left on device (os error 28)"),
        ];
        report.tuning.limits.insert("iops-total".to_owned(), 5);
        let lines = drawn(&[Row::Disk(&report, None)], 24);
        assert!(lines[1].contains("  12 HELD  *   0.0 "), "{}", lines[1]);
        let throttled = Rates {
            throttled: 0.5,
            ..Rates::default()
        };
        let marked = drawn(&[Row::Disk(&report, Some(throttled))], 24);
        assert!(marked[1].contains("  12 HELD  !   0.0 "), "{}", marked[1]);
        assert!(lines[2].contains("12 HELD"), "{}", lines[2]);
        assert_eq!(
            lines[3],
            "  vring 3: 2 retried for 2 min, write at sector 2048: Input/output error (os er…"
        );
        assert_eq!(lines.len(), 6);
        let sheet = sheet(&report);
        for line in [
            "  stalled   vring 3: 2 retried for 2 min, write at sector 2048: Input/output error (os error 5)",
            "  stalled   vring 7: 12 held for 2 min, write at sector 2048: No space left on device (os error 28)",
        ] {
            assert!(sheet.lines().any(|told| told == line), "{sheet}");
        }
    }

    #[test]
    fn disks_without_room_are_counted() {
        let report = report("a.img", 5.0, 5, &[]);
        let rows: Vec<_> = (0..40).map(|_| Row::Disk(&report, None)).collect();
        let lines = drawn(&rows, 24);
        assert_eq!(lines.len(), 24);
        assert_eq!(lines[23], "… and 18 more: make the window higher");
        assert!(lines[22].starts_with("a.img"));
        assert!(drawn(&rows[..23], 24)[23].starts_with("a.img"));
        for lines_max in [0, 1, 2] {
            assert_eq!(drawn(&rows, lines_max).len(), lines_max);
        }
    }

    /// A name may hold anything that a file's may.
    #[test]
    fn no_name_moves_the_cursor_of_a_sheet() {
        let text = sheet(&report("a\n\x1b[2J.img", 5.0, 5, &[]));
        assert!(
            text.starts_with("a??[2J.img: /images/a??[2J.img\n"),
            "{text:?}"
        );
        assert!(
            !text.lines().any(|line| line.contains(char::is_control)),
            "{text:?}"
        );
    }

    #[test]
    fn counts_are_written_for_people() {
        let mut report = report("c.img", 12.0, 1, &[]);
        report.name = "c.img".to_owned();
        report.totals.failed = 1;
        report.requests[0].direction = RequestDirection::Flush;
        report.requests[0].size = SizeClass::None;
        let text = sheet(&report);
        assert!(text.starts_with("c.img\n"), "{text}");
        assert!(text.contains(", 1 error\n"), "{text}");
        assert!(text.contains("  flush                   1 "), "{text}");
        report.totals.broken = 1;
        assert!(sheet(&report).contains(", 2 errors\n"));
    }

    #[test]
    fn a_sheet_says_all_of_a_disk() {
        let text = sheet(&report("a.img", 12.0, 4096, &[]));
        let expected = "\
a.img: /images/a.img
  disk      file, 1 GiB, blocks of 512, writeback, O_DIRECT
  frontend  connected, 1 so far
  waiting   adaptive, split auto; 1 sleeps, 2 dozes; spun 1.20 s well and 0.00 s in vain
  verdict   spinning saves 22 % of the response time for 40 % of a core, tried 3 s ago
  pieces    reads from 512K in pieces of 16K: 16K saves 48 % on whole, tried 9 s ago
  process   0 for 12 s, 3.00 s of CPU, 3.0 MiB
  now       1 vring, 1 sleep, 1 spin, 3 in flight, oldest 2000 us, 50 % of reads zero
  requests            count        MiB  mean us      p50      p99    p99.9
  read  4K             4096         16     80.0     79.5      120     1500
";
        assert_eq!(text, expected);
    }
}
