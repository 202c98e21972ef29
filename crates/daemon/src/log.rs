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

use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Lines that may wait for a slow stderr; a burst of a start or an end is far smaller.
const LINES_MAX: usize = 256;

/// How long the end of the program waits for stderr to take the last lines. On a busy machine the log thread may wait that long
/// for a CPU.
const FLUSH_MAX: Duration = Duration::from_millis(500);

/// A message to the log thread.
enum Entry {
    Line(Vec<u8>),
    /// All earlier lines are written: say so.
    Flush(SyncSender<()>),
    /// Nothing to write: wakes the thread.
    Wake,
}

/// A job that the log thread does once, before it writes its next line.
type Order = Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>;

/// Keeps the log going; dropping it gives the last lines a moment to be written.
pub(crate) struct Guard {
    lines: SyncSender<Entry>,
    order: Order,
}

/// Starts logging. To be called once; a second call changes nothing.
pub(crate) fn start(level: LevelFilter) -> io::Result<Guard> {
    let stderr = io::stderr();
    let ansi = stderr.is_terminal();
    let (queue, guard) = Queue::start(stderr)?;
    let subscriber = tracing_subscriber::fmt()
        .compact()
        .with_max_level(level)
        .with_target(false)
        .with_ansi(ansi)
        .with_writer(queue)
        .finish();
    // Only a second start can fail, and then the first one's log goes on.
    let _ = tracing::subscriber::set_global_default(subscriber);
    // A panic anywhere is told through the same queue: the default hook writes to stderr and would
    // wait for it.
    std::panic::set_hook(Box::new(|panic| tracing::error!("internal fault: {panic}")));
    Ok(guard)
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
}

impl Queue {
    fn start(out: impl Write + Send + 'static) -> io::Result<(Queue, Guard)> {
        let (lines, entries) = sync_channel(LINES_MAX);
        let lost = Arc::new(AtomicU64::new(0));
        let watched = Arc::downgrade(&lost);
        let order = Order::default();
        let given = order.clone();
        thread::Builder::new()
            .name("log".to_owned())
            .stack_size(64 << 10)
            .spawn(move || write(&entries, out, &watched, &given))?;
        let guard = Guard {
            lines: lines.clone(),
            order,
        };
        Ok((Queue { lines, lost }, guard))
    }
}

fn write(entries: &Receiver<Entry>, mut out: impl Write, lost: &Weak<AtomicU64>, order: &Order) {
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
    type Writer = &'a Queue;

    fn make_writer(&'a self) -> &'a Queue {
        self
    }
}

/// The formatter hands over each message whole, in one call.
impl Write for &Queue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.lines.try_send(Entry::Line(line.to_vec())).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
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
        let (queue, guard) = Queue::start(out).unwrap();
        let line = [b'x'; 4096];
        let start = Instant::now();
        for _ in 0..10_000 {
            (&queue).write_all(&line).unwrap();
        }
        assert!(
            start.elapsed() < Duration::from_secs(20),
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
    fn an_order_is_carried_out_once_by_the_log_thread() {
        let (out, _reader) = UnixStream::pair().unwrap();
        let (queue, guard) = Queue::start(out).unwrap();
        let (told, heard) = std::sync::mpsc::channel();
        guard.order(move || drop(told.send(thread::current().name().map(str::to_owned))));
        (&queue).write_all(b"one\n").unwrap();
        drop(guard);
        assert_eq!(heard.recv().unwrap().as_deref(), Some("log"));
        assert!(heard.try_recv().is_err());
    }

    #[test]
    fn lost_lines_are_counted_once_it_flows_again() {
        let (out, mut reader) = UnixStream::pair().unwrap();
        let (queue, guard) = Queue::start(out).unwrap();
        queue.lost.store(3, Ordering::Relaxed);
        // Until they are told of, however late the writer is.
        let _lost = Arc::clone(&queue.lost);
        (&queue).write_all(b"one\n").unwrap();
        drop(guard);
        drop(queue);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "one\n(3 messages lost: stderr was blocked)\n");
    }
}
