//! The command-line syntax of a disk.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::model::ModelSpec;
use crate::nbd::NbdSpec;
use crate::rbd::RbdSpec;
use crate::size::{format_size, parse_size};

/// A disk as it was named on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskSpec {
    /// A regular file or a block device, distinguished when opened; an image of another format is refused.
    Path(PathBuf),
    /// A file or device like that of `Path`, but an image of any format is accepted.
    Raw(PathBuf),
    /// Memory of this many bytes; the contents are lost at shutdown.
    Ram(u64),
    /// Accepts all writes, and reads zero.
    Null(u64),
    /// Accepts all writes, and completes reads without storing data. For measurements without data movement,
    /// not for guests.
    Untouched(u64),
    /// Memory with the timing of a drive; the contents are lost at shutdown.
    Model(ModelSpec),
    /// An export of an NBD server.
    Nbd(NbdSpec),
    /// An image of a Ceph cluster.
    Rbd(RbdSpec),
}

/// Suffix after the size of a null disk whose reads store no data, as for QEMU's null-co.
const UNTOUCHED: &str = ",read-zeroes=off";

impl FromStr for DiskSpec {
    type Err = String;

    /// Parses a spec. `raw:`, `ram:`, `null:`, `model:`, `rbd:` and `nbd://` are kinds only at the very beginning, so that every
    /// file can be named: a file called `ram:x` is written `./ram:x`.
    fn from_str(text: &str) -> Result<DiskSpec, String> {
        if text.is_empty() {
            return Err(
                "a disk is a path, raw:PATH, ram:SIZE, null:SIZE, model:NAME, rbd:POOL/IMAGE or nbd://HOST/EXPORT; this one is empty: cleave@NAME takes it from DISK= in /etc/cleave/NAME.conf"
                    .to_owned(),
            );
        }
        if let Some(path) = text.strip_prefix("raw:") {
            return match path {
                "" => Err(
                    "raw: needs the path of a file: raw:PATH (or ./raw: for a file of that name)"
                        .to_owned(),
                ),
                path => Ok(DiskSpec::Raw(PathBuf::from(path))),
            };
        }
        if let Some(size) = text.strip_prefix("ram:") {
            return parse_kind("ram", size).map(DiskSpec::Ram);
        }
        if let Some(size) = text.strip_prefix("null:") {
            return match size.split_once(',') {
                None => parse_kind("null", size).map(DiskSpec::Null),
                Some((size, "read-zeroes=off")) => {
                    parse_kind("null", size).map(DiskSpec::Untouched)
                }
                Some((_, option)) => Err(format!(
                    "`{option}` is not an option of null; write null:1G,read-zeroes=off, or ./{text} for a file of that name"
                )),
            };
        }
        if let Some(model) = text.strip_prefix("model:") {
            return model.parse().map(DiskSpec::Model);
        }
        if text.starts_with("rbd:") {
            return text.parse().map(DiskSpec::Rbd);
        }
        if cleave_nbd::is_uri(text) {
            return text.parse().map(DiskSpec::Nbd);
        }
        Ok(DiskSpec::Path(PathBuf::from(text)))
    }
}

impl DiskSpec {
    /// Returns the name that an operator uses: the path or the spec.
    pub(crate) fn name(&self) -> String {
        match self.path() {
            Some(path) => path.display().to_string(),
            None => self.to_string(),
        }
    }

    /// Returns the path of a file or device.
    pub fn path(&self) -> Option<&Path> {
        match self {
            DiskSpec::Path(path) | DiskSpec::Raw(path) => Some(path),
            DiskSpec::Ram(_)
            | DiskSpec::Null(_)
            | DiskSpec::Untouched(_)
            | DiskSpec::Model(_)
            | DiskSpec::Nbd(_)
            | DiskSpec::Rbd(_) => None,
        }
    }
}

