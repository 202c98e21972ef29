//! The connections of the control socket. An answer that has begun is always finished; a client that says nothing, or does not read
//! its answer, is not waited for.

use std::io;
use std::os::unix::net;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::Request;
use axum::http::header;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Router};
use cleave_api::ProblemKind;
use cleave_session::Offload;
use hyper::server::conn::http1;
use hyper::upgrade::Upgraded;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixListener;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Sleep, sleep};

use super::client_stream::ClientStream;
use crate::failure::Failure;
use crate::problem::Refusal;
use crate::socket::{FileOwner, Listening};

/// Most connections at a time. Further ones wait in the backlog of the socket until one has ended.
pub(crate) const CONNECTIONS_MAX: usize = 256;
/// A connection does not take a further request after this, so that clients that keep theirs open make room for others.
const CONNECTION_TIME: Duration = Duration::from_secs(60);
/// A request's header comes whole within this.
const HEADER_TIME: Duration = Duration::from_secs(5);
/// A client that takes nothing of its answer for so long has gone.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// A client that takes its answers slowly is let go so long after the first wait for it. It can ask for nothing more after
/// [`CONNECTION_TIME`], so it has at least a minute for its last answer.
const TAKE_TIME: Duration = Duration::from_secs(120);
/// Most bytes of a header, and most lines.
const HEADER_BYTES_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;
/// No connection is accepted for so long after accepting failed (no descriptors left, say).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The interface at work. Dropping it ends all of its connections and removes the socket file.
#[derive(Debug)]
pub(crate) struct Server {
    task: AbortHandle,
    socket: Listening,
}

impl Server {
    /// Serves an opened socket on the runtime at hand.
    pub(crate) fn start(socket: Listening, router: Router) -> Result<Server, Failure> {
        let listener = socket
            .listener()
            .map_err(|error| Failure::run(format!("cannot listen for control: {error}")))?;
        let router = router.layer(from_fn(refuse_pages));
        let task = tokio::spawn(accept(listener, router)).abort_handle();
        Ok(Server { task, socket })
    }

    /// Ends all connections, and leaves the decision on the socket file to the end.
    pub(crate) fn stop(&self) {
        self.task.abort();
    }

    /// Leaves the socket file to another process, which has the socket.
    pub(crate) fn leave(&mut self) {
        self.socket.set_owner(FileOwner::Another);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
        // The process ends, or another one has the socket. What clients have queued there is closed by the kernel then, which waits for
        // nothing at the end of a process.
        if let Ok(copy) = self.socket.copy() {
            std::mem::forget(copy);
        }
    }
}

/// Refuses a request that a web page makes, through a port that somebody forwards to the socket.
async fn refuse_pages(request: Request, next: Next) -> Response {
    match request.headers().contains_key(header::ORIGIN) {
        true => {
            let why =
                "a request with an Origin comes from a web page, and none may use this socket";
            Refusal(ProblemKind::WebPage, why.to_owned()).into_response()
        }
        false => next.run(request).await,
    }
}

async fn accept(listener: UnixListener, router: Router) {
    // Connections end with this task.
    let mut open = JoinSet::new();
    // Clients of another socket do not wait for what those of this one have sent.
    let offload = Offload::default();
    loop {
        // Those that are being closed count, because they have their descriptors until then.
        let closing = offload.jobs();
        let has_room = open.len() + closing < CONNECTIONS_MAX && !offload.is_full();
        tokio::select! {
            Some(_) = open.join_next() => {}
            () = sleep(ACCEPT_PAUSE), if !has_room && closing > 0 => {}
            accepted = listener.accept(), if has_room => match accepted {
                Ok((stream, _)) => {
                    let Ok(stream) = ClientStream::new(stream, &offload) else {
                        continue;
                    };
                    let over = sleep(CONNECTION_TIME);
                    open.spawn(converse(stream, router.clone(), over, TAKE_TIME));
                }
                Err(_) => sleep(ACCEPT_PAUSE).await,
            }
        }
    }
}

/// Marks a connection whose answer has no end, so that the client reads it whenever it likes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Streaming(Arc<AtomicBool>);

