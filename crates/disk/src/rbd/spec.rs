//! The syntax of an RBD disk: that of `rbd` itself, with options of ours after commas.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use cleave_rbd::ImagePlace;

/// The beginning of such a spec.
const PREFIX: &str = "rbd:";

/// An image of a Ceph cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RbdSpec {
    /// Where it is.
    pub place: ImagePlace,
    /// True if it may be written to although it is one leg of a stripe.
    pub is_raw: bool,
}

impl FromStr for RbdSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<RbdSpec, String> {
        let refuse = |why: &str| {
            format!(
                "`{text}` is not an RBD disk: {why}; write rbd:POOL[/NAMESPACE]/IMAGE[@SNAP][,id=USER][,conf=PATH][,raw=on]"
            )
        };
        let rest = text
            .strip_prefix(PREFIX)
            .ok_or_else(|| refuse("it does not begin with rbd:"))?;
        let (name, options) = rest.split_once(',').unwrap_or((rest, ""));
        let options = Options::parse(options, rest.contains(',')).map_err(|why| refuse(&why))?;
        let (name, snapshot) = match name.split_once('@') {
            Some((_, snapshot)) if snapshot.is_empty() || snapshot.contains(['@', '/']) => {
                return Err(refuse("the name of the snapshot is not one"));
            }
            Some((name, snapshot)) => (name, Some(snapshot.to_owned())),
            None => (name, None),
        };
        let parts: Vec<&str> = name.split('/').collect();
        let (pool, namespace, image) = match *parts.as_slice() {
            [pool, image] => (pool, None, image),
            [pool, namespace, image] => (pool, Some(namespace), image),
            [_] => return Err(refuse("the pool or the image is missing")),
            _ => return Err(refuse("there are too many `/`")),
        };
        for (what, part) in [("pool", pool), ("image", image)] {
            if part.is_empty() {
                return Err(refuse(&format!("the name of the {what} is empty")));
            }
        }
        if namespace == Some("") {
            return Err(refuse("the name of the namespace is empty"));
        }
        if rest.contains('\0') {
            return Err(refuse("it contains a zero byte"));
        }
        Ok(RbdSpec {
            place: ImagePlace {
                pool: pool.to_owned(),
                namespace: namespace.map(str::to_owned),
                image: image.to_owned(),
                snapshot,
                user: options.user,
                conf: options.conf,
            },
            is_raw: options.is_raw,
        })
    }
}

#[derive(Default)]
struct Options {
    user: Option<String>,
    conf: Option<PathBuf>,
    is_raw: bool,
}

impl Options {
    fn parse(text: &str, has_comma: bool) -> Result<Options, String> {
        let mut options = Options::default();
        if !has_comma {
            return Ok(options);
        }
        for part in text.split(',') {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let given = match name {
                "id" => options.user.replace(value.to_owned()).is_some(),
                "conf" => options.conf.replace(PathBuf::from(value)).is_some(),
                "raw" if value == "on" => std::mem::replace(&mut options.is_raw, true),
                "raw" => return Err("raw is on or left out".to_owned()),
                _ => return Err(format!("`{name}` is not id, conf or raw")),
            };
            if given {
                return Err(format!("{name} is given twice"));
            }
            if value.is_empty() {
                return Err(format!("{name} is empty"));
            }
            if name == "id" && value.starts_with("client.") {
                return Err("id is the user without `client.`".to_owned());
            }
        }
        Ok(options)
    }
}

impl fmt::Display for RbdSpec {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{PREFIX}{}", self.place.image_name())?;
        if let Some(snapshot) = &self.place.snapshot {
            write!(out, "@{snapshot}")?;
        }
        if let Some(user) = &self.place.user {
            write!(out, ",id={user}")?;
        }
        if let Some(conf) = &self.place.conf {
            write!(out, ",conf={}", conf.display())?;
        }
        if self.is_raw {
            write!(out, ",raw=on")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_name_has_all_its_parts() {
        let spec: RbdSpec = "rbd:vms/blue/web@monday,id=cleave,conf=/etc/ceph/b.conf"
            .parse()
            .unwrap();
        assert!(!spec.is_raw);
        let raw: RbdSpec = "rbd:vms/web,raw=on,id=cleave".parse().unwrap();
        assert!(raw.is_raw);
        assert_eq!(raw.to_string(), "rbd:vms/web,id=cleave,raw=on");
        assert_eq!(
            spec.place,
            ImagePlace {
                pool: "vms".to_owned(),
                namespace: Some("blue".to_owned()),
                image: "web".to_owned(),
                snapshot: Some("monday".to_owned()),
                user: Some("cleave".to_owned()),
                conf: Some(PathBuf::from("/etc/ceph/b.conf")),
            }
        );
    }

    #[test]
    fn what_is_no_image_is_refused_in_a_line() {
        for (text, why) in [
            ("rbd:", "the pool or the image is missing"),
            ("rbd:web", "the pool or the image is missing"),
            ("rbd:/web", "pool is empty"),
            ("rbd:vms/", "image is empty"),
            ("rbd:vms//web", "namespace is empty"),
            ("rbd:a/b/c/d", "too many `/`"),
            ("rbd:vms/web@", "snapshot"),
            ("rbd:vms/web@a@b", "snapshot"),
            ("rbd:vms/web,", "`` is not id, conf or raw"),
            ("rbd:vms/web,user=x", "`user` is not id, conf or raw"),
            ("rbd:vms/web,id=", "id is empty"),
            ("rbd:vms/web,id=a,id=b", "id is given twice"),
            ("rbd:vms/web,id=client.a", "without `client.`"),
            ("rbd:vms/web,conf", "conf is empty"),
            ("rbd:vms/web,raw", "raw is on or left out"),
            ("rbd:vms/web,raw=off", "raw is on or left out"),
            ("rbd:vms/web,raw=on,raw=on", "raw is given twice"),
            ("rbd:vms/web\0", "zero byte"),
        ] {
            let line = text.parse::<RbdSpec>().unwrap_err();
            assert!(line.contains(why) && !line.contains('\n'), "{text}: {line}");
            assert!(line.contains("write rbd:POOL"), "{line}");
        }
    }
}
