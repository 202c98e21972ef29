//! Settings of a few words.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use serde::{Deserialize, Serialize};

use super::text::{Text, shown};

/// The cache mode of a disk: when a completed write is durable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Cache {
    /// A write is durable when the guest flushes.
    #[default]
    Writeback,
    /// A write is durable when it completes.
    Writethrough,
}

/// The device that a guest sees, by version.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum FaceVersion {
    /// The first.
    #[default]
    V1,
}

/// When a feature is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum When {
    /// Always.
    On,
    /// Never.
    Off,
    /// Where it can be.
    #[default]
    Auto,
}

/// How a worker waits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum CompletionOption {
    /// A worker without work sleeps.
    Interrupt,
    /// A worker without work spins.
    Poll,
    /// A worker without work spins where that pays, and sleeps otherwise.
    #[default]
    Adaptive,
}

/// When a disk's locks are taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum StartState {
    /// When it is opened.
    #[default]
    Active,
    /// Before a guest that moves here uses it.
    Inactive,
}

/// A setting that is on or off, and `DEFAULT` if it is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Switch<const DEFAULT: bool>(bool);

impl<const DEFAULT: bool> Switch<DEFAULT> {
    /// Returns true if it is on.
    pub const fn is_on(self) -> bool {
        self.0
    }
}

impl<const DEFAULT: bool> Default for Switch<DEFAULT> {
    fn default() -> Switch<DEFAULT> {
        Switch(DEFAULT)
    }
}

impl<const DEFAULT: bool> ValueEnum for Switch<DEFAULT> {
    fn value_variants<'a>() -> &'a [Switch<DEFAULT>] {
        &[Switch(true), Switch(false)]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(if self.0 { "on" } else { "off" }))
    }
}

/// Returns the names of all words of a type.
fn names<T: ValueEnum>() -> Vec<String> {
    let each = T::value_variants().iter();
    each.map(name).collect()
}

fn name<T: ValueEnum>(word: &T) -> String {
    let value = word.to_possible_value();
    value.map_or(String::new(), |value| value.get_name().to_owned())
}

fn parse<T: ValueEnum + Clone>(text: &str) -> Result<T, String> {
    T::from_str(text, false).map_err(|_| {
        format!(
            "{:?} is not one of {}",
            shown(text),
            names::<T>().join(", ")
        )
    })
}

/// Reads, shows and describes a type as one of its words.
macro_rules! as_word {
    ([$($parameters:tt)*] $type:ty, $name:literal) => {
        impl<$($parameters)*> FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                parse(text)
            }
        }

        impl<$($parameters)*> fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&name(self))
            }
        }

        impl<$($parameters)*> Text for $type {
            const EXPECTED: &'static str = "a word";

            fn words() -> Vec<PossibleValue> {
                let each = Self::value_variants().iter();
                each.filter_map(ValueEnum::to_possible_value).collect()
            }
        }

        as_text!([$($parameters)*] $type);

        described!([$($parameters)*] $type, $name, {"type": "string", "enum": names::<Self>()});
    };
}

as_word!([] Cache, "Cache");
as_word!([] FaceVersion, "FaceVersion");
as_word!([] When, "When");
as_word!([] CompletionOption, "CompletionOption");
as_word!([] StartState, "StartState");
as_word!([const DEFAULT: bool] Switch<DEFAULT>, "Switch");

impl From<When> for cleave_disk::Direct {
    fn from(when: When) -> cleave_disk::Direct {
        match when {
            When::On => cleave_disk::Direct::On,
            When::Off => cleave_disk::Direct::Off,
            When::Auto => cleave_disk::Direct::Auto,
        }
    }
}

impl From<FaceVersion> for cleave_blk::Face {
    fn from(version: FaceVersion) -> cleave_blk::Face {
        match version {
            FaceVersion::V1 => cleave_blk::Face::V1,
        }
    }
}

impl From<StartState> for cleave_disk::Locking {
    fn from(start: StartState) -> cleave_disk::Locking {
        match start {
            StartState::Active => cleave_disk::Locking::AtOpen,
            StartState::Inactive => cleave_disk::Locking::Later,
        }
    }
}

impl From<CompletionOption> for cleave_worker::CompletionPolicy {
    fn from(wait: CompletionOption) -> cleave_worker::CompletionPolicy {
        match wait {
            CompletionOption::Interrupt => cleave_worker::CompletionPolicy::Interrupt,
            CompletionOption::Poll => cleave_worker::CompletionPolicy::Poll,
            CompletionOption::Adaptive => cleave_worker::CompletionPolicy::Adaptive,
        }
    }
}

impl From<cleave_worker::CompletionPolicy> for CompletionOption {
    fn from(completion: cleave_worker::CompletionPolicy) -> CompletionOption {
        match completion {
            cleave_worker::CompletionPolicy::Interrupt => CompletionOption::Interrupt,
            cleave_worker::CompletionPolicy::Poll => CompletionOption::Poll,
            cleave_worker::CompletionPolicy::Adaptive => CompletionOption::Adaptive,
        }
    }
}

/// True for a disk that is served again when its node starts again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Persistent(pub bool);

impl Default for Persistent {
    fn default() -> Persistent {
        Persistent(true)
    }
}

impl fmt::Display for Persistent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Persistent {
    type Err = String;

    fn from_str(text: &str) -> Result<Persistent, String> {
        let parsed = text.parse().map(Persistent);
        parsed.map_err(|_| format!("{:?} is not one of true, false", shown(text)))
    }
}

impl Text for Persistent {
    const EXPECTED: &'static str = "true or false";

    fn words() -> Vec<PossibleValue> {
        ["true", "false"].map(PossibleValue::new).to_vec()
    }
}

described!([] Persistent, "Persistent", {"type": "boolean"});
