//! One method for each vhost-user message that sets a device up, with its reply checked. Any other message goes
//! through `tell` and `ask`.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::message::{
    self, FLAG_NEED_REPLY, FLAG_REPLY, RegionBytes, VERSION, VRING_NO_FD, VringAddr, protocol,
    request,
};
use crate::socket::readable;
use crate::{Error, ReceivedMessage, Socket, WriteLog};

/// A connection to a daemon. Once REPLY_ACK has been negotiated, setters request an acknowledgement: `Ok` then means
/// "accepted", and before that only "sent".
#[derive(Debug)]
pub struct Frontend {
    socket: Socket,
    reply_ack: bool,
}

impl Frontend {
    /// Connects to a listening daemon. `timeout` limits each receive and send.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Frontend, Error> {
        let stream = UnixStream::connect(path).map_err(Error::io("connect"))?;
        Frontend::new(stream, timeout)
    }

    /// Wraps a connected stream.
    pub fn new(stream: UnixStream, timeout: Duration) -> Result<Frontend, Error> {
        let socket = Socket::new(stream, timeout)?;
        Ok(Frontend {
            socket,
            reply_ack: false,
        })
    }

    /// Returns the socket, for raw bytes.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Returns true if the daemon closes the connection in time: it says nothing unasked.
    pub(crate) fn has_ended(&self, time: Duration) -> bool {
        readable(self.socket.stream().as_fd(), time)
    }

    /// Turns requests for acknowledgements on or off, regardless of negotiation.
    pub fn set_reply_ack(&mut self, on: bool) {
        self.reply_ack = on;
    }

    /// Sends any message, and waits for its acknowledgement if it requests one.
    pub fn send(&self, number: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let flags = if self.reply_ack {
            VERSION | FLAG_NEED_REPLY
        } else {
            VERSION
        };
        self.socket
            .send_raw(&message::message(number, flags, payload), fds)?;
        if self.reply_ack {
            self.acknowledged(number)
        } else {
            Ok(())
        }
    }

    /// Sends any message that has a reply, and returns the reply.
    pub fn request(
        &self,
        number: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<ReceivedMessage, Error> {
        self.socket
            .send_raw(&message::message(number, VERSION, payload), fds)?;
        self.answer(number)
    }

    /// Receives an acknowledgement.
    pub fn acknowledged(&self, number: u32) -> Result<(), Error> {
        match word(&self.answer(number)?)? {
            0 => Ok(()),
            code => Err(Error::Refused {
                request: number,
                code,
            }),
        }
    }

    fn answer(&self, number: u32) -> Result<ReceivedMessage, Error> {
        let got = self.socket.recv()?;
        if got.request != number || got.flags & FLAG_REPLY == 0 || got.flags & 3 != VERSION {
            let what = format!("{} (flags {:#x}) answers {number}", got.request, got.flags);
            return Err(Error::Protocol(what));
        }
        Ok(got)
    }

    /// Asks as `ask` does, for replies that are a number.
    pub fn ask_word(&self, number: u32) -> Result<u64, Error> {
        word(&self.request(number, &[], &[])?)
    }
}

/// Features and ownership.
impl Frontend {
    /// Sends GET_FEATURES.
    pub fn features(&self) -> Result<u64, Error> {
        self.ask_word(request::GET_FEATURES)
    }

    /// Sends SET_FEATURES.
    pub fn set_features(&self, features: u64) -> Result<(), Error> {
        self.send(request::SET_FEATURES, &features.to_le_bytes(), &[])
    }

    /// Sends GET_PROTOCOL_FEATURES.
    pub fn protocol_features(&self) -> Result<u64, Error> {
        self.ask_word(request::GET_PROTOCOL_FEATURES)
    }

    /// Sends SET_PROTOCOL_FEATURES; later messages request acknowledgements if REPLY_ACK is included.
    pub fn set_protocol_features(&mut self, features: u64) -> Result<(), Error> {
        self.send(request::SET_PROTOCOL_FEATURES, &features.to_le_bytes(), &[])?;
        self.reply_ack = features & protocol::REPLY_ACK != 0;
        Ok(())
    }

    /// Sends SET_OWNER.
    pub fn set_owner(&self) -> Result<(), Error> {
        self.send(request::SET_OWNER, &[], &[])
    }

    /// Sends SET_STATUS.
    pub fn set_status(&self, status: u8) -> Result<(), Error> {
        self.send(request::SET_STATUS, &u64::from(status).to_le_bytes(), &[])
    }

