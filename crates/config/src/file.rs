//! Descriptions and changes as texts: the body of a request, and the file that keeps a disk.

use serde::de::DeserializeOwned;
use serde_json::error::Category;

use crate::disk::{Change, DiskConfig};
use crate::values::limits::DiskLimits;

/// Most bytes of a file. A description is a few lines.
pub const FILE_BYTES_MAX: u64 = 64 << 10;

/// Most bytes of a message of a parser. Longer ones end with a list of all fields.
const MESSAGE_BYTES_MAX: usize = 250;

impl DiskConfig {
    /// Reads the body of a request. The error is a line that names the field.
    pub fn from_json(body: &[u8]) -> Result<DiskConfig, String> {
        from_json(body)
    }

    /// Reads the file that keeps a disk. The error is a line that names the line of the file and the field.
    pub fn from_toml(text: &str) -> Result<DiskConfig, String> {
        from_toml(text)
    }

    /// Writes the file that keeps a disk.
    pub fn to_toml(&self) -> Result<String, String> {
        toml::to_string(self).map_err(|error| error.to_string())
    }
}

impl Change {
    /// Reads the body of a request. The error is a line that names the field.
    pub fn from_json(body: &[u8]) -> Result<Change, String> {
        from_json(body)
    }
}

impl DiskLimits {
    /// Reads the file that keeps the limits of a group.
    pub fn from_toml(text: &str) -> Result<DiskLimits, String> {
        from_toml(text)
    }

    /// Writes the file that keeps the limits of a group.
    pub fn to_toml(&self) -> Result<String, String> {
        toml::to_string(self).map_err(|error| error.to_string())
    }
}

fn from_toml<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let at = |span: Option<std::ops::Range<usize>>| {
        let before = span.and_then(|span| text.get(..span.start));
        before.map_or(1, |before| before.matches('\n').count() + 1)
    };
    let refuse = |error: &toml::de::Error, path: &str| {
        let why = named(path, error.message());
        format!("line {}: {why}", at(error.span()))
    };
    let from = toml::Deserializer::parse(text).map_err(|error| refuse(&error, ""))?;
    serde_path_to_error::deserialize(from).map_err(|error| {
        let path = error.path().to_string();
        refuse(error.inner(), &path)
    })
}

fn from_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    // A list would pass for the fields in their order.
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err("the body is not a JSON object".to_owned());
    }
    let mut from = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut from).map_err(|error| {
        let path = error.path().to_string();
        let error = error.into_inner();
        match error.classify() {
            Category::Data => {
                let message = error.to_string();
                // The place is for a parser of texts, and there is a name.
                let why = message
                    .rsplit_once(" at line ")
                    .map_or(&*message, |(why, _)| why);
                named(&path, why)
            }
            Category::Io | Category::Syntax | Category::Eof => format!("the body: {error}"),
        }
    })?;
    from.end().map_err(|error| format!("the body: {error}"))?;
    Ok(value)
}

/// Returns the message of a parser about a field.
fn named(path: &str, message: &str) -> String {
    let message = message.lines().next().unwrap_or_default();
    let message = match message.split_once(", expected one of") {
        Some((short, _)) if message.len() > MESSAGE_BYTES_MAX => short,
        _ => message,
    };
    // These name the field themselves.
    let names_it = message.starts_with("unknown field") || message.starts_with("duplicate field");
    match path {
        "" | "." | "?" => message.to_owned(),
        _ if names_it => message.to_owned(),
        path => format!("{path}: {message}"),
    }
}
