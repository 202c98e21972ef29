//! What others may see of a session while it runs.

use crate::state::State;

/// What a frontend has agreed with the device so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// Feature bits that the guest took; `None` until the frontend says so.
    pub features: Option<u64>,
    /// Protocol features that the frontend took.
    pub protocol_features: u64,
    /// The frontend keeps the requests in flight, so that another daemon can do them again.
    pub keeps_inflight: bool,
    /// Vrings that run, by index.
    pub vrings: Vec<VringView>,
}

/// A vring that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringView {
    /// Its index.
    pub index: u16,
    /// How many entries it has.
    pub size: u16,
    /// Whether it is served: a frontend may hold one back.
    pub enabled: bool,
}

impl State {
    /// What there is to see now.
    pub(crate) fn view(&mut self) -> View {
        let all_enabled = self.starts_enabled();
        let running = |(index, entry): (u16, &mut crate::vrings::Entry)| {
            let layout = entry.running?;
            Some(VringView {
                index,
                size: layout.size,
                enabled: entry.settings.enabled || all_enabled,
            })
        };
        View {
            features: self.features,
            protocol_features: self.protocol_bits(),
            keeps_inflight: self.inflight.is_some(),
            vrings: self.vrings.iter_mut().filter_map(running).collect(),
        }
    }
}
