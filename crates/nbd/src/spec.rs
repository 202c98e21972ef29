//! The syntax of an NBD disk: the NBD URI convention, with options of ours in its query.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::wire::TEXT_MAX;

/// Port of a server that names none.
const PORT: u16 = 10809;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A host name or an IP address, and a port.
    Tcp(String, u16),
    /// The path of a unix socket.
    Unix(PathBuf),
}

/// An export of an NBD server, and how to treat it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdSpec {
    /// The server.
    pub address: Address,
    /// The name of the export; often empty.
    pub export: String,
    /// Connections of each worker. One is used where the server does not promise CAN_MULTI_CONN.
    pub connections: u16,
    /// A connection on which nothing arrives for so long, while requests wait for answers, counts as dead.
    pub timeout: Duration,
    /// How long requests wait for a lost connection before they fail.
    pub reconnect: Duration,
    /// How long a server that did not close a dead connection may still apply the requests that it got on it.
    pub fence: Duration,
    /// Most bytes of changes that the server answered and did not flush, which are kept to be sent again.
    pub replay_bytes: u64,
}

/// Options of the query: name, default, least and most.
const CONNECTIONS: (&str, u32, u32, u32) = ("connections", 1, 1, 16);
const TIMEOUT: (&str, u32, u32, u32) = ("timeout", 60, 1, 3600);
const RECONNECT: (&str, u32, u32, u32) = ("reconnect", 30, 0, 86_400);
const FENCE: (&str, u32, u32, u32) = ("fence", 30, 1, 3600);
/// In MiB.
const REPLAY: (&str, u32, u32, u32) = ("replay", 32, 1, 1024);

/// Returns true if a text is meant as an NBD disk.
pub fn is_uri(text: &str) -> bool {
    let scheme = text.split_once("://").map(|(scheme, _)| scheme);
    matches!(scheme, Some("nbd" | "nbd+unix" | "nbds" | "nbds+unix"))
}

impl FromStr for NbdSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<NbdSpec, String> {
        let refuse = |why: &str| {
            format!(
                "`{text}` is not an NBD disk: {why}; write nbd://HOST[:PORT]/EXPORT or \
                 nbd+unix:///EXPORT?socket=PATH"
            )
        };
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| refuse("it has no ://"))?;
        if scheme.starts_with("nbds") {
            return Err(refuse(
                "TLS is not supported (use a unix socket, and a TLS proxy such as stunnel if the server is remote)",
            ));
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decoded(export).map_err(|why| refuse(&why))?;
        if export.len() > TEXT_MAX {
            return Err(refuse("the name of the export is longer than 4096 bytes"));
        }
        let query = Query::parse(query).map_err(|why| refuse(&why))?;
        let address = match (scheme, &query.socket) {
            ("nbd+unix", Some(path)) if authority.is_empty() && !path.is_empty() => {
                Address::Unix(PathBuf::from(path))
            }
            ("nbd+unix", Some(_)) => return Err(refuse("the socket is named by ?socket=PATH")),
            ("nbd+unix", None) => return Err(refuse("?socket=PATH is missing")),
            ("nbd", None) => tcp(authority).map_err(refuse)?,
            ("nbd", Some(_)) => return Err(refuse("socket= needs nbd+unix://")),
            _ => return Err(refuse("the scheme is unknown")),
        };
        let seconds = |value: u32| Duration::from_secs(value.into());
        Ok(NbdSpec {
            address,
            export,
            connections: query.connections as u16,
            timeout: seconds(query.timeout),
            reconnect: seconds(query.reconnect),
            fence: seconds(query.fence),
            replay_bytes: u64::from(query.replay) << 20,
        })
    }
}

/// The parts of the query.
struct Query {
    socket: Option<String>,
    connections: u32,
    timeout: u32,
    reconnect: u32,
    fence: u32,
    replay: u32,
}

impl Query {
    fn parse(text: &str) -> Result<Query, String> {
        let mut query = Query {
            socket: None,
            connections: CONNECTIONS.1,
            timeout: TIMEOUT.1,
            reconnect: RECONNECT.1,
            fence: FENCE.1,
            replay: REPLAY.1,
        };
        for part in text.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let (place, option) = match name {
                "socket" => {
                    query.socket = Some(decoded(value)?);
                    continue;
                }
                "connections" => (&mut query.connections, CONNECTIONS),
                "timeout" => (&mut query.timeout, TIMEOUT),
                "reconnect" => (&mut query.reconnect, RECONNECT),
                "fence" => (&mut query.fence, FENCE),
                "replay" => (&mut query.replay, REPLAY),
                _ => {
                    return Err(format!(
                        "`{name}` is none of socket, connections, timeout, reconnect, fence and replay"
                    ));
                }
            };
            let (name, _, least, most) = option;
            let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
            let number = value.parse().ok().filter(|_| is_number);
            *place = number
                .filter(|number| (least..=most).contains(number))
                .ok_or_else(|| format!("{name} is a number from {least} to {most}"))?;
        }
        Ok(query)
    }
}

/// `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`.
fn tcp(authority: &str) -> Result<Address, &'static str> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or("a `]` is missing")?;
            match rest.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if rest.is_empty() => (host, None),
                None => return Err("the port is not a number"),
            }
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    if host.is_empty() || host.contains('@') {
        return Err("the host is missing");
    }
    let port = match port {
        None => PORT,
        Some(port) => port
            .parse()
            .ok()
            .filter(|port| *port > 0)
            .ok_or("the port is not a number")?,
    };
    Ok(Address::Tcp(host.to_owned(), port))
}

