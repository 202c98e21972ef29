//! The names of fields in messages.

/// How a message names a field: as an option of a command line, or as a field of a file or a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// As an option: `--queue-size`.
    Options,
    /// As it is: `queue_size`.
    Fields,
}

impl Names {
    /// Returns the name of a field.
    pub fn of(self, field: &str) -> String {
        match (self, field) {
            (Names::Fields, field) => field.to_owned(),
            (Names::Options, "limits") => "--limit".to_owned(),
            (Names::Options, field) => format!("--{}", field.replace('_', "-")),
        }
    }

    /// Returns the beginning of a message about the value of a field.
    pub fn about(self, field: &str) -> String {
        match self {
            Names::Options => format!("{} ", self.of(field)),
            Names::Fields => format!("{field}: "),
        }
    }
}
