//! The parts of a running session's state that others may see.

use crate::handover::HandoverObstacle;
use crate::state::SessionState;

/// The settings that a frontend has agreed with the device so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionView {
    /// Feature bits that the guest acknowledged. `None` until then.
    pub features: Option<u64>,
    /// Protocol features that the frontend acknowledged.
    pub protocol_features: u64,
    /// Running vrings, by index.
    pub vrings: Vec<VringView>,
    /// Why another process could not go on with this session.
    pub obstacle: Option<HandoverObstacle>,
    /// True while the session is kept for a process that follows the death of this one.
    pub kept: bool,
}

/// A running vring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringView {
    /// Its index.
    pub index: u16,
    /// Number of its entries.
    pub size: u16,
    /// True if it is served; a frontend can disable it.
    pub enabled: bool,
    /// True if the frontend keeps its requests in flight, so that another daemon can repeat them.
    pub recovery: bool,
}

impl SessionState {
    /// Returns the current view.
    pub(crate) fn view(&mut self) -> SessionView {
        let all_enabled = self.starts_enabled();
        let running = |(index, entry): (u16, &mut crate::vrings::VringEntry)| {
            let layout = entry.running?;
            Some(VringView {
                index,
                size: layout.size,
                enabled: entry.settings.enabled || all_enabled,
                recovery: entry.is_recorded,
            })
        };
        SessionView {
            features: self.features,
            protocol_features: self.protocol_bits(),
            obstacle: self.obstacle(),
            kept: false,
            vrings: self.vrings.iter_mut().filter_map(running).collect(),
        }
    }
}
