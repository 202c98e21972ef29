//! The command-line syntax of a modelled drive: `NAME[,KEY=VALUE…]`.

use std::fmt;
use std::str::FromStr;

use super::Drive;
use crate::size::{format_size, parse_size};

/// The syntax and unit of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    /// A number.
    Count,
    /// `4K`, `8G`.
    Bytes,
    /// Like `Bytes`, and a power of two.
    Page,
    /// Microseconds with up to three decimals; stored in ns.
    Micros,
    /// Percent with up to one decimal; stored in 1/1000.
    Percent,
    /// MB/s (10^6 bytes).
    Rate,
}

/// A parameter: its name, unit, smallest and largest value.
#[derive(Debug)]
struct Key {
    name: &'static str,
    unit: Unit,
    min: u64,
    max: u64,
}

const fn key(name: &'static str, unit: Unit, min: u64, max: u64) -> Key {
    Key {
        name,
        unit,
        min,
        max,
    }
}

const KEYS: [Key; 12] = [
    key("size", Unit::Bytes, 4096, 1 << 46),
    key("seed", Unit::Count, 0, u64::MAX),
    key("channels", Unit::Count, 1, 4096),
    key("page", Unit::Page, 512, 1 << 20),
    key("read_us", Unit::Micros, 1, 100_000_000),
    key("write_us", Unit::Micros, 1, 100_000_000),
    key("mbps_per_channel", Unit::Rate, 1, 1_000_000),
    key("command_us", Unit::Micros, 0, 100_000_000),
    key("window", Unit::Count, 1, 65_536),
    key("link_mbps", Unit::Rate, 1, 1_000_000),
    key("jitter", Unit::Percent, 0, 1000),
    key("write_buffer", Unit::Bytes, 0, 1 << 40),
];

/// The values of all keys, in the order of `KEYS`.
type Values = [u64; KEYS.len()];

/// A predefined drive. Parameters that are not given have its values.
#[derive(Debug, PartialEq, Eq)]
struct Preset {
    name: &'static str,
    values: Values,
}

const SIZE_BYTES: u64 = 8 << 30;
const MIB: u64 = 1 << 20;

// One row per drive, in the order of `KEYS`, so that the rows can be compared.
#[rustfmt::skip]
const PRESETS: [Preset; 4] = [
    //                                   size        seed  ch  page  read_ns  write_ns  MB/s a ch  cmd_ns  win   link    ‰    buffer
    Preset { name: "p3700",  values: [SIZE_BYTES, 1, 46, 4096, 77_500, 100_000,  1600,      4_000,  20,  3_200, 100, 64 * MIB] },
    Preset { name: "p320h",  values: [SIZE_BYTES, 1, 39, 4096, 40_000,  60_000,  1600,      4_000,  18,  3_600, 100, 64 * MIB] },
    Preset { name: "flat",   values: [SIZE_BYTES, 1,  1, 4096,  1_000,   1_000, 4_096,      5_000, 65_536, 50_000, 0,      0] },
    Preset { name: "custom", values: [SIZE_BYTES, 1, 16, 4096, 80_000, 200_000,   400,      5_000,   8,  3_000,  50,       0] },
];

/// A modelled drive from the command line, complete and in range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSpec {
    preset: &'static Preset,
    values: Values,
}

impl ModelSpec {
    /// Returns the size of the disk.
    pub fn size_bytes(&self) -> u64 {
        let [size_bytes, ..] = self.values;
        size_bytes
    }

    /// Returns the name of the preset it is based on.
    pub fn preset(&self) -> &'static str {
        self.preset.name
    }

    /// Returns the drive's parameters.
    pub fn drive(&self) -> Drive {
        let [
            _size_bytes,
            seed,
            channels,
            page_bytes,
            read_ns,
            write_ns,
            channel_mbps,
            command_ns,
            window,
            link_mbps,
            jitter_per_mille,
            write_buffer_bytes,
        ] = self.values;
        // In the range of their keys; all but `seed` are far below 2^63.
        let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let page_ns = |mbps: u64| (page_bytes * 1000).div_ceil(mbps.max(1));
        Drive {
            channels: small(channels),
            page_bytes: small(page_bytes),
            read_ns,
            write_ns,
            command_ns,
            window: small(window),
            transfer_ns: page_ns(channel_mbps),
            link_ns: page_ns(link_mbps),
            jitter_per_mille: small(jitter_per_mille),
            write_buffer_bytes,
            seed,
        }
    }
}

