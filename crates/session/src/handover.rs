//! Handing a session over to another process: as the messages that make it, and its connection.
//!
//! The other process feeds the messages to a session of its own, through the filter that judges those of every frontend, and goes on
//! reading the connection. So a session is made in one way only, nothing is believed that a frontend could not have sent, and what
//! is handed over is the protocol's, which later versions read too.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use cleave_blk::spec::feature;
use cleave_guest::Allowance;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};

use crate::MessageRefusal;
use crate::filter::NO_FD;
use crate::portable::PortableState;
use crate::recorded::{Handover, RecordedMessage, longs, record, words};
use crate::state::SessionState;
use crate::vrings::{Kick, VringEntry, VringSettings};

/// A reason why a disk or a session cannot be handed over to another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandoverObstacle {
    /// The reason, as a part of a sentence.
    pub why: &'static str,
    /// True if it ends by itself, or with what the frontend or the operator does next. A restart may lose what it protects.
    pub passes: bool,
}

impl HandoverObstacle {
    /// Returns one that ends with the frontend or the process.
    pub fn lasting(why: &'static str) -> HandoverObstacle {
        HandoverObstacle { why, passes: false }
    }

    /// Returns one that passes.
    pub fn passing(why: &'static str) -> HandoverObstacle {
        HandoverObstacle { why, passes: true }
    }
}

impl SessionState {
    /// Returns why the session cannot be handed over now. An obstacle that passes comes before one that lasts.
    pub(crate) fn obstacle(&self) -> Option<HandoverObstacle> {
        let (lasting, passing) = (HandoverObstacle::lasting, HandoverObstacle::passing);
        let obstacles = [
            (
                self.is_transferring(),
                passing("its state is being moved to another host"),
            ),
            (
                self.vrings.have_left(),
                passing("a queue was stopped while requests of it are held"),
            ),
            (
                !self.kept.is_whole(),
                lasting("its memory has too many files, or no descriptor was left for one"),
            ),
            (
                self.forwarder.is_some(),
                lasting("its calls go through pipes or sockets instead of eventfds"),
            ),
        ];
        let mut found = obstacles.into_iter().filter(|(is_there, _)| *is_there);
        found.next().map(|(_, obstacle)| obstacle)
    }

    /// Refuses a guest that knows another device than there is here. Its size may differ: the guest is told.
    pub(crate) fn must_fit(&self, device: &[u8]) -> Result<(), MessageRefusal> {
        let fits = PortableState::parse(device).and_then(|known| {
            known.fits(PortableState {
                capacity_bytes: known.capacity_bytes,
                ..self.portable()
            })
        });
        fits.map_err(|why| MessageRefusal::message(why.to_string()))
    }

    /// Stops the vrings and returns the messages that make this session, which start those vrings again. The disk stays with this
    /// host.
    pub(crate) fn hand_over(&mut self) -> Result<Vec<RecordedMessage>, MessageRefusal> {
        // Its own descriptors: there may not be as many again.
        let fds = self.vrings.iter_mut().map(|(_, entry)| VringFds {
            kick: match entry.running {
                Some(_) => std::mem::take(&mut entry.kick),
                None => std::mem::take(&mut entry.settings.kick),
            },
            call: entry.settings.call.take(),
            err: entry.settings.err.take(),
        });
        let fds = fds.collect();
        self.drain()?;
        let messages = self.messages(fds);
        messages.map_err(|error| MessageRefusal::lost(format!("cannot be handed over: {error}")))
    }

    /// Returns true if a process that finds this session can go on with it, whatever this one has in flight.
    pub(crate) fn can_be_kept(&mut self) -> bool {
        let is_recorded =
            |(_, entry): (u16, &mut VringEntry)| entry.running.is_none() || entry.is_recorded;
        self.vrings.any_running()
            && self.vrings.iter_mut().all(is_recorded)
            && self.obstacle().is_none()
    }

    /// Returns the messages that make this session, which goes on here.
    pub(crate) fn messages_now(&mut self) -> io::Result<Vec<RecordedMessage>> {
        let copy = |fd: &Option<OwnedFd>| fd.as_ref().map(OwnedFd::try_clone).transpose();
        let fds = self.vrings.iter_mut().map(|(_, entry)| {
            Ok(VringFds {
                kick: match entry.running {
                    Some(_) => entry.kick.try_clone()?,
                    None => entry.settings.kick.try_clone()?,
                },
                call: copy(&entry.settings.call)?,
                err: copy(&entry.settings.err)?,
            })
        });
        let fds = fds.collect::<io::Result<_>>()?;
        self.messages(fds)
    }

