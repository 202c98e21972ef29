//! An NBD server in the test's process: one that behaves, and one that does whatever a test wants. It shares no code with the
//! daemon.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Flags of an export that can do everything.
pub const ABLE: u16 = 1 | 4 | 8 | 32 | 64;
/// Flag: several connections.
pub const MULTI: u16 = 1 << 8;
/// Flag: read-only.
pub const READ_ONLY: u16 = 2;
/// Types of requests.
pub const READ: u16 = 0;
/// Write.
pub const WRITE: u16 = 1;
/// Goodbye.
pub const DISCONNECT: u16 = 2;
/// Flush.
pub const FLUSH: u16 = 3;

/// A request as it arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// Number of the connection, from 0.
    pub connection: u64,
    /// Flags.
    pub flags: u16,
    /// Type.
    pub kind: u16,
    /// Cookie.
    pub cookie: u64,
    /// Offset.
    pub offset: u64,
    /// Length.
    pub len: u32,
    /// Data of a write.
    pub data: Vec<u8>,
}

/// The server's reaction to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reaction {
    /// The server behaves.
    Honest,
    /// The server sends these bytes, and does nothing.
    Send(Vec<u8>),
    /// The server sends these bytes, and closes the connection.
    Close(Vec<u8>),
    /// The server sends these bytes, and reads and sends nothing any more. It closes the connection when the client has closed
    /// its side.
    Freeze(Vec<u8>),
    /// Like `Freeze`, but the server never closes the connection.
    Dead(Vec<u8>),
    /// The server behaves, but this much later, and reads no other request of the connection meanwhile.
    After(Duration),
    /// The server answers when so many requests wait, in the opposite order.
    Later(usize),
}

type React = dyn Fn(&Asked) -> Reaction + Send + Sync;

/// How an export is described.
#[derive(Debug, Clone, Copy)]
pub struct Export {
    /// Bytes.
    pub size: u64,
    /// Flags.
    pub flags: u16,
    /// Smallest block, preferred block, largest payload; `None`: it does not say.
    pub blocks: Option<[u32; 3]>,
    /// Largest chunk in bytes, if the server structures its replies.
    pub structured: Option<usize>,
}

impl Export {
    /// One that can do everything.
    pub fn able(size: u64) -> Export {
        Export {
            size,
            flags: ABLE,
            blocks: Some([1, 4096, 1 << 20]),
            structured: Some(100_000),
        }
    }
}

struct Shared {
    export: Mutex<Export>,
    bytes: Mutex<Vec<u8>>,
    react: Mutex<Arc<React>>,
    asked: Mutex<Vec<Asked>>,
    connections: AtomicU64,
    farewells: AtomicU64,
    sent: AtomicU64,
    /// How many more clients it lets in.
    places: AtomicU64,
    open: Mutex<Vec<UnixStream>>,
}

/// A running server; its threads end with the process.
pub struct NbdServer {
    path: PathBuf,
    listener: UnixListener,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for NbdServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("NbdServer").field(&self.path).finish()
    }
}

impl NbdServer {
    /// Listens at `path`.
    pub fn start(path: &Path, export: Export) -> NbdServer {
        let listener = UnixListener::bind(path).unwrap();
        let shared = Arc::new(Shared {
            export: Mutex::new(export),
            bytes: Mutex::new(vec![0; export.size as usize]),
            react: Mutex::new(Arc::new(|_| Reaction::Honest)),
            asked: Mutex::new(Vec::new()),
            connections: AtomicU64::new(0),
            farewells: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            places: AtomicU64::new(u64::MAX),
            open: Mutex::new(Vec::new()),
        });
        let server = shared.clone();
        let incoming = listener.try_clone().unwrap();
        std::thread::spawn(move || {
            for stream in incoming.incoming() {
                let stream = stream.unwrap();
                // Only this thread counts down.
                match server.places.load(Ordering::SeqCst) {
                    0 => continue,
                    u64::MAX => {}
                    _ => drop(server.places.fetch_sub(1, Ordering::SeqCst)),
                }
                let number = server.connections.fetch_add(1, Ordering::SeqCst);
                server
                    .open
                    .lock()
                    .unwrap()
                    .push(stream.try_clone().unwrap());
                let server = server.clone();
                std::thread::spawn(move || {
                    let _ = serve(&stream, number, &server);
                });
            }
        });
        NbdServer {
            path: path.to_owned(),
            listener,
            shared,
        }
    }

