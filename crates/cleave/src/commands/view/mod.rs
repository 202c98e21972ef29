//! `cleave top` and `cleave stats`: what disks do, read from their control sockets.

pub(crate) mod ask;
mod detail;
mod keys;
mod painter;
mod rates;
mod screen;
mod table;
mod terminal;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use cleave_api::DiskReport;
use cleave_host::{Failure, runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use crate::commands::remote::{unanswered, visible};
use crate::output::print;
use crate::signals::QuitSignals;
use ask::ReportedDisk;
use keys::Key;
use rates::Rates;
use screen::{Picture, Row};
use table::{DiskTable, Name, Named};
use terminal::Terminal;

/// `cleave top`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Top {
    pub(crate) sockets: Vec<PathBuf>,
    pub(crate) interval: Duration,
}

/// `cleave stats`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stats {
    pub(crate) sockets: Vec<PathBuf>,
    pub(crate) json: bool,
}

/// The answer of a socket.
type Heard = Result<Vec<ReportedDisk>, String>;

/// Prints all once. A socket that nothing is heard from is an error, after what others say, and so is a disk that cannot be served.
pub(crate) fn stats(stats: &Stats) -> Result<(), Failure> {
    let (disks, missing) = gather(stats);
    let text = match stats.json {
        true => visible(&serde_json::to_string_pretty(&disks).map_err(Failure::run)?) + "\n",
        false => disks.iter().map(page).collect(),
    };
    print(&text)?;
    let failed: Vec<_> = disks.iter().filter_map(ReportedDisk::failed).collect();
    let failed = match failed.as_slice() {
        [] => None,
        [one] => Some(format!("{} is not served", screen::cut(&one.id, 80))),
        several => Some(format!("{} disks are not served", several.len())),
    };
    missing
        .or(failed)
        .map_or(Ok(()), |why| Err(Failure::run(why)))
}

fn page(disk: &ReportedDisk) -> String {
    match disk {
        ReportedDisk::Served(report) => screen::sheet(report),
        ReportedDisk::Away(away) => screen::away_sheet(away),
    }
}

/// All disks, and what the first socket without any has said.
fn gather(stats: &Stats) -> (Vec<ReportedDisk>, Option<String>) {
    let (mut disks, mut missing) = (Vec::new(), None);
    for socket in &stats.sockets {
        match ask::disks(socket) {
            Ok(some) => disks.extend(some),
            Err(why) => {
                missing.get_or_insert(unanswered(socket, &why));
            }
        }
    }
    (disks, missing)
}

/// Shows the disks until the operator quits.
pub(crate) fn top(top: &Top) -> Result<(), Failure> {
    let cannot = |error: io::Error| Failure::run(format!("cannot show: {error}"));
    // Caught before anything is drawn, so that the terminal is given back.
    let runtime = runtime()?;
    let quit = runtime.block_on(async { QuitSignals::catch() })?;
    match runtime.block_on(look(top, quit)) {
        // `cleave top | head` closes early.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        ended => ended.map_err(cannot),
    }
}

