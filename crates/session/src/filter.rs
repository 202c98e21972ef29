//! Routes messages. The `vhost` crate serves those that it can serve safely. This file serves those with
//! descriptors and those that the crate does not know, and refuses the rest.

use std::os::fd::OwnedFd;

use cleave_guest::{InflightLayout, RegionSpec};
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};

use crate::MessageRefusal;
use crate::foreign::{Foreign, MemoryBacking};
use crate::message::{Message, half, long, reply, word};
use crate::relay::{Relay, ServedMessage};
use crate::state::SessionState;
use crate::vrings::SignalFd;

/// Set if a message about a vring's descriptor has none (vhost-user "SET_VRING_KICK"), and if the answer to SET_DEVICE_STATE_FD has
/// none.
pub(crate) const NO_FD: u64 = 0x100;
/// The vring index in such a message. The bits above `NO_FD` are undefined, and must not become another way to
/// name vring 0.
const INDEX: u64 = 0xff;
/// Size of one region: guest address, size, user address, offset in the file.
const REGION_BYTES: usize = 32;
/// Size of the field before the regions of SET_MEM_TABLE (their number) and before the region of ADD_MEM_REG
/// (padding).
const REGION_OFFSET: usize = 8;
/// Size of the fields before the configuration space in GET_CONFIG: offset, size, flags.
const CONFIG_BYTES: usize = 12;

/// Size of SET_DEVICE_STATE_FD: direction and phase.
const TRANSFER_BYTES: usize = 8;

/// Sizes of the messages about requests in flight, without and with padding.
const INFLIGHT_BYTES: [usize; 2] = [20, 24];

/// Size of SET_LOG_BASE: length of the log, its offset in the file.
const LOG_BYTES: usize = 16;

/// Serves one message.
pub(crate) fn serve(relay: &mut Relay, message: Message) -> ServedMessage {
    match message.request() {
        Some(
            FrontendReq::SET_MEM_TABLE
            | FrontendReq::ADD_MEM_REG
            | FrontendReq::SET_VRING_KICK
            | FrontendReq::SET_VRING_CALL
            | FrontendReq::SET_VRING_ERR
            | FrontendReq::SET_BACKEND_REQ_FD
            | FrontendReq::SET_INFLIGHT_FD,
        ) => acknowledged(relay, message, with_fds),
        Some(FrontendReq::SET_LOG_BASE) => set_log(relay, message),
        Some(FrontendReq::SET_DEVICE_STATE_FD) => begin_transfer(relay, message),
        // A descriptor is legal here and has no meaning (vhost-user "REM_MEM_REG").
        Some(FrontendReq::REM_MEM_REG) => relay.pass(&message),
        Some(request) if message.fds.len() > 0 => refused(format!(
            "{request:?} with {} descriptors, which it does not take",
            message.fds.len()
        )),
        Some(FrontendReq::GET_INFLIGHT_FD) => get_inflight(relay, &message),
        Some(FrontendReq::CHECK_DEVICE_STATE) => end_transfer(relay, &message),
        Some(FrontendReq::SET_STATUS) => acknowledged(relay, message, set_status),
        Some(FrontendReq::GET_STATUS) => get_status(relay, &message),
        Some(FrontendReq::SET_FEATURES) => set_features(relay, message),
        Some(FrontendReq::GET_CONFIG) => get_config(relay, &message),
        Some(
            FrontendReq::GET_FEATURES
            | FrontendReq::SET_OWNER
            | FrontendReq::RESET_OWNER
            | FrontendReq::SET_VRING_NUM
            | FrontendReq::SET_VRING_ADDR
            | FrontendReq::SET_VRING_BASE
            | FrontendReq::GET_VRING_BASE
            | FrontendReq::GET_PROTOCOL_FEATURES
            | FrontendReq::SET_PROTOCOL_FEATURES
            | FrontendReq::GET_QUEUE_NUM
            | FrontendReq::SET_VRING_ENABLE
            | FrontendReq::SET_CONFIG
            | FrontendReq::RESET_DEVICE
            | FrontendReq::GET_MAX_MEM_SLOTS,
        ) => relay.pass(&message),
        _ => acknowledged(relay, message, |_, message| {
            Err(MessageRefusal::message(format!(
                "{} is not served",
                message.name()
            )))
        }),
    }
}

