//! The negotiation of fixed newstyle: structured replies where offered, then GO with the sizes of blocks.

use crate::dial::{Call, NbdError};
use crate::wire::{self, answer, export, info, option};

/// Most answers to one option.
const ANSWERS_MAX: usize = 64;
/// Largest block that a guest can have.
const BLOCK_MAX: u32 = 64 << 10;

/// The properties of an export, as its server gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Export {
    /// Its size.
    pub size_bytes: u64,
    /// Transmission flags (`wire::export`).
    pub flags: u16,
    /// Smallest unit of offsets and lengths, a power of two.
    pub block_min: u32,
    /// Largest payload, a multiple of the smallest unit.
    pub payload_max: u32,
    /// Replies to reads are structured.
    pub structured: bool,
}

impl Export {
    /// Returns true if a flag of `wire::export` is set.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Negotiates until the transmission begins.
pub(crate) fn negotiate(call: &mut Call, name: &str) -> Result<Export, NbdError> {
    greet(call)?;
    let structured = ask_for_structure(call)?;
    let mut found = go(call, name)?;
    found.structured = structured;
    Ok(found)
}

fn greet(call: &mut Call) -> Result<(), NbdError> {
    if u64::from_be_bytes(call.array()?) != wire::GREETING {
        return Err(NbdError::Breach("its first bytes are not NBDMAGIC"));
    }
    if u64::from_be_bytes(call.array()?) != wire::OPTION {
        return Err(NbdError::Breach(
            "it does not speak the newstyle protocol (IHAVEOPT)",
        ));
    }
    let flags = u16::from_be_bytes(call.array()?);
    if flags & wire::FIXED_NEWSTYLE == 0 {
        return Err(NbdError::Breach(
            "it does not speak the fixed newstyle protocol",
        ));
    }
    let ours = flags & (wire::FIXED_NEWSTYLE | wire::NO_ZEROES);
    call.write(&u32::from(ours).to_be_bytes())
}

fn ask(call: &mut Call, option: u32, data: &[u8]) -> Result<(), NbdError> {
    let mut bytes = Vec::with_capacity(16 + data.len());
    bytes.extend(wire::OPTION.to_be_bytes());
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    call.write(&bytes)
}

/// Reads an answer to an option: its type and its data.
fn answered(call: &mut Call, option: u32) -> Result<(u32, Vec<u8>), NbdError> {
    if u64::from_be_bytes(call.array()?) != wire::OPTION_REPLY {
        return Err(NbdError::Breach("an answer to an option has another magic"));
    }
    if u32::from_be_bytes(call.array()?) != option {
        return Err(NbdError::Breach("it answers an option that was not sent"));
    }
    let kind = u32::from_be_bytes(call.array()?);
    let len = u32::from_be_bytes(call.array()?) as usize;
    // The longest has a name or a message, and a few numbers.
    if len > wire::TEXT_MAX + 64 {
        return Err(NbdError::Breach("an answer to an option is too long"));
    }
    let mut data = vec![0; len];
    call.read(&mut data)?;
    Ok((kind, data))
}

fn ask_for_structure(call: &mut Call) -> Result<bool, NbdError> {
    ask(call, option::STRUCTURED_REPLY, &[])?;
    match answered(call, option::STRUCTURED_REPLY)? {
        (answer::ACK, _) => Ok(true),
        (kind @ (answer::TLS_REQUIRED | answer::SHUTDOWN), text) => Err(refusal(kind, &text)),
        (kind, _) if kind & answer::ERROR != 0 => Ok(false),
        _ => Err(NbdError::Breach("it answers with an unknown type")),
    }
}

fn go(call: &mut Call, name: &str) -> Result<Export, NbdError> {
    let mut data = Vec::with_capacity(8 + name.len());
    data.extend((name.len() as u32).to_be_bytes());
    data.extend(name.as_bytes());
    data.extend(1_u16.to_be_bytes());
    data.extend(info::BLOCK_SIZE.to_be_bytes());
    ask(call, option::GO, &data)?;
    let (mut size, mut blocks) = (None, None);
    for _ in 0..ANSWERS_MAX {
        match answered(call, option::GO)? {
            (answer::ACK, _) => return describe(size, blocks),
            (answer::INFO, data) => match Numbers(&data).u16() {
                Some((info::EXPORT, rest)) => size = Some(size_and_flags(rest)?),
                Some((info::BLOCK_SIZE, rest)) => blocks = Some(block_sizes(rest)?),
                Some(_) => {}
                None => return Err(NbdError::Breach("a piece of information has no type")),
            },
            (kind, text) if kind & answer::ERROR != 0 => return Err(refusal(kind, &text)),
            _ => return Err(NbdError::Breach("it answers with an unknown type")),
        }
    }
    Err(NbdError::Breach("its answers to an option do not end"))
}

/// Big-endian numbers at the front of a slice.
struct Numbers<'a>(&'a [u8]);

