//! Generations of a description. A program that read one can ask for a change on the condition that nobody else has changed the disk
//! since (`If-Match`, RFC 9110 §13.1.1).

use axum::extract::FromRequestParts;
use axum::http::header::IF_MATCH;
use axum::http::request::Parts;
use cleave_api::ProblemKind;
use cleave_config::DiskConfig;

use crate::problem::Refusal;

/// Returns the name of the generation of a description: a hash (FNV-1a) of its text, so it is the same after a restart, and the same
/// again after a change that was taken back.
pub(crate) fn of(config: &DiskConfig) -> String {
    let text = serde_json::to_vec(config).unwrap_or_default();
    let hash = text.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// The generations of a disk that a request is for.
#[derive(Debug, Clone, Default)]
pub(crate) enum Condition {
    /// All, and no disk at all.
    #[default]
    None,
    /// All, but there has to be a disk.
    Any,
    These(Vec<String>),
}

impl Condition {
    /// Returns true if there has to be a disk.
    pub(crate) fn is_set(&self) -> bool {
        !matches!(self, Condition::None)
    }

    /// Refuses a request that is for other generations than that of this description.
    pub(crate) fn check(&self, config: &DiskConfig) -> Result<(), Refusal> {
        let Condition::These(taken) = self else {
            return Ok(());
        };
        let now = of(config);
        match taken.contains(&now) {
            true => Ok(()),
            false => Err(Refusal(
                ProblemKind::GenerationDiffers,
                format!("the disk is of generation {now} now: read it again, then decide"),
            )),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Condition {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Condition, Refusal> {
        let bad = || {
            let why = "If-Match: write a generation in double quotes, or *";
            Refusal(ProblemKind::InvalidRequest, why.to_owned())
        };
        let mut these = Vec::new();
        for header in parts.headers.get_all(IF_MATCH) {
            for tag in header.to_str().map_err(|_| bad())?.split(',') {
                match tag.trim() {
                    "*" => return Ok(Condition::Any),
                    // A weak one is never that of a disk (RFC 9110 §13.1.1).
                    tag if tag.starts_with("W/") => these.push(tag.to_owned()),
                    tag => {
                        let tag = tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"'));
                        these.push(tag.ok_or_else(bad)?.to_owned());
                    }
                }
            }
        }
        Ok(match parts.headers.contains_key(IF_MATCH) {
            true => Condition::These(these),
            false => Condition::None,
        })
    }
}
