//! Raw lines by point, subject and round: medians, and ratios of what was measured side by side.
//!
//! A line has `point` and `subject` (words), `round` (a number) and `result` (an object of numbers).

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Recorded, Spread};

/// A suite's measurements.
pub(crate) struct Rounds<'a> {
    lines: Vec<&'a Value>,
}

impl<'a> Rounds<'a> {
    /// Of a suite; none where it left nothing.
    pub(crate) fn of(run: &'a Recorded, suite: &str) -> Option<Rounds<'a>> {
        let lines = run.of(suite);
        (!lines.is_empty()).then_some(Rounds { lines })
    }

    /// Those of its lines that `keep` wants.
    pub(crate) fn only(&self, keep: impl Fn(&Value) -> bool) -> Rounds<'a> {
        let lines = self.lines.iter().copied().filter(|line| keep(line));
        Rounds {
            lines: lines.collect(),
        }
    }

    /// The lines themselves.
    pub(crate) fn lines(&self) -> &[&'a Value] {
        &self.lines
    }

    /// All points, in the order in which they were measured.
    pub(crate) fn points(&self) -> Vec<String> {
        self.words("point")
    }

    /// All subjects, in the order in which they were measured first.
    pub(crate) fn subjects(&self) -> Vec<String> {
        self.words("subject")
    }

    fn words(&self, name: &str) -> Vec<String> {
        let mut words: Vec<String> = Vec::new();
        for word in self.lines.iter().filter_map(|line| line[name].as_str()) {
            if !words.iter().any(|known| known == word) {
                words.push(word.to_owned());
            }
        }
        words
    }

    /// A number of each round.
    fn values(
        &self,
        point: &str,
        subject: &str,
        of: &dyn Fn(&Value) -> Option<f64>,
    ) -> BTreeMap<u64, f64> {
        let is_meant = |line: &&&Value| line["point"] == point && line["subject"] == subject;
        let pair = |line: &&Value| {
            let value = of(&line["result"]).filter(|value| value.is_finite())?;
            Some((line["round"].as_u64()?, value))
        };
        self.lines
            .iter()
            .filter(is_meant)
            .filter_map(pair)
            .collect()
    }

    /// Median, minimum and maximum of a number over the rounds.
    pub(crate) fn spread(
        &self,
        point: &str,
        subject: &str,
        of: impl Fn(&Value) -> Option<f64>,
    ) -> Option<Spread> {
        let values: Vec<f64> = self.values(point, subject, &of).into_values().collect();
        Spread::of(&values)
    }

    /// Of the rounds in which both were measured: `own` by `base`, one by one.
    pub(crate) fn ratio(
        &self,
        point: &str,
        own: &str,
        base: &str,
        of: impl Fn(&Value) -> Option<f64>,
    ) -> Option<Spread> {
        self.ratio_of((point, own), (point, base), of)
    }

    /// The same where the points differ too.
    pub(crate) fn ratio_of(
        &self,
        own: (&str, &str),
        base: (&str, &str),
        of: impl Fn(&Value) -> Option<f64>,
    ) -> Option<Spread> {
        let (own, base) = (
            self.values(own.0, own.1, &of),
            self.values(base.0, base.1, &of),
        );
        let ratio = |(round, own): (&u64, &f64)| {
            let base = base.get(round).copied().filter(|base| *base > 0.0)?;
            Some(own / base)
        };
        let ratios: Vec<f64> = own.iter().filter_map(ratio).collect();
        Spread::of(&ratios)
    }
}

/// A number of a result, by its name.
pub(crate) fn field(name: &'static str) -> impl Fn(&Value) -> Option<f64> + Copy {
    move |result: &Value| result[name].as_f64()
}

/// Cost of both sides together; a side that does not exist costs nothing.
pub(crate) fn both_cpu_us(result: &Value) -> Option<f64> {
    let driver = result["driver_cpu_us"].as_f64()?;
    Some(driver + result["daemon_cpu_us"].as_f64().unwrap_or(0.0))
}

/// A number as a table shows it, with its spread.
pub(crate) fn said(spread: Option<Spread>, digits: usize) -> String {
    spread.map_or_else(
        || "–".to_owned(),
        |spread| {
            let Spread {
                median, min, max, ..
            } = spread;
            format!("{median:.digits$} ({min:.digits$}–{max:.digits$})")
        },
    )
}

/// A ratio as a table shows it; one whose rounds lie on both sides of 1 is no difference.
pub(crate) fn said_ratio(ratio: Option<Spread>) -> String {
    match ratio {
        Some(spread) if spread.min < 1.0 && 1.0 < spread.max => {
            format!("{spread} ≈ 1 within the noise")
        }
        _ => said(ratio, 2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn line(subject: &str, round: u64, iops: f64) -> Value {
        json!({"point": "depth 1", "subject": subject, "round": round, "result": {"iops": iops}})
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        // The medians' ratio would be 2; two of three rounds say 3. A round that only one side has does not count.
        let lines = [
            line("ours", 1, 30.0),
            line("theirs", 1, 10.0),
            line("theirs", 2, 20.0),
            line("ours", 2, 20.0),
            line("ours", 3, 3.0),
            line("theirs", 3, 1.0),
            line("ours", 4, 90.0),
        ];
        let rounds = Rounds {
            lines: lines.iter().collect(),
        };
        let ratio = rounds.ratio("depth 1", "ours", "theirs", field("iops"));
        assert_eq!(said(ratio, 2), "3.00 (1.00–3.00)");
        assert_eq!(
            rounds.ratio("depth 2", "ours", "theirs", field("iops")),
            None
        );
        assert_eq!(
            rounds.ratio("depth 1", "ours", "theirs", field("mean_us")),
            None
        );
        assert_eq!(rounds.subjects(), ["ours", "theirs"]);
    }

    #[test]
    fn a_ratio_on_both_sides_of_one_is_called_noise() {
        let said = |values: &[f64]| said_ratio(Spread::of(values));
        assert!(said(&[0.9, 1.05, 1.1]).contains("noise"));
        assert_eq!(said(&[1.01, 1.05, 1.1]), "1.05 (1.01–1.10)");
        assert_eq!(said(&[]), "–");
    }
}
