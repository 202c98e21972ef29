//! The messages that the `vhost` crate parses and answers, carried out on our [`SessionState`].
//!
//! The crate returns an error of ours only after it has sent the negative acknowledgement, and does not
//! distinguish it from its own errors. So each refusal and its scope are kept in [`SessionState::refusal`] for
//! `relay`.

use std::fs::File;
use std::io;

use cleave_guest::Memory;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use crate::MessageRefusal;
use crate::state::{SessionState, protocol_features};
use crate::vrings::UserAddrs;

/// Answer to SET_MEM_TABLE and ADD_MEM_REG with postcopy, which is not offered.
type Never<T> = Result<Option<T>>;

impl SessionState {
    /// Stores our refusal for `relay`, past the crate.
    fn keep_refusal<T>(&mut self, done: std::result::Result<T, MessageRefusal>) -> Result<T> {
        done.map_err(|refusal| {
            self.refusal = Some(refusal);
            Error::ReqHandlerError(io::Error::other("refused"))
        })
    }

    /// Refuses a message that the filter never passes to the crate: messages with descriptors are parsed by us, and the others
    /// belong to features that are not offered.
    fn unrouted<T>(&mut self) -> Result<T> {
        self.keep_refusal(Err(MessageRefusal::connection(
            "a message that is not offered",
        )))
    }
}

impl VhostUserBackendReqHandlerMut for SessionState {
    /// Accepts an owner. The connection has only one, so a second claim has no effect.
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    /// Disables all rings: "Either ignore this message, or use it to disable all rings" (vhost-user "RESET_OWNER"). A frontend
    /// that sends it expects that its memory is not accessed any more.
    fn reset_owner(&mut self) -> Result<()> {
        let done = self.stop_all();
        self.log.forget();
        self.keep_refusal(done)
    }

    fn reset_device(&mut self) -> Result<()> {
        let done = self.reset();
        self.log.forget();
        self.keep_refusal(done)
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let done = SessionState::set_features(self, features);
        self.keep_refusal(done)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let done = SessionState::set_protocol_features(self, features);
        self.keep_refusal(done)
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.vrings.count()))
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(Memory::REGIONS_MAX as u64)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let VhostUserMemoryRegion {
            guest_phys_addr,
            memory_size,
            user_addr,
            ..
        } = **region;
        let done = self.remove_memory(guest_phys_addr, user_addr, memory_size);
        self.keep_refusal(done)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let done = self.set_vring_size(index.into(), num.into());
        self.keep_refusal(done)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let is_logged = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG);
        let addrs = UserAddrs {
            desc: descriptor,
            avail: available,
            used,
            used_log: is_logged.then_some(log),
        };
        let done = self.set_vring_addrs(index.into(), addrs);
        self.keep_refusal(done)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let done = SessionState::set_vring_base(self, index.into(), base.into());
        self.keep_refusal(done)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let done = self.stop_vring(index.into());
        let (index, base) = self.keep_refusal(done)?;
        Ok(VhostUserVringState::new(index.into(), base.into()))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let done = self.enable_vring(index.into(), enable);
        self.keep_refusal(done)
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        // The crate answers an error without any bytes, as the specification wants, and the connection stays.
        let space = self.read_config(offset, size).ok_or(Error::InvalidParam)?;
        self.has_read_config = true;
        Ok(space)
    }

    /// Writes the configuration space. The one writable byte has the same effect for a guest and for a migration, so the flag is
    /// ignored.
    fn set_config(&mut self, offset: u32, buf: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        let done = self.write_config(offset, buf);
        self.keep_refusal(done)
    }

    fn set_vring_kick(&mut self, _: u8, _: Option<File>) -> Result<()> {
        self.unrouted()
    }

    fn set_vring_call(&mut self, _: u8, _: Option<File>) -> Result<()> {
        self.unrouted()
    }

    fn set_vring_err(&mut self, _: u8, _: Option<File>) -> Result<()> {
        self.unrouted()
    }

    fn set_mem_table(
        &mut self,
        _: &[VhostUserMemoryRegion],
        _: Vec<File>,
        _: Option<bool>,
    ) -> Never<Vec<u64>> {
        self.unrouted()
    }

    fn add_mem_region(
        &mut self,
        _: &VhostUserSingleMemoryRegion,
        _: File,
        _: Option<bool>,
    ) -> Never<u64> {
        self.unrouted()
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        self.unrouted()
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        self.unrouted()
    }

    fn get_inflight_fd(&mut self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        self.unrouted()
    }

    fn set_inflight_fd(&mut self, _: &VhostUserInflight, _: File) -> Result<()> {
        self.unrouted()
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        self.unrouted()
    }

    fn check_device_state(&mut self) -> Result<()> {
        self.unrouted()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        self.unrouted()
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        self.unrouted()
    }
}
