//! The state that a frontend has agreed with the device, and the effect of its messages.
//!
//! A message that is refused has changed nothing. Messages about vrings are in `control`.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cleave_blk::spec::feature;
use cleave_blk::{Config, Face};
use cleave_guest::{Allowance, Inflight, InflightLayout, MapError, Memory, RegionSpec};
use cleave_worker::Device;
use vhost::vhost_user::message::VhostUserProtocolFeatures;

use crate::channel::{Channel, Notified};
use crate::dirty::SessionLog;
use crate::foreign::{Foreign, MemoryBacking};
use crate::forward::Forwarder;
use crate::kept::KeptMemory;
use crate::offload::Offload;
use crate::owner::Claimant;
use crate::portable::PortableState;
use crate::transfer::StateTransfer;
use crate::vrings::Vrings;
use crate::workers::Workers;
use crate::{MessageRefusal, SessionConfig};

/// Maximum number of data segments per request that is reported to the guest (`seg_max`, virtio 1.3 §5.2.4).
/// With header and status they fill a vring of 128 entries, QEMU's default, which matters for a driver without
/// indirect descriptors. QEMU's storage daemon reports the same. The daemon accepts more in any case.
const SEGMENTS_TOLD: u32 = 126;

/// How often to check for a failed worker while waiting for memory to be released.
const WORKER_CHECK: Duration = Duration::from_millis(100);

/// A vring is not served any more until the device is reset (virtio 1.3 §2.1.2).
const DEVICE_NEEDS_RESET: u8 = 0x40;

/// Maximum size of any device's configuration space (VHOST_USER_MAX_CONFIG_SIZE).
const CONFIG_BYTES_MAX: usize = 256;

/// Directions of SET_DEVICE_STATE_FD, and its only phase: all vrings are stopped (vhost-user "Device state transfer parameters").
const TRANSFER_SAVE: u32 = 0;
const TRANSFER_LOAD: u32 = 1;
const TRANSFER_STOPPED: u32 = 0;

/// Returns the protocol features that are offered.
pub(crate) fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::STATUS
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::DEVICE_STATE
}

#[derive(Debug)]
pub(crate) struct SessionState {
    pub(crate) device: Arc<Device>,
    pub(crate) offload: Offload,
    face: Face,
    pub(crate) vring_size_max: u16,
    pub(crate) memory: Arc<Memory>,
    /// Allowance for what the frontend shares.
    pub(crate) allowance: Allowance,
    /// The region in which the frontend keeps the requests in flight.
    pub(crate) inflight: Option<Inflight>,
    /// The file of that region, and where in it the region lies.
    pub(crate) inflight_source: Option<(File, InflightLayout)>,
    /// The frontend's memory, as it was sent.
    pub(crate) kept: KeptMemory,
    pub(crate) log: SessionLog,
    pub(crate) vrings: Vrings,
    pub(crate) workers: Workers,
    pub(crate) claimant: Claimant,
    /// Features that the guest acknowledged, without bit 26, which is in `log`. `None` until then.
    pub(crate) features: Option<u64>,
    /// The frontend has taken bit 30. A reset does not take that back, as in the `vhost` crate.
    pub(crate) takes_enable: bool,
    /// Protocol features that the frontend acknowledged.
    protocol: VhostUserProtocolFeatures,
    /// The frontend has seen bit 30. The `vhost` crate acknowledges nothing before that, and our answers must
    /// be consistent with the crate's.
    pub(crate) features_seen: bool,
    /// Virtio status, as last set by the frontend.
    status: u8,
    /// Number of vrings that were retired before the last reset, or before this session became the owner.
    pub(crate) retired_before: u64,
    /// A vring was retired after the last reset, and this session has stopped since.
    pub(crate) has_retired: bool,
    /// The cache mode that the frontend wants when a vring starts. `None`: the one in force.
    pub(crate) cache_mode: Option<bool>,
    /// The frontend has asked this process for the configuration, so its driver need not know another mode.
    pub(crate) has_read_config: bool,
    /// The cache is on, and the note for the next process may say that it is off until the frontend has its answer.
    pub(crate) is_cache_note_due: bool,
    /// This session has owned the disk.
    pub(crate) has_owned: bool,
    /// A dirty log was in force when a vring stopped, or while none ran. So the guest moves if no vring starts any more.
    pub(crate) is_leaving: bool,
    channel: Option<Channel>,
    /// The transfer of the device's state that has begun and was not checked yet. It ends when a vring starts.
    pub(crate) transfer: Option<StateTransfer>,
    /// Used if a vring's call or err descriptor is not an eventfd.
    pub(crate) forwarder: Option<Forwarder>,
    /// The refusal of a message that the crate parsed (see `handler`).
    pub(crate) refusal: Option<MessageRefusal>,
}

