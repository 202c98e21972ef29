//! The document of a parcel: all of it but the descriptors, which it has by their names. It is JSON, in a memfd that is sealed
//! against changes. Later versions of Cleave read it too.

use std::fmt;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;

use cleave_disk::{SyncFailure, format_size};
use cleave_worker::LimitLevels;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use serde::{Deserialize, Serialize};

use crate::service::Service;
use crate::socket;

pub(super) const FORMAT: &str = "cleave-hand-over";
pub(super) const VERSION: u32 = 1;
/// Largest document. That of two sessions with 256 vrings each has less than a quarter of this.
const BYTES_MAX: usize = 4 << 20;
/// The owner of a disk, and the frontend that waits for it.
const SESSIONS_MAX: usize = 2;
/// Messages of all sessions. Those of a vring are seven.
const MESSAGES_MAX: usize = 20_000;
/// Largest payload, and most descriptors, of a message that a session accepts.
const PAYLOAD_BYTES_MAX: usize = 4096;
const MESSAGE_FDS_MAX: usize = 32;

/// Seals without which the sender could change what was checked.
const UNCHANGED: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::WRITE);

/// The disk, which must be the same one in both processes.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiskRecord {
    /// The disk's name in HTTP paths.
    pub(crate) id: String,
    /// Its files and devices, or its server, as they were given.
    pub(crate) storage: String,
    /// The socket of its frontends.
    pub(crate) endpoint: String,
    /// The device and inode numbers of its files, by which they are recognised.
    pub(crate) identities: Vec<Option<[u64; 3]>>,
    /// The chunk of a stripe without superblocks: nothing else tells where its blocks are. Left out for all other storage, so that a
    /// process which does not know it refuses only a parcel in which it matters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) raw_chunk_bytes: Option<u32>,
}

impl DiskRecord {
    /// Describes the disk of a service.
    pub(crate) fn of(id: String, service: &Service) -> DiskRecord {
        DiskRecord {
            id,
            storage: service.disk.line(),
            endpoint: socket::name(&service.endpoint),
            identities: service.identities.clone(),
            raw_chunk_bytes: service.disk.raw_chunk_bytes(),
        }
    }

    /// Returns true if this service is of the same storage at the same socket. A process that does not know of chunks leaves them out,
    /// and its disk counts as the same.
    pub(crate) fn is_of(&self, service: &Service) -> bool {
        let has_its_chunk = self.raw_chunk_bytes.is_none()
            || self.raw_chunk_bytes == service.disk.raw_chunk_bytes();
        self.storage == service.disk.line()
            && self.endpoint == socket::name(&service.endpoint)
            && has_its_chunk
    }
}

/// The storage and the socket, for messages.
impl fmt::Display for DiskRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.storage)?;
        if let Some(chunk_bytes) = self.raw_chunk_bytes {
            let chunk = format_size(chunk_bytes.into());
            write!(f, " as a stripe of {chunk} without superblocks")?;
        }
        write!(f, " at {}", self.endpoint)
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Document {
    pub(super) format: String,
    pub(super) version: u32,
    /// Version of the program that wrote it.
    pub(super) cleave: String,
    pub(super) disk: DiskRecord,
    pub(super) files: Vec<String>,
    pub(super) listener: Option<String>,
    pub(super) control: Option<String>,
    pub(super) metrics: Option<String>,
    pub(super) watchdog_ns: Option<u64>,
    pub(super) since_ns: Option<u64>,
    pub(super) limit_levels: Option<LimitLevels>,
    /// Left out without a failure, so that a process which does not know it refuses only a parcel in which it matters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sync_failure: Option<FailureEntry>,
    pub(super) sessions: Vec<SessionEntry>,
}

/// What the guest knows of a failed sync.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum FailureEntry {
    Untold,
    Told,
}

impl From<SyncFailure> for FailureEntry {
    fn from(failure: SyncFailure) -> FailureEntry {
        match failure {
            SyncFailure::Untold => FailureEntry::Untold,
            SyncFailure::Told => FailureEntry::Told,
        }
    }
}

