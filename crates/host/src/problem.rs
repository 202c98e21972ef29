//! Answers of the HTTP interface: values as JSON, and refusals as problem documents.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use cleave_api::{Problem, ProblemKind};
use serde::Serialize;

/// Longest error in an answer.
const ERROR_CHARS_MAX: usize = 500;

/// Why a request is not carried out, with the remedy, in one line. Sent as a problem document (RFC 9457).
#[derive(Debug, Clone)]
pub(crate) struct Refusal(pub(crate) ProblemKind, pub(crate) String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Refusal(kind, line) = self;
        let status = StatusCode::from_u16(kind.status()).unwrap_or_default();
        // A part of what was sent may be in it.
        let line = line.chars().map(|c| if c.is_control() { '?' } else { c });
        let problem = Problem {
            r#type: kind.uri(),
            title: status.canonical_reason().unwrap_or_default().into(),
            status: status.as_u16(),
            detail: line.take(ERROR_CHARS_MAX).collect(),
        };
        typed(status, "application/problem+json", &problem)
    }
}

/// An answer as JSON.
pub(crate) fn answer(status: StatusCode, value: &impl Serialize) -> Response {
    typed(status, "application/json", value)
}

fn typed(status: StatusCode, kind: &'static str, value: &impl Serialize) -> Response {
    // Our own values have string keys and finite numbers; should one not, the caller hears of it.
    let (status, text) = match serde_json::to_string_pretty(value) {
        Ok(text) => (status, text + "\n"),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    };
    (status, [(header::CONTENT_TYPE, kind)], text).into_response()
}
