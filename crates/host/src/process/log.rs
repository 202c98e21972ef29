//! Messages for the operator, on stderr, one line each.
//!
//! Logging never waits for stderr: lines go through a bounded queue to a thread of their own, so
//! a full pipe whose reader sleeps costs lines (counted, and told when it flows again), never I/O.

use std::io::{self, IsTerminal as _, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::Duration;

use rustix::fs::fstat;
use tracing::level_filters::LevelFilter;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{MakeWriter, format};

use super::signals::HeldSignals;

/// Lines that may wait for a slow stderr; a burst of a start or an end is far smaller.
const LINES_MAX: usize = 256;

/// How long the end of the program waits for stderr to take the last lines. On a busy machine the log thread may wait for a CPU, and
/// a file for its disk.
const FLUSH_MAX: Duration = Duration::from_secs(2);

/// A message to the log thread.
enum Entry {
    Line(Vec<u8>),
    /// All earlier lines are written: say so.
    Flush(SyncSender<()>),
    /// Nothing to write: wakes the thread.
    Wake,
}

/// A job that the log thread does once, before it writes its next line.
type Job = Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>;

/// Keeps the log going; dropping it gives the last lines a moment to be written.
pub(crate) struct Guard {
    lines: SyncSender<Entry>,
    order: Job,
}

/// Starts logging. To be called once; a second call changes nothing.
pub(crate) fn start(level: LevelFilter) -> io::Result<Guard> {
    let stderr = io::stderr();
    let ansi = stderr.is_terminal();
    let is_journal = is_journal();
    let (queue, guard) = Queue::start(stderr, is_journal)?;
    let subscriber = tracing_subscriber::fmt()
        .compact()
        .with_max_level(level)
        .with_target(false)
        .with_ansi(ansi)
        .with_timer(Clock { is_journal })
        .with_writer(queue)
        .finish();
    // Only a second start can fail, and then the first one's log goes on.
    let _ = tracing::subscriber::set_global_default(subscriber);
    // A panic anywhere is told through the same queue: the default hook writes to stderr and would
    // wait for it.
    std::panic::set_hook(Box::new(|panic| {
        let panic = panic.to_string().replace('\n', " ");
        tracing::error!("internal fault: {panic}");
    }));
    Ok(guard)
}

/// Returns true if stderr leads to the journal of systemd, which takes the severity of a line from a number before it and has a clock
/// of its own.
fn is_journal() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").ok();
    let found = fstat(io::stderr()).ok();
    stream
        .zip(found)
        .is_some_and(|(stream, found)| stream == format!("{}:{}", found.st_dev, found.st_ino))
}

/// Writes the last line of a program that fails.
pub fn last_words(line: &str) {
    let priority = match is_journal() {
        true => "<3>",
        false => "",
    };
    // The exit code is told even if stderr is closed.
    let _ = writeln!(io::stderr(), "{priority}cleave: {line}");
}

/// Writes the time before a line, but for the journal.
struct Clock {
    is_journal: bool,
}

impl FormatTime for Clock {
    fn format_time(&self, out: &mut format::Writer<'_>) -> std::fmt::Result {
        match self.is_journal {
            true => Ok(()),
            false => SystemTime.format_time(out),
        }
    }
}

/// The number that the journal takes for the severity of a line (sd-daemon(3)).
fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        Level::DEBUG | Level::TRACE => "<7>",
    }
}

/// A line as it is written: one line, whatever is in it. A path may hold a line feed, and what follows would pass for a line of ours; or
/// marks that turn the direction of text. The formatter's own colours are left, whose character it cleans out of messages.
fn cleaned(line: &[u8], priority: &str) -> Vec<u8> {
    let line = String::from_utf8_lossy(line);
    let line = match priority {
        "" => line.trim_end_matches('\n'),
        // The rest of the time.
        _ => line.trim_end_matches('\n').trim_start_matches(' '),
    };
    let is_harmless = |c: char| c == '\x1b' || !(c.is_control() || is_mark(c));
    let clean = line.chars().map(|c| if is_harmless(c) { c } else { '?' });
    let written: String = priority.chars().chain(clean).chain(['\n']).collect();
    written.into_bytes()
}

