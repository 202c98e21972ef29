//! Rates at which requests are offered.

/// Rounds a rate to two digits, 1234 to 1200, which is as many as a reader needs.
pub(crate) fn two_digits(value: f64) -> f64 {
    let unit = 10_f64.powf(value.max(1.0).log10().floor() - 1.0);
    (value / unit).round() * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_said_in_two_digits() {
        for (value, said) in [
            (100.0, 100.0),
            (1234.0, 1200.0),
            (98_765.0, 99_000.0),
            (7.2, 7.2),
        ] {
            assert!((two_digits(value) - said).abs() < 1e-6, "{value}");
        }
    }
}
