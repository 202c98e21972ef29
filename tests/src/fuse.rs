//! The messages between the kernel and a file system of the tests (FUSE protocol 7.31): a folder of files of fixed
//! size, without times or owners.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::mount::{MountFlags, mount};

/// Node of the folder.
pub const ROOT_NODE: u64 = 1;
/// Node of the first file; more may follow.
pub const FILE_NODE: u64 = 2;
/// Longest read or write.
pub const MOVED_MAX: u32 = 128 << 10;
/// Buffer size for a request: a write and its header.
pub const REQUEST_BYTES: usize = 256 << 10;

/// Kinds of requests (linux/fuse.h).
#[expect(missing_docs, reason = "each is the request that it names")]
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const RELEASEDIR: u32 = 29;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
}

/// Flags of [`init`].
#[expect(missing_docs, reason = "each is the flag that it names")]
pub mod flag {
    pub const ASYNC_READ: u32 = 1;
    /// Asynchronous direct I/O does not block in the kernel until its reply.
    pub const ASYNC_DIO: u32 = 1 << 15;
    pub const WRITEBACK_CACHE: u32 = 1 << 16;
}

/// Mounts a file system that is served through this device.
pub fn mount_at(at: &Path, name: &str) -> Result<File, String> {
    std::fs::create_dir_all(at).map_err(|error| error.to_string())?;
    let device = File::options().read(true).write(true).open("/dev/fuse");
    let device = device.map_err(|error| format!("/dev/fuse: {error}"))?;
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions",
        device.as_raw_fd()
    );
    let options = CString::new(options).map_err(|error| error.to_string())?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID;
    mount(name, at, "fuse", flags, options.as_c_str())
        .map_err(|error| format!("mount: {error}"))?;
    Ok(device)
}

/// A request: struct fuse_in_header and its arguments.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    /// Its opcode.
    pub fn opcode(&self) -> u32 {
        self.word(4)
    }

    /// The ID that the reply must carry.
    pub fn unique(&self) -> u64 {
        self.long(8)
    }

    /// The file or folder that it concerns.
    pub fn node(&self) -> u64 {
        self.long(16)
    }

    /// The name in a lookup.
    pub fn name(&self) -> &str {
        let name = self.0[40..].split(|byte| *byte == 0).next();
        std::str::from_utf8(name.unwrap_or_default()).unwrap_or_default()
    }

    /// A 32-bit field.
    pub fn word(&self, at: usize) -> u32 {
        u32::from_ne_bytes(*self.0[at..].first_chunk().unwrap())
    }

    /// A 64-bit field.
    pub fn long(&self, at: usize) -> u64 {
        u64::from_ne_bytes(*self.0[at..].first_chunk().unwrap())
    }
}

/// A reply: a body, or a negative errno.
pub fn answer(unique: u64, told: Result<Vec<u8>, i32>) -> Vec<u8> {
    let (error, body) = match told {
        Ok(body) => (0, body),
        Err(error) => (error, Vec::new()),
    };
    let length = (16 + body.len()) as u32;
    let head = [length.to_ne_bytes(), error.to_ne_bytes()].concat();
    [&head[..], &unique.to_ne_bytes(), &body].concat()
}

/// struct fuse_init_out. `background`: limit of concurrent asynchronous requests; 0: the kernel's default.
pub fn init(flags: u32, background: u16) -> Vec<u8> {
    let background = u32::from(background);
    let mut fields = vec![7, 31, 0, flags, background << 16 | background, MOVED_MAX, 1];
    fields.resize(16, 0);
    words(&fields)
}

/// struct fuse_entry_out, valid for so many seconds.
pub fn entry(node: u64, bytes: u64, seconds: u64) -> Vec<u8> {
    [
        longs(&[node, 0, seconds, seconds, 0]),
        attributes(node, bytes),
    ]
    .concat()
}

/// struct fuse_attr_out, valid for so many seconds.
pub fn attr(node: u64, bytes: u64, seconds: u64) -> Vec<u8> {
    [longs(&[seconds, 0]), attributes(node, bytes)].concat()
}

/// struct fuse_attr.
fn attributes(node: u64, bytes: u64) -> Vec<u8> {
    let (mode, size) = match node {
        ROOT_NODE => (0o040_755, 0),
        _ => (0o100_644, bytes),
    };
    let longs = longs(&[node, size, size / 512, 0, 0, 0]);
    let words = words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]);
    [longs, words].concat()
}

/// Numbers in native byte order, as the kernel expects.
pub fn longs(values: &[u64]) -> Vec<u8> {
    let bytes = values.iter().flat_map(|value| value.to_ne_bytes());
    bytes.collect()
}

/// Numbers in native byte order, as the kernel expects.
pub fn words(values: &[u32]) -> Vec<u8> {
    let bytes = values.iter().flat_map(|value| value.to_ne_bytes());
    bytes.collect()
}
