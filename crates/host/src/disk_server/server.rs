//! Tells of changes that the server of a disk may have lost.

use cleave_api::EventName;
use cleave_disk::Backing;
use serde_json::json;

use super::DiskServer;
use super::server_losses::ServerLosses;

impl DiskServer {
    /// Tells of what has happened since the last call.
    pub(super) fn tell_losses(&mut self) {
        let Backing::Nbd(nbd) = self.disk.backing() else {
            return;
        };
        let state = nbd.state();
        let now = ServerLosses {
            lossy: state.lossy,
            replayed_bytes: state.replayed_bytes,
            has_lost_data: nbd.has_lost_data(),
        };
        let was = std::mem::replace(&mut self.losses, now);
        if state.lossy > was.lossy {
            let more = json!({"unflushed_bytes": state.lossy_bytes});
            self.status.tell(EventName::ServerLost, more);
        }
        let bytes = state.replayed_bytes.saturating_sub(was.replayed_bytes);
        if bytes > 0 || self.losses.has_lost_data != was.has_lost_data {
            let more = json!({"bytes": bytes, "data_lost": self.losses.has_lost_data});
            self.status.tell(EventName::Resent, more);
        }
    }
}