fn refused(why: String) -> ServedMessage {
    ServedMessage::with(Vec::new(), Err(MessageRefusal::connection(why)))
}

/// Serves a message that is answered by an acknowledgement only, in the same way as the crate.
fn acknowledged(
    relay: &Relay,
    mut message: Message,
    serve: impl FnOnce(&mut SessionState, &mut Message) -> Result<(), MessageRefusal>,
) -> ServedMessage {
    let mut state = relay.state();
    let outcome = serve(&mut state, &mut message);
    let is_answered = message.header.need_reply && state.acknowledges();
    let reply = match &outcome {
        Ok(()) if is_answered => reply(message.header.request, &0u64.to_ne_bytes()),
        Err(MessageRefusal::Message(_) | MessageRefusal::Vring(_)) if is_answered => {
            reply(message.header.request, &1u64.to_ne_bytes())
        }
        _ => Vec::new(),
    };
    ServedMessage::with(reply, outcome)
}

fn with_fds(state: &mut SessionState, message: &mut Message) -> Result<(), MessageRefusal> {
    match message.request() {
        Some(FrontendReq::SET_MEM_TABLE) => {
            let regions = table(message, state.backing())?;
            state.set_memory(regions)
        }
        Some(FrontendReq::ADD_MEM_REG) => {
            state.require(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)?;
            let fd = message.only_fd()?;
            match message.payload.get(REGION_OFFSET..) {
                Some(bytes) if bytes.len() == REGION_BYTES => {
                    let region = region(bytes, fd, state.backing())?;
                    state.add_memory(region)
                }
                _ => Err(message.malformed()),
            }
        }
        Some(FrontendReq::SET_BACKEND_REQ_FD) => {
            state.require(VhostUserProtocolFeatures::BACKEND_REQ)?;
            state.set_channel(message.only_fd()?)
        }
        Some(FrontendReq::SET_INFLIGHT_FD) => {
            state.require(VhostUserProtocolFeatures::INFLIGHT_SHMFD)?;
            let layout = inflight_layout(message)?;
            let file = message.only_fd()?.into_memory(state.backing())?;
            state.set_inflight(file, layout)
        }
        Some(FrontendReq::SET_VRING_KICK) => {
            let (index, fd) = vring_fd(message)?;
            state.set_vring_kick(index, fd)
        }
        Some(FrontendReq::SET_VRING_CALL) => {
            let (index, fd) = vring_fd(message)?;
            state.set_vring_signal(index, SignalFd::Call, fd)
        }
        _ => {
            let (index, fd) = vring_fd(message)?;
            state.set_vring_signal(index, SignalFd::Err, fd)
        }
    }
}

/// Returns the vring and the descriptor of SET_VRING_KICK, SET_VRING_CALL or SET_VRING_ERR.
fn vring_fd(message: &mut Message) -> Result<(u64, Option<Foreign>), MessageRefusal> {
    let number = message.number()?;
    if number & !(INDEX | NO_FD) != 0 {
        return Err(MessageRefusal::message(format!(
            "{} of vring {number:#x}",
            message.name()
        )));
    }
    if number & NO_FD == 0 {
        return Ok((number, Some(message.only_fd()?)));
    }
    if message.fds.len() > 0 {
        return Err(MessageRefusal::connection(format!(
            "{} has a descriptor, although its flag says that it has none",
            message.name()
        )));
    }
    Ok((number & INDEX, None))
}

/// Returns the regions of SET_MEM_TABLE, with one descriptor each.
fn table(
    message: &mut Message,
    accepted: MemoryBacking,
) -> Result<Vec<RegionSpec>, MessageRefusal> {
    let count = usize::try_from(word(&message.payload, 0)).unwrap_or(usize::MAX);
    let regions = message.payload.get(REGION_OFFSET..).unwrap_or_default();
    let is_whole = message.payload.len() >= REGION_OFFSET
        && regions.len() % REGION_BYTES == 0
        // User-mode Linux sends its whole array, but uses only the first entry.
        && regions.len() / REGION_BYTES >= count;
    if !is_whole {
        return Err(message.malformed());
    }
    if message.fds.len() != count {
        return Err(MessageRefusal::connection(format!(
            "SET_MEM_TABLE of {count} regions with {} descriptors",
            message.fds.len()
        )));
    }
    regions
        .chunks_exact(REGION_BYTES)
        .take(count)
        .map(|bytes| region(bytes, message.fds.take_first(), accepted))
        .collect()
}

