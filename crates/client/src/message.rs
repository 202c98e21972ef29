//! Numbers and layouts of the vhost-user protocol, from its specification ("Message types", "Protocol features"). The
//! daemon's definitions come from another source.

#![allow(missing_docs)]

/// Front-end message types that concern a block device.
pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
    pub const SET_DEVICE_STATE_FD: u32 = 42;
    pub const CHECK_DEVICE_STATE: u32 = 43;
}

/// Protocol feature bits that concern a block device, as masks.
pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub const STATUS: u64 = 1 << 16;
    pub const DEVICE_STATE: u64 = 1 << 19;
}

/// Header flags: version 1 in the low two bits.
pub const VERSION: u32 = 1;
pub const FLAG_REPLY: u32 = 1 << 2;
pub const FLAG_NEED_REPLY: u32 = 1 << 3;
/// Flag in the payload of a vring descriptor message: no descriptor is attached.
pub const VRING_NO_FD: u64 = 1 << 8;
/// Flag of SET_VRING_ADDR: writes to the used ring are marked in the dirty log.
pub const VRING_LOG: u32 = 1 << 0;
/// Bytes of a message header.
pub const HEADER_BYTES: usize = 12;

/// Returns the header of a message as bytes.
pub fn header(request: u32, flags: u32, size: u32) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[0..4].copy_from_slice(&request.to_le_bytes());
    bytes[4..8].copy_from_slice(&flags.to_le_bytes());
    bytes[8..12].copy_from_slice(&size.to_le_bytes());
    bytes
}

/// Returns a whole message as bytes, with its correct length.
pub fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = header(request, flags, payload.len() as u32).to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

/// Returns the payload of GET_INFLIGHT_FD: length and offset, which only the reply sets, vrings, their size, and the padding that
/// QEMU sends.
pub fn inflight(vrings: u16, vring_size: u16) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[16..18].copy_from_slice(&vrings.to_le_bytes());
    bytes[18..20].copy_from_slice(&vring_size.to_le_bytes());
    bytes
}

/// Returns the payload of SET_LOG_BASE.
pub fn log_base(len_bytes: u64, file_offset: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[0..8].copy_from_slice(&len_bytes.to_le_bytes());
    bytes[8..16].copy_from_slice(&file_offset.to_le_bytes());
    bytes
}

/// Returns the payload of vring state messages: index and number.
pub fn vring_state(index: u32, number: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[0..4].copy_from_slice(&index.to_le_bytes());
    bytes[4..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// One region of a memory table as messages encode it; tests may put any values in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionBytes {
    pub guest_addr: u64,
    pub len_bytes: u64,
    pub user_addr: u64,
    pub file_offset: u64,
}

impl RegionBytes {
    pub fn to_bytes(self) -> [u8; 32] {
        let mut bytes = [0; 32];
        let words = [
            self.guest_addr,
            self.len_bytes,
            self.user_addr,
            self.file_offset,
        ];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// Returns the payload of SET_MEM_TABLE; `count` may be false.
pub fn mem_table(count: u32, regions: &[RegionBytes]) -> Vec<u8> {
    let mut bytes = count.to_le_bytes().to_vec();
    bytes.extend_from_slice(&[0; 4]);
    for region in regions {
        bytes.extend_from_slice(&region.to_bytes());
    }
    bytes
}

/// Returns the payload of ADD_MEM_REG and REM_MEM_REG.
pub fn mem_reg(region: RegionBytes) -> Vec<u8> {
    let mut bytes = vec![0; 8];
    bytes.extend_from_slice(&region.to_bytes());
    bytes
}

/// Payload of SET_VRING_ADDR; addresses are the frontend's virtual ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringAddr {
    pub index: u32,
    pub flags: u32,
    pub desc: u64,
    pub used: u64,
    pub avail: u64,
    pub log: u64,
}

impl VringAddr {
    pub fn to_bytes(self) -> [u8; 40] {
        let mut bytes = [0; 40];
        bytes[0..4].copy_from_slice(&self.index.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.flags.to_le_bytes());
        let words = [self.desc, self.used, self.avail, self.log];
        for (place, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// Returns the payload of GET_CONFIG and SET_CONFIG: offset, size, flags, and the bytes of the space.
pub fn config_space(offset: u32, size: u32, flags: u32, bytes: &[u8]) -> Vec<u8> {
    let mut payload = Vec::with_capacity(12 + bytes.len());
    for word in [offset, size, flags] {
        payload.extend_from_slice(&word.to_le_bytes());
    }
    payload.extend_from_slice(bytes);
    payload
}

/// Reads a little-endian word of four bytes of a payload.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Reads a little-endian word of eight bytes of a payload.
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}
