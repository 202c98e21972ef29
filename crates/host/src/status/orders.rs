//! Commands to a disk that is served: how its workers serve it, and what becomes of held requests.

use axum::http::StatusCode;
use axum::response::Response;
use cleave_api::{EventName, HeldRequests, ProblemKind};
use cleave_config::{DiskConfig, Names, SplitOption, VringModes};
use cleave_worker::{Split, Tuning};
use serde_json::json;

use super::DiskStatus;
use crate::problem::{Refusal, answer};
use crate::tuning;

impl DiskStatus {
    /// Has the disk served as a description says, and single vrings as `vrings` says: all of it or nothing. Returns false if it is
    /// served so already.
    pub(crate) fn tune(&self, config: &DiskConfig, vrings: &VringModes) -> Result<bool, Refusal> {
        let bad = |why| Refusal(ProblemKind::InvalidRequest, why);
        let now = self.device.tuning();
        let split = match config.split.get() {
            SplitOption::Off => Split::Off,
            SplitOption::Auto => self.auto.clone(),
            SplitOption::Fixed(chunk) => {
                tuning::fixed(chunk, &self.device.disk, Names::Fields).map_err(bad)?
            }
        };
        let vrings = vrings.applied_to(&now.vrings, self.vrings);
        let tuning = Tuning {
            vrings: vrings.map_err(bad)?,
            ..tuning::tuning(config, split)
        };
        let is_other = tuning != *now;
        if is_other {
            self.device.tune(tuning);
            let name = self.device.disk.name();
            let how = serde_json::to_string(&self.tuning()).unwrap_or_default();
            tracing::info!("{name}: is served differently from now on: {how}");
        }
        Ok(is_other)
    }

    /// Has held requests done again. Returns how many there were.
    pub(super) fn repeat_held(&self) -> Result<u64, Refusal> {
        self.released(self.device.resume(), "are done again")
    }

    /// Ends held requests as I/O errors.
    pub(crate) fn fail(&self) -> Result<Response, Refusal> {
        let requests = self.released(self.device.fail(), "end as I/O errors")?;
        Ok(answer(StatusCode::OK, &HeldRequests { requests }))
    }

    /// Tells of an order about so many held requests; `None`: it could not be given.
    fn released(&self, requests: Option<u64>, outcome: &str) -> Result<u64, Refusal> {
        let requests = requests.ok_or_else(|| {
            let why = "a worker of the disk hangs and cannot be told: send the request again when it goes on";
            Refusal(ProblemKind::StorageSlow, why.to_owned())
        })?;
        if requests > 0 {
            self.tell(EventName::Released, json!({ "requests": requests }));
            let name = self.device.disk.name();
            tracing::info!("{name}: {requests} held requests {outcome}, as ordered");
        }
        Ok(requests)
    }

    /// Returns true if the disk goes by this name: its id, its serial, or what it was opened as.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        name == self.id()
            || name == self.device.disk.name()
            || self.serial().is_some_and(|serial| name == serial)
    }
}
