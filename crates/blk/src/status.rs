//! The status byte of a request.

use crate::spec::status;

/// The status byte of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Success.
    Ok = status::OK,
    /// The store failed, or the request was invalid.
    IoErr = status::IOERR,
    /// The device does not support the request.
    Unsupp = status::UNSUPP,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_bytes_are_the_specified_ones() {
        // virtio 1.3 §5.2.6: VIRTIO_BLK_S_OK, _IOERR, _UNSUPP.
        let bytes = [Status::Ok, Status::IoErr, Status::Unsupp].map(|status| status as u8);
        assert_eq!(bytes, [0, 1, 2]);
    }
}
