//! What an operator writes for a disk.

use std::path::PathBuf;
use std::str::FromStr;

/// A disk as named on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskSpec {
    /// A regular file or a block device, told apart when opened.
    Path(PathBuf),
    /// Memory of this many bytes; contents are lost at the end.
    Ram(u64),
    /// Accepts all, reads zero.
    Null(u64),
}

impl FromStr for DiskSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<DiskSpec, String> {
        let _ = text;
        todo!()
    }
}

/// Parses `4K`, `1M`, `2G`, `1T` (binary), plain bytes, refusing overflow and nonsense.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let _ = text;
    todo!()
}
