//! Speaks to Ceph through librbd, which it loads at run time. This crate must not know disks, requests, guests or reactors: it has
//! images ([`Image`]), and an [`Inbox`] in which what librbd completed on its threads waits for one thread of ours.
//!
//! It may use unsafe code, because librbd is a C library. Its functions are safe but for those that give librbd memory to read or
//! write ([`Image::read`], [`Image::write`]).

mod calls;
mod error;
mod image;
mod inbox;
mod lock;
mod opener;
mod place;
mod settings;

pub use error::RbdError;
pub use image::{Closing, Image, ImageAccess, Thickness};
pub use inbox::Inbox;
pub use opener::start_opener;
pub use place::ImagePlace;
pub use settings::RiskySetting;