impl From<FailureEntry> for SyncFailure {
    fn from(entry: FailureEntry) -> SyncFailure {
        match entry {
            FailureEntry::Untold => SyncFailure::Untold,
            FailureEntry::Told => SyncFailure::Told,
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SessionEntry {
    pub(super) connection: String,
    pub(super) owns: bool,
    pub(super) has_owned: bool,
    pub(super) needs_reset: bool,
    pub(super) writeback: Option<bool>,
    /// The device as the guest knows it: two hexadecimal digits for each byte.
    pub(super) device: String,
    pub(super) messages: Vec<MessageEntry>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MessageEntry {
    pub(super) request: u32,
    /// Two hexadecimal digits for each byte.
    pub(super) payload: String,
    pub(super) fds: Vec<String>,
}

/// The part by which another version is recognised, whatever else it has.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u32,
    cleave: String,
}

impl Document {
    /// Writes it into a memfd that nobody can change.
    pub(super) fn seal(&self) -> io::Result<OwnedFd> {
        self.check().map_err(io::Error::other)?;
        let bytes = serde_json::to_vec(self)?;
        at_most("bytes", bytes.len(), BYTES_MAX).map_err(io::Error::other)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(memfd_create(FORMAT, flags)?);
        file.write_all(&bytes)?;
        fcntl_add_seals(&file, UNCHANGED | SealFlags::SEAL)?;
        Ok(file.into())
    }

    /// Reads it from its beginning, wherever the sender has left the file's position.
    pub(super) fn read(sealed: OwnedFd) -> Result<Document, String> {
        if !fcntl_get_seals(&sealed).is_ok_and(|seals| seals.contains(UNCHANGED)) {
            return Err("its document is not a memfd that is sealed against changes".to_owned());
        }
        let cannot = |error: io::Error| format!("cannot read its document: {error}");
        let found = fstat(&sealed).map_err(|error| cannot(error.into()))?;
        let length = usize::try_from(found.st_size).unwrap_or(usize::MAX);
        at_most("bytes", length, BYTES_MAX)?;
        let mut bytes = vec![0; length];
        let read = File::from(sealed).read_exact_at(&mut bytes, 0);
        read.map_err(cannot)?;
        Document::parse(&bytes)
    }

    fn parse(bytes: &[u8]) -> Result<Document, String> {
        let malformed = |error| format!("its document is malformed: {error}");
        let head: Head = serde_json::from_slice(bytes).map_err(malformed)?;
        if head.format != FORMAT || head.version != VERSION {
            return Err(format!(
                "its format is {} version {}, by cleave {}, and this cleave reads {FORMAT} version {VERSION}",
                head.format, head.version, head.cleave
            ));
        }
        let document: Document = serde_json::from_slice(bytes).map_err(malformed)?;
        document.check()?;
        Ok(document)
    }

    /// Checks it against the limits that hold for what is written and for what is read.
    fn check(&self) -> Result<(), String> {
        at_most("sessions", self.sessions.len(), SESSIONS_MAX)?;
        let messages = || self.sessions.iter().flat_map(|session| &session.messages);
        at_most("messages", messages().count(), MESSAGES_MAX)?;
        messages().try_for_each(|message| {
            let digits = message.payload.len();
            at_most("digits in a payload", digits, 2 * PAYLOAD_BYTES_MAX)?;
            at_most(
                "descriptors in a message",
                message.fds.len(),
                MESSAGE_FDS_MAX,
            )
        })
    }
}

fn at_most(what: &str, count: usize, most: usize) -> Result<(), String> {
    match count <= most {
        true => Ok(()),
        false => Err(format!("it has {count} {what}, more than {most}")),
    }
}

/// Returns bytes as hexadecimal digits.
pub(super) fn to_hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(value.into(), 16).unwrap_or_default();
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 0xf]);
    digits.map(digit).collect()
}

/// Returns the bytes that these digits stand for.
pub(super) fn from_hex(digits: &str) -> Result<Vec<u8>, String> {
    let value = |digit: u8| char::from(digit).to_digit(16);
    let byte = |pair: &[u8; 2]| u8::try_from(value(pair[0])? << 4 | value(pair[1])?).ok();
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    let bytes: Option<Vec<u8>> = pairs.iter().map(byte).collect();
    bytes.filter(|_| rest.is_empty()).ok_or_else(|| {
        "it has a payload that is not made of pairs of hexadecimal digits".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use cleave_config::{DiskConfig, Names};
    use serde_json::json;

    use super::*;
    use crate::socket::Endpoint;

    fn service(fields: &str) -> Service {
        let config = DiskConfig::from_toml(fields).unwrap();
        Service::new(config, Endpoint::Path(PathBuf::from("/s")), Names::Fields).unwrap()
    }

    fn stripe(more: &str) -> Service {
        service(&format!("disk = ['/a', '/b']\nstripe = {more}"))
    }

    /// Its guest would go on with its blocks at other places.
    #[test]
    fn a_raw_stripe_with_another_chunk_is_another_disk() {
        let small = stripe("'64K'\nstripe_raw = true");
        let large = stripe("'128K'\nstripe_raw = true");
        let record = DiskRecord::of("d".to_owned(), &small);
        let read: DiskRecord =
            serde_json::from_value(serde_json::to_value(&record).unwrap()).unwrap();
        assert_eq!(read, record);
        assert!(read.is_of(&small));
        assert!(!read.is_of(&large));
        assert!(!read.is_of(&stripe("'64K'")));
        let said = read.to_string();
        assert_eq!(said, "/a, /b as a stripe of 64K without superblocks at /s");
    }

    /// Version 0.4.0 refuses a field that it does not know.
    #[test]
    fn the_record_of_other_storage_is_as_it_was() {
        for (service, storage) in [
            (service("disk = ['/a']"), "/a"),
            (stripe("'64K'"), "/a, /b"),
        ] {
            let record = DiskRecord::of("d".to_owned(), &service);
            let expected =
                json!({"id": "d", "storage": storage, "endpoint": "/s", "identities": []});
            assert_eq!(serde_json::to_value(&record).unwrap(), expected);
        }
        let left = json!({"id": "d", "storage": "/a, /b", "endpoint": "/s", "identities": []});
        let left: DiskRecord = serde_json::from_value(left).unwrap();
        for more in ["'64K'", "'64K'\nstripe_raw = true"] {
            assert!(left.is_of(&stripe(more)), "{more}");
        }
    }

    #[test]
    fn digits_stand_for_bytes() {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        let digits = to_hex(&bytes);
        assert!(digits.starts_with("000102") && digits.ends_with("fdfeff"));
        assert_eq!(from_hex(&digits), Ok(bytes));
        assert_eq!(from_hex(""), Ok(Vec::new()));
        for digits in ["0", "012", "+f", " f", "0g", "0x", "ä", "é0"] {
            assert!(from_hex(digits).is_err(), "{digits}");
        }
    }
}