impl<'a> Numbers<'a> {
    fn u16(self) -> Option<(u16, Numbers<'a>)> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        Some((u16::from_be_bytes(*bytes), Numbers(rest)))
    }

    fn u32(self) -> Option<(u32, Numbers<'a>)> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        Some((u32::from_be_bytes(*bytes), Numbers(rest)))
    }

    fn u64(self) -> Option<(u64, Numbers<'a>)> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        Some((u64::from_be_bytes(*bytes), Numbers(rest)))
    }
}

fn size_and_flags(data: Numbers<'_>) -> Result<(u64, u16), NbdError> {
    let read = || {
        let (size, rest) = data.u64()?;
        let (flags, rest) = rest.u16()?;
        rest.0.is_empty().then_some((size, flags))
    };
    read().ok_or(NbdError::Breach(
        "the size of the export has another length",
    ))
}

fn block_sizes(data: Numbers<'_>) -> Result<[u32; 3], NbdError> {
    let read = || {
        let (least, rest) = data.u32()?;
        let (preferred, rest) = rest.u32()?;
        let (most, rest) = rest.u32()?;
        rest.0.is_empty().then_some([least, preferred, most])
    };
    read().ok_or(NbdError::Breach("the sizes of blocks have another length"))
}

fn describe(size: Option<(u64, u16)>, blocks: Option<[u32; 3]>) -> Result<Export, NbdError> {
    let (size_bytes, flags) = size.ok_or(NbdError::Breach("it does not say the export's size"))?;
    if flags & export::HAS_FLAGS == 0 {
        return Err(NbdError::Breach("the flags of the export are not valid"));
    }
    let [least, _preferred, most] = blocks.unwrap_or([1, 4096, wire::PAYLOAD_MAX]);
    if !least.is_power_of_two() || least > BLOCK_MAX || most < least.max(512) {
        return Err(NbdError::Breach("its sizes of blocks are not possible"));
    }
    let most = most.min(wire::PAYLOAD_MAX);
    // Whole pages where possible, so that every part of a cut request but the last is aligned.
    let unit = if most >= 4096 { 4096 } else { 512 }.max(least);
    Ok(Export {
        size_bytes,
        flags,
        block_min: least,
        payload_max: most - most % unit,
        structured: false,
    })
}