impl FromStr for ModelSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<ModelSpec, String> {
        let mut parts = text.split(',');
        let name = parts.next().unwrap_or_default();
        let preset = PRESETS
            .iter()
            .find(|preset| preset.name == name)
            .ok_or_else(|| {
                let names = PRESETS.each_ref().map(|preset| preset.name).join(", ");
                format!("model:{text}: there is no modelled drive `{name}`; the drives are {names}")
            })?;
        let mut values = preset.values;
        let mut given = [false; KEYS.len()];
        for part in parts {
            let (at, value) = parse_part(part).map_err(|why| format!("model:{text}: {why}"))?;
            if let (Some(place), Some(given)) = (values.get_mut(at), given.get_mut(at)) {
                if std::mem::replace(given, true) {
                    return Err(format!("model:{text}: `{part}` occurs twice; give it once"));
                }
                *place = value;
            }
        }
        Ok(ModelSpec { preset, values })
    }
}

/// Returns the number of the key, and the value as it is stored.
fn parse_part(part: &str) -> Result<(usize, u64), String> {
    let (name, text) = part
        .split_once('=')
        .ok_or_else(|| format!("`{part}` is not KEY=VALUE"))?;
    let (at, key) = KEYS
        .iter()
        .enumerate()
        .find(|(_, key)| key.name == name)
        .ok_or_else(|| {
            let names = KEYS.each_ref().map(|key| key.name).join(", ");
            format!("`{name}` is not a parameter of a modelled drive; the parameters are {names}")
        })?;
    let range = || {
        let (min, max) = (key.unit.show(key.min), key.unit.show(key.max));
        format!(
            "`{part}` is out of range; {name} is {} from {min} to {max}",
            key.unit.says()
        )
    };
    let value = key.unit.read(text).ok_or_else(range)?;
    if !(key.min..=key.max).contains(&value) {
        return Err(range());
    }
    Ok((at, value))
}

impl fmt::Display for ModelSpec {
    /// Writes what differs from the preset, so that parsing it gives the same drive.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.preset.name)?;
        for ((key, value), usual) in KEYS.iter().zip(self.values).zip(self.preset.values) {
            if value != usual {
                write!(out, ",{}={}", key.name, key.unit.show(value))?;
            }
        }
        Ok(())
    }
}

impl Unit {
    fn says(self) -> &'static str {
        match self {
            Unit::Count => "a number",
            Unit::Bytes => "a size",
            Unit::Page => "a power of two",
            Unit::Micros => "a number of microseconds",
            Unit::Percent => "a percentage",
            Unit::Rate => "a number of MB/s",
        }
    }

    fn read(self, text: &str) -> Option<u64> {
        match self {
            Unit::Count | Unit::Rate => parse_decimal(text, 0),
            Unit::Bytes => parse_size(text).ok(),
            Unit::Page => parse_size(text).ok().filter(|size| size.is_power_of_two()),
            Unit::Micros => parse_decimal(text, 3),
            Unit::Percent => parse_decimal(text.strip_suffix('%').unwrap_or(text), 1),
        }
    }

    fn show(self, value: u64) -> String {
        match self {
            Unit::Count | Unit::Rate => value.to_string(),
            Unit::Bytes | Unit::Page => format_size(value),
            Unit::Micros => format_decimal(value, 3),
            Unit::Percent => format!("{}%", format_decimal(value, 1)),
        }
    }
}

/// Parses a decimal number and multiplies it by 10^`places`. `None`: not a number, too many decimals, or too large.
fn parse_decimal(text: &str, places: u32) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let fraction = if fraction == "0" { "" } else { fraction };
    let missing = places.checked_sub(u32::try_from(fraction.len()).ok()?)?;
    if !is_number(whole) || !(fraction.is_empty() || is_number(fraction)) || text.ends_with('.') {
        return None;
    }
    let digits: u64 = format!("{whole}{fraction}").parse().ok()?;
    digits.checked_mul(10_u64.pow(missing))
}

