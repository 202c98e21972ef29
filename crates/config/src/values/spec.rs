//! The specs of a disk, as they are written.

use std::fmt;
use std::str::FromStr;

use cleave_disk::DiskSpec;

use super::text::Text;

/// One spec of a disk. It is kept as it was written; two are equal if they mean the same.
#[derive(Debug, Clone)]
pub struct WrittenSpec {
    text: String,
    spec: DiskSpec,
}

impl WrittenSpec {
    /// Returns the spec that the text means.
    pub fn spec(&self) -> &DiskSpec {
        &self.spec
    }
}

impl From<DiskSpec> for WrittenSpec {
    fn from(spec: DiskSpec) -> WrittenSpec {
        let text = spec.to_string();
        WrittenSpec { text, spec }
    }
}

impl PartialEq for WrittenSpec {
    fn eq(&self, other: &WrittenSpec) -> bool {
        self.spec == other.spec
    }
}

impl Eq for WrittenSpec {}

impl FromStr for WrittenSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<WrittenSpec, String> {
        let spec = text.parse()?;
        let text = text.to_owned();
        Ok(WrittenSpec { text, spec })
    }
}

impl fmt::Display for WrittenSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Text for WrittenSpec {
    const EXPECTED: &'static str = "a disk such as \"/var/lib/images/a.img\"";
}

as_text!([] WrittenSpec);

described!([] WrittenSpec, "WrittenSpec", {"type": "string"});
