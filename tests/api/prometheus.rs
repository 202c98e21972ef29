//! A strict little reader of the Prometheus text format.

use std::collections::{BTreeMap, BTreeSet};

/// Labels, sorted by name.
pub(crate) type Labels = BTreeMap<String, String>;

/// One metric family.
#[derive(Debug, Default)]
pub(crate) struct Family {
    pub(crate) kind: String,
    /// Suffix (`_bucket`, `_sum`, `_count` or none), labels, value.
    pub(crate) samples: Vec<(String, Labels, f64)>,
}

/// Reads a whole text, or says what is wrong with it. Stricter than the format: HELP and TYPE come
/// first and once, families are not mixed, no sample comes twice, and histograms add up.
pub(crate) fn parse(text: &str) -> Result<BTreeMap<String, Family>, String> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut current = String::new();
    let mut seen = BTreeSet::new();
    if !text.ends_with('\n') {
        return Err("the last line has no end".to_owned());
    }
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').ok_or(format!("no help in {line}"))?;
            if help.is_empty() || families.contains_key(name) {
                return Err(format!("help of {name}"));
            }
            valid_name(name)?;
            current = name.to_owned();
            families.insert(current.clone(), Family::default());
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let family = families.get_mut(&current).ok_or("a type without help")?;
            let (name, kind) = rest.split_once(' ').ok_or("a type without a type")?;
            if name != current || !family.kind.is_empty() {
                return Err(format!("type of {name} within {current}"));
            }
            if !["counter", "gauge", "histogram"].contains(&kind) {
                return Err(format!("no type is called {kind}"));
            }
            family.kind = kind.to_owned();
        } else {
            let (name, labels, value) = sample(line)?;
            let family = families.get_mut(&current).ok_or("a sample without help")?;
            let suffix = name
                .strip_prefix(current.as_str())
                .ok_or(format!("{name} within {current}"))?;
            let fits = match family.kind.as_str() {
                "histogram" => ["_bucket", "_sum", "_count"].contains(&suffix),
                "counter" => suffix.is_empty() && current.ends_with("_total"),
                "gauge" => suffix.is_empty() && !current.ends_with("_total"),
                _ => false,
            };
            if value < 0.0 && family.kind != "gauge" {
                return Err(format!("{line}: a {} below 0", family.kind));
            }
            if !fits {
                return Err(format!("{name} in a {} called {current}", family.kind));
            }
            if !seen.insert((name.to_owned(), labels.clone())) {
                return Err(format!("{line} twice"));
            }
            family.samples.push((suffix.to_owned(), labels, value));
        }
    }
    families.iter().try_for_each(|(name, family)| {
        histogram_adds_up(family).map_err(|why| format!("{name}: {why}"))
    })?;
    Ok(families)
}

fn valid_name(name: &str) -> Result<(), String> {
    let prefixes = ["cleave_", "process_"];
    let sound = prefixes.iter().any(|prefix| name.starts_with(prefix))
        && name
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    sound.then_some(()).ok_or(format!("{name} is not a name"))
}

fn sample(line: &str) -> Result<(&str, Labels, f64), String> {
    let bad = || format!("no sample: {line}");
    let end = line.find(['{', ' ']).ok_or_else(bad)?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Labels::new();
    if let Some(inner) = rest.strip_prefix('{') {
        let (found, after) = read_labels(inner).ok_or_else(bad)?;
        labels = found;
        rest = after;
    }
    let value = rest.strip_prefix(' ').ok_or_else(bad)?;
    let value: f64 = value.parse().map_err(|_| bad())?;
    if !value.is_finite() {
        return Err(bad());
    }
    Ok((name, labels, value))
}

/// Up to the closing brace; what follows it.
fn read_labels(mut rest: &str) -> Option<(Labels, &str)> {
    let mut labels = Labels::new();
    loop {
        let (name, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next()?.1 {
                    'n' => '\n',
                    c @ ('\\' | '"') => c,
                    _ => return None,
                }),
                (_, c) => value.push(c),
            }
        };
        labels
            .insert(name.to_owned(), value)
            .is_none()
            .then_some(())?;
        rest = &after[end + 1..];
        match rest.split_at_checked(1)? {
            ("}", after) => return Some((labels, after)),
            (",", after) => rest = after,
            _ => return None,
        }
    }
}

