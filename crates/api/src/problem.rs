//! Refusals.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A refusal as a problem document (RFC 9457).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Problem {
    /// The kind of problem. `about:blank`: the status says all that there is to say.
    pub r#type: Cow<'static, str>,
    /// Name of the status.
    pub title: Cow<'static, str>,
    /// Status of the response.
    #[schemars(range(min = 400, max = 599))]
    pub status: u16,
    /// The fault and the remedy, in a line.
    pub detail: String,
}
