//! Work that may block, on a thread of its own.

use std::io;
use std::thread;

use tokio::sync::oneshot;

/// Does on a thread of its own what may block.
pub(crate) async fn aside<T: Send + 'static>(
    name: &str,
    job: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (reply, done) = oneshot::channel();
    let thread = thread::Builder::new().name(name.to_owned());
    thread.spawn(move || reply.send(job()))?;
    done.await
        .unwrap_or_else(|lost| Err(io::Error::other(lost)))
}
