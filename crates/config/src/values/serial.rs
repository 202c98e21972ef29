//! The serial number of a disk.

use std::fmt;
use std::str::FromStr;

use cleave_blk::spec::ID_BYTES;

use super::text::Text;

/// The serial number that a guest sees; empty: none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Serial(String);

impl Serial {
    /// Returns the serial zero-padded, as GET_ID answers it (virtio 1.3 §5.2.6.1).
    pub fn padded(&self) -> [u8; ID_BYTES] {
        let mut padded = [0; ID_BYTES];
        if let Some(start) = padded.get_mut(..self.0.len()) {
            start.copy_from_slice(self.0.as_bytes());
        }
        padded
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Serial {
    type Err = String;

    fn from_str(text: &str) -> Result<Serial, String> {
        // `/` and blanks would break the name of the guest's link, as would anything unprintable.
        if let Some(bad) = text.chars().find(|c| !c.is_ascii_graphic() || *c == '/') {
            return Err(format!(
                "{bad:?} is not allowed in a serial: use printable ASCII characters, without space and /"
            ));
        }
        match text.len() {
            0..=ID_BYTES => Ok(Serial(text.to_owned())),
            count => Err(format!(
                "{count} characters are too many: a serial has at most {ID_BYTES}"
            )),
        }
    }
}

impl Text for Serial {
    const EXPECTED: &'static str = "a text";
}

as_text!([] Serial);

described!([] Serial, "Serial", {"type": "string", "pattern": "^[!-.0-~]{0,20}$"});
