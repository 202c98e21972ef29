//! What a disk is: every option of it, typed, in one place. This crate must not contain I/O, clocks, threads or anything of a
//! terminal, and of the crates below it uses values only: it turns texts into values, judges whether these agree, and turns them
//! into texts again.
//!
//! [`DiskConfig`] is the description of a disk: the options of `cleave serve`, the body of `PUT /v1/disks/{id}` and the file that
//! keeps a disk are this one type. Two descriptions are equal if they mean the same disk, however they are spelt. [`Change`] is the
//! part of it that can change while the disk is served, with everything left out that stays; [`DiskConfig::with`] is the
//! description after a change, or the reason why there is none. [`DiskConfig::check`] says whether the fields agree, and
//! [`DiskConfig::storage`] what there is to open.
//!
//! To add an option, add a line to the list in `disk.rs`: the parser of the command line, `--help`, `docs/options.md`, the OpenAPI
//! document, the file and the change follow from it.
#![forbid(unsafe_code)]

#[macro_use]
mod options;

mod change;
mod check;
mod disk;
mod file;
mod given;
mod id;
mod names;
mod storage;
mod values;

#[cfg(test)]
mod tests;

pub use change::{Setting, VringModes};
pub use disk::{Change, DiskConfig, Unlike};
pub use file::FILE_BYTES_MAX;
pub use given::{Given, given_only};
pub use id::{ID_CHARS_MAX, is_id};
pub use names::Names;
pub use storage::Storage;
pub use values::cpus::CpuList;
pub use values::labels::Labels;
pub use values::limits::{DiskLimits, LimitChange};
pub use values::mode::SocketMode;
pub use values::number::{Number, OrNone, QueueSize};
pub use values::policy::ErrorPolicy;
pub use values::serial::Serial;
pub use values::size::Size;
pub use values::spec::WrittenSpec;
pub use values::split::SplitOption;
pub use values::text::Text;
pub use values::words::{
    Cache, CompletionOption, FaceVersion, Persistent, StartState, Switch, When,
};