impl SessionState {
    pub(crate) fn new(
        device: Arc<Device>,
        offload: Offload,
        config: &SessionConfig,
        claimant: Claimant,
    ) -> Result<SessionState, MapError> {
        let workers_max = config.workers_max.min(device.disk.workers_max());
        Ok(SessionState {
            device,
            offload,
            face: config.face,
            vring_size_max: config.vring_size_max,
            memory: Memory::new(Vec::new())?,
            allowance: Allowance::Share,
            inflight: None,
            inflight_source: None,
            kept: KeptMemory::default(),
            log: SessionLog::default(),
            vrings: Vrings::new(config.vrings_max),
            workers: Workers::new(workers_max, claimant.alarm()),
            claimant,
            features: None,
            takes_enable: false,
            protocol: VhostUserProtocolFeatures::empty(),
            features_seen: false,
            status: 0,
            retired_before: 0,
            has_retired: false,
            cache_mode: None,
            has_read_config: false,
            is_cache_note_due: false,
            has_owned: false,
            is_leaving: false,
            channel: None,
            transfer: None,
            forwarder: None,
            refusal: None,
        })
    }

    /// Returns true while a dirty log is in force: the frontend wants to know what is written, because the guest moves.
    pub(crate) fn is_logged(&self) -> bool {
        self.log.in_force().is_some()
    }

    /// Returns why the session must end after an alarm.
    pub(crate) fn loss(&self) -> MessageRefusal {
        MessageRefusal::lost(if self.memory.is_lost() {
            "a page of guest memory is not there: the frontend has cut its file, or the host has lost it or has none left"
        } else {
            "a worker failed"
        })
    }

    /// Returns true if a message that asks for an acknowledgement gets one.
    pub(crate) fn acknowledges(&self) -> bool {
        self.features_seen && self.took(VhostUserProtocolFeatures::REPLY_ACK)
    }

    /// Returns the protocol features that the frontend acknowledged.
    pub(crate) fn protocol_bits(&self) -> u64 {
        self.protocol.bits()
    }

    fn took(&self, feature: VhostUserProtocolFeatures) -> bool {
        self.protocol.contains(feature)
    }

    pub(crate) fn require(&self, feature: VhostUserProtocolFeatures) -> Result<(), MessageRefusal> {
        if self.took(feature) {
            Ok(())
        } else {
            Err(MessageRefusal::connection(format!(
                "a message of {feature:?}, which was not negotiated"
            )))
        }
    }

    // Features and status.

    pub(crate) fn offered(&mut self) -> u64 {
        self.features_seen = true;
        self.features_offered()
    }

    fn features_offered(&self) -> u64 {
        self.config().features() | feature::VHOST_USER_PROTOCOL | feature::LOG_ALL
    }