fn format_decimal(value: u64, places: u32) -> String {
    let unit = 10_u64.pow(places);
    let (whole, fraction) = (value / unit, value % unit);
    if fraction == 0 {
        return whole.to_string();
    }
    let fraction = format!("{fraction:0width$}", width = places as usize);
    format!("{whole}.{}", fraction.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_is_changed_by_what_is_given() {
        let spec: ModelSpec = "p3700,size=1G,seed=7,read_us=12.5,jitter=2.5%,write_buffer=0"
            .parse()
            .unwrap();
        let preset = "p3700".parse::<ModelSpec>().unwrap();
        assert_eq!((spec.size_bytes(), preset.size_bytes()), (1 << 30, 8 << 30));
        let expected = Drive {
            seed: 7,
            read_ns: 12_500,
            jitter_per_mille: 25,
            write_buffer_bytes: 0,
            ..preset.drive()
        };
        assert_eq!(spec.drive(), expected);
    }

    #[test]
    fn all_parameters_of_a_custom_drive_are_used() {
        let spec: ModelSpec = "custom,channels=8,read_us=50,write_us=500,mbps_per_channel=200,\
            page=16K,jitter=0,write_buffer=1M,command_us=0.5,window=4,link_mbps=1000,size=64M,seed=9"
            .parse()
            .unwrap();
        let expected = Drive {
            channels: 8,
            page_bytes: 16384,
            read_ns: 50_000,
            write_ns: 500_000,
            command_ns: 500,
            window: 4,
            transfer_ns: 81_920,
            link_ns: 16_384,
            jitter_per_mille: 0,
            write_buffer_bytes: 1 << 20,
            seed: 9,
        };
        assert_eq!((spec.drive(), spec.size_bytes()), (expected, 64 << 20));
    }

    #[test]
    fn values_out_of_range_are_refused_by_name_in_one_line() {
        for (text, named) in [
            ("", "p3700, p320h, flat, custom"),
            ("p9999", "`p9999`"),
            ("P3700", "`P3700`"),
            ("p3700,", "KEY=VALUE"),
            ("p3700,seed", "KEY=VALUE"),
            ("p3700,speed=1", "`speed` is not a parameter"),
            ("p3700,seed=1,seed=2", "twice"),
            ("p3700,size=0", "size=0"),
            ("p3700,size=x", "a size from 4K to 64T"),
            ("custom,channels=0", "channels is a number from 1 to 4096"),
            ("custom,channels=4097", "channels=4097"),
            ("custom,channels=-1", "channels=-1"),
            ("custom,channels=1.5", "channels=1.5"),
            ("custom,page=3000", "page is a power of two from 512 to 1M"),
            ("custom,page=256", "page=256"),
            ("custom,page=2M", "page=2M"),
            (
                "custom,read_us=0",
                "read_us is a number of microseconds from 0.001 to 100000",
            ),
            ("custom,read_us=100000.001", "read_us"),
            ("custom,read_us=0.0001", "read_us"),
            ("custom,read_us=1.", "read_us"),
            ("custom,read_us=.5", "read_us"),
            ("custom,write_us=1e3", "write_us"),
            ("custom,mbps_per_channel=0", "mbps_per_channel"),
            ("custom,link_mbps=1000001", "link_mbps"),
            ("custom,window=0", "window"),
            (
                "custom,jitter=100.1%",
                "jitter is a percentage from 0% to 100%",
            ),
            ("custom,jitter=%", "jitter"),
            ("custom,write_buffer=2T", "write_buffer"),
            ("custom,seed=18446744073709551616", "seed"),
        ] {
            let why = text.parse::<ModelSpec>().unwrap_err();
            assert!(why.contains(named) && !why.contains('\n'), "{text}: {why}");
            assert!(why.starts_with(&format!("model:{text}: ")), "{why}");
        }
    }

    #[test]
    fn display_reads_back() {
        for (text, shown) in [
            ("p3700", "p3700"),
            ("flat,jitter=0.5", "flat,jitter=0.5%"),
            (
                "p320h,seed=18446744073709551615",
                "p320h,seed=18446744073709551615",
            ),
            (
                "custom,read_us=0.001,size=1536M",
                "custom,size=1536M,read_us=0.001",
            ),
            ("custom,read_us=80,channels=3", "custom,channels=3"),
        ] {
            let spec: ModelSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), shown);
            assert_eq!(shown.parse(), Ok(spec));
        }
    }

    #[test]
    fn presets_are_in_range() {
        for preset in &PRESETS {
            for (key, value) in KEYS.iter().zip(preset.values) {
                assert!(
                    (key.min..=key.max).contains(&value),
                    "{} {}",
                    preset.name,
                    key.name
                );
            }
        }
    }
}
