//! `cleave top` and `cleave stats`: what disks do, read from their control sockets; and `cleave resume` and
//! `cleave fail`, which tell them something.

mod ask;
mod detail;
mod held;
mod keys;
mod painter;
mod rates;
mod screen;
mod table;
mod terminal;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use crate::control::report::Report;
use crate::failure::Failure;
use crate::process::runtime;
use crate::signals::QuitSignals;
pub(crate) use ask::encoded;
pub(crate) use held::{Held, Order, run as order_held};
use keys::Key;
use rates::Rates;
use screen::Row;
use table::{Name, Named, Table};
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
type Heard = Result<Vec<Report>, String>;

/// Prints all once. A socket that nothing is heard from is an error, after what others say.
pub(crate) fn stats(stats: &Stats) -> Result<(), Failure> {
    let (reports, missing) = runtime()?.block_on(gather(stats));
    let text = match stats.json {
        true => serde_json::to_string_pretty(&reports).map_err(Failure::run)? + "\n",
        false => reports.iter().map(screen::sheet).collect(),
    };
    crate::print(&text)?;
    missing.map_or(Ok(()), |why| Err(Failure::run(why)))
}

/// All reports, and what the first socket without any has said.
async fn gather(stats: &Stats) -> (Vec<Report>, Option<String>) {
    let (mut reports, mut missing) = (Vec::new(), None);
    for socket in &stats.sockets {
        match ask::reports(socket).await {
            Ok(some) => reports.extend(some),
            Err(why) => {
                missing.get_or_insert(unheard(socket, &why));
            }
        }
    }
    (reports, missing)
}

/// Why nothing was heard from a socket.
fn unheard(socket: &Path, why: &str) -> String {
    let socket = socket.display();
    match why {
        ask::OTHER_USER => format!("control socket {socket}: {why}: run this command as that user"),
        _ => format!(
            "control socket {socket}: {why}: is a `cleave serve --control {socket}`, or the node of that socket, running?"
        ),
    }
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
    let mut table = Table::default();
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
        terminal.show(&draw(&mut table, &rows, size, terminal.is_interactive()))?;
    }
}

/// The picture, of so many lines and columns.
fn draw(
    table: &mut Table,
    rows: &[Named<'_>],
    (lines, columns): (usize, usize),
    is_interactive: bool,
) -> Vec<String> {
    let narrow = |picture: Vec<String>| -> Vec<String> {
        let cut = |line: &String| screen::cut(line, columns);
        picture.iter().map(cut).collect()
    };
    let opened = table.opened(rows).and_then(|at| rows.get(at));
    if let Some((_, Row::Disk(report, _))) = opened {
        return narrow(detail::page(report, lines));
    }
    if !is_interactive {
        let all: Vec<&Row<'_>> = rows.iter().map(|(_, row)| row).collect();
        return narrow(screen::picture(&all, lines));
    }
    let (shown, selected) = table.window(rows, lines);
    let visible: Vec<&Row<'_>> = rows
        .get(shown.clone())
        .unwrap_or_default()
        .iter()
        .map(|(_, row)| row)
        .collect();
    let (mut picture, starts) = screen::picture_with(&visible, lines);
    if visible.len() < rows.len() && lines > 1 {
        let (from, to, all) = (shown.start + 1, shown.end, rows.len());
        picture.push(format!("… {from} to {to} of {all}: arrows and pages"));
    }
    let mut picture = narrow(picture);
    // Behind the cut, which would take the marks for characters.
    let selected = selected.and_then(|at| picture.get_mut(*starts.get(at)?));
    if let Some(line) = selected {
        *line = marked(line, 0..line.len());
    }
    if let (Some(head), Some(line)) = (table.head(), picture.first_mut()) {
        *line = marked(line, head);
    }
    picture
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

/// Waits for the answers to pending queries; for ever if there are none.
async fn answered<F: Future<Output = Vec<Heard>> + Unpin>(asked: &mut Option<F>) -> Vec<Heard> {
    match asked {
        Some(asked) => asked.await,
        None => std::future::pending().await,
    }
}

async fn listen(top: &Top) -> Vec<Heard> {
    let asked: Vec<_> = top
        .sockets
        .iter()
        .cloned()
        .map(|socket| tokio::spawn(async move { ask::reports(&socket).await }))
        .collect();
    let mut heard = Vec::with_capacity(asked.len());
    for answer in asked {
        heard.push(answer.await.unwrap_or_else(|_| Err("failed".to_owned())));
    }
    heard
}

/// Rates since the last time, which this then is. Of disks that are gone nothing is kept.
fn remember(past: &mut HashMap<Name, Report>, heard: &[Heard]) -> HashMap<Name, Rates> {
    let mut rates = HashMap::new();
    let mut before = std::mem::take(past);
    for (at, reports) in heard.iter().enumerate() {
        for report in reports.iter().flatten() {
            let name = (at, report.id.clone());
            let then = before.remove(&name);
            if let Some(since) = then.and_then(|then| Rates::between(&then, report)) {
                rates.insert(name.clone(), since);
            }
            past.insert(name, report.clone());
        }
        if reports.is_err() {
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
            Ok(reports) => rows.extend(reports.iter().map(|report| {
                let name = (at, report.id.clone());
                let since = rates.get(&name).copied();
                (name, Row::Disk(report, since))
            })),
            Err(why) => rows.push((
                (at, String::new()),
                Row::Gone(socket.display().to_string(), why),
            )),
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_fits_the_reason() {
        let path = Path::new("/run/a.ctl");
        let line = unheard(path, ask::OTHER_USER);
        assert!(line.ends_with("run this command as that user"), "{line}");
        let line = unheard(path, "no such socket");
        assert!(
            line.ends_with(
                "is a `cleave serve --control /run/a.ctl`, or the node of that socket, running?"
            ),
            "{line}"
        );
    }
}