    /// Refuses features that SET_FEATURES must not set. Returns those of the guest: bit 26 is the frontend's, may come at any time
    /// and says nothing about the driver.
    pub(crate) fn check_features(&self, features: u64) -> Result<u64, MessageRefusal> {
        // Earlier versions told the guests of a stripe of a largest segment. One that runs still has that feature, which binds only
        // itself.
        let offered_before = self.device.disk.stripe().map_or(0, |_| feature::SIZE_MAX);
        let wrong = features & !(self.features_offered() | offered_before);
        if wrong != 0 {
            return Err(MessageRefusal::message(format!(
                "features {wrong:#x} were not offered"
            )));
        }
        let features = features & !feature::LOG_ALL;
        // Bit 30 alone comes from a frontend whose driver has not started yet. A driver that acknowledges any
        // feature without VERSION_1 is a legacy driver, which virtio 1.3 §6.2 lets the device refuse.
        if features & !feature::VHOST_USER_PROTOCOL != 0 && features & feature::VERSION_1 == 0 {
            return Err(MessageRefusal::message(
                "the driver did not take VIRTIO_F_VERSION_1: legacy drivers are not served",
            ));
        }
        if self.vrings.any_running() && self.features != Some(features) {
            return Err(MessageRefusal::message(
                "features changed while a vring runs",
            ));
        }
        Ok(features)
    }

    pub(crate) fn set_features(&mut self, features: u64) -> Result<(), MessageRefusal> {
        let taken = self.check_features(features)?;
        let was_logged = self.is_logged();
        let before = std::mem::replace(&mut self.log.marks_all, features & feature::LOG_ALL != 0);
        if let Err(refusal) = self.log.fit(&self.memory, &self.vrings) {
            self.log.marks_all = before;
            return Err(refusal);
        }
        self.features = Some(taken);
        self.takes_enable = taken & feature::VHOST_USER_PROTOCOL != 0;
        if self.is_logged() && !was_logged {
            self.begin_move()?;
        }
        self.mark_in_log()
    }

    /// Stores the protocol features that the frontend takes. If it took a feature that was not offered, the meaning of every
    /// later message is in doubt.
    pub(crate) fn set_protocol_features(&mut self, bits: u64) -> Result<(), MessageRefusal> {
        match VhostUserProtocolFeatures::from_bits(bits) {
            Some(features) if protocol_features().contains(features) => {
                self.protocol = features;
                Ok(())
            }
            _ => Err(MessageRefusal::connection(format!(
                "protocol features {bits:#x} were not offered"
            ))),
        }
    }

    pub(crate) fn status(&self) -> u8 {
        self.status
            | if self.needs_reset() {
                DEVICE_NEEDS_RESET
            } else {
                0
            }
    }

    /// Returns true if a vring of this session was retired since the last reset.
    pub(crate) fn needs_reset(&self) -> bool {
        // While no vring of this session runs, another session may retire some.
        self.has_retired
            || self.vrings.any_running() && self.device.totals().retired != self.retired_before
    }

    /// Returns the status that the frontend set last.
    pub(crate) fn driver_status(&self) -> u8 {
        self.status
    }

    /// Status 0 is a reset (virtio 1.3 §2.1.2). Other values are kept for GET_STATUS.
    pub(crate) fn set_status(&mut self, status: u64) -> Result<(), MessageRefusal> {
        let status = u8::try_from(status)
            .map_err(|_| MessageRefusal::message(format!("status {status:#x} is not a byte")))?;
        if status == 0 {
            self.reset()?;
        }
        self.status = status;
        Ok(())
    }

    /// Drains and stops all vrings, and forgets the settings of the guest's driver. Memory, protocol features
    /// and the backend channel belong to the frontend and are kept. The cache mode is kept too: QEMU resets a
    /// device that it only pauses, and the guest still relies on its setting.
    pub(crate) fn reset(&mut self) -> Result<(), MessageRefusal> {
        self.stop_all()?;
        self.vrings
            .iter_mut()
            .for_each(|(_, entry)| entry.settings.reset());
        self.features = None;
        // The next driver starts afresh. The frontend sends a region again if it wants one.
        (self.inflight, self.inflight_source) = (None, None);
        self.status = 0;
        self.has_retired = false;
        Ok(())
    }

