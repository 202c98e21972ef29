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

/// The generations that a request takes; `None`: all, and no disk at all.
#[derive(Debug, Clone, Default)]
pub(crate) struct Condition(Option<Vec<String>>);

impl Condition {
    /// Returns true if there has to be a disk.
    pub(crate) fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// Refuses a request that is for other generations than that of this description.
    pub(crate) fn check(&self, config: &DiskConfig) -> Result<(), Refusal> {
        let Some(taken) = &self.0 else {
            return Ok(());
        };
        let now = of(config);
        match taken.iter().any(|tag| *tag == now || tag == "*") {
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
        let Some(header) = parts.headers.get(IF_MATCH) else {
            return Ok(Condition::default());
        };
        let tags = header
            .to_str()
            .map_err(|_| bad())?
            .split(',')
            .map(str::trim);
        let tags = tags.map(|tag| match tag {
            "*" => Ok("*".to_owned()),
            tag => {
                let tag = tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"'));
                tag.map(str::to_owned).ok_or_else(bad)
            }
        });
        tags.collect::<Result<_, _>>()
            .map(|tags| Condition(Some(tags)))
    }
}