impl fmt::Display for DiskSpec {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiskSpec::Path(path) => write!(out, "{}", path.display()),
            DiskSpec::Raw(path) => write!(out, "raw:{}", path.display()),
            DiskSpec::Ram(bytes) => write!(out, "ram:{}", format_size(*bytes)),
            DiskSpec::Null(bytes) => write!(out, "null:{}", format_size(*bytes)),
            DiskSpec::Untouched(bytes) => write!(out, "null:{}{UNTOUCHED}", format_size(*bytes)),
            DiskSpec::Model(model) => write!(out, "model:{model}"),
            DiskSpec::Nbd(nbd) => write!(out, "{nbd}"),
            DiskSpec::Rbd(rbd) => write!(out, "{rbd}"),
        }
    }
}

fn parse_kind(kind: &str, size: &str) -> Result<u64, String> {
    let why = match size {
        "" => "the size is missing".to_owned(),
        size => match parse_size(size) {
            Ok(bytes) => return Ok(bytes),
            Err(why) => why,
        },
    };
    Err(format!(
        "{why}; write {kind}:1G, or ./{kind}:{size} for a file of that name"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_are_distinguished() {
        for (text, spec) in [
            ("ram:1G", DiskSpec::Ram(1 << 30)),
            ("null:4k", DiskSpec::Null(4096)),
            ("null:4k,read-zeroes=off", DiskSpec::Untouched(4096)),
            ("./ram:1G", DiskSpec::Path("./ram:1G".into())),
            ("RAM:1G", DiskSpec::Path("RAM:1G".into())),
            ("disk.img", DiskSpec::Path("disk.img".into())),
            ("raw:/a/disk.img", DiskSpec::Raw("/a/disk.img".into())),
            ("raw:ram:1G", DiskSpec::Raw("ram:1G".into())),
            ("./raw:x", DiskSpec::Path("./raw:x".into())),
            ("/dev/a:b", DiskSpec::Path("/dev/a:b".into())),
        ] {
            assert_eq!(text.parse(), Ok(spec), "{text}");
        }
    }

    #[test]
    fn a_bad_kind_names_the_remedy() {
        for text in [
            "ram:",
            "ram:x",
            "null:",
            "null:-1",
            "null:1G,",
            "null:1G,read-zeroes=on",
            "null:,read-zeroes=off",
            "ram:1.5G",
            "null:17179869184G",
        ] {
            let why = text.parse::<DiskSpec>().unwrap_err();
            assert!(why.contains(":1G") && why.contains("./"), "{why}");
            assert!(!why.contains('\n'), "{why}");
        }
        for (text, wanted) in [
            ("null:1G,read-zeroes=maybe", "`read-zeroes=maybe`"),
            ("ram:", "the size is missing"),
        ] {
            let why = text.parse::<DiskSpec>().unwrap_err();
            assert!(why.starts_with(wanted), "{why}");
        }
        assert!("".parse::<DiskSpec>().is_err());
        assert!("raw:".parse::<DiskSpec>().unwrap_err().contains("raw:PATH"));
    }

    #[test]
    fn display_reads_back() {
        for text in [
            "ram:1G",
            "null:3T",
            "null:3T,read-zeroes=off",
            "ram:1536",
            "ram:0",
            "null:1025K",
            "./ram:x",
            "raw:/a b",
            "/a b",
            "model:p3700",
            "model:flat,size=1536M,seed=3",
            "./model:p3700",
            "rbd:vms/web",
            "rbd:vms/blue/web@monday,id=cleave,conf=/etc/ceph/b.conf",
            "rbd:vms/web,conf=/etc/ceph/b.conf,raw=on",
            "./rbd:vms/web",
            "nbd://host/a",
            "nbd+unix:///?socket=/run/nbd&connections=4",
            ".//nbd://host/a",
        ] {
            let spec: DiskSpec = text.parse().unwrap();
            assert_eq!(spec.to_string().parse(), Ok(spec), "{text}");
        }
        assert_eq!(DiskSpec::Ram(1536 << 20).to_string(), "ram:1536M");
    }
}