    /// The socket on which it listens.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// The disk for `--disk`, with options.
    pub fn uri(&self, options: &str) -> String {
        format!("nbd+unix:///?socket={}{options}", self.path.display())
    }

    /// Changes how it reacts to requests from now on.
    pub fn react(&self, react: impl Fn(&Asked) -> Reaction + Send + Sync + 'static) {
        *self.shared.react.lock().unwrap() = Arc::new(react);
    }

    /// Answers no flush from now on while `is_held` is true, and reads nothing more on that connection.
    pub fn hold_flushes(&self, is_held: &Arc<AtomicBool>) {
        let is_held = is_held.clone();
        self.react(move |asked| {
            while asked.kind == FLUSH && is_held.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Reaction::Honest
        });
    }

    /// The number of flushes so far.
    pub fn flushes(&self) -> usize {
        let asked = self.shared.asked.lock().unwrap();
        asked.iter().filter(|asked| asked.kind == FLUSH).count()
    }

    /// Changes the export for connections to come.
    pub fn export(&self, change: impl FnOnce(&mut Export)) {
        let mut export = self.shared.export.lock().unwrap();
        change(&mut export);
        let size = export.size as usize;
        self.shared.bytes.lock().unwrap().resize(size, 0);
    }

    /// Makes the server let any client in, or none.
    pub fn accept(&self, accepts: bool) {
        self.accept_more(if accepts { u64::MAX } else { 0 });
    }

    /// Lets in so many more clients.
    pub fn accept_more(&self, clients: u64) {
        self.shared.places.store(clients, Ordering::SeqCst);
    }

    /// Closes all connections.
    pub fn hang_up(&self) {
        for stream in self.shared.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// The requests so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.shared.asked.lock().unwrap().clone()
    }

    /// The connections so far.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// The connections that the client took leave of.
    pub fn farewells(&self) -> u64 {
        self.shared.farewells.load(Ordering::SeqCst)
    }

    /// The requests for which it has sent what it was told to.
    pub fn sent(&self) -> u64 {
        self.shared.sent.load(Ordering::SeqCst)
    }

    /// The contents.
    pub fn bytes(&self) -> Vec<u8> {
        self.shared.bytes.lock().unwrap().clone()
    }

    /// Replaces the contents.
    pub fn fill(&self, with: impl Fn(usize) -> u8) {
        let mut bytes = self.shared.bytes.lock().unwrap();
        bytes
            .iter_mut()
            .enumerate()
            .for_each(|(at, byte)| *byte = with(at));
    }
}

fn number<const N: usize>(mut stream: &UnixStream) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn serve(mut stream: &UnixStream, number_of: u64, shared: &Shared) -> std::io::Result<()> {
    let export = *shared.export.lock().unwrap();
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    number::<4>(stream)?;
    let mut structured = false;
    loop {
        number::<8>(stream)?;
        let option = u32::from_be_bytes(number(stream)?);
        let len = u32::from_be_bytes(number(stream)?);
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data)?;
        let mut answer = |kind: u32, data: &[u8]| {
            let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
            bytes.extend(option.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
            stream.write_all(&bytes)
        };
        match option {
            8 if export.structured.is_some() => {
                structured = true;
                answer(1, &[])?;
            }
            7 => {
                let mut info = vec![0, 0];
                info.extend(export.size.to_be_bytes());
                info.extend(export.flags.to_be_bytes());
                answer(3, &info)?;
                if let Some(blocks) = export.blocks {
                    let mut info = vec![0, 3];
                    blocks
                        .iter()
                        .for_each(|size| info.extend(size.to_be_bytes()));
                    answer(3, &info)?;
                }
                answer(1, &[])?;
                break;
            }
            _ => answer(0x8000_0001, b"what?")?,
        }
    }
    let chunk = export.structured.filter(|_| structured);
    transmit(stream, number_of, shared, chunk)
}

