//! Raw lines by point, subject and round: medians, and ratios of figures that were measured side by side.
//!
//! A line has `point` and `subject` (words), `round` (a number) and `result` (an object of numbers). Views name what they
//! want of a result by an expression: fields and numbers with operators between them, applied from left to right.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use cleave_chart::Spread;
use itertools::Itertools;
use serde_json::Value;

use crate::run_folder::RecordedRun;

/// Some of a suite's measurements.
#[derive(Clone)]
pub(super) struct Rounds<'a> {
    pub(super) lines: Vec<&'a Value>,
}

impl<'a> Rounds<'a> {
    /// Returns the lines of a suite; none where it left nothing.
    pub(super) fn of(run: &'a RecordedRun, suite: &str) -> Option<Rounds<'a>> {
        let lines = run.of(suite);
        (!lines.is_empty()).then_some(Rounds { lines })
    }

    /// Returns the lines for which all of the conditions hold.
    pub(super) fn only(&self, conditions: &[String]) -> Rounds<'a> {
        self.filter(|line| conditions.iter().all(|condition| holds(line, condition)))
    }

    /// Returns all texts that a template makes of the lines, in the order in which they were measured.
    pub(super) fn texts(&self, template: &str) -> Vec<String> {
        let texts = self.lines.iter().map(|line| filled(template, line));
        texts.unique().collect()
    }

    /// Returns the lines by such texts; an empty template makes an empty text of all.
    pub(super) fn divided(&self, template: &str) -> Vec<(String, Rounds<'a>)> {
        let texts = self.texts(template).into_iter();
        let parts = texts.map(|text| (text.clone(), self.that_say(template, &text)));
        parts.collect()
    }

    /// Returns the lines of which a template makes this text.
    pub(super) fn that_say(&self, template: &str, text: &str) -> Rounds<'a> {
        self.filter(|line| filled(template, line) == text)
    }

    pub(super) fn points(&self) -> Vec<String> {
        self.texts("{point}")
    }

    pub(super) fn subjects(&self) -> Vec<String> {
        self.texts("{subject}")
    }

    pub(super) fn at(&self, point: &str, subject: &str) -> Rounds<'a> {
        self.filter(|line| line["point"] == point && line["subject"] == subject)
    }

    fn filter(&self, is_wanted: impl Fn(&Value) -> bool) -> Rounds<'a> {
        let lines = self.lines.iter().copied();
        let lines = lines.filter(|line| is_wanted(line)).collect();
        Rounds { lines }
    }

    /// Median, minimum and maximum over all of the lines.
    pub(super) fn spread(&self, of: &str) -> Option<Spread> {
        let values = self.lines.iter().filter_map(|line| number(line, of));
        Spread::of(&values.collect::<Vec<f64>>())
    }

    /// Returns the ratios of these lines to those of `base`, in each of the rounds that both have.
    pub(super) fn ratio(&self, base: &Rounds<'_>, of: &str) -> Option<Spread> {
        let base = base.by_round(of);
        let own = self.by_round(of).into_iter();
        let ratios = own.filter_map(|(round, own)| {
            let base = base.get(&round).filter(|base| **base > 0.0)?;
            Some(own / base)
        });
        Spread::of(&ratios.collect::<Vec<f64>>())
    }

    fn by_round(&self, of: &str) -> BTreeMap<u64, f64> {
        let pair = |line: &&Value| Some((line["round"].as_u64()?, number(line, of)?));
        self.lines.iter().filter_map(pair).collect()
    }
}

/// Returns the value of an expression: `daemon_wakes_s + driver_wakes_s / iops` is the sum by the rate. `a or b` is b where a is
/// missing; `a?` is 0 where it is missing. A word that is not a number is a field of the line, or of its result.
pub(super) fn number(line: &Value, expression: &str) -> Option<f64> {
    let mut words = expression.split_whitespace();
    let mut value = word(line, words.next()?);
    while let (Some(operator), Some(name)) = (words.next(), words.next()) {
        let next = word(line, name);
        value = match operator {
            "or" => value.or(next),
            _ => value.zip(next).map(|(left, right)| match operator {
                "+" => left + right,
                "-" => left - right,
                "*" => left * right,
                _ => left / right,
            }),
        };
    }
    value.filter(|value| value.is_finite())
}

fn word(line: &Value, word: &str) -> Option<f64> {
    if let Ok(number) = word.parse() {
        return Some(number);
    }
    let name = word.trim_end_matches('?');
    let found = line["result"][name].as_f64().or(line[name].as_f64());
    found.or((name != word).then_some(0.0))
}

/// Returns a template with the line's own values in place of `{expression}`.
pub(super) fn filled(template: &str, line: &Value) -> String {
    let mut parts = template.split('{');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (expression, rest) = part.split_once('}').unwrap_or((part, ""));
        match (line[expression].as_str(), number(line, expression)) {
            (Some(word), _) => text += word,
            (None, Some(number)) => text += &format!("{number}"),
            (None, None) => text += "–",
        }
        text += rest;
    }
    text
}