/// Parses one region. `Memory` checks sizes and overlaps; only the sums that it will form are checked here.
fn region(
    bytes: &[u8],
    fd: Foreign,
    accepted: MemoryBacking,
) -> Result<RegionSpec, MessageRefusal> {
    let spec = RegionSpec {
        guest_addr: long(bytes, 0),
        len_bytes: long(bytes, 8),
        user_addr: long(bytes, 16),
        file_offset: long(bytes, 24),
        file: fd.into_memory(accepted)?,
    };
    let ends = [spec.guest_addr, spec.user_addr, spec.file_offset]
        .map(|start| start.checked_add(spec.len_bytes));
    if ends.contains(&None) {
        return Err(MessageRefusal::message(format!(
            "the memory region at {:#x} of {:#x} bytes ends beyond 2^64",
            spec.guest_addr, spec.len_bytes
        )));
    }
    Ok(spec)
}

/// Serves SET_FEATURES. The crate does not see it if the features are refused: it would remember them, and then refuse
/// SET_VRING_ENABLE because bit 30 is missing.
fn set_features(relay: &mut Relay, message: Message) -> ServedMessage {
    let refusal = message
        .number()
        .and_then(|features| relay.state().check_features(features))
        .err();
    match refusal {
        None => relay.pass(&message),
        Some(refusal) => acknowledged(relay, message, |_, _| Err(refusal)),
    }
}

/// Serves SET_LOG_BASE. It is answered whether an acknowledgement was asked for or not, with the payload that came: QEMU looks at the
/// kind of the answer alone, and Cloud Hypervisor reads as many bytes.
///
/// Neither understands a refusal: it would go on, and pages that are written here would be old on the other host. So a refusal ends
/// the connection.
fn set_log(relay: &Relay, mut message: Message) -> ServedMessage {
    let outcome = read_log(&mut relay.state(), &mut message);
    let reply = match &outcome {
        Ok(()) => reply(message.header.request, &message.payload),
        Err(_) => Vec::new(),
    };
    ServedMessage::with(reply, outcome)
}

fn read_log(state: &mut SessionState, message: &mut Message) -> Result<(), MessageRefusal> {
    state.require(VhostUserProtocolFeatures::LOG_SHMFD)?;
    if message.payload.len() != LOG_BYTES {
        return Err(message.malformed());
    }
    let file = message.only_fd()?.into_memory(state.backing())?;
    state.set_log(file, long(&message.payload, 8), long(&message.payload, 0))
}

fn set_status(state: &mut SessionState, message: &mut Message) -> Result<(), MessageRefusal> {
    state.require(VhostUserProtocolFeatures::STATUS)?;
    let status = message.number()?;
    state.set_status(status)
}

fn get_status(relay: &Relay, message: &Message) -> ServedMessage {
    let state = relay.state();
    let outcome = match message.payload.is_empty() {
        true => state.require(VhostUserProtocolFeatures::STATUS),
        false => Err(message.malformed()),
    };
    let status = u64::from(state.status()).to_ne_bytes();
    let reply = match &outcome {
        Ok(()) => reply(message.header.request, &status),
        Err(_) => Vec::new(),
    };
    ServedMessage::with(reply, outcome)
}

/// Serves GET_CONFIG, because the crate ends the connection if the size is larger than any space. The specification wants an
/// answer without bytes (vhost-user "GET_CONFIG").
fn get_config(relay: &mut Relay, message: &Message) -> ServedMessage {
    let (offset, size) = (word(&message.payload, 0), word(&message.payload, 4));
    let is_answered = message.payload.len() >= CONFIG_BYTES
        && relay
            .state()
            .require(VhostUserProtocolFeatures::CONFIG)
            .is_ok();
    if !is_answered || relay.state().read_config(offset, size).is_some() {
        return relay.pass(message);
    }
    let mut payload = [0; CONFIG_BYTES];
    payload[..4].copy_from_slice(&offset.to_ne_bytes());
    payload[8..].copy_from_slice(&word(&message.payload, 8).to_ne_bytes());
    ServedMessage::with(reply(message.header.request, &payload), Ok(()))
}