    fn messages(&mut self, fds: Vec<VringFds>) -> io::Result<Vec<RecordedMessage>> {
        let mut all = Vec::new();
        let bare = |request, payload| record(request, payload, [] as [&File; 0]);
        if self.features_seen {
            all.push(bare(FrontendReq::GET_FEATURES, Vec::new())?);
        }
        let protocol = self.protocol_bits();
        let bits = |features: VhostUserProtocolFeatures| protocol & features.bits() != 0;
        let by_slot = bits(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);
        let has_status = bits(VhostUserProtocolFeatures::STATUS);
        if protocol != 0 {
            all.push(bare(FrontendReq::SET_PROTOCOL_FEATURES, longs([protocol]))?);
        }
        if let Some(channel) = self.channel_fd() {
            all.push(record(
                FrontendReq::SET_BACKEND_REQ_FD,
                Vec::new(),
                [channel],
            )?);
        }
        if self.features.is_none() && self.takes_enable {
            // QEMU before 8.1 pauses a guest by status 0, and disables each vring after that.
            let bit = longs([feature::VHOST_USER_PROTOCOL]);
            all.push(bare(FrontendReq::SET_FEATURES, bit)?);
        }
        all.extend(self.reset_messages(has_status)?);
        // Before the memory: that of an earlier move, in which nothing is marked now, may have no bits for all of it.
        if let Some(source) = self.log.source() {
            let payload = longs([source.len_bytes, source.file_offset]);
            all.push(record(FrontendReq::SET_LOG_BASE, payload, [&source.file])?);
        }
        all.extend(self.kept.messages(by_slot)?);
        if let Some(features) = self.features {
            let marks = if self.log.marks_all {
                feature::LOG_ALL
            } else {
                0
            };
            all.push(bare(FrontendReq::SET_FEATURES, longs([features | marks]))?);
        }
        if let Some((file, layout)) = &self.inflight_source {
            let shape = [layout.vrings, layout.vring_size, 0, 0].map(u16::to_ne_bytes);
            let place = longs([layout.len_bytes, layout.file_offset]);
            let payload = [place, shape.concat()].concat();
            all.push(record(FrontendReq::SET_INFLIGHT_FD, payload, [file])?);
        }
        let status = self.driver_status();
        if has_status && status != 0 {
            all.push(bare(FrontendReq::SET_STATUS, longs([status.into()]))?);
        }
        let can_enable = self
            .features
            .is_some_and(|taken| taken & feature::VHOST_USER_PROTOCOL != 0);
        for ((index, entry), fds) in self.vrings.iter_mut().zip(fds) {
            all.extend(of_vring(index, &entry.settings, fds, can_enable)?);
        }
        Ok(all)
    }

    /// Puts in force what does not come with a message, before the first one.
    pub(crate) fn take_over(&mut self, handover: &Handover) {
        self.cache_mode = self.stricter_mode(handover.writeback);
        self.allowance = Allowance::Rest;
        self.claimant.resume(handover.has_owned, handover.owns);
    }

    /// Returns the messages that make vrings which were reset: they begin at 0, and their positions can still be asked for.
    fn reset_messages(&mut self, has_status: bool) -> io::Result<Vec<RecordedMessage>> {
        let bare = |request, payload| record(request, payload, [] as [&File; 0]);
        let positions = self.vrings.iter_mut().filter_map(|(index, entry)| {
            let position = entry.settings.reset_position()?;
            Some(words([index.into(), position.into()]))
        });
        let set = positions.map(|payload| bare(FrontendReq::SET_VRING_BASE, payload));
        let mut all: Vec<_> = set.collect::<io::Result<_>>()?;
        if !all.is_empty() {
            all.push(match has_status {
                true => bare(FrontendReq::SET_STATUS, longs([0]))?,
                false => bare(FrontendReq::RESET_DEVICE, Vec::new())?,
            });
        }
        Ok(all)
    }
}

/// The descriptors of a vring for another process.
struct VringFds {
    kick: Kick,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
}

/// Returns the messages about a vring. The last one starts it.
fn of_vring(
    index: u16,
    settings: &VringSettings,
    fds: VringFds,
    can_enable: bool,
) -> io::Result<Vec<RecordedMessage>> {
    let mut all = Vec::new();
    let number = u32::from(index);
    let bare = |request, payload| record(request, payload, [] as [&OwnedFd; 0]);
    if let Some(size) = settings.size {
        let payload = words([number, size.into()]);
        all.push(bare(FrontendReq::SET_VRING_NUM, payload)?);
    }
    if settings.position != 0 && settings.reset_position().is_none() {
        let payload = words([number, settings.position.into()]);
        all.push(bare(FrontendReq::SET_VRING_BASE, payload)?);
    }
    if let Some(addrs) = settings.addrs {
        let flags = u32::from(addrs.used_log.is_some());
        let places = [
            addrs.desc,
            addrs.used,
            addrs.avail,
            addrs.used_log.unwrap_or(0),
        ];
        let payload = [words([number, flags]), longs(places)].concat();
        all.push(bare(FrontendReq::SET_VRING_ADDR, payload)?);
    }
    let with_fd = |request: FrontendReq, fd| RecordedMessage {
        request: request.into(),
        payload: longs([index.into()]),
        fds: vec![fd],
    };
    let VringFds { kick, call, err } = fds;
    all.extend(call.map(|call| with_fd(FrontendReq::SET_VRING_CALL, call)));
    all.extend(err.map(|err| with_fd(FrontendReq::SET_VRING_ERR, err)));
    if settings.enabled && can_enable {
        all.push(bare(FrontendReq::SET_VRING_ENABLE, words([number, 1]))?);
    }
    match kick {
        Kick::Unset => {}
        Kick::Polled => all.push(bare(
            FrontendReq::SET_VRING_KICK,
            longs([u64::from(index) | NO_FD]),
        )?),
        Kick::Fd(fd) => all.push(with_fd(FrontendReq::SET_VRING_KICK, fd)),
    }
    Ok(all)
}