/// Returns true for marks of direction, and for ends of lines that are no control characters.
fn is_mark(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

impl Guard {
    /// Has the log thread run `order`, once, before it writes its next line. Only the first call counts. It does not wait: stderr
    /// may take nothing for as long as it likes.
    pub(crate) fn order(&self, order: impl Fn() + Send + Sync + 'static) {
        let _ = self.order.set(Box::new(order));
        // Full: the thread will come to the order by the lines that are waiting.
        let _ = self.lines.try_send(Entry::Wake);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let (done, wait) = sync_channel(1);
        // Full: stderr takes nothing, and waiting would not change that.
        if self.lines.try_send(Entry::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(FLUSH_MAX);
        }
    }
}

/// The writer for formatted lines.
#[derive(Debug, Clone)]
struct Queue {
    lines: SyncSender<Entry>,
    lost: Arc<AtomicU64>,
    is_journal: bool,
}

impl Queue {
    fn start(out: impl Write + Send + 'static, is_journal: bool) -> io::Result<(Queue, Guard)> {
        let (lines, entries) = sync_channel(LINES_MAX);
        let lost = Arc::new(AtomicU64::new(0));
        let watched = Arc::downgrade(&lost);
        let order = Job::default();
        let given = order.clone();
        let _held = HeldSignals::hold()?;
        thread::Builder::new()
            .name("log".to_owned())
            .stack_size(64 << 10)
            .spawn(move || write(&entries, out, &watched, &given))?;
        let guard = Guard {
            lines: lines.clone(),
            order,
        };
        let queue = Queue {
            lines,
            lost,
            is_journal,
        };
        Ok((queue, guard))
    }
}

fn write(entries: &Receiver<Entry>, mut out: impl Write, lost: &Weak<AtomicU64>, order: &Job) {
    let mut is_done = false;
    while let Ok(entry) = entries.recv() {
        if let Some(order) = order.get().filter(|_| !is_done) {
            is_done = true;
            order();
        }
        // A broken stderr is nobody's business but the operator's: go on, so that senders never wait.
        match entry {
            Entry::Line(line) => drop(out.write_all(&line)),
            Entry::Flush(done) => drop(done.try_send(())),
            Entry::Wake => {}
        }
        let missed = lost
            .upgrade()
            .map_or(0, |lost| lost.swap(0, Ordering::Relaxed));
        if missed > 0 {
            let _ = writeln!(out, "({missed} messages lost: stderr was blocked)");
        }
    }
}

impl<'a> MakeWriter<'a> for Queue {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line {
            queue: self,
            priority: "",
        }
    }

    fn make_writer_for(&'a self, about: &Metadata<'_>) -> Line<'a> {
        let priority = match self.is_journal {
            true => priority(*about.level()),
            false => "",
        };
        Line {
            queue: self,
            priority,
        }
    }
}

/// The writer of a line.
struct Line<'a> {
    queue: &'a Queue,
    priority: &'static str,
}

/// The formatter hands over each message whole, in one call.
impl Write for Line<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let entry = Entry::Line(cleaned(line, self.priority));
        if self.queue.lines.try_send(entry).is_err() {
            self.queue.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    #[test]
    fn a_blocked_log_costs_lines_and_no_time() {
        let (out, mut reader) = UnixStream::pair().unwrap();
        let (queue, guard) = Queue::start(out, false).unwrap();
        let line = [b'x'; 4096];
        let start = Instant::now();
        // Nobody reads, and queue and socket hold fewer lines than these: a writer that waited for room would wait for ever.
        for _ in 0..1000 {
            queue.make_writer().write_all(&line).unwrap();
        }
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "{:?}",
            start.elapsed()
        );
        let lost = queue.lost.load(Ordering::Relaxed);
        let start = Instant::now();
        drop(guard);
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{:?}",
            start.elapsed()
        );
        drop(queue);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert!(text.starts_with('x'), "what was taken is written");
        // The writer may have come to telling of them already.
        assert!(lost > 0 || text.contains("messages lost"));
    }

    #[test]
    fn a_line_is_one_line_whatever_is_in_it() {
        let line = " INFO serving a\nERROR forged\r\u{9b}1m\u{202e}b \x1b[0m\n";
        let told = |priority| String::from_utf8(cleaned(line.as_bytes(), priority)).unwrap();
        assert_eq!(told(""), " INFO serving a?ERROR forged??1m?b \x1b[0m\n");
        assert_eq!(
            told("<4>"),
            "<4>INFO serving a?ERROR forged??1m?b \x1b[0m\n"
        );
    }

    #[test]
    fn an_order_is_carried_out_once_by_the_log_thread() {
        let (out, _reader) = UnixStream::pair().unwrap();
        let (queue, guard) = Queue::start(out, false).unwrap();
        let (told, heard) = std::sync::mpsc::channel();
        guard.order(move || drop(told.send(thread::current().name().map(str::to_owned))));
        queue.make_writer().write_all(b"one\n").unwrap();
        drop(guard);
        assert_eq!(heard.recv().unwrap().as_deref(), Some("log"));
        assert!(heard.try_recv().is_err());
    }

    #[test]
    fn lost_lines_are_counted_once_it_flows_again() {
        let (out, mut reader) = UnixStream::pair().unwrap();
        let (queue, guard) = Queue::start(out, false).unwrap();
        queue.lost.store(3, Ordering::Relaxed);
        // Until they are told of, however late the writer is.
        let _lost = Arc::clone(&queue.lost);
        queue.make_writer().write_all(b"one\n").unwrap();
        drop(guard);
        drop(queue);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "one\n(3 messages lost: stderr was blocked)\n");
    }
}