/// Makes a region for requests in flight for the frontend. If there can be none, the answer is a size of 0, and
/// the frontend continues without.
fn get_inflight(relay: &Relay, message: &Message) -> ServedMessage {
    let state = relay.state();
    let asked = state
        .require(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
        .and_then(|()| inflight_layout(message));
    let asked = match asked {
        Ok(asked) => asked,
        Err(refusal) => return ServedMessage::with(Vec::new(), Err(refusal)),
    };
    let (made, outcome) = match state.make_inflight(asked) {
        Ok(made) => (made, Ok(())),
        Err(error) => {
            let why = format!("no in-flight region can be made: {error}");
            (None, Err(MessageRefusal::Message(why)))
        }
    };
    let (fd, len_bytes) = made.map_or((None, 0), |(file, len_bytes)| {
        (Some(OwnedFd::from(file)), len_bytes)
    });
    // The answer has the length of the request: QEMU sends and expects the structure with its padding. It names the size of a vring
    // that was asked for, which frontends send back.
    let mut payload = message.payload.clone();
    for (place, byte) in payload
        .iter_mut()
        .zip([len_bytes, 0].into_iter().flat_map(u64::to_ne_bytes))
    {
        *place = byte;
    }
    ServedMessage {
        reply: reply(message.header.request, &payload),
        fd,
        outcome,
    }
}

/// Serves SET_DEVICE_STATE_FD, which is always answered: with no error, or one, and without a descriptor.
fn begin_transfer(relay: &Relay, mut message: Message) -> ServedMessage {
    let mut state = relay.state();
    let mut begin = || {
        state.require(VhostUserProtocolFeatures::DEVICE_STATE)?;
        let fd = message.only_fd()?;
        if message.payload.len() != TRANSFER_BYTES {
            return Err(message.malformed());
        }
        let (direction, phase) = (word(&message.payload, 0), word(&message.payload, 4));
        state.begin_transfer(direction, phase, fd)
    };
    let outcome = begin();
    numbered(message.header.request, NO_FD, outcome)
}

fn end_transfer(relay: &Relay, message: &Message) -> ServedMessage {
    let mut state = relay.state();
    let outcome = match message.payload.is_empty() {
        true => state
            .require(VhostUserProtocolFeatures::DEVICE_STATE)
            .and_then(|()| state.end_transfer()),
        false => Err(message.malformed()),
    };
    numbered(message.header.request, 0, outcome)
}

/// Makes an answer of a number, with 1 added to it if the message is refused.
fn numbered(request: u32, number: u64, outcome: Result<(), MessageRefusal>) -> ServedMessage {
    let number = match &outcome {
        Ok(()) => Some(number),
        Err(MessageRefusal::Message(_)) => Some(number | 1),
        Err(_) => None,
    };
    let answer = number.map_or(Vec::new(), |number| reply(request, &number.to_ne_bytes()));
    ServedMessage::with(answer, outcome)
}

/// Parses GET_INFLIGHT_FD or SET_INFLIGHT_FD, with or without padding: length, offset, number of vrings, their
/// size.
fn inflight_layout(message: &Message) -> Result<InflightLayout, MessageRefusal> {
    let payload = &message.payload;
    if !INFLIGHT_BYTES.contains(&payload.len()) {
        return Err(message.malformed());
    }
    let layout = InflightLayout {
        len_bytes: long(payload, 0),
        file_offset: long(payload, 8),
        vrings: half(payload, 16),
        vring_size: half(payload, 18),
    };
    match layout.file_offset.checked_add(layout.len_bytes) {
        Some(_) => Ok(layout),
        None => Err(MessageRefusal::message(
            "an in-flight region that ends beyond 2^64",
        )),
    }
}
