//! `cleave top` and `cleave stats`: what disks do, read from their control sockets; and `cleave resume` and
//! `cleave fail`, which tell them something.

mod ask;
mod held;
mod painter;
mod rates;
mod screen;
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
pub(crate) use held::{Held, Order, run as order_held};
use rates::Rates;
use screen::Row;
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
            "control socket {socket}: {why}: is a `cleave serve --control {socket}` running?"
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
    // Being asked: a socket that does not answer holds up neither quitting nor drawing.
    let mut asked = None;
    loop {
        tokio::select! {
            biased;
            () = quit.received() => return Ok(()),
            () = terminal.quit() => return Ok(()),
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
        let (lines, columns) = terminal.size();
        let rows = rows(top, &heard, &rates);
        let picture = screen::picture(&rows, lines);
        let picture: Vec<String> = picture
            .iter()
            .map(|line| screen::cut(line, columns))
            .collect();
        terminal.show(&picture)?;
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

/// A disk, by the place of its socket and its own among those behind it.
type Place = (usize, usize);

/// Rates since the last time, which this then is.
fn remember(past: &mut HashMap<Place, Report>, heard: &[Heard]) -> HashMap<Place, Rates> {
    let mut rates = HashMap::new();
    for (at, reports) in heard.iter().enumerate() {
        for (nth, report) in reports.iter().flatten().enumerate() {
            let before = past.insert((at, nth), report.clone());
            if let Some(since) = before.and_then(|before| Rates::between(&before, report)) {
                rates.insert((at, nth), since);
            }
        }
    }
    rates
}

fn rows<'a>(top: &Top, heard: &'a [Heard], rates: &HashMap<Place, Rates>) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    for (at, (socket, heard)) in top.sockets.iter().zip(heard).enumerate() {
        match heard {
            Ok(reports) => rows.extend(
                reports
                    .iter()
                    .enumerate()
                    .map(|(nth, report)| Row::Disk(report, rates.get(&(at, nth)).copied())),
            ),
            Err(why) => rows.push(Row::Gone(socket.display().to_string(), why)),
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
            line.ends_with("is a `cleave serve --control /run/a.ctl` running?"),
            "{line}"
        );
    }
}
