//! The connections: few, short, and none of them trusted to be either.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::middleware::from_fn;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::AbortHandle;

use super::routes::refuse_pages;
use crate::failure::Failure;
use crate::socket::Listening;

/// Most connections at a time; the oldest leaves for a new one.
const CONNECTIONS_MAX: usize = 32;
/// A connection ends after this, whatever goes on: an answer takes milliseconds, but for those of [`Streaming`].
const CONNECTION_TIME: Duration = Duration::from_secs(60);
/// A request's header comes whole within this.
const HEADER_TIME: Duration = Duration::from_secs(5);
/// Most bytes of it, and most lines.
const HEADER_BYTES_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;
/// No connection is accepted for so long after accepting failed (no descriptors left, say).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The interface at work. Dropping it ends all of its connections and removes the socket file.
#[derive(Debug)]
pub(crate) struct Server {
    task: AbortHandle,
    _socket: Listening,
}

impl Server {
    /// Serves an opened socket on the runtime at hand.
    pub(crate) fn start(socket: Listening, router: Router) -> Result<Server, Failure> {
        let listener = socket
            .listener()
            .map_err(|error| Failure::run(format!("cannot listen for control: {error}")))?;
        let router = router.layer(from_fn(refuse_pages));
        let task = tokio::spawn(accept(listener, router)).abort_handle();
        Ok(Server {
            task,
            _socket: socket,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: UnixListener, router: Router) {
    let mut open = Connections::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => open.take(stream, &router),
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// Connections under way, oldest first. They end with this value.
#[derive(Debug, Default)]
struct Connections(VecDeque<AbortHandle>);

impl Connections {
    fn take(&mut self, stream: UnixStream, router: &Router) {
        self.0.retain(|connection| !connection.is_finished());
        if self.0.len() >= CONNECTIONS_MAX
            && let Some(oldest) = self.0.pop_front()
        {
            oldest.abort();
        }
        let task = tokio::spawn(converse(stream, router.clone()));
        self.0.push_back(task.abort_handle());
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

/// Whether a connection has an answer that no time limits: it has no end, or it waits for a disk.
#[derive(Debug, Clone, Default)]
pub(crate) struct Streaming(Arc<AtomicBool>);

impl Streaming {
    pub(crate) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

async fn converse(stream: UnixStream, router: Router) {
    let streaming = Streaming::default();
    let service = TowerToHyperService::new(router.layer(Extension(streaming.clone())));
    let conversation = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(HEADER_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let mut conversation = pin!(conversation);
    // How it ends is the client's affair.
    let ended = tokio::time::timeout(CONNECTION_TIME, &mut conversation).await;
    if ended.is_err() && streaming.0.load(Ordering::Relaxed) {
        let _ = conversation.await;
    }
}
