//! Writes to standard output on a thread of its own: an output that nobody takes anything from (a terminal that
//! was stopped, a line that has gone silent) holds up whoever writes to it, and must not hold up the end.

use std::io::{self, Write as _};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::thread;
use std::time::Duration;

/// How long the last words may take to be written.
const PATIENCE: Duration = Duration::from_millis(300);

/// The thread's other end.
#[derive(Debug)]
pub(super) struct Painter {
    /// `None`: it is to end.
    pictures: Option<SyncSender<String>>,
    /// The result with which it ended.
    ended: Receiver<io::Result<()>>,
}

impl Painter {
    /// Begins with some text, and ends with some when it is dropped.
    pub(super) fn start(first: &'static str, last: &'static str) -> io::Result<Painter> {
        let (pictures, to_paint) = sync_channel(1);
        let (tell, ended) = channel();
        thread::Builder::new()
            .name("painter".to_owned())
            .spawn(move || {
                let painted = paint(first, &to_paint);
                // In any case: what could not be written may have been only a part.
                let left = say(last);
                // Nobody listens where it took too long.
                let _ = tell.send(painted.and(left));
            })?;
        Ok(Painter {
            pictures: Some(pictures),
            ended,
        })
    }

    /// Has a picture written, unless the one before it is still waiting: then a newer one will follow.
    pub(super) fn show(&self, picture: String) -> io::Result<()> {
        match self.pictures.as_ref().map(|to| to.try_send(picture)) {
            None | Some(Ok(()) | Err(TrySendError::Full(_))) => Ok(()),
            Some(Err(TrySendError::Disconnected(_))) => self.ended.recv().unwrap_or(Ok(())),
        }
    }
}

impl Drop for Painter {
    fn drop(&mut self) {
        self.pictures = None;
        let _ = self.ended.recv_timeout(PATIENCE);
    }
}

fn paint(first: &str, pictures: &Receiver<String>) -> io::Result<()> {
    say(first)?;
    pictures.iter().try_for_each(|picture| say(&picture))
}

fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}