/// Undoes %XX.
fn decoded(text: &str) -> Result<String, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || {
            bytes
                .next()
                .and_then(|digit| char::from(digit).to_digit(16))
        };
        match (digit(), digit()) {
            (Some(high), Some(low)) => out.push((high * 16 + low) as u8),
            _ => return Err("a % needs two digits after it (write % itself as %25)".to_owned()),
        }
    }
    match String::from_utf8(out) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err("it is not text".to_owned()),
    }
}

fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => {
                out.push(byte.into());
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

impl NbdSpec {
    /// The address and the export, without options.
    pub fn place(&self) -> String {
        let export = encoded(&self.export);
        match &self.address {
            Address::Tcp(host, port) if host.contains(':') => {
                format!("nbd://[{host}]:{port}/{export}")
            }
            Address::Tcp(host, port) => format!("nbd://{host}:{port}/{export}"),
            Address::Unix(path) => {
                let path = encoded(&path.to_string_lossy());
                format!("nbd+unix:///{export}?socket={path}")
            }
        }
    }
}

impl fmt::Display for NbdSpec {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.place())?;
        let mut joint = match self.address {
            Address::Tcp(..) => '?',
            Address::Unix(_) => '&',
        };
        let options = [
            (CONNECTIONS, u64::from(self.connections)),
            (TIMEOUT, self.timeout.as_secs()),
            (RECONNECT, self.reconnect.as_secs()),
            (FENCE, self.fence.as_secs()),
            (REPLAY, self.replay_bytes >> 20),
        ];
        for ((name, default, ..), value) in options {
            if value != u64::from(default) {
                write!(out, "{joint}{name}={value}")?;
                joint = '&';
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse() {
        let tcp = |host: &str, port| Address::Tcp(host.to_owned(), port);
        for (text, address, export) in [
            ("nbd://host", tcp("host", 10809), ""),
            ("nbd://host/", tcp("host", 10809), ""),
            ("nbd://host:1/a/b", tcp("host", 1), "a/b"),
            ("nbd://10.0.0.1:65535/a%20b", tcp("10.0.0.1", 65535), "a b"),
            ("nbd://[::1]/x", tcp("::1", 10809), "x"),
            ("nbd://[::1]:7/x", tcp("::1", 7), "x"),
            (
                "nbd+unix:///?socket=/run/a",
                Address::Unix("/run/a".into()),
                "",
            ),
            (
                "nbd+unix:///disk%2F1?socket=a%3Fb",
                Address::Unix("a?b".into()),
                "disk/1",
            ),
        ] {
            let spec: NbdSpec = text.parse().unwrap();
            assert_eq!((spec.address, spec.export.as_str()), (address, export));
        }
        let spec: NbdSpec = "nbd://h/e?connections=4&timeout=5&reconnect=0&fence=7"
            .parse()
            .unwrap();
        let seconds = [spec.timeout, spec.reconnect, spec.fence].map(|time| time.as_secs());
        assert_eq!((spec.connections, seconds), (4, [5, 0, 7]));
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_remedy() {
        for (text, part) in [
            ("nbd://", "host is missing"),
            ("nbd://:1/", "host is missing"),
            ("nbd://h:0/", "port"),
            ("nbd://h:65536/", "port"),
            ("nbd://h:x/", "port"),
            ("nbd://[::1/", "`]`"),
            ("nbd://[::1]x/", "port"),
            ("nbd://h/%", "two digits"),
            ("nbd://h/%4", "two digits"),
            ("nbd://h/%ff", "not text"),
            ("nbd://h/%00", "not text"),
            ("nbd://h/?socket=/a", "nbd+unix"),
            ("nbd://h/?connections=0", "1 to 16"),
            ("nbd://h/?connections=17", "1 to 16"),
            ("nbd://h/?timeout=", "1 to 3600"),
            ("nbd://h/?timeout=+5", "1 to 3600"),
            ("nbd://h/?reconnect=86401", "0 to 86400"),
            ("nbd://h/?tls=on", "`tls`"),
            ("nbd+unix:///x", "socket=PATH is missing"),
            ("nbd+unix://h/x?socket=/a", "socket=PATH"),
            ("nbd+unix:///x?socket=", "socket=PATH"),
            ("nbds://h/", "TLS"),
            ("nbds+unix:///?socket=/a", "TLS"),
        ] {
            let why = text.parse::<NbdSpec>().unwrap_err();
            assert!(why.contains(part) && why.contains("nbd://HOST"), "{why}");
        }
        assert!(!is_uri("nbd:") && !is_uri("nbd") && !is_uri("/nbd://x"));
    }

    #[test]
    fn display_reads_back() {
        for text in [
            "nbd://h",
            "nbd://[fe80::1]:5/a b?timeout=3",
            "nbd+unix:///a%2Fb%25?socket=/run/a%20b&connections=2&fence=1",
            "nbd://h/e?reconnect=0",
            "nbd://h/e?replay=4",
        ] {
            let spec: NbdSpec = text.parse().unwrap();
            assert_eq!(spec.to_string().parse(), Ok(spec), "{text}");
        }
    }
}
