//! The settings of an image, or of its pool, that override those of the client.

/// A setting with which a guest could lose writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RiskySetting {
    /// Its name.
    pub name: &'static str,
    /// The value that it should have.
    pub wanted: &'static str,
    /// The consequence of any other value, as the end of "the image has ...".
    pub harm: &'static str,
}

const CACHE: RiskySetting = RiskySetting {
    name: "rbd_cache",
    wanted: "false",
    harm: "a write-back cache of its own, and a daemon that is killed would lose writes which the guest believes done",
};
const PERSISTENT_CACHE: RiskySetting = RiskySetting {
    name: "rbd_persistent_cache_mode",
    wanted: "disabled",
    harm: "a write-back cache on this host, and a daemon that is killed would lose writes which the guest believes done",
};
const BLOCKLIST: RiskySetting = RiskySetting {
    name: "rbd_blocklist_on_break_lock",
    wanted: "true",
    harm: "a lock that is taken over without stopping the client that had it, whose last writes could come after newer ones",
};

const EXPIRY: RiskySetting = RiskySetting {
    name: "rbd_blocklist_expire_seconds",
    wanted: "0",
    harm: "a time of its own for which a client is refused whose lock was taken over, and its last writes could come after newer ones",
};

/// The settings that matter, as librbd lists them: each as the text that was written, not as the value that it means.
#[derive(Debug, Default)]
pub(crate) struct OwnSettings {
    is_cached: bool,
    is_through: bool,
    is_cached_here: bool,
    lets_go_on: bool,
    lets_come_back: bool,
}

impl OwnSettings {
    pub(crate) fn note(&mut self, name: &[u8], value: &[u8]) {
        match name {
            b"rbd_cache" => self.is_cached = !is_false(value),
            b"rbd_cache_policy" => self.is_through = value == b"writethrough",
            b"rbd_persistent_cache_mode" => self.is_cached_here = value != b"disabled",
            b"rbd_blocklist_on_break_lock" | b"rbd_blacklist_on_break_lock" => {
                self.lets_go_on = is_false(value);
            }
            b"rbd_blocklist_expire_seconds" | b"rbd_blacklist_expire_seconds" => {
                self.lets_come_back = value != b"0";
            }
            _ => {}
        }
    }

    pub(crate) fn harmful(&self) -> Option<RiskySetting> {
        let all = [
            (self.is_cached && !self.is_through, CACHE),
            (self.is_cached_here, PERSISTENT_CACHE),
            (self.lets_go_on, BLOCKLIST),
            (self.lets_come_back, EXPIRY),
        ];
        all.into_iter()
            .find_map(|(is, setting)| is.then_some(setting))
    }
}

/// Returns true if Ceph reads this value as false.
fn is_false(value: &[u8]) -> bool {
    let words: [&[u8]; 4] = [b"false", b"no", b"off", b"0"];
    words.iter().any(|word| value.eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_mean_what_they_mean_to_ceph() {
        let harmless = [
            ("rbd_cache", "false"),
            ("rbd_cache_policy", "writearound"),
            ("rbd_persistent_cache_mode", "disabled"),
            ("rbd_blocklist_on_break_lock", "true"),
            ("rbd_blocklist_expire_seconds", "0"),
        ];
        for (name, value, wanted) in [
            ("rbd_cache", "0", None),
            ("rbd_cache", "Off", None),
            ("rbd_cache", "true", Some(CACHE)),
            ("rbd_cache", "1", Some(CACHE)),
            ("rbd_cache", "yes", Some(CACHE)),
            ("rbd_cache_policy", "writeback", None),
            ("rbd_persistent_cache_mode", "ssd", Some(PERSISTENT_CACHE)),
            ("rbd_blocklist_on_break_lock", "0", Some(BLOCKLIST)),
            ("rbd_blocklist_on_break_lock", "1", None),
            ("rbd_blocklist_expire_seconds", "0", None),
            ("rbd_blocklist_expire_seconds", "86400", Some(EXPIRY)),
            ("rbd_blacklist_expire_seconds", "30", Some(EXPIRY)),
        ] {
            let mut own = OwnSettings::default();
            let other = harmless.iter().filter(|(other, _)| *other != name);
            for (name, value) in other.chain([&(name, value)]) {
                own.note(name.as_bytes(), value.as_bytes());
            }
            assert_eq!(own.harmful(), wanted, "{name} {value}");
        }
        let mut through = OwnSettings::default();
        through.note(b"rbd_cache", b"on");
        through.note(b"rbd_cache_policy", b"writethrough");
        assert_eq!(through.harmful(), None);
    }
}