fn transmit(
    mut stream: &UnixStream,
    connection: u64,
    shared: &Shared,
    chunk: Option<usize>,
) -> std::io::Result<()> {
    let mut later: VecDeque<Asked> = VecDeque::new();
    loop {
        if u32::from_be_bytes(number(stream)?) != 0x2560_9513 {
            panic!("a request with another magic");
        }
        let mut asked = Asked {
            connection,
            flags: u16::from_be_bytes(number(stream)?),
            kind: u16::from_be_bytes(number(stream)?),
            cookie: u64::from_be_bytes(number(stream)?),
            offset: u64::from_be_bytes(number(stream)?),
            len: u32::from_be_bytes(number(stream)?),
            data: Vec::new(),
        };
        if asked.kind == WRITE {
            asked.data = vec![0; asked.len as usize];
            stream.read_exact(&mut asked.data)?;
        }
        if asked.kind == DISCONNECT {
            shared.farewells.fetch_add(1, Ordering::SeqCst);
            return Ok(());
        }
        shared.asked.lock().unwrap().push(asked.clone());
        let react = shared.react.lock().unwrap().clone();
        match react(&asked) {
            reaction @ (Reaction::Honest | Reaction::After(_)) => {
                if let Reaction::After(time) = reaction {
                    std::thread::sleep(time);
                }
                let reply = honest(&asked, &mut shared.bytes.lock().unwrap(), chunk);
                stream.write_all(&reply)?;
            }
            Reaction::Send(bytes) => {
                stream.write_all(&bytes)?;
                shared.sent.fetch_add(1, Ordering::SeqCst);
            }
            Reaction::Close(bytes) => {
                stream.write_all(&bytes)?;
                return stream.shutdown(std::net::Shutdown::Both);
            }
            Reaction::Freeze(bytes) => {
                stream.write_all(&bytes)?;
                std::io::copy(&mut stream, &mut std::io::sink())?;
                return stream.shutdown(std::net::Shutdown::Both);
            }
            Reaction::Dead(bytes) => {
                stream.write_all(&bytes)?;
                loop {
                    std::thread::sleep(Duration::from_secs(3600));
                }
            }
            Reaction::Later(count) => {
                later.push_front(asked);
                if later.len() >= count {
                    for asked in later.drain(..) {
                        let reply = honest(&asked, &mut shared.bytes.lock().unwrap(), chunk);
                        stream.write_all(&reply)?;
                    }
                }
            }
        }
    }
}

/// A simple reply.
pub fn simple(cookie: u64, error: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = 0x6744_6698_u32.to_be_bytes().to_vec();
    bytes.extend(error.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(data);
    bytes
}

/// A chunk of a structured reply.
pub fn chunk(cookie: u64, flags: u16, kind: u16, content: &[u8]) -> Vec<u8> {
    chunk_of(cookie, flags, kind, content.len() as u32, content)
}

/// A chunk that says another length than it has.
pub fn chunk_of(cookie: u64, flags: u16, kind: u16, len: u32, content: &[u8]) -> Vec<u8> {
    let mut bytes = 0x668e_33ef_u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes.extend(content);
    bytes
}

/// Content of a chunk with data.
pub fn data_at(offset: u64, data: &[u8]) -> Vec<u8> {
    let mut content = offset.to_be_bytes().to_vec();
    content.extend(data);
    content
}

/// Does a request, and makes the reply. Runs of zeroes become holes, and chunks come last first.
fn honest(asked: &Asked, bytes: &mut [u8], structured: Option<usize>) -> Vec<u8> {
    let from = asked.offset as usize;
    let range = bytes.get_mut(from..from + asked.len as usize);
    let (cookie, Some(range)) = (asked.cookie, range) else {
        return simple(asked.cookie, 22, &[]);
    };
    match (asked.kind, structured) {
        (READ, None) => simple(cookie, 0, range),
        (READ, Some(most)) => {
            let mut reply = Vec::new();
            let mut end = range.len();
            while end > 0 {
                let start = end.saturating_sub(most);
                let piece = &range[start..end];
                let offset = asked.offset + start as u64;
                reply.extend(match piece.iter().all(|byte| *byte == 0) {
                    true => {
                        let len = (piece.len() as u32).to_be_bytes();
                        chunk(cookie, 0, 2, &data_at(offset, &len))
                    }
                    false => chunk(cookie, 0, 1, &data_at(offset, piece)),
                });
                end = start;
            }
            reply.extend(chunk(cookie, 1, 0, &[]));
            reply
        }
        (WRITE, _) => {
            range.copy_from_slice(&asked.data);
            simple(cookie, 0, &[])
        }
        (6, _) => {
            range.fill(0);
            chunk_or_simple(cookie, structured)
        }
        _ => chunk_or_simple(cookie, structured),
    }
}

fn chunk_or_simple(cookie: u64, structured: Option<usize>) -> Vec<u8> {
    match structured {
        Some(_) => chunk(cookie, 1, 0, &[]),
        None => simple(cookie, 0, &[]),
    }
}
