//! Figures of measurements as SVG. This crate forbids files, clocks and unsafe code: a [`Figure`] is a
//! value, [`svg`] is a pure function of it, and the same figure always has the same text.
#![forbid(unsafe_code)]

mod axis;
mod draw;
mod figure;
mod legend;
mod panel;
mod style;
mod text;

pub use axis::{Axis, Scale};
pub use draw::svg;
pub use figure::{Figure, Marks, Panel, Series, Spread};
pub use text::escaped;

#[cfg(test)]
mod tests;
