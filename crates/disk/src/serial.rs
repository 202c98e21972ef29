//! Default serial numbers: printable ASCII, padded with zero bytes.

use std::path::Path;

use cleave_blk::spec::ID_BYTES;

/// Returns the text, as far as it has room.
pub(crate) fn ascii_serial(text: &str) -> [u8; ID_BYTES] {
    let mut serial = [0; ID_BYTES];
    for (to, from) in serial.iter_mut().zip(text.bytes()) {
        *to = from;
    }
    serial
}

/// Returns a serial number for a path, which is the same for each link to it.
pub(crate) fn path_serial(path: &Path) -> [u8; ID_BYTES] {
    let canonical = path.canonicalize();
    let path = canonical.as_deref().unwrap_or(path);
    hashed_serial(path.as_os_str().as_encoded_bytes())
}

/// Returns a serial number made of a 64-bit FNV-1a. It need not be secret, but must be the same in every version of the program.
pub(crate) fn hashed_serial(bytes: &[u8]) -> [u8; ID_BYTES] {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    ascii_serial(&format!("cl{hash:016x}"))
}