impl Streaming {
    pub(crate) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Serves a connection until its client has gone. After `over` it does not take a further request, and its client takes all
/// that it was sent within `take_time`.
async fn converse(
    stream: ClientStream,
    router: Router,
    over: impl Future<Output = ()>,
    take_time: Duration,
) {
    let streaming = Streaming::default();
    let stream = Impatient {
        stream,
        streaming: streaming.clone(),
        patience: None,
        take_time,
        waited: None,
    };
    let service = TowerToHyperService::new(router.layer(Extension(streaming)));
    let conversation = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(HEADER_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut conversation = pin!(conversation);
    // How it ends is the client's affair.
    tokio::select! {
        _ = conversation.as_mut() => return,
        () = over => {}
    }
    // Between two requests it ends now, and otherwise after the answer.
    conversation.as_mut().graceful_shutdown();
    let _ = conversation.await;
}

/// Returns the connection of a client that goes on with another protocol, if the client has waited for the answer.
pub(super) fn into_socket(upgraded: Upgraded) -> Option<net::UnixStream> {
    let parts = upgraded.downcast::<TokioIo<Impatient>>().ok()?;
    let stream = parts.io.into_inner().stream.into_socket()?;
    parts.read_buf.is_empty().then_some(stream)
}

/// A connection that fails when its client has taken nothing of an answer for [`ANSWER_TIME`], or has taken little by little for
/// `take_time`.
struct Impatient {
    stream: ClientStream,
    streaming: Streaming,
    /// Runs while the client does not take what is written.
    patience: Option<Pin<Box<Sleep>>>,
    take_time: Duration,
    /// Runs since the client did not take what was written for the first time.
    waited: Option<Pin<Box<Sleep>>>,
}

impl Impatient {
    /// The result of a write, unless the client has been waited for long enough.
    fn judge<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() || self.streaming.0.load(Ordering::Relaxed) {
            self.patience = None;
            return written;
        }
        let patience = self
            .patience
            .get_or_insert_with(|| Box::pin(sleep(ANSWER_TIME)));
        let waited = self
            .waited
            .get_or_insert_with(|| Box::pin(sleep(self.take_time)));
        let is_over = [patience, waited].map(|time| time.as_mut().poll(context).is_ready());
        match is_over.contains(&true) {
            true => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            false => Poll::Pending,
        }
    }
}

impl AsyncRead for Impatient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Impatient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.judge(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use axum::routing::get;
    use tokio::net::UnixStream;
    use tokio::sync::Semaphore;
    use tokio::task::spawn_blocking;

    use super::*;

    /// A client that has sent a request, and the other end.
    fn asked() -> (net::UnixStream, ClientStream) {
        let (mut client, served) = net::UnixStream::pair().unwrap();
        client
            .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        served.set_nonblocking(true).unwrap();
        let served = UnixStream::from_std(served).unwrap();
        let served = ClientStream::new(served, &Offload::default());
        (client, served.unwrap())
    }

    /// The time of the connection is over while its request is being answered.
    #[tokio::test]
    async fn an_answer_that_takes_longer_than_its_connection_may_last_is_given() {
        let (reached, released) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let gates = (reached.clone(), released.clone());
        let answer = || async move {
            gates.0.add_permits(1);
            gates.1.acquire().await.unwrap().forget();
            "done"
        };
        let router = Router::new().route("/", get(answer));
        let (mut client, served) = asked();
        let over = async move {
            reached.acquire().await.unwrap().forget();
            released.add_permits(1);
        };
        let conversation = tokio::spawn(converse(served, router, over, TAKE_TIME));
        let read = spawn_blocking(move || {
            let mut text = String::new();
            client.read_to_string(&mut text).map(|_| text)
        });
        let text = read.await.unwrap().unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK"), "{text}");
        assert!(text.contains("\r\nconnection: close\r\n"), "{text}");
        assert!(text.ends_with("done"), "{text}");
        conversation.await.unwrap();
    }

    /// Otherwise clients that do not read would keep all others out.
    #[tokio::test]
    async fn a_client_that_does_not_read_its_answer_is_let_go() {
        let router = Router::new().route("/", get(|| async { vec![7; 8 << 20] }));
        let (mut client, served) = asked();
        converse(served, router, sleep(CONNECTION_TIME), TAKE_TIME).await;
        let mut text = Vec::new();
        let _ = client.read_to_end(&mut text);
        assert!(text.len() < 8 << 20, "{}", text.len());
    }

    /// Each of its answers is held in memory until it has read it.
    #[tokio::test]
    async fn a_client_that_reads_its_answer_slowly_is_let_go() {
        let router = Router::new().route("/", get(|| async { vec![7; 8 << 20] }));
        let (mut client, served) = asked();
        let read = spawn_blocking(move || {
            let (mut piece, mut len) = ([0; 4 << 10], 0);
            loop {
                match client.read(&mut piece) {
                    Ok(0) | Err(_) => return len,
                    Ok(more) => len += more,
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let take_time = Duration::from_millis(300);
        converse(served, router, sleep(CONNECTION_TIME), take_time).await;
        let len = read.await.unwrap();
        assert!(len < 8 << 20, "{len}");
    }
}
