//! What the guest is told about a request that has ended.

/// The status byte of a request. The only place where errors become status bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The store failed, or the request was wrong.
    IoErr = 1,
    /// Not something this device does.
    Unsupp = 2,
}

/// Status and used length of a request that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Stored in the last writable byte of the chain.
    pub status: Status,
    /// Bytes that the device wrote into the chain, status byte included: exact on success; on
    /// failure 1 (the status alone), since the data cannot be vouched for.
    pub used_bytes: u32,
}