    /// Sends GET_CONFIG of `size` bytes from `offset`. The specification signals a refusal by a reply of length 0.
    pub fn config(&self, offset: u32, size: u32) -> Result<Vec<u8>, Error> {
        let room = vec![0; size.min(256) as usize];
        let payload = message::config_space(offset, size, 0, &room);
        let got = self.request(request::GET_CONFIG, &payload, &[])?;
        if got.payload.len() == 12 + size as usize && message::u32_at(&got.payload, 4) == Some(size)
        {
            return Ok(got.payload[12..].to_vec());
        }
        if got.payload.is_empty() || message::u32_at(&got.payload, 4) == Some(0) {
            return Err(Error::Refused {
                request: request::GET_CONFIG,
                code: 0,
            });
        }
        Err(Error::Protocol(format!(
            "configuration of {} bytes",
            got.payload.len()
        )))
    }
}

/// Memory.
impl Frontend {
    /// Sends SET_MEM_TABLE, one descriptor for each region.
    pub fn set_mem_table(
        &self,
        regions: &[RegionBytes],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Error> {
        let payload = message::mem_table(regions.len() as u32, regions);
        self.send(request::SET_MEM_TABLE, &payload, fds)
    }

    /// Sends ADD_MEM_REG.
    pub fn add_mem_reg(&self, region: RegionBytes, fd: BorrowedFd<'_>) -> Result<(), Error> {
        self.send(request::ADD_MEM_REG, &message::mem_reg(region), &[fd])
    }
}

/// The dirty log.
impl Frontend {
    /// Sends SET_LOG_BASE. It has a reply whether acknowledgements were negotiated or not, whose contents mean nothing: after it
    /// the daemon writes to no earlier log.
    pub fn set_log(&self, log: &WriteLog) -> Result<(), Error> {
        let payload = message::log_base(log.len_bytes(), 0);
        self.request(request::SET_LOG_BASE, &payload, &[log.fd()])
            .map(drop)
    }
}

/// A region in which the daemon records requests in flight. The frontend keeps it across daemons.
#[derive(Debug)]
pub struct InflightRegion {
    /// The payload of both messages: length, offset, number of vrings, their size, padding.
    pub payload: Vec<u8>,
    /// Its file.
    pub fd: OwnedFd,
}

impl InflightRegion {
    /// Makes a region that nobody has used, as SPDK lays it out: for each vring 16 bytes and 16 for each entry, up to a multiple
    /// of 64.
    pub fn own(vrings: u16, vring_size: u16) -> Result<InflightRegion, Error> {
        let part_bytes = (16 + 16 * u64::from(vring_size)).next_multiple_of(64);
        let len_bytes = u64::from(vrings) * part_bytes;
        let made = memfd_create("inflight", MemfdFlags::CLOEXEC)
            .and_then(|fd| ftruncate(&fd, len_bytes).map(|()| fd));
        let fd = made.map_err(|error| Error::io("make an in-flight region")(error.into()))?;
        let mut payload = message::inflight(vrings, vring_size).to_vec();
        payload[..8].copy_from_slice(&len_bytes.to_le_bytes());
        Ok(InflightRegion { payload, fd })
    }
}

/// Requests in flight.
impl Frontend {
    /// Sends GET_INFLIGHT_FD: a region for so many vrings. `None`: the daemon declines.
    pub fn inflight(&self, vrings: u16, vring_size: u16) -> Result<Option<InflightRegion>, Error> {
        let payload = message::inflight(vrings, vring_size);
        let got = self.request(request::GET_INFLIGHT_FD, &payload, &[])?;
        if got.payload.len() != payload.len() {
            let what = format!(
                "an in-flight region described in {} bytes",
                got.payload.len()
            );
            return Err(Error::Protocol(what));
        }
        let fd = got.fds.into_iter().next();
        Ok(fd.map(|fd| InflightRegion {
            payload: got.payload,
            fd,
        }))
    }

    /// Sends SET_INFLIGHT_FD.
    pub fn set_inflight(&self, region: &InflightRegion) -> Result<(), Error> {
        let fd = region.fd.as_fd();
        self.send(request::SET_INFLIGHT_FD, &region.payload, &[fd])
    }
}

/// The state of the device, which moves to another host. All vrings must be stopped.
impl Frontend {
    /// Saves the state (SET_DEVICE_STATE_FD, CHECK_DEVICE_STATE). `time` limits the wait for each part of it.
    pub fn save_state(&self, time: Duration) -> Result<Vec<u8>, Error> {
        let failed = Error::io("read the device's state");
        let (mut reader, writer) = io::pipe().map_err(Error::io("make a pipe"))?;
        self.transfer_state(0, writer.as_fd())?;
        drop(writer);
        let mut state = Vec::new();
        let mut piece = [0; 4096];
        loop {
            if !readable(reader.as_fd(), time) {
                return Err(Error::TimedOut {
                    what: "read the device's state",
                    after: time,
                });
            }
            match reader.read(&mut piece) {
                Ok(0) => break,
                Ok(count) => state.extend_from_slice(&piece[..count]),
                Err(error) => return Err(failed(error)),
            }
        }
        self.acknowledge_state()?;
        Ok(state)
    }