/// `field=text`, `field!=text`, `field=front*`, `field=*end|another`, `field<=number`, `field>=number`; a template may stand
/// for the field.
fn holds(line: &Value, condition: &str) -> bool {
    for (sign, wrong) in [("<=", Ordering::Greater), (">=", Ordering::Less)] {
        if let Some((field, bound)) = condition.split_once(sign) {
            let bound: Option<f64> = bound.parse().ok();
            let order = number(line, field).and_then(|value| value.partial_cmp(&bound?));
            return order.is_some_and(|order| order != wrong);
        }
    }
    let Some((field, pattern)) = condition.split_once('=') else {
        return false;
    };
    let (field, is_wanted) = match field.strip_suffix('!') {
        Some(field) => (field, false),
        None => (field, true),
    };
    let template = match field.starts_with('{') {
        true => field.to_owned(),
        false => format!("{{{field}}}"),
    };
    matches(&filled(&template, line), pattern) == is_wanted
}

/// Returns true if a text is one of several, of which each may have a `*`.
pub(super) fn matches(text: &str, patterns: &str) -> bool {
    let is_it = |pattern: &str| match pattern.split_once('*') {
        None => text == pattern,
        Some((front, end)) => text
            .strip_prefix(front)
            .is_some_and(|rest| rest.ends_with(end)),
    };
    patterns.split('|').any(is_it)
}

/// Returns a number as a table shows it, with its spread.
pub(super) fn said(spread: Option<Spread>, digits: usize) -> String {
    let Some(spread) = spread else {
        return "–".to_owned();
    };
    let shown = [spread.median, spread.min, spread.max].map(|value| format!("{value:.digits$}"));
    match (shown, spread.count) {
        ([median, ..], 1) => median,
        ([median, min, max], _) => format!("{median} ({min}–{max})"),
    }
}

/// Returns a ratio as a table shows it; one whose rounds lie on both sides of 1 shows no difference.
pub(super) fn said_ratio(ratio: Option<Spread>) -> String {
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
        let all = [
            ("ours", 1, 30.0),
            ("theirs", 1, 10.0),
            ("theirs", 2, 20.0),
            ("ours", 2, 20.0),
            ("ours", 3, 3.0),
            ("theirs", 3, 1.0),
            ("ours", 4, 90.0),
        ];
        let lines = all.map(|(subject, round, iops)| line(subject, round, iops));
        let rounds = Rounds {
            lines: lines.iter().collect(),
        };
        let [own, base] = ["ours", "theirs"].map(|who| rounds.at("depth 1", who));
        assert_eq!(said(own.ratio(&base, "iops"), 2), "3.00 (1.00–3.00)");
        assert_eq!(own.ratio(&base, "mean_us"), None);
        assert_eq!(rounds.subjects(), ["ours", "theirs"]);
        assert_eq!(
            said(own.only(&["round=4".to_owned()]).spread("iops"), 0),
            "90"
        );
    }

    #[test]
    fn expressions_go_from_left_to_right_and_a_missing_field_makes_none() {
        let line = json!({"depth": 4, "result": {"iops": 10.0, "user": 0.25, "cpu": 8.0}});
        let table = [
            ("iops / 1e3", Some(0.01)),
            ("1 - user * cpu", Some(6.0)),
            ("iops + gone?", Some(10.0)),
            ("iops + gone", None),
            ("gone or cpu", Some(8.0)),
            ("iops / depth", Some(2.5)),
            ("iops / 0", None),
        ];
        for (expression, value) in table {
            assert_eq!(number(&line, expression), value, "{expression}");
        }
        assert_eq!(
            filled("{depth} × {iops / 2} of {gone}", &line),
            "4 × 5 of –"
        );
    }

    #[test]
    fn conditions_choose_lines() {
        let line = json!({"point": "depth 1, sleeps", "rate": 500, "result": {}});
        let table = [
            ("point=depth 1, sleeps", true),
            ("point=depth 1,*", true),
            ("point=*polls|*sleeps", true),
            ("point!=depth 1*", false),
            ("rate<=500", true),
            ("rate>=501", false),
            ("gone<=1", false),
        ];
        for (condition, wanted) in table {
            assert_eq!(holds(&line, condition), wanted, "{condition}");
        }
    }

    #[test]
    fn a_ratio_on_both_sides_of_one_is_called_noise() {
        let said = |values: &[f64]| said_ratio(Spread::of(values));
        assert!(said(&[0.9, 1.05, 1.1]).contains("noise"));
        assert_eq!(said(&[1.01, 1.05, 1.1]), "1.05 (1.01–1.10)");
        assert_eq!(said(&[]), "–");
    }
}
