//! From a value to a place on the paper, and where the ticks stand.

use super::Scale;
use super::words::{bytes, short};

/// About so many ticks on a linear axis.
const STEPS: f64 = 5.0;

/// A scale with its ends fixed.
pub(super) struct Span {
    scale: Scale,
    /// In the scale's own measure: the value itself, or its logarithm.
    low: f64,
    high: f64,
    step: f64,
}

impl Span {
    /// Wide enough for all of the values.
    pub(super) fn of(scale: Scale, values: impl Iterator<Item = f64>) -> Span {
        let placed = values.filter_map(|value| measure(scale, value));
        let ends = placed.fold(None, |ends: Option<(f64, f64)>, at| {
            Some(ends.map_or((at, at), |(low, high)| (low.min(at), high.max(at))))
        });
        let (low, high) = ends.unwrap_or((0.0, 1.0));
        match scale {
            Scale::Linear => Span::linear(low, high),
            Scale::Log10 => Span::log10(low, high),
            Scale::Log2 | Scale::Bytes => {
                let (low, high) = (low.floor(), high.ceil());
                Span {
                    scale,
                    low,
                    high: high.max(low + 1.0),
                    step: ((high - low) / 14.0).ceil().max(1.0),
                }
            }
        }
    }

    /// From zero, so that lengths may be compared.
    fn linear(low: f64, high: f64) -> Span {
        let (low, high) = (low.min(0.0), high.max(0.0));
        let step = nice((high - low) / STEPS);
        Span {
            scale: Scale::Linear,
            low: (low / step).floor() * step,
            high: ((high / step).ceil() * step).max(step),
            step,
        }
    }

    /// Whole decades, or 1, 2, 5 where there are few.
    fn log10(low: f64, high: f64) -> Span {
        let (low, high) = (round_125(low, f64::floor), round_125(high, f64::ceil));
        Span {
            scale: Scale::Log10,
            low,
            high: if high > low { high } else { low + 1.0 },
            step: 1.0,
        }
    }

    /// Between 0 and 1, where the value can be shown at all.
    pub(super) fn share(&self, value: f64) -> Option<f64> {
        let at = measure(self.scale, value)?;
        Some((at - self.low) / (self.high - self.low))
    }

    /// Values and their words, from low to high.
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        let said = |value: f64| match self.scale {
            Scale::Bytes => bytes(value),
            _ => short(value),
        };
        self.tick_values()
            .into_iter()
            .map(|value| (value, said(value)))
            .collect()
    }

    fn tick_values(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let count = ((self.high - self.low) / self.step).round() as i64;
                let at = |number: i64| self.low + number as f64 * self.step;
                (0..=count.clamp(1, 50)).map(at).collect()
            }
            Scale::Log2 | Scale::Bytes => {
                let count = ((self.high - self.low) / self.step) as i64;
                let at = |number: i64| (self.low + number as f64 * self.step).exp2();
                (0..=count.clamp(1, 50)).map(at).collect()
            }
            Scale::Log10 => self.decades(),
        }
    }

    fn decades(&self) -> Vec<f64> {
        // Many decades need no ticks between them.
        let times: &[f64] = match self.high - self.low {
            wide if wide > 3.2 => &[1.0],
            _ => &[1.0, 2.0, 5.0],
        };
        let (first, last) = (self.low.floor() as i32, self.high.ceil() as i32);
        let mut values = Vec::new();
        for power in first..=last.min(first.saturating_add(40)) {
            values.extend(times.iter().map(|times| times * 10_f64.powi(power)));
        }
        let inside = |value: &f64| {
            self.share(*value)
                .is_some_and(|share| (-1e-9..=1.0 + 1e-9).contains(&share))
        };
        values.into_iter().filter(inside).collect()
    }
}

/// None for what the scale cannot hold.
fn measure(scale: Scale, value: f64) -> Option<f64> {
    let is_log = scale != Scale::Linear;
    if !value.is_finite() || (is_log && value <= 0.0) {
        return None;
    }
    Some(match scale {
        Scale::Linear => value,
        Scale::Log10 => value.log10(),
        Scale::Log2 | Scale::Bytes => value.log2(),
    })
}

/// The nearest logarithm of 1, 2 or 5 times a power of ten, in the direction of `to`.
fn round_125(log: f64, to: fn(f64) -> f64) -> f64 {
    let marks = [0.0, 2_f64.log10(), 5_f64.log10(), 1.0];
    let (whole, rest) = (log.floor(), log - log.floor());
    let is_up = to(0.5) > 0.5;
    let fits = |mark: &f64| {
        if is_up {
            *mark >= rest - 1e-9
        } else {
            *mark <= rest + 1e-9
        }
    };
    let found = if is_up {
        marks.into_iter().find(fits)
    } else {
        marks.into_iter().rev().find(fits)
    };
    whole + found.unwrap_or(rest)
}

/// The least 1, 2 or 5 times a power of ten that is no less.
fn nice(step: f64) -> f64 {
    let power = 10_f64.powf(step.max(1e-12).log10().floor());
    let times = [1.0, 2.0, 5.0]
        .into_iter()
        .find(|times| times * power >= step * (1.0 - 1e-9));
    times.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(scale: Scale, values: &[f64]) -> String {
        let span = Span::of(scale, values.iter().copied());
        let ticks = span.ticks();
        for value in values {
            let share = span.share(*value).unwrap();
            assert!(
                (-1e-9..=1.0 + 1e-9).contains(&share),
                "{value} lies outside"
            );
        }
        let said: Vec<String> = ticks.into_iter().map(|(_, said)| said).collect();
        said.join(" ")
    }

    #[test]
    fn ticks_are_round_and_hold_all_values() {
        let table = [
            (Scale::Linear, &[3.0, 880.0][..], "0 200 400 600 800 1000"),
            (Scale::Linear, &[0.2, 1.3], "0 0.5 1 1.5"),
            (Scale::Log10, &[30.0, 900.0], "20 50 100 200 500 1000"),
            (Scale::Log10, &[1.0, 50_000.0], "1 10 100 1000 10k"),
            (Scale::Log2, &[1.0, 16.0], "1 2 4 8 16"),
            (Scale::Bytes, &[512.0, 4096.0], "512 1K 2K 4K"),
        ];
        for (scale, values, said) in table {
            assert_eq!(words(scale, values), said, "{scale:?} {values:?}");
        }
    }

    #[test]
    fn one_value_and_none_still_make_an_axis() {
        for scale in [Scale::Linear, Scale::Log10, Scale::Log2, Scale::Bytes] {
            for values in [&[][..], &[8.0], &[0.0], &[f64::NAN]] {
                let span = Span::of(scale, values.iter().copied());
                assert!(
                    span.high > span.low && span.ticks().len() > 1,
                    "{scale:?} {values:?}"
                );
            }
        }
    }
}
