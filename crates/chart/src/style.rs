//! How series look. A subject that the benchmarks compare has its colour and its shape by its name, so that it is found again in
//! each figure, whatever stands beside it there.

use plotters::prelude::*;

use crate::figure::Look;

/// Colour and shape of a subject, by the names that it has in small letters. No two have the same lightness, for paper without
/// colours, and none is mistaken for another by an eye that lacks red, green or blue.
const SUBJECTS: [(&[&str], RGBColor, usize); 8] = [
    (&["bare fio", "bare"], RGBColor(34, 34, 34), 0),
    (&["cleave adaptive"], RGBColor(0, 80, 155), 0),
    (&["virtio-blk in qemu"], RGBColor(127, 86, 51), 3),
    (&["spdk"], RGBColor(184, 71, 138), 3),
    (
        &["qemu-storage-daemon", "qsd vhost-user"],
        RGBColor(221, 99, 0),
        2,
    ),
    (&["cleave poll"], RGBColor(12, 167, 126), 3),
    (&["cleave interrupt"], RGBColor(99, 185, 236), 1),
    (
        &["qemu-storage-daemon, i/o thread"],
        RGBColor(240, 180, 41),
        1,
    ),
];
/// Colours of series with other names, in the order of the legend.
const OTHERS: [RGBColor; 6] = [
    RGBColor(136, 34, 85),
    RGBColor(181, 166, 66),
    RGBColor(227, 154, 164),
    RGBColor(79, 107, 31),
    RGBColor(142, 142, 142),
    RGBColor(75, 63, 153),
];
/// Colours of the parts of stacked bars, by name: a light and a dark one for each side.
const PARTS: [(&[&str], RGBColor); 4] = [
    (&["driver user", "guest"], RGBColor(221, 204, 119)),
    (&["driver kernel", "VMM"], RGBColor(140, 140, 44)),
    (&["daemon user", "backend, user"], RGBColor(227, 163, 171)),
    (&["daemon kernel", "backend, kernel"], RGBColor(136, 34, 85)),
];
pub(crate) const GREY: RGBColor = RGBColor(102, 102, 102);
pub(crate) const VERMILION: RGBColor = RGBColor(213, 94, 0);
/// Bars whose names say what they are.
const PLAIN: RGBColor = RGBColor(142, 142, 142);
/// Corners of a square, a triangle and a diamond. The first shape is a circle.
pub(crate) const SHAPES: [&[(f64, f64)]; 4] = [
    &[],
    &[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    &[(0.0, -1.2), (1.1, 0.8), (-1.1, 0.8)],
    &[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)],
];

/// Colour, shape and sizes of a series.
#[derive(Clone, Copy)]
pub(crate) struct Style {
    pub(crate) colour: RGBColor,
    pub(crate) shape: usize,
    pub(crate) stroke: u32,
    pub(crate) size: f64,
}

impl Style {
    /// Chooses the style of a subject. `None`: its colour depends on what it is shown with.
    pub(crate) fn of_subject(name: &str) -> Option<Style> {
        let name = name.to_lowercase();
        let mut all = SUBJECTS.iter();
        let (_, colour, shape) = all.find(|(names, ..)| names.contains(&name.as_str()))?;
        Some(Style::distinct(*colour, *shape))
    }

    /// Chooses a style by the place among series that are not in the table. No two of 24 have both colour and shape in common.
    pub(crate) fn of(look: Look, at: usize) -> Style {
        let (colour, stroke, size) = match look {
            Look::Distinct => {
                let shape = (at + at / OTHERS.len()) % SHAPES.len();
                return Style::distinct(OTHERS[at % OTHERS.len()], shape);
            }
            // The ramp's light end is too pale for white paper.
            Look::Ranked(rank) => (ViridisRGB.get_color(rank * 0.88), 2, 3.0),
            Look::Emphasised => (VERMILION, 4, 5.0),
        };
        Style {
            colour,
            shape: 0,
            stroke,
            size,
        }
    }

    /// Chooses the style of a bar that stands for the name below it.
    pub(crate) fn of_bar(name: &str) -> Style {
        Style::of_subject(name).unwrap_or_else(|| Style::distinct(PLAIN, 1))
    }

    /// Chooses the style of a part of a stacked bar.
    pub(crate) fn of_part(name: &str, at: usize) -> Style {
        let known = PARTS.iter().find(|(names, _)| names.contains(&name));
        let colour = known.map_or(OTHERS[at % OTHERS.len()], |(_, colour)| *colour);
        Style::distinct(colour, 1)
    }

    fn distinct(colour: RGBColor, shape: usize) -> Style {
        Style {
            colour,
            shape,
            stroke: 2,
            size: 4.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns L* of CIE 1976, from 0 to 100.
    fn lightness(RGBColor(r, g, b): RGBColor) -> f64 {
        let linear = |value: u8| (f64::from(value) / 255.0).powf(2.2);
        let luminance = 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
        116.0 * luminance.cbrt() - 16.0
    }

    #[test]
    fn subjects_can_be_told_apart_in_grey() {
        let lights = SUBJECTS.map(|(_, colour, _)| lightness(colour));
        let is_apart = |pair: &[f64]| pair[1] - pair[0] > 2.5;
        assert!(lights.windows(2).all(is_apart), "{lights:?}");
        assert!(lights[7] < 80.0, "too pale for white paper: {lights:?}");
    }
}
