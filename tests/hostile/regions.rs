//! Regions of guest memory, the files behind them, and a client in such memory.

use std::os::fd::OwnedFd;

use cleave_client::message::RegionBytes;
use cleave_client::{Client, DeviceOptions, GuestMemory, MemoryMessages, RegionOptions};
use cleave_tests::{Daemon, small};

use crate::attack::{context, frontend};

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn region(
    guest_addr: u64,
    len_bytes: u64,
    user_addr: u64,
    file_offset: u64,
) -> RegionBytes {
    RegionBytes {
        guest_addr,
        len_bytes,
        user_addr,
        file_offset,
    }
}

pub(crate) fn memfd(bytes: u64) -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("lying", flags).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    file
}

pub(crate) fn in_memory(
    daemon: &Daemon,
    plans: &[RegionOptions],
    table: MemoryMessages,
) -> Result<Client, String> {
    let options = DeviceOptions { table, ..small(2) };
    let memory = context(GuestMemory::new(plans), "memory")?;
    let bare = context(frontend(daemon), "connect")?;
    context(Client::start_in(bare, memory, &options), "start")
}