    // Memory.

    /// Returns which files are accepted as memory. A thread that serves several disks must not wait for a page.
    pub(crate) fn backing(&self) -> MemoryBacking {
        match self.device.is_pooled() {
            true => MemoryBacking::Memory,
            false => MemoryBacking::LocalDisk,
        }
    }

    pub(crate) fn set_memory(&mut self, regions: Vec<RegionSpec>) -> Result<(), MessageRefusal> {
        let kept = KeptMemory::default();
        let kept = regions.iter().fold(kept, |kept, spec| kept.with(spec));
        self.adopt(Memory::new_in(regions, self.allowance))?;
        self.kept = kept;
        Ok(())
    }

    pub(crate) fn add_memory(&mut self, region: RegionSpec) -> Result<(), MessageRefusal> {
        let kept = self.kept.with(&region);
        self.adopt(self.memory.with_in(region, self.allowance))?;
        self.kept = kept;
        Ok(())
    }

    pub(crate) fn remove_memory(
        &mut self,
        guest_addr: u64,
        user_addr: u64,
        len_bytes: u64,
    ) -> Result<(), MessageRefusal> {
        self.adopt(self.memory.without(guest_addr, user_addr, len_bytes))?;
        self.kept.remove(guest_addr, user_addr, len_bytes);
        Ok(())
    }

    /// Puts a table in force. Returns when nothing refers to regions that are no longer in it; at once if none
    /// was removed, whatever is in flight.
    fn adopt(&mut self, memory: Result<Arc<Memory>, MapError>) -> Result<(), MessageRefusal> {
        let memory = memory.map_err(|error| MessageRefusal::message(error.to_string()))?;
        self.log.fit(&memory, &self.vrings)?;
        let before = std::mem::replace(&mut self.memory, memory);
        let departure = before.departing(&self.memory);
        drop(before);
        self.workers.bind(&self.memory)?;
        while !departure.is_over_within(WORKER_CHECK) {
            // A failed worker keeps memory that the kernel may still write to.
            if self.workers.have_failed() {
                return Err(MessageRefusal::worker_gone());
            }
        }
        Ok(())
    }

    // Requests in flight.

    /// Makes a file for a region, and returns it with its length. `None`: the device has fewer vrings, or smaller ones.
    ///
    /// It has room for the largest vrings whatever was asked for, because the guest's driver chooses the size, and a frontend asks
    /// before it knows that (QEMU before 11 asks for its `queue-size`, and lets the driver have 1024 entries).
    pub(crate) fn make_inflight(&self, asked: InflightLayout) -> io::Result<Option<(File, u64)>> {
        let fits = (1..=self.vrings.count()).contains(&asked.vrings)
            && (1..=self.vring_size_max).contains(&asked.vring_size)
            && asked.vring_size.is_power_of_two();
        let layout = InflightLayout::new(asked.vrings, self.vring_size_max);
        fits.then(|| Ok((Inflight::create(layout)?, layout.len_bytes)))
            .transpose()
    }

    /// Sets the region for vrings that start from here on.
    pub(crate) fn set_inflight(
        &mut self,
        file: File,
        layout: InflightLayout,
    ) -> Result<(), MessageRefusal> {
        if self.vrings.any_running() {
            return Err(MessageRefusal::message(
                "an in-flight region while a vring runs",
            ));
        }
        if layout.vring_size > self.vring_size_max {
            return Err(MessageRefusal::message(format!(
                "an in-flight region for vrings of {}, more than {}",
                layout.vring_size, self.vring_size_max
            )));
        }
        let copy = file
            .try_clone()
            .map_err(|error| MessageRefusal::not_copied(&error))?;
        let mapped = Inflight::map_in(file, layout, self.allowance);
        self.inflight = Some(mapped.map_err(|error| MessageRefusal::message(error.to_string()))?);
        self.inflight_source = Some((copy, layout));
        Ok(())
    }