    /// Loads a state that another daemon has saved, in the same way. `Refused`: this disk cannot take the place of that one.
    pub fn load_state(&self, state: &[u8]) -> Result<(), Error> {
        let (reader, mut writer) = io::pipe().map_err(Error::io("make a pipe"))?;
        self.transfer_state(1, reader.as_fd())?;
        drop(reader);
        let written = writer.write_all(state);
        written.map_err(Error::io("write the device's state"))?;
        drop(writer);
        self.acknowledge_state()
    }

    fn transfer_state(&self, direction: u32, fd: BorrowedFd<'_>) -> Result<(), Error> {
        let number = request::SET_DEVICE_STATE_FD;
        let payload = message::vring_state(direction, 0);
        match word(&self.request(number, &payload, &[fd])?)? {
            VRING_NO_FD => Ok(()),
            code => Err(Error::Refused {
                request: number,
                code,
            }),
        }
    }

    fn acknowledge_state(&self) -> Result<(), Error> {
        let number = request::CHECK_DEVICE_STATE;
        match self.ask_word(number)? {
            0 => Ok(()),
            code => Err(Error::Refused {
                request: number,
                code,
            }),
        }
    }
}

/// Vrings.
impl Frontend {
    /// Sends SET_VRING_NUM.
    pub fn set_vring_num(&self, index: u32, size: u32) -> Result<(), Error> {
        self.send(
            request::SET_VRING_NUM,
            &message::vring_state(index, size),
            &[],
        )
    }

    /// Sends SET_VRING_ADDR.
    pub fn set_vring_addr(&self, addr: VringAddr) -> Result<(), Error> {
        self.send(request::SET_VRING_ADDR, &addr.to_bytes(), &[])
    }

    /// Sends SET_VRING_BASE.
    pub fn set_vring_base(&self, index: u32, base: u32) -> Result<(), Error> {
        self.send(
            request::SET_VRING_BASE,
            &message::vring_state(index, base),
            &[],
        )
    }

    /// Sends GET_VRING_BASE, which stops the vring. Returns its position.
    pub fn vring_base(&self, index: u32) -> Result<u32, Error> {
        let payload = message::vring_state(index, 0);
        let got = self.request(request::GET_VRING_BASE, &payload, &[])?;
        let [found, base] = [0, 4].map(|at| message::u32_at(&got.payload, at));
        let base = base.filter(|_| found == Some(index));
        base.ok_or_else(|| Error::Protocol("the base of another vring".into()))
    }

    /// Sends SET_VRING_KICK; `None`: the daemon is to poll.
    pub fn set_vring_kick(&self, index: u32, fd: Option<BorrowedFd<'_>>) -> Result<(), Error> {
        self.vring_fd(request::SET_VRING_KICK, index, fd)
    }

    /// Sends SET_VRING_CALL; `None`: the frontend polls.
    pub fn set_vring_call(&self, index: u32, fd: Option<BorrowedFd<'_>>) -> Result<(), Error> {
        self.vring_fd(request::SET_VRING_CALL, index, fd)
    }

    /// Sends SET_VRING_ERR.
    pub fn set_vring_err(&self, index: u32, fd: Option<BorrowedFd<'_>>) -> Result<(), Error> {
        self.vring_fd(request::SET_VRING_ERR, index, fd)
    }

    /// Sends SET_VRING_ENABLE.
    pub fn set_vring_enable(&self, index: u32, on: bool) -> Result<(), Error> {
        self.send(
            request::SET_VRING_ENABLE,
            &message::vring_state(index, on.into()),
            &[],
        )
    }

    fn vring_fd(&self, number: u32, index: u32, fd: Option<BorrowedFd<'_>>) -> Result<(), Error> {
        let flag = if fd.is_some() { 0 } else { VRING_NO_FD };
        self.send(
            number,
            &(u64::from(index) | flag).to_le_bytes(),
            fd.as_slice(),
        )
    }
}

fn word(message: &ReceivedMessage) -> Result<u64, Error> {
    if message.payload.len() != 8 {
        let what = format!(
            "{} bytes in reply to {}",
            message.payload.len(),
            message.request
        );
        return Err(Error::Protocol(what));
    }
    Ok(message::u64_at(&message.payload, 0).unwrap_or_default())
}