async fn look(top: &Top, mut quit: QuitSignals) -> io::Result<()> {
    let mut resized = signal(SignalKind::window_change())?;
    let mut terminal = Terminal::take()?;
    let mut past = HashMap::new();
    let mut ticks = tokio::time::interval(top.interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut heard = Vec::new();
    let mut rates = HashMap::new();
    let mut table = DiskTable::default();
    // Being asked: a socket that does not answer holds up neither quitting nor drawing.
    let mut asked = None;
    loop {
        tokio::select! {
            biased;
            () = quit.received() => return Ok(()),
            key = terminal.key() => match key {
                Key::Quit => return Ok(()),
                key => {
                    let mut rows = rows(top, &heard, &rates);
                    table.arrange(&mut rows);
                    table.press(key, &rows);
                }
            },
            _ = resized.recv() => {}
            now = answered(&mut asked) => {
                asked = None;
                heard = now;
                rates = remember(&mut past, &heard);
            }
            _ = ticks.tick(), if asked.is_none() => {
                asked = Some(Box::pin(listen(top)));
                continue;
            }
        };
        let size = terminal.size();
        let mut rows = rows(top, &heard, &rates);
        table.arrange(&mut rows);
        let titles = titles(top, &heard, &rates);
        terminal.show(&draw(
            &mut table,
            &titles,
            &rows,
            size,
            terminal.is_interactive(),
        ))?;
    }
}

/// The keys, for the last line.
const KEYS: &str = "↑↓ Enter: one disk  ←→ sort  r reverse  q quit";

/// The picture, of so many lines and columns. `titles` stand above it.
fn draw(
    table: &mut DiskTable,
    titles: &[String],
    rows: &[Named<'_>],
    (lines, columns): (usize, usize),
    is_interactive: bool,
) -> Vec<String> {
    let narrow = |picture: &[String]| -> Vec<String> {
        let cut = |line: &String| screen::cut(line, columns);
        picture.iter().map(cut).collect()
    };
    let opened = table.opened(rows).and_then(|at| rows.get(at));
    match opened {
        Some((_, Row::Disk(report, _))) => return detail::page(report, lines, columns),
        Some((_, Row::Away(away))) => return detail::away_page(away, lines, columns),
        Some((_, Row::Gone(..))) | None => {}
    }
    // A few rows are worth more than a title.
    let titles = match titles.len() + 4 < lines {
        true => titles,
        false => &[],
    };
    let lines = lines.saturating_sub(titles.len());
    if !is_interactive {
        let all: Vec<&Row<'_>> = rows.iter().map(|(_, row)| row).collect();
        return narrow(&[titles, &screen::picture(&all, lines).lines].concat());
    }
    let lines = lines.saturating_sub(1);
    let (shown, selected) = table.window(rows, lines);
    let visible: Vec<&Row<'_>> = rows
        .get(shown.clone())
        .unwrap_or_default()
        .iter()
        .map(|(_, row)| row)
        .collect();
    let Picture {
        lines: picture,
        starts,
        is_short,
    } = screen::picture(&visible, lines);
    let mut hint = Vec::new();
    if visible.len() < rows.len() {
        let (from, to, all) = (shown.start + 1, shown.end, rows.len());
        hint.push(format!("{from} to {to} of {all}"));
    }
    if is_short {
        hint.push("a line each".to_owned());
    }
    let hint = match hint.is_empty() {
        true => KEYS.to_owned(),
        false => format!("{}  {KEYS}", hint.join(", ")),
    };
    let mut titles = narrow(titles);
    let mut picture = narrow(&picture);
    // Behind the cut, which would take the marks for characters.
    let selected = selected.and_then(|at| picture.get_mut(*starts.get(at)?));
    if let Some(line) = selected {
        *line = marked(line, 0..line.len());
    }
    if let (Some(head), Some(line)) = (table.head(), picture.first_mut()) {
        *line = marked(line, head);
    }
    titles.append(&mut picture);
    titles.extend(narrow(&[hint]));
    titles
}

/// A part of a line in reverse; all of the line as it is, if it ends before.
fn marked(line: &str, part: std::ops::Range<usize>) -> String {
    let parts = (
        line.get(..part.start),
        line.get(part.clone()),
        line.get(part.end..),
    );
    match parts {
        (Some(before), Some(part), Some(after)) => format!("{before}\x1b[7m{part}\x1b[27m{after}"),
        _ => line.to_owned(),
    }
}

/// Waits for the answers to pending queries; without end if there are none.
async fn answered<F: Future<Output = Vec<Heard>> + Unpin>(asked: &mut Option<F>) -> Vec<Heard> {
    match asked {
        Some(asked) => asked.await,
        None => std::future::pending().await,
    }
}

/// Asks all sockets at once, each on a thread of its own.
async fn listen(top: &Top) -> Vec<Heard> {
    let ask = |socket: &PathBuf| {
        let (reply, answer) = oneshot::channel();
        let socket = socket.clone();
        // Without a thread there is no answer.
        let _ = thread::Builder::new()
            .name("ask".to_owned())
            .spawn(move || {
                let disks = ask::disks(&socket).map_err(|error| error.to_string());
                // The operator may have quit.
                let _ = reply.send(disks);
            });
        answer
    };
    let asked: Vec<_> = top.sockets.iter().map(ask).collect();
    let mut heard = Vec::with_capacity(asked.len());
    for answer in asked {
        heard.push(answer.await.unwrap_or_else(|_| Err("failed".to_owned())));
    }
    heard
}

/// Rates since the last time, which this then is. Of disks that are gone nothing is kept.
fn remember(past: &mut HashMap<Name, DiskReport>, heard: &[Heard]) -> HashMap<Name, Rates> {
    let mut rates = HashMap::new();
    let mut before = std::mem::take(past);
    for (at, disks) in heard.iter().enumerate() {
        for report in disks.iter().flatten().filter_map(ReportedDisk::report) {
            let name = (at, report.id.clone());
            let then = before.remove(&name);
            if let Some(since) = then.and_then(|then| Rates::between(&then, report)) {
                rates.insert(name.clone(), since);
            }
            past.insert(name, report.clone());
        }
        if disks.is_err() {
            // It may answer again.
            past.extend(before.extract_if(|(socket, _), _| *socket == at));
        }
    }
    rates
}

fn rows<'a>(top: &Top, heard: &'a [Heard], rates: &HashMap<Name, Rates>) -> Vec<Named<'a>> {
    let mut rows = Vec::new();
    for (at, (socket, heard)) in top.sockets.iter().zip(heard).enumerate() {
        match heard {
            Ok(disks) => rows.extend(disks.iter().map(|disk| {
                let name = (at, disk.id().to_owned());
                let since = rates.get(&name).copied();
                let row = match disk {
                    ReportedDisk::Served(report) => Row::Disk(report, since),
                    ReportedDisk::Away(away) => Row::Away(away),
                };
                (name, row)
            })),
            Err(why) => rows.push((
                (at, String::new()),
                Row::Gone(socket.display().to_string(), why),
            )),
        }
    }
    rows
}

/// A line for each node with several disks: how many there are, and the CPU time of its process.
fn titles(top: &Top, heard: &[Heard], rates: &HashMap<Name, Rates>) -> Vec<String> {
    let mut titles = Vec::new();
    for (at, (socket, heard)) in top.sockets.iter().zip(heard).enumerate() {
        let Some(disks) = heard.as_ref().ok().filter(|disks| disks.len() > 1) else {
            continue;
        };
        let away = disks.iter().filter(|disk| disk.report().is_none()).count();
        let mut cpu = disks.iter().filter_map(|disk| {
            let rates = rates.get(&(at, disk.id().to_owned()))?;
            Some(rates.process_cpu)
        });
        titles.push(screen::title(
            &socket.display().to_string(),
            disks.len(),
            away,
            cpu.next(),
        ));
    }
    titles
}