    // Configuration space.

    /// Returns the current configuration space.
    pub(crate) fn config(&self) -> Config {
        let limits = self.device.disk.limits();
        Config {
            face: self.face,
            capacity_bytes: self.device.disk.capacity_bytes(),
            block_bytes: limits.block_bytes,
            read_only: limits.read_only,
            segments_max: SEGMENTS_TOLD,
            vrings: self.vrings.count(),
            writeback: self.is_writeback() && !self.is_without_flush(),
        }
    }

    pub(crate) fn is_writeback(&self) -> bool {
        let in_force = || self.device.writeback.load(Ordering::Relaxed);
        self.cache_mode.unwrap_or_else(in_force)
    }

    /// Returns true for a driver without FLUSH. One that negotiated CONFIG_WCE but not FLUSH is served write-through, and finds
    /// that mode (virtio 1.3 §5.2.5.2).
    fn is_without_flush(&self) -> bool {
        let both = feature::CONFIG_WCE | feature::FLUSH;
        let taken = self.features.unwrap_or(both);
        taken & both == feature::CONFIG_WCE
    }

    /// Returns exactly `len` bytes of the configuration space, or none. Frontends ask for the largest possible space; the part
    /// after this device's fields is zero.
    pub(crate) fn read_config(&self, offset: u32, len: u32) -> Option<Vec<u8>> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(len).ok()?)?;
        let mut space = [0; CONFIG_BYTES_MAX];
        space[..Config::BYTES].copy_from_slice(&self.config().bytes());
        let asked = space.get(start..end).filter(|asked| !asked.is_empty());
        asked.map(<[u8]>::to_vec)
    }

    /// Writes the only byte that a driver may write (virtio 1.3 §5.2.5). May arrive before SET_FEATURES, which
    /// QEMU sends only when the device starts.
    pub(crate) fn write_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), MessageRefusal> {
        let is_ours = usize::try_from(offset) == Ok(Config::WRITEBACK_OFFSET);
        let (true, &[mode]) = (is_ours, bytes) else {
            return Err(MessageRefusal::message(format!(
                "{} bytes of the configuration space at {offset} cannot be written",
                bytes.len()
            )));
        };
        if self
            .features
            .is_some_and(|taken| taken & feature::CONFIG_WCE == 0)
        {
            return Err(MessageRefusal::message(
                "the driver did not take CONFIG_WCE",
            ));
        }
        self.set_writeback(mode != 0)
    }

    fn set_writeback(&mut self, on: bool) -> Result<(), MessageRefusal> {
        self.is_cache_note_due = on;
        if !self.vrings.any_running() {
            // The disk may be another session's.
            self.cache_mode = Some(on);
            if !on {
                self.device.note_cache_off();
            }
            return Ok(());
        }
        self.device.set_writeback(on);
        // Writes that complete from here on are synced first. A completion that was decided before is published
        // before the guest's write is acknowledged.
        self.workers.pass()?;
        self.flush_cache()
    }

    /// Has the next process know that the cache is on, now that the frontend has its answer: one that gets none may believe that the
    /// cache is still off.
    pub(crate) fn note_cache_on(&mut self) {
        if std::mem::take(&mut self.is_cache_note_due) && self.is_writeback() {
            self.device.note_cache_on();
        }
    }

    // The state that moves to another host.

    pub(crate) fn portable(&self) -> PortableState {
        let limits = self.device.disk.limits();
        PortableState {
            face: self.face.version(),
            capacity_bytes: self.device.disk.capacity_bytes(),
            block_bytes: limits.block_bytes,
            read_only: limits.read_only,
            writeback: self.is_writeback(),
        }
    }

    /// Begins to write the state to a descriptor of the frontend, or to read it from there. It replaces a transfer that was not
    /// checked.
    pub(crate) fn begin_transfer(
        &mut self,
        direction: u32,
        phase: u32,
        fd: Foreign,
    ) -> Result<(), MessageRefusal> {
        if phase != TRANSFER_STOPPED || self.vrings.any_running() {
            return Err(MessageRefusal::message(
                "a transfer of the device's state while a vring runs",
            ));
        }
        let begun = match direction {
            TRANSFER_SAVE => StateTransfer::save(&self.offload, fd, self.portable().to_bytes()),
            TRANSFER_LOAD => StateTransfer::load(&self.offload, fd, PortableState::BYTES),
            _ => {
                return Err(MessageRefusal::message(format!(
                    "a transfer of the device's state in direction {direction}"
                )));
            }
        };
        self.transfer = Some(begun.map_err(untransferred)?);
        Ok(())
    }

    /// Ends a transfer. A state that was read is put in force if this disk can take the place of the other one.
    pub(crate) fn end_transfer(&mut self) -> Result<(), MessageRefusal> {
        let transfer = self.transfer.take().ok_or_else(|| {
            MessageRefusal::message("no transfer of the device's state has begun")
        })?;
        let Some(bytes) = transfer.end().map_err(untransferred)? else {
            return Ok(());
        };
        self.await_size()?;
        let state = PortableState::parse(&bytes);
        let state = state.and_then(|state| state.fits(self.portable()).map(|()| state));
        let state = state.map_err(|why| MessageRefusal::message(why.to_string()))?;
        match self.stricter_mode(Some(state.writeback)) {
            Some(on) => self.set_writeback(on),
            None => Ok(()),
        }
    }

    /// Returns the cache mode that comes from another process, unless this one was started with a stricter one: its operator wants
    /// each write to be durable, which a guest does not mind that believes in a cache. Its driver can switch the cache on again.
    pub(crate) fn stricter_mode(&self, writeback: Option<bool>) -> Option<bool> {
        writeback.filter(|on| !on || self.device.has_cache())
    }

    /// Returns true while a transfer has begun and was not checked.
    pub(crate) fn is_transferring(&self) -> bool {
        self.transfer.is_some()
    }

    // Backend channel.

    /// Returns the backend channel's descriptor.
    pub(crate) fn channel_fd(&self) -> Option<&OwnedFd> {
        self.channel.as_ref().and_then(Channel::fd)
    }

    pub(crate) fn set_channel(&mut self, fd: Foreign) -> Result<(), MessageRefusal> {
        self.channel = Some(Channel::new(fd)?);
        Ok(())
    }

    /// Notifies the frontend that the configuration has changed. `false`: try again later, because the device
    /// is suspended or the frontend has not read earlier requests.
    pub(crate) fn notify_config_changed(&mut self) -> bool {
        let wanted = VhostUserProtocolFeatures::BACKEND_REQ | VhostUserProtocolFeatures::CONFIG;
        if !self.vrings.any_served(self.starts_enabled()) {
            return false;
        }
        let Some(channel) = self.channel.as_ref().filter(|_| self.took(wanted)) else {
            return true;
        };
        match channel.config_changed() {
            Notified::Sent => true,
            Notified::Later => false,
            Notified::Never => {
                self.channel = None;
                true
            }
        }
    }

    /// Returns true if a vring is enabled when it starts: without bit 30 there is no SET_VRING_ENABLE (vhost-user "Ring states").
    pub(crate) fn starts_enabled(&self) -> bool {
        self.features
            .is_some_and(|taken| taken & feature::VHOST_USER_PROTOCOL == 0)
    }
}

impl Drop for SessionState {
    fn drop(&mut self) {
        if self.is_cache_note_due {
            self.device.reopen_cache_note();
        }
        // Before the memory, which the thread of a pool must not unmap, and before the claim, with which another session starts.
        self.workers.end();
    }
}

fn untransferred(error: io::Error) -> MessageRefusal {
    MessageRefusal::message(format!(
        "the state of the device cannot be transferred: {error}"
    ))
}