fn refusal(kind: u32, text: &[u8]) -> NbdError {
    let text = String::from_utf8_lossy(text);
    let text: String = text.chars().filter(|c| !c.is_control()).take(200).collect();
    let said = match text.as_str() {
        "" => String::new(),
        text => format!(" (it says: {text})"),
    };
    if kind == answer::SHUTDOWN {
        return NbdError::ShutsDown(said);
    }
    NbdError::Refused(match kind {
        answer::TLS_REQUIRED => format!(
            "it wants TLS, which is not supported; let it listen without TLS on a unix socket, or put a TLS proxy before it{said}"
        ),
        answer::UNKNOWN => format!("it has no such export; check the name after the `/`{said}"),
        answer::POLICY => format!("its policy forbids this client{said}"),
        answer::UNSUPPORTED => format!("it is too old: it does not know the option GO{said}"),
        kind => format!("error {}{said}", kind & !answer::ERROR),
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::*;

    /// An answer to an option.
    fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = wire::OPTION_REPLY.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn hello() -> Vec<u8> {
        let mut bytes = wire::GREETING.to_be_bytes().to_vec();
        bytes.extend(wire::OPTION.to_be_bytes());
        bytes.extend(3_u16.to_be_bytes());
        bytes
    }

    fn size(bytes: u64, flags: u16) -> Vec<u8> {
        let mut data = info::EXPORT.to_be_bytes().to_vec();
        data.extend(bytes.to_be_bytes());
        data.extend(flags.to_be_bytes());
        reply(option::GO, answer::INFO, &data)
    }

    fn blocks(sizes: [u32; 3]) -> Vec<u8> {
        let mut data = info::BLOCK_SIZE.to_be_bytes().to_vec();
        sizes
            .iter()
            .for_each(|size| data.extend(size.to_be_bytes()));
        reply(option::GO, answer::INFO, &data)
    }

    fn ack(option: u32) -> Vec<u8> {
        reply(option, answer::ACK, &[])
    }

    fn good() -> Vec<u8> {
        let structured = ack(option::STRUCTURED_REPLY);
        let parts = [
            hello(),
            structured,
            size(1 << 20, 0x16d),
            blocks([512, 4096, 1 << 20]),
            ack(option::GO),
        ];
        parts.concat()
    }

    /// Negotiates with a server that sends these bytes, whatever it gets, and then hangs up or stays silent. Returns what it
    /// got, too.
    fn with(script: &[u8], hangs_up: bool) -> (Result<Export, NbdError>, Vec<u8>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(script).unwrap();
        if hangs_up {
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
        }
        let time = Duration::from_millis(if hangs_up { 20_000 } else { 30 });
        let mut call = Call::on(std::sync::Arc::new(ours.into()), Instant::now() + time);
        let result = negotiate(&mut call, "name");
        drop(call);
        let mut got = Vec::new();
        // A socket that is closed with unread bytes ends with an error.
        let _ = theirs.read_to_end(&mut got);
        (result, got)
    }

    #[test]
    fn a_good_server_is_understood_and_asked_in_the_right_words() {
        let (found, got) = with(&good(), false);
        let expected = Export {
            size_bytes: 1 << 20,
            flags: 0x16d,
            block_min: 512,
            payload_max: 1 << 20,
            structured: true,
        };
        assert_eq!(found.unwrap(), expected);
        let mut asked = 3_u32.to_be_bytes().to_vec();
        asked.extend(b"IHAVEOPT\0\0\0\x08\0\0\0\0");
        asked.extend(b"IHAVEOPT\0\0\0\x07\0\0\0\x0c\0\0\0\x04name\0\x01\0\x03");
        assert_eq!(got, asked);
    }

    #[test]
    fn silence_and_hanging_up_at_each_byte_end_with_an_error() {
        let script = good();
        for length in 0..script.len() {
            let cut = &script[..length];
            assert!(
                matches!(with(cut, true).0, Err(NbdError::Closed)),
                "{length}"
            );
            assert!(
                matches!(with(cut, false).0, Err(NbdError::Silent)),
                "{length}"
            );
        }
    }

    #[test]
    fn each_byte_that_is_another_is_refused_or_harmless() {
        let script = good();
        for at in 0..script.len() {
            for bits in [0xff, 0x01, 0x80] {
                let mut other = script.clone();
                other[at] ^= bits;
                if let (Ok(found), _) = with(&other, true) {
                    assert!(found.block_min.is_power_of_two() && found.block_min <= BLOCK_MAX);
                    assert!(found.payload_max >= 512 && found.payload_max <= wire::PAYLOAD_MAX);
                    assert_eq!(found.payload_max % found.block_min, 0);
                }
            }
        }
    }

    #[test]
    fn servers_are_refused_for_what_they_say() {
        let plain = reply(option::STRUCTURED_REPLY, answer::UNSUPPORTED, b"no");
        let begin = [hello(), plain].concat();
        let then = |parts: &[Vec<u8>]| [begin.clone(), parts.concat()].concat();
        let error = |kind| then(&[reply(option::GO, kind, b"words\n\x1b[31m")]);
        for (script, part) in [
            (error(answer::UNKNOWN), "no such export"),
            (error(answer::TLS_REQUIRED), "TLS"),
            (error(answer::POLICY), "policy"),
            (error(answer::UNSUPPORTED), "too old"),
            (error(answer::SHUTDOWN), "shuts down"),
            (
                [
                    hello(),
                    reply(option::STRUCTURED_REPLY, answer::SHUTDOWN, &[]),
                ]
                .concat(),
                "shuts down",
            ),
            (error(answer::ERROR + 99), "error 99"),
            (then(&[ack(option::GO)]), "size"),
            (then(&[ack(option::STRUCTURED_REPLY)]), "not sent"),
            (then(&[reply(option::GO, 2, &[])]), "unknown type"),
            (then(&[reply(option::GO, answer::INFO, &[0])]), "no type"),
            (
                then(&[reply(option::GO, answer::INFO, &[0; 11])]),
                "another length",
            ),
            (then(&[size(4096, 0), ack(option::GO)]), "flags"),
            (
                then(&[size(4096, 1), blocks([3, 4, 5]), ack(option::GO)]),
                "blocks",
            ),
            (
                then(&[size(4096, 1), blocks([512, 512, 0]), ack(option::GO)]),
                "blocks",
            ),
            (then(&vec![size(4096, 1); 65]), "do not end"),
            (
                [
                    hello(),
                    reply(option::STRUCTURED_REPLY, answer::TLS_REQUIRED, &[]),
                ]
                .concat(),
                "TLS",
            ),
        ] {
            let error = with(&script, true).0.unwrap_err();
            assert_eq!(error.may_pass(), part == "shuts down");
            let why = error.to_string();
            assert!(why.contains(part) && !why.contains(['\n', '\x1b']), "{why}");
        }
    }

    #[test]
    fn a_server_without_structured_replies_or_block_sizes_is_served() {
        let plain = reply(option::STRUCTURED_REPLY, answer::UNSUPPORTED, b"");
        let script = [hello(), plain, size(4096, 1), ack(option::GO)].concat();
        let found = with(&script, true).0.unwrap();
        assert_eq!((found.structured, found.block_min), (false, 1));
        assert_eq!(found.payload_max, wire::PAYLOAD_MAX);
        // Without a limit, and with an odd one.
        for (most, wanted) in [(u32::MAX, wire::PAYLOAD_MAX), (70_000, 69_632), (512, 512)] {
            let script = [
                hello(),
                ack(option::STRUCTURED_REPLY),
                size(4096, 1),
                blocks([1, 0, most]),
                ack(option::GO),
            ];
            let found = with(&script.concat(), true).0.unwrap();
            assert_eq!(found.payload_max, wanted);
        }
    }
}