fn histogram_adds_up(family: &Family) -> Result<(), String> {
    if family.kind != "histogram" {
        return Ok(());
    }
    let mut groups: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
    for (suffix, labels, value) in &family.samples {
        if suffix == "_bucket" {
            let mut labels = labels.clone();
            let bound = labels.remove("le").ok_or("a bucket without a bound")?;
            let bound = if bound == "+Inf" {
                f64::INFINITY
            } else {
                bound.parse().map_err(|_| bound)?
            };
            groups.entry(labels).or_default().push((bound, *value));
        }
    }
    for (labels, buckets) in groups {
        if !buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1) {
            return Err(format!("buckets of {labels:?}: {buckets:?}"));
        }
        let find = |suffix: &str| {
            let found = family
                .samples
                .iter()
                .find(|(s, l, _)| s == suffix && *l == labels);
            found
                .map(|found| found.2)
                .ok_or(format!("no {suffix} of {labels:?}"))
        };
        let last = buckets.last().copied();
        if last != Some((f64::INFINITY, find("_count")?)) {
            return Err(format!("{last:?} is not the count of {labels:?}"));
        }
        find("_sum")?;
    }
    Ok(())
}

/// The sum of a family's samples that have these labels.
pub(crate) fn sum(families: &BTreeMap<String, Family>, name: &str, with: &[(&str, &str)]) -> f64 {
    let family = families.get(name).unwrap_or_else(|| panic!("no {name}"));
    let fits = |labels: &Labels| {
        with.iter()
            .all(|(name, value)| labels.get(*name).is_some_and(|found| found == value))
    };
    let samples = family.samples.iter().filter(|(_, labels, _)| fits(labels));
    samples.map(|(_, _, value)| value).sum()
}

#[test]
fn the_reader_is_strict() {
    let head = "# HELP cleave_a_total Help.\n# TYPE cleave_a_total counter\n";
    let histogram = "# HELP cleave_h_seconds Help.\n# TYPE cleave_h_seconds histogram\n";
    for (text, sound) in [
        (
            format!("{head}cleave_a_total{{x=\"a\\\"\\n\\\\\"}} 1\n"),
            true,
        ),
        (
            format!("{head}cleave_a_total 1\ncleave_a_total{{x=\"1\"}} 2\n"),
            true,
        ),
        (format!("{head}cleave_a_total 1\ncleave_a_total 1\n"), false),
        (format!("{head}cleave_a_total 1"), false),
        (format!("{head}cleave_a_total -1\n"), false),
        (format!("{head}cleave_a_total NaN\n"), false),
        (format!("{head}cleave_b_total 1\n"), false),
        (format!("{head}cleave_a_total{{x=1}} 1\n"), false),
        (format!("{head}{head}"), false),
        ("cleave_a_total 1\n".to_owned(), false),
        (
            format!(
                "{histogram}cleave_h_seconds_bucket{{le=\"1\"}} 1\ncleave_h_seconds_bucket{{le=\"+Inf\"}} 2\n\
                 cleave_h_seconds_sum 1\ncleave_h_seconds_count 2\n"
            ),
            true,
        ),
        (
            format!(
                "{histogram}cleave_h_seconds_bucket{{le=\"1\"}} 3\ncleave_h_seconds_bucket{{le=\"+Inf\"}} 2\n\
                 cleave_h_seconds_sum 1\ncleave_h_seconds_count 2\n"
            ),
            false,
        ),
        (
            format!(
                "{histogram}cleave_h_seconds_bucket{{le=\"+Inf\"}} 2\ncleave_h_seconds_sum 1\ncleave_h_seconds_count 1\n"
            ),
            false,
        ),
    ] {
        assert_eq!(parse(&text).is_ok(), sound, "{text}{:?}", parse(&text));
    }
}
